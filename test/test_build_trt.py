"""Building one engine: with the double of TensorRT, and with TensorRT-RTX where it is installed.

TensorRT-RTX has TensorRT's parser, builder and names, and builds without a GPU; what it builds is
not run here.
"""

import functools
import hashlib

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("torch", reason="the tiny checkpoint is made with it")
pytest.importorskip("onnxruntime")

from double_programs import PROGRAMS
from reasoning_planner.errors import ModelError
from reasoning_planner.export import build_engines as command
from reasoning_planner.export.build_trt import BuildOptions, build_engine, profile_shapes
from reasoning_planner.runtimes.engine_manifest import EngineManifest
from reasoning_planner.runtimes.manifest import (Graph, Manifest, load_config,
                                                 sha256_of)
from reasoning_planner.runtimes.platforms import load_platforms
from tensorrt_double import DoubleMemory, tensorrt_double

WIDTH = 64
INPUTS = [{"name": "x", "dtype": "float16", "shape": ["n", WIDTH]}]
PROFILES = [{"n": (1, 30, 64)}, {"n": (1, 1, 1)}, {"n": (2, 8, 16)}]


def rtx():
    """(module, what its configuration needs to build for a device that is not here)."""
    module = pytest.importorskip("tensorrt_rtx_bindings", reason="TensorRT-RTX: make test-trt")

    def sm86(config):
        config.num_compute_capabilities = 1
        config.set_compute_capability(module.ComputeCapability.SM86, 0)

    return module, sm86


@pytest.fixture(params=["double", "rtx"])
def library(request):
    return rtx() if request.param == "rtx" else (tensorrt_double(DoubleMemory()), None)


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    """(model, folder): a product with weights that lie by position in a file of the folder."""
    folder = tmp_path_factory.mktemp("graph")
    weights = np.random.default_rng(0).standard_normal((WIDTH, WIDTH)).astype(np.float16)
    (folder / "model.safetensors").write_bytes(bytes(128) + weights.tobytes())
    tensor = onnx.TensorProto(name="w", dims=weights.shape, data_type=onnx.TensorProto.FLOAT16,
                              data_location=onnx.TensorProto.EXTERNAL)
    for key, value in (("location", "model.safetensors"), ("offset", 128),
                       ("length", weights.nbytes)):
        tensor.external_data.add(key=key, value=str(value))
    value = onnx.helper.make_tensor_value_info
    model = onnx.helper.make_model(onnx.helper.make_graph(
        [onnx.helper.make_node("MatMul", ["x", "w"], ["y"])], "product",
        [value("x", onnx.TensorProto.FLOAT16, ["n", WIDTH])],
        [value("y", onnx.TensorProto.FLOAT16, ["n", WIDTH])], [tensor]),
        opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10)
    return model.SerializeToString(), folder


def test_an_engine_is_built_and_its_timings_are_kept(library, graph, tmp_path):
    trt, configure = library
    options = BuildOptions(tmp_path / "timing.cache", 1024, configure=configure)
    for _ in range(2):                          # the second build reads what the first measured
        engine = build_engine(trt, *graph, INPUTS, PROFILES, options)
        assert len(memoryview(engine)) == engine.nbytes > 0
        assert (tmp_path / "timing.cache").exists()


@pytest.mark.parametrize("content, profiles, told", [
    (b"junk", PROFILES, "cannot parse the graph"),
    (None, [{"n": (5, 4, 3)}], "profile|build the engine")])
def test_what_it_refuses_is_one_line(library, graph, content, profiles, told):
    trt, configure = library
    with pytest.raises(ModelError, match=told) as refused:
        build_engine(trt, content or graph[0], graph[1], INPUTS, profiles,
                     BuildOptions(configure=configure))
    assert "\n" not in str(refused.value)


def test_an_input_that_would_be_left_out_is_refused(tmp_path):
    """Attention's number of valid keys: TensorRT's parser passes it over with a warning."""
    trt, configure = rtx()
    half, value = onnx.TensorProto.FLOAT16, onnx.helper.make_tensor_value_info
    inputs = [value(name, half, [1, 2, 8, 64]) for name in "qkv"]
    inputs.append(value("valid", onnx.TensorProto.INT64, [1]))
    model = onnx.helper.make_model(onnx.helper.make_graph(
        [onnx.helper.make_node("Attention", ["q", "k", "v", "", "", "", "valid"], ["y"])],
        "attention", inputs, [value("y", half, [1, 2, 8, 64])]),
        opset_imports=[onnx.helper.make_opsetid("", 24)], ir_version=11)
    with pytest.raises(ModelError, match="left inputs of the graph out.*valid"):
        build_engine(trt, model.SerializeToString(), tmp_path, [], [],
                     BuildOptions(configure=configure))


def test_weights_that_are_not_there(library, graph, tmp_path):
    trt, configure = library
    if configure is None:
        pytest.skip("the double reads weights when it runs")
    with pytest.raises(ModelError, match="cannot parse the graph"):
        build_engine(trt, graph[0], tmp_path, INPUTS, PROFILES, BuildOptions(configure=configure))


# A whole platform

def export_of(platform, checkpoint, out):
    """Stands for the exporter: graphs with the right tensors, which nobody runs here."""
    config, graphs = load_config(checkpoint), {}
    for name, kind in PROGRAMS.items():
        described = kind(checkpoint, platform.graphs, np.float16, platform.slots_of(config),
                         (0, 1, 3)).described()
        values = [[onnx.helper.make_tensor_value_info(
            each["name"], onnx.helper.np_dtype_to_tensor_dtype(np.dtype(each["dtype"])),
            each["shape"]) for each in side] for side in described]
        content = onnx.helper.make_model(onnx.helper.make_graph(
            [], name, *values)).SerializeToString()
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{name}.onnx").write_bytes(content)
        graphs[name] = Graph(f"{name}.onnx", hashlib.sha256(content).hexdigest(), *described)
    files = ("config.json", "tokenizer.json", "model.safetensors")
    return Manifest(1, platform.graphs, config.name, 8,
                    {name: sha256_of(checkpoint / name) for name in files}, graphs)


@pytest.mark.parametrize("name", ["x86", "orin-jp6"])
def test_engines_of_a_platform_and_their_manifest(exported_checkpoint, tmp_path, monkeypatch,
                                                  name):
    memory, platform = DoubleMemory(), load_platforms()[name]
    tools = command.Tools(trt=tensorrt_double(memory))
    monkeypatch.setattr(command, "_export", export_of)
    build = functools.partial(command.build_engines, platform, exported_checkpoint, tmp_path,
                              measure=False, tools=tools)
    built = build()
    assert EngineManifest.load(tmp_path) == built and set(built.engines) == set(PROGRAMS)
    assert built.builder == "tensorrt 10.16.1.11" and built.precision == "float16"
    config, decoder = load_config(exported_checkpoint), built.engines["decoder"]
    assert list(decoder.profiles) == ["prefill", "decode", "verify"]
    assert decoder.profiles["verify"]["n"] == [2, 8, 64] == built.sizes["verify"]
    assert decoder.profiles["decode"]["m"] == [1, 1, 1]
    slots = platform.slots_of(config)
    assert built.slots == slots >= built.capacity + config.flow.num_waypoints
    past = decoder.tensors["past_key_0"]["shape"]
    if platform.graphs == "trt":
        assert past[2] == slots and decoder.aliases["present_value_3"] == "past_value_3"
    else:
        assert past[2] == "P" and decoder.profiles["verify"]["P"] == [slots] * 3
        assert decoder.profiles["prefill"]["P"] == [1, 1, 1] and not decoder.aliases
    assert (tmp_path / "timing.cache").is_file()
    for engine in built.engines.values():
        assert engine.sha256 == sha256_of(tmp_path / engine.file)
    monkeypatch.setattr(command, "_export", lambda *given: pytest.fail("exported again"))
    assert build() == built
    newer = command.Tools(trt=tensorrt_double(memory, "10.16.2"))
    with pytest.raises(pytest.fail.Exception, match="exported again"):
        build(tools=newer)


@pytest.mark.parametrize("name", ["x86", "orin-jp6"])
def test_exported_graphs_build_with_tensorrt_rtx(exported_checkpoint, tmp_path, name):
    trt, configure = rtx()
    try:
        built = command.build_engines(
            load_platforms()[name], exported_checkpoint, tmp_path, measure=False,
            tools=command.Tools(trt=trt, configure=configure))
    except ModelError as error:
        if "exports no others" not in str(error):
            raise
        pytest.skip(str(error))
    assert set(built.engines) == set(PROGRAMS)
    dtypes = [{tensor: described["dtype"] for tensor, described in each.items()}
              for each in (built.engines["decoder"].tensors, decoder_tensors(
                  exported_checkpoint, load_platforms()[name], built.hidden_layers))]
    assert dtypes[0] == dtypes[1]       # what the runtime and its double take for granted


def decoder_tensors(checkpoint, platform, layers):
    inputs, outputs = PROGRAMS["decoder"](
        checkpoint, platform.graphs, np.float16, platform.slots_of(load_config(checkpoint)),
        layers).described()
    return {tensor["name"]: tensor for tensor in (*inputs, *outputs)}


def test_shapes_of_a_profile():
    inputs = [*INPUTS, {"name": "fixed", "shape": [1, 2]}, {"name": "m", "shape": [1, "n", "V"]}]
    assert profile_shapes(inputs, {"n": (1, 2, 3), "V": (4, 5, 6)}) == {
        "x": ((1, WIDTH), (2, WIDTH), (3, WIDTH)), "m": ((1, 1, 4), (1, 2, 5), (1, 3, 6))}
