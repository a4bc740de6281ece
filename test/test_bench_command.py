"""The benchmark end to end on a small checkpoint: our rows, the peers', T(k), scenes, errors."""

import json
import shutil
import sys

import numpy as np
import pytest

pytest.importorskip("torch", reason="the checkpoint is made with it")
pytest.importorskip("onnxruntime", reason="the benchmark runs it")

from reasoning_planner import cli
from reasoning_planner.datatypes import TokenOrigin
from reasoning_planner.evaluation.bench_loop import read_prompt
from reasoning_planner.evaluation.bench_methods import METHODS, PEERS
from reasoning_planner.evaluation.bench_runs import DecoderContender
from reasoning_planner.evaluation.bench_scenes import (FIRST_COLD_SEED, FIRST_DRIVE_SEED,
                                                       SceneSource)
from reasoning_planner.export.build_engines import build_engines
from reasoning_planner.export.draft_graph import export_draft
from reasoning_planner.models.draft import Draft
from reasoning_planner.models.draft_config import DraftConfig
from reasoning_planner.models.draft_release import save_draft
from reasoning_planner.runtimes.draft_base import target_sha256
from reasoning_planner.runtimes.engine_manifest import EngineManifest
from reasoning_planner.runtimes.factory import create_runtime
from reasoning_planner.runtimes.manifest import (MANIFEST_NAME, Manifest, load_config)
from reasoning_planner.runtimes.platforms import load_platforms
from reasoning_planner.runtimes.torch_runtime import load_target
from reasoning_planner.speculative.acceptance import GreedyRule
from reasoning_planner.speculative.corpus_proposer import save_corpus
from reasoning_planner.speculative.cost_curve import load_cost_curve
from reasoning_planner.speculative.proposer import NoProposer
from reasoning_planner.speculative.token_tree import chain
from reasoning_planner.tokenization.text_tokenizer import TextTokenizer
from reasoning_planner.world.drive import make_drive
from reasoning_planner.world.samples import make_sample

LONGEST = 20        # tokens of a text: an untrained model never ends one
pytestmark = pytest.mark.usefixtures("single_thread")


@pytest.fixture(scope="module")
def equipped(exported_checkpoint):
    """The checkpoint with a corpus of its own texts and an untrained draft, where they ship."""
    folder = exported_checkpoint
    target = load_target(folder)
    draft = Draft(DraftConfig.for_target(target.config.text, block_length=8, num_layers=1,
                                         target_sha256=target_sha256(folder)),
                  target)
    draft.initialise(0)
    save_draft(draft, folder / "draft", {})
    export_draft(folder / "draft", folder)
    runtime = create_runtime("ort", folder, threads=1)
    source = SceneSource(runtime, TextTokenizer.load(folder / "tokenizer.json"))
    texts = []
    for scene in source.cold(2):
        step = runtime.prefill(scene.input_ids, scene.features)
        texts.append([])
        for _ in range(LONGEST):
            texts[-1].append(int(step.token_ids[-1]))
            step = runtime.extend(np.array(texts[-1][-1:]))
    save_corpus(folder / "corpus.npz", texts)
    return folder


def bench(folder, out, *arguments):
    return cli.main(["bench", "--checkpoint", str(folder), "--out", str(out), "--threads", "1",
                     "--max-new-tokens", str(LONGEST), *arguments])


def rows_of(out):
    rows = json.loads((out / "bench.json").read_text())
    return {(row["method"], row["kind"], row["temperature"]): row for row in rows}


@pytest.fixture(scope="module")
def measured(equipped, tmp_path_factory):
    out = tmp_path_factory.mktemp("bench")
    methods = ["corpus_b8", "temporal_b8", "flat_rope_b8", "merged_b8", "easd"]
    assert bench(equipped, out, "--scenes", "2", "--methods", *methods) == 0
    return rows_of(out), out


def test_rows_of_each_kind(measured):
    rows, out = measured
    lossless = ["autoregressive", "corpus_b8", "flat_rope_b8", "merged_b8"]
    sampled = [("autoregressive", "cold", 0.6), ("easd_b8", "cold", 0.6)]
    assert set(rows) == {*((name, "cold", 0.0) for name in lossless), *sampled,
                         *((name, "continuous", 0.0) for name in [*lossless, "temporal_b8"])}
    assert all(row["scenes"] == 2 and row["runtime"] == "ort" for row in rows.values())
    assert not rows["easd_b8", "cold", 0.6]["lossless"]
    assert (out / "bench.html").read_text().startswith("<!doctype html>")


def test_greedy_texts_are_the_targets_own(measured):
    rows, _ = measured
    greedy = [row for (_, _, temperature), row in rows.items() if temperature == 0.0]
    assert all(row["exact_match_rate"] == 1.0 and row["mismatches"] == 0 for row in greedy)
    assert all(row["draft_failures"] == 0 for row in rows.values())
    own = rows["autoregressive", "cold", 0.0]
    assert own["speedup"] == 1.0 and own["acceptance_length"] == 1.0 and own["draft_share"] == 0.0


def test_drafts_of_known_texts_are_accepted(measured):
    """The corpus holds what the target writes in these scenes; the draft knows nothing."""
    rows, _ = measured
    corpus, draft = (rows[name, "cold", 0.0] for name in ("corpus_b8", "flat_rope_b8"))
    assert corpus["acceptance_length"] > 2.0 > draft["acceptance_length"] >= 1.0
    assert corpus["passes"] < draft["passes"]


def test_the_peers_write_the_same_and_accept_the_same(equipped, tmp_path):
    """Our proposers see the same tokens and hidden states behind the other library's protocol."""
    pytest.importorskip("transformers", reason="the peers are its")
    assert bench(equipped, tmp_path, "--scenes", "1", "--methods", "hf", "corpus_b8",
                 "flat_rope_b8", "--cycles", "0") == 0
    rows = rows_of(tmp_path)
    peers = {name: row for (name, kind, _), row in rows.items() if kind == "peer"}
    assert set(peers) == {"hf_generate", "hf_prompt_lookup", "hf_assisted_corpus",
                          "hf_assisted_flat_rope"}
    for row in peers.values():
        assert row["exact_match_rate"] == 1.0 and row["runtime"] == "transformers"
        assert set(row["times_as_long_as"]) == {"autoregressive", "corpus_b8", "flat_rope_b8"}
    for ours, theirs in (("corpus_b8", "hf_assisted_corpus"),
                         ("flat_rope_b8", "hf_assisted_flat_rope")):
        own, peer = rows[ours, "cold", 0.0], peers[theirs]
        assert peer["acceptance_by_depth"] == own["acceptance_by_depth"]
        assert peer["draft_share"] == own["draft_share"]
    assert peers["hf_generate"]["passes"] == rows["autoregressive", "cold", 0.0]["passes"]


class HalfRight(NoProposer):
    """Drafts two right tokens and a wrong one of a known text, and keeps what it is told."""

    name, origin = "half right", TokenOrigin.ROUTINE

    def __init__(self, text):
        self.text, self.told = text, []

    def reset(self, prompt):
        self.told.append((prompt.input_ids.tolist(), 0, prompt.step.hidden_states))

    def propose(self, context):
        place = len(context.token_ids)
        right = self.text[place:place + 2]
        assert context.token_ids == self.text[:place]
        return chain([*right, 3 if self.text[place + 2:place + 3] != (3,) else 4], self.origin)

    def observe(self, commit):
        self.told.append((commit.token_ids, commit.accepted, commit.hidden_states))


def test_the_other_loop_tells_a_proposer_what_ours_tells(equipped):
    """Tokens, how many were accepted, and the target's hidden states of the right ones."""
    pytest.importorskip("transformers", reason="the peers are its")
    from reasoning_planner.evaluation.bench_peers import PeerContender, PeerModel

    layers, stop_id = (1, 3), load_config(equipped).tokens.traj_future_start_id
    runtime = create_runtime("ort", equipped, threads=1, hidden_layers=layers)
    scene, = SceneSource(runtime, TextTokenizer.load(equipped / "tokenizer.json")).cold(1)
    plain = DecoderContender("plain", runtime, NoProposer(), lambda seed: GreedyRule(), stop_id,
                             LONGEST)
    text = plain.write(scene, read_prompt(runtime, scene, False), 0).token_ids
    ours, theirs = HalfRight(text), HalfRight(text)
    own = DecoderContender("own", runtime, ours, lambda seed: GreedyRule(), stop_id, LONGEST)
    other = PeerContender(PEERS["hf_assisted_corpus"], PeerModel(equipped, 1, layers), theirs, 0.0,
                          stop_id, LONGEST)
    prompt = read_prompt(runtime, scene, False)
    written = [contender.write(scene, prompt, 0) for contender in (own, other)]
    assert written[0].token_ids == written[1].token_ids == text
    assert written[0].origins == written[1].origins
    assert len(ours.told) == len(theirs.told) + 1       # the last one ends the other loop
    for (ids, accepted, states), (their_ids, theirs_accepted, their_states) in zip(ours.told,
                                                                                   theirs.told):
        assert (ids, accepted) == (their_ids, theirs_accepted)
        assert len(states) == len(their_states)
        for a, b in zip(states, their_states):
            assert a.shape == b.shape and np.abs(a - b).max() < 1e-3 * max(1.0, np.abs(a).max())


def test_sampling(equipped, tmp_path, capsys):
    assert bench(equipped, tmp_path, "--scenes", "1", "--temperature", "0.8", "--methods",
                 "corpus_b4", "easd_b8", "flat_rope_drawn", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["method"] for row in rows} == {"autoregressive", "corpus_b4", "easd_b8",
                                               "flat_rope_drawn_b8"}
    assert all(row["temperature"] == 0.8 and row["exact_match_rate"] is None for row in rows)


def test_methods_for_sampling_alone_bring_their_own_reference(equipped, tmp_path):
    assert bench(equipped, tmp_path, "--scenes", "1", "--methods", "easd_b8") == 0
    rows = rows_of(tmp_path)
    assert set(rows) == {(name, "cold", 0.6) for name in ("autoregressive", "easd_b8")}
    assert set(rows["easd_b8", "cold", 0.6]["thresholds_nats"]) == {"target", "draft"}


def test_calibrating_writes_the_manifest_and_nothing_else(equipped, tmp_path, capsys):
    before, names = Manifest.load(equipped), sorted(p.name for p in equipped.iterdir())
    assert load_cost_curve(equipped) is None
    assert bench(equipped, tmp_path, "--calibrate", "--scenes", "0", "--json") == 0
    told, curve = json.loads(capsys.readouterr().out), load_cost_curve(equipped)
    assert curve.to_dict() == told and curve.sizes[0] == 1 and curve.round_ms > 0.0
    after = Manifest.load(equipped)
    assert after.graphs == before.graphs and after.checkpoint == before.checkpoint
    assert after.costs["threads"] == 1 and after.costs["hardware"]
    assert sorted(p.name for p in equipped.iterdir()) == names and not list(tmp_path.iterdir())
    create_runtime("ort", equipped, threads=1)
    before.save(equipped)


def test_calibrating_writes_to_the_engines_that_run(equipped, tmp_path):
    folder, before = equipped / "engines" / "cpu", (equipped / MANIFEST_NAME).read_bytes()
    build_engines(load_platforms()["cpu"], equipped, folder, measure=False)
    try:
        assert bench(equipped, tmp_path, "--calibrate", "--scenes", "0") == 0
        assert load_cost_curve(folder).sizes[0] == 1
        assert EngineManifest.load(folder).costs["threads"] == 1
        assert (equipped / MANIFEST_NAME).read_bytes() == before
    finally:
        shutil.rmtree(folder.parent)


def test_a_damaged_curve_is_refused(equipped):
    path = equipped / MANIFEST_NAME
    content = path.read_text()
    path.write_text(json.dumps(json.loads(content) | {"costs": {"sizes": [1]}}))
    try:
        with pytest.raises(Exception, match="cost curve.*expected sizes, cost_ms and round_ms"):
            load_cost_curve(equipped)
    finally:
        path.write_text(content)


@pytest.mark.parametrize("arguments, complaint", [
    (["--scenes", "0"], "--scenes: given 0, expected 1 or more"),
    (["--temperature", "-1"], "--temperature: given -1.0, expected 0 or 0.01 .. 10"),
    (["--threads", "0"], "--threads: given 0"), (["--cycles", "-1"], "--cycles: given -1"),
    (["--methods", "oracle"], "given oracle, expected some of autoregressive"),
    (["--calibrate", "--runtime", "torch"], "--calibrate: given --runtime torch, expected"),
    (["--out", "/dev/null/bench"], "--out /dev/null/bench: cannot be made"),
    (["--draft", "absent"], "absent"), (["--corpus", "absent.npz"], "absent.npz"),
    (["--checkpoint", "absent"], "absent")])
def test_bad_arguments_are_told_in_one_line(equipped, tmp_path, capsys, arguments, complaint):
    assert bench(equipped, tmp_path, "--scenes", "1", "--methods", "corpus_b8", *arguments) == 1
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert told.startswith("reasoning-planner bench: ") and complaint in told
    assert not (tmp_path / "bench.json").exists()


def test_what_cannot_take_part_is_left_out_and_told(exported_checkpoint, tmp_path, capsys):
    folder = tmp_path / "bare"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors", MANIFEST_NAME,
                 "vision.onnx", "decoder.onnx", "expert.onnx"):
        shutil.copy(exported_checkpoint / name, folder)
    assert bench(folder, tmp_path, "--scenes", "1", "--methods", "corpus_b4", "temporal_b4") == 0
    assert "left out: corpus_b4: no corpus" in capsys.readouterr().err
    assert {key[:2] for key in rows_of(tmp_path)} == {("autoregressive", "continuous"),
                                                      ("temporal_b4", "continuous")}
    assert bench(folder, tmp_path, "--scenes", "1", "--methods", "flat_rope_b4") == 1
    assert "no draft" in capsys.readouterr().err


def test_without_the_other_library_ours_is_measured_all_the_same(equipped, tmp_path, capsys,
                                                                 monkeypatch):
    monkeypatch.delitem(sys.modules, "reasoning_planner.evaluation.bench_peers", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert bench(equipped, tmp_path, "--scenes", "1", "--cycles", "0", "--methods", "corpus_b4",
                 "hf_generate") == 0
    assert "left out: hf_generate: transformers is not installed: pip install" in \
        capsys.readouterr().err
    assert {key[0] for key in rows_of(tmp_path)} == {"autoregressive", "corpus_b4"}


# Scenes

class Encoder:
    """What SceneSource asks of a runtime; an image's feature is its mean."""

    def __init__(self, config):
        self.config, self.encoded = config, 0

    def encode_images(self, images):
        self.encoded += len(images)
        return images.mean(axis=(1, 2, 3), dtype=np.float32)[:, None, None, None]


@pytest.fixture
def source(exported_checkpoint):
    runtime = create_runtime("ort", exported_checkpoint, threads=1)
    tokenizer = TextTokenizer.load(exported_checkpoint / "tokenizer.json")
    return SceneSource(Encoder(runtime.config), tokenizer)


def test_cold_scenes_are_the_worlds(source):
    for number, scene in enumerate(source.cold(2)):
        sample = make_sample(FIRST_COLD_SEED + number)
        assert scene.scene_class == sample.kind
        assert (scene.images == sample.images.reshape(scene.images.shape)).all()


def test_cycles_of_a_drive_follow_each_other(source):
    """Every cycle sees the four newest frames of each camera, the newest last."""
    scenes = list(source.continuous(3))
    frames = list(make_drive(FIRST_DRIVE_SEED, 2.0).frames())
    assert source._runtime.encoded == 4 * (4 + 2), "a frame is encoded once"
    for number, scene in enumerate(scenes):
        window = [frame.images for frame in frames[15 + number - 3:15 + number + 1]]
        expected = np.stack(window, axis=1).reshape(scene.images.shape)
        assert (scene.images == expected).all()
        assert scene.features[:, 0, 0, 0] == pytest.approx(expected.mean(axis=(1, 2, 3)))
        assert scene.scene_class == frames[15 + number].moment.kind
        assert len(scene.input_ids) == len(scenes[0].input_ids)


def test_methods_are_documented():
    assert all(method.summary for method in METHODS.values())
