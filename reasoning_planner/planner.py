"""The whole planning step, one observation to one plan, without ROS.

Read `Planner.plan` from the top: ask the model, check its answer, else do what the policy of that
fault says: the kinematic plan, the last valid one, a stop; else refuse. Whatever happens, what
comes back is finite, and `reasons` says why it is not better. Knows no topics, clocks or messages;
keeps nothing between two calls.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from .actions import kinematic, limits
from .actions.reanchor import EgoMotion, reanchor
from .config import PlannerConfig
from .datatypes import (Deadline, EgoHistory, Observation, Plan, PlanStatus, Reason, Reasoning,
                        Refusal, StageTimings, Trajectory)
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

    def plan(self, observation: Observation, deadline: Deadline,
             last_valid: Plan | None = None) -> Plan:
        """One cycle.

        Args:
            observation: cameras and ego history at t0.
            deadline: an answer of the model after this moment is not used; the plan in its place,
                about a millisecond's work, is made all the same.
            last_valid: what the policy "last_valid" falls back on, as it was made.
        Returns:
            A plan anchored at the observation's t0: OK or DEGRADED from the model, KINEMATIC
            without one; by the policy of what went wrong KINEMATIC, LAST_VALID or STOP; or
            REFUSED (then the trajectory stands still and is not to be followed).
        """
        started_s = time.perf_counter()
        refusal = None
        if self.model is not None:
            result = self._ask_model(self.model, observation, deadline)
            if isinstance(result, ModelResult):
                return self._model_plan(self.model, observation, result, started_s)
            refusal = result
        return self._fallback_plan(observation, refusal, last_valid, started_s)

    def carry_on(self, plan: Plan, history: EgoHistory,
                 reasons: tuple[Refusal, ...] = ()) -> Plan:
        """A plan already made, from the vehicle's present pose on; a stop where that cannot be.

        Args:
            plan: as it was made.
            history: newer than the plan's row 0.
            reasons: why there is no newer plan: said of a stop.
        Returns:
            The same plan re-anchored, or a STOP, or REFUSED, with the reason.
        """
        started_s = time.perf_counter()
        moved = self._moved(plan, history)
        failed = (moved if isinstance(moved, Refusal)
                  else limits.check(moved.trajectory, history.speed_mps, self.config.limits))
        if failed is None:
            return moved
        here = Observation(history.stamp_ns, plan.frame_id, history, (), reasons)
        return self._first_good(here, (PlanStatus.STOP,), None, (failed, *reasons), started_s)

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
                       last_valid: Plan | None, started_s: float) -> Plan:
        """What the policy names."""
        reasons = observation.degraded + ((refusal,) if refusal else ())
        return self._first_good(observation, self._fallbacks(refusal), last_valid, reasons,
                                started_s)

    def _first_good(self, observation: Observation, statuses: tuple[PlanStatus, ...],
                    last_valid: Plan | None, reasons: tuple[Refusal, ...],
                    started_s: float) -> Plan:
        """The first of these plans that passes the check, else a refusal."""
        for status in statuses:
            plan = (self._last_valid_plan(observation, last_valid, reasons)
                    if status is PlanStatus.LAST_VALID
                    else self._plan_from_history(observation, status, reasons, started_s))
            failed = (plan if isinstance(plan, Refusal)
                      else self._check(observation, plan.trajectory))
            if failed is None:
                return plan
            reasons += (failed,) if failed not in reasons else ()
        return self._plan_from_history(observation, PlanStatus.REFUSED, reasons, started_s)

    def _fallbacks(self, refusal: Refusal | None) -> tuple[PlanStatus, ...]:
        """What to try in turn."""
        policies = self.config.policies
        policy = {Reason.DEADLINE_MISSED: policies.deadline_missed,
                  Reason.REASONING_UNFINISHED: policies.deadline_missed,
                  Reason.PLAN_NAN: policies.plan_not_finite,
                  Reason.PLAN_OVER_LIMIT: policies.plan_over_limit,
                  Reason.MODEL_FAILED: policies.model_failed,
                  }.get(refusal.reason if refusal else None, "kinematic")
        return {"kinematic": (PlanStatus.KINEMATIC, PlanStatus.STOP),
                "last_valid": (PlanStatus.LAST_VALID, PlanStatus.STOP),
                "stop": (PlanStatus.STOP,)}[policy]

    def _last_valid_plan(self, observation: Observation, last_valid: Plan | None,
                         reasons: tuple[Refusal, ...]) -> Plan | Refusal:
        if last_valid is None:
            return Refusal(Reason.PLAN_TOO_OLD, "there is no earlier plan to follow")
        moved = self._moved(last_valid, observation.history)
        return (moved if isinstance(moved, Refusal)
                else replace(moved, status=PlanStatus.LAST_VALID, reasons=reasons))

    def _moved(self, plan: Plan, history: EgoHistory) -> Plan | Refusal:
        now = EgoMotion(history.stamp_ns, history.map_from_base, history.speed_mps)
        return reanchor(plan, now, self.config.max_plan_age_s, self.config.reanchor)

    def _plan_from_history(self, observation: Observation, status: PlanStatus,
                           reasons: tuple[Refusal, ...], started_s: float) -> Plan:
        """What needs no model: a kinematic plan, a stop, or (REFUSED) standing still."""
        act_started_s = time.perf_counter()
        history, config = observation.history, self.config.kinematic
        trajectory = (kinematic.plan_kinematic(history, config)
                      if status is PlanStatus.KINEMATIC
                      else kinematic.stop_trajectory(history, config)
                      if status is PlanStatus.STOP else kinematic.standing_trajectory())
        finite = np.isfinite(history.map_from_base).all()
        return Plan(
            plan_id=uuid.uuid4().bytes,
            stamp_ns=observation.stamp_ns,
            frame_id=observation.frame_id,
            map_from_base=history.map_from_base if finite else np.eye(4),
            trajectory=trajectory,
            status=status,
            reasons=reasons,
            timings=StageTimings(act_ms=_elapsed_ms(act_started_s),
                                 total_ms=_elapsed_ms(started_s)),
            planner="kinematic",
        )


def _elapsed_ms(started_s: float) -> float:
    return (time.perf_counter() - started_s) * 1e3
