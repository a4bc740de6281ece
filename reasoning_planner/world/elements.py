"""What a scene is made of: agents with their scripts, signals, and what they ask of the ego.

Plain data in road places (s, d) of road.py and in seconds with t0 = 0. How scenes are drawn is
scene.py's affair; how the ego answers is expert.py's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .road import Layout, Road

WEATHERS = ("day", "night", "rain", "fog")
WEATHER_SHARES = (0.55, 0.17, 0.15, 0.13)
FREE_ROAD = "free_road"
VISION_NEEDED = "vision_needed"

FRONT_M = 3.8                # rear axle to front bumper of the ego vehicle
HALF_WIDTH_M = 0.95          # of the ego vehicle
VEHICLE_SIZES = {            # length, width, height, metres
    "car": (4.5, 1.85, 1.5), "van": (5.4, 2.0, 2.3), "truck": (8.0, 2.45, 3.4),
    "bus": (11.0, 2.5, 3.1), "pedestrian": (0.5, 0.7, 1.9),
}
COLOURS = ("white", "black", "grey", "red", "blue", "green", "yellow")
CLOTHES = ("white", "grey", "red", "blue", "green", "yellow")     # black is lost at night


@dataclass(frozen=True)
class Agent:
    """A vehicle or pedestrian that follows a script, whatever the ego does.

    Attributes:
        agent: a key of VEHICLE_SIZES.
        colour: one of COLOURS.
        s_m, d_m: centre of the agent at t = 0.
        speed_mps: along the road at t = 0, signed; negative for oncoming traffic.
        accel_mps2, accel_from_s, final_mps: speed changes at this rate from that time until it
            reaches `final_mps`.
        release_s, release_mps: from this time on it speeds up to this speed.
        d_end_m, shift_from_s, shift_to_s: it moves sideways to `d_end_m` between the two times.
        brake_lights: lit though its speed does not change.
        blinker: +1 left, -1 right, 0 off.
        faces_back: heads against our direction even when standing.
        from_s: it is not there before this time.
    """

    agent: str
    colour: str
    s_m: float
    d_m: float
    speed_mps: float = 0.0
    accel_mps2: float = 0.0
    accel_from_s: float = 0.0
    final_mps: float = 0.0
    release_s: float = np.inf
    release_mps: float = 0.0
    d_end_m: float | None = None
    shift_from_s: float = 0.0
    shift_to_s: float = 1.0
    brake_lights: bool = False
    blinker: int = 0
    faces_back: bool = False
    from_s: float = -np.inf

    @property
    def length_m(self) -> float:
        """Bumper to bumper."""
        return VEHICLE_SIZES[self.agent][0]

    @property
    def width_m(self) -> float:
        """Widest extent across."""
        return VEHICLE_SIZES[self.agent][1]

    def along(self, t: float) -> tuple[float, float]:
        """s (metres) and speed along the road (m/s) at time t."""
        s, v = self._phase(min(t, self.release_s))
        if t > self.release_s:
            rising = t - self.release_s
            rise_s = max(self.release_mps - v, 0.0) / 2.5
            held = max(rising - rise_s, 0.0)
            rising = min(rising, rise_s)
            s += v * rising + 1.25 * rising ** 2 + (v + 2.5 * rising) * held
            v += 2.5 * rising
        return s, v

    def _phase(self, t: float) -> tuple[float, float]:
        after = t - self.accel_from_s
        if after <= 0.0 or self.accel_mps2 == 0.0:
            return self.s_m + self.speed_mps * t, self.speed_mps
        change_s = max((self.final_mps - self.speed_mps) / self.accel_mps2, 0.0)
        changing = min(after, change_s)
        v = self.speed_mps + self.accel_mps2 * changing
        s = (self.s_m + self.speed_mps * (t - after + changing)
             + 0.5 * self.accel_mps2 * changing ** 2 + v * (after - changing))
        return s, v

    def across(self, t: float) -> tuple[float, float]:
        """d (metres) and its rate (m/s) at time t."""
        if self.d_end_m is None:
            return self.d_m, 0.0
        span = self.shift_to_s - self.shift_from_s
        u = min(max((t - self.shift_from_s) / span, 0.0), 1.0)
        move = self.d_end_m - self.d_m
        if self.agent == "pedestrian":
            return self.d_m + move * u, move / span if 0.0 < u < 1.0 else 0.0
        return self.d_m + move * u * u * (3.0 - 2.0 * u), move * 6.0 * u * (1.0 - u) / span

    def braking(self, t: float) -> bool:
        """Whether its brake lights are lit at time t."""
        if t >= self.release_s:
            return False
        return self.brake_lights or (self.accel_mps2 < 0.0 and t >= self.accel_from_s)


@dataclass(frozen=True)
class Signal:
    """Traffic light or stop sign at a stop line, with the road that crosses behind it.

    Attributes:
        device: "light" or "stop_sign".
        s_m: the stop line.
        state: "red" or "green" for a light until `change_s`, the other one after it.
        change_s: when the light changes.
        crossing_m: width of the crossing road.
    """

    device: str
    s_m: float
    state: str = ""
    change_s: float = np.inf
    crossing_m: float = 9.0

    def state_at(self, t: float) -> str:
        """Colour of the light at time t; empty for a sign."""
        if not self.state or t < self.change_s:
            return self.state
        return "green" if self.state == "red" else "red"


@dataclass(frozen=True)
class Lead:
    """Follow this agent (an index into Scene.agents) while start <= t < end."""

    agent: int
    start_s: float
    end_s: float = np.inf
    time_gap_s: float = 1.4


@dataclass(frozen=True)
class Stop:
    """Have the front bumper before `s_m` while start <= t < end."""

    s_m: float
    start_s: float
    end_s: float = np.inf


@dataclass(frozen=True)
class Cruise:
    """Drive at this speed from `start_s` on, reached with about this acceleration."""

    speed_mps: float
    start_s: float
    accel_mps2: float = 1.2


@dataclass(frozen=True)
class Offset:
    """Shift sideways to `offset_m` between begin and full, back between leave and end (all s)."""

    offset_m: float
    begin_m: float
    full_m: float
    leave_m: float
    end_m: float


@dataclass(frozen=True)
class Demands:
    """All that the scene asks of the ego vehicle; empty tuples mean: keep lane and speed."""

    leads: tuple[Lead, ...] = ()
    stops: tuple[Stop, ...] = ()
    cruises: tuple[Cruise, ...] = ()
    offsets: tuple[Offset, ...] = ()


@dataclass(frozen=True)
class Facts:
    """What the words of a scene refer to; everything here can be seen in the images.

    Attributes:
        agent, colour: of the decisive agent; empty without one.
        side: "left" or "right" of the decisive thing; empty where it has none.
        variant: which case of the kind, e.g. "standing", "truck", "accelerate".
        colour_visible: whether the colour can be told (near, by day).
        distance_m, lateral_m: of the decisive thing from the rear axle at t0.
    """

    agent: str = ""
    colour: str = ""
    side: str = ""
    variant: str = ""
    colour_visible: bool = False
    distance_m: float = 0.0
    lateral_m: float = 0.0


@dataclass(frozen=True)
class Scene:
    """One sampled situation; see the module for its coordinates.

    Attributes:
        seed, kind, weather: what it was drawn from.
        layout, road: where it is.
        speed_mps: the ego's cruising speed before it reacts to anything.
        first_speed_mps, offset_m: of the ego at the start of the history.
        agents, signals, demands, facts: see their classes.
        decisive: index into `agents`, or -1.
        crosswalks_m: s of each zebra crossing without signal.
        ramp_end_m: s where a lane joining from the right ends, or None.
        look_seed: seed of everything that matters to the eye alone.
    """

    seed: int
    kind: str
    weather: str
    layout: Layout
    road: Road
    speed_mps: float
    first_speed_mps: float
    offset_m: float
    agents: tuple[Agent, ...]
    signals: tuple[Signal, ...]
    demands: Demands
    facts: Facts
    decisive: int
    crosswalks_m: tuple[float, ...]
    ramp_end_m: float | None
    look_seed: int

    @property
    def category(self) -> str:
        """`free_road` where nothing alters the plan, else `vision_needed`."""
        return FREE_ROAD if self.kind == FREE_ROAD else VISION_NEEDED
