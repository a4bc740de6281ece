"""Training the target: losses, stages, resuming, release and evaluation, on a tiny model."""

import argparse
import dataclasses
import json
import signal

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tokenizers")
pytest.importorskip("safetensors")

from reasoning_planner.errors import DataError
from reasoning_planner.evaluation import evaluate_target
from reasoning_planner.models.config import ExpertConfig, preset
from reasoning_planner.models.target import Target
from reasoning_planner.models.vision import image_patches
from reasoning_planner.training import losses, train_target
from reasoning_planner.training.cached_keys import CachedKeys
from reasoning_planner.training.checkpoint import (load_release, load_state, save_release,
                                                   save_state)
from reasoning_planner.training.dataset import (SHORT_PROMPT, PromptLayout, ShardStore, make_batch,
                                                make_shard, token_config, train_tokenizer)
from reasoning_planner.training.train_target import Schedule, StopRequest, Trainer, train
from reasoning_planner.training.prediction import predict_all

SIZE = (32, 64)

pytestmark = pytest.mark.usefixtures("single_thread")


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer()


@pytest.fixture(scope="module")
def config(tokenizer):
    nano = preset("nano")
    text = dataclasses.replace(nano.text, hidden_size=32, num_layers=3, num_heads=2,
                               intermediate_size=48)
    vision = dataclasses.replace(nano.vision, depth=2, hidden_size=32, num_heads=2,
                                 intermediate_size=48, out_hidden_size=32,
                                 deepstack_indexes=(0,), image_height=SIZE[0],
                                 image_width=SIZE[1])
    expert = ExpertConfig(hidden_size=32, intermediate_size=48, num_heads=2,
                          projector_hidden_size=32)
    return dataclasses.replace(nano, text=text, vision=vision, expert=expert,
                               tokens=dataclasses.replace(nano.tokens)).with_tokens(
        token_config(tokenizer))


@pytest.fixture(scope="module")
def store():
    return ShardStore([make_shard(range(12), SIZE)])


def _trainer(config, tokenizer, store, steps=(10, 30, 10), **changes):
    schedule = dataclasses.replace(Schedule(), steps=steps, batches=(8, 4, 4), warmup=5,
                                   **{"cached_samples": 8, **changes})
    return Trainer(config, tokenizer, schedule, store, seed=1)


def _records(trainer):
    return list(train(trainer, trainer.store.place(0)[0], StopRequest(), 10 ** 6))


def test_thirty_steps_lower_every_loss(config, tokenizer, store):
    trainer = _trainer(config, tokenizer, store, (16, 30, 8), expert_from=0.0)
    records = _records(trainer)
    assert [r["stage"] for r in records].count("joint") == 30 and trainer.finished
    for stages, name in ((("tower",), "loss"), (("joint",), "text"),
                         (("joint", "expert"), "flow")):
        values = [r[name] for r in records if r["stage"] in stages]
        assert np.mean(values[-5:]) < 0.9 * np.mean(values[:5]), (stages, values)
    joint = [r for r in records if r["stage"] == "joint"]
    assert {r["images"] for r in joint} == {4.0, 16.0} and joint[-1]["images"] == 16.0
    assert "held_out_coc_exact_match" in joint[-1] and "held_out_ade3_m" in records[-1]


def test_each_stage_changes_its_own_weights(config, tokenizer, store):
    trainer = _trainer(config, tokenizer, store, (2, 2, 2))
    seen = {}
    for stage in ("tower", "joint", "expert"):
        before = {k: v.clone() for k, v in trainer.target.state_dict().items()}
        trainer.advance()
        for _ in range(2):
            trainer.train_step()
        seen[stage] = {k for k, v in trainer.target.state_dict().items()
                       if not torch.equal(v, before[k])}
    assert all(name.startswith("vlm.model.visual.") for name in seen["tower"])
    assert any(name.startswith("vlm.model.language_model.") for name in seen["joint"])
    assert all(name.startswith(train_target.EXPERT_PARTS) for name in seen["expert"])
    assert len(seen["expert"]) > 10


@pytest.mark.parametrize("done", [4, 14, 24])
def test_a_resumed_run_takes_the_same_next_step(config, tokenizer, store, tmp_path, done):
    steps = (10, 10, 10)
    trainer = _trainer(config, tokenizer, store, steps, expert_from=0.0)
    for _ in range(done):
        trainer.advance()
        trainer.train_step()
    save_state(trainer.state_dict(), tmp_path / "state.pt")
    again = _trainer(config, tokenizer, store, steps, expert_from=0.0)
    again.load_state_dict(load_state(tmp_path / "state.pt"))
    for one in (trainer, again):
        one.advance()
    assert trainer.train_step() == again.train_step()
    for name, value in trainer.target.state_dict().items():
        assert torch.equal(value, again.target.state_dict()[name]), name


def test_cached_keys_give_the_loss_of_a_pass(config, tokenizer, store):
    """As computed, and as kept in half precision; rows of unequal lengths, out of order."""
    target = Target(config)
    target.initialise(0)
    layout = PromptLayout(tokenizer, config, SHORT_PROMPT)
    batches = [make_batch(store, layout, rows, np.random.default_rng(2)) for rows in ([0, 5], [7])]
    with torch.no_grad():
        passes = [(batch, losses.text_pass(
            target, *map(torch.from_numpy, (batch.input_ids, batch.label_mask)),
            losses.encode_rows(target, torch.from_numpy(batch.images), len(batch.offset),
                               torch.tensor([False] * 4)))) for batch in batches]
    longest = max(batch.input_ids.shape[1] for batch in batches) + 3

    def loss(given, offset, controls, v0_mps):
        return losses.flow_loss(target, given, offset, controls, v0_mps, 2,
                                torch.Generator().manual_seed(0))

    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float16, 1e-3)):
        keys = CachedKeys.collect(passes, config.text, 3, longest, dtype)
        for (batch, given), chosen in zip(passes, ([0, 1], [2])):
            rows = keys.rows(np.array(chosen))
            expected = loss(given, *map(torch.from_numpy, (batch.offset, batch.controls,
                                                           batch.v0_mps)))
            found = loss(rows, rows.offset, rows.controls, rows.v0_mps)
            assert found.item() == pytest.approx(expected.item(), rel=tolerance)
        every = keys.rows(np.array([2, 0, 1]))
        assert torch.equal(every.offset[0], torch.tensor(batches[1].offset[0]))
        alone = keys.rows(np.array([2])).prompt_kv.layer(1)[0]
        assert torch.equal(every.prompt_kv.layer(1)[0][:1, :, :alone.shape[2]], alone)


def test_the_expert_stage_renews_its_samples(config, tokenizer, store, monkeypatch):
    trainer = _trainer(config, tokenizer, store, (1, 1, 4), cache_renewals=1)
    trainer.begin("expert")
    drawn, frozen_pass = [], trainer._frozen_pass
    monkeypatch.setattr(trainer, "_frozen_pass", lambda indexes, rng: (
        drawn.append(indexes), frozen_pass(indexes, rng))[1])
    seen = []
    for _ in range(4):
        trainer.train_step()
        seen.append(len(drawn))
    assert seen == [1, 1, 2, 2] and not np.array_equal(*drawn)
    assert all(len(set(indexes)) == 8 for indexes in drawn)


def test_a_cache_beyond_memory_is_refused(config, tokenizer, store):
    with pytest.raises(DataError, match="cached_samples: given 10000000, .* GB"):
        _trainer(config, tokenizer, store, cached_samples=10 ** 7)


def test_released_are_the_experts_averaged_weights(config, tokenizer, store):
    trainer = _trainer(config, tokenizer, store, (1, 1, 6))
    trainer.begin("expert")
    name, values = "action_out_proj.weight", []
    for _ in range(6):
        trainer.train_step()
        values.append(trainer.target.state_dict()[name].clone())
    with trainer.averaged():
        averaged = trainer.target.state_dict()[name].clone()
    assert torch.equal(trainer.target.state_dict()[name], values[-1])
    expected = values[0]
    for step, value in enumerate(values):
        kept = min(0.98, step / (step + 10))
        expected = kept * expected + (1 - kept) * value
    assert torch.allclose(averaged, expected, atol=1e-6)
    assert not torch.equal(averaged, values[-1])
    assert all(part.startswith(train_target.EXPERT_PARTS) for part in trainer.average)


def test_a_stop_request_ends_training_between_steps(config, tokenizer, store):
    trainer = _trainer(config, tokenizer, store)
    stop = StopRequest()
    previous = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    try:
        stop.listen()
        running = train(trainer, None, stop, 10 ** 6)
        next(running), next(running)
        signal.raise_signal(signal.SIGTERM)
        assert list(running) == [] and trainer.step == 2
    finally:
        signal.signal(signal.SIGTERM, previous[0])
        signal.signal(signal.SIGINT, previous[1])
    assert not list(train(trainer, None, StopRequest(0.0), 10 ** 6))


def test_the_training_pass_is_the_models_own(config, tokenizer, store):
    target = Target(config)
    target.initialise(0)
    batch = make_batch(store, PromptLayout(tokenizer, config, SHORT_PROMPT), [0, 5], None)
    ids, mask, images = map(torch.from_numpy, (batch.input_ids, batch.label_mask, batch.images))
    expected = target.training_logits(ids, mask, image_patches(images, config.vision),
                                      collect_kv=True)
    for trained in ([True, False, True, False], [False] * 4, [True] * 4):
        vision = losses.encode_rows(target, images, 2, torch.tensor(trained))
        given = losses.text_pass(target, ids, mask, vision)
        assert torch.allclose(given.logits, expected.logits, atol=1e-5)
        assert torch.equal(given.labels, expected.labels)
        assert torch.allclose(given.prompt_kv.layer(2)[0], expected.prompt_kv.layer(2)[0],
                              atol=1e-5)
        assert torch.equal(given.rope_delta, expected.rope_delta)


def test_text_loss_weighs_the_opening_double():
    logits = torch.zeros(8, 5)
    logits[0, 0] = logits[4, 0] = 9.0
    labels = torch.zeros(8, dtype=torch.int64)
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[:, 0] = False
    rows = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    weights = torch.tensor([2.0, 2.0, 2.0, 1.0] * 2)
    assert losses.text_loss(logits, labels, mask) == pytest.approx(
        float((rows * weights).sum() / 14.0))


def test_flow_draws_share_the_prompt(config, tokenizer, store):
    target = Target(config)
    target.initialise(0)
    batch = make_batch(store, PromptLayout(tokenizer, config, SHORT_PROMPT), [1, 2], None)
    ids, mask, images = map(torch.from_numpy, (batch.input_ids, batch.label_mask, batch.images))
    given = losses.text_pass(target, ids, mask, losses.encode_rows(
        target, images, 2, torch.tensor([True] * 4)))
    repeated = losses.RepeatedKV(given.prompt_kv, 3).layer(1)[0]
    assert torch.equal(repeated[0], repeated[2]) and not torch.equal(repeated[2], repeated[3])
    loss = losses.flow_loss(target, given, torch.from_numpy(batch.offset),
                            torch.from_numpy(batch.controls), torch.from_numpy(batch.v0_mps), 3,
                            torch.Generator().manual_seed(0))
    loss.backward()
    assert target.action_out_proj.weight.grad is not None
    assert target.lm_head.weight.grad is None       # the expert's gradient stops at the keys


def test_curvature_weighs_more_at_speed_and_early_controls_more():
    weights = losses.control_weights(torch.tensor([0.0, 8.0, 25.0]), 64)
    assert weights.mean() == pytest.approx(1.0)
    ratio = weights[:, 0, 1] / weights[:, 0, 0]
    assert ratio[0] == pytest.approx(1.0) and ratio[2] == pytest.approx(25.0)
    assert 1.0 < ratio[1] < 25.0
    assert (weights[1, :-1] >= weights[1, 1:]).all() and weights[1, 0, 0] > 5 * weights[1, 40, 0]


def test_history_bins_start_as_neighbours(config):
    target = Target(config)
    target.initialise(0)
    train_target.smooth_history_bins(target, 0)
    start = config.tokens.history_bin_start
    rows = torch.nn.functional.normalize(target.language_model.embed_tokens.weight[
        start:start + 1000].detach(), dim=1)
    assert (rows[500] @ rows[501]) > 0.9 > (rows[500] @ rows[600])


def test_whitened_patches_have_near_unit_variance(config, store):
    target = Target(config)
    target.initialise(0)
    images = torch.from_numpy(store.place(0)[0].images.reshape(-1, *SIZE, 3))
    losses.whiten_patches(target, images)
    out = target.visual.patch_embed(image_patches(images, config.vision)).detach()
    assert float(out.mean(dim=(0, 1)).abs().max()) < 1e-3
    assert 0.3 < float(out.std()) < 1.1


def test_schedule_changes_are_checked():
    assert train_target.changed(["rates=[1,2,3]", "hard_share=0.5"]) == {
        "rates": (1, 2, 3), "hard_share": 0.5}
    for wrong in ("hard=1", "hard_share=", "hard_share"):
        with pytest.raises(DataError, match="--set hard"):
            train_target.changed([wrong])


def test_hard_kinds_are_drawn_more_often(config, tokenizer, store):
    trainer = _trainer(config, tokenizer, store, hard_share=0.5)
    trainer.begin("joint")
    assert len(trainer.hard)
    drawn = trainer._draw(4000, np.random.default_rng(0))
    share = np.isin(drawn, trainer.hard).mean()
    assert share == pytest.approx(0.5 + 0.5 * len(trainer.hard) / len(store), abs=0.03)


def test_learning_rate_rises_then_falls():
    rates = [train_target.learning_rate(step, 100, 10) for step in range(101)]
    assert rates[0] == pytest.approx(0.1, abs=0.01) and max(rates) == max(rates[8:12])
    assert rates[-1] == pytest.approx(0.03) and rates[60] > rates[80]


@pytest.fixture(scope="module")
def release(config, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("release")
    target = Target(config)
    target.initialise(3)
    save_release(target, tokenizer, folder, {"seed": 3, "steps": 0})
    return folder, target


def test_release_rounds_to_half_precision_once(release, config, tokenizer, tmp_path):
    folder, target = release
    assert {p.name for p in folder.iterdir()} == {"config.json", "tokenizer.json",
                                                  "model.safetensors", "training.json"}
    loaded, text = load_release(folder)
    assert loaded.config == config and text.size == tokenizer.size
    for name, value in target.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value.to(torch.float16).float()), name
    save_release(loaded, text, tmp_path, {})
    assert (tmp_path / "model.safetensors").read_bytes() == (
        folder / "model.safetensors").read_bytes()
    with pytest.raises(DataError, match="missing"):
        load_release(tmp_path / "nothing")


def test_damaged_state_is_refused(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        load_state(tmp_path / "state.pt")
    (tmp_path / "state.pt").write_bytes(b"not a state")
    with pytest.raises(DataError, match="cannot be read"):
        load_state(tmp_path / "state.pt")


def test_evaluation_reports_the_agreed_fields(release, tmp_path):
    folder, _ = release
    out = tmp_path / "deep" / "target.json"
    parser = argparse.ArgumentParser()
    evaluate_target.add_arguments(parser)
    args = parser.parse_args(["--checkpoint", str(folder), "--out", str(out), "--scenes", "6",
                              "--threads", "1"])
    assert evaluate_target.run(args) == 0
    report = json.loads(out.read_text())
    assert report["scenes"] == 6 and report["seeds"] == {"first": 10_000_000,
                                                         "last": 10_000_005}
    assert 0.0 <= report["coc_exact_match"] <= 1.0 and 0.0 <= report["manoeuvre_accuracy"] <= 1.0
    assert set(report["ade3_m"]) == {"vision_needed", "free_road"}
    assert set(report["ade3_m"]["free_road"]) == {"target", "target_blind", "kinematic"}
    assert report["ade3_m"]["vision_needed"]["kinematic"] > 0.1
    assert report["checkpoint"]["seed"] == 3
    assert sum(row["scenes"] for row in report["by_kind"].values()) == 6
    with pytest.raises(DataError, match="--scenes"):
        evaluate_target.run(parser.parse_args(["--scenes", "0"]))


def test_predictions_are_the_same_in_any_batch(release, tokenizer, config, store):
    target = release[1]
    layout = PromptLayout(tokenizer, config)
    shard = make_shard(range(3), SIZE)
    together = predict_all(target, tokenizer, layout, shard, batch=3)
    alone = predict_all(target, tokenizer, layout, shard, batch=1)
    assert together.texts == alone.texts
    assert together.token_ids == alone.token_ids
    assert together.paths.shape == alone.paths.shape == (3, 64, 2)
    assert np.isfinite(together.paths).all()        # an untrained flow is chaotic: not compared


def test_the_command_trains_stops_and_resumes(config, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train_target, "preset", lambda name: config)
    monkeypatch.setattr("reasoning_planner.training.dataset.SHARD_SIZE", 6)
    parser = argparse.ArgumentParser()
    train_target.add_arguments(parser)
    common = ["--out", str(tmp_path), "--shards", "1", "--steps", "2", "1", "1",
              "--validate-scenes", "2", "--set", "cached_samples=4"]
    assert train_target.run(parser.parse_args([*common, "--minutes", "0"])) == 0
    assert "not finished" in capsys.readouterr().out
    assert train_target.run(parser.parse_args([*common, "--resume"])) == 0
    assert "finished" in capsys.readouterr().out
    records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [r["stage"] for r in records] == ["tower", "joint", "expert"]
    info = json.loads((tmp_path / "release" / "training.json").read_text())
    assert info["step"] == 1 and info["data_version"] and info["parameters"]["total"] > 1000
    load_release(tmp_path / "release")
    again = ["--out", str(tmp_path / "again"), "--data", str(tmp_path / "data"), "--start-from",
             str(tmp_path / "release"), "--stage", "expert", *common[2:]]
    assert train_target.run(parser.parse_args(again)) == 0
    one, two = (load_release(tmp_path / name / "release")[0].state_dict()
                for name in (".", "again"))
    changed = {name for name in one if not torch.equal(one[name], two[name])}
    assert changed and all(name.startswith(train_target.EXPERT_PARTS) for name in changed)
