"""Seeded sampling of driving scenes: what stands and moves on the road, and what it asks of us.

It does not know how the ego vehicle answers (expert.py), how that is put into words (language.py)
or how it looks (render.py). The ego's rear axle is near s = 0 at t0.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from .elements import (
    CLOTHES, COLOURS, FREE_ROAD, FRONT_M, HALF_WIDTH_M, VEHICLE_SIZES, WEATHER_SHARES, WEATHERS,
    Agent, Cruise, Demands, Facts, Lead, Offset, Scene, Signal, Stop)
from .road import Layout, build_road, curvature_profile

# Kind -> share of the scenes drawn when no kind is asked for. Order matters: it is the label's.
KIND_SHARES = {
    "free_road": 0.20, "lead_follow": 0.08, "lead_slow": 0.07, "lead_braking": 0.08,
    "lead_stopped": 0.06, "parked_right": 0.08, "parked_left": 0.05, "pedestrian": 0.08,
    "red_light": 0.08, "green_light": 0.06, "stop_sign": 0.04, "curve_left": 0.04,
    "curve_right": 0.04, "cut_in": 0.05, "merge": 0.03, "oncoming": 0.04,
}
KINDS = tuple(KIND_SHARES)
GREEN_KEEP_MPS = 9.0    # at a green light a slower driver accelerates, a faster one keeps speed


@dataclass
class Draft:
    """A scene in the making: the samplers below fill it in."""

    rng: np.random.Generator
    kind: str
    weather: str
    layout: Layout
    speed: float
    reaction: float
    agents: list[Agent] = field(default_factory=list)
    signal: Signal | None = None
    demands: Demands = field(default_factory=Demands)
    facts: Facts = field(default_factory=Facts)
    decisive: int = -1
    bends: tuple[tuple[float, float, float, float], ...] = ()
    crosswalk: float | None = None
    ramp_end: float | None = None

    def uniform(self, low: float, high: float) -> float:
        """A draw between the two."""
        return low + (high - low) * self.rng.random()

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return self.rng.random() < probability

    def choice(self, options: tuple, shares: tuple[float, ...] | None = None):
        """One of the options, by their shares."""
        if shares is None:
            return options[int(self.rng.random() * len(options))]
        place = self.rng.random() * sum(shares)
        for option, share in zip(options, shares):
            place -= share
            if place < 0.0:
                return option
        return options[-1]

    def vehicle(self, s: float, d: float, shares=(0.62, 0.16, 0.16, 0.06), **script) -> Agent:
        """A vehicle of a drawn kind and colour whose *near end* is at s."""
        agent = self.choice(("car", "van", "truck", "bus"), shares)
        length = VEHICLE_SIZES[agent][0]
        return Agent(agent, self.choice(COLOURS), s + 0.5 * length, d, **script)

    def decide(self, agent: Agent, side: str = "", variant: str = "") -> int:
        """Add the agent that the scene turns on, and note what can be said about it."""
        self.agents.append(agent)
        self.decisive = len(self.agents) - 1
        s, d = agent.along(0.0)[0], agent.across(0.0)[0]
        distance = s - 0.5 * agent.length_m
        self.facts = Facts(agent.agent, agent.colour, side, variant,
                           self.weather == "day" and distance < 32.0, distance, d)
        return self.decisive


def _stopping_distance(draft: Draft) -> float:
    """Metres in which the ego comes to rest from its speed within the horizon, gently or not."""
    braking = draft.uniform(max(1.3, draft.speed / 4.6), 3.4)
    return draft.speed ** 2 / (2.0 * braking) + draft.speed * max(draft.reaction + 0.35, 0.0)


def _free_road(draft: Draft) -> None:
    variant = draft.choice(("clear", "parked", "sidewalk", "oncoming", "adjacent"),
                           (0.4, 0.18, 0.16, 0.14, 0.12))
    if draft.layout.environment == "highway" and variant in ("parked", "sidewalk", "oncoming"):
        variant = "adjacent" if draft.chance(0.6) else "clear"
    side = _bystander(draft, variant, near=True) if variant != "clear" else ""
    if side:
        last = draft.agents[-1]
        draft.facts = Facts(last.agent, last.colour, side, variant, False, last.s_m, last.d_m)
        draft.decisive = len(draft.agents) - 1
    else:
        draft.facts = Facts(variant="clear")


def _bystander(draft: Draft, variant: str, near: bool) -> str:
    """Add one thing beside our lane that asks nothing of us; its side, or "" if none fits."""
    layout = draft.layout
    s = draft.uniform(9.0, 24.0) if near else draft.uniform(6.0, 60.0)
    if variant == "adjacent":
        sides = ("left",) * bool(layout.left_lanes) + ("right",) * bool(layout.right_lanes)
        if not sides:
            draft.layout = layout = replace(layout, left_lanes=1)
            sides = ("left",)
        side = draft.choice(sides)
        sign = 1.0 if side == "left" else -1.0
        speed = draft.speed * draft.uniform(0.92, 1.08)
        draft.agents.append(draft.vehicle(s, sign * layout.lane_width, speed_mps=speed,
                                          final_mps=speed))
        return side
    if variant == "oncoming":
        if not layout.oncoming_lanes:
            draft.layout = layout = replace(layout, oncoming_lanes=1)
        d = layout.lane_width * (1 + layout.left_lanes) + draft.uniform(-0.1, 0.25)
        speed = -max(draft.speed, 4.0) * draft.uniform(0.7, 1.1)
        agent = draft.vehicle(s + 12.0, d, speed_mps=speed, final_mps=speed, faces_back=True)
        draft.agents.append(agent)
        return "left"
    side = "right" if draft.chance(0.75) else "left"
    if variant == "sidewalk":
        edge = layout.right_edge - draft.uniform(0.9, 2.2)
        if side == "left":
            edge = layout.left_edge + draft.uniform(0.9, 2.2)
        draft.agents.append(Agent("pedestrian", draft.choice(CLOTHES), s, edge))
        return side
    _parked_off_lane(draft, s, side)
    return side


def _parked_off_lane(draft: Draft, s: float, side: str) -> None:
    """One to three vehicles in a bay wholly outside every lane."""
    gap = draft.uniform(0.35, 0.8)
    shoulder = 2.5 + gap + 0.3
    if side == "right":
        draft.layout = replace(draft.layout, right_shoulder=shoulder)
    else:
        draft.layout = replace(draft.layout, left_shoulder=shoulder)
    for _ in range(draft.choice((1, 2, 3))):
        car = draft.vehicle(s, 0.0, shares=(0.75, 0.2, 0.05, 0.0))
        reach = gap + 0.5 * car.width_m
        d = (draft.layout.right_lane_edge - reach if side == "right"
             else draft.layout.left_lane_edge + reach)
        draft.agents.append(replace(car, d_m=d, faces_back=side == "left"))
        s += car.length_m + draft.uniform(1.0, 4.0)


def _lead_follow(draft: Draft) -> None:
    time_gap = draft.uniform(1.3, 1.9)
    gap = 2.5 + max(time_gap * draft.speed, 5.0)
    speed = draft.speed * draft.uniform(0.96, 1.04)
    index = draft.decide(draft.vehicle(FRONT_M + gap, draft.uniform(-0.2, 0.2), speed_mps=speed,
                                       final_mps=speed))
    draft.demands = Demands(leads=(Lead(index, -2.0, time_gap_s=time_gap),))


def _lead_slow(draft: Draft) -> None:
    gap = 3.5 + draft.uniform(0.7, 1.25) * draft.speed
    speed = draft.speed * draft.uniform(0.45, 0.72)
    agent = draft.vehicle(FRONT_M + gap, draft.uniform(-0.2, 0.2), (0.2, 0.15, 0.45, 0.2),
                          speed_mps=speed, final_mps=speed)
    index = draft.decide(agent)
    draft.demands = Demands(leads=(Lead(index, draft.reaction, time_gap_s=1.3),))


def _lead_braking(draft: Draft) -> None:
    gap = 3.0 + draft.uniform(0.8, 1.5) * draft.speed
    braking = draft.uniform(2.0, 4.0)
    since = draft.reaction - draft.uniform(0.25, 0.5)
    agent = draft.vehicle(FRONT_M + gap, draft.uniform(-0.2, 0.2), speed_mps=draft.speed,
                          accel_mps2=-braking, accel_from_s=since,
                          final_mps=draft.speed * draft.choice((0.0, 0.25, 0.5)))
    index = draft.decide(agent)
    draft.demands = Demands(leads=(Lead(index, draft.reaction, time_gap_s=1.2),))


def _lead_stopped(draft: Draft) -> None:
    if draft.chance(0.25):
        draft.speed = 0.0
        gap, variant = draft.uniform(2.5, 5.0), "standing"
    else:
        gap, variant = 3.0 + _stopping_distance(draft), "moving"
    agent = draft.vehicle(FRONT_M + gap, draft.uniform(-0.2, 0.2), brake_lights=True)
    index = draft.decide(agent, variant=variant)
    if draft.chance(0.5):
        front = agent.s_m + 0.5 * agent.length_m
        draft.agents.append(draft.vehicle(front + 2.5, 0.0, brake_lights=True))
    follow_s = -2.0 if variant == "standing" else draft.reaction
    draft.demands = Demands(leads=(Lead(index, follow_s),),
                            stops=(Stop(FRONT_M + gap - 2.2, draft.reaction),))


def _parked(draft: Draft, side: str) -> None:
    sign = -1.0 if side == "right" else 1.0
    layout = draft.layout
    edge = 0.5 * layout.lane_width
    begin_edge = FRONT_M + draft.uniform(9.0, 20.0) + 0.9 * draft.speed
    car = draft.vehicle(begin_edge, 0.0, (0.6, 0.2, 0.2, 0.0))
    inside = draft.uniform(0.35, 1.0)
    near_side = edge - inside
    car = replace(car, d_m=sign * (near_side + 0.5 * car.width_m))
    draft.decide(car, side)
    offset = -sign * max(HALF_WIDTH_M + draft.uniform(0.8, 1.0) - near_side, 0.45)
    full = begin_edge - FRONT_M - 1.5
    begin = max(full - max(2.3 * draft.speed, 9.0), draft.speed * draft.reaction)
    leave = begin_edge + car.length_m + 1.5
    draft.demands = Demands(offsets=(Offset(offset, begin, full, leave,
                                            leave + max(2.5 * draft.speed, 10.0)),))


def _parked_right(draft: Draft) -> None:
    _parked(draft, "right")


def _parked_left(draft: Draft) -> None:
    _parked(draft, "left")


def _oncoming(draft: Draft) -> None:
    layout = draft.layout
    speed = max(draft.speed, 4.0) * draft.uniform(0.7, 1.0)
    meet_s = draft.uniform(2.4, 3.4)
    near = FRONT_M + (draft.speed + speed) * meet_s
    near = min(near, 44.0)
    meet_s = (near - FRONT_M) / (draft.speed + speed)
    car = draft.vehicle(near, 0.0, (0.4, 0.2, 0.3, 0.1), speed_mps=-speed, final_mps=-speed,
                        faces_back=True)
    near_side = 0.5 * layout.lane_width - draft.uniform(0.35, 0.9)
    car = replace(car, d_m=near_side + 0.5 * car.width_m)
    draft.decide(car, "left", "narrow" if not layout.centre_line else "drifting")
    offset = -max(HALF_WIDTH_M + draft.uniform(0.75, 0.95) - near_side, 0.45)
    meet = draft.speed * meet_s
    begin = draft.speed * draft.reaction
    full = begin + max(0.75 * (meet - begin), 6.0)
    draft.demands = Demands(
        offsets=(Offset(offset, begin, full, meet + 5.0, meet + 5.0 + 2.5 * draft.speed),),
        cruises=(Cruise(0.85 * draft.speed, draft.reaction, 0.8),
                 Cruise(draft.speed, meet_s + 0.8, 1.0)))


def _pedestrian(draft: Draft) -> None:
    side = draft.choice(("right", "left"))
    sign = -1.0 if side == "right" else 1.0
    walk = draft.uniform(1.2, 1.7)
    reach = 0.5 * draft.layout.lane_width
    begin = sign * (reach + draft.uniform(-0.9, 0.5))
    end = -sign * (reach + 5.0)
    span = abs(end - begin) / walk
    clear_s = (reach + 0.5 + abs(begin)) / walk
    if draft.chance(0.2):
        draft.speed = 0.0
        s, variant = FRONT_M + draft.uniform(3.5, 7.0), "standing"
    else:
        s, variant = FRONT_M + 3.0 + _stopping_distance(draft), "moving"
    shift_from = -2.0
    script = dict(d_end_m=end, shift_from_s=shift_from, shift_to_s=shift_from + span + 2.0)
    start = begin + sign * walk * 2.0
    draft.decide(Agent("pedestrian", draft.choice(CLOTHES), s, start, **script), side, variant)
    if draft.chance(0.6):
        draft.crosswalk = s
    draft.demands = Demands(
        stops=(Stop(s - 2.6, -2.0 if variant == "standing" else draft.reaction, clear_s),),
        cruises=(Cruise(max(0.8 * draft.speed, 5.0), clear_s, 1.3),))


def _signal(draft: Draft, device: str, state: str) -> None:
    standing = draft.chance(0.25 if device == "light" else 0.12)
    if standing:
        draft.speed = 0.0
        s = FRONT_M + draft.uniform(1.5, 4.5)
    else:
        s = FRONT_M + max(_stopping_distance(draft), 6.0) + 1.0
    draft.signal = Signal(device, s, state, crossing_m=draft.uniform(8.0, 13.0))
    variant = "standing" if standing else "moving"
    draft.facts = Facts(variant=variant, distance_m=s)
    start = -2.0 if standing else draft.reaction
    if state != "green":
        draft.demands = Demands(stops=(Stop(s - 0.8, start),))
    elif standing or draft.speed < GREEN_KEEP_MPS:
        target = draft.speed + draft.uniform(3.0, 5.5) + 3.0 * standing
        draft.demands = Demands(cruises=(Cruise(target, draft.reaction, draft.uniform(1.0, 1.8)),))
        draft.facts = replace(draft.facts, variant="standing" if standing else "accelerate")
    else:
        draft.facts = replace(draft.facts, variant="keep")


def _red_light(draft: Draft) -> None:
    _signal(draft, "light", "red")


def _green_light(draft: Draft) -> None:
    _signal(draft, "light", "green")


def _stop_sign(draft: Draft) -> None:
    _signal(draft, "stop_sign", "")


def _curve(draft: Draft, side: str) -> None:
    sign = 1.0 if side == "left" else -1.0
    bend_speed = draft.speed * draft.uniform(0.7, 0.92)
    radius = max(bend_speed ** 2 / draft.uniform(1.5, 2.4), 12.0)
    ramp = max(7.0, 0.8 * bend_speed)
    begin = draft.uniform(3.0, 12.0) + 0.5 * draft.speed
    hold = max(min(draft.uniform(0.7, 1.5), 60.0 / radius + 0.5) * radius - ramp, 10.0)
    draft.bends = ((begin, ramp, hold, sign / radius),)
    draft.facts = Facts(side=side, variant="sharp" if radius < 40.0 else "wide",
                        distance_m=begin)
    draft.demands = Demands(cruises=(Cruise(bend_speed, draft.reaction, 1.6),))


def _curve_left(draft: Draft) -> None:
    _curve(draft, "left")


def _curve_right(draft: Draft) -> None:
    _curve(draft, "right")


def _cut_in(draft: Draft) -> None:
    layout = draft.layout
    side = "left" if layout.left_lanes else "right"
    if layout.left_lanes and layout.right_lanes and draft.chance(0.5):
        side = "right"
    sign = 1.0 if side == "left" else -1.0
    gap = 3.5 + draft.uniform(0.35, 0.75) * draft.speed
    speed = draft.speed * draft.uniform(0.62, 0.82)
    span = draft.uniform(2.2, 3.2)
    begin = draft.reaction - draft.uniform(0.38, 0.55) * span
    agent = draft.vehicle(FRONT_M + gap, sign * layout.lane_width, (0.65, 0.2, 0.15, 0.0),
                          speed_mps=speed, final_mps=speed, d_end_m=0.0, shift_from_s=begin,
                          shift_to_s=begin + span, blinker=-int(sign))
    index = draft.decide(agent, side)
    draft.demands = Demands(leads=(Lead(index, draft.reaction, time_gap_s=1.1),))


def _merge(draft: Draft) -> None:
    layout = draft.layout
    gap = 3.5 + draft.uniform(0.4, 0.75) * draft.speed
    speed = draft.speed * draft.uniform(0.62, 0.8)
    begin = draft.reaction - draft.uniform(0.2, 0.6)
    agent = draft.vehicle(FRONT_M + gap, -layout.lane_width, (0.6, 0.2, 0.2, 0.0),
                          speed_mps=speed, final_mps=speed, d_end_m=0.0, shift_from_s=begin,
                          shift_to_s=begin + draft.uniform(2.8, 3.8), blinker=1)
    index = draft.decide(agent, "right")
    draft.ramp_end = FRONT_M + gap + speed * draft.uniform(1.6, 2.6) + 8.0
    draft.demands = Demands(leads=(Lead(index, draft.reaction, time_gap_s=1.2),))


SAMPLERS = {
    "free_road": _free_road, "lead_follow": _lead_follow, "lead_slow": _lead_slow,
    "lead_braking": _lead_braking, "lead_stopped": _lead_stopped, "parked_right": _parked_right,
    "parked_left": _parked_left, "pedestrian": _pedestrian, "red_light": _red_light,
    "green_light": _green_light, "stop_sign": _stop_sign, "curve_left": _curve_left,
    "curve_right": _curve_right, "cut_in": _cut_in, "merge": _merge, "oncoming": _oncoming,
}
# Where each kind happens: shares of city, rural, highway; and the speeds it bears, m/s.
_PLACES = {
    "free_road": ((0.5, 0.25, 0.25), 4.0, 29.0), "lead_follow": ((0.45, 0.25, 0.3), 5.0, 27.0),
    "lead_slow": ((0.4, 0.35, 0.25), 6.0, 24.0), "lead_braking": ((0.5, 0.25, 0.25), 5.0, 24.0),
    "lead_stopped": ((0.7, 0.3, 0.0), 4.0, 13.5), "parked_right": ((0.7, 0.3, 0.0), 4.0, 13.5),
    "parked_left": ((0.8, 0.2, 0.0), 4.0, 12.0), "pedestrian": ((0.8, 0.2, 0.0), 4.0, 12.5),
    "red_light": ((0.9, 0.1, 0.0), 4.0, 13.5), "green_light": ((0.9, 0.1, 0.0), 4.0, 12.0),
    "stop_sign": ((0.6, 0.4, 0.0), 4.0, 13.0), "curve_left": ((0.4, 0.5, 0.1), 6.0, 22.0),
    "curve_right": ((0.4, 0.5, 0.1), 6.0, 22.0), "cut_in": ((0.4, 0.0, 0.6), 7.0, 27.0),
    "merge": ((0.1, 0.1, 0.8), 11.0, 27.0), "oncoming": ((0.5, 0.5, 0.0), 5.0, 13.0),
}
_GENTLE_BEND_FROM_M = -80.0
_ENVIRONMENT_SPEEDS = {"city": (3.5, 14.0), "rural": (8.0, 21.0), "highway": (16.0, 29.0)}


def _sample_layout(rng: np.random.Generator, kind: str, environment: str) -> Layout:
    width = 3.2 + 0.5 * rng.random()
    left = int(rng.random() < 0.35)
    right = int(rng.random() < 0.3)
    oncoming = 1
    shoulder = 0.4 + 0.5 * rng.random()
    centre_line = True
    if environment == "highway":
        width, left, right, oncoming = 3.5 + 0.25 * rng.random(), 1, int(rng.random() < 0.4), 0
        shoulder = 2.0 + rng.random()
    elif environment == "rural":
        left = right = 0
    if kind in ("parked_right", "merge", "lead_slow"):
        right = 0
    if kind == "parked_left":
        left = oncoming = 0
        right = int(rng.random() < 0.5)
    if kind == "oncoming":
        left, oncoming = 0, 1
        centre_line = bool(rng.random() < 0.6)
        width = 3.0 + 0.3 * rng.random()
    if kind == "cut_in" and not left + right:
        left = int(rng.random() < 0.5)
        right = 1 - left
    return Layout(environment, width, left, right, oncoming, shoulder, shoulder, centre_line)


def _add_distractors(draft: Draft) -> None:
    """Up to two bystanders, such as stand beside free roads too."""
    layout = draft.layout
    options = ["sidewalk"] if layout.environment == "city" else []
    nudging = draft.kind in ("parked_right", "parked_left", "oncoming")
    if not nudging and draft.kind != "merge" and layout.environment != "highway":
        options.append("parked")
    if layout.oncoming_lanes and draft.kind != "oncoming":
        options.append("oncoming")
    beside = layout.left_lanes + layout.right_lanes
    if beside and not nudging and draft.kind not in ("cut_in", "lead_slow"):
        options.append("adjacent")
    for _ in range(draft.choice((0, 1, 2), (0.35, 0.4, 0.25))):
        if options:
            _bystander(draft, options.pop(int(draft.rng.random() * len(options))), near=False)


def sample_scene(seed: int, kind: str | None = None) -> Scene:
    """Draw one scene.

    Args:
        seed: the same seed and kind give the same scene.
        kind: one of KINDS; None draws it by KIND_SHARES.
    Raises:
        ValueError: an unknown kind.
    """
    rng = np.random.Generator(np.random.PCG64(seed))
    drawn = _pick(rng, KINDS, tuple(KIND_SHARES.values()))
    kind = kind or drawn
    if kind not in SAMPLERS:
        raise ValueError(f"kind: given {kind!r}, expected one of {', '.join(KINDS)}")
    weather = _pick(rng, WEATHERS, WEATHER_SHARES)
    shares, low, high = _PLACES[kind]
    environment = _pick(rng, ("city", "rural", "highway"), shares)
    place_low, place_high = _ENVIRONMENT_SPEEDS[environment]
    low, high = max(low, place_low), max(min(high, place_high), low + 2.0)
    draft = Draft(rng, kind, weather, _sample_layout(rng, kind, environment),
                  low + (high - low) * rng.random(), -0.35 + 0.5 * rng.random())
    if kind not in ("curve_left", "curve_right") and rng.random() < 0.35:
        gentle = 0.25 / max(draft.speed, 6.0) ** 2 * (2.0 * rng.random() - 1.0)
        draft.bends = ((_GENTLE_BEND_FROM_M, 20.0, 400.0, gentle),)
    SAMPLERS[kind](draft)
    if kind != FREE_ROAD:
        _add_distractors(draft)
    road = build_road(curvature_profile(max(60.0, 7.0 * draft.speed) + 130.0, draft.bends))
    unsteady = 1.2 * (2.0 * rng.random() - 1.0) * min(draft.speed / 8.0, 1.0)
    return Scene(seed, kind, weather, draft.layout, road, draft.speed, draft.speed + unsteady,
                 0.2 * (2.0 * rng.random() - 1.0), tuple(draft.agents),
                 (draft.signal,) if draft.signal else (), draft.demands, draft.facts,
                 draft.decisive, (draft.crosswalk,) if draft.crosswalk else (), draft.ramp_end,
                 int(rng.integers(2 ** 31)))


def _pick(rng: np.random.Generator, options: tuple[str, ...], shares) -> str:
    place = rng.random() * sum(shares)
    for option, share in zip(options, shares):
        place -= share
        if place < 0.0:
            return option
    return options[-1]
