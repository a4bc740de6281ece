"""Confidence in a mean of paired differences, where neighbours are not independent.

Plans that follow each other see nearly the same future, so whole scenes are drawn, not plans.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MIN_SCENES = 5              # fewer say nothing about other drives
REPLICATES = 4000


@dataclass(frozen=True)
class Interval:
    """A mean with its percentile interval; both ends NaN for fewer than `MIN_SCENES` scenes.

    Attributes:
        mean: over all differences, each of equal weight.
        low, high: ends of the interval.
        scenes, pairs: how many of each there were.
    """

    mean: float
    low: float
    high: float
    scenes: int
    pairs: int


def paired_interval(differences: np.ndarray, scenes: np.ndarray, confidence: float = 0.95,
                    seed: int = 0) -> Interval:
    """Bootstrap the mean difference by drawing scenes with replacement.

    Args:
        differences: (N,), NaN where a pair is not known.
        scenes: (N,) int64, which scene a pair belongs to.
        confidence: of the interval.
        seed: the same one gives the same interval.
    Source: Efron and Tibshirani 1993, percentile intervals; scenes as clusters, Davison and
        Hinkley 1997, section 3.8.
    """
    known = np.isfinite(differences)
    differences, scenes = differences[known], scenes[known]
    if not len(differences):
        return Interval(np.nan, np.nan, np.nan, 0, 0)
    _, of_scene = np.unique(scenes, return_inverse=True)
    sums, counts = np.bincount(of_scene, differences), np.bincount(of_scene)
    mean, number = float(differences.mean()), len(sums)
    if number < MIN_SCENES:
        return Interval(mean, np.nan, np.nan, number, len(differences))
    draws = np.random.default_rng(seed).integers(0, number, (REPLICATES, number))
    means = sums[draws].sum(axis=1) / counts[draws].sum(axis=1)
    tail = 50.0 * (1.0 - confidence)
    low, high = np.percentile(means, [tail, 100.0 - tail])
    return Interval(mean, float(low), float(high), number, len(differences))
