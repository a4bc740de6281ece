"""The page that people forward: whole, self-contained, and without an error in a real browser."""

import base64
import dataclasses
import json
import re

import numpy as np
import pytest

pytest.importorskip("jinja2")
cv2 = pytest.importorskip("cv2")

import browser
from page_checker import Checker
from test_evaluate_scores import T0, quaternions, straight

from reasoning_planner.evaluation import evaluation_report, metrics
from reasoning_planner.evaluation.aggregate import summarise
from reasoning_planner.evaluation.definitions import METRICS
from reasoning_planner.evaluation.moments import (SPACING_NS, WORST, WorstMoments, read_moments,
                                                  write_moments)
from reasoning_planner.evaluation.score_table import empty_row, table_of
from reasoning_planner.evaluation.scores import score_plan

CAMERA = {"k": [[60.0, 0, 32], [0, 60, 16], [0, 0, 1]], "size": [64, 32],
          "base_from_camera": [[0, 0, 1, 1.5], [-1, 0, 0, 0], [0, -1, 0, 1.5], [0, 0, 0, 1]]}
SAID = dict(text="Stop <now> & wait", token_texts=("Stop", " <now>", " & wait", "<|end|>"),
            origins=("ROUTINE", "RECOVERED", "BONUS", "DELIBERATIVE"), rounds=2, proposed=3,
            accepted=1, reasons=(("camera late", "slot 2"),))


def track_of(seconds):
    stamps = T0 + np.arange(0, int(seconds * 50) + 1) * 20_000_000
    x = 10.0 * (stamps - T0) * 1e-9
    return metrics.PoseTrack("map", stamps, np.column_stack([x, 0 * x, 0 * x]),
                             quaternions(0 * x), np.full(len(x), 10.0))


def result_of(name, **changes):
    return {"name": name, "bag": f"/data/{name}", "bag_id": name, "mode": "lockstep",
            "model": "nano", "runtime": "ort", "frame_id": "map", "base_frame": "base_link",
            "topics": {"odometry": "/odom", "cameras": ["", "/front", "", ""]}, "notes": [],
            "losses": [], "duration_s": 30.0, "start_ns": T0, "driven_m": 300.0, "cycles": 40,
            "plans": 40, "dropped_by_reason": {"camera late": 3}, "passed": None,
            "camera": CAMERA, "vehicle_width_m": 1.85, "track": [[0.0, 0.0], [300.0, 1.0]],
            "paths": [[[0.0, 0.0], [10.0, 1.0]]], **changes}


def cycles(name, count=40, step_ns=500_000_000, **said):
    """(rows, moments) of plans that get worse and worse."""
    track, rows, worst, previous = track_of(30.0), [], WorstMoments(), None
    for i in range(count):
        t0_ns = T0 + i * step_ns
        plan = straight(10.0 + 0.05 * i, t0_ns, status="DEGRADED", **said)
        row = empty_row((name, name), t0_ns, t0_ns + 5_000_000, (t0_ns - T0) * 1e-9)
        previous = score_plan(row, [plan], straight(10.0, t0_ns, planner="kinematic"), previous,
                              track)
        worst.add(row, previous.beside_truth, straight(10.0, t0_ns),
                  np.full((32, 64, 3), 90 + i, np.uint8))
        rows.append(row)
    return rows, worst


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A page of two bags; one name needs escaping."""
    out = tmp_path_factory.mktemp("page")
    names = ["a & b", "second"]
    rows, folders = [], {}
    for name in names:
        mine, worst = cycles(name, **SAID)
        rows += mine
        folders[name] = out / name.replace(" & ", "_")
        folders[name].mkdir()
        write_moments(folders[name], worst.chosen())
    table = table_of(rows)
    results = [result_of(names[0], losses=["a: 5 messages lost"]), result_of(names[1])]
    info = {"mode": "lockstep", "samples_k": 2, "period_s": 0.0, "rate": None,
            "checkpoint": "nano", "noise_scale": 1.0, "deadline_s": None,
            "failed": ["<bad>.mcap: no bag"]}
    summary = summarise(table, results, info)
    evaluation_report.write_report(out / "report.html", summary, table, results, folders)
    return out / "report.html"


def test_the_page_is_whole_and_loads_nothing(page):
    text = page.read_text(encoding="utf-8")
    checker = Checker()
    checker.feed(text)
    assert checker.open == [] and all(load.startswith("data:") for load in checker.loads)
    assert not re.search(r"url\(|@import|https?:", text)
    assert "a &amp; b" in text and "&lt;bad&gt;.mcap" in text and "<bad>" not in text
    assert "a: 5 messages lost" in text and "nano stand-in" in text


def test_every_metric_is_explained(page):
    text = page.read_text(encoding="utf-8")
    for metric in METRICS:
        assert f"plans.csv: {metric.name}" in text, metric.name


def test_tokens_show_who_wrote_them(page):
    text = page.read_text(encoding="utf-8")
    assert '<span class="routine" title="routine">Stop</span>' in text
    assert '<span class="recovered" title="recovered"> &lt;now&gt;</span>' in text
    assert '<span class="bonus" title="bonus"> &amp; wait</span>' in text


def test_the_worst_moments_are_apart_and_in_order():
    _, worst = cycles("bag", count=60, step_ns=100_000_000)
    chosen = worst.chosen()
    assert len(chosen) == 3             # 6 s of drive: no more than three 2 s apart
    assert [m.severity for m in chosen] == sorted((m.severity for m in chosen), reverse=True)
    assert chosen[0].row["stamp_ns"] == T0 + 59 * 100_000_000
    stamps = sorted(m.row["stamp_ns"] for m in chosen)
    assert min(np.diff(stamps)) >= SPACING_NS
    _, many = cycles("bag", count=50)
    assert len(many.chosen()) == WORST


def test_moments_come_back_from_their_files(tmp_path):
    _, worst = cycles("bag", count=8, **SAID)
    chosen = worst.chosen()
    write_moments(tmp_path, chosen)
    again = read_moments(tmp_path)
    assert [m.severity for m in again] == [m.severity for m in chosen]
    for ours, theirs in zip(again, chosen):
        assert ours.row["text"] == SAID["text"] and ours.jpeg == theirs.jpeg
        assert np.array_equal(ours.scored.truth, theirs.scored.truth, equal_nan=True)
        assert ours.scored.plan.token_texts == theirs.scored.plan.token_texts


def test_a_run_without_truth_pictures_or_text_still_makes_a_page(tmp_path):
    rows = [empty_row(("bag", "bag"), T0 + i, T0 + i, i * 1e-9) for i in range(3)]
    plan = straight(10.0, T0 + 5, planner="kinematic", status="KINEMATIC", frame_id="odom")
    rows.append(score_plan(empty_row(("bag", "bag"), T0 + 5, T0 + 5, 1.0), [plan], plan, None,
                           track_of(1.0)).row)
    table = table_of(rows)
    results = [result_of("bag", model=None, runtime=None, camera=None, paths=[])]
    summary = summarise(table, results, {
        "mode": "odometry only", "samples_k": 1, "period_s": 0.0, "rate": None, "failed": [],
        "checkpoint": None, "noise_scale": None, "deadline_s": None})
    write_moments(tmp_path, [])
    evaluation_report.write_report(tmp_path / "report.html", summary, table, results,
                                   {"bag": tmp_path})
    text = (tmp_path / "report.html").read_text()
    assert "No plan could be compared" in text and "1 plans could not be compared" in text
    assert summary["ade_m"]["1"] is None and json.dumps(summary, allow_nan=False)


@pytest.mark.skipif(browser.CHROMIUM is None, reason="needs Chromium")
def test_the_page_opens_in_a_browser_without_an_error(page, tmp_path):
    with browser.Browser(width=1280) as shown:
        shown.open(page.resolve())
        assert shown.run("document.querySelectorAll('.moment.on').length") == 1
        assert shown.run("document.getElementById('where').textContent") == f"1 of {WORST}"
        shown.run("document.getElementById('next').click()")
        assert shown.run("document.getElementById('where').textContent") == f"2 of {WORST}"
        picture = "document.querySelector('.moment.on img')"
        assert shown.run(f"{picture}.complete && {picture}.naturalWidth") >= 640
        sideways = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert shown.run(sideways) == 0, "nothing is cut off at the side"
        corrected, drafted = (shown.run(
            f"getComputedStyle(document.querySelector('.moment.on .{css}')).backgroundColor")
            for css in ("recovered", "routine"))
        assert corrected != drafted
        shown.run("document.querySelectorAll('details').forEach(d => { d.open = true; })")
        assert shown.troubles == []
        assert all(url.startswith(("file:", "data:")) for url in shown.requests)
    with browser.Browser(width=390) as phone:
        phone.open(page.resolve())
        assert phone.run(sideways) == 0
        assert phone.troubles == []
    broken = tmp_path / "broken.html"
    broken.write_text(page.read_text().replace("  show(1);", "  show(nothing_of_that_name);"))
    with browser.Browser() as shown:
        shown.open(broken)
        assert shown.troubles, "a broken page is noticed"


def test_a_drawn_moment_has_the_plan_on_the_road():
    track = track_of(10.0)
    plan = dataclasses.replace(straight(10.0), status="OK")
    row = empty_row(("bag", "bag"), T0, T0, 0.0)
    scored = score_plan(row, [plan], straight(10.0), None, track)
    worst = WorstMoments()
    worst.add(row, scored.beside_truth, straight(10.0), np.full((32, 64, 3), 100, np.uint8))
    view = evaluation_report.moment_view(worst.chosen()[0], result_of("bag"), (5.0, 15.0))
    assert view["image"].startswith("data:image/jpeg;base64,") and view["has_camera"]
    assert [over for over, *_ in view["errors"]] == ["5", "6.4"]
    data = base64.b64decode(view["image"].partition(",")[2])
    image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR).astype(int)
    colour = image.max(axis=2) - image.min(axis=2) > 30         # the ground is grey
    assert image.shape[1] >= 640 and not colour[:len(image) // 2 - 20].any()
    # 3.5 m ahead of the camera, 1.5 m below it: rows 3/7 of the focal length below the middle.
    scale = image.shape[1] / 64
    row = int(scale * (16 + 60 * 1.5 / 3.5))
    columns = np.flatnonzero(colour[min(row, len(image) - 1)])
    assert abs(columns.mean() - 32 * scale) < 2 * scale
