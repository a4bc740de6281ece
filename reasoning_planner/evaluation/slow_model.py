"""Models that take as long as they are told: to measure the node, not for driving.

`SLOW_MODEL_MS` says how long an answer takes, `SLOW_MODEL_KIND` how the time is spent: "sleep", or
"busy", counting in Python, which holds the interpreter like no real model does. Run as a module it
is planner_node with this model in place of the configured one.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any, Callable

import numpy as np

from ..actions.unicycle import controls_to_path
from ..config import ModelSettings
from ..datatypes import HORIZON_LENGTH, Deadline, Observation, Reasoning, Refusal
from ..planner import ModelResult


class SlowModel:
    """Straight on at the present speed, after a while. See planner.Model."""

    name, runtime_name = "slow", "python"

    def __init__(self, seconds: float, busy: bool):
        self._seconds, self._busy = seconds, busy

    def plan_trajectory(self, observation: Observation,
                        deadline: Deadline) -> ModelResult | Refusal:
        """See planner.Model; knows no deadline."""
        until_s = time.monotonic() + self._seconds
        while self._busy and time.monotonic() < until_s:
            sum(range(1000))
        time.sleep(max(until_s - time.monotonic(), 0.0))
        zeros = np.zeros(HORIZON_LENGTH)
        return ModelResult(controls_to_path(zeros, zeros, observation.history.speed_mps),
                           Reasoning(text="Keep straight on."))


def load(settings: ModelSettings, report: Callable[[str], Any]) -> SlowModel:
    """As the environment says."""
    return SlowModel(float(os.environ.get("SLOW_MODEL_MS", "700")) / 1e3,
                     os.environ.get("SLOW_MODEL_KIND", "sleep") == "busy")


if __name__ == "__main__":
    from reasoning_planner.evaluation import slow_model     # importable by name elsewhere too
    from reasoning_planner.node import main

    sys.exit(main(load=slow_model.load))
