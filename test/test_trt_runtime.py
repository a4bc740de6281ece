"""The TensorRT runtime's whole call sequence against a double, since no GPU is here.

The double (tensorrt_double.py) keeps TensorRT's names and rules; its engines are the PyTorch
oracle, so tokens and numbers are compared for real. Tests marked `gpu` are for real engines.
"""

import dataclasses
import inspect
import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import tensorrt_double
from double_programs import write_engines
from reasoning_planner.config import PlannerConfig
from reasoning_planner.datatypes import (Deadline, PlanStatus, Reason,
                                         TokenOrigin)
from reasoning_planner.errors import MissingDependencyError, ModelError
from reasoning_planner.export.build_engines import Tools, build_engines
from reasoning_planner.planner import Planner
from reasoning_planner.runtimes.base import tree_visibility
from reasoning_planner.runtimes.device_memory import create_device_memory
from reasoning_planner.runtimes.engine_manifest import EngineManifest
from reasoning_planner.runtimes.factory import create_runtime
from reasoning_planner.runtimes.platforms import SizeRange, load_platforms
from reasoning_planner.runtimes.trt_runtime import TrtRuntime
from reasoning_planner.speculative.token_tree import chain
from reasoning_planner.tokenization.prompt import build_prompt
from reasoning_planner.tokenization.text_tokenizer import TextTokenizer
from reasoning_planner.vla import VlaConfig, VlaModel
from tensorrt_double import DeviceFault, DoubleMemory, tensorrt_double as double_of
from test_vla import observation
from tiny_checkpoint import tiny_config, write_checkpoint

LAYERS, NUM_IMAGES, TOLERANCE = (0, 1, 3), 16, 1e-4
KINDS = {"trt": "x86", "plain": "orin-jp6"}
API = json.loads((Path(__file__).parent / "data" / "tensorrt_api.json").read_text())
LATER = {"get_aliased_input_tensor"}        # than 10.13: asked for with hasattr

pytestmark = pytest.mark.usefixtures("single_thread")


@pytest.fixture(scope="module")
def checkpoint(exported_checkpoint):
    return exported_checkpoint


@pytest.fixture(scope="module", params=KINDS)
def engines(request, checkpoint, tmp_path_factory):
    return written(checkpoint, tmp_path_factory.mktemp("engines"), request.param, "float32")


def written(checkpoint, out, kind, precision):
    write_engines(checkpoint, out, dataclasses.replace(load_platforms()[KINDS[kind]],
                                                       precision=precision))
    return out


def load(checkpoint, engines, **arguments):
    memory = arguments.pop("memory", None) or DoubleMemory()
    return TrtRuntime.load(checkpoint, engines, memory=memory, trt=double_of(memory),
                           **{"hidden_layers": LAYERS, **arguments})


@pytest.fixture(scope="module")
def trt(checkpoint, engines):
    return load(checkpoint, engines)


@pytest.fixture(scope="module")
def ort(checkpoint):
    return create_runtime("ort", checkpoint, threads=1, hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def prompt(checkpoint, ort):
    tokenizer = TextTokenizer.load(checkpoint / "tokenizer.json")
    history = np.random.default_rng(5).integers(0, 1000, 48) + tokenizer.special.first_history_bin
    grids = np.tile([1, *ort.config.vision.grid], (NUM_IMAGES, 1))
    return build_prompt(tokenizer, history, grids, "alpamayo-r1").input_ids


@pytest.fixture(scope="module")
def images():
    return np.random.default_rng(3).integers(0, 256, (NUM_IMAGES, 64, 128, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def features(trt, images):
    return trt.encode_images(images)


@pytest.fixture(scope="module")
def ort_features(ort, images):
    return ort.encode_images(images)


def tolerance(runtime):
    return TOLERANCE if runtime._decoder.dtype == np.float32 else 0.1


def assert_close(given, expected, most):
    finite = np.isfinite(expected)
    assert np.array_equal(finite, np.isfinite(given))
    assert np.abs(given[finite] - expected[finite]).max() < most


def assert_same(given, expected, most):
    if most <= TOLERANCE:
        assert np.array_equal(given.token_ids, expected.token_ids)
        assert np.array_equal(given.top_ids, expected.top_ids)
    assert_close(given.logits, expected.logits, most)
    for mine, theirs in zip(given.hidden_states, expected.hidden_states, strict=True):
        assert mine.dtype == np.float32 and mine.shape == theirs.shape
        assert_close(mine, theirs, most)


# The sequence, against ONNX Runtime

def test_the_sequence_of_a_cycle_agrees(trt, ort, prompt, features, ort_features):
    a_cycle_agrees(trt, ort, prompt, features, ort_features)


@pytest.mark.parametrize("kind", KINDS)
def test_the_sequence_agrees_in_half_precision(kind, checkpoint, ort, prompt, images,
                                               ort_features, tmp_path):
    runtime = load(checkpoint, written(checkpoint, tmp_path, kind, "float16"))
    assert runtime._decoder.dtype == np.float16
    a_cycle_agrees(runtime, ort, prompt, runtime.encode_images(images), ort_features)


def a_cycle_agrees(trt, ort, prompt, features, theirs):
    """Encode, prefill, decode, verify, roll back, a tree, its path kept, act: number by number."""
    most = tolerance(trt)
    assert features.shape == theirs.shape
    assert_close(np.asarray(features[:2]), theirs[:2], most)
    assert_same(trt.prefill(prompt, features, logits=True),
                ort.prefill(prompt, theirs, logits=True), most)
    tokens = np.array([7, 11, 12, 13, 14])
    for count in (1, 1, 1, 4, 4, 4, 5):          # captured at the second, replayed at the third
        assert_same(*(r.extend(tokens[:count], logits=True) for r in (trt, ort)), most)
    visible, depths = tree_visibility([-1, 0, 0, 1, 2, 4])
    start = trt.length
    for runtime in (trt, ort):
        runtime.crop(start - 2)                  # a rejected draft
        runtime.extend(np.arange(21, 27), indices=start - 2 + depths, visible=visible)
        runtime.keep(start - 2, [0, 2, 4])
        assert runtime.length == start + 1
    assert_same(*(r.extend(tokens[:1], logits=True) for r in (trt, ort)), most)
    noise = np.random.default_rng(1).standard_normal((64, 2), np.float32)
    for steps in (None, 4, None, None):
        assert_close(trt.act(noise, steps), ort.act(noise, steps), 10 * most)
    assert_same(*(r.extend(tokens[1:2], logits=True) for r in (trt, ort)), most)


def test_blocks_verify_as_decoding_does(trt, prompt, features):
    step, tokens = trt.prefill(prompt, features), []
    for _ in range(6):
        tokens.append(int(step.token_ids[-1]))
        step = trt.extend(np.array(tokens[-1:]))
    trt.crop(len(prompt))
    assert list(trt.extend(np.array(tokens[:5])).token_ids) == tokens[1:]


def test_features_as_numbers_read_the_same(trt, prompt, features):
    on_device = trt.prefill(prompt, np.stack(list(features))).top_log_probs
    assert np.array_equal(trt.prefill(prompt, np.asarray(features)).top_log_probs, on_device)


def test_graphs_and_none_compute_the_same(checkpoint, engines, prompt, features):
    steps = []
    for memory in (DoubleMemory(), DoubleMemory(has_graphs=False)):
        runtime = load(checkpoint, engines, memory=memory)
        runtime.prefill(prompt, np.asarray(features))
        steps.append([runtime.extend(np.array([7])).top_log_probs for _ in range(4)])
        assert ("graph" in memory.log) == memory.has_graphs
    assert np.array_equal(*map(np.array, steps))


@pytest.mark.parametrize("kind", KINDS)
def test_exported_graphs_go_through_the_same_cycle(kind, checkpoint, prompt, images, ort_features,
                                                   tmp_path):
    """Graphs of the exporter, built and run by the double, which hands them to ONNX Runtime."""
    memory = DoubleMemory()
    platform = dataclasses.replace(load_platforms()[KINDS[kind]], precision="float32")
    try:
        build_engines(platform, checkpoint, tmp_path, measure=False,
                      tools=Tools(trt=double_of(memory)))
    except ModelError as error:
        if "exports no others" not in str(error):
            raise
        pytest.skip(str(error))
    runtime = TrtRuntime.load(checkpoint, tmp_path, memory=memory, trt=double_of(memory))
    a_cycle_agrees(runtime, create_runtime("ort", checkpoint, threads=1), prompt,
                   runtime.encode_images(images), ort_features)


# What is queued

def test_a_decoding_step_is_one_graph_and_small_copies(checkpoint, engines, prompt, features):
    memory = DoubleMemory()
    runtime = load(checkpoint, engines, memory=memory, hidden_layers=())
    runtime.prefill(prompt, np.asarray(features))
    kept = ["copy"] if runtime._decoder.is_plain and runtime._decoder.block(1)._new_rows.is_even \
        else (["copy"] * 8 if runtime._decoder.is_plain else [])
    for expected in (["upload", "pass", "download"], ["graph"], ["graph"]):
        del memory.log[:]
        down = memory.downloaded_bytes
        runtime.extend(np.array([7]))
        assert memory.log == expected + kept
        assert memory.downloaded_bytes - down <= 3 * 256
    runtime.extend(np.array([7]), logits=True)
    assert memory.log[-1] == "download"


def test_features_and_cache_stay_on_the_device(checkpoint, engines, prompt, images):
    memory = DoubleMemory()
    runtime = load(checkpoint, engines, memory=memory, hidden_layers=())
    features = np.stack(list(runtime.encode_images(images)))
    runtime.prefill(prompt, features)
    down, up = memory.downloaded_bytes, memory.uploaded_bytes
    runtime.prefill(prompt, features)
    assert memory.downloaded_bytes - down <= 3 * 256
    assert memory.uploaded_bytes - up < 40_000


def test_the_cache_is_one_memory_and_never_moves(trt, prompt, features):
    trt.prefill(prompt, features)
    block = trt._decoder.block(2)
    addresses = trt._decoder.cache.addresses
    for _ in range(3):
        trt.extend(np.array([3, 4]))
        for name, address in addresses.items():
            assert block._pass._context.get_tensor_address(f"past_{name}") == address
            if not trt._decoder.is_plain:
                assert block._pass._context.get_tensor_address(f"present_{name}") == address


def test_a_pass_gone_wrong_does_not_reach_the_next_prompt(trt, prompt, features):
    clean = trt.prefill(prompt, features).top_log_probs
    trt._decoder.cache._buffer.owner.view(trt._decoder.dtype)[:] = np.nan
    assert not np.isfinite(trt.extend(np.array([7])).top_log_probs).all()
    assert np.array_equal(trt.prefill(prompt, features).top_log_probs, clean)
    assert np.isfinite(trt.extend(np.array([7])).top_log_probs).all()


# Behind the planner

def planned(runtime, checkpoint, proposer=None, max_new_tokens=8):
    model = VlaModel(runtime, TextTokenizer.load(checkpoint / "tokenizer.json"),
                     VlaConfig(max_new_tokens=max_new_tokens, noise_scale=0.0), proposer)
    return Planner(PlannerConfig(), model).plan(observation(), Deadline.never())


def test_a_plan_is_that_of_onnx_runtime(checkpoint, engines, ort):
    runtime = load(checkpoint, engines)
    plans = [planned(each, checkpoint) for each in (runtime, ort)]
    if tolerance(runtime) == TOLERANCE:
        assert plans[0].reasoning.token_ids == plans[1].reasoning.token_ids != ()
    assert plans[0].planner == plans[1].planner == "tiny"


@pytest.mark.parametrize("name", ["ort", "trt"])
def test_a_prompt_too_long_is_a_typed_result(checkpoint, engines, name):
    runtime = (create_runtime("ort", checkpoint, threads=1, capacity=192) if name == "ort"
               else load(checkpoint, engines, capacity=192))
    plan = planned(runtime, checkpoint)
    failed, = [reason for reason in plan.reasons if reason.reason == Reason.MODEL_FAILED]
    assert "prompt: given" in failed.detail and "cache of 192" in failed.detail
    assert plan.planner == "kinematic" and plan.status != PlanStatus.OK


# Refusals

def test_what_does_not_fit_is_refused(trt, prompt, features):
    with pytest.raises(ModelError, match=f"cache of {trt.capacity}"):
        trt.prefill(np.zeros(trt.capacity + 1, np.int64), features)
    trt.prefill(prompt, features)
    with pytest.raises(ModelError, match="expected 2 to 64: the verify profile"):
        trt.extend(np.zeros(65, np.int64))
    with pytest.raises(ModelError, match="image"):
        trt.prefill(prompt, features[:-1])
    with pytest.raises(ModelError, match="images: given"):
        trt.encode_images(np.zeros((1, 8, 8, 3), np.uint8))


def test_a_profile_too_small_is_named(checkpoint, tmp_path, prompt, features):
    platform = load_platforms()["x86"]
    profiles = dataclasses.replace(platform.profiles, prefill=SizeRange(1, 200, 200))
    write_engines(checkpoint, tmp_path, dataclasses.replace(platform, profiles=profiles))
    with pytest.raises(ModelError, match="expected 1 to 200: the prefill profile"):
        load(checkpoint, tmp_path).prefill(prompt, np.asarray(features))


class Guess:
    """Drafts fifteen tokens whatever came before."""

    name = "guess"

    def reset(self, prompt):
        pass

    def propose(self, context):
        return chain([7] * 15, TokenOrigin.ROUTINE)

    def observe(self, commit):
        pass


def test_blocks_above_the_verify_profile_are_a_typed_result(checkpoint, tmp_path):
    platform = load_platforms()["x86"]
    profiles = dataclasses.replace(platform.profiles, verify=SizeRange(2, 8, 8))
    write_engines(checkpoint, tmp_path, dataclasses.replace(platform, profiles=profiles))
    plan = planned(load(checkpoint, tmp_path), checkpoint, Guess(), max_new_tokens=20)
    failed, = [reason for reason in plan.reasons if reason.reason == Reason.MODEL_FAILED]
    assert "block: given 16 tokens, expected 2 to 8: the verify profile" in failed.detail
    assert plan.planner == "kinematic"


def test_more_than_the_engines_have(checkpoint, engines):
    with pytest.raises(ModelError, match="capacity: given 9999 tokens, expected at most"):
        load(checkpoint, engines, capacity=9999)
    with pytest.raises(ModelError, match="hidden_layers: given .2,., expected some of"):
        load(checkpoint, engines, hidden_layers=(2,))


def changed(checkpoint, tmp_path, **changes):
    write_engines(checkpoint, tmp_path, load_platforms()["x86"])
    dataclasses.replace(EngineManifest.load(tmp_path), **changes).save(tmp_path)
    return tmp_path


def test_stale_and_foreign_engines(checkpoint, tmp_path):
    folder = changed(checkpoint, tmp_path, builder="tensorrt 10.3.0")
    with pytest.raises(ModelError, match="built by tensorrt 10.3.0, expected tensorrt 10.16.1"):
        load(checkpoint, folder)
    changed(checkpoint, tmp_path)
    other = write_checkpoint(tmp_path / "other", tiny_config(), seed=1)
    with pytest.raises(ModelError, match="engines of another checkpoint"):
        load(other, folder)
    (other / "model.safetensors").unlink()      # a vehicle needs no weights beside its engines
    assert load(other, folder).capacity == EngineManifest.load(folder).capacity
    with open(folder / "decoder.engine", "ab") as file:
        file.write(b"x")
    with pytest.raises(ModelError, match="decoder.engine: given sha256"):
        load(checkpoint, folder)
    (folder / "decoder.engine").unlink()
    with pytest.raises(ModelError, match="no such file, expected an engine"):
        load(checkpoint, folder)


@pytest.mark.parametrize("change, told", [
    ({"aliases": {}}, "given aliased tensors"),
    ({"outputs": [{"name": "token_ids", "dtype": "int64", "shape": ["m"]}]},
     "last_hidden, logits, .* are not as its manifest says")])
def test_engines_that_are_not_what_their_manifest_says(checkpoint, tmp_path, change, told):
    write_engines(checkpoint, tmp_path, load_platforms()["x86"])
    manifest = EngineManifest.load(tmp_path)
    manifest.engines["decoder"] = dataclasses.replace(manifest.engines["decoder"], **change)
    manifest.save(tmp_path)
    with pytest.raises(ModelError, match=told):
        load(checkpoint, tmp_path)


def test_a_tensorrt_that_knows_no_aliases(checkpoint, engines, prompt, features, monkeypatch):
    """Before 10.15: the kind of the graphs says where a cache is written."""
    expected = load(checkpoint, engines).prefill(prompt, np.asarray(features))
    monkeypatch.delattr(tensorrt_double.ICudaEngine, "get_aliased_input_tensor")
    given = load(checkpoint, engines).prefill(prompt, np.asarray(features))
    assert np.array_equal(given.top_log_probs, expected.top_log_probs)


def test_without_tensorrt_there_is_no_other_runtime(checkpoint, engines):
    with pytest.raises(MissingDependencyError, match="runtime trt: tensorrt is not installed"):
        create_runtime("trt", checkpoint, graphs=engines)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_every_reason_is_told():
    with pytest.raises(MissingDependencyError, match="torch:.*cuda-python:.*pycuda:"):
        create_device_memory()


# The double

@pytest.mark.parametrize("version", ["tensorrt-10.13", "tensorrt-rtx-1.7.1"])
def test_the_double_has_no_name_that_tensorrt_has_not(version):
    for kind in tensorrt_double.DOUBLED:
        names = {name for name, _ in inspect.getmembers(kind) if not name.startswith("_")}
        if kind is tensorrt_double.IHostMemory:
            names = {"nbytes"}
        if issubclass(kind, tensorrt_double.enum.Enum):
            names = set(kind.__members__)
        if version == "tensorrt-10.13":
            names -= LATER
        assert names <= set(API[version][kind.__name__].split()), kind.__name__


def test_the_double_finds_faults(checkpoint, engines, prompt, features):
    runtime = load(checkpoint, engines)
    runtime.prefill(prompt, np.asarray(features))
    for _ in range(2):
        runtime.extend(np.array([7]))
    context = runtime._decoder.block(1)._pass._context
    context.set_tensor_address("input_ids", context.get_tensor_address("input_ids"))
    with pytest.raises(DeviceFault, match="changed after"):
        runtime.extend(np.array([7]))
    with pytest.raises(DeviceFault, match="not allocated"):
        DoubleMemory().at(256, 4)


# Real engines

@pytest.fixture(scope="module", params=KINDS)
def real_engines(request, checkpoint, tmp_path_factory):
    """Built here, for the device that is here."""
    pytest.importorskip("tensorrt", reason="TensorRT, which comes with JetPack or the GPU's PC")
    try:
        create_device_memory()
    except MissingDependencyError as missing:
        pytest.skip(str(missing))
    platform = dataclasses.replace(load_platforms()["x86"], graphs=request.param)
    out = tmp_path_factory.mktemp("real") / request.param
    build_engines(platform, checkpoint, out)
    return out


@pytest.mark.gpu
@pytest.mark.parametrize("library", ["torch", "cuda-python", "pycuda"])
def test_real_engines_agree_with_onnx_runtime(checkpoint, real_engines, prompt, images,
                                              ort_features, library):
    try:
        memory = create_device_memory(library)
    except MissingDependencyError as missing:
        pytest.skip(str(missing))
    plain_ort = create_runtime("ort", checkpoint, threads=1)
    runtime = TrtRuntime.load(checkpoint, real_engines, memory=memory)
    a_cycle_agrees(runtime, plain_ort, prompt, runtime.encode_images(images), ort_features)


@pytest.mark.gpu
def test_real_engines_have_a_curve_of_costs(real_engines):
    costs = EngineManifest.load(real_engines).costs
    assert costs["runtime"] == "trt" and min(costs["cost_ms"]) > 0.0
