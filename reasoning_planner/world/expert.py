"""The driver of the synthetic world: car following, stopping, and a path law on a unicycle.

It answers the demands of a scene at 10 Hz and records the very controls it applied, so that a
drive and its controls agree exactly. It does not look at images and knows no words.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..datatypes import HISTORY_LENGTH, HORIZON_LENGTH, STEP_S
from .elements import FRONT_M, Agent, Demands, Offset, Scene
from .road import GRID_M, START_M, Road

HISTORY_STEPS = HISTORY_LENGTH                 # t0 - 1.6 s .. t0
MAX_BRAKING_MPS2 = 6.5
MAX_ACCEL_MPS2 = 2.4
MAX_CURVATURE_1PM = 0.2
MAX_LATERAL_JERK_MPS3 = 5.0


@dataclass(frozen=True)
class Drive:
    """A driven stretch at 10 Hz in the world frame of its road.

    Attributes:
        time_s: (N + 1,) float64.
        positions: (N + 1, 2) float64, metres, of the rear axle.
        yaw_rad, speed_mps: (N + 1,) float64.
        controls: (N, 2) float64, acceleration m/s^2 and curvature 1/m of each step.
        along_m, across_m: (N + 1,) float64, the same places on the road.
    """

    time_s: np.ndarray
    positions: np.ndarray
    yaw_rad: np.ndarray
    speed_mps: np.ndarray
    controls: np.ndarray
    along_m: np.ndarray
    across_m: np.ndarray


class Driver:
    """The ego vehicle's state and the two control laws; `step` moves it by 0.1 s."""

    def __init__(self, road: Road, s_m: float, d_m: float, speed_mps: float, cruise_mps: float,
                 rng: np.random.Generator):
        point, yaw = road.points(s_m, d_m), float(road.poses(s_m)[2])
        self.x, self.y, self.yaw = float(point[0]), float(point[1]), yaw
        self.speed, self.s, self.d = speed_mps, s_m, d_m
        self.cruise = cruise_mps
        self.accel = 0.7 * (cruise_mps - speed_mps)
        self.curvature = float(np.interp(s_m, _grid(road), road.curvature))
        self._x, self._y = road.x.tolist(), road.y.tolist()
        self._yaw, self._bend = road.yaw.tolist(), road.curvature.tolist()
        self._noise = iter(())
        self._rng = rng
        self._pedal = self._steer = 0.0

    def step(self, t: float, demands: Demands, agents: tuple[Agent, ...]) -> tuple[float, float]:
        """Apply one step of 0.1 s and return its acceleration and curvature."""
        accel = self._acceleration(t, demands, agents)
        curvature = self._path_curvature(demands.offsets)
        v, next_speed = self.speed, self.speed + accel * STEP_S
        arc = v * STEP_S + 0.5 * accel * STEP_S ** 2
        next_yaw = self.yaw + curvature * arc
        self.x += 0.5 * STEP_S * (v * math.cos(self.yaw) + next_speed * math.cos(next_yaw))
        self.y += 0.5 * STEP_S * (v * math.sin(self.yaw) + next_speed * math.sin(next_yaw))
        self.yaw, self.speed, self.accel, self.curvature = next_yaw, next_speed, accel, curvature
        self.s += arc
        self._project()
        return accel, curvature

    def _acceleration(self, t: float, demands: Demands, agents: tuple[Agent, ...]) -> float:
        v = self.speed
        cruise, ease = self.cruise, 1.2
        for order in demands.cruises:
            if t >= order.start_s:
                cruise, ease = order.speed_mps, order.accel_mps2
        wanted = min(max(0.7 * (cruise - v), -1.3 * ease), ease)
        for lead in demands.leads:
            if lead.start_s <= t < lead.end_s:
                agent = agents[lead.agent]
                s, speed = agent.along(t)
                gap = s - 0.5 * agent.length_m - self.s - FRONT_M
                wanted = min(wanted, _following(v, speed, gap, lead.time_gap_s,
                                                agent.braking(t)))
        for stop in demands.stops:
            if stop.start_s <= t < stop.end_s:
                wanted = min(wanted, _stopping(v, stop.s_m - self.s - FRONT_M))
        noise = self._draw()
        self._pedal = 0.9 * self._pedal + 0.045 * noise[0] * min(v, 1.0)
        self._steer = 0.9 * self._steer + 0.25 * noise[1]
        wanted = min(max(wanted + self._pedal, -MAX_BRAKING_MPS2), MAX_ACCEL_MPS2)
        jerk = 0.45 if wanted < self.accel and wanted > -3.5 else 0.25 if wanted > 0.0 else 0.9
        accel = self.accel + min(max(wanted - self.accel, -jerk), jerk)
        if v + accel * STEP_S < 0.02 and wanted <= 0.0:
            return -v / STEP_S
        return max(accel, -v / STEP_S)

    def _path_curvature(self, offsets: tuple[Offset, ...]) -> float:
        v = self.speed
        if v < 0.3:
            return 0.0
        wish = slope = slope_ahead = 0.0
        if offsets:
            wish, slope = lane_offset(offsets, self.s)
            slope_ahead = lane_offset(offsets, self.s + 2.0)[1]
        look = max(4.0, 0.9 * v)
        heading = self.yaw - self._at(self._yaw, self.s)
        bend = self._at(self._bend, self.s + 0.1 * v)
        wanted = (bend + 0.5 * (slope_ahead - slope) - 2.0 * (self.d - wish) / look ** 2
                  - 2.0 * (heading - slope) / look)
        wanted += self._steer * min(6e-4, 0.03 / (v * v))
        rate = STEP_S * min(0.25, MAX_LATERAL_JERK_MPS3 / max(v * v, 1.0))
        wanted = min(max(wanted, self.curvature - rate), self.curvature + rate)
        return min(max(wanted, -MAX_CURVATURE_1PM), MAX_CURVATURE_1PM)

    def _draw(self) -> list[float]:
        pair = next(self._noise, None)
        if pair is None:
            self._noise = iter(self._rng.standard_normal((128, 2)).tolist())
            pair = next(self._noise)
        return pair

    def _place(self, s: float) -> tuple[int, float]:
        place = (s - START_M) / GRID_M
        index = min(max(int(place), 0), len(self._x) - 2)
        return index, min(max(place - index, 0.0), 1.0)

    def _at(self, values: list[float], s: float) -> float:
        index, fraction = self._place(s)
        return values[index] + fraction * (values[index + 1] - values[index])

    def _project(self) -> None:
        """One Newton step from the place dead-reckoned: exact to millimetres at 0.1 s."""
        i, fraction = self._place(self.s)
        yaw = self._yaw[i] + fraction * (self._yaw[i + 1] - self._yaw[i])
        dx = self.x - self._x[i] - fraction * (self._x[i + 1] - self._x[i])
        dy = self.y - self._y[i] - fraction * (self._y[i + 1] - self._y[i])
        cos, sin = math.cos(yaw), math.sin(yaw)
        self.s += cos * dx + sin * dy
        self.d = cos * dy - sin * dx


def _grid(road: Road) -> np.ndarray:
    return START_M + GRID_M * np.arange(len(road.x))


def _following(speed: float, lead_speed: float, gap: float, time_gap: float, braking: bool
               ) -> float:
    """Intelligent driver model without its free-road term. Source: Treiber et al. 2000."""
    gap = max(gap, 0.3)
    closing = speed * (speed - lead_speed) / (2.0 * math.sqrt(1.6 * 2.2))
    wished = 2.5 + max(speed * time_gap + closing, 0.0)
    accel = 1.6 * (1.0 - (wished / gap) ** 2)
    if lead_speed < 0.3:
        return min(max(accel, -3.0), _stopping(speed, gap - 2.2))
    if braking:
        return accel
    # A gap that is short but does not shrink is widened gently, as people do after a cut-in.
    needed = max(speed - lead_speed, 0.0) ** 2 / (2.0 * max(gap - 2.5, 0.8))
    return max(accel, -1.0 - 1.35 * needed)


def _stopping(speed: float, distance: float) -> float:
    """The even braking that ends at `distance`, eased over the last metre."""
    if speed < 0.05:
        return -0.5
    if distance > 0.5 + 0.9 * speed + speed * speed / 2.2:
        return MAX_ACCEL_MPS2
    braking = speed * speed / (2.0 * max(distance, 0.15))
    return -min(braking, 0.6 + 1.5 * speed)


def _ease(u: float) -> tuple[float, float]:
    u = min(max(u, 0.0), 1.0)
    return u * u * u * (10.0 - 15.0 * u + 6.0 * u * u), 30.0 * u * u * (1.0 - u) ** 2


def lane_offset(offsets: tuple[Offset, ...], s: float) -> tuple[float, float]:
    """Wished distance to the left of the lane centre at s, and its slope."""
    total = slope = 0.0
    for shift in offsets:
        rise, rising = _ease((s - shift.begin_m) / (shift.full_m - shift.begin_m))
        fall, falling = _ease((s - shift.leave_m) / (shift.end_m - shift.leave_m))
        total += shift.offset_m * (rise - fall)
        slope += shift.offset_m * (rising / (shift.full_m - shift.begin_m)
                                   - falling / (shift.end_m - shift.leave_m))
    return total, slope


def drive_scene(scene: Scene) -> Drive:
    """Drive a scene from t0 - 1.6 s to t0 + 6.4 s, 80 steps; index 16 is t0."""
    rng = np.random.Generator(np.random.PCG64((scene.seed, 1)))
    begin_s = -HISTORY_STEPS * STEP_S
    driver = Driver(scene.road, begin_s * scene.speed_mps, scene.offset_m,
                    scene.first_speed_mps, scene.speed_mps, rng)
    steps = HISTORY_STEPS + HORIZON_LENGTH
    recorder = Recorder(driver, begin_s)
    for i in range(steps):
        recorder.step(begin_s + i * STEP_S, scene.demands, scene.agents)
    return recorder.drive()


class Recorder:
    """Collects what a driver does, step by step."""

    def __init__(self, driver: Driver, begin_s: float):
        self.driver, self._begin_s = driver, begin_s
        self._states = [self._state()]
        self._controls: list[tuple[float, float]] = []

    def step(self, t: float, demands: Demands, agents: tuple[Agent, ...]) -> None:
        """One step of the driver, recorded."""
        self._controls.append(self.driver.step(t, demands, agents))
        self._states.append(self._state())

    def drive(self) -> Drive:
        """All steps so far."""
        states = np.asarray(self._states)
        time_s = self._begin_s + STEP_S * np.arange(len(states))
        return Drive(time_s, states[:, :2], states[:, 2], states[:, 3],
                     np.asarray(self._controls), states[:, 4], states[:, 5])

    def _state(self) -> tuple[float, ...]:
        driver = self.driver
        return driver.x, driver.y, driver.yaw, driver.speed, driver.s, driver.d
