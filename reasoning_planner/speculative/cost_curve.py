"""What a target pass over k tokens costs on the engine at hand: measured, then interpolated."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Mapping, Sequence

import numpy as np

from ..errors import ConfigError, ModelError
from ..runtimes.base import Runtime
from ..runtimes.engine_manifest import load_built


@dataclass(frozen=True)
class CostCurve:
    """T(k), milliseconds of a pass over k tokens; straight between the measured sizes.

    Attributes:
        sizes: tokens of a pass, ascending.
        cost_ms: of each.
        round_ms: what a round costs besides its pass: accepting, the loop, drafting without a
            network.
        draft_ms: what a draft of the network costs besides.
    """

    sizes: tuple[int, ...] = (1, 8, 16)
    cost_ms: tuple[float, ...] = (1.0, 1.9, 2.7)    # 2 CPU cores, in units of T(1)
    round_ms: float = 0.0
    draft_ms: float = 0.0

    def __post_init__(self) -> None:
        problems = []
        if not (self.sizes and self.sizes[0] >= 1 and list(self.sizes) == sorted(set(self.sizes))):
            problems.append(f"sizes: given {self.sizes}, expected ascending sizes from 1")
        if len(self.cost_ms) != len(self.sizes) or not all(ms > 0.0 for ms in self.cost_ms):
            problems.append(f"cost_ms: given {self.cost_ms}, expected {len(self.sizes)} "
                            f"positive times")
        problems += [f"{name}: given {value}, expected 0 or more" for name, value in (
            ("round_ms", self.round_ms), ("draft_ms", self.draft_ms)) if not value >= 0.0]
        if problems:
            raise ConfigError(problems)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as a manifest holds them."""
        return {"sizes": list(self.sizes), "cost_ms": list(self.cost_ms),
                "round_ms": self.round_ms, "draft_ms": self.draft_ms}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CostCurve:
        """Rebuild from `to_dict`; other keys, such as where it was measured, are passed over.

        Raises:
            ConfigError: a key is missing, or a value is refused.
        """
        try:
            return cls(tuple(int(size) for size in values["sizes"]),
                       tuple(float(ms) for ms in values["cost_ms"]), float(values["round_ms"]),
                       float(values.get("draft_ms", 0.0)))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError([f"cost curve: given {values!r} ({type(error).__name__}: "
                               f"{error}), expected sizes, cost_ms and round_ms"]) from error

    def round_costs(self, largest: int) -> np.ndarray:
        """(largest,) float64, milliseconds of a round whose pass is over 1 .. largest tokens."""
        wanted = np.arange(1, largest + 1)
        costs = np.interp(wanted, self.sizes, self.cost_ms)
        if len(self.sizes) > 1:
            slope = ((self.cost_ms[-1] - self.cost_ms[-2]) / (self.sizes[-1] - self.sizes[-2]))
            costs += max(slope, 0.0) * np.maximum(wanted - self.sizes[-1], 0)
        return costs + self.round_ms


def measure_cost_curve(runtime: Runtime, sizes: Sequence[int] = (1, 2, 4, 8, 16), repeats: int = 9,
                       round_ms: float = 0.0) -> CostCurve:
    """Time passes behind whatever is cached; the cache is as before.

    Args:
        runtime: with a prompt of the usual length read, and room for the largest size.
        repeats: passes of each size after one to warm up; their median counts.
    Raises:
        ModelError: the cache has no room.
    """
    times_ms: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(repeats + 1):
        for size in sizes:      # in turn, so that a slow moment of the machine hits all alike
            length, started_s = runtime.length, time.perf_counter()
            runtime.extend(np.zeros(size, np.int64))
            runtime.crop(length)
            times_ms[size].append(1e3 * (time.perf_counter() - started_s))
    medians = [float(np.median(times_ms[size][1:])) for size in sizes]
    return CostCurve(tuple(sizes), tuple(medians), round_ms)


def load_cost_curve(engines: Path) -> CostCurve | None:
    """What `build-engines` or `bench --calibrate` measured with the engines, or the graphs, of a
    directory; None: they did not yet.

    Raises:
        ModelError: the manifest is missing or damaged.
    """
    costs = load_built(engines).costs
    try:
        return None if costs is None else CostCurve.from_dict(costs)
    except ConfigError as error:
        raise ModelError(f"{engines}: {error}") from error


def save_cost_curve(curve: CostCurve, engines: Path, about: Mapping[str, Any]) -> None:
    """Write a curve into the manifest of the engines, or the graphs, it was measured with.

    Args:
        about: where it was measured: hardware, threads.
    Raises:
        ModelError: the manifest is missing, damaged or cannot be written.
    """
    replace(load_built(engines), costs={**curve.to_dict(), **about}).save(engines)
