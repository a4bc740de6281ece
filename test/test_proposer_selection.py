"""What drafts nano's reasoning, by the setting's word; the text and plan stay the target's own."""

import shutil

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="a draft is made with PyTorch")
pytest.importorskip("onnx", reason="its graph is written with onnx")
pytest.importorskip("onnxruntime", reason="runs the graphs")

from reasoning_planner.config import PROPOSERS
from reasoning_planner.datatypes import (STEP_NS, CameraFrame, Deadline, EgoHistory, Observation,
                                         TokenOrigin)
from reasoning_planner.errors import ConfigError, ModelError
from reasoning_planner.export.draft_graph import export_draft
from reasoning_planner.models.draft import Draft
from reasoning_planner.models.draft_config import DraftConfig
from reasoning_planner.models.draft_release import save_draft
from reasoning_planner.runtimes.draft_base import target_sha256
from reasoning_planner.runtimes.torch_runtime import load_target
from reasoning_planner.speculative.selection import CORPUS_NAME, DRAFT_FOLDER, select
from reasoning_planner.vla import VlaConfig, VlaModel, checkpoint_directory
from reasoning_planner.world.samples import make_sample

NANO = checkpoint_directory("nano")
T0 = 5_000_000_000
HELD_OUT_SEED = 10_710_000


def copied(folder, *left_out):
    """nano anew, so that files can be added beside it or be missing."""
    shutil.copytree(NANO, folder, ignore=shutil.ignore_patterns(*left_out))
    return folder


@pytest.fixture(scope="module")
def with_draft(tmp_path_factory):
    """nano with a draft that was never trained: useless, so every guess of it is refused."""
    checkpoint = copied(tmp_path_factory.mktemp("nano") / "nano", DRAFT_FOLDER)
    target = load_target(checkpoint)
    draft = Draft(DraftConfig.for_target(
        target.config.text, block_length=6,
        target_sha256=target_sha256(checkpoint)), target)
    draft.initialise(1)
    save_draft(draft, checkpoint / DRAFT_FOLDER, {})
    export_draft(checkpoint / DRAFT_FOLDER, checkpoint)
    return checkpoint


def observation(seed, t0_ns=T0):
    sample = make_sample(seed)
    frames = tuple(tuple(CameraFrame(slot, t0_ns + (moment - 3) * STEP_NS, image)
                         for moment, image in enumerate(images))
                   for slot, images in enumerate(sample.images))
    history = EgoHistory(t0_ns, sample.history_positions, np.tile(np.eye(3), (16, 1, 1)),
                         np.eye(4), sample.v0_mps, 0.0)
    return Observation(stamp_ns=t0_ns, frame_id="map", history=history, frames=frames)


@pytest.fixture(scope="module")
def seen():
    """Two scenes, each twice, a cycle apart: the second has a previous text."""
    return [observation(HELD_OUT_SEED + scene, T0 + (2 * scene + again) * STEP_NS)
            for scene in range(2) for again in range(2)]


def plans(checkpoint, seen, **changes):
    model = VlaModel.load(checkpoint, VlaConfig(**changes), threads=1)
    return [model.plan_trajectory(one, Deadline.never()) for one in seen]


@pytest.fixture(scope="module")
def alone(with_draft, seen):
    return plans(with_draft, seen, proposer="none")


@pytest.mark.parametrize("choice", [name for name in PROPOSERS if name != "none"])
def test_every_choice_leaves_text_and_plan_as_they_are(with_draft, seen, alone, choice):
    drafted = plans(with_draft, seen, proposer=choice)
    for one, other in zip(drafted, alone):
        assert one.reasons == ()
        assert one.reasoning.token_ids == other.reasoning.token_ids
        assert np.abs(one.trajectory.positions - other.trajectory.positions).max() < 1e-3
    # All but the useless draft save passes where there is a text before.
    again, plain = drafted[1].reasoning, alone[1].reasoning
    assert again.proposed > 0 and plain.proposed == 0
    assert (again.rounds < plain.rounds) == (choice != "flat_rope")
    origins = {"corpus": {TokenOrigin.CORPUS}, "temporal": {TokenOrigin.TEMPORAL}}.get(
        choice, {TokenOrigin.CORPUS, TokenOrigin.TEMPORAL})
    assert origins & set(again.origins) or choice == "flat_rope"


def test_shorter_drafts_take_more_passes(with_draft, seen):
    short, long = (plans(with_draft, seen[:1], proposer="corpus", num_speculative_tokens=count)
                   for count in (2, 15))
    assert short[0].reasoning.token_ids == long[0].reasoning.token_ids
    assert short[0].reasoning.rounds > long[0].reasoning.rounds


def test_a_sampled_text_is_repeatable_and_follows_the_seed(with_draft, seen):
    texts = [[plan.reasoning.token_ids for plan in plans(
        with_draft, seen, temperature=2.0, top_p=1.0, noise_seed=seed)] for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]


def test_auto_takes_what_the_checkpoint_has(tmp_path, with_draft):
    assert select("auto", NANO).names == ("corpus", "temporal")
    assert select("auto", NANO).hidden_layers == ()
    assert select("none", NANO).names == ()
    bare = copied(tmp_path / "bare", CORPUS_NAME, DRAFT_FOLDER)
    assert select("auto", bare).names == ("temporal",)
    assert select("merged", with_draft).names == ("corpus", "flat_rope", "temporal")
    assert select("merged", with_draft).hidden_layers == (8, 10, 11)
    shutil.copytree(with_draft / DRAFT_FOLDER, bare / DRAFT_FOLDER)
    assert select("auto", bare).names == ("flat_rope", "temporal")


@pytest.mark.parametrize("choice, told", [("corpus", "corpus.npz"), ("flat_rope", "draft")])
def test_a_choice_without_its_file_is_one_line(tmp_path, choice, told):
    bare = copied(tmp_path / "bare", CORPUS_NAME, DRAFT_FOLDER)
    with pytest.raises(ModelError, match=rf"proposer {choice}: .*{told}"):
        VlaModel.load(bare, VlaConfig(proposer=choice))


@pytest.mark.parametrize("change, told", [
    ({"proposer": "eagle"}, "proposer"), ({"temperature": 0.001}, "temperature"),
    ({"top_p": 0.0}, "top_p"), ({"num_speculative_tokens": 0}, "num_speculative_tokens")])
def test_bad_settings_are_told(change, told):
    with pytest.raises(ConfigError, match=told):
        VlaConfig(**change)
