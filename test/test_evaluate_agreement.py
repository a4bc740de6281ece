"""Text against path: the table, and the synthetic world, where both belong together."""

import numpy as np
import pytest

from reasoning_planner.actions.unicycle import controls_to_path
from reasoning_planner.evaluation.agreement import (PathManoeuvre, agrees, manoeuvre_said,
                                                    path_manoeuvre)
from reasoning_planner.world.expert import HISTORY_STEPS, drive_scene
from reasoning_planner.world.language import MANOEUVRES, manoeuvre_of
from reasoning_planner.world.scene import sample_scene


def path(acceleration=0.0, curvature=0.0, speed=10.0, driven=0.0):
    """What the path of these controls does."""
    acceleration, curvature = (np.broadcast_to(v, 64).astype(float)
                               for v in (acceleration, curvature))
    made = controls_to_path(acceleration, curvature, speed)
    return path_manoeuvre(made.speed_mps, made.curvature_1pm, made.yaw_rad, driven)


def test_speeds():
    assert path().speed == "holds"
    assert path(-1.0).speed == "slows" and path(0.5).speed == "speeds up"
    assert path(speed=0.0).speed == "stands"
    braking = np.where(np.arange(64) < 40, -2.5, 0.0)
    assert path(braking).speed == "stops"
    dip = np.where(np.arange(64) < 20, -2.0, 2.0)
    assert path(dip).speed == "slows", "speeding up again does not undo it"


def test_swerves_are_what_leaves_the_curve_being_driven():
    assert path(curvature=0.02, driven=0.02) == PathManoeuvre("holds", "", True)
    nudge = np.zeros(64)
    nudge[5:15], nudge[15:35], nudge[35:45] = 0.01, -0.01, 0.01
    assert path(curvature=nudge).swerve == "left"
    assert path(curvature=0.02 - nudge, driven=0.02).swerve == "right"
    jitter = 0.001 * (-1.0) ** np.arange(64)
    assert path(curvature=jitter).swerve == ""
    assert not path(curvature=jitter).bends


@pytest.mark.parametrize("text, word", [
    ("Keep lane since the road ahead is clear", "keep"), ("keep distance to the lead", "follow"),
    ("Nudge to the left to increase clearance", "nudge_left"), ("Yield.", "yield"),
    ("Sing", None), ("", None)])
def test_the_word_is_in_the_opening(text, word):
    assert manoeuvre_said(text) == word


def test_what_a_word_allows():
    assert agrees("stop", PathManoeuvre("slows", "", False))
    assert not agrees("stop", PathManoeuvre("holds", "", False))
    assert not agrees("keep", PathManoeuvre("stops", "", False))
    assert not agrees("nudge_left", PathManoeuvre("holds", "right", False))
    assert not agrees("adapt_curve", PathManoeuvre("holds", "left", False))
    assert agrees("adapt_curve", PathManoeuvre("holds", "left", True))
    assert agrees(None, PathManoeuvre("holds", "", False)) is None
    assert all(agrees(word, PathManoeuvre("holds", "", False)) is not None for word in MANOEUVRES)


def test_text_and_path_of_a_scene_agree_and_those_of_two_scenes_do_not():
    cases = []
    for seed in range(250):
        scene = sample_scene(seed)
        drive = drive_scene(scene)
        controls = drive.controls[HISTORY_STEPS:]
        done = path(controls[:, 0], controls[:, 1], float(drive.speed_mps[HISTORY_STEPS]),
                    drive.controls[HISTORY_STEPS - 1, 1])
        cases.append((manoeuvre_of(scene.kind, scene.facts), done))
    own = np.mean([agrees(said, done) for said, done in cases])
    order = np.random.default_rng(0).permutation(len(cases))
    others = np.mean([agrees(cases[i][0], cases[j][1]) for i, j in enumerate(order)])
    assert own > 0.94 and others < 0.65, (own, others)
