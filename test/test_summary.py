"""summary.json: the contract's keys, null for what was not measured, honest counts."""

import dataclasses
import json

import numpy as np
import pytest

from reasoning_planner.evaluation.metrics import PoseTrack
from reasoning_planner.evaluation.records import STAGES, PlanRecord, Records, StatusRecord
from reasoning_planner.evaluation.summary import (build_summary, describe_hardware,
                                                  dropped_by_reason, score_plans, since_activation,
                                                  write_summary)

STEP = 100_000_000
TIMES = np.arange(65) * STEP
CONTRACT = {"cycles", "plans_published", "plans_by_status", "coc_examples", "acceptance_length",
            "tokens_per_target_pass", "rounds", "lossless_mismatches", "reasoning_ms", "stage_ms",
            "ade_m", "fde_m", "baseline_ade_m", "dropped_by_reason", "model", "runtime",
            "hardware"}
FLAT = np.array([0.0, 0.0, 0.0, 1.0])


def track(seconds=10.0):
    """10 m/s along x, starting at (1000, 500)."""
    stamps = np.arange(round(seconds * 10) + 1) * STEP
    positions = np.array([1000.0, 500.0, 0.0]) + np.outer(stamps * 1e-8, [1.0, 0.0, 0.0])
    return PoseTrack("map", stamps, positions, np.tile(FLAT, (len(stamps), 1)),
                     np.full(len(stamps), 10.0))


def plan(stamp_ns=0, shift_m=0.0, speed=10.0, **changes):
    """A plan along x at `speed` from where the track is at t0, moved by `shift_m` along it."""
    positions = np.array([1000.0 + stamp_ns * 1e-8 + shift_m, 500.0, 0.0]) + np.outer(
        TIMES * 1e-9 * speed, [1.0, 0.0, 0.0])
    map_from_base = np.eye(4)
    map_from_base[:3, 3] = positions[0]
    record = PlanRecord(
        stamp_ns=stamp_ns, received_ns=0, latency_ms=4.0, frame_id="map", plan_id="00" * 16,
        status="KINEMATIC", planner="kinematic", map_from_base=map_from_base,
        time_from_start_ns=TIMES, positions=positions,
        quaternions_xyzw=np.tile(FLAT, (65, 1)), speed_mps=np.full(65, speed),
        acceleration_mps2=np.zeros(65), yaw_rate_rps=np.zeros(65), curvature_1pm=np.zeros(65),
        timings_ms={**dict.fromkeys(STAGES, 0.0), "act": 1.0, "total": 2.0})
    return dataclasses.replace(record, **changes)


def summarise(plans, statuses=(), run_info=None, seconds=10.0):
    scored = score_plans(plans, track(seconds))
    return build_summary(Records(tuple(plans), tuple(statuses)), scored,
                         {"hardware": {"cpu": "test"}, **(run_info or {})})


def test_kinematic_run_has_the_contract_and_no_invented_numbers():
    summary = summarise([plan(i * STEP) for i in range(5)])
    assert CONTRACT <= set(summary)
    assert summary["cycles"] == summary["plans_published"] == 5
    assert summary["plans_by_status"] == {"KINEMATIC": 5}
    assert summary["coc_examples"] == []
    for key in ("acceptance_length", "tokens_per_target_pass", "lossless_mismatches", "model",
                "runtime"):
        assert summary[key] is None, key
    assert summary["rounds"] == {"p50": None, "p95": None}
    assert set(summary["reasoning_ms"].values()) == {None}
    assert summary["stage_ms"]["act"] == {"p50": 1.0, "p95": 1.0, "p99": 1.0}
    assert summary["stage_ms"]["encode"] == {"p50": None, "p95": None, "p99": None}
    assert summary["ade_m"] == pytest.approx(dict.fromkeys(summary["ade_m"], 0.0), abs=1e-9)
    assert summary["ade_m"].keys() == {"0.5", "1", "2", "3", "4", "5", "6.4"}
    json.dumps(summary, allow_nan=False)


def test_a_plan_shifted_by_a_step_shows():
    summary = summarise([plan(0, shift_m=-1.0)])
    assert summary["ade_m"]["3"] == pytest.approx(1.0)
    assert summary["longitudinal_m"]["3"] == pytest.approx(1.0)
    assert summary["anchor_error_m"]["p50"] == pytest.approx(1.0)
    assert summary["baseline_ade_m"]["3"] == pytest.approx(0.0, abs=1e-9)
    assert summary["ade_share_better"]["3"] == 0.0


def test_a_stamp_wrong_by_a_step_shows():
    summary = summarise([dataclasses.replace(plan(STEP), stamp_ns=0)])
    assert summary["fde_m"]["6.4"] == pytest.approx(1.0)


def test_a_plan_left_in_the_ego_frame_shows():
    late = plan(STEP)
    summary = summarise([dataclasses.replace(late, positions=late.positions - late.positions[0])])
    assert summary["ade_m"]["0.5"] > 1000.0


def test_a_plan_of_another_frame_is_not_scored_but_counted():
    summary = summarise([plan(), plan(STEP, frame_id="odom")])
    assert summary["plans_not_scored"] == 1
    assert summary["samples"]["1"] == 1
    assert summary["plans_published"] == 2


def test_horizons_beyond_the_drive_are_null():
    summary = summarise([plan(0), plan(10 * STEP)], seconds=2.0)
    assert summary["samples"] == {"0.5": 2, "1": 2, "2": 1, "3": 0, "4": 0, "5": 0, "6.4": 0}
    assert summary["ade_m"]["3"] is None and summary["baseline_ade_m"]["3"] is None


def test_baseline_goes_from_the_driven_pose_not_from_the_plan():
    summary = summarise([plan(speed=12.0)])
    assert summary["fde_m"]["2"] == pytest.approx(4.0)
    assert summary["baseline_fde_m"]["2"] == pytest.approx(0.0, abs=1e-9)
    assert summary["ade_difference_m"]["2"] == pytest.approx(summary["ade_m"]["2"])


def reasoned(stamp_ns, tokens, rounds, proposed, accepted, reason_ms):
    return plan(stamp_ns, status="OK", planner="nano", text=f"Text {tokens}",
                token_texts=("x",) * tokens, origins=("ROUTINE",) * tokens, rounds=rounds,
                proposed=proposed, accepted=accepted,
                timings_ms={**dict.fromkeys(STAGES, 1.0), "reason": reason_ms})


def test_reasoning_numbers_by_hand():
    summary = summarise(
        [reasoned(0, 20, 5, 20, 15, 10.0), reasoned(STEP, 10, 5, 20, 5, 30.0)],
        run_info={"autoregressive_ms": [50.0, 70.0, 60.0], "lossless_mismatches": 0,
                  "model": "nano", "runtime": "onnxruntime"})
    assert summary["tokens_per_target_pass"] == pytest.approx(30 / 10)
    assert summary["acceptance_length"] == pytest.approx(1 + 20 / 10)
    assert summary["rounds"] == {"p50": 5.0, "p95": 5.0}
    assert summary["reasoning_ms"] == {"autoregressive_p50": 60.0, "speculative_p50": 20.0,
                                       "speedup": 3.0}
    assert summary["coc_examples"] == ["Text 20", "Text 10"]
    assert summary["lossless_mismatches"] == 0
    assert (summary["model"], summary["runtime"]) == ("nano", "onnxruntime")


def test_target_only_text_has_no_acceptance_length():
    summary = summarise([reasoned(0, 8, 8, 0, 0, 10.0)])
    assert summary["acceptance_length"] is None
    assert summary["tokens_per_target_pass"] == 1.0
    assert summary["reasoning_ms"]["speculative_p50"] is None


def test_cycles_and_drops_come_from_the_node():
    statuses = [StatusRecord(1, "WAITING", dropped_by_reason={"a": 2}, cycles=2),
                StatusRecord(2, "PLANNING", dropped_by_reason={"a": 5, "b": 1}, cycles=7),
                StatusRecord(3, "PLANNING", dropped_by_reason={"a": 1}, cycles=1)]   # restarted
    summary = summarise([plan()], statuses)
    assert summary["cycles"] == 8
    assert summary["plans_published"] == 1
    assert summary["dropped_by_reason"] == {"a": 6, "b": 1}
    assert dropped_by_reason([]) == {}
    assert since_activation([1, 5, 2, 3]) == 8


def test_no_plans_at_all():
    summary = summarise([])
    assert summary["cycles"] == 0 and summary["ade_m"]["1"] is None
    assert summary["anchor_error_m"] == {"p50": None, "p95": None}


def test_hardware_says_what_this_machine_is():
    hardware = describe_hardware()
    assert set(hardware) == {"cpu", "cores", "memory_gib", "os", "python", "gpu"}
    assert hardware["cpu"] and hardware["cores"] >= 1


def test_file_appears_whole(tmp_path):
    path = tmp_path / "out" / "summary.json"
    write_summary(path, {"cycles": 1})
    with pytest.raises(ValueError):
        write_summary(path, {"cycles": float("nan")})
    assert json.loads(path.read_text(encoding="utf-8")) == {"cycles": 1}
    assert [p.name for p in path.parent.iterdir()] == ["summary.json"]
