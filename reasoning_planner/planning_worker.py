"""The planning threads: inputs in, plans out, and what is counted on the way.

A cycle begins when the anchor camera's frame arrives; it waits up to `settle_s` for the other
inputs of that moment, builds the observation, plans, and hands the plan to the outlet. Between two
new plans a second thread repeats the one in force, re-anchored, when `repeat_if_due` finds it due:
the milliseconds of that are not a callback's. No ROS: the clock and the outlet are given.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from typing import Callable, Protocol, Sequence

from .cadence import Cadence
from .config import NodeConfig
from .conversions import Status
from .datatypes import Deadline, Observation, Plan, PlannerState, PlanStatus, Reason, Refusal
from .perception.observation import CameraRate, ObservationBuilder
from .planner import Model, Planner

LATENCY_WINDOW = 100
WAITING_FOR = {Reason.NO_CLOCK, Reason.NO_CAMERA, Reason.NO_ODOMETRY, Reason.HISTORY_SHORT}
FROM_THE_MODEL = (PlanStatus.OK, PlanStatus.DEGRADED)


class Outlet(Protocol):
    """Where plans and status go."""

    def publish_plan(self, plan: Plan, latency_ms: float, repeat: bool) -> bool:
        """Whether it was published: not once the node has been stopped."""

    def publish_status(self) -> None:
        """After every cycle."""

    def fail(self, error: Exception) -> None:
        """The thread died of a bug."""


@dataclass(frozen=True)
class _InForce:
    """What is repeated until a newer plan is made: as it was made, not as it was moved."""

    plan: Plan
    latency_ms: float


@dataclass
class Tally:
    """Counted since activation."""

    cycles: int = 0
    published: int = 0
    repeated: int = 0
    given_up: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)      # of published new plans
    latency_ms: deque[float] = field(default_factory=lambda: deque(maxlen=LATENCY_WINDOW))
    planning_ms: deque[float] = field(default_factory=lambda: deque(maxlen=LATENCY_WINDOW))
    recent_reasons: deque[tuple[str, ...]] = field(             # of the last new plans
        default_factory=lambda: deque(maxlen=LATENCY_WINDOW))
    texts: deque[tuple[int, int, int, int]] = field(        # tokens, rounds, proposed, accepted
        default_factory=lambda: deque(maxlen=LATENCY_WINDOW))


class PlanningWorker:
    """Two threads, from `start` to `stop`; the other methods are for any thread."""

    def __init__(self, config: NodeConfig, model: Model | None, image_topics: Sequence[str],
                 outlet: Outlet, now_ns: Callable[[], int], cadence_s: Callable[[], float],
                 route: Callable[[str], str] = lambda parameter: parameter,
                 show: Callable[[Observation, Plan], None] = lambda observation, plan: None):
        """
        Args:
            now_ns: the node's clock, 0 while it has not begun.
            cadence_s: seconds in which `publish_rate_hz` is counted.
            route: the instruction in force, given the parameter `route_text`.
            show: told every new plan that was published, with what it was made from.
        """
        self._config, self._outlet = config, outlet
        self._now_ns, self._cadence_s, self._route = now_ns, cadence_s, route
        self._show = show
        self.builder = ObservationBuilder(config, image_topics)
        self.planner = Planner(config, model)
        self._condition = threading.Condition()         # inputs
        self._lock = threading.Lock()                   # plans: in force, published, epoch
        self._stopping = False
        self._threads: tuple[threading.Thread, ...] = ()
        self._repeat_due = threading.Event()
        self._arrived_s = 0.0
        self._forget_plans()
        self._tally = Tally()
        self._cadence = Cadence(config.publish_rate_hz)

    # Life --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin planning with empty buffers and counts."""
        self.builder = ObservationBuilder(self._config, self.builder.topics)
        self._forget_plans()
        self._tally = Tally()
        self._cadence.reset()
        self._stopping = False
        self._repeat_due.clear()
        self._threads = tuple(
            threading.Thread(target=self._run, args=(loop,), name=name, daemon=True)
            for name, loop in (("planning", self._loop), ("repeating", self._repeat_loop)))
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the threads after the cycle in hand."""
        with self._condition:
            self._stopping = True
            self._condition.notify_all()
        self._repeat_due.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        self._threads = ()

    def reconfigure(self, config: NodeConfig) -> None:
        """Other deadlines, limits, policies; cameras, history and model stay as they are."""
        with self._lock:
            if config.publish_rate_hz != self._config.publish_rate_hz:
                self._cadence = Cadence(config.publish_rate_hz)
            self._config = config
            self.planner = Planner(config, self.planner.model)

    def wake(self, arrived: bool = False) -> None:
        """An input was stored; `arrived` when it was the anchor camera's."""
        with self._condition:
            if arrived:
                self._arrived_s = time.monotonic()
            self._condition.notify_all()

    def reset(self) -> None:
        """Time jumped: forget inputs and plans; a cycle in flight is not published."""
        self.builder.reset(Reason.TIME_JUMP)
        with self._lock:
            self._forget_plans()
            self._cadence.reset()

    def _forget_plans(self) -> None:
        self._in_force: _InForce | None = None
        self._last_valid: Plan | None = None
        self._newest_published_ns = 0                   # stamp of the newest trajectory
        self._reasons: tuple[Refusal, ...] = ()
        self._blocked = False

    # Cycle -------------------------------------------------------------------------------------

    def _run(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except Exception as error:      # a node that silently no longer plans is worse than none
            self._outlet.fail(error)

    def _loop(self) -> None:
        while True:
            with self._condition:
                anchor_ns = self.builder.next_anchor_ns()
                while anchor_ns is None and not self._stopping:
                    self._condition.wait()
                    anchor_ns = self.builder.next_anchor_ns()
                arrived_s = self._arrived_s
                if anchor_ns is not None:
                    self._settle(anchor_ns, arrived_s + self._config.settle_s)
                if self._stopping:
                    return
            assert anchor_ns is not None
            self._cycle(anchor_ns, arrived_s)

    def _settle(self, t0_ns: int, until_s: float) -> None:
        """Wait for the other inputs of the moment t0; holds the condition."""
        while not (self._stopping or self.builder.is_complete(t0_ns)):
            remaining_s = until_s - time.monotonic()
            if remaining_s <= 0.0:
                return
            self._condition.wait(remaining_s)

    def _cycle(self, t0_ns: int, arrived_s: float) -> None:
        """One planning cycle, from inputs to publication."""
        self._tally.cycles += 1
        epoch = self.builder.epoch
        observation = self.builder.build(t0_ns, route_text=self._route(self._config.route_text))
        if isinstance(observation, Refusal):        # counted by the builder
            self._reasons, self._blocked = (observation,), True
        else:
            self._plan(observation, epoch, arrived_s)
        self._outlet.publish_status()

    def _plan(self, observation: Observation, epoch: int, arrived_s: float) -> None:
        plan = self.planner.plan(observation, Deadline.after(self._config.deadline_s),
                                 self._last_valid)
        with self._lock:
            if epoch != self.builder.epoch:
                self._give_up(Refusal(Reason.TIME_JUMP, "time jumped during the cycle"))
            elif plan.status is PlanStatus.REFUSED:
                self._give_up(*plan.reasons)
            else:
                latency_ms = (time.monotonic() - arrived_s) * 1e3
                self._reasons, self._blocked = plan.reasons, False
                self._count(plan, latency_ms)
                self._put_in_force(plan, latency_ms)
                self._publish(self._as_of_now(plan), latency_ms, repeat=False)
                self._show(observation, plan)

    def _put_in_force(self, plan: Plan, latency_ms: float) -> None:
        if plan.status in FROM_THE_MODEL:
            self._last_valid = plan
        if plan.status is PlanStatus.LAST_VALID:
            assert self._last_valid is not None
            plan = replace(self._last_valid, status=plan.status, reasons=plan.reasons)
        self._in_force = _InForce(plan, latency_ms)

    def _as_of_now(self, plan: Plan) -> Plan:
        """Stamps on the topic never go back: an overtaken plan is moved to the newest odometry."""
        if plan.stamp_ns > self._newest_published_ns:
            return plan
        history = self.builder.newest_history()
        if isinstance(history, Refusal) or history.stamp_ns <= plan.stamp_ns:
            return plan
        return self.planner.carry_on(plan, history)

    def _publish(self, plan: Plan, latency_ms: float, repeat: bool) -> None:
        """Holds the lock, so that no plan of an earlier epoch comes out after a jump."""
        if plan.status is PlanStatus.REFUSED or plan.stamp_ns < self._newest_published_ns:
            return
        if self._outlet.publish_plan(plan, latency_ms, repeat):
            self._newest_published_ns = plan.stamp_ns
            self._cadence.published(self._cadence_s())
            self._tally.published += int(not repeat)
            self._tally.repeated += int(repeat)

    def _give_up(self, *reasons: Refusal) -> None:
        self._tally.given_up.update(refusal.reason.value for refusal in reasons)
        self._reasons, self._blocked = reasons, True

    def _count(self, plan: Plan, latency_ms: float) -> None:
        self._tally.latency_ms.append(latency_ms)
        self._tally.planning_ms.append(plan.timings.total_ms)
        reasons = tuple(refusal.reason.value for refusal in plan.reasons)
        self._tally.reasons.update(reasons)
        self._tally.recent_reasons.append(reasons)
        text = plan.reasoning
        if text.token_ids and plan.status in FROM_THE_MODEL:
            self._tally.texts.append((len(text.token_ids), text.rounds, text.proposed,
                                      text.accepted))

    # Between two plans -------------------------------------------------------------------------

    def repeat_if_due(self) -> None:
        """Where it is time, have the plan in force published once more; returns at once."""
        if self._cadence.is_due(self._cadence_s()):
            self._repeat_due.set()

    def _repeat_loop(self) -> None:
        while True:
            self._repeat_due.wait()
            self._repeat_due.clear()
            if self._stopping:
                return
            with self._lock:
                if self._cadence.is_due(self._cadence_s()):     # no new plan came in between
                    self._repeat()

    def _repeat(self) -> None:
        """Publish the plan in force from the vehicle's present pose on, or a stop; holds the lock.

        Nothing while odometry says nothing new: without a pose there is nothing to plan from.
        """
        in_force = self._in_force
        if in_force is None:
            return
        history = self.builder.newest_history()
        if isinstance(history, Refusal) or history.stamp_ns <= self._newest_published_ns:
            return
        if self._now_ns() - history.stamp_ns > self._config.silence_s * 1e9:
            return
        plan = self.planner.carry_on(in_force.plan, history, self._reasons)
        self._publish(plan, in_force.latency_ms, repeat=True)

    # Status ------------------------------------------------------------------------------------

    def status(self) -> Status:
        """A snapshot."""
        now_ns, tally, in_force = self._now_ns(), self._tally, self._in_force
        cameras = self.builder.camera_rates(now_ns)
        odometry_rate_hz, odometry_age_s = self.builder.odometry_rate(now_ns)
        faults = (*self._silences(now_ns, cameras[self._config.cameras.anchor], odometry_age_s),
                  *self._overdue(now_ns, in_force))
        return Status(
            now_ns=now_ns,
            state=self._state(faults),
            reasons=_without_repeats((*faults, *self._reasons)),
            last_plan_ns=in_force.plan.observed_ns if in_force else 0,
            last_plan_status=in_force.plan.status if in_force else None,
            cycles=tally.cycles,
            plans_published=tally.published,
            plans_repeated=tally.repeated,
            camera_topics=self.builder.topics,
            camera_rates_hz=tuple(camera.rate_hz for camera in cameras),
            camera_ages_s=tuple(_known_age_s(camera.age_s) for camera in cameras),
            odometry_rate_hz=odometry_rate_hz,
            odometry_age_s=_known_age_s(odometry_age_s),
            drops=Counter(self.builder.counts()) + tally.given_up,
            plan_reasons=dict(tally.reasons),
            recent_reasons=Counter(reason for row in list(tally.recent_reasons)
                                   for reason in row),
            latency_ms=tuple(tally.latency_ms),
            planning_ms=tuple(tally.planning_ms),
            texts=tuple(tally.texts),
        )

    def _silences(self, now_ns: int, anchor: CameraRate,
                  odometry_age_s: float) -> tuple[Refusal, ...]:
        """Inputs that have fallen silent, whether or not a cycle noticed; no clock, too."""
        if now_ns == 0:
            return (Refusal(Reason.NO_CLOCK, "simulated time is on and /clock says nothing"),)
        silent, limit_s = [], self._config.silence_s
        if math.isinf(anchor.age_s):        # since the start, or since time jumped
            silent.append(Refusal(Reason.NO_CAMERA,
                                  f"nothing on {anchor.topic}, the anchor camera"))
        elif anchor.age_s > limit_s:
            silent.append(Refusal(Reason.CAMERA_LATE, f"anchor camera {anchor.topic} silent for "
                                  f"{anchor.age_s:.1f} s"))
        if math.isinf(odometry_age_s):
            silent.append(Refusal(Reason.NO_ODOMETRY, "nothing usable so far"))
        elif odometry_age_s > limit_s:
            silent.append(Refusal(Reason.ODOMETRY_STALE, f"silent for {odometry_age_s:.1f} s"))
        return tuple(silent)

    def _overdue(self, now_ns: int, in_force: _InForce | None) -> tuple[Refusal, ...]:
        if in_force is None:
            return ()
        age_s, limit_s = (now_ns - in_force.plan.observed_ns) * 1e-9, self._config.max_plan_age_s
        return () if age_s <= limit_s else (Refusal(
            Reason.PLAN_TOO_OLD, f"{age_s:.1f} s, expected at most {limit_s:g} s"),)

    def _state(self, faults: Sequence[Refusal]) -> PlannerState:
        reasons = {refusal.reason for refusal in (*faults, *self._reasons)}
        if self._tally.published == 0 and (not self._tally.cycles or reasons & WAITING_FOR):
            return PlannerState.WAITING
        if faults or self._blocked:
            return PlannerState.BLOCKED
        return PlannerState.DEGRADED if self._reasons else PlannerState.PLANNING


def _known_age_s(age_s: float) -> float:
    """Messages say -1 where nothing came."""
    return age_s if math.isfinite(age_s) else -1.0


def _without_repeats(reasons: Sequence[Refusal]) -> tuple[Refusal, ...]:
    """The first refusal of each reason."""
    return tuple({refusal.reason: refusal for refusal in reversed(reasons)}.values())[::-1]
