"""Controls <-> path: numbers worked by hand, round trips, the target's regularised inverse."""

import numpy as np
import pytest

from reasoning_planner.actions import unicycle
from reasoning_planner.datatypes import STEP_S


def _history(speed_mps, yaw_rate_rps=0.0, acceleration_mps2=0.0):
    """16 poses on a circle or a line, the last one the identity."""
    t = np.arange(-15, 1) * STEP_S
    arc = speed_mps * t + 0.5 * acceleration_mps2 * t**2
    yaw = yaw_rate_rps / speed_mps * arc if speed_mps else 0.0 * t
    kappa = yaw_rate_rps / speed_mps if speed_mps else 0.0
    x = np.sin(yaw) / kappa if kappa else arc
    y = (1.0 - np.cos(yaw)) / kappa if kappa else 0.0 * t
    rotations = np.tile(np.eye(3), (16, 1, 1))
    rotations[:, 0, 0] = rotations[:, 1, 1] = np.cos(yaw)
    rotations[:, 1, 0], rotations[:, 0, 1] = np.sin(yaw), -np.sin(yaw)
    return np.stack([x, y, 0.0 * t], axis=1), rotations


def test_quarter_circle():
    # 10 m/s on a radius of 10 / (pi / 2 / 3.2 s) m turns 90 degrees in 3.2 s, that is in 32 steps.
    radius = 10.0 * 3.2 / (np.pi / 2)                   # 20.3718 m
    path = unicycle.controls_to_path(np.zeros(64), np.full(64, 1 / radius), 10.0)
    assert path.yaw_rad[32] == pytest.approx(np.pi / 2, abs=1e-12)
    # The trapezoid rule draws a chord as the mean of its end directions: shorter than the arc by
    # (h/2) / tan(h/2), h = 0.0490874 rad a step: 0.9997992 * 20.3718 = 20.3677 m both ways.
    assert path.positions[32] == pytest.approx([20.3677, 20.3677], abs=1e-4)
    assert path.positions[32] == pytest.approx([radius, radius], abs=5e-3)


def test_braking_by_hand():
    # v0 = 6 m/s, a = -2 m/s^2 for 3 s: v = 6, 5.8, ... 0; distance 6^2 / (2 * 2) = 9 m; then stop.
    acceleration = np.where(np.arange(64) < 30, -2.0, 0.0)
    path = unicycle.controls_to_path(acceleration, np.full(64, 0.1), 6.0)
    assert path.speed_mps[1] == pytest.approx(5.8)
    assert path.speed_mps[30:] == pytest.approx(0.0, abs=1e-12)
    # First step: s = 0.6 - 0.01 = 0.59 m, heading 0.1 * 0.59 = 0.059 rad,
    # x = 0.05 * (6 + 5.8 cos 0.059) = 0.05 * (6 + 5.789908) = 0.5894954
    # y = 0.05 * 5.8 sin 0.059 = 0.05 * 0.3420015 = 0.0171001
    assert path.yaw_rad[1] == pytest.approx(0.059)
    assert path.positions[1] == pytest.approx([0.5894954, 0.0171001], abs=1e-7)
    assert path.yaw_rad[30] == pytest.approx(0.1 * 9.0)
    straight = unicycle.controls_to_path(acceleration, np.zeros(64), 6.0)
    assert straight.positions[30] == pytest.approx([9.0, 0.0])
    assert straight.positions[64] == pytest.approx([9.0, 0.0])


@pytest.mark.parametrize("v0", [0.0, 0.02, 1.0, 12.0, 40.0, -3.0])
def test_round_trip(v0):
    rng = np.random.default_rng(7)
    acceleration = np.abs(rng.normal(0.0, 2.0, 64)) * (1 if v0 >= 0 else -1)
    curvature = rng.uniform(-0.33, 0.33, 64)
    path = unicycle.controls_to_path(acceleration, curvature, v0)
    assert path.positions.dtype == path.speed_mps.dtype == np.float64
    a, k = unicycle.path_to_controls(path.positions, path.yaw_rad, v0)
    assert np.abs(a - acceleration).max() < 1e-6
    assert np.abs(k - curvature).max() < 1e-6


def test_round_trip_through_wrapped_headings():
    path = unicycle.controls_to_path(np.zeros(64), np.full(64, 0.2), 10.0)     # 12.8 rad in all
    wrapped = np.arctan2(np.sin(path.yaw_rad), np.cos(path.yaw_rad))
    _, k = unicycle.path_to_controls(path.positions, wrapped, 10.0)
    assert np.abs(k - 0.2).max() < 1e-6


def test_standing_still_has_no_curvature():
    path = unicycle.controls_to_path(np.zeros(64), np.full(64, 0.3), 0.0)
    assert not path.positions.any() and not path.yaw_rad.any()
    a, k = unicycle.path_to_controls(path.positions, path.yaw_rad, 0.0)
    assert not a.any() and not k.any()


def test_round_trip_braking_to_rest():
    acceleration = np.where(np.arange(64) < 30, -2.0, 0.0)
    curvature = np.where(np.arange(64) < 30, 0.1, 0.0)
    path = unicycle.controls_to_path(acceleration, curvature, 6.0)
    a, k = unicycle.path_to_controls(path.positions, path.yaw_rad, 6.0)
    assert np.abs(a - acceleration).max() < 1e-6
    assert np.abs(k - curvature).max() < 1e-6


def test_fit_controls_drives_along_a_noisy_path():
    t = np.arange(64) * STEP_S
    acceleration, curvature = 0.8 * np.sin(0.8 * t), 0.03 * np.cos(0.6 * t)
    path = unicycle.controls_to_path(acceleration, curvature, 8.0)
    rng = np.random.default_rng(3)
    positions = path.positions + rng.normal(0.0, 0.01, (65, 2))
    yaw = path.yaw_rad + rng.normal(0.0, 0.002, 65)
    a, k = unicycle.fit_controls(positions, yaw, 8.0)
    again = unicycle.controls_to_path(a, k, 8.0)
    assert np.linalg.norm(again.positions - path.positions, axis=1).max() < 0.8
    assert np.linalg.norm(again.positions - path.positions, axis=1).mean() < 0.3
    exact, _ = unicycle.path_to_controls(positions, yaw, 8.0)
    assert np.abs(a - acceleration).max() < 1.0 < np.abs(exact - acceleration).max()


def test_fit_controls_of_a_straight_line():
    # The ridge of 1e-4 stands against dt^2 = 1e-2, so a constant 1 m/s^2 comes out as
    # 1 / (1 + 0.01) = 0.990 m/s^2.
    path = unicycle.controls_to_path(np.ones(64), np.zeros(64), 5.0)
    a, k = unicycle.fit_controls(path.positions, path.yaw_rad, 5.0)
    assert a == pytest.approx(np.full(64, 0.990), abs=2e-3)
    assert np.abs(k).max() < 1e-12


def test_fit_controls_bounds_curvature_as_alpamayo_2():
    path = unicycle.controls_to_path(np.full(64, -0.2), np.full(64, 0.5), 1.28)
    bounds = dict(min_speed_mps=unicycle.ALPAMAYO2_MIN_SPEED_MPS,
                  max_curvature_1pm=unicycle.ALPAMAYO2_MAX_CURVATURE_1PM)
    _, free = unicycle.fit_controls(path.positions, path.yaw_rad, 1.28)
    _, k = unicycle.fit_controls(path.positions, path.yaw_rad, 1.28, **bounds)
    assert free.max() > 0.4
    assert k.max() == unicycle.ALPAMAYO2_MAX_CURVATURE_1PM
    assert not k[40:].any()          # slower than 1.28 - 0.02 * 35 = 0.58 m/s


def test_initial_speed():
    assert unicycle.initial_speed(*_history(12.0)) == pytest.approx(12.0, abs=1e-3)
    turning = _history(12.0, yaw_rate_rps=0.4)
    assert unicycle.initial_speed(*turning) == pytest.approx(12.0, abs=1e-2)
    assert unicycle.initial_speed(*_history(-2.0)) == pytest.approx(-2.0, abs=1e-3)
    speeding_up = _history(9.0, acceleration_mps2=2.0)
    assert unicycle.initial_speed(*speeding_up) == pytest.approx(9.0, abs=0.02)
    assert unicycle.initial_speed(*_history(0.0)) == 0.0


def test_initial_speed_does_not_depend_on_the_frame():
    positions, rotations = _history(7.0, yaw_rate_rps=0.3)
    c, s = np.cos(3.0), np.sin(3.0)
    turn = np.array([[c, -s, 0.0], [s, c, 0.0], [0.0, 0.0, 1.0]])
    moved = unicycle.initial_speed(positions @ turn.T + 100.0, turn @ rotations)
    assert moved == pytest.approx(unicycle.initial_speed(positions, rotations), abs=1e-9)


def test_normalisation():
    a, k = unicycle.denormalise_controls(np.tile(np.float32([1.0, -1.0]), (64, 1)))
    # 0.68104267 + 0.02902695 = 0.71006962; -0.02614828 + 0.00026922 = -0.02587906
    assert a == pytest.approx(0.71006962, abs=1e-8)
    assert k == pytest.approx(-0.02587906, abs=1e-8)
    assert a.dtype == np.float64
    assert unicycle.normalise_controls(a, k) == pytest.approx(np.tile([1.0, -1.0], (64, 1)))


def test_shapes_are_checked():
    with pytest.raises(ValueError, match=r"acceleration: given shape \(63,\), expected \(64,\)"):
        unicycle.controls_to_path(np.zeros(63), np.zeros(64), 1.0)
    with pytest.raises(ValueError, match="controls: given shape"):
        unicycle.denormalise_controls(np.zeros((2, 64)))
    with pytest.raises(ValueError, match="history_positions"):
        unicycle.initial_speed(np.zeros((15, 3)), np.zeros((16, 3, 3)))
