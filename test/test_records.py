"""Record files: exact floats, damage named by line, a cut last line survived."""

import dataclasses
import json

import numpy as np
import pytest

from reasoning_planner.datatypes import (HORIZON_LENGTH, Plan, PlanStatus, Reason, Reasoning,
                                         Refusal, TokenOrigin, Trajectory)
from reasoning_planner.errors import DataError
from reasoning_planner.evaluation.records import (PlanRecord, StatusRecord, append_record, line_of,
                                                  read_records, record_of, record_of_plan,
                                                  split_reason, write_records)


def make_plan(seed=0, n=5):
    rng = np.random.default_rng(seed)
    return PlanRecord(
        stamp_ns=1_317_643_201_500_000_000 + seed, received_ns=17, latency_ms=0.1 + 0.2,
        frame_id="map", plan_id="0f" * 16, status="DEGRADED", planner="nano",
        map_from_base=rng.normal(size=(4, 4)),
        time_from_start_ns=np.arange(n) * 100_000_000, positions=rng.normal(size=(n, 3)) * 1e6,
        quaternions_xyzw=rng.normal(size=(n, 4)), speed_mps=rng.normal(size=n) / 3.0,
        acceleration_mps2=rng.normal(size=n) * 1e-300, yaw_rate_rps=rng.normal(size=n),
        curvature_1pm=rng.normal(size=n), reasons=(("camera late", "slot 1, 180 ms"),),
        text="Keep lane – clear ahead.\nGo", token_texts=("Keep", " lane"),
        origins=("ROUTINE", "BONUS"), rounds=1, proposed=3, accepted=1,
        timings_ms={"encode": 1.5, "prefill": 2.0, "reason": 3.1, "act": 0.0, "total": 6.6})


def make_status(stamp_ns=5):
    return StatusRecord(stamp_ns=stamp_ns, state="DEGRADED", degraded=(("cameras missing", "2"),),
                        dropped_by_reason={"odometry gap": 3}, camera_rates_hz=(9.9, 0.0),
                        camera_ages_s=(0.02, -1.0), cycles=12, plans_published=9)


def assert_same(a, b):
    assert type(a) is type(b)
    for item in dataclasses.fields(a):
        left, right = getattr(a, item.name), getattr(b, item.name)
        if isinstance(left, np.ndarray):
            assert left.dtype == right.dtype and left.shape == right.shape, item.name
            assert np.array_equal(left, right), item.name
        else:
            assert left == right and type(left) is type(right), item.name


@pytest.mark.parametrize("record", [make_plan(), make_plan(3, n=0), make_status()])
def test_round_trip_is_exact(record):
    line = line_of(record)
    assert "\n" not in line
    assert_same(record_of(line), record)


def test_append_and_read_keep_order(tmp_path):
    path = tmp_path / "records.jsonl"
    for record in (make_plan(1), make_status(1), make_plan(2)):
        append_record(path, record)
    records = read_records(path)
    assert [p.stamp_ns % 10 for p in records.plans] == [1, 2]
    assert len(records.statuses) == 1 and not records.cut


def test_cut_last_line_is_left_out_and_replaced_by_the_next(tmp_path):
    path = tmp_path / "records.jsonl"
    write_records(path, [make_plan(1), make_plan(2)])
    path.write_bytes(path.read_bytes()[:-40])
    records = read_records(path)
    assert len(records.plans) == 1 and records.cut
    append_record(path, make_plan(4))
    records = read_records(path)
    assert [p.stamp_ns % 10 for p in records.plans] == [1, 4] and not records.cut


def _without(line, key):
    values = json.loads(line)
    del values[key]
    return json.dumps(values)


@pytest.mark.parametrize("damage, told", [
    (lambda line: line[:50], "not JSON"),
    (lambda line: "[1]", "kind: given None"),
    (lambda line: line.replace('"plan"', '"plane"', 1), "given 'plane'"),
    (lambda line: _without(line, "positions"), r"missing \['positions'\]"),
    (lambda line: line.replace('"rounds": 1', '"rounds": "x"'), "rounds: given 'x'"),
    (lambda line: line.replace('"speed_mps": [', '"speed_mps": [1.0, '), "speed_mps: given shape"),
    (lambda line: line.replace("DEGRADED", "FINE"), "status: given 'FINE'"),
    (lambda line: line.replace("BONUS", "GIFT"), r"origins: .*unknown \['GIFT'\]"),
    (lambda line: line.replace("[0, 100000000,", "[0, 0,"), "strictly rising"),
    (lambda line: line.replace('"encode"', '"decode"'), "timings_ms"),
    (lambda line: line.replace('"text"', '"texts"'), r"unknown \['texts'\]"),
    (lambda line: line.replace('"timings_ms": {', '"timings_ms": [{').replace("6.6}", "6.6}]"),
     "timings_ms: given"),
])
def test_damage_is_named_by_line(tmp_path, damage, told):
    path = tmp_path / "records.jsonl"
    line = line_of(make_plan())
    assert damage(line) != line
    path.write_text(f"{line}\n{damage(line)}\n{line}\n", encoding="utf-8")
    with pytest.raises(DataError, match=f"records.jsonl: line 2: .*{told}"):
        read_records(path)


def test_missing_and_empty_files_are_refused(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        read_records(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("", encoding="utf-8")
    with pytest.raises(DataError, match="no complete record"):
        read_records(tmp_path / "empty.jsonl")


def test_split_reason():
    assert split_reason("camera late: slot 1: 180 ms") == ("camera late", "slot 1: 180 ms")
    assert split_reason("no clock yet") == ("no clock yet", "")


def test_record_of_plan_puts_the_path_into_the_map():
    n = HORIZON_LENGTH + 1
    positions = np.stack([np.arange(n) * 1.0, np.zeros(n)], axis=1)
    trajectory = Trajectory(positions, np.full(n, np.pi / 2), np.full(n, 10.0), np.zeros(n),
                            np.full(n, 0.1))
    map_from_base = np.array([[0.0, -1, 0, 100], [1, 0, 0, 200], [0, 0, 1, 3], [0, 0, 0, 1]])
    record = record_of_plan(Plan(
        plan_id=bytes(range(16)), stamp_ns=7, frame_id="map", map_from_base=map_from_base,
        trajectory=trajectory, status=PlanStatus.KINEMATIC,
        reasons=(Refusal(Reason.NO_MODEL, "none given"),),
        reasoning=Reasoning(token_texts=("a",), origins=(TokenOrigin.RECOVERED,))))
    # The base looks along y of the map; 2 m ahead of it is (100, 202). A quarter turn more: -x.
    assert record.positions[2] == pytest.approx([100.0, 202.0, 3.0])
    assert np.abs(record.quaternions_xyzw[2]) == pytest.approx([0, 0, 1, 0], abs=1e-12)
    assert record.plan_id == "000102030405060708090a0b0c0d0e0f"
    assert record.reasons == (("no model loaded", "none given"),)
    assert record.origins == ("RECOVERED",) and record.yaw_rate_rps[0] == 1.0
    assert_same(record_of(line_of(record)), record)
