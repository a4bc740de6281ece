"""Quantiles of measured times. Knows neither records nor clocks."""

from __future__ import annotations

from typing import Iterable, Optional

import numpy as np

QUANTILES = {"p50": 50.0, "p95": 95.0, "p99": 99.0}


def quantiles(values: Iterable[float],
              names: tuple[str, ...] = ("p50", "p95", "p99")) -> dict[str, Optional[float]]:
    """{"p50": ..., "p95": ..., "p99": ...} with linear interpolation; None when nothing came.

    Values that are not finite are left out.
    """
    finite = np.array([v for v in values if np.isfinite(v)], dtype=np.float64)
    if finite.size == 0:
        return {name: None for name in names}
    return {name: float(np.percentile(finite, QUANTILES[name])) for name in names}


def stage_quantiles(timings_ms: Iterable[dict[str, float]],
                    stages: tuple[str, ...]) -> dict[str, dict[str, Optional[float]]]:
    """Quantiles of each stage over the cycles in which it ran (a time above zero)."""
    cycles = list(timings_ms)
    return {stage: quantiles(c[stage] for c in cycles if c[stage] > 0.0) for stage in stages}
