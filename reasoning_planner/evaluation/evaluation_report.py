"""One replay evaluation, over all its bags, as one HTML page that needs no network.

Numbers come from the rows and their summary, pictures from `drawing.py` and `report.py`, the
layout from `templates/evaluation.html.j2`. Every metric's definition is on the page.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Mapping, Optional, Sequence

import cv2
import numpy as np

from .. import path_drawing
from . import drawing
from .aggregate import mean, means
from .bag_job import camera_of
from .comfort import BOUNDS, EXTENDED_BOUNDS
from .definitions import (ACCURACY, COMFORT, CONSISTENCY, COVERAGE, METRICS, REASONING, TIME,
                          Metric)
from .drawing import Series
from .metrics import HORIZONS_S
from .moments import WORST, Moment, decoded, read_moments, spaced
from .records import STAGES
from .report import (above_view, headline_horizon, number, planner_notes, speed_view, template)
from .score_table import Table
from .scores import DRAFTED
from .summary import replace_text

DETAILED_BAGS = 12              # with map and course of the error; the worst ones of more
GROUPS = (ACCURACY, COMFORT, CONSISTENCY, REASONING, TIME, COVERAGE)


def write_report(path: Path, summary: Mapping[str, Any], table: Table,
                 results: Sequence[Mapping[str, Any]], folders: Mapping[str, Path]) -> None:
    """Write the page.

    Args:
        summary: of the run, as written to summary.json.
        table: the rows of all bags.
        results: what each bag's result.json holds.
        folders: bag name -> its folder, where the moments lie.
    """
    replace_text(path, render(summary, table, results, worst_moments(results, folders)))


def worst_moments(results: Sequence[Mapping[str, Any]],
                  folders: Mapping[str, Path]) -> list[Moment]:
    """The worst of all bags, worst first."""
    found = [moment for result in results for moment in read_moments(folders[result["name"]])]
    return spaced(sorted(found, key=lambda m: (-m.severity, m.row["bag"], m.row["stamp_ns"])),
                  WORST)


def render(summary: Mapping[str, Any], table: Table, results: Sequence[Mapping[str, Any]],
           moments: Sequence[Moment]) -> str:
    """The whole page as HTML text."""
    horizon = headline_horizon(summary)
    speed_range = _speed_range(moments)
    by_name = {result["name"]: result for result in results}
    return template("evaluation.html.j2").render(
        summary=summary, results=results, horizon=horizon,
        horizons=[f"{h:g}" for h in HORIZONS_S], run=run_rows(summary, results),
        notes=planner_notes(summary["planners"], {}), with_model=summary["model"] is not None,
        moments=[moment_view(m, by_name[m.row["bag"]], speed_range) for m in moments],
        speed_range=speed_range, speed_stops=[f"rgb{stop}" for stop in path_drawing.SPEED_STOPS],
        error_svg=error_view(table, summary["model"] is not None),
        spread_svg=spread_view(table, horizon),
        comfort=_comfort_rows(table), share=share,
        extended=_extended_rows(table), words=agreement_rows(table),
        origins=_origin_rows(table), time_svg=time_view(table), stages=STAGES,
        statuses=list(summary["plans_by_status"].items()),
        reasons=Counter(reason for text in table["reasons"] for reason in text.split("; ")
                        if reason).most_common(),
        bags=[bag_view(result, table, horizon, summary["model"] is not None)
              for result in detailed(results, summary)],
        groups=[(group, [m for m in METRICS if m.group == group]) for group in GROUPS],
        scored_words=sum(1 for value in table["agreement"] if np.isfinite(value)))


def run_rows(summary: Mapping[str, Any],
             results: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """(name, value) rows of what was run, on what."""
    hardware = summary["hardware"]
    mode = {"lockstep": "lockstep: every image is planned for, planning takes no time",
            "realtime": "real time: images that come while the planner plans are dropped",
            }.get(summary["mode"], "odometry only: no camera was read")
    rows = [("Bags", f"{summary['bag_count']}, {summary['duration_s']:.0f} s, "
             f"{summary['driven_m']:.0f} m driven"), ("Mode", mode),
            ("Planner", ", ".join(summary["planners"]) or "none"),
            ("Model", str(summary["model"] or "none")),
            ("Runtime", str(summary["runtime"] or "none")),
            ("Samples for each observation", str(summary["samples_k"])),
            ("Machine", f"{hardware['cpu']}, {hardware['cores']} cores, "
             f"{hardware['memory_gib']} GiB"), ("GPU", str(hardware["gpu"] or "none")),
            ("System", f"{hardware['os']}, Python {hardware['python']}")]
    if summary["rate"] is not None:
        rows[2:2] = [("Speed of the bag", f"{summary['rate']:g}"),
                     ("Deadline of a cycle", f"{summary['deadline_s']:g} s")]
    if len(results) == 1:
        rows[0] = ("Bag", str(results[0]["bag"]))
    return rows


def _metric(name: str) -> Metric:
    return next(metric for metric in METRICS if metric.name == name)


# Numbers for tables

def _comfort_rows(table: Table) -> list[tuple[str, str, Any]]:
    """(title, bounds, share) of the checks, then of cornering."""
    rows = []
    for name in (*BOUNDS, "cornering"):
        metric = _metric(f"comfort_{name}")
        rows.append((metric.title, metric.definition, _known(means(table, metric))))
    return rows


def _extended_rows(table: Table) -> list[tuple[str, str, Any]]:
    """(title, unit, mean) of the differences between consecutive plans."""
    metrics = [_metric(f"extended_{name}") for name in EXTENDED_BOUNDS]
    return [(metric.title, metric.unit, _known(means(table, metric))) for metric in metrics]


def _known(value: float) -> Optional[float]:
    return value if np.isfinite(value) else None


def agreement_rows(table: Table) -> list[tuple[str, int, Optional[float], str]]:
    """(word said, plans, share that agrees, what those paths do most) by word, commonest first."""
    said = Counter(word for word, tokens in zip(table["said"], table["tokens"])
                   if np.isfinite(tokens))
    rows = []
    for word, count in said.most_common():
        mine = np.array([s == word and np.isfinite(t) for s, t in
                         zip(table["said"], table["tokens"])], dtype=bool)
        does = Counter(table["done"][i] for i in np.flatnonzero(mine)).most_common(2)
        rows.append((word.replace("_", " ") or "(unknown opening)", count,
                     _known(mean(table["agreement"][mine])),
                     "; ".join(f"{what} ({n})" for what, n in does)))
    return rows


def _origin_rows(table: Table) -> list[tuple[str, Any]]:
    names = ("tokens", "rounds", "tokens_per_pass", "acceptance_rate", "drafted_share",
             "draft_mismatch")
    return [(_metric(name).title, _known(means(table, _metric(name)))) for name in names]


# Charts

def error_view(table: Table, with_kinematic: bool) -> Optional[str]:
    """Mean distance over the horizon of plan and baselines, and the plan's 90th percentile."""
    seconds = np.array(HORIZONS_S)
    stems = {"baseline": "cv_fde_m", **({"kinematic": "kinematic_fde_m"} if with_kinematic
                                        else {}), "plan": "fde_m"}
    lines = {css: np.array([mean(table[f"{stem}@{h:g}"]) for h in HORIZONS_S])
             for css, stem in stems.items()}
    if not np.isfinite(lines["plan"]).any():
        return None
    high = np.array([_percentile(table[f"fde_m@{h:g}"], 90.0) for h in HORIZONS_S])
    origin = {css: np.concatenate([[0.0], values]) for css, values in lines.items()}
    seconds = np.concatenate([[0.0], seconds])
    return drawing.line_chart(
        [Series(seconds, np.concatenate([[0.0], high]), "plan faint"),
         *(Series(seconds, values, css) for css, values in origin.items())],
        "seconds after t0", "metres from the driven position", "Error over the horizon",
        x_range=(0.0, float(HORIZONS_S[np.flatnonzero(np.isfinite(lines["plan"]))[-1]])),
        y_range=(0.0, drawing.padded([*lines.values(), high], [0.0])[1]), size=(560.0, 400.0))


def _percentile(values: np.ndarray, share: float) -> float:
    known = values[np.isfinite(values)]
    return float(np.percentile(known, share)) if known.size else float("nan")


def spread_view(table: Table, horizon: Optional[str]) -> Optional[str]:
    """How the ADE at the headline horizon is spread over the plans."""
    values = table[f"ade_m@{horizon}"] if horizon else np.zeros(0)
    known = values[np.isfinite(values)]
    return drawing.histogram(known, "metres", "ADE of single plans", "plan",
                             height=400.0) if known.size else None


def time_view(table: Table) -> list[tuple[str, str]]:
    """(heading, SVG) of the times that were measured."""
    views = []
    for name, column in (("Planning, whole cycle", "total_ms"),
                         ("Image arrival to plan", "latency_ms")):
        known = table[column][np.isfinite(table[column])]
        if known.size:
            views.append((name, drawing.histogram(known, "ms", name, "plan", height=200.0)))
    return views


# Moments

def _speed_range(moments: Sequence[Moment]) -> tuple[float, float]:
    speeds = [v for m in moments for v in (m.scored.plan.speed_mps, m.scored.truth_speed_mps)]
    low, high = drawing.padded(speeds, least=2.0) if speeds else (0.0, 10.0)
    return float(np.floor(max(low, 0.0))), float(np.ceil(high))


def moment_view(moment: Moment, result: Mapping[str, Any],
                speed_range: tuple[float, float]) -> dict[str, Any]:
    """Everything the gallery shows of one moment."""
    scored, plan, row = moment.scored, moment.scored.plan, moment.row
    image, camera = decoded(moment.jpeg), camera_of(result["camera"])
    image = None if image is None else _enlarged(image)
    if image is not None and camera is not None:
        image = path_drawing.draw_plan(
            image, camera.scaled_to(image), plan.map_from_base, plan.positions,
            plan.quaternions_xyzw, plan.speed_mps, plan.time_from_start_ns, scored.truth,
            result["vehicle_width_m"], speed_range)
    known = [h for h in HORIZONS_S if np.isfinite(row[f"ade_m@{h:g}"])]
    return {
        "row": row, "plan": plan, "has_camera": camera is not None,
        "image": None if image is None else drawing.jpeg_uri(image),
        "above": above_view(scored, moment.kinematic if plan.planner != "kinematic" else None),
        "speed": speed_view(scored, speed_range),
        "errors": [(f"{h:g}", *(_known(row[f"{stem}@{h:g}"]) for stem in
                                ("ade_m", "cv_ade_m", "kinematic_ade_m")))
                   for h in known[-2:]],
        "tokens": list(zip(plan.token_texts, (origin.lower() for origin in plan.origins))),
        "drafted": any(origin in DRAFTED for origin in plan.origins),
    }


def _enlarged(image: np.ndarray, least: int = 900) -> np.ndarray:
    """Small images are drawn on larger, so that the paths can be seen."""
    factor = least / image.shape[1]
    return image if factor <= 1.0 else cv2.resize(image, None, fx=factor, fy=factor,
                                                  interpolation=cv2.INTER_CUBIC)


# Bags

def detailed(results: Sequence[Mapping[str, Any]],
             summary: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The bags that get a picture of their own: all, or the worst of many."""
    def severity(result: Mapping[str, Any]) -> float:
        value = summary["bags"][result["name"]]["metrics"]["ade_m"]["3"]
        return -1.0 if value is None else value
    worst = sorted(results, key=severity, reverse=True)[:DETAILED_BAGS]
    return [result for result in results if result in worst]


def bag_view(result: Mapping[str, Any], table: Table, horizon: Optional[str],
             with_kinematic: bool) -> dict[str, Any]:
    """Map, course of the error and course of the states of one bag."""
    rows = table.where(np.array([name == result["name"] for name in table["bag"]], dtype=bool))
    return {"result": result, "map": _map(result), "strip": _strip(rows),
            "course": _course(rows, horizon, with_kinematic)}


def _map(result: Mapping[str, Any]) -> str:
    plans = [Series(*np.array(path).T, "plan faint") for path in result["paths"]]
    driven = Series(*np.array(result["track"]).T, "truth")
    return drawing.map_chart([*plans, driven], f"x in {result['frame_id']}, m",
                             f"y in {result['frame_id']}, m", "The whole drive from above",
                             height_range=(240.0, 420.0), framed=driven)


def _course(rows: Table, horizon: Optional[str], with_kinematic: bool) -> Optional[str]:
    """The ADE over the drive's time, beside the baselines'."""
    if horizon is None or not np.isfinite(rows[f"ade_m@{horizon}"]).any():
        return None
    time_s = rows["time_s"]
    lines = [Series(time_s, rows[f"{stem}@{horizon}"], css) for stem, css in (
        ("cv_ade_m", "baseline"), ("kinematic_ade_m", "kinematic"), ("ade_m", "plan"))
        if with_kinematic or css != "kinematic"]
    return drawing.line_chart(lines, "seconds of the drive", f"ADE over {horizon} s, m",
                              "ADE over the drive",
                              y_range=(0.0, drawing.padded([s.y for s in lines], [0.0])[1]),
                              size=(560.0, 420.0))


def _strip(rows: Table) -> str:
    """What became of every cycle."""
    time_s = rows["time_s"]
    usual = float(np.median(np.diff(time_s))) if len(time_s) > 1 else 0.1
    cells = [(t, t + usual, f"st {status.lower() or 'blocked'}",
              f"{t:.2f} s: {status or 'no plan'}{': ' + why if why else ''}")
             for t, status, why in zip(time_s, rows["status"], rows["reasons"])]
    merged = _merged(cells)
    return drawing.time_strip([("planning cycles, at their t0", merged)],
                              (min(0.0, float(time_s[0])), float(time_s[-1]) + usual),
                              "seconds of the drive", "What became of every cycle")


def _merged(cells: Sequence[tuple[float, float, str, str]],
            most: int = 1200) -> list[tuple[float, float, str, str]]:
    """Neighbours of the same kind joined where there are too many to draw each."""
    if len(cells) <= most:
        return list(cells)
    merged = [cells[0]]
    for start, end, css, text in cells[1:]:
        last = merged[-1]
        if css == last[2] and start - last[1] < 0.5:
            merged[-1] = (last[0], end, css, last[3])
        else:
            merged.append((start, end, css, text))
    return merged


def share(value: Optional[float]) -> str:
    """0.873 -> "87 %"; a dash for null."""
    return "–" if value is None else number(100.0 * value, 0, "%")
