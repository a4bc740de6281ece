"""The model behind the planner: prompts, cached frames, greedy reasoning and its ends."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from reasoning_planner import vla
from reasoning_planner.config import PlannerConfig
from reasoning_planner.datatypes import (STEP_NS, CameraFrame, Deadline, EgoHistory,
                                         Observation, PlanStatus, Reason, Refusal, TokenOrigin)
from reasoning_planner.errors import ConfigError, DataError, ModelError
from reasoning_planner.perception.images import resize_for_model
from reasoning_planner.planner import ModelResult, Planner
from reasoning_planner.runtimes.base import Step
from reasoning_planner.runtimes.factory import create_runtime
from reasoning_planner.speculative.token_tree import chain
from reasoning_planner.tokenization.prompt import build_prompt
from reasoning_planner.tokenization.text_tokenizer import train_text_tokenizer
from reasoning_planner.tokenization.trajectory_tokenizer import (
    DeltaTrajectoryTokenizer)
from tiny_checkpoint import WORDS, tiny_tokenizer

ROOT = Path(__file__).resolve().parent.parent
T0 = 5_000_000_000
TOKENIZER = tiny_tokenizer()
STOP = TOKENIZER.special.traj_future_start
COT_END = TOKENIZER.special.cot_end


@pytest.fixture(scope="module")
def checkpoint(exported_checkpoint):
    return exported_checkpoint


@pytest.fixture(scope="module")
def ort(checkpoint):
    return create_runtime("ort", checkpoint, threads=1)


class Scripted:
    """A runtime whose images and action expert are real, and whose words are given."""

    name = "scripted"

    def __init__(self, runtime, words=(), controls=None):
        self.config = runtime.config
        self._runtime, self._words, self._controls = runtime, list(words), controls
        self.images, self.prompts, self.extended, self.acted = [], [], [], []

    @property
    def capacity(self):
        return self._runtime.capacity

    @property
    def length(self):
        return self._runtime.length

    def _step(self, rows=1):
        """What the script has behind each of the last `rows` tokens."""
        known = len(self.extended)
        token_ids = np.array([self._words[min(place, len(self._words) - 1)]
                              for place in range(known - rows + 1, known + 1)])
        return Step(token_ids, token_ids[:, None], np.zeros((rows, 1), np.float32), ())

    def encode_images(self, images):
        self.images.append(images.copy())
        return self._runtime.encode_images(images)

    def prefill(self, input_ids, features, *, logits=False):
        self.prompts.append(input_ids)
        self.features = features
        self.extended = []
        self._runtime.prefill(input_ids, features)
        return self._step()

    def extend(self, token_ids, *, indices=None, visible=None, logits=False):
        self.extended.extend(int(i) for i in token_ids)
        self._runtime.extend(token_ids)
        return self._step(len(token_ids))

    def crop(self, length):
        self._runtime.crop(length)
        del self.extended[length - len(self.prompts[-1]):]

    def act(self, noise, num_steps=None):
        self.acted.append((noise.copy(), self._runtime.length))
        controls = self._runtime.act(noise, num_steps)
        return 0.01 * controls if self._controls is None else self._controls


def frame(slot, stamp_ns, size=(64, 128)):
    generator = np.random.default_rng((slot, stamp_ns))
    return CameraFrame(slot, stamp_ns, generator.integers(0, 256, (*size, 3), dtype=np.uint8))


def observation(t0_ns=T0, cameras=4, frames=None, speed=10.0, **changes):
    positions = np.zeros((16, 3))
    positions[:, 0] = speed * 0.1 * np.arange(-15, 1)
    history = EgoHistory(t0_ns, positions, np.tile(np.eye(3), (16, 1, 1)), np.eye(4), speed, 0.0)
    if frames is None:
        frames = tuple(tuple(frame(slot, t0_ns + k * STEP_NS) for k in range(-3, 1))
                       for slot in range(cameras))
    return dataclasses.replace(
        Observation(stamp_ns=t0_ns, frame_id="map", history=history, frames=frames), **changes)


def words(text):
    return [*TOKENIZER.encode(text), COT_END, STOP]


def model(ort, text=WORDS[0], config=vla.VlaConfig(), **scripted):
    runtime = Scripted(ort, words(text), **scripted)
    return vla.VlaModel(runtime, TOKENIZER, config), runtime


def plan(asked, seen=None, deadline=None):
    return asked.plan_trajectory(seen or observation(), deadline or Deadline.never())


# The cycle

def test_the_reasoning_is_what_the_model_wrote(ort):
    asked, runtime = model(ort)
    result = plan(asked)
    assert isinstance(result, ModelResult) and result.reasons == ()
    reasoning = result.reasoning
    assert reasoning.text == WORDS[0]
    assert reasoning.token_ids == tuple(words(WORDS[0]))
    assert "".join(reasoning.token_texts) == WORDS[0] + "<|cot_end|><|traj_future_start|>"
    assert set(reasoning.origins) == {TokenOrigin.DELIBERATIVE}
    assert len(reasoning.origins) == len(reasoning.token_ids)
    assert reasoning.tokens_per_target_pass == 1.0
    assert min(result.timings.encode_ms, result.timings.prefill_ms, result.timings.reason_ms,
               result.timings.act_ms) > 0.0


def test_the_expert_acts_behind_the_stop_token(ort):
    asked, runtime = model(ort)
    plan(asked)
    assert runtime.extended == words(WORDS[0])
    noise, length = runtime.acted[0]
    assert length == len(runtime.prompts[0]) + len(words(WORDS[0]))
    assert noise.shape == (64, 2) and abs(noise.std() - 1.0) < 0.2


def test_the_trajectory_starts_at_the_speed_of_the_history(ort):
    trajectory = plan(model(ort)[0], observation(speed=8.0)).trajectory
    assert trajectory.speed_mps[0] == pytest.approx(8.0, abs=0.01)
    assert trajectory.positions[10, 0] == pytest.approx(8.0, abs=0.2)


def test_the_prompt_is_that_of_alpamayo_1(ort):
    asked, runtime = model(ort)
    seen = observation(route_text="Turn right in 30m")      # to which version 1 is deaf
    plan(asked, seen)
    history = DeltaTrajectoryTokenizer(TOKENIZER.special).encode(seen.history.positions)
    grids = np.tile([1, *ort.config.vision.grid], (16, 1))
    assert np.array_equal(runtime.prompts[0],
                          build_prompt(TOKENIZER, history, grids, "alpamayo-r1").input_ids)
    newer, runtime = model(ort, config=vla.VlaConfig(prompt_version="alpamayo-1.5"))
    plan(newer, seen)
    assert np.array_equal(runtime.prompts[0], build_prompt(
        TOKENIZER, history, grids, "alpamayo-1.5", route_text="Turn right in 30m").input_ids)


def test_the_same_observation_gives_the_same_plan(ort):
    asked, runtime = model(ort)
    results = [plan(asked), plan(asked), plan(model(ort)[0])]
    for result in results[1:]:
        assert np.array_equal(result.trajectory.positions, results[0].trajectory.positions)
        assert result.reasoning == results[0].reasoning
    plan(asked, observation(T0 + STEP_NS))
    seeded, other = model(ort, config=vla.VlaConfig(noise_seed=1))
    plan(seeded)
    noise = [runtime.acted[0][0], runtime.acted[-1][0], other.acted[0][0]]
    assert not any(np.array_equal(noise[i], noise[j]) for i, j in ((0, 1), (0, 2), (1, 2)))


def test_both_runtimes_plan_alike(checkpoint):
    torch.set_num_threads(1)
    config = vla.VlaConfig(max_new_tokens=12, expert_steps=4)
    answers = [plan(vla.VlaModel.load(checkpoint, config, runtime=name, threads=1))
               for name in ("ort", "torch")]
    assert answers[0].reasoning == answers[1].reasoning
    assert len(answers[0].reasoning.token_ids) == 12
    assert np.abs(answers[0].trajectory.positions
                  - answers[1].trajectory.positions).max() < 1e-3


def test_the_planner_follows_it(ort):
    answer = Planner(PlannerConfig(), model(ort)[0]).plan(observation(), Deadline.never())
    assert answer.status is PlanStatus.OK and answer.planner == "tiny"
    assert answer.reasoning.text == WORDS[0]


# Drafts

class Draft:
    """A proposer with one chain for every round."""

    name, origin = "script", TokenOrigin.CORPUS

    def __init__(self, token_ids, error=None):
        self.token_ids, self.error = token_ids, error

    def reset(self, prompt):
        self.written = 0

    def propose(self, context):
        if self.error:
            raise self.error
        return chain(self.token_ids(self.written), self.origin)

    def observe(self, commit):
        self.written += len(commit.token_ids)


@pytest.mark.parametrize("drafted", [
    lambda written: words(WORDS[0])[written:written + 4],           # what the target will say
    lambda written: [*words(WORDS[0])[written:written + 2], 7, 7],  # half of it
    lambda written: [7, 7, 7]], ids=["right", "half", "useless"])
def test_a_draft_changes_neither_text_nor_path(ort, drafted):
    alone = plan(model(ort)[0])
    runtime = Scripted(ort, words(WORDS[0]))
    result = plan(vla.VlaModel(runtime, TOKENIZER, proposer=Draft(drafted)))
    assert result.reasoning.token_ids == alone.reasoning.token_ids and result.reasons == ()
    assert runtime.extended == words(WORDS[0])      # true keys alone: no rejected draft's
    assert np.abs(result.trajectory.positions - alone.trajectory.positions).max() < 1e-3
    count = len(words(WORDS[0]))
    accepted = result.reasoning.origins.count(TokenOrigin.CORPUS)
    assert result.reasoning.accepted == accepted
    assert (accepted > 0) == (result.reasoning.rounds < count)


def test_a_draft_that_fails_is_said_and_costs_nothing_but_time(ort):
    draft = Draft(None, DataError("draft logits are not finite"))
    result = plan(vla.VlaModel(Scripted(ort, words(WORDS[0])), TOKENIZER, proposer=draft))
    assert result.reasoning.token_ids == tuple(words(WORDS[0]))
    assert result.reasons == (
        Refusal(Reason.DRAFT_FAILED, "script: draft logits are not finite"),)


# What goes wrong

def test_a_text_without_end_is_ended_and_said_so(ort):
    asked, runtime = model(ort, config=vla.VlaConfig(max_new_tokens=3))
    result = plan(asked)
    assert result.reasons == (Refusal(Reason.REASONING_UNFINISHED, "no end within 3 tokens"),)
    assert len(result.reasoning.token_ids) == 3 and STOP not in result.reasoning.token_ids
    assert runtime.extended == [*words(WORDS[0])[:3], STOP]
    answer = Planner(PlannerConfig(), asked).plan(observation(), Deadline.never())
    assert answer.status is PlanStatus.DEGRADED


class DeadlineAfter:
    """Passes after so many questions."""

    def __init__(self, count):
        self.count, self.remaining_s = count, 1.0

    @property
    def passed(self):
        self.count -= 1
        return self.count < 0


@pytest.mark.parametrize("count, reason, detail", [
    (0, Reason.DEADLINE_MISSED, "no time left to read the prompt"),
    (1, Reason.REASONING_UNFINISHED, "no end within 1 tokens, the last before the deadline"),
    (3, Reason.REASONING_UNFINISHED, "no end within 3 tokens, the last before the deadline"),
    (len(words(WORDS[0])), Reason.DEADLINE_MISSED, "no time left to act")])
def test_a_deadline_ends_the_cycle(ort, count, reason, detail):
    asked, runtime = model(ort)
    assert plan(asked, deadline=DeadlineAfter(count)) == Refusal(reason, detail)
    assert runtime.acted == []


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_plan_that_is_not_finite_is_refused(ort, value):
    controls = np.zeros((64, 2), np.float32)
    controls[3, 1] = value
    asked, _ = model(ort, controls=controls)
    assert plan(asked) == Refusal(Reason.PLAN_NAN, "1 of 128 controls are not finite")
    answer = Planner(PlannerConfig(), asked).plan(observation(), Deadline.never())
    assert answer.status is PlanStatus.STOP and answer.reasons[0].reason is Reason.PLAN_NAN


def test_a_foreign_tokenizer_is_refused(ort):
    other = train_text_tokenizer(WORDS, 320)
    with pytest.raises(ModelError, match="tokenizer"):
        vla.VlaModel(ort, other)


def test_too_few_cameras_are_a_matter_of_configuration(ort):
    asked, _ = model(ort)
    with pytest.raises(ModelError, match="camera_slots"):
        plan(asked, observation(cameras=1))
    single, runtime = model(ort, config=vla.VlaConfig(camera_slots=(-1, 0, -1, -1)))
    assert isinstance(plan(single, observation(cameras=1)), ModelResult)
    assert (runtime.features[[0, 8, 12]] == single.features._black).all()
    assert not (runtime.features[4] == single.features._black).all()


@pytest.mark.parametrize("change", [
    {"prompt_version": "alpamayo-3"}, {"camera_slots": (0, 1)}, {"camera_slots": (0, 0, 1, 2)},
    {"camera_slots": (-1, -1, -1, -1)}, {"camera_slots": (0, 1, 2, -2)}, {"max_new_tokens": 0},
    {"expert_steps": -1}, {"noise_seed": -1}])
def test_configuration_is_checked(change):
    with pytest.raises(ConfigError, match=f"{next(iter(change))}: given"):
        vla.VlaConfig(**change)


# Frames

def test_only_new_frames_are_encoded(ort):
    asked, runtime = model(ort)
    plan(asked)
    assert [len(images) for images in runtime.images] == [1, 16]        # black, then all
    plan(asked, observation(T0 + STEP_NS))
    assert [len(images) for images in runtime.images[2:]] == [4]
    plan(asked, observation(T0 + STEP_NS))
    assert len(runtime.images) == 3 and asked.features.encoded == 20


def test_cached_features_are_exactly_the_fresh_ones(ort):
    asked, runtime = model(ort)
    plan(asked)
    plan(asked, observation(T0 + STEP_NS))
    fresh, other = model(ort)
    plan(fresh, observation(T0 + STEP_NS))
    assert np.array_equal(runtime.features, other.features)


def test_old_stamps_with_new_pixels_are_encoded(ort):
    asked, runtime = model(ort)
    plan(asked)
    seen = observation()
    other = dataclasses.replace(seen.frames[1][3], image=255 - seen.frames[1][3].image)
    frames = [list(row) for row in seen.frames]
    frames[1][3] = other
    plan(asked, dataclasses.replace(seen, frames=tuple(map(tuple, frames))))
    assert len(runtime.images[-1]) == 1
    assert np.array_equal(runtime.images[-1][0], other.image)


def test_frames_are_forgotten(ort):
    asked, _ = model(ort)
    for t0_ns in (T0, T0 + 10**10, T0):
        plan(asked, observation(t0_ns))
        assert len(asked.features._kept) == 16
    assert asked.features.encoded == 48


def test_a_missing_frame_is_black(ort):
    asked, runtime = model(ort)
    seen = observation()
    frames = (seen.frames[0], (None, *seen.frames[1][1:]), seen.frames[2], (None,) * 4)
    plan(asked, dataclasses.replace(seen, frames=frames))
    assert not runtime.images[0].any()
    black = ort.encode_images(np.zeros((1, 64, 128, 3), np.uint8))[0]
    assert [bool((f == black).all()) for f in runtime.features] == (
        [False] * 4 + [True] + [False] * 7 + [True] * 4)


def test_large_images_are_resized(ort):
    asked, runtime = model(ort)
    frames = tuple(tuple(frame(slot, T0 + k * STEP_NS, (128, 256)) for k in range(-3, 1))
                   for slot in range(4))
    plan(asked, observation(frames=frames))
    assert np.array_equal(runtime.images[1][5], resize_for_model(frames[1][1].image, 64, 128))


# Without torch

WITHOUT_TORCH = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "onnx", "onnxscript", "safetensors"):
            raise ImportError(name + " is not installed", name=name)

sys.meta_path.insert(0, Refuse())
import numpy as np
from reasoning_planner.config import PlannerConfig
from reasoning_planner.datatypes import CameraFrame, Deadline, EgoHistory, Observation
from reasoning_planner.errors import MissingDependencyError
from reasoning_planner.planner import Planner
from reasoning_planner.vla import VlaConfig, VlaModel

positions = np.zeros((16, 3))
positions[:, 0] = np.arange(-15, 1)
history = EgoHistory(10**9, positions, np.tile(np.eye(3), (16, 1, 1)), np.eye(4), 10.0, 0.0)
image = np.zeros((64, 128, 3), np.uint8)
frames = tuple(tuple(CameraFrame(s, 10**9 - k * 10**8, image) for k in (3, 2, 1, 0))
               for s in range(4))
model = VlaModel.load(sys.argv[1], VlaConfig(max_new_tokens=4, expert_steps=2), threads=1)
result = model.plan_trajectory(Observation(10**9, "map", history, frames), Deadline.never())
print(len(result.reasoning.token_ids), np.isfinite(result.trajectory.positions).all())
try:
    VlaModel.load(sys.argv[1], runtime="torch")
except MissingDependencyError as error:
    print(error)
"""


def test_planning_needs_no_torch(checkpoint):
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, str(checkpoint)], cwd=ROOT,
                          capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "4 True",
        "runtime torch: torch is not installed: pip install 'reasoning_planner[train]'"]
