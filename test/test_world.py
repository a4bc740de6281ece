"""The synthetic world: reproducible, consistent in word and deed, and unsolvable without eyes."""

import argparse
import hashlib
import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from reasoning_planner.actions.unicycle import controls_to_path
from reasoning_planner.errors import DataError
from reasoning_planner.world import command
from reasoning_planner.world.drive import make_drive
from reasoning_planner.world.elements import FREE_ROAD, VISION_NEEDED
from reasoning_planner.world.expert import HISTORY_STEPS, drive_scene
from reasoning_planner.world.language import (
    MANOEUVRES, all_sentences, manoeuvre_of_text, sample_sentence, valid_sentences)
from reasoning_planner.world.samples import LABEL_NAMES, make_sample
from reasoning_planner.world.scene import KINDS, sample_scene

ROOT = Path(__file__).resolve().parents[1]


def digest(sample) -> str:
    """One hash over every field of a sample."""
    total = hashlib.sha256()
    for field in fields(sample):
        value = getattr(sample, field.name)
        total.update(value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode())
    return total.hexdigest()


def driven(kind, seeds):
    """(scene, drive) of several seeds of one kind."""
    for seed in seeds:
        scene = sample_scene(seed, kind)
        yield scene, drive_scene(scene)


def test_same_seed_same_bytes_in_another_process():
    code = ("import sys; sys.path.insert(0, 'test'); from test_world import digest, make_sample;"
            "print(*(digest(make_sample(s)) for s in range(3)))")
    there = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                           check=True, env={"PYTHONHASHSEED": "7", "PYTHONPATH": str(ROOT)})
    here = [digest(make_sample(seed)) for seed in range(3)]
    assert there.stdout.split() == here
    assert len(set(here)) == 3


def test_every_kind_weather_and_manoeuvre_occurs():
    scenes = [sample_scene(seed) for seed in range(600)]
    assert {scene.kind for scene in scenes} == set(KINDS)
    assert {scene.weather for scene in scenes} == {"day", "night", "rain", "fog"}
    assert {scene.category for scene in scenes} == {FREE_ROAD, VISION_NEEDED}
    stated = {manoeuvre_of_text(sample_sentence(scene)) for scene in scenes}
    assert stated == set(MANOEUVRES)


@pytest.mark.parametrize("kind", KINDS)
def test_sample_is_consistent(kind):
    sample = make_sample(11, kind)
    assert sample.images.shape == (4, 4, 64, 128, 3) and sample.images.dtype == np.uint8
    assert np.all(sample.images.reshape(4, 4, -1).std(axis=-1) > 5.0)
    assert np.any(sample.images[1, 0] != sample.images[1, 3])
    assert np.array_equal(sample.history_positions[-1], np.zeros(3))
    assert np.array_equal(sample.history_rotations[-1], np.eye(3))
    path = controls_to_path(sample.controls[:, 0], sample.controls[:, 1], sample.v0_mps)
    assert np.abs(path.positions[1:] - sample.future_positions).max() < 1e-6
    assert sample.coc in sample.valid_cocs
    assert {manoeuvre_of_text(text) for text in sample.valid_cocs} == {sample.manoeuvre}
    assert sample.labels.shape == (len(LABEL_NAMES),) and np.isfinite(sample.labels).all()


@pytest.mark.parametrize("kind", KINDS)
def test_driven_path_is_that_of_the_controls(kind):
    for scene, drive in driven(kind, range(3)):
        turn, here = drive.yaw_rad[HISTORY_STEPS], drive.positions[HISTORY_STEPS]
        moved = drive.positions[HISTORY_STEPS:] - here
        local = np.stack((np.cos(turn) * moved[:, 0] + np.sin(turn) * moved[:, 1],
                          np.cos(turn) * moved[:, 1] - np.sin(turn) * moved[:, 0]), axis=1)
        accel, curvature = drive.controls[HISTORY_STEPS:].T
        path = controls_to_path(accel, curvature, drive.speed_mps[HISTORY_STEPS])
        assert np.abs(path.positions - local).max() < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_expert_does_what_the_words_say(kind):
    for scene, drive in driven(kind, range(16)):
        speed = drive.speed_mps[HISTORY_STEPS:]
        across = drive.across_m[HISTORY_STEPS:]
        told = (scene.seed, kind, speed[0], speed[-1], across.min(), across.max())
        manoeuvre = manoeuvre_of_text(sample_sentence(scene))
        if manoeuvre == "stop":
            assert speed[-1] < 0.8, told
        elif manoeuvre == "nudge_left":
            assert across.max() > 0.3, told
        elif manoeuvre == "nudge_right":
            assert across.min() < -0.3, told
        elif manoeuvre in ("slow", "yield"):
            assert speed.min() < max(0.85 * speed[0], 0.3), told
        elif manoeuvre == "accelerate":
            assert speed[-1] > speed[0] + 1.0, told
        elif manoeuvre == "adapt_curve":
            turned = drive.yaw_rad[-1] - drive.yaw_rad[HISTORY_STEPS]
            assert abs(turned) > 0.15 and (turned > 0) == (scene.facts.side == "left"), told
        else:
            assert manoeuvre in ("keep", "follow")
            assert np.abs(speed / max(speed[0], 1.0) - speed[0] / max(speed[0], 1.0)).max() < 0.3
        if not manoeuvre.startswith("nudge") and manoeuvre != "adapt_curve":
            assert np.abs(across).max() < 0.35, told


@pytest.mark.parametrize("kind", KINDS)
def test_expert_drives_within_limits_and_hits_nothing(kind):
    for scene, drive in driven(kind, range(100, 116)):
        accel, curvature = drive.controls.T
        told = (scene.seed, kind)
        assert accel.min() >= -6.6 and accel.max() <= 2.5, told
        assert np.abs(curvature).max() <= 0.2, told
        assert (drive.speed_mps[:-1] ** 2 * np.abs(curvature)).max() < 4.0, told
        assert drive.speed_mps.min() >= 0.0, told
        history = drive.controls[:HISTORY_STEPS, 0]
        assert np.abs(history[:10]).max() < 1.2, told          # still uninformative
        for i in range(HISTORY_STEPS, len(drive.time_s)):
            t = float(drive.time_s[i])
            for agent in scene.agents:
                along = abs(agent.along(t)[0] - drive.along_m[i] - 1.4)
                beside = abs(agent.across(t)[0] - drive.across_m[i])
                assert (along > 2.4 + 0.5 * agent.length_m
                        or beside > 0.93 + 0.5 * agent.width_m), (told, t, agent)
        for signal in scene.signals:
            if signal.state != "green":
                assert drive.along_m[-1] + 3.8 < signal.s_m + 0.1, told


def test_history_does_not_tell_the_plan():
    """Among scenes of one speed and steady history, manoeuvres and end speeds differ widely."""
    near, ends = set(), []
    for seed in range(250):
        scene = sample_scene(seed)
        drive = drive_scene(scene)
        history = drive.controls[:HISTORY_STEPS, 0]
        if abs(drive.speed_mps[HISTORY_STEPS] - 10.0) < 1.5 and np.abs(history).max() < 0.9:
            near.add(manoeuvre_of_text(sample_sentence(scene)))
            ends.append(drive.speed_mps[-1])
    assert len(near) >= 6, near
    assert np.ptp(ends) > 8.0


def test_constant_velocity_fails_where_vision_is_needed():
    errors = {FREE_ROAD: [], VISION_NEEDED: []}
    for seed in range(200):
        scene = sample_scene(seed)
        drive = drive_scene(scene)
        here, yaw = drive.positions[HISTORY_STEPS], drive.yaw_rad[HISTORY_STEPS]
        reach = drive.speed_mps[HISTORY_STEPS] * 0.1 * np.arange(1, 31)[:, None]
        guess = here + reach * (np.cos(yaw), np.sin(yaw))
        truth = drive.positions[HISTORY_STEPS + 1:HISTORY_STEPS + 31]
        errors[scene.category].append(np.linalg.norm(guess - truth, axis=1).mean())
    assert np.mean(errors[FREE_ROAD]) < 0.3
    assert np.mean(errors[VISION_NEEDED]) > 1.5


def test_sentences_are_spoken_as_alpamayo_does():
    said = [sample_sentence(sample_scene(seed)) for seed in range(1181)]
    assert 0.62 < np.mean([text.endswith(".") for text in said]) < 0.74
    assert 200 <= len(set(said)) <= 480
    assert 9.0 < np.mean([len(text.split()) for text in said]) < 14.0
    assert set(said) <= set(all_sentences())
    assert not any("{" in text or "  " in text for text in all_sentences())


def test_light_colour_is_in_the_picture():
    def lamps(kind, channel):
        images = [make_sample(seed, kind).images[(1, 3), 3].astype(int) for seed in range(3)]
        others = [c for c in range(3) if c != channel]
        return np.mean([(image[..., channel] - image[..., others].max(axis=-1) > 90).sum()
                        for image in images])
    assert lamps("red_light", 0) > 5.0 * lamps("green_light", 0) + 3.0
    assert lamps("green_light", 1) > 5.0 * lamps("red_light", 1) + 3.0


def test_size_and_arguments():
    assert make_sample(0, size=(32, 64)).images.shape == (4, 4, 32, 64, 3)
    with pytest.raises(ValueError, match="multiples of 32"):
        make_sample(0, size=(60, 128))
    with pytest.raises(ValueError, match="kind"):
        make_sample(0, "submarine")


def test_preferred_wording_is_the_mode():
    scenes = [sample_scene(seed, "red_light") for seed in range(300)]
    moving = [scene for scene in scenes if scene.facts.variant == "moving"]
    said = [sample_sentence(scene) for scene in moving]
    preferred = valid_sentences("red_light", moving[0].facts)[0]
    assert max(set(said), key=said.count) == preferred


def test_drive_is_one_motion_with_its_words():
    drive = make_drive(4, 20.0)
    moments = list(drive.moments())
    assert len(moments) == 201 and len(drive.events) >= 1
    assert all(manoeuvre_of_text(moment.coc) == moment.manoeuvre for moment in moments)
    steps = np.linalg.norm(np.diff(drive.drive.positions, axis=0), axis=1)
    assert np.abs(steps - drive.drive.speed_mps[:-1] * 0.1).max() < 0.05
    odometry = drive.odometry()
    assert odometry.shape == (1001, 6)
    assert np.abs(odometry[::5, 1:3] - drive.drive.positions[:201]).max() < 1e-9
    assert len(drive.drive.controls) >= 200 + 64


def test_bag_is_complete_and_reads_back(tmp_path):
    reader = pytest.importorskip("rosbags.highlevel", reason="rosbags is not installed")
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    assert command.run(parser.parse_args(["--out", str(tmp_path), "--bag", "--duration", "2",
                                          "--seed", "4"])) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bag", "bag_truth.json"]
    truth = json.loads((tmp_path / "bag_truth.json").read_text())
    with reader.AnyReader([tmp_path / "bag"]) as bag:
        counts = {c.topic: c.msgcount for c in bag.connections}
        assert counts["/world/odometry"] == 101 and counts["/tf_static"] == 1
        assert all(counts[f"/world/camera{i}/image_raw"] == 21 for i in range(4))
        front = [c for c in bag.connections if c.topic == "/world/camera1/image_raw"]
        stamps = []
        for connection, _, raw in bag.messages(front):
            image = bag.deserialize(raw, connection.msgtype)
            assert (image.height, image.width, image.encoding) == (64, 128, "rgb8")
            stamps.append(image.header.stamp.sec * 10 ** 9 + image.header.stamp.nanosec)
    assert stamps == [frame["stamp_ns"] for frame in truth["frames"]]
    with pytest.raises(DataError, match="exists already"):
        command.run(parser.parse_args(["--out", str(tmp_path), "--bag", "--duration", "2"]))


def test_scenes_are_written_with_a_manifest(tmp_path):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    assert command.run(parser.parse_args(["--out", str(tmp_path), "--scenes", "3", "--seed", "7",
                                          "--preview"])) == 0
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    arrays = np.load(tmp_path / manifest["scenes"][2]["file"])
    sample = make_sample(9)
    assert np.array_equal(arrays["images"][2], sample.images)
    assert manifest["scenes"][2]["coc"] == sample.coc
    assert (tmp_path / "preview.png").stat().st_size > 1000
