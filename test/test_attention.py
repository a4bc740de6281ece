"""Where a draft looks: shares worked by hand, switches that hide a part, and the command."""

import argparse
import json
import math

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the draft is PyTorch")
pytest.importorskip("tokenizers", reason="the world's tokenizer")
pytest.importorskip("safetensors", reason="releases are safetensors")

from reasoning_planner.errors import DataError
from reasoning_planner.evaluation import attention
from reasoning_planner.models.draft import LayerKV
from reasoning_planner.models.draft_attention import RecordingAttention
from reasoning_planner.models.draft_config import DraftConfig
from reasoning_planner.models.draft_positions import PARTS, prompt_parts
from reasoning_planner.models.draft_release import save_draft
from reasoning_planner.models.kv_cache import PrefixAttention
from reasoning_planner.runtimes.draft_base import target_sha256
from reasoning_planner.training.checkpoint import load_release
from reasoning_planner.training.dataset import PromptLayout, make_shard
from reasoning_planner.training.draft_judge import with_rope
from reasoning_planner.training.draft_sequences import Sequences, all_blocks, attention_shares
from reasoning_planner.training.rollouts import RolloutStore, make_rollouts
from reasoning_planner.training.train_draft import DraftSchedule, DraftTrainer
from test_draft import a_prompt
from test_train_draft import LAYERS, SIZE, write_target
from tiny_checkpoint import tiny_config

pytestmark = pytest.mark.usefixtures("single_thread")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("attention"))


@pytest.fixture(scope="module")
def target(checkpoint):
    return load_release(checkpoint)[0].requires_grad_(False)


@pytest.fixture(scope="module")
def layout(checkpoint, target):
    return PromptLayout(load_release(checkpoint)[1], target.config)


@pytest.fixture(scope="module")
def written(target, layout):
    return make_rollouts(target, layout, make_shard(range(6), SIZE), range(6), LAYERS)


def a_draft(checkpoint, target, layout, written, **changes):
    config = DraftConfig.for_target(
        target.config.text, num_layers=2, block_length=4, feature_layers=LAYERS,
        target_sha256=target_sha256(checkpoint), **changes)
    trainer = DraftTrainer(config, target, layout.prompt(np.zeros((16, 3))), DraftSchedule(),
                           RolloutStore([written]), seed=1)
    return trainer.draft.eval(), trainer._sequences


def test_shares_worked_by_hand():
    """Scores ln 1 .. ln 4 are probabilities 0.1 .. 0.4; a query of zero sees all alike."""
    logs = torch.tensor([math.log(i) for i in (1, 2, 3, 4)], dtype=torch.float64)
    keys = logs.view(1, 1, 4, 1)
    parts = torch.tensor([PARTS.index(name) for name in ("visual", "history", "coc", "block")])
    queries = torch.tensor([[5.0, 1.0], [5.0, 0.0]], dtype=torch.float64).view(1, 2, 2, 1)
    prefix = LayerKV([(keys[:, :, :2], keys[:, :, :2])])
    recording = RecordingAttention(prefix, parts, torch.tensor([[0.0, 2.0]]))
    given = (0, queries, keys[:, :, 2:], keys[:, :, 2:])
    out = recording.attend(*given, None)
    assert torch.allclose(out, PrefixAttention(prefix).attend(*given, None))
    shares = recording.shares()[0]
    expected = torch.tensor([[0.1, 0.2, 0.0, 0.3, 0.4, 0.0], [0.25, 0.25, 0.0, 0.25, 0.25, 0.0]])
    assert PARTS == ("visual", "history", "instruction", "coc", "block", "other")
    assert torch.allclose(shares.float(), expected, atol=1e-6)
    hide = torch.tensor([-math.inf, 0.0, 0.0, 0.0], dtype=torch.float64)
    recording.attend(*given, hide)
    assert recording.shares()[0, 0, :2].tolist() == pytest.approx([0.0, 2 / 9])


def test_parts_of_a_prompt():
    config = tiny_config()
    names = [PARTS[part] for part in prompt_parts(a_prompt(config), config.tokens)]
    image = ["other", *["visual"] * config.vision.tokens_per_image, "other"]
    assert names == [*["other"] * 3, *image * 2, "other", *["history"] * 6, "other",
                     *["instruction"] * 3]


def test_recording_changes_nothing_and_shares_sum_to_one(checkpoint, target, layout, written):
    draft, sequences = a_draft(checkpoint, target, layout, written)
    blocks = next(all_blocks(written, 4))
    shares, count = sequences.attention(blocks)
    assert shares.shape == (2, target.config.text.num_heads, len(PARTS))
    assert count == int(blocks.valid.sum()) and np.abs(shares.sum(-1) - 1).max() < 1e-5
    assert (shares > 0).all()
    few, more = (sum(count for _, count in map(sequences.attention, all_blocks(written, 4)))
                 for _ in range(2))
    assert few == more > 0


@pytest.mark.parametrize("context,hidden", [("no_visual", "visual"), ("history_masked", "history"),
                                            ("last_k", "visual")])
def test_what_is_hidden_gets_nothing(checkpoint, target, layout, written, context, hidden):
    _, sequences = a_draft(checkpoint, target, layout, written, context=context, context_k=4)
    shares = attention_shares(sequences, written)
    assert (shares[..., PARTS.index(hidden)] == 0).all()
    assert np.abs(shares.sum(-1) - 1).max() < 1e-5


def test_positions_alone_move_attention(checkpoint, target, layout, written):
    draft, sequences = a_draft(checkpoint, target, layout, written)
    moved = with_rope(draft, "mrope", target)
    prompt = layout.prompt(np.zeros((16, 3)))
    same, other = (attention_shares(Sequences(one, target, prompt), written)
                   for one in (draft, moved))
    assert np.abs(same - attention_shares(sequences, written)).max() < 1e-9
    assert np.abs(same - other).max() > 1e-4


def test_the_command_compares_drafts_trained_alike(checkpoint, target, layout, written, tmp_path,
                                                   capsys):
    info = {"seed": 1, "texts": 6, "step": 0, "schedule": {"steps": 1}, "target_sha256": "x"}
    folders = []
    for name, changes in (("flat", {}), ("mrope", {"rope": "mrope"}),
                          ("blind", {"context": "no_visual"})):
        draft, _ = a_draft(checkpoint, target, layout, written, **changes)
        save_draft(draft, tmp_path / name, info)
        folders.append(str(tmp_path / name))
    parser = argparse.ArgumentParser()
    attention.add_arguments(parser)
    given = ["--checkpoint", str(checkpoint), "--scenes", "6", "--data", str(tmp_path / "data"),
             "--out", str(tmp_path / "out"), "--drafts"]
    assert attention.run(parser.parse_args([*given, *folders])) == 0
    printed = capsys.readouterr().out
    report = json.loads((tmp_path / "out" / "attention.json").read_text())
    assert [(one["rope"], one["context"]) for one in report["drafts"]] == [
        ("flat", "full"), ("mrope", "full"), ("flat", "no_visual")]
    first, second, blind = report["drafts"]
    assert first["tokens_per_pass_8"] >= 1.0 and first["passes_saved_a_text"] == 0.0
    assert blind["mean"]["visual"] == 0.0 < first["mean"]["visual"]
    assert len(first["by_layer_and_head"]) == 2 and "layer 1, head 1" in printed
    # Both began with the same weights: what moved the one moves the other.
    swapped = first["mean_of_these_weights_with_the_other_rope"]
    assert swapped == pytest.approx(second["mean"], abs=2e-5)
    assert report["prompt_tokens"]["history"] == 48
    (tmp_path / "mrope" / "training.json").write_text(json.dumps({**info, "texts": 5}))
    with pytest.raises(DataError, match="given texts 5, expected 6.*train the drafts alike"):
        attention.run(parser.parse_args([*given, *folders]))
    with pytest.raises(DataError, match="--scenes"):
        attention.run(parser.parse_args([*given, *folders, "--scenes", "0"]))
