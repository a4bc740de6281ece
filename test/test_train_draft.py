"""Training the draft: rollouts, blocks, the loss, resuming and release, on a tiny target."""

import argparse
import dataclasses
import json
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="training is PyTorch")
pytest.importorskip("tokenizers", reason="the world's tokenizer")
pytest.importorskip("safetensors", reason="releases are safetensors")
pytest.importorskip("onnxruntime", reason="the command writes a graph for it")
pytest.importorskip("onnx", reason="graphs are written with onnx")

from reasoning_planner.errors import DataError
from reasoning_planner.models.config import ExpertConfig, preset
from reasoning_planner.models.draft_config import DraftConfig
from reasoning_planner.models.target import Target
from reasoning_planner.models.vision import image_patches
from reasoning_planner.models.draft_release import save_draft
from reasoning_planner.runtimes.ort_draft import OrtDraft
from reasoning_planner.runtimes.torch_draft import TorchDraft
from reasoning_planner.training import rollouts as rollouts_module
from reasoning_planner.training import train_draft
from reasoning_planner.training.checkpoint import (load_release, load_state, save_release,
                                                   save_state)
from reasoning_planner.training.dataset import (PromptLayout, ShardStore, make_shard, token_config,
                                                train_tokenizer)
from reasoning_planner.training.draft_losses import count_rounds, draft_loss, place_weights
from reasoning_planner.training.draft_sequences import passes_of
from reasoning_planner.training.rollouts import (RolloutsPlan, RolloutStore, load_rollouts,
                                                 make_rollouts, save_rollouts, write_rollouts)
from reasoning_planner.training.train_draft import DraftSchedule, DraftTrainer, train
from reasoning_planner.training.train_target import StopRequest

SIZE, LAYERS = (32, 64), (0, 2)

pytestmark = pytest.mark.usefixtures("single_thread")


def write_target(folder):
    """A target of random weights that likes some tokens, so that its texts repeat themselves."""
    tokenizer = train_tokenizer()
    nano = preset("nano")
    text = dataclasses.replace(nano.text, hidden_size=32, num_layers=3, num_heads=2,
                               intermediate_size=48)
    vision = dataclasses.replace(nano.vision, depth=2, hidden_size=32, num_heads=2,
                                 intermediate_size=48, out_hidden_size=32,
                                 deepstack_indexes=(0,), image_height=SIZE[0],
                                 image_width=SIZE[1])
    expert = ExpertConfig(hidden_size=32, intermediate_size=48, num_heads=2,
                          projector_hidden_size=32)
    config = dataclasses.replace(nano, text=text, vision=vision, expert=expert).with_tokens(
        token_config(tokenizer))
    target = Target(config)
    target.initialise(5)
    save_release(target, tokenizer, folder, {})
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(checkpoint):
    return load_release(checkpoint)[0].requires_grad_(False)


@pytest.fixture(scope="module")
def layout(checkpoint, target):
    return PromptLayout(load_release(checkpoint)[1], target.config)


@pytest.fixture(scope="module")
def shard():
    return make_shard(range(12), SIZE)


@pytest.fixture(scope="module")
def written(target, layout, shard):
    return make_rollouts(target, layout, shard, range(12), LAYERS)


def a_trainer(target, layout, written, steps=60, schedule=None, **changes):
    config = DraftConfig.for_target(target.config.text, num_layers=1, block_length=4,
                                    feature_layers=LAYERS, **changes)
    schedule = dataclasses.replace(DraftSchedule(), steps=steps, rows=4, blocks=3, warmup=3,
                                   rate=5e-3, **(schedule or {}))
    return DraftTrainer(config, target, layout.prompt(np.zeros((16, 3))), schedule,
                        RolloutStore([written]), seed=1)


def test_rollouts_are_the_targets_own_pass_over_its_own_text(target, layout, shard, written):
    row = 11
    length = int(written.lengths[row])
    ids = np.concatenate([layout.prompt(shard.history[row]), written.token_ids[row, :length]])
    mask = np.arange(len(ids)) >= layout.length
    images = np.stack([shard.images[row][place] for place in layout.places])
    with torch.no_grad():
        found = target.training_logits(
            torch.from_numpy(ids)[None], torch.from_numpy(mask)[None],
            image_patches(torch.from_numpy(images), target.config.vision), select_layers=LAYERS)
    states = torch.cat(found.selected, -1)[0].numpy()
    given = np.concatenate([written.prompt_states[row], written.text_states[row, :length]])
    assert np.abs(states - given).max() < 0.01
    greedy = target.mask_trajectory_bins(found.logits).argmax(-1)
    assert greedy.tolist() == written.token_ids[row, :length].tolist()
    again = target.lm_head(torch.from_numpy(written.text_last[row, :length - 1].astype("f4")))
    assert torch.allclose(again, found.logits[1:], atol=0.02)


def test_rollouts_on_disk_and_their_refusals(target, layout, shard, written, tmp_path,
                                             monkeypatch):
    monkeypatch.setattr(rollouts_module, "SHARD_ROWS", 5)
    samples = ShardStore([shard])
    plan = RolloutsPlan("x", LAYERS, layout.length)
    calls = []
    assert not write_rollouts(tmp_path / "r", target, layout, samples, plan,
                              lambda: calls.append(0))
    assert write_rollouts(tmp_path / "r", target, layout, samples, plan)
    store = RolloutStore.open(tmp_path / "r")
    assert len(store) == 12 and calls == [0]
    assert len(RolloutStore.open(tmp_path / "r", limit=6)) == 10        # whole shards
    found, row = store.place(7)
    assert np.array_equal(found.token_ids[row], written.token_ids[7])
    for wrong in (replace(plan, target_sha256="y"), replace(plan, layers=(0, 1)),
                  replace(plan, augment=0.5)):
        with pytest.raises(DataError, match="holds rollouts of"):
            write_rollouts(tmp_path / "r", target, layout, samples, wrong)
    save_rollouts(written, tmp_path / "one")
    assert np.array_equal(load_rollouts(tmp_path / "one").text_states, written.text_states)
    with pytest.raises(DataError, match="shard of rollouts"):
        load_rollouts(tmp_path / "none")
    with pytest.raises(DataError, match="expected at least one"):
        RolloutStore.open(tmp_path)


def test_a_folder_of_more_layers_serves_a_draft_that_reads_fewer(target, layout, shard, written,
                                                                 tmp_path):
    samples = ShardStore([shard])
    plan = RolloutsPlan("x", LAYERS, layout.length)
    assert write_rollouts(tmp_path, target, layout, samples, replace(plan, layers=(0, 1, 2)))
    assert write_rollouts(tmp_path, target, layout, samples, plan)
    starts = np.array([[0, 2]])
    fewer, same = (store.blocks([4], starts, 3).states for store in (
        RolloutStore.open(tmp_path, LAYERS), RolloutStore([written])))
    assert fewer.shape == same.shape and torch.allclose(fewer, same, atol=1e-3)
    (tmp_path / "rollouts.json").write_text("{}")
    with pytest.raises(DataError, match="rollouts.json"):
        write_rollouts(tmp_path, target, layout, samples, plan)


def test_altered_images_are_drawn_by_the_samples_seed(target, layout, shard, written):
    altered = make_rollouts(target, layout, shard, range(12), LAYERS, augment=0.5)
    again = make_rollouts(target, layout, shard, (3, 7), LAYERS, augment=0.5)
    same = [np.abs(a - b).max() < 0.01
            for a, b in zip(altered.prompt_states.astype("f4"), written.prompt_states)]
    assert 2 <= sum(same) <= 10
    for place, row in enumerate((3, 7)):
        assert np.abs(again.prompt_states[place].astype("f4")
                      - altered.prompt_states[row]).max() < 0.01


def test_blocks_are_cut_behind_the_anchor(written):
    short = dataclasses.replace(written, lengths=np.minimum(written.lengths, 9))
    blocks = RolloutStore([short]).blocks([3, 5], np.array([[0, 6], [2, 7]]), 3)
    length = written.prompt_states.shape[1]
    assert (blocks.anchors - length).tolist() == [[0, 6], [2, 7]]
    text = written.token_ids[3]
    assert blocks.last_ids[0].tolist() == [text[0], text[6]]
    assert blocks.labels[0].tolist() == [text[1:4].tolist(), text[7:10].tolist()]
    assert blocks.valid[:, 1].tolist() == [[True, True, False], [True, False, False]]
    assert np.array_equal(blocks.before[1, 0, 1].numpy(), written.text_last[5, 3])
    assert np.array_equal(blocks.states[0, length + 2].numpy(), written.text_states[3, 2])


def test_the_loss_weighs_early_places_more(target, layout, written):
    assert place_weights(3, 3.0).tolist() == pytest.approx([1.0, np.exp(-1 / 3), np.exp(-2 / 3)])
    draft = a_trainer(target, layout, written).draft
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 1, 3, 32, generator=generator)
    labels = torch.tensor([[[4, 5, 6]]])
    valid = torch.tensor([[[True, True, False]]])
    found = draft_loss(draft, hidden, labels, valid, hidden + 1.0, 3.0)
    rows = -draft.logits(hidden)[0, 0].log_softmax(-1)
    second = float(np.exp(-1 / 3))
    assert float(found.cross_entropy) == pytest.approx(
        float((rows[0, 4] + second * rows[1, 5]) / (1 + second)), rel=1e-5)
    p, q = (draft.logits(h)[0, 0].softmax(-1) for h in (hidden + 1.0, hidden))
    apart = 1.0 - torch.minimum(p, q).sum(-1)           # 1 - acceptance
    assert float(found.total_variation) == pytest.approx(
        float((apart[0] + second * apart[1]) / (1 + second)), rel=1e-4)
    same = draft_loss(draft, hidden, labels, valid, hidden, 3.0)
    assert float(same.total_variation) == pytest.approx(0.0, abs=1e-6)


def test_rounds_are_counted_as_the_loop_runs():
    assert count_rounds([0] * 8, 5) == 4                # nothing accepted: one token a pass
    assert count_rounds([3] * 8, 9) == 2
    assert count_rounds([1, 9, 0, 0, 0], 5) == 3        # 0 -> 2 -> 3 -> 4: the last is the stop
    assert count_rounds([4, 0], 5) == 1 and count_rounds([], 1) == 0


@pytest.mark.parametrize("changes", [{}, {"rope": "mrope", "context": "no_visual"}])
def test_twenty_steps_lower_the_loss_and_the_target_stays(target, layout, written, changes):
    before = {name: value.clone() for name, value in target.state_dict().items()}
    trainer = a_trainer(target, layout, written, steps=20,
                        schedule={"total_variation": 0.5}, **changes)
    records = list(train(trainer, written, StopRequest(), 100))
    losses = [record["loss"] for record in records]
    assert len(losses) == 20 and np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5]), losses
    assert records[-1]["held_out_tokens_per_pass"] >= 1.0
    assert all(torch.equal(value, before[name]) for name, value in target.state_dict().items())


def test_validation_agrees_with_drafting_one_block_at_a_time(target, layout, shard, written):
    trainer = a_trainer(target, layout, written, steps=20)
    list(train(trainer, written, StopRequest(), 100))
    figures = trainer.validate(written)
    tokens = rounds = 0
    runtime = TorchDraft(trainer.draft.eval(), target.config)
    for row in range(len(written)):
        text = written.token_ids[row, :written.lengths[row]].tolist()
        states = written.text_states[row].astype(np.float32)
        runtime.begin(layout.prompt(shard.history[row]),
                      np.split(written.prompt_states[row].astype(np.float32), 2, axis=1))
        done = place = 0
        while place < len(text) - 1:
            block = runtime.draft(text[place], np.split(states[done:place], 2, axis=1))
            done = place
            accepted = 0
            while (accepted < len(block.token_ids) and place + 1 + accepted < len(text)
                   and block.token_ids[accepted] == text[place + 1 + accepted]):
                accepted += 1
            place, rounds = place + accepted + 1, rounds + 1
        tokens += len(text) - 1
    assert figures["tokens_per_pass"] == pytest.approx(tokens / rounds)
    assert figures["rounds"] == pytest.approx(rounds / len(written))
    assert figures["tokens_per_pass_8"] == figures["tokens_per_pass"]       # blocks are of 4


def test_short_passes_are_counted_from_long_blocks():
    accepted = np.full((3, 16), 15)
    accepted[2, 0] = 4                                  # 0 -> 5, then the rest
    lengths = np.array([17, 9, 17])
    assert passes_of(accepted, lengths, 16).tolist() == [1, 1, 2]
    assert passes_of(accepted, lengths, 8).tolist() == [2, 1, 3]
    assert passes_of(accepted, lengths, 2).tolist() == [8, 4, 8]


def test_a_draft_of_another_target_gives_its_weights(target, layout, written, tmp_path):
    first = a_trainer(target, layout, written, target_sha256="a" * 64)
    first.train_step()
    save_draft(first.draft, tmp_path, {})
    second = a_trainer(target, layout, written, target_sha256="b" * 64)
    second.start_from(tmp_path)
    assert second.step == 0
    for name, value in second.draft.state_dict().items():
        assert torch.allclose(value, first.draft.state_dict()[name], atol=1e-3), name
    with pytest.raises(DataError, match="but for the target"):
        a_trainer(target, layout, written, rope="mrope").start_from(tmp_path)


def test_a_resumed_run_takes_the_same_next_step(target, layout, written, tmp_path):
    trainer = a_trainer(target, layout, written)
    for _ in range(5):
        trainer.train_step()
    save_state(trainer.state_dict(), tmp_path / "state.pt")
    again = a_trainer(target, layout, written)
    again.load_state_dict(load_state(tmp_path / "state.pt"))
    assert trainer.train_step() == again.train_step()
    for name, value in trainer.draft.state_dict().items():
        assert torch.equal(value, again.draft.state_dict()[name]), name
    with pytest.raises(DataError, match="training state"):
        a_trainer(target, layout, written, rope="mrope").load_state_dict(trainer.state_dict())


def test_the_command_trains_stops_and_resumes(checkpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("reasoning_planner.training.dataset.SHARD_SIZE", 6)
    parser = argparse.ArgumentParser()
    train_draft.add_arguments(parser)
    common = ["--checkpoint", str(checkpoint), "--out", str(tmp_path), "--shards", "1",
              "--steps", "12", "--rows", "2", "--blocks", "2", "--block-length", "4",
              "--feature-layers", "0,2", "--validate-scenes", "2", "--resume"]
    assert train_draft.run(parser.parse_args([*common, "--minutes", "0"])) == 0
    assert "step 0, not finished" in capsys.readouterr().out
    assert train_draft.run(parser.parse_args(common)) == 0
    assert "finished" in capsys.readouterr().out
    records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [0, 10, 11]
    assert "held_out_tokens_per_pass" in records[-1]
    release = tmp_path / "release"
    assert {p.name for p in release.iterdir()} == {
        "draft_config.json", "draft.safetensors", "training.json", "draft.onnx", "draft_ort.json"}
    info = json.loads((release / "training.json").read_text())
    assert info["step"] == 12 and info["figures"]["held_out_rounds"] >= 1.0
    assert info["minutes"] >= 0.0 and info["started_from"] is None
    assert TorchDraft.load(release, checkpoint).config.target_sha256 == info["target_sha256"]
    assert OrtDraft(release, checkpoint, threads=1).config.feature_layers == LAYERS
    more = [*common, "--out", str(tmp_path / "more"), "--data", str(tmp_path / "data"),
            "--rollouts", str(tmp_path / "rollouts"), "--start-from", str(release)]
    assert train_draft.run(parser.parse_args(more)) == 0
    info = json.loads((tmp_path / "more" / "release" / "training.json").read_text())
    assert info["started_from"]["step"] == 12 and not (tmp_path / "more" / "data").exists()
    with pytest.raises(DataError, match="--rows"):
        train_draft.run(parser.parse_args([*common, "--rows", "0"]))
