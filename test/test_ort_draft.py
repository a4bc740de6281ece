"""The draft's graph on ONNX Runtime against the PyTorch oracle.

Tolerance: float32 on both sides, other orders of summation.
"""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the oracle is PyTorch")
pytest.importorskip("onnx", reason="graphs are written with onnx")
pytest.importorskip("onnxruntime", reason="graphs are run with onnxruntime")
pytest.importorskip("safetensors", reason="drafts are stored as safetensors")

from reasoning_planner.cli import main
from reasoning_planner.datatypes import Deadline, Reason
from reasoning_planner.errors import ModelError
from reasoning_planner.export.draft_graph import export_draft
from reasoning_planner.export.to_onnx import export
from reasoning_planner.models.draft import Draft
from reasoning_planner.models.draft_config import CONTEXTS, DraftConfig
from reasoning_planner.models.draft_release import save_draft
from reasoning_planner.runtimes.draft_factory import create_draft
from reasoning_planner.runtimes.factory import create_runtime
from reasoning_planner.runtimes.draft_base import target_sha256
from reasoning_planner.runtimes.ort_draft import OrtDraft
from reasoning_planner.runtimes.torch_draft import TorchDraft
from reasoning_planner.runtimes.torch_runtime import load_target
from reasoning_planner.speculative.acceptance import GreedyRule
from reasoning_planner.speculative.block_draft_proposer import BlockDraftProposer
from reasoning_planner.speculative.decoder import SpeculativeDecoder
from reasoning_planner.speculative.proposer import NoProposer, PromptContext
from test_draft import a_prompt
from tiny_checkpoint import tiny_config, write_checkpoint

TOLERANCE, LAYERS = 1e-4, (1, 3)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("ort_draft") / "tiny", tiny_config())


def a_release(checkpoint, folder, **changes):
    target = load_target(checkpoint)
    config = DraftConfig.for_target(
        target.config.text, block_length=6, feature_layers=LAYERS,
        target_sha256=target_sha256(checkpoint), **changes)
    draft = Draft(config, target)
    draft.initialise(3)
    save_draft(draft, folder, {})
    export_draft(folder, checkpoint)
    return folder


@pytest.mark.parametrize("rope,context", [*(("flat", context) for context in CONTEXTS),
                                          ("mrope", "full"), ("text_only", "last_k"),
                                          ("local_reset", "no_visual")])
def test_the_graph_is_the_oracle(checkpoint, tmp_path, rope, context):
    folder = a_release(checkpoint, tmp_path, rope=rope, context=context, context_k=9)
    oracle, ort = TorchDraft.load(folder, checkpoint), OrtDraft(folder, checkpoint, threads=1)
    generator = np.random.default_rng(0)
    for text in range(2):                               # the second begins anew
        ids = a_prompt(oracle._model)
        for runtime in (oracle, ort):
            states = np.random.default_rng(text).standard_normal((2, len(ids), 48), np.float32)
            runtime.begin(ids, list(states))
        for count in (0, 1, 4, 0, 12, 2):
            states = list(generator.standard_normal((2, count, 48), np.float32))
            wanted, found = (runtime.draft(30 + count, states) for runtime in (oracle, ort))
            assert found.token_ids.tolist() == wanted.token_ids.tolist()
            assert found.top_ids.tolist() == wanted.top_ids.tolist()
            assert np.abs(found.top_log_probs - wanted.top_log_probs).max() < TOLERANCE


def test_refusals(checkpoint, tmp_path):
    folder = a_release(checkpoint, tmp_path / "a")
    runtime = OrtDraft(folder, checkpoint, threads=1, capacity=60)
    ids = a_prompt(tiny_config())
    with pytest.raises(ModelError, match="begin"):
        runtime.draft(3, [np.zeros((0, 48), np.float32)] * 2)
    with pytest.raises(ModelError, match="hidden_layers"):
        runtime.begin(ids, [np.zeros((len(ids), 48), np.float32)])
    runtime.begin(ids, [np.full((len(ids), 48), np.nan, np.float32)] * 2)
    with pytest.raises(ModelError, match="not finite"):
        runtime.draft(3, [np.zeros((0, 48), np.float32)] * 2)
    with pytest.raises(ModelError, match="cache of 60"):
        runtime.draft(3, [np.zeros((30, 48), np.float32)] * 2)
    graph = folder / "draft.onnx"
    graph.write_bytes(graph.read_bytes()[:-1])
    with pytest.raises(ModelError, match="not the files of this export"):
        OrtDraft(folder, checkpoint)
    graph.unlink()
    with pytest.raises(ModelError, match="draft_ort.json"):
        OrtDraft(folder, checkpoint)


def test_the_command_writes_a_drafts_graph(checkpoint, tmp_path, capsys):
    folder = a_release(checkpoint, tmp_path / "draft")
    files = {name: (folder / name).read_bytes() for name in ("draft.onnx", "draft_ort.json")}
    for name in files:
        (folder / name).unlink()
    given = ["export", "--checkpoint", str(checkpoint), "--draft", str(folder)]
    assert main(given) == 0
    assert "draft.onnx: draft, " in capsys.readouterr().err
    assert {name: (folder / name).read_bytes() for name in files} == files
    assert main([*given, "--out", str(tmp_path)]) == 1
    assert "expected none" in capsys.readouterr().err
    other = write_checkpoint(tmp_path / "other", tiny_config(), seed=1)
    assert main(["export", "--checkpoint", str(other), "--draft", str(folder)]) == 1
    assert "trained on" in capsys.readouterr().err


def test_the_graph_is_small_and_the_same_every_time(checkpoint, tmp_path):
    one = a_release(checkpoint, tmp_path / "a") / "draft.onnx"
    two = a_release(checkpoint, tmp_path / "b") / "draft.onnx"
    assert one.read_bytes() == two.read_bytes() and one.stat().st_size < 100_000


def test_one_text_whatever_engine_drafts(checkpoint, tmp_path):
    export(checkpoint, tmp_path / "target")
    folder = a_release(checkpoint, tmp_path / "draft")
    drafts = [create_draft(name, folder, checkpoint, threads=1) for name in ("ort", "torch")]
    runtime = create_runtime("ort", checkpoint, graphs=tmp_path / "target", threads=1,
                             capacity=128, hidden_layers=drafts[0].config.feature_layers)
    model = runtime.config
    images = np.random.default_rng(1).integers(
        0, 256, (2, model.vision.image_height, model.vision.image_width, 3), np.uint8)
    features, ids = runtime.encode_images(images), a_prompt(model)
    found = []
    for proposer in (NoProposer(), *map(BlockDraftProposer, drafts)):
        decoder = SpeculativeDecoder(runtime, proposer, model.tokens.traj_future_start_id, 24)
        prompt = PromptContext(runtime.prefill(ids, features), ids, features)
        found.append(decoder.write(prompt, GreedyRule(), Deadline.never()))
    alone, ort, oracle = found
    assert alone.token_ids == ort.token_ids == oracle.token_ids
    assert ort.stats.passes == oracle.stats.passes and ort.stats.proposed > 20
    assert Reason.DRAFT_FAILED not in [refusal.reason for one in found for refusal in one.refusals]
    with pytest.raises(ModelError, match="expected one of"):
        create_draft("none", folder, checkpoint)
