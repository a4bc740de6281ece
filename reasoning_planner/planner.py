"""The whole planning step, one observation to one plan, without ROS.

Read `Planner.plan` from the top: ask the model, check its answer, else fall back on the kinematic
plan, else on a stop, else refuse. Whatever happens, what comes back is finite, and `reasons` says
why it is not better. Knows no topics, clocks or messages; keeps nothing between two calls.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from .actions import kinematic, limits
from .config import PlannerConfig
from .datatypes import (Deadline, Observation, Plan, PlanStatus, Reason, Reasoning, Refusal,
                        StageTimings, Trajectory)
from .errors import PlannerError


@dataclass(frozen=True)
class ModelResult:
    """What a model answers.

    Attributes:
        trajectory: ego frame at t0, unchecked.
        reasoning: the text and how it was written.
        timings: encode, prefill, reason and act; the planner fills the total.
        reasons: what went less than well (unfinished reasoning, a failed draft).
    """

    trajectory: Trajectory
    reasoning: Reasoning = field(default_factory=Reasoning)
    timings: StageTimings = field(default_factory=StageTimings)
    reasons: tuple[Refusal, ...] = ()


class Model(Protocol):
    """A driving model: images, history and instruction to reasoning and trajectory."""

    name: str

    def plan_trajectory(self, observation: Observation,
                        deadline: Deadline) -> ModelResult | Refusal:
        """Plan before the deadline, or say why not. A broken engine raises a PlannerError."""


class Planner:
    """Joins the stages. Holds a configuration and a loaded model, and changes neither."""

    def __init__(self, config: PlannerConfig, model: Model | None = None):
        self.config = config
        self.model = model

    def plan(self, observation: Observation, deadline: Deadline) -> Plan:
        """One cycle.

        Args:
            observation: cameras and ego history at t0.
            deadline: an answer of the model after this moment is not used; the kinematic plan,
                about a millisecond's work, is made all the same.
        Returns:
            A plan anchored at the observation's t0: OK or DEGRADED from the model, KINEMATIC,
            STOP, or REFUSED (then the trajectory stands still and is not to be followed).
        """
        started_s = time.perf_counter()
        refusal = None
        if self.model is not None:
            result = self._ask_model(self.model, observation, deadline)
            if isinstance(result, ModelResult):
                return self._model_plan(self.model, observation, result, started_s)
            refusal = result
        return self._fallback_plan(observation, refusal, started_s)

    def _ask_model(self, model: Model, observation: Observation,
                   deadline: Deadline) -> ModelResult | Refusal:
        if deadline.passed:
            return Refusal(Reason.DEADLINE_MISSED, f"{model.name} not started")
        try:
            result = model.plan_trajectory(observation, deadline)
        except PlannerError as error:
            return Refusal(Reason.MODEL_FAILED, f"{model.name}: {error}")
        if isinstance(result, Refusal):
            return result
        if deadline.passed:
            return Refusal(Reason.DEADLINE_MISSED,
                           f"{model.name} late by {-deadline.remaining_s * 1e3:.0f} ms")
        return self._check(observation, result.trajectory) or result

    def _check(self, observation: Observation, trajectory: Trajectory) -> Refusal | None:
        if not np.isfinite(observation.history.map_from_base).all():
            return Refusal(Reason.ODOMETRY_INVALID, "pose at t0 is not finite")
        return limits.check(trajectory, observation.history.speed_mps, self.config.limits)

    def _model_plan(self, model: Model, observation: Observation, result: ModelResult,
                    started_s: float) -> Plan:
        reasons = observation.degraded + result.reasons
        return Plan(
            plan_id=uuid.uuid4().bytes,
            stamp_ns=observation.stamp_ns,
            frame_id=observation.frame_id,
            map_from_base=observation.history.map_from_base,
            trajectory=result.trajectory,
            status=PlanStatus.DEGRADED if reasons else PlanStatus.OK,
            reasons=reasons,
            reasoning=result.reasoning,
            timings=replace(result.timings, total_ms=_elapsed_ms(started_s)),
            planner=model.name,
        )

    def _fallback_plan(self, observation: Observation, refusal: Refusal | None,
                       started_s: float) -> Plan:
        """The first of kinematic and stopping plan that passes the check, else a refusal."""
        act_started_s = time.perf_counter()
        reasons = observation.degraded + ((refusal,) if refusal else ())
        for status, make in ((PlanStatus.KINEMATIC, kinematic.plan_kinematic),
                             (PlanStatus.STOP, kinematic.stop_trajectory)):
            trajectory = make(observation.history, self.config.kinematic)
            failed = self._check(observation, trajectory)
            if failed is None:
                break
            reasons += (failed,) if failed not in reasons else ()
        else:
            status, trajectory = PlanStatus.REFUSED, kinematic.standing_trajectory()
        map_from_base = observation.history.map_from_base
        return Plan(
            plan_id=uuid.uuid4().bytes,
            stamp_ns=observation.stamp_ns,
            frame_id=observation.frame_id,
            map_from_base=map_from_base if np.isfinite(map_from_base).all() else np.eye(4),
            trajectory=trajectory,
            status=status,
            reasons=reasons,
            timings=StageTimings(act_ms=_elapsed_ms(act_started_s),
                                 total_ms=_elapsed_ms(started_s)),
            planner="kinematic",
        )


def _elapsed_ms(started_s: float) -> float:
    return (time.perf_counter() - started_s) * 1e3
