"""The gate in front of publishing, and the comfort measures."""

from dataclasses import replace

import numpy as np
import pytest

from reasoning_planner.actions.limits import check, comfort
from reasoning_planner.actions.unicycle import controls_to_path
from reasoning_planner.config import LimitsConfig
from reasoning_planner.datatypes import Reason

LIMITS = LimitsConfig()


def _path(acceleration=0.0, curvature=0.0, v0=10.0):
    return controls_to_path(np.full(64, acceleration), np.full(64, curvature), v0)


def test_ordinary_plans_pass():
    assert check(_path(), 10.0, LIMITS) is None
    assert check(_path(v0=0.0), 0.0, LIMITS) is None
    assert check(_path(curvature=0.33, v0=1.0), 1.0, LIMITS) is None       # exactly at the bound


@pytest.mark.parametrize("name", ["positions", "yaw_rad", "speed_mps", "acceleration_mps2",
                                  "curvature_1pm"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_not_finite(name, value):
    values = np.array(getattr(_path(), name))
    values[17] = value
    refusal = check(replace(_path(), **{name: values}), 10.0, LIMITS)
    assert refusal.reason is Reason.PLAN_NAN
    assert f"{name} of waypoint 17 is" in refusal.detail


@pytest.mark.parametrize("path, odometry, detail", [
    # 10 + 6.4 * 6 = 48.4 m/s at the end
    (_path(acceleration=6.0), 10.0, "speed of waypoint 64 48.4 m/s, bound 45 m/s"),
    (_path(acceleration=-10.0, v0=40.0), 40.0,
     "acceleration of waypoint 0 -10 m/s^2, bound 9.8 m/s^2"),
    (_path(curvature=-0.4, v0=1.0), 1.0, "curvature of waypoint 0 -0.4 1/m, bound 0.33 1/m"),
    # 10^2 * 0.1 = 10 m/s^2
    (_path(curvature=0.1), 10.0, "lateral acceleration of waypoint 0 10 m/s^2, bound 9.8"),
    # 0.5 + 0.1 * 8 = 1.3 < 2
    (_path(), 8.0, "difference 2 m/s, bound 1.3 m/s"),
    # -1 m/s for 6.4 s
    (_path(v0=-1.0), -1.0, "x of waypoint 64 -6.4 m, bound -2 m"),
])
def test_beyond_a_bound(path, odometry, detail):
    refusal = check(path, odometry, LIMITS)
    assert refusal.reason is Reason.PLAN_OVER_LIMIT
    assert detail in refusal.detail


def test_first_waypoint_must_be_where_the_odometry_leads():
    positions = _path().positions + np.where(np.arange(65)[:, None] > 0, [0.0, 2.5], 0.0)
    refusal = check(replace(_path(), positions=positions), 10.0, LIMITS)
    assert "distance of waypoint 1 from the odometry's 2.5 m, bound 2 m" in refusal.detail


def test_the_speed_tolerance_is_half_a_metre_and_a_tenth():
    assert check(_path(v0=0.49), 0.0, LIMITS) is None
    assert check(_path(v0=0.51), 0.0, LIMITS) is not None
    assert check(_path(v0=22.4), 20.0, LIMITS) is None         # 0.5 + 2.0
    assert check(_path(v0=22.6), 20.0, LIMITS) is not None


def test_absurd_odometry():
    assert check(_path(), float("nan"), LIMITS).reason is Reason.ODOMETRY_INVALID


def test_comfort_of_a_steady_drive():
    assert comfort(_path()).score == 0.0
    assert comfort(_path(acceleration=2.3)).lon_accel
    assert comfort(_path(v0=0.0)).score == 0.0


def test_comfort_of_each_discomfort():
    # 2.5 m/s^2 from first to last: out of (-4.05, 2.40), and the repeated last speed reads as a
    # jerk of -25 m/s^3: three checks of six.
    harsh = comfort(_path(acceleration=2.5))
    assert not (harsh.lon_accel or harsh.lon_jerk or harsh.jerk)
    assert harsh.score == pytest.approx(-0.5)
    gentle = comfort(_path(acceleration=0.4))
    assert gentle.score == 0.0
    assert not comfort(_path(acceleration=-4.1, v0=40.0)).lon_accel
    # 3 m/s at 0.32 1/m is 0.96 rad/s > 0.95.
    turning = comfort(_path(curvature=0.32, v0=3.0))
    assert not turning.yaw_rate and turning.lat_accel and turning.yaw_accel
    # The repeated last velocity against the last heading reads as v * yaw rate: 4.8 and 5.0 m/s^2.
    assert comfort(_path(curvature=0.048)).lat_accel
    assert not comfort(_path(curvature=0.050)).lat_accel
    # From 0 to 1 m/s^2 within one step; the chords' speeds spread it over two: 5 m/s^3.
    jump = np.where(np.arange(64) % 48 < 16, 0.0, 1.0)
    jerky = comfort(controls_to_path(jump, np.zeros(64), 10.0))
    assert jerky.lon_accel and jerky.jerk and not jerky.lon_jerk
    # From 0 to 0.03 1/m at 10 m/s within one step: 0.3 rad/s in 0.1 s is 3 rad/s^2.
    swerve = comfort(controls_to_path(np.zeros(64), 0.03 * jump, 10.0))
    assert not swerve.yaw_accel and swerve.yaw_rate
    # A sideways hop of 0.1 m in one step is 1 m/s sideways for one step: 10 m/s^2.
    hop = _path().positions + np.where(np.arange(65)[:, None] > 32, [0.0, 0.1], 0.0)
    assert not comfort(replace(_path(), positions=hop)).lat_accel


def test_comfort_of_a_plan_that_is_not_finite():
    positions = np.array(_path().positions)
    positions[20] = np.nan
    assert not comfort(replace(_path(), positions=positions)).lon_accel
