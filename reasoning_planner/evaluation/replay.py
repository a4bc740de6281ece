"""A bag's inputs through the planner of the vehicle, without ROS: lockstep or in real time.

`lockstep` plans at every image of the anchor camera, as if planning took no time; the same bag
gives the same plans. `realtime` keeps a clock of the bag's log times, on which every cycle takes
as long as it really took here: images that come meanwhile are superseded, as on the vehicle.
`odometry_alone` plans without cameras. The inputs go through the node's own `ObservationBuilder`
and `Planner`.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from typing import Callable, Iterable, Iterator, Optional, Sequence

import numpy as np

from ..config import NodeConfig
from ..datatypes import (STEP_NS, Deadline, Observation, Plan, PlanStatus, Reason, Refusal,
                         StageTimings)
from ..perception.ego_history import OdometryBuffer
from ..perception.observation import FRAMES_PER_CAMERA, ObservationBuilder
from ..planner import Planner
from .stream import ODOMETRY, Event

_PERIOD_SLACK_NS = 5_000_000        # stamps of a 10 Hz camera jitter
_ARRIVALS_KEPT = 256


@dataclass(frozen=True)
class Cycle:
    """One planning cycle.

    Attributes:
        t0_ns: stamp of the anchor image, or the moment planned at without cameras.
        arrival_ns: log time at which it came.
        plans: the planner's own, then further samples of the model; empty when no plan was made.
        baseline: the kinematic plan of the same observation.
        refusals: why there is no plan.
        image: (H, W, 3) uint8 RGB, the anchor's; None without cameras.
        odometry_age_ms: t0 less the newest odometry when planning began; negative if it is newer.
        measured: wall time of the stages, also where the plan does not carry it.
        latency_ms: from the image's arrival to the plan; 0 in lockstep.
        plan_age_ms: the bag's time at publication less t0, 0 in lockstep.
    """

    t0_ns: int
    arrival_ns: int
    plans: tuple[Plan, ...] = ()
    baseline: Optional[Plan] = None
    refusals: tuple[Refusal, ...] = ()
    image: Optional[np.ndarray] = None
    odometry_age_ms: float = np.nan
    measured: StageTimings = field(default_factory=StageTimings)
    latency_ms: float = 0.0
    plan_age_ms: float = 0.0


class Replay:
    """One bag's inputs, observations and plans.

    Attributes:
        dropped: inputs and cycles dropped so far, by reason.
        cycles: cycles begun so far.
    """

    def __init__(self, config: NodeConfig, planners: Sequence[Planner], topics: Sequence[str],
                 seed: str, keep_times: bool, period_s: float = 0.0):
        """
        Args:
            planners: the one under test, then the same model with other noise.
            topics: of the camera slots, named in refusals; empty without cameras.
            seed: makes the plans' ids, with t0.
            keep_times: leave measured times in the plans; without, the same bag gives the same.
            period_s: least time from one t0 to the next.
        """
        self._config = config
        self._planners = tuple(planners)
        self._kinematic = Planner(config)
        self._seed = seed
        self._keep_times = keep_times
        self._period_ns = round(period_s * 1e9)
        self._settle_ns = round(config.settle_s * 1e9)
        self._anchor = config.cameras.anchor
        self._given_up: Counter[str] = Counter()
        self._arrivals: dict[int, int] = {}
        self._builder = ObservationBuilder(config, topics) if topics else None
        self._odometry = OdometryBuffer(config.history)
        self._last_valid: Optional[Plan] = None
        self.cycles = 0

    @property
    def dropped(self) -> dict[str, int]:
        """Inputs and cycles dropped so far, by reason."""
        counts = Counter(self._builder.counts()) if self._builder else Counter(
            {reason.value: count for reason, count in self._odometry.counts.items()})
        return dict(counts + self._given_up)

    # Modes -------------------------------------------------------------------------------------

    def lockstep(self, events: Iterable[Event]) -> Iterator[Cycle]:
        """Plan at every anchor image once the inputs of its moment are there, in no time.

        Args:
            events: in order of their stamps.
        """
        assert self._builder is not None, "lockstep needs cameras"
        waiting: deque[int] = deque()
        last_ns: Optional[int] = None
        for event in events:
            self._store(event)
            t0_ns = self._builder.next_anchor_ns()
            if t0_ns is not None and self._is_due(t0_ns, last_ns):
                last_ns = t0_ns
                waiting.append(t0_ns)
            while waiting and (self._builder.is_complete(waiting[0])
                               or event.stamp_ns > waiting[0] + self._settle_ns):
                yield self._camera_cycle(waiting.popleft(), Deadline.never)
        while waiting:
            yield self._camera_cycle(waiting.popleft(), Deadline.never)

    def realtime(self, events: Iterable[Event], rate: float = 1.0) -> Iterator[Cycle]:
        """Plan as the node would: one cycle at a time, each from the newest anchor image.

        Args:
            events: in order of their arrival.
            rate: speed of the bag's clock; at 0.5 the planner has twice the time.
        """
        assert self._builder is not None, "planning in real time needs cameras"
        inputs = _Arriving(events, self._store)
        settle_ns = round(self._settle_ns * rate)
        now_ns = 0
        while True:
            inputs.store_until(now_ns)
            t0_ns = self._builder.next_anchor_ns()
            while t0_ns is None:
                if not inputs.store_next():
                    return
                t0_ns = self._builder.next_anchor_ns()
            arrival_ns = self._arrivals[t0_ns]
            now_ns = max(now_ns, arrival_ns)
            while (not self._builder.is_complete(t0_ns)
                   and inputs.next_ns <= arrival_ns + settle_ns):
                now_ns = max(now_ns, inputs.next_ns)
                inputs.store_next()
            if not self._builder.is_complete(t0_ns):
                now_ns = max(now_ns, arrival_ns + settle_ns)
            cycle = self._camera_cycle(
                t0_ns, lambda: Deadline.after(self._config.deadline_s))
            now_ns += round(cycle.measured.total_ms * 1e6 * rate)
            yield replace(cycle, latency_ms=(now_ns - arrival_ns) * 1e-6 / rate,
                          plan_age_ms=(now_ns - t0_ns) * 1e-6)

    def odometry_alone(self, events: Iterable[Event]) -> Iterator[Cycle]:
        """Plan every 0.1 s, or every `period_s`, of the odometry's time; no camera is read."""
        period_ns = max(self._period_ns, STEP_NS)
        t0_ns: Optional[int] = None
        for event in events:
            if event.slot != ODOMETRY:
                continue
            refusal = (event.payload if isinstance(event.payload, Refusal)
                       else self._odometry.add(event.payload))
            if refusal is not None:
                if refusal is event.payload:
                    self._given_up[refusal.reason.value] += 1
                continue
            t0_ns = event.stamp_ns if t0_ns is None else t0_ns
            if event.stamp_ns - t0_ns > 10 * STEP_NS:           # a hole: no plan inside of it
                t0_ns += (event.stamp_ns - t0_ns) // period_ns * period_ns
            while t0_ns <= event.stamp_ns:
                yield self._odometry_cycle(t0_ns, event.arrival_ns)
                t0_ns += period_ns

    def _is_due(self, t0_ns: int, last_ns: Optional[int]) -> bool:
        since_ns = np.inf if last_ns is None or t0_ns < last_ns else t0_ns - last_ns
        return since_ns >= self._period_ns - _PERIOD_SLACK_NS

    # Parts -------------------------------------------------------------------------------------

    def _store(self, event: Event) -> None:
        assert self._builder is not None
        if event.slot == ODOMETRY:
            self._builder.add_odometry(event.payload)
        elif isinstance(event.payload, Refusal):
            self._given_up[event.payload.reason.value] += 1
        else:
            self._builder.add_frame(event.slot, event.stamp_ns, event.payload)
            if event.slot == self._anchor:
                self._arrivals[event.stamp_ns] = event.arrival_ns
                if len(self._arrivals) > _ARRIVALS_KEPT:
                    self._arrivals.pop(next(iter(self._arrivals)))

    def _camera_cycle(self, t0_ns: int, deadline: Callable[[], Deadline]) -> Cycle:
        assert self._builder is not None
        started_s = time.perf_counter()
        _, age_s = self._builder.odometry_rate(t0_ns)
        observation = self._builder.build(t0_ns, self._config.route_text)
        cycle = self._cycle(observation, deadline, t0_ns, self._arrivals.get(t0_ns, t0_ns),
                            time.perf_counter() - started_s)
        image = None
        if isinstance(observation, Observation):
            frame = observation.frames[self._anchor][-1]
            image = None if frame is None else frame.image
        return replace(cycle, image=image, odometry_age_ms=age_s * 1e3)

    def _odometry_cycle(self, t0_ns: int, arrival_ns: int) -> Cycle:
        history = self._odometry.history_at(t0_ns)
        if isinstance(history, Refusal):
            self._given_up[history.reason.value] += 1
            return self._cycle(history, Deadline.never, t0_ns, arrival_ns, 0.0)
        nothing = ((None,) * FRAMES_PER_CAMERA,) * self._config.cameras.count
        observation = Observation(t0_ns, self._config.frame_id, history, nothing)
        return self._cycle(observation, Deadline.never, t0_ns, arrival_ns, 0.0)

    def _cycle(self, observation: Observation | Refusal, deadline: Callable[[], Deadline],
               t0_ns: int, arrival_ns: int, building_s: float) -> Cycle:
        """The plan under test, timed; then what it is compared with, not timed."""
        self.cycles += 1
        if isinstance(observation, Refusal):                # counted by whoever refused
            return Cycle(t0_ns, arrival_ns, refusals=(observation,),
                         measured=StageTimings(total_ms=building_s * 1e3))
        plan = self._planners[0].plan(observation, deadline(), self._last_valid)
        if plan.status in (PlanStatus.OK, PlanStatus.DEGRADED):
            self._last_valid = plan
        measured = replace(plan.timings, total_ms=plan.timings.total_ms + building_s * 1e3)
        if plan.status is PlanStatus.REFUSED:
            self._given_up.update(refusal.reason.value for refusal in plan.reasons)
            return Cycle(t0_ns, arrival_ns, refusals=plan.reasons, measured=measured)
        others = [planner.plan(observation, Deadline.never()) for planner in self._planners[1:]]
        baseline = self._kinematic.plan(observation, Deadline.never())
        return Cycle(t0_ns, arrival_ns,
                     tuple(self._settled(p, i) for i, p in enumerate([plan, *others])),
                     self._settled(baseline, -1), measured=measured)

    def _settled(self, plan: Plan, number: int) -> Plan:
        """The plan with an id that the bag and t0 decide, and without times unless kept."""
        text = f"{self._seed} {plan.stamp_ns} {number}".encode()
        plan_id = hashlib.blake2b(text, digest_size=16).digest()
        timings = plan.timings if self._keep_times else StageTimings()
        return replace(plan, plan_id=plan_id, timings=timings)


class _Arriving:
    """Events in order of arrival, of which the next can be looked at."""

    def __init__(self, events: Iterable[Event], store: Callable[[Event], None]):
        self._events = iter(events)
        self._store = store
        self._next = next(self._events, None)

    @property
    def next_ns(self) -> float:
        """Arrival of the next event; infinity after the last."""
        return np.inf if self._next is None else self._next.arrival_ns

    def store_next(self) -> bool:
        """Store one event; False when there is none left."""
        if self._next is None:
            return False
        self._store(self._next)
        self._next = next(self._events, None)
        return True

    def store_until(self, until_ns: int) -> None:
        """Store all that arrived up to a moment."""
        while self.next_ns <= until_ns:
            self.store_next()


def refusal_of_bag(dropped: dict[str, int]) -> str:
    """Why a bag gave no plan at all, for one line."""
    told = ", ".join(f"{count} x {reason}" for reason, count in
                     sorted(dropped.items(), key=lambda item: -item[1]))
    return told or f"1 x {Reason.NO_CAMERA.value}"
