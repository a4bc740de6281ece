"""What the node's figures mean: one diagnosis each for inputs, inference, engine, plan and so on.

Pure functions of a snapshot. Names and levels are for a diagnostic aggregator: WARN where plans
are still made but not as they should be, ERROR where the vehicle must not rely on them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Mapping, Sequence

import numpy as np

from .config import NodeConfig
from .conversions import Status
from .datatypes import PlannerState, PlanStatus, Reason
from .diagnoses import Diagnosis, Level, joined

SLOW_CAMERA_SHARE = 0.8     # of the anchor's rate


@dataclass(frozen=True)
class Engine:
    """What plans, and how it is.

    Attributes:
        name, runtime: of the model; "kinematic" and "" without one.
        configured: whether a checkpoint is asked for.
        isolation: "process", "thread", or "" without a model.
        absent: why the model could not be loaded; empty when it was.
        problem: of its process; empty when it is well.
        pid, starts: of its process; 0 without one.
        description: hashes and the like.
    """

    name: str = "kinematic"
    runtime: str = ""
    configured: bool = False
    isolation: str = ""
    absent: str = ""
    problem: str = ""
    pid: int = 0
    starts: int = 0
    description: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Transport:
    """How messages come in.

    Attributes:
        problems: of quality of service and types, in words.
        lost: topic -> messages the middleware lost since activation.
        newly_lost: topic -> those since the last diagnosis.
        reliable: topic -> whether it is subscribed reliably.
        odometry_latency_ms: of the last messages, from publication to callback; empty: unknown.
    """

    problems: tuple[str, ...] = ()
    lost: Mapping[str, int] = field(default_factory=dict)
    newly_lost: Mapping[str, int] = field(default_factory=dict)
    reliable: Mapping[str, bool] = field(default_factory=dict)
    odometry_latency_ms: Sequence[float] = ()


def diagnose(status: Status, config: NodeConfig, engine: Engine, transport: Transport,
             parameter_problems: Sequence[str] = ()) -> tuple[Diagnosis, ...]:
    """All of them, in a fixed order."""
    return (inputs(status, config), inference(status, config), engine_state(engine),
            plan(status, config), speculation(status), transport_state(transport),
            joined("parameters", [(Level.WARN, problem) for problem in parameter_problems]))


def inputs(status: Status, config: NodeConfig) -> Diagnosis:
    """Rate and age of every input, drops by reason."""
    about_inputs = {Reason.NO_CLOCK, Reason.NO_CAMERA, Reason.NO_ODOMETRY, Reason.CAMERA_LATE,
                    Reason.CAMERAS_MISSING, Reason.CAMERA_DECODE, Reason.ODOMETRY_STALE,
                    Reason.ODOMETRY_GAP, Reason.ODOMETRY_INVALID, Reason.HISTORY_SHORT,
                    Reason.WRONG_FRAME}
    level = Level.ERROR if status.state is PlannerState.BLOCKED else Level.WARN
    findings = [(level, str(refusal)) for refusal in status.reasons
                if refusal.reason in about_inputs]
    anchor_hz = status.camera_rates_hz[config.cameras.anchor]
    for topic, rate_hz in zip(status.camera_topics, status.camera_rates_hz):
        if 0.0 < rate_hz < SLOW_CAMERA_SHARE * anchor_hz:
            findings.append((Level.WARN, f"{topic} at {rate_hz:.1f} Hz, the anchor camera at "
                             f"{anchor_hz:.1f} Hz"))
    values = {}
    for slot, topic in enumerate(status.camera_topics):
        values[f"image{slot} topic"] = topic
        values[f"image{slot} rate_hz"] = f"{status.camera_rates_hz[slot]:.2f}"
        values[f"image{slot} age_s"] = f"{status.camera_ages_s[slot]:.3f}"
    values["odometry rate_hz"] = f"{status.odometry_rate_hz:.2f}"
    values["odometry age_s"] = f"{status.odometry_age_s:.3f}"
    values |= {f"dropped: {name}": str(count) for name, count in sorted(status.drops.items())}
    return joined("inputs", findings, values)


def inference(status: Status, config: NodeConfig) -> Diagnosis:
    """Latency quantiles of the last cycles against the budget."""
    budget_ms = config.deadline_s * 1e3
    values = {"budget_ms": f"{budget_ms:g}", "cycles": str(status.cycles)}
    values |= _quantiles("planning", status.planning_ms)
    values |= _quantiles("latency", status.latency_ms)
    for reason in (Reason.DEADLINE_MISSED, Reason.REASONING_UNFINISHED, Reason.MODEL_FAILED):
        values[reason.value] = str(status.plan_reasons.get(reason.value, 0))
    findings = []
    if len(status.planning_ms) and float(np.percentile(status.planning_ms, 95)) > budget_ms:
        findings.append((Level.WARN, f"planning takes {values['planning p95_ms']} ms (p95), "
                         f"budget {budget_ms:g} ms"))
    late = (status.recent_reasons.get(Reason.DEADLINE_MISSED.value, 0)
            + status.recent_reasons.get(Reason.REASONING_UNFINISHED.value, 0))
    if late:
        findings.append((Level.WARN, f"{late} of the last {len(status.planning_ms)} plans not in "
                         f"time"))
    return joined("inference", findings, values)


def engine_state(engine: Engine) -> Diagnosis:
    """Whether the configured model is there and runs."""
    findings = []
    if engine.absent:
        findings.append((Level.ERROR, f"no model, the kinematic planner plans: {engine.absent}"))
    elif engine.problem:
        findings.append((Level.ERROR, engine.problem))
    values = {"planner": engine.name, "runtime": engine.runtime, "isolation": engine.isolation}
    if engine.starts:
        values |= {"process id": str(engine.pid), "process starts": str(engine.starts)}
    return joined("engine", findings, {**values, **engine.description})


def plan(status: Status, config: NodeConfig) -> Diagnosis:
    """Whether the plan in force may be followed."""
    findings = []
    if status.state is PlannerState.WAITING:
        findings.append((Level.WARN, "no plan yet: "
                         + ("; ".join(map(str, status.reasons)) or "waiting for inputs")))
    elif status.state is PlannerState.BLOCKED:
        findings.append((Level.ERROR, "no new plan: " + "; ".join(map(str, status.reasons))))
    if status.last_plan_status is PlanStatus.STOP:
        findings.append((Level.ERROR, "a stop is published" + _because(status)))
    elif status.last_plan_status is PlanStatus.LAST_VALID:
        findings.append((Level.WARN, "the last valid plan is published" + _because(status)))
    elif status.state is PlannerState.DEGRADED:
        findings.append((Level.WARN, "; ".join(map(str, status.reasons))))
    in_force = status.last_plan_status
    values = {"state": status.state.name, "status": "" if in_force is None else in_force.name,
              "age_s": f"{status.last_plan_age_s:.3f}", "max_age_s": f"{config.max_plan_age_s:g}",
              "published": str(status.plans_published), "repeated": str(status.plans_repeated)}
    values |= {f"not better: {name}": str(count)
               for name, count in sorted(status.plan_reasons.items())}
    return joined("plan", findings, values)


def speculation(status: Status) -> Diagnosis:
    """How the reasoning was written: acceptance, draft failures."""
    failures = status.recent_reasons.get(Reason.DRAFT_FAILED.value, 0)
    findings = [(Level.WARN, f"the draft failed in {failures} of the last "
                 f"{len(status.planning_ms)} cycles, the target wrote alone")] if failures else []
    values = {"draft failures": str(status.plan_reasons.get(Reason.DRAFT_FAILED.value, 0)),
              "texts": str(len(status.texts))}
    if len(status.texts):
        tokens, rounds, proposed, accepted = np.sum(np.asarray(status.texts), axis=0).tolist()
        values["tokens_per_target_pass"] = f"{tokens / max(rounds, 1):.3f}"
        values["acceptance_rate"] = f"{accepted / proposed:.3f}" if proposed else ""
    return joined("speculation", findings, values)


def transport_state(transport: Transport) -> Diagnosis:
    """Publishers and subscribers that do not fit, and what was lost between them."""
    findings = [(Level.WARN, problem) for problem in transport.problems]
    findings += [(Level.WARN, f"{topic}: {count} messages lost on the way")
                 for topic, count in transport.newly_lost.items() if count]
    values = {f"{topic} qos": "reliable" if reliable else "best effort"
              for topic, reliable in transport.reliable.items()}
    values |= {f"{topic} lost": str(count) for topic, count in transport.lost.items()}
    values |= _quantiles("odometry callback", transport.odometry_latency_ms)
    return joined("transport", findings, values)


def _because(status: Status) -> str:
    why = "; ".join(map(str, status.reasons))
    return f": {why}" if why else ""


def _quantiles(name: str, values_ms: Sequence[float]) -> dict[str, str]:
    if not len(values_ms):
        return {}
    values = np.asarray(values_ms)
    shares = zip(("p50", "p95", "p99"), np.percentile(values, [50, 95, 99]))
    return {**{f"{name} {share}_ms": f"{value:.2f}" for share, value in shares},
            f"{name} max_ms": f"{values.max():.2f}", f"{name} samples": str(len(values))}
