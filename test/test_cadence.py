"""The rate of publications with planners of every speed, in simulated time."""

import numpy as np
import pytest

from reasoning_planner.cadence import Cadence

TICK_S = 0.02


def simulate(plan_times_s, until_s, rate_hz=10.0):
    """Times of the repeats, looked for every 20 ms."""
    cadence, plans, repeats = Cadence(rate_hz), list(plan_times_s), []
    for now in np.arange(0.0, until_s, TICK_S):
        while plans and plans[0] <= now:
            cadence.published(plans.pop(0))
        if cadence.is_due(now):
            cadence.published(now)
            repeats.append(now)
    return repeats


@pytest.mark.parametrize("period_s", [0.11, 0.13, 0.17, 0.2, 0.25, 0.33, 0.5, 0.7, 0.73, 1.0])
def test_slow_plans_and_their_repeats_keep_the_rate(period_s):
    plans = np.arange(0.3, 60.0, period_s)
    repeats = simulate(plans, 60.0)
    assert 9.8 <= (len(plans) + len(repeats)) / 59.7 <= 10.2


@pytest.mark.parametrize("jitter_s", [0.0, 0.02, 0.04])
def test_plans_at_the_wanted_rate_are_not_doubled(jitter_s):
    generator = np.random.default_rng(0)
    plans = np.arange(0.3, 30.0, 0.1) + generator.uniform(-jitter_s / 2, jitter_s / 2, 297)
    assert len(simulate(plans, 30.0)) <= 1


@pytest.mark.parametrize("period_s", [0.33, 0.7, 0.73])
def test_no_gap_is_longer_than_two_periods(period_s):
    plans = np.arange(0.3, 30.0, period_s)
    both = np.sort(np.concatenate([plans, simulate(plans, 30.0)]))
    assert np.diff(both).max() <= 0.175 + TICK_S


def test_nothing_is_due_before_the_first_publication_or_after_a_reset():
    cadence = Cadence(10.0)
    assert not cadence.is_due(100.0)
    cadence.published(100.0)
    assert not cadence.is_due(100.149) and cadence.is_due(100.151)
    cadence.reset()
    assert not cadence.is_due(1e9)


def test_plans_faster_than_the_rate_need_no_repeats():
    assert simulate(np.arange(0.3, 20.0, 0.05), 20.0) == []


def test_a_long_silence_is_not_made_up_for():
    cadence = Cadence(10.0)
    cadence.published(0.0)
    cadence.published(50.0)
    assert not cadence.is_due(50.049) and cadence.is_due(50.051)
