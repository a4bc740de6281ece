"""Results as driving_log_replayer_v2 writes them: JSON lines, the last of which is the verdict.

The first line is the condition, then one line a planning cycle with Result, Stamp and Frame
(tier4.github.io/driving_log_replayer_v2/result_format). A cycle passes when its plan's ADE at 3 s,
or at the furthest horizon below that the odometry still covers, is within the bound; a cycle
without a plan fails; one without truth, and those before the first plan, are not judged. `System`
is the bag's log time: the wall clock would differ from run to run.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Mapping, Optional

import numpy as np

from ..conversions import stamp_fields
from ..perception.frames import quaternion_from_matrix
from .metrics import HORIZONS_S
from .records import PlanRecord
from .summary import replace_text

NAME = "planned_trajectory"
HORIZON_S = 3.0


@dataclass(frozen=True)
class Condition:
    """When a bag passes: `pass_rate` percent of its judged cycles have an ADE up to `ade_m`."""

    ade_m: float = 3.0
    pass_rate: float = 95.0


class DrivingLog:
    """Gathers the lines of one bag."""

    def __init__(self, condition: Condition):
        self._condition = condition
        self._passed = self._judged = 0
        self._begun = False
        self._lines = [{"Condition": {NAME: {
            "ADE": {"max_m": condition.ade_m, "horizon_s": HORIZON_S},
            "PassRate": condition.pass_rate}}}]

    @property
    def success(self) -> bool:
        """The verdict so far: False while nothing was judged."""
        return self._judged > 0 and self._rate >= self._condition.pass_rate

    @property
    def _rate(self) -> float:
        return 100.0 * self._passed / self._judged if self._judged else 0.0

    def add(self, row: Mapping[str, Any], plan: Optional[PlanRecord],
            base_frame: str) -> None:
        """One planning cycle: its row, and its plan where there is one."""
        ade_m = ade_up_to(row, HORIZON_S)
        self._begun |= plan is not None
        judged = self._begun if plan is None else bool(np.isfinite(ade_m))
        passed = judged and plan is not None and ade_m <= self._condition.ade_m
        self._judged += int(judged)
        self._passed += int(passed)
        verdict = "Success" if passed else "Fail" if judged else "Skipped"
        self._lines.append({
            "Result": {"Success": self.success, "Summary": self._summary()},
            "Stamp": {"System": int(row["arrival_ns"]) * 1e-9, "ROS": int(row["stamp_ns"]) * 1e-9},
            "Frame": {"Ego": {} if plan is None else {
                "TransformStamped": _transform(plan, base_frame)},
                NAME: {"Result": {"Total": "Success" if self.success else "Fail",
                                  "Frame": verdict},
                       "Info": _info(row, ade_m)}}})

    def _summary(self) -> str:
        state = "Passed" if self.success else "Failed"
        return (f"{state}: {NAME} ({state}): {self._passed} / {self._judged} -> "
                f"{self._rate:.2f}%")

    def write(self, path: Path) -> None:
        """The file, in one step."""
        replace_text(path, "".join(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n"
                                   for line in self._lines))


def ade_up_to(row: Mapping[str, Any], horizon_s: float) -> float:
    """ADE at a horizon, or at the furthest shorter one that is known; NaN for none."""
    known = [row[f"ade_m@{h:g}"] for h in HORIZONS_S
             if h <= horizon_s and np.isfinite(row[f"ade_m@{h:g}"])]
    return float(known[-1]) if known else float("nan")


def _info(row: Mapping[str, Any], ade_m: float) -> dict[str, Any]:
    return {"status": row["status"], "planner": row["planner"], "reasons": row["reasons"],
            "text": row["text"], "ade_m": ade_m if np.isfinite(ade_m) else None}


def _transform(plan: PlanRecord, base_frame: str) -> dict[str, Any]:
    translation = dict(zip("xyz", map(float, plan.map_from_base[:3, 3])))
    rotation = dict(zip("xyzw", map(float, quaternion_from_matrix(plan.map_from_base[:3, :3]))))
    return {"header": {"stamp": stamp_fields(plan.stamp_ns), "frame_id": plan.frame_id},
            "child_frame_id": base_frame,
            "transform": {"translation": translation, "rotation": rotation}}
