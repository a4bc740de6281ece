"""Whether a plan's path does what its text says.

The text's manoeuvre is told by its opening words; the path's own by its speeds and by where it
leaves the curve that was being driven. Every manoeuvre word allows some of what a path can do:
"stop" allows one that slows down, for the stop may lie beyond the 6.4 s, "keep lane" forbids one
that stops. Table and thresholds are ours. On 1500 drives of the synthetic world, where text and
path belong together, 96 % agree; with paths of other scenes 46 % (test_agreement.py keeps both).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import numpy as np

from ..world.language import manoeuvre_of_text

STANDING_MPS = 0.5
CHANGE_MPS, CHANGE_SHARE = 0.4, 0.04        # a change of speed counts beyond the larger of both
SWERVE_MPS2 = 0.15                          # lateral acceleration, beyond that of the curve
SWERVE_STEPS = 3                            # its mean over so many steps counts
BEND_RAD = np.radians(4.0)                  # a change of heading that counts

_ANY_MOVING = frozenset({"holds", "slows", "speeds up"})
_LESS = frozenset({"slows", "stops", "stands"})
# Word -> how the speed may go.
SPEEDS = {"keep": _ANY_MOVING, "follow": _ANY_MOVING, "slow": _LESS, "stop": _LESS, "yield": _LESS,
          "accelerate": frozenset({"speeds up"}), "adapt_curve": _ANY_MOVING,
          "nudge_left": _ANY_MOVING, "nudge_right": _ANY_MOVING}
# Word -> where it must swerve to; the others may go anywhere.
SWERVES = {"nudge_left": "left", "nudge_right": "right"}


@dataclass(frozen=True)
class PathManoeuvre:
    """What a path does.

    Attributes:
        speed: "stands", "stops", "slows", "holds" or "speeds up".
        swerve: "left" or "right" where it first leaves the curve driven at t0; "" where it stays.
        bends: its heading changes.
    """

    speed: str
    swerve: str
    bends: bool

    def __str__(self) -> str:
        words = [self.speed, f"swerves {self.swerve}" if self.swerve else "",
                 "bends" if self.bends else ""]
        return ", ".join(word for word in words if word)


def path_manoeuvre(speed_mps: np.ndarray, curvature_1pm: np.ndarray, yaw_rad: np.ndarray,
                   driven_curvature_1pm: float) -> PathManoeuvre:
    """What a path does.

    Args:
        speed_mps, curvature_1pm, yaw_rad: (N,) of the path.
        driven_curvature_1pm: of the way behind, at t0.
    """
    beyond = (curvature_1pm - driven_curvature_1pm) * speed_mps ** 2
    beyond = np.convolve(beyond, np.full(SWERVE_STEPS, 1.0 / SWERVE_STEPS), mode="valid")
    found = np.flatnonzero(np.abs(beyond) > SWERVE_MPS2)
    swerve = "" if len(found) == 0 else "left" if beyond[found[0]] > 0.0 else "right"
    turned = np.abs(np.unwrap(yaw_rad) - yaw_rad[0]).max()
    return PathManoeuvre(_speed_change(speed_mps), swerve, bool(turned > BEND_RAD))


def _speed_change(speed_mps: np.ndarray) -> str:
    """The first change of speed that counts; a later one the other way does not undo it."""
    first = float(speed_mps[0])
    counts = max(CHANGE_MPS, CHANGE_SHARE * first)
    if speed_mps.max() < STANDING_MPS:
        return "stands"
    falls, rises = (np.flatnonzero(change > counts) for change in
                    (first - speed_mps, speed_mps - first))
    if len(falls) and (not len(rises) or falls[0] < rises[0]):
        return "stops" if speed_mps.min() < STANDING_MPS else "slows"
    return "speeds up" if len(rises) else "holds"


def manoeuvre_said(text: str) -> Optional[str]:
    """The manoeuvre word of a text; None for an empty text and for an unknown opening."""
    return manoeuvre_of_text(text) if text else None


def agrees(said: Optional[str], done: PathManoeuvre) -> Optional[bool]:
    """Whether the path does what the word says; None where no known manoeuvre is said."""
    if said not in SPEEDS:
        return None
    if said == "adapt_curve" and not (done.bends or done.speed == "slows"):
        return False
    return done.speed in SPEEDS[said] and SWERVES.get(said, done.swerve) == done.swerve
