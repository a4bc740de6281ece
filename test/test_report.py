"""The whole report from records and a small made-up bag."""

import base64
import dataclasses
import json
import re

import numpy as np
import pytest

pytest.importorskip("jinja2")
cv2 = pytest.importorskip("cv2")

from page_checker import Checker

from reasoning_planner.errors import DataError
from reasoning_planner.evaluation import kitti_drive, report
from reasoning_planner.evaluation.records import (STAGES, PlanRecord, StatusRecord,
                                                  append_record, write_records)

STEP = 100_000_000
FRAMES = 31
SPEED = 10.0


@pytest.fixture(scope="module")
def bag(tmp_path_factory):
    """3 s straight on at 10 m/s, grey images of 320 x 120, camera as the KITTI drive mounts it."""
    poses = np.tile(np.eye(4), (FRAMES, 1, 1))
    poses[:, 2, 3] = np.arange(FRAMES) * 0.1 * SPEED                # camera axes: z is forward
    image = cv2.imencode(".jpg", np.full((120, 320), 100, np.uint8))[1].tobytes()
    projection = np.array([[100.0, 0, 160, 0], [0, 100, 60, 0], [0, 0, 1, 0]])
    path = tmp_path_factory.mktemp("drive") / "straight"
    kitti_drive.write_drive(kitti_drive.Clip((image,) * FRAMES, 320, 120, projection, poses), path)
    return path


def make_plan(i, speed=SPEED, **changes):
    times = np.arange(65) * STEP
    start = np.array([i * 0.1 * SPEED, 0.0, 0.0])
    map_from_base = np.eye(4)
    map_from_base[:3, 3] = start
    record = PlanRecord(
        stamp_ns=kitti_drive.START_NS + i * STEP, received_ns=0, latency_ms=5.0 + i % 3,
        frame_id="map", plan_id=f"{i:032x}", status="KINEMATIC", planner="kinematic",
        map_from_base=map_from_base, time_from_start_ns=times,
        positions=start + np.outer(times * 1e-9 * speed, [1.0, 0, 0]),
        quaternions_xyzw=np.tile([0.0, 0, 0, 1], (65, 1)), speed_mps=np.full(65, speed),
        acceleration_mps2=np.zeros(65), yaw_rate_rps=np.zeros(65), curvature_1pm=np.zeros(65),
        timings_ms={**dict.fromkeys(STAGES, 0.0), "act": 0.5, "total": 1.0 + i % 4})
    return dataclasses.replace(record, **changes)


def make_status(i, **changes):
    status = StatusRecord(kitti_drive.START_NS + i * STEP + 1, "PLANNING",
                          dropped_by_reason={"ego history too short": 15}, cycles=i + 1)
    return dataclasses.replace(status, **changes)


def make(tmp_path, bag, records, **run_info):
    write_records(tmp_path / "records.jsonl", records)
    summary = report.make_report(tmp_path / "records.jsonl", bag, tmp_path / "out",
                                 {"hardware": {"cpu": "test <cpu>", "cores": 4}, **run_info})
    return summary, (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


def images_of(page):
    found = re.findall(r'src="data:image/jpeg;base64,([^"]+)"', page)
    return [cv2.imdecode(np.frombuffer(base64.b64decode(data), np.uint8), cv2.IMREAD_COLOR)
            for data in found]


def test_kinematic_report(tmp_path, bag):
    records = [make_plan(i) for i in range(15, 31)] + [make_status(i) for i in range(31)]
    summary, page = make(tmp_path, bag, records, bag_name="A <straight> drive", mode="lockstep")
    assert summary == json.loads((tmp_path / "out" / "summary.json").read_text(encoding="utf-8"))
    assert summary["cycles"] == 31 and summary["plans_published"] == 16
    assert summary["ade_m"]["1"] == pytest.approx(0.0, abs=1e-6)

    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    assert all(load.startswith("data:") for load in checker.loads)
    assert not re.search(r"url\(|@import|https?:", page)
    assert len(page) < 5_000_000
    assert "Kinematic planner:" in page and "stand-in" not in page
    assert "A &lt;straight&gt; drive" in page and "test &lt;cpu&gt;" in page
    assert "lockstep" in page and "ego history too short" in page
    assert len(images_of(page)) == report.MOMENTS


def test_the_ribbon_is_on_the_road_ahead(tmp_path, bag):
    _, page = make(tmp_path, bag, [make_plan(20)], vehicle_width_m=2.0)
    image = images_of(page)[0].astype(int)
    colour = image.max(axis=2) - image.min(axis=2) > 30            # the ground is grey
    # 1.65 m above the ground, row 93 is 5 m ahead of the camera: 1 m is 20 px. JPEG blurs it.
    columns = np.flatnonzero(colour[93])
    assert columns.min() == pytest.approx(140, abs=4)
    assert columns.max() == pytest.approx(180, abs=4)
    assert not colour[:50].any()


def test_a_reasoning_run_names_the_stand_in_and_shows_its_tokens(tmp_path, bag):
    plans = [make_plan(i, status="DEGRADED", planner="nano", text="Yield <now>",
                       reasons=(("camera late", "slot 2"),), token_texts=("Yield", " <now>"),
                       origins=("ROUTINE", "RECOVERED"), rounds=1, proposed=2, accepted=1)
             for i in range(16, 20)]
    summary, page = make(tmp_path, bag, plans, model="nano", runtime="onnxruntime")
    assert summary["tokens_per_target_pass"] == 2.0
    assert "nano stand-in" in page and "Kinematic planner:" not in page
    assert '<span class="recovered" title="recovered"> &lt;now&gt;</span>' in page
    assert "camera late" in page


def test_plans_that_cannot_be_compared_still_make_a_report(tmp_path, bag):
    summary, page = make(tmp_path, bag, [make_plan(20, frame_id="odom")])
    assert summary["plans_not_scored"] == 1 and summary["ade_m"]["1"] is None
    assert "No plan could be compared" in page
    summary, page = make(tmp_path, bag, [make_status(i, state="BLOCKED") for i in range(5)])
    assert summary["plans_published"] == 0 and "blocked" in page


def test_status_stamps_of_another_clock_are_left_out_of_the_strip(tmp_path, bag):
    _, page = make(tmp_path, bag, [make_plan(20), make_status(0, stamp_ns=5)])
    assert "node state" not in page


def test_the_worst_plan_is_among_the_moments(tmp_path, bag):
    plans = [make_plan(i, speed=30.0 if i == 8 else SPEED) for i in range(0, 21)]
    _, page = make(tmp_path, bag, plans)
    assert len(images_of(page)) == report.MOMENTS
    assert re.search(r"<td>Speed at t0</td><td>30.0", page)


def test_damage_is_refused_before_anything_is_written(tmp_path, bag):
    path = tmp_path / "records.jsonl"
    path.write_text("{}\n", encoding="utf-8")
    with pytest.raises(DataError, match="line 1"):
        report.make_report(path, bag, tmp_path / "out", {})
    path.unlink()
    append_record(path, make_plan(20))
    with pytest.raises(DataError):
        report.make_report(path, tmp_path / "no_bag", tmp_path / "out", {})
    with pytest.raises(DataError, match="/nowhere"):
        report.make_report(path, bag, tmp_path / "out", {"odometry_topic": "/nowhere"})
    assert not (tmp_path / "out").exists()


def test_number_for_people():
    assert report.number(None, 2, "m") == "–"
    assert report.number(3.14159) == "3.14" and report.number(31.4159) == "31.4"
    assert report.number(314.159) == "314" and report.number(-0.001, 2) == "0.00"
    assert report.number(1.0, 1, "m") == "1.0\u202fm"


def test_transforms_are_composed_up_to_the_base():
    # The mount is 1 m ahead and turned to the left, the lens 2 m ahead of it: 2 m to the left.
    mount = np.array([[0.0, -1, 0, 1], [1, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
    lens = np.eye(4)
    lens[0, 3] = 2.0
    transforms = {"camera": ("base_link", mount), "lens": ("camera", lens)}
    found = report._base_from_frame(transforms, "base_link", "lens")
    assert found[:3, 3].tolist() == [1.0, 2.0, 0.0]
    assert report._base_from_frame(transforms, "base_link", "lidar") is None
    loop = {"a": ("b", mount), "b": ("a", mount)}
    assert report._base_from_frame(loop, "base_link", "a") is None
