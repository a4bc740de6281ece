"""The worst moments of a drive, gathered while it is replayed; and pictures of every moment.

Of every 2 s the worst cycle is kept with its image, so that ten bad cycles in a row are one
moment. Knows plans and images, not the page they end up on.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Mapping, Optional, Sequence

import cv2
import numpy as np

from ..errors import DataError
from .driving_log import ade_up_to
from .metrics import PathErrors
from .records import PlanRecord, line_of, record_of
from .summary import ScoredPlan, replace_text

SPACING_NS = 2_000_000_000
WORST = 10
HORIZON_S = 3.0
_KEPT = 3 * WORST               # stretches kept: neighbours may turn out to be too close
_JPEG = [cv2.IMWRITE_JPEG_QUALITY, 88]


@dataclass(frozen=True)
class Moment:
    """One cycle to show.

    Attributes:
        severity: ADE over 3 s, or over what is known of it; -1 where nothing is known.
        row: its scores.
        scored: plan, truth and baseline.
        kinematic: (N, 3) positions of the kinematic plan.
        jpeg: the anchor image, b"" without one.
    """

    severity: float
    row: Mapping[str, Any]
    scored: ScoredPlan
    kinematic: np.ndarray
    jpeg: bytes


class WorstMoments:
    """Keeps the worst cycle of every stretch, and of the stretches the worst."""

    def __init__(self) -> None:
        self._by_stretch: dict[int, Moment] = {}

    def add(self, row: Mapping[str, Any], scored: Optional[ScoredPlan], kinematic: PlanRecord,
            image: Optional[np.ndarray]) -> None:
        """A cycle that gave a plan; the image is encoded only if the cycle is kept."""
        if scored is None:
            return
        ade_m = ade_up_to(row, HORIZON_S)
        severity = ade_m if np.isfinite(ade_m) else -1.0
        stretch = int(row["stamp_ns"]) // SPACING_NS
        held = self._by_stretch.get(stretch)
        full = len(self._by_stretch) >= _KEPT and held is None
        least = min(self._by_stretch, key=lambda s: self._by_stretch[s].severity, default=None)
        if (held is not None and held.severity >= severity) or (
                full and self._by_stretch[least].severity >= severity):
            return
        if full:
            del self._by_stretch[least]
        self._by_stretch[stretch] = Moment(severity, dict(row), scored, kinematic.positions,
                                           _encoded(image))

    def chosen(self, count: int = WORST) -> list[Moment]:
        """The worst, worst first, at least `SPACING_NS` apart."""
        return spaced(sorted(self._by_stretch.values(),
                             key=lambda m: (-m.severity, m.row["stamp_ns"])), count)


def spaced(moments: Sequence[Moment], count: int) -> list[Moment]:
    """The first of the moments that are not too close to an earlier one of the same bag."""
    kept: list[Moment] = []
    for moment in moments:
        near = [other for other in kept if other.row["bag"] == moment.row["bag"] and abs(
            other.row["stamp_ns"] - moment.row["stamp_ns"]) < SPACING_NS]
        if not near and len(kept) < count:
            kept.append(moment)
    return kept


def _encoded(image: Optional[np.ndarray]) -> bytes:
    if image is None:
        return b""
    done, data = cv2.imencode(".jpg", np.ascontiguousarray(image[..., ::-1]), _JPEG)
    assert done, f"JPEG encoder refused an image of shape {image.shape}"
    return data.tobytes()


def decoded(jpeg: bytes) -> Optional[np.ndarray]:
    """(H, W, 3) uint8 RGB; None for b""."""
    if not jpeg:
        return None
    image = cv2.imdecode(np.frombuffer(jpeg, np.uint8), cv2.IMREAD_COLOR)
    return None if image is None else image[..., ::-1].copy()


# On disk: moments.json, and a JPEG for each

def write_moments(folder: Path, moments: Sequence[Moment]) -> None:
    """moments.json and moments/STAMP.jpg."""
    entries = []
    for moment in moments:
        name = f"moments/{moment.row['stamp_ns']}.jpg" if moment.jpeg else ""
        if name:
            (folder / "moments").mkdir(exist_ok=True)
            (folder / name).write_bytes(moment.jpeg)
        entries.append({
            "severity": moment.severity, "row": _plain_row(moment.row), "image": name,
            "plan": line_of(moment.scored.plan), "truth": _listed(moment.scored.truth),
            "truth_speed_mps": _listed(moment.scored.truth_speed_mps),
            "baseline": _listed(moment.scored.baseline),
            "kinematic": _listed(moment.kinematic)})
    replace_text(folder / "moments.json", json.dumps(entries, allow_nan=False) + "\n")


def read_moments(folder: Path) -> list[Moment]:
    """The inverse of `write_moments`.

    Raises:
        DataError: a file is missing or damaged.
    """
    path = folder / "moments.json"
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        return [_moment_of(folder, entry) for entry in entries]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: {error}, expected the moments of an evaluation") from error


def _plain_row(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value if not isinstance(value, float) or np.isfinite(value) else None
            for name, value in row.items()}


def _listed(values: np.ndarray) -> list[Any]:
    """Nested lists with null for NaN."""
    return [(_listed(value) if np.ndim(value) else float(value) if np.isfinite(value) else None)
            for value in values]


def _array(values: Sequence[Any]) -> np.ndarray:
    return np.array(values, dtype=np.float64)       # null becomes NaN


def _moment_of(folder: Path, entry: Mapping[str, Any]) -> Moment:
    plan = record_of(entry["plan"])
    unknown = np.full(len(plan.positions), np.nan)
    none = PathErrors(plan.time_from_start_ns, unknown, unknown, unknown, unknown)
    scored = ScoredPlan(plan, _array(entry["truth"]).reshape(-1, 3),
                        _array(entry["truth_speed_mps"]),
                        _array(entry["baseline"]).reshape(-1, 3), none, none, 0.0)
    row = {name: np.nan if value is None else value for name, value in entry["row"].items()}
    jpeg = (folder / entry["image"]).read_bytes() if entry["image"] else b""
    return Moment(entry["severity"], row, scored, _array(entry["kinematic"]).reshape(-1, 3), jpeg)
