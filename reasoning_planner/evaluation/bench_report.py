"""The benchmark as one HTML page: rows of bench.json drawn, nothing measured here.

The page needs no network. Layout is in `templates/bench.html.j2`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Mapping, Sequence

import numpy as np

from ..path_drawing import SPEED_STOPS
from ..speculative.cost_curve import CostCurve
from .bench_categories import CATEGORIES
from .bench_charts import IntervalBar, StackedBar, interval_chart, stacked_chart
from .bench_methods import AUTOREGRESSIVE, METHODS, PEERS
from .bench_rows import TIME_PARTS
from .bench_scenes import COLD, CONTINUOUS, PEER
from .drawing import Series, line_chart
from .report import template
from .summary import replace_text

Row = Mapping[str, Any]
HOST_SHARE_LIMIT = 0.05
COLOURS = 6                 # classes c0 .. c5 of the page
KIND_TITLES = {COLD: "Cold scenes", CONTINUOUS: "Continuous drive, a cycle every 100 ms",
               PEER: "Hugging Face transformers, the same weights and cold scenes"}
MODEL_NOTES = {"nano": "nano is a stand-in: a small model with Alpamayo's layout, trained on a "
                       "synthetic world. It is not an Alpamayo checkpoint."}


@dataclass(frozen=True)
class BenchFacts:
    """What the rows do not say.

    Attributes:
        curve: T(k) as measured in this run.
        left_out: methods that did not take part, and why.
        model: name of the target.
        draft, corpus: what was drafted from; empty for none.
        threads: of every engine.
        hardware: from summary.describe_hardware.
    """

    curve: CostCurve
    left_out: Mapping[str, str]
    model: str
    draft: str
    corpus: str
    threads: int
    hardware: Mapping[str, Any]


def write_page(path: Path, rows: Sequence[Row], facts: BenchFacts) -> None:
    """Write the page in one step.

    Raises:
        MissingDependencyError: jinja2 is not installed.
    """
    replace_text(path, render_page(rows, facts))


def render_page(rows: Sequence[Row], facts: BenchFacts) -> str:
    """The whole page as HTML text."""
    ours = [row for row in rows if row["kind"] != PEER]
    kinds = [kind for kind in KIND_TITLES if any(row["kind"] == kind for row in rows)]
    shown = compared_rows(ours)
    return template("bench.html.j2").render(
        rows=rows, kinds=kinds, titles=KIND_TITLES, facts=facts, tiles=headline(rows),
        note=MODEL_NOTES.get(facts.model, ""), run=_run_rows(rows, facts),
        summaries={**{name: m.summary for name, m in METHODS.items()},
                   **{name: p.summary for name, p in PEERS.items()}},
        speedups={kind: speedup_view([r for r in rows if r["kind"] == kind]) for kind in kinds},
        times={kind: time_view([r for r in rows if r["kind"] == kind]) for kind in kinds},
        curve_svg=curve_view(facts.curve), depth_svg=depth_view(shown),
        legend=[(f"c{i % COLOURS}", label(row)) for i, row in enumerate(shown)],
        rounds=rounds_table(rows), categories=category_table(ours, "acceptance_by_category"),
        scene_classes=category_table(ours, "acceptance_by_scene"), parts=TIME_PARTS,
        peers=peer_table(rows),
        host_limit=HOST_SHARE_LIMIT, label=label,
        speed_stops=[f"rgb{stop}" for stop in SPEED_STOPS])


def label(row: Row) -> str:
    """How a row is called where methods of several temperatures stand together."""
    warmth = f", T = {row['temperature']:g}" if row["temperature"] else ""
    return f"{row['method']}{warmth}"


def compared_rows(ours: Sequence[Row]) -> list[Row]:
    """Up to COLOURS rows that draft, for charts that hold no more: the fastest of each family."""
    families: dict[tuple[str, str], Row] = {}
    for row in sorted(ours, key=lambda r: -r["speedup"]):
        family = (row["kind"], row["method"].rsplit("_b", 1)[0])
        if row["method"] != AUTOREGRESSIVE and row["acceptance_by_depth"]:
            families.setdefault(family, row)
    chosen = [row for (kind, _), row in families.items() if kind == COLD] or list(
        families.values())
    return chosen[:COLOURS]


def headline(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """(figure, what it is) of the best lossless rows, and what must hold for all."""
    tiles = []
    for kind, words in ((COLD, "cold scenes"), (CONTINUOUS, "the continuous drive")):
        drafting = [r for r in rows if r["kind"] == kind and r["lossless"] and r["draft_share"]]
        if drafting:
            best = max(drafting, key=lambda r: r["speedup"])
            tiles.append((f"{best['speedup']:.2f} ×", f"reasoning on {words} against plain "
                          f"decoding on the same runtime: {label(best)}, 95 % interval "
                          f"{best['speedup_ci95'][0]:.2f} to {best['speedup_ci95'][1]:.2f}"))
            tiles.append((f"{best['acceptance_length']:.2f}",
                          f"acceptance length of {label(best)}, bonus token included; "
                          f"{best['rounds_p50']} rounds in the median, {best['rounds_p95']} in "
                          f"the 95th percentile"))
    tiles += _peer_tile(rows)
    greedy = [r for r in rows if r["exact_match_rate"] is not None and r["kind"] != PEER]
    if greedy:
        texts = sum(r["scenes"] for r in greedy if r["method"] != AUTOREGRESSIVE)
        tiles.append((f"{sum(r['mismatches'] for r in greedy)} / {texts}",
                      f"greedy texts that differ from the target's own; "
                      f"{sum(r['ties'] for r in greedy)} more differ at a tie"))
    return tiles


def _peer_tile(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """The fastest peer against the fastest lossless method of ours."""
    peers = [row for row in rows if row["kind"] == PEER and row["times_as_long_as"]]
    if not peers:
        return []
    peer = min(peers, key=lambda r: r["reasoning_ms_mean"])
    ratios = {name: found for name, found in peer["times_as_long_as"].items()
              if METHODS[name].lossless}
    best = max(ratios, key=lambda name: ratios[name][0])
    ratio, low, high = ratios[best]
    return [(f"{ratio:.2f} ×", f"as long as {best} takes {peer['method']}, the fastest of the "
             f"other library, on the same weights and threads; 95 % interval {low:.2f} to "
             f"{high:.2f}")]


def speedup_view(rows: Sequence[Row]) -> str:
    """Speed-up against plain decoding on the same runtime, a bar a row."""
    bars = [IntervalBar(label(r), r["speedup"], *r["speedup_ci95"],
                        "plain" if not r["draft_share"] else
                        "lossless" if r["lossless"] else "lossy", f"{r['speedup']:.2f}")
            for r in rows]
    return interval_chart(bars, f"times faster than {rows[0]['reference']}", "Speed-up", mark=1.0)


def time_view(rows: Sequence[Row]) -> str:
    """Mean reasoning time by part, a bar a row."""
    bars = [StackedBar(label(r), [(part, part, r["reasoning_ms_mean"] * r["time_share"][part])
                                  for part in TIME_PARTS], f"{r['reasoning_ms_mean']:.1f}")
            for r in rows]
    return stacked_chart(bars, "ms a text, mean", "Where the time goes")


def curve_view(curve: CostCurve) -> str:
    """T(k) over k."""
    sizes, costs = np.array(curve.sizes), np.array(curve.cost_ms)
    return line_chart([Series(sizes, costs, "c0"), Series(sizes, costs, "c0", dots=True)],
                      "tokens of a pass, k", "ms of a pass", "Cost of a target pass",
                      x_range=(0.0, float(sizes[-1]) + 1.0),
                      y_range=(0.0, 1.1 * float(costs.max())), size=(560.0, 300.0))


def depth_view(rows: Sequence[Row]) -> str:
    """Share of draft tokens accepted by their depth; empty without any."""
    series = []
    for i, row in enumerate(rows):
        shares = np.array(row["acceptance_by_depth"])
        depths = np.arange(1, len(shares) + 1)
        series += [Series(depths, shares, f"c{i % COLOURS}"),
                   Series(depths, shares, f"c{i % COLOURS}", dots=True)]
    if not series:
        return ""
    deepest = max(len(row["acceptance_by_depth"]) for row in rows)
    return line_chart(series, "depth of the draft token", "share accepted where offered",
                      "Acceptance by depth", x_range=(0.5, deepest + 0.5), y_range=(0.0, 1.04),
                      size=(560.0, 300.0))


def rounds_table(rows: Sequence[Row]) -> dict[str, Any]:
    """{"counts": [1, 2, ...], "rows": [(row, share at each count), ...]}; plain decoding apart."""
    drafting = [row for row in rows if row["draft_share"]]
    counts = sorted({int(n) for row in drafting for n in row["rounds_histogram"]})
    shares = [(row, [row["rounds_histogram"].get(str(n), 0) / row["scenes"] for n in counts])
              for row in drafting]
    return {"counts": counts, "rows": shares}


def category_table(rows: Sequence[Row], key: str) -> dict[str, Any]:
    """{"names": [...], "rows": [(row, [(accepted, offered), ...]), ...]} of rows that draft."""
    drafting = [row for row in rows if row[key] and row["draft_share"]]
    found = {name for row in drafting for name in row[key]}
    names = [n for n in CATEGORIES if n in found] or sorted(found)
    nothing = {"accepted": 0, "offered": 0}
    counts = [[row[key].get(name, nothing) for name in names] for row in drafting]
    return {"names": names, "rows": [
        (row, [(found["accepted"], found["offered"]) for found in line])
        for row, line in zip(drafting, counts)]}


def peer_table(rows: Sequence[Row]) -> dict[str, Any]:
    """{"ours": [...], "rows": [(peer, [ratio, low, high] a method of ours), ...]}."""
    peers = [row for row in rows if row["kind"] == PEER]
    ours = list(dict.fromkeys(name for row in peers for name in row["times_as_long_as"]))
    return {"ours": ours, "rows": [(row, [row["times_as_long_as"].get(name) for name in ours])
                                   for row in peers]}


def _run_rows(rows: Sequence[Row], facts: BenchFacts) -> list[tuple[str, str]]:
    """(name, value) of what was run, on what."""
    hardware = facts.hardware
    counts = {kind: max((r["scenes"] for r in rows if r["kind"] == kind), default=0)
              for kind in (COLD, CONTINUOUS)}
    return [
        ("Model", facts.model),
        ("Draft", facts.draft or "none"), ("Corpus", facts.corpus or "none"),
        ("Runtimes", ", ".join(dict.fromkeys(row["runtime"] for row in rows))),
        ("Threads of each", str(facts.threads)),
        ("Cold scenes", str(counts[COLD])), ("Cycles of the drive", str(counts[CONTINUOUS])),
        ("Machine", f"{hardware['cpu']}, {hardware['cores']} cores, "
                    f"{hardware['memory_gib']} GiB memory"),
        ("GPU", str(hardware["gpu"] or "none")),
        ("System", f"{hardware['os']}, Python {hardware['python']}")]
