"""summary.json: the numbers of one run, for people and for scripts outside this repository.

What was not measured is null; no number is ever made up. Keys are only added, never renamed.
"""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterable, Mapping, Optional, Sequence

import numpy as np

from ..datatypes import PlanStatus
from .latency import quantiles, stage_quantiles
from .metrics import (HORIZONS_S, HorizonErrors, PathErrors, PoseTrack, constant_velocity_path,
                      horizon_errors, paired, path_errors, pose_at)
from .records import STAGES, PlanRecord, Records, StatusRecord

EXAMPLES = 5


@dataclass(frozen=True)
class ScoredPlan:
    """A plan beside what was driven; arrays have the plan's N waypoints.

    Attributes:
        plan: the record.
        truth: (N, 3) driven positions, NaN where not known.
        truth_speed_mps: (N,) driven speed, NaN where not known.
        baseline: (N, 3) constant velocity from the driven pose at t0.
        errors, baseline_errors: against the truth.
        anchor_error_m: between the plan's pose at t0 and the driven one.
    """

    plan: PlanRecord
    truth: np.ndarray
    truth_speed_mps: np.ndarray
    baseline: np.ndarray
    errors: PathErrors
    baseline_errors: PathErrors
    anchor_error_m: float


def score_plans(plans: Sequence[PlanRecord], track: PoseTrack) -> list[ScoredPlan]:
    """Score every plan that can be compared with the track.

    Left out are plans without points, plans in another frame than the track's, and plans whose t0
    lies outside of the track.
    """
    scored = [_score(plan, track) for plan in plans
              if len(plan.positions) and plan.frame_id == track.frame_id]
    return [s for s in scored if np.isfinite(s.anchor_error_m)]


def _score(plan: PlanRecord, track: PoseTrack) -> ScoredPlan:
    time_ns = plan.time_from_start_ns
    truth, rotation, speed = pose_at(track, plan.stamp_ns + time_ns)
    position0, rotation0, speed0 = (v[0] for v in pose_at(track, np.array([plan.stamp_ns])))
    baseline, heading = constant_velocity_path(position0, rotation0, speed0, time_ns)
    return ScoredPlan(
        plan=plan, truth=truth, truth_speed_mps=speed, baseline=baseline,
        errors=path_errors(time_ns, plan.positions, plan.quaternions_xyzw, truth, rotation),
        baseline_errors=path_errors(time_ns, baseline, heading, truth, rotation),
        anchor_error_m=float(np.linalg.norm((plan.map_from_base[:3, 3] - position0)[:2])))


def build_summary(records: Records, scored: Sequence[ScoredPlan],
                  run_info: Mapping[str, Any]) -> dict[str, Any]:
    """Everything about a run as plain JSON values.

    Args:
        records: as read from the run's record file.
        scored: the plans beside the driven path, from `score_plans`.
        run_info: what the records cannot know. Used here: "model", "runtime", "hardware"
            (otherwise this machine), "lossless_mismatches", "autoregressive_ms" (reasoning times
            of the same scenes without a draft; otherwise of the plans written without one),
            "speculative_ms" (with it, in the same run; otherwise of the plans). All may be
            missing.
    """
    plans = records.plans
    ours = horizon_errors([s.errors for s in scored])
    theirs = horizon_errors([s.baseline_errors for s in scored])
    return plain({
        **_counts(records),
        **_reasoning(plans, run_info),
        "stage_ms": stage_quantiles((p.timings_ms for p in plans), STAGES),
        "latency_ms": quantiles(p.latency_ms for p in plans if p.latency_ms > 0.0),
        "ade_m": by_horizon(ours.ade_m), "fde_m": by_horizon(ours.fde_m),
        "baseline_ade_m": by_horizon(theirs.ade_m), "baseline_fde_m": by_horizon(theirs.fde_m),
        **_comparison(ours, theirs, scored, plans),
        "dropped_by_reason": dropped_by_reason(records.statuses),
        "model": run_info.get("model"), "runtime": run_info.get("runtime"),
        "hardware": run_info.get("hardware") or describe_hardware(),
    })


def _counts(records: Records) -> dict[str, Any]:
    """Cycles and plans, counted by the recorder and by the node."""
    names = [p.status for p in records.plans]
    cycles = since_activation([s.cycles for s in records.statuses])
    return {
        "cycles": max(cycles, len(names)),
        "plans_published": sum(1 for p in records.plans if len(p.positions)),
        "plans_by_status": {s: names.count(s) for s in PlanStatus.__members__ if s in names},
        "planners": sorted({p.planner for p in records.plans}),
        "records_cut": records.cut,
    }


def _comparison(ours: HorizonErrors, theirs: HorizonErrors, scored: Sequence[ScoredPlan],
                plans: Sequence[PlanRecord]) -> dict[str, Any]:
    pairs = paired(ours.each_ade_m, theirs.each_ade_m)
    return {
        "samples": by_horizon(ours.samples),
        "ade_difference_m": by_horizon(pairs.difference),
        "ade_share_better": by_horizon(pairs.share_better),
        "ahe_rad": by_horizon(ours.ahe_rad), "fhe_rad": by_horizon(ours.fhe_rad),
        "longitudinal_m": by_horizon(ours.longitudinal_m),
        "lateral_m": by_horizon(ours.lateral_m),
        "anchor_error_m": quantiles((s.anchor_error_m for s in scored), ("p50", "p95")),
        "plans_not_scored": len(plans) - len(scored),
    }


def _reasoning(plans: Sequence[PlanRecord], run_info: Mapping[str, Any]) -> dict[str, Any]:
    """What is known about the text; null for a planner that does not reason."""
    written = [p for p in plans if p.rounds > 0]
    rounds = sum(p.rounds for p in written)
    tokens = sum(len(p.token_texts) for p in written)
    drafted = [p for p in written if p.proposed > 0]
    undrafted_ms = [p.timings_ms["reason"] for p in written if p.proposed == 0]
    autoregressive = quantiles(run_info.get("autoregressive_ms") or undrafted_ms,
                               ("p50",))["p50"]
    drafted_ms = [p.timings_ms["reason"] for p in drafted]
    speculative = quantiles(run_info.get("speculative_ms") or drafted_ms, ("p50",))["p50"]
    return {
        "coc_examples": list(dict.fromkeys(p.text for p in written if p.text))[:EXAMPLES],
        "acceptance_length": 1.0 + sum(p.accepted for p in drafted)
        / sum(p.rounds for p in drafted) if drafted else None,
        "tokens_per_target_pass": tokens / rounds if rounds else None,
        "rounds": quantiles((p.rounds for p in written), ("p50", "p95")),
        "lossless_mismatches": run_info.get("lossless_mismatches"),
        "reasoning_ms": {
            "autoregressive_p50": autoregressive, "speculative_p50": speculative,
            "speedup": autoregressive / speculative if autoregressive and speculative else None},
    }


def by_horizon(values: Iterable[float]) -> dict[str, float]:
    """{"0.5": ..., "1": ..., ...}, one entry for each of `HORIZONS_S`."""
    return {f"{horizon:g}": value for horizon, value in zip(HORIZONS_S, values)}


def dropped_by_reason(statuses: Sequence[StatusRecord]) -> dict[str, int]:
    """Total of each reason's count; counts that start anew (a new activation) are added up."""
    reasons = sorted({reason for s in statuses for reason in s.dropped_by_reason})
    totals = {r: since_activation([s.dropped_by_reason.get(r, 0) for s in statuses])
              for r in reasons}
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


def since_activation(counts: Sequence[int]) -> int:
    """Total of a count that only rises but may start anew: [1, 5, 2, 3] -> 8."""
    total, last = 0, 0
    for count in counts:
        total += count - last if count >= last else count
        last = count
    return total


def describe_hardware() -> dict[str, Any]:
    """This machine: processor, cores, memory, operating system, Python; GPU or null."""
    return {"cpu": _cpu_name(), "cores": os.cpu_count(), "memory_gib": _memory_gib(),
            "os": _os_name(), "python": platform.python_version(), "gpu": _gpu_name()}


def _cpu_name() -> str:
    """The kernel's name for the processor, or failing that the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _memory_gib() -> Optional[float]:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2 ** 30, 1)
    except (ValueError, OSError, AttributeError):       # not known on this system
        return None


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.platform(terse=True)


def _gpu_name() -> Optional[str]:
    """What nvidia-smi reports; None without it."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    try:
        answer = subprocess.run([command, "--query-gpu=name", "--format=csv,noheader"],
                                capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return ", ".join(answer.stdout.split("\n")).strip(", ") or None


def plain(value: Any) -> Any:
    """Numbers and containers as JSON has them; NaN and infinity become null."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_summary(path: Path, summary: Mapping[str, Any]) -> None:
    """Write beside the target and rename, so that readers never see half a file."""
    replace_text(path, json.dumps(summary, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def replace_text(path: Path, text: str) -> None:
    """Write a text file in one step."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
