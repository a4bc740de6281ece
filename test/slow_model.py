"""Models for tests that are loaded in a process of their own; told what to do by environment."""

import os
import time

import numpy as np

from reasoning_planner.actions.unicycle import controls_to_path
from reasoning_planner.datatypes import Reason, Reasoning, Refusal, StageTimings, TokenOrigin
from reasoning_planner.errors import ModelError
from reasoning_planner.model_loading import AbsentModel
from reasoning_planner.planner import ModelResult


class EchoModel:
    """Says in its text what it saw; takes TEST_MODEL_MS; the route text tells it what to do."""

    name, runtime_name = "echo", "test"
    description = {"weights": "none"}

    def __init__(self):
        self.cycles = 0
        self.seen = {}

    def plan_trajectory(self, observation, deadline):
        self.cycles += 1
        text = observation.route_text
        if text == "fail":
            raise ModelError("told to fail")
        if text == "bug":
            raise ZeroDivisionError("told to have a bug")
        if text == "die":
            os._exit(3)
        time.sleep(float(os.environ.get("TEST_MODEL_MS", "0")) / 1e3)
        if text.startswith("sleep "):
            time.sleep(float(text.split()[1]))
        if text == "refuse":
            return Refusal(Reason.REASONING_UNFINISHED, "told to")
        images = [None if frame is None else frame.image for row in observation.frames
                  for frame in row]
        known = sum(image is not None and self.seen.get(id(image)) is image for image in images)
        self.seen = {id(image): image for image in images if image is not None}
        sums = [-1 if image is None else int(image.sum()) for image in images]
        acceleration = {"nan": np.nan, "limit": 50.0}.get(text, 0.0)
        path = controls_to_path(np.full(64, acceleration), np.zeros(64),
                                observation.history.speed_mps)
        reasons = (Refusal(Reason.DRAFT_FAILED, "told to"),) if text == "draft" else ()
        reasoning = Reasoning(text=f"{os.getpid()} {known} {sums}", token_ids=(1, 2, 3),
                              token_texts=("a", "b", "c"), origins=(TokenOrigin.ROUTINE,) * 3,
                              rounds=2, proposed=4, accepted=1)
        return ModelResult(path, reasoning, StageTimings(act_ms=1.0), reasons)


def load(settings, report):
    """A working model."""
    return EchoModel()


def load_absent(settings, report):
    """As load_model does with a file that is missing."""
    report("no model: as told")
    return AbsentModel("as told")


def load_and_die(settings, report):
    """As an engine that crashes while it is built."""
    os._exit(7)
