"""The form of a diagnosis: a level, a sentence and figures. No ROS, no judgement."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Mapping, Sequence


class Level(enum.IntEnum):
    """As diagnostic_msgs/DiagnosticStatus: WARN still works, ERROR cannot go on."""

    OK = 0
    WARN = 1
    ERROR = 2
    STALE = 3


@dataclass(frozen=True)
class Diagnosis:
    """One entry of /diagnostics.

    Attributes:
        name: without the node's.
        message: what is wrong, "; " between several; "OK" when nothing is.
        values: figures as text.
    """

    name: str
    level: Level = Level.OK
    message: str = "OK"
    values: Mapping[str, str] = field(default_factory=dict)


def joined(name: str, findings: Sequence[tuple[Level, str]],
           values: Mapping[str, str] | None = None) -> Diagnosis:
    """The worst level of the findings and all their sentences."""
    wrong = [(level, text) for level, text in findings if level is not Level.OK]
    if not wrong:
        return Diagnosis(name, values=values or {})
    return Diagnosis(name, max(level for level, _ in wrong), "; ".join(text for _, text in wrong),
                     values or {})
