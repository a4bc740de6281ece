"""Trajectory bins: an independent formulation, hand-worked numbers, the quirks of the original."""

import numpy as np
import pytest

from reasoning_planner.errors import InputError
from reasoning_planner.tokenization.special_tokens import QWEN3_BASE_SIZE, SpecialTokens
from reasoning_planner.tokenization.trajectory_tokenizer import (ControlTokenizer,
                                                                 DeltaTrajectoryTokenizer)

SPECIAL = SpecialTokens.for_base(QWEN3_BASE_SIZE)
FIRST_HISTORY_BIN = 154_669
HISTORY = DeltaTrajectoryTokenizer(SPECIAL)
CONTROLS = ControlTokenizer(SPECIAL)


def driven(speed_mps, yaw_rate_rps=0.0, noise_m=0.0, rng=None):
    """(16, 3) float64, positions of a car on an arc, last pose at the origin."""
    t = np.arange(-15, 1) * 0.1
    yaw = yaw_rate_rps * t
    radius = speed_mps / yaw_rate_rps if yaw_rate_rps else None
    x = radius * np.sin(yaw) if yaw_rate_rps else speed_mps * t
    y = radius * (1 - np.cos(yaw)) if yaw_rate_rps else 0 * t
    positions = np.stack([x, y, 0 * t], axis=-1)
    if noise_m:
        positions[:-1] += rng.normal(scale=noise_m, size=(15, 3))
    return positions


def one_bin(delta, low, high):
    """One step's bin, one scalar operation at a time, in float32; Python rounds half to even."""
    f = np.float32
    share = f(f(f(delta) - f(low)) / f(f(high) - f(low)))
    return min(max(int(round(float(f(share * f(999))))), 0), 999)


def bins_one_by_one(positions):
    previous, bins = np.zeros(3, dtype=np.float32), []
    for row in positions.astype(np.float32):
        step = row - previous
        bins += [one_bin(step[0], -4, 4), one_bin(step[1], -4, 4), one_bin(step[2], -10, 10)]
        previous = row
    return np.array(bins)


def test_thousand_random_histories_equal_the_scalar_formulation():
    rng = np.random.default_rng(0)
    for _ in range(1000):
        positions = driven(rng.uniform(-5, 40), rng.uniform(0.01, 0.8), rng.uniform(0, 0.1), rng)
        token_ids = HISTORY.encode(positions)
        assert token_ids.dtype == np.int64 and token_ids.shape == (48,)
        np.testing.assert_array_equal(token_ids - FIRST_HISTORY_BIN, bins_one_by_one(positions))


def test_histories_equal_torch():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(1)
    low, high = torch.tensor([-4.0, -4.0, -10.0]), torch.tensor([4.0, 4.0, 10.0])
    for _ in range(100):
        positions = driven(rng.uniform(0, 40), rng.uniform(0.01, 0.8), 0.05, rng)
        xyz = torch.nn.functional.pad(torch.tensor(positions, dtype=torch.float32), (0, 0, 1, 0))
        share = (xyz.diff(dim=0) - low) / (high - low)
        bins = (share * 999).round().long().clamp(0, 999).flatten()
        np.testing.assert_array_equal(HISTORY.encode(positions) - FIRST_HISTORY_BIN, bins)


def test_parked_car_takes_bin_500():
    assert set(HISTORY.encode(np.zeros((16, 3))).tolist()) == {FIRST_HISTORY_BIN + 500}


def test_parked_car_flickers_between_499_and_500():
    noise = np.random.default_rng(2).normal(scale=1e-4, size=(16, 3))
    bins = HISTORY.encode(noise) - FIRST_HISTORY_BIN
    assert set(bins.tolist()) == {499, 500}


@pytest.mark.parametrize("speed_mps, expected_bin", [
    (2.0, 125),     # -3.0 m: (4 - 3) / 8 * 999 = 124.875
    (2.6, 12),      # -3.9 m: 12.4875
    (2.7, 0),       # -4.05 m, below the lowest bin
    (30.0, 0)])
def test_first_step_is_the_distance_to_the_origin_and_saturates(speed_mps, expected_bin):
    bins = HISTORY.encode(driven(speed_mps)) - FIRST_HISTORY_BIN
    assert bins[0] == expected_bin
    assert bins[1] == bins[2] == 500


def test_steps_of_a_steady_drive():
    bins = (HISTORY.encode(driven(10.0)) - FIRST_HISTORY_BIN).reshape(16, 3)
    assert set(bins[1:, 0].tolist()) == {624}       # 1 m a step: 5 / 8 * 999 = 624.375


def test_large_steps_are_clamped_at_both_ends():
    positions = np.zeros((16, 3))
    positions[8:] = [5.0, -5.0, 20.0]
    assert HISTORY.encode(positions).reshape(16, 3)[8].tolist() == [
        FIRST_HISTORY_BIN + 999, FIRST_HISTORY_BIN, FIRST_HISTORY_BIN + 999]


def test_decoded_steps_are_within_half_a_bin():
    positions = driven(2.0, 0.3)
    steps = HISTORY.decode(HISTORY.encode(positions))
    expected = np.diff(positions, axis=0, prepend=np.zeros((1, 3)))
    assert steps.dtype == np.float32
    assert np.all(np.abs(steps - expected) <= np.array([4, 4, 10]) / 999 + 1e-5)


@pytest.mark.parametrize("positions, words", [
    (np.zeros((15, 3)), "given shape (15, 3), expected (16, 3)"),
    (np.full((16, 3), np.nan), "not finite"),
    (np.full((16, 3), 1e7), "beyond 1e+06")])
def test_unusable_history_is_refused(positions, words):
    with pytest.raises(InputError) as raised:
        HISTORY.encode(positions)
    assert words in str(raised.value)


def test_controls_hand_worked():
    controls = np.zeros((64, 2))
    controls[0] = [-10.0, 10.0]
    controls[1] = [-12.0, 1000.0]
    controls[2] = [1.0, -0.001]
    token_ids = CONTROLS.encode(controls)
    assert token_ids.shape == (128,) and token_ids.dtype == np.int64
    # 0 lies between bins 1499 and 1500; 11 / 20 * 2999 = 1649.45
    assert (token_ids[:8] - 151_669).tolist() == [0, 2999, 0, 2999, 1649, 1499, 1500, 1500]


def test_controls_round_trip_within_half_a_bin():
    controls = np.random.default_rng(3).uniform(-10, 10, size=(64, 2))
    decoded = CONTROLS.decode(CONTROLS.encode(controls))
    assert np.abs(decoded - controls).max() <= 10 / 2999 + 1e-5
    np.testing.assert_array_equal(CONTROLS.encode(decoded), CONTROLS.encode(controls))


@pytest.mark.parametrize("token_ids, words", [
    (np.full(47, FIRST_HISTORY_BIN), "given shape (47,), expected (48,)"),
    (np.full(48, FIRST_HISTORY_BIN - 1), "expected 154669 .. 155668"),
    (np.full(48, 155_669), "expected 154669 .. 155668")])
def test_ids_that_are_no_history_are_refused(token_ids, words):
    with pytest.raises(InputError) as raised:
        HISTORY.decode(token_ids)
    assert words in str(raised.value)
