"""A continuous drive: several events one after the other on one road, with the driver's truth.

For benchmarks that need consecutive frames. Each event is drawn by the samplers of scene.py and
begins where the ego passes a fixed place; what stands is there from the start, what moves appears
half a second before its event.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ..datatypes import HORIZON_LENGTH, STEP_S
from .elements import (
    WEATHER_SHARES, WEATHERS, Agent, Cruise, Demands, Facts, Scene, Signal)
from .expert import Drive, Driver, Recorder
from .language import manoeuvre_of, valid_sentences
from .render import RIG, Renderer
from .road import Layout, build_road, curvature_profile
from .scene import SAMPLERS, Draft

ODOMETRY_PERIOD_S = 0.02
_RELEASE_S = 7.0             # after this long a leading vehicle speeds away
_CLEAR = ("free_road", Facts(variant="clear"))
_KINDS_BY_ROAD = {
    "town": ("free_road", "lead_slow", "lead_braking", "lead_stopped", "parked_right",
             "pedestrian", "red_light", "green_light", "stop_sign", "curve_left", "curve_right",
             "oncoming"),
    "highway": ("free_road", "lead_slow", "lead_braking", "cut_in", "curve_left", "curve_right"),
}
_LEADS = ("lead_follow", "lead_slow", "lead_braking", "lead_stopped", "cut_in", "merge")


@dataclass(frozen=True)
class Event:
    """One event of a drive in the drive's own s and t.

    Attributes:
        kind, facts: what it is and what is said of it.
        from_s, until_s: when it counts; `until_s` may be infinite.
        until_m: it also ends when the ego has passed this place.
        lead: index of the vehicle followed, or -1.
        change_s: when the light turns green, else infinite.
        settled_s: from then on the lead is merely followed.
    """

    kind: str
    facts: Facts
    from_s: float
    until_s: float
    until_m: float
    lead: int
    change_s: float
    settled_s: float = np.inf


@dataclass(frozen=True)
class Moment:
    """What is true at one moment of a drive.

    Attributes:
        time_s: since the drive began.
        kind, manoeuvre: of the event at hand.
        coc: the preferred sentence; valid_cocs: all that are right.
        anchor: step of `WorldDrive.drive` at this moment.
    """

    time_s: float
    kind: str
    manoeuvre: str
    coc: str
    valid_cocs: tuple[str, ...]
    anchor: int


@dataclass(frozen=True)
class DriveFrame:
    """What is seen at one moment: (4, H, W, 3) uint8 RGB images of slots 0, 1, 2, 6."""

    time_s: float
    images: np.ndarray
    moment: Moment


@dataclass(frozen=True)
class WorldDrive:
    """A whole drive; images are drawn when `frames` is walked.

    Attributes:
        seed, duration_s: as asked for.
        scene: road and everything on it.
        drive: the ego at 10 Hz from t = 0, with 6.4 s more than `duration_s` as the truth of the
            last frames.
        events: in their order.
    """

    seed: int
    duration_s: float
    scene: Scene
    drive: Drive
    events: tuple[Event, ...]

    def words(self, step: int) -> tuple[str, Facts]:
        """Kind and facts of what counts at a step."""
        t, along = float(self.drive.time_s[step]), float(self.drive.along_m[step])
        for event in reversed(self.events):
            if event.from_s - 0.05 <= t < event.until_s and along < event.until_m:
                return self._state_of(event, step, t)
        return _CLEAR

    def _state_of(self, event: Event, step: int, t: float) -> tuple[str, Facts]:
        speed = self.drive.speed_mps[step]
        if t >= event.change_s:
            return "green_light", replace(event.facts, variant="standing")
        if event.kind in _LEADS:
            lead = self.scene.agents[event.lead].along(t)[1]
            if speed < 0.3 and lead < 0.3:
                return "lead_stopped", replace(event.facts, variant="standing", side="")
            if t >= event.settled_s and (event.kind != "lead_stopped" or lead > 0.3):
                return "lead_follow", replace(event.facts, variant="", side="")
        elif speed < 0.3 and event.facts.variant == "moving":
            return event.kind, replace(event.facts, variant="standing")
        return event.kind, event.facts

    def moments(self) -> Iterator[Moment]:
        """What is true every 0.1 s from t = 0 to `duration_s`."""
        for step in range(int(round(self.duration_s / STEP_S)) + 1):
            kind, facts = self.words(step)
            texts = valid_sentences(kind, facts)
            yield Moment(float(self.drive.time_s[step]), kind, manoeuvre_of(kind, facts),
                         texts[0], texts, step)

    def frames(self, size: tuple[int, int] = (64, 128)) -> Iterator[DriveFrame]:
        """Every frame at 10 Hz, oldest first, from t = 0 to `duration_s`."""
        renderer, drive = Renderer(self.scene, size, RIG), self.drive
        for moment in self.moments():
            here = slice(moment.anchor, moment.anchor + 1)
            images = renderer.frames(drive.time_s[here], drive.positions[here],
                                     drive.yaw_rad[here], float(drive.along_m[moment.anchor]))
            yield DriveFrame(moment.time_s, images[:, 0], moment)

    def odometry(self) -> np.ndarray:
        """(N, 6) float64 at 50 Hz over `duration_s`: t, x, y, yaw, speed, yaw rate (SI)."""
        drive, rows = self.drive, []
        parts = int(round(STEP_S / ODOMETRY_PERIOD_S))
        for step in range(int(round(self.duration_s / STEP_S)) + 1):
            accel, curvature = drive.controls[step]
            speed = drive.speed_mps[step]
            whole = speed * STEP_S + 0.5 * accel * STEP_S ** 2
            for part in range(parts):
                after = part * ODOMETRY_PERIOD_S
                arc = speed * after + 0.5 * accel * after ** 2
                share = arc / whole if whole > 1e-9 else 0.0
                x, y = (1.0 - share) * drive.positions[step] + share * drive.positions[step + 1]
                now = speed + accel * after
                rows.append((drive.time_s[step] + after, x, y,
                             drive.yaw_rad[step] + curvature * arc, now, curvature * now))
        last = int(round(self.duration_s / ODOMETRY_PERIOD_S)) + 1
        return np.array(rows[:last])


def _moved(agent: Agent, dt: float, ds: float) -> Agent:
    """The same script begun `dt` later and `ds` further on."""
    standing = agent.speed_mps == 0.0
    return replace(agent, s_m=agent.s_m + ds - agent.speed_mps * dt,
                   accel_from_s=agent.accel_from_s + dt, release_s=agent.release_s + dt,
                   shift_from_s=agent.shift_from_s + dt, shift_to_s=agent.shift_to_s + dt,
                   from_s=-np.inf if standing else dt - 0.5)


def _moved_demands(demands: Demands, dt: float, ds: float, first_agent: int) -> Demands:
    return Demands(
        tuple(replace(lead, agent=lead.agent + first_agent, start_s=lead.start_s + dt,
                      end_s=lead.end_s + dt) for lead in demands.leads),
        tuple(replace(stop, s_m=stop.s_m + ds, start_s=stop.start_s + dt, end_s=stop.end_s + dt)
              for stop in demands.stops),
        tuple(replace(order, start_s=order.start_s + dt) for order in demands.cruises),
        tuple(replace(shift, begin_m=shift.begin_m + ds, full_m=shift.full_m + ds,
                      leave_m=shift.leave_m + ds, end_m=shift.end_m + ds)
              for shift in demands.offsets))


def _finish_event(draft: Draft) -> float:
    """Let an event that holds the ego for ever end; returns when a light turns green."""
    demands, change = draft.demands, np.inf
    if draft.kind in _LEADS and draft.decisive >= 0:
        lead = draft.agents[draft.decisive]
        draft.agents[:] = [replace(agent, release_s=_RELEASE_S,
                                   release_mps=1.5 * max(draft.speed, 8.0))
                           if agent is lead or draft.kind == "lead_stopped" else agent
                           for agent in draft.agents]
        draft.demands = replace(
            demands, leads=tuple(replace(item, end_s=_RELEASE_S + 6.0) for item in demands.leads),
            stops=tuple(replace(stop, end_s=_RELEASE_S + 0.8) for stop in demands.stops))
    elif draft.kind == "red_light":
        change = draft.uniform(6.0, 9.0)
        draft.signal = replace(draft.signal, change_s=change)
        draft.demands = replace(demands, stops=tuple(
            replace(stop, end_s=change + 0.7) for stop in demands.stops))
    elif draft.kind == "stop_sign":
        stop = demands.stops[0]
        reach_s = 2.0 * stop.s_m / max(draft.speed, 3.0) + 2.5
        draft.demands = replace(demands, stops=(replace(stop, end_s=reach_s),))
    return change


def _draw_event(rng: np.random.Generator, kind: str, weather: str, layout: Layout,
                cruise: float) -> Draft:
    """One event of a moving ego; standing variants are drawn again."""
    while True:
        draft = Draft(rng, kind, weather, layout, cruise, 0.1 * rng.random())
        SAMPLERS[kind](draft)
        if draft.speed > 0.0:
            return draft


def _plan(seed: int, duration_s: float, kinds: tuple[str, ...] | None):
    """Layout, weather, cruise speed and (place, draft) of every event; the whole route's bends."""
    rng = np.random.Generator(np.random.PCG64((seed, 5)))
    road_type = "town" if kinds or rng.random() < 0.75 else "highway"
    weather = WEATHERS[int(np.searchsorted(np.cumsum(WEATHER_SHARES), rng.random()))]
    cruise = 8.0 + 4.0 * rng.random() if road_type == "town" else 18.0 + 6.0 * rng.random()
    layout = (Layout("city", 3.4, 0, 0, 1, 0.7, 3.4) if road_type == "town"
              else Layout("highway", 3.6, 1, 0, 0, 2.5, 2.5))
    names = kinds or _KINDS_BY_ROAD[road_type]
    order: list[str] = []
    place, events, bends = 3.0 * cruise, [], []
    while place < cruise * (duration_s + 8.0):
        if not order:
            order = [names[i] for i in (range(len(names)) if kinds else
                                        rng.permutation(len(names)))]
        draft = _draw_event(rng, order.pop(0), weather, layout, cruise)
        events.append((place, draft))
        bends += [(begin + place, *rest) for begin, *rest in draft.bends]
        length = sum(2.0 * ramp + hold for _, ramp, hold, _ in draft.bends)
        slows_down = draft.demands.leads or draft.demands.stops
        place += 6.4 * cruise + length + (45.0 if slows_down else 15.0)
    return rng, weather, layout, cruise, events, tuple(bends), place


def make_drive(seed: int, duration_s: float, kinds: tuple[str, ...] | None = None) -> WorldDrive:
    """A drive of `duration_s` seconds.

    Args:
        seed: the same arguments give the same drive.
        duration_s: at least 2.
        kinds: events in this order, over again (of those that a town road bears); None draws
            them.
    Raises:
        ValueError: too short, or a kind that the road does not bear.
    """
    if duration_s < 2.0:
        raise ValueError(f"duration_s: given {duration_s}, expected at least 2")
    wrong = [kind for kind in kinds or () if kind not in _KINDS_BY_ROAD["town"]]
    if wrong:
        raise ValueError(f"kinds: given {', '.join(wrong)}, expected some of "
                         f"{', '.join(_KINDS_BY_ROAD['town'])}")
    rng, weather, layout, cruise, planned, bends, length = _plan(seed, duration_s, kinds)
    road = build_road(curvature_profile(length + 150.0, bends))
    driver = Driver(road, 0.0, 0.0, cruise, cruise, rng)
    recorder = Recorder(driver, 0.0)
    agents: list[Agent] = []
    signals: list[Signal] = []
    crosswalks: list[float] = []
    demands, events = Demands(), []
    waiting = list(planned)
    for step in range(int(round(duration_s / STEP_S)) + HORIZON_LENGTH + 1):
        t = step * STEP_S
        if waiting and driver.s >= waiting[0][0] and driver.speed > 0.75 * cruise:
            draft = waiting.pop(0)[1]
            demands, event = _begin(draft, t, driver.s, agents, signals, crosswalks, demands,
                                    cruise)
            events.append(event)
        recorder.step(t, demands, tuple(agents))
    scene = Scene(seed, "drive", weather, layout, road, cruise, cruise, 0.0, tuple(agents),
                  tuple(signals), demands, Facts(), -1, tuple(crosswalks), None, seed)
    drive = recorder.drive()
    return WorldDrive(seed, duration_s, scene, drive,
                      tuple(replace(event, settled_s=_settled(event, drive)) for event in events))


def _settled(event: Event, drive: Drive) -> float:
    """When the ego has stopped slowing down for a lead."""
    eased = (drive.time_s[:-1] > event.from_s + 2.0) & (drive.controls[:, 0] > -0.4)
    return float(drive.time_s[np.argmax(eased)]) if event.lead >= 0 and eased.any() else np.inf


def _begin(draft: Draft, t: float, s: float, agents: list[Agent], signals: list[Signal],
           crosswalks: list[float], demands: Demands, cruise: float) -> tuple[Demands, Event]:
    """Put a drafted event on the road at (t, s) and add its demands to those in force."""
    change = _finish_event(draft)
    first = len(agents)
    agents += [_moved(agent, t, s) for agent in draft.agents]
    if draft.signal:
        signals.append(replace(draft.signal, s_m=draft.signal.s_m + s,
                               change_s=draft.signal.change_s + t))
    if draft.crosswalk is not None:
        crosswalks.append(draft.crosswalk + s)
    new = _moved_demands(draft.demands, t, s, first)
    bend_m = max((begin + 2.0 * ramp + hold for begin, ramp, hold, _ in draft.bends), default=0.0)
    until_m = s + (max([shift.leave_m for shift in draft.demands.offsets], default=0.0) or bend_m
                   or (draft.facts.distance_m + 12.0 if draft.kind not in _LEADS else np.inf))
    stop_end = max((stop.end_s for stop in draft.demands.stops), default=np.inf)
    until_s = t + (_RELEASE_S + 4.0 if draft.kind in _LEADS else stop_end + 0.3)
    if np.isfinite(change):
        until_s = t + change + 3.0
    if draft.kind in ("curve_left", "curve_right", "green_light"):
        slow = new.cruises[-1] if new.cruises else None
        back_s = t + (until_m - s) / max(slow.speed_mps if slow else cruise, 3.0)
        new = replace(new, cruises=new.cruises + (Cruise(cruise, back_s),))
    elif draft.kind == "pedestrian":
        new = replace(new, cruises=(Cruise(cruise, draft.demands.cruises[0].start_s + t),))
    joined = Demands(demands.leads + new.leads, demands.stops + new.stops,
                     demands.cruises + new.cruises, demands.offsets + new.offsets)
    lead = first + draft.decisive if draft.kind in _LEADS else -1
    return joined, Event(draft.kind, draft.facts, t, until_s, until_m, lead, t + change)
