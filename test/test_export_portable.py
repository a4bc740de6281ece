"""The TensorRT decoder graphs, `trt` and `plain`, in float32 on ONNX Runtime against PyTorch."""

import dataclasses

import numpy as np
import pytest

torch = pytest.importorskip("torch")
onnx = pytest.importorskip("onnx")
onnx_runtime = tuple(map(int, pytest.importorskip("onnxruntime").__version__.split(".")[:2]))

from reasoning_planner.evaluation import lossless
from reasoning_planner.evaluation.bench_setup import Bench
from reasoning_planner.export.graph_builder import StoredWeights
from reasoning_planner.export.portable_builder import OPSETS
from reasoning_planner.export.portable_decoder import portable_decoder
from reasoning_planner.runtimes.base import tree_visibility
from reasoning_planner.runtimes.factory import create_runtime
from portable_runtime import PortableRuntime
from test_lossless import SEED
from test_runtimes import (LAYERS, NUM_IMAGES, assert_close, assert_steps_close, decode,
                           prompt_of)


def skip_without_opset_24():
    if onnx_runtime < (1, 24):
        pytest.skip("this ONNX Runtime has no operators of opset 24")


@pytest.fixture(scope="module")
def oracle(exported_checkpoint):
    torch.set_num_threads(1)
    return create_runtime("torch", exported_checkpoint, hidden_layers=LAYERS)


@pytest.fixture(scope="module", params=sorted(OPSETS))
def runtime(request, exported_checkpoint):
    if request.param == "trt":
        skip_without_opset_24()
    return PortableRuntime(exported_checkpoint, request.param, LAYERS)


@pytest.fixture(scope="module")
def prompt(exported_checkpoint, oracle):
    return prompt_of(exported_checkpoint, oracle.config)


@pytest.fixture(scope="module")
def features(oracle):
    images = np.random.default_rng(3).integers(0, 256, (NUM_IMAGES, 64, 128, 3), dtype=np.uint8)
    return oracle.encode_images(images)


def prefilled(runtime, oracle, prompt, features):
    ours, theirs = (each.prefill(prompt, features, logits=True) for each in (runtime, oracle))
    return ours, theirs


def test_prefill_and_decode(runtime, oracle, prompt, features):
    ours, theirs = prefilled(runtime, oracle, prompt, features)
    assert_steps_close(ours, theirs)
    (tokens, logits), (expected, wanted) = (decode(each, step, 6) for each, step in
                                            ((runtime, ours), (oracle, theirs)))
    assert tokens == expected
    assert_close(logits, wanted)


def test_verified_block_and_rollback(runtime, oracle, prompt, features):
    prefilled(runtime, oracle, prompt, features)
    block = np.array([5, 9, 2, 7, 11])
    assert_steps_close(*(each.extend(block, logits=True) for each in (runtime, oracle)))
    for each in (runtime, oracle):
        each.crop(len(prompt) + 2)
    assert_steps_close(*(each.extend(block[::-1].copy(), logits=True)
                         for each in (runtime, oracle)))


def test_verified_tree_of_which_a_path_is_kept(runtime, oracle, prompt, features):
    prefilled(runtime, oracle, prompt, features)
    visible, depths = tree_visibility([-1, 0, 0, 1, 2, 2, 4])
    tree = np.array([5, 9, 2, 7, 11, 3, 8])
    steps = [each.extend(tree, indices=len(prompt) + depths, visible=visible, logits=True)
             for each in (runtime, oracle)]
    assert_steps_close(*steps)
    for each in (runtime, oracle):
        each.keep(len(prompt), [0, 2, 4, 6])
    assert_steps_close(*(each.extend(np.array([4, 6]), logits=True) for each in (runtime, oracle)))


@pytest.mark.parametrize("kind", sorted(OPSETS))
def test_speculation_is_lossless_on_nano(kind):
    if kind == "trt":
        skip_without_opset_24()
    bench = Bench.load("nano", threads=1, max_new_tokens=16)
    bench = dataclasses.replace(bench, runtime=PortableRuntime(bench.parts.checkpoint, kind,
                                                               bench.runtime._layers))
    found = lossless.check_scenes(bench, 1, 0, (5,), SEED)
    assert found["texts"] > 0 and found["mismatches"] == 0, found["differences"]


@pytest.mark.parametrize("kind", sorted(OPSETS))
@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_graphs_hold_standard_operators_only_and_are_whole(kind, precision, exported_checkpoint,
                                                           oracle):
    graph = portable_decoder(oracle.config, StoredWeights(exported_checkpoint), 8, kind,
                             precision, 64, LAYERS)
    content = graph.serialised()
    model = onnx.load_from_string(content)
    assert {node.domain for node in model.graph.node} == {""}
    assert [entry.version for entry in model.opset_import] == [OPSETS[kind][0]]
    (exported_checkpoint / "checked.onnx").write_bytes(content)
    onnx.checker.check_model(str(exported_checkpoint / "checked.onnx"), full_check=True)
    assert len(content) < 1 << 20
    used = {node.op_type for node in model.graph.node}
    assert ({"Attention", "TensorScatter", "RotaryEmbedding"} <= used) == (kind == "trt")
