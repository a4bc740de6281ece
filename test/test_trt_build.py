"""The decoder graphs in float16 parse and build with TensorRT-RTX, which needs no GPU for that.

`make test-trt` installs it and runs these. Nothing that is built is run; the weights are zeros in
a file with a hole in it.
"""

import dataclasses
import math
from collections import Counter

import pytest

pytest.importorskip("onnx")
trt = pytest.importorskip("tensorrt_rtx_bindings", reason="TensorRT-RTX: make test-trt")

from reasoning_planner.export.build_trt import BuildOptions, build_engine
from reasoning_planner.export.portable_decoder import portable_decoder
from reasoning_planner.models.checkpoint_keys import expected_tensors
from reasoning_planner.models.config import preset
from reasoning_planner.training.safetensors_stream import StoredTensor

CAPACITY = 3200
RANGES = {"n": (1, 8, 3100), "V": (1, 1, 2900), "m": (1, 1, 17), "P": (1, CAPACITY, CAPACITY)}
FUSED = ("KV_CACHE_UPDATE", "ROTARY_EMBEDDING", "ATTENTION_INPUT")


class ZeroWeights:
    """float16 zeros for every tensor of a configuration."""

    def __init__(self, config, path):
        self._tensors, end = {}, 0
        for name, shape in expected_tensors(config).items():
            size = 2 * math.prod(shape)
            self._tensors[name] = StoredTensor(name, "F16", shape, path, end, size)
            end += size
        with open(path, "wb") as file:
            file.truncate(end)

    def __getitem__(self, name):
        return self._tensors[name]


def narrowed(name):
    """nano as it is; alpamayo-r1 with one layer of its full width."""
    config = preset(name)
    if name == "nano":
        return config
    return dataclasses.replace(
        config, text=dataclasses.replace(config.text, num_layers=1),
        vision=dataclasses.replace(config.vision,
                                   deepstack_indexes=config.vision.deepstack_indexes[:1]))


class Told(trt.ILogger):
    """Keeps what TensorRT says."""

    def __init__(self):
        trt.ILogger.__init__(self)
        self.messages = []

    def log(self, severity, message):
        self.messages.append(message)


TOLD = Told()       # TensorRT keeps the first logger of a process, whatever is given later


def layers_of(content, weights):
    """Kinds of the layers of the parsed network, and how many of each."""
    log = TOLD
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    assert parser.parse(content, str(weights / "graph.onnx")), parser.get_error(0).desc()
    return Counter(network.get_layer(i).type.name for i in range(network.num_layers))


def sm86(config):
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM86, 0)


@pytest.mark.parametrize("kind", ["trt", "plain"])
@pytest.mark.parametrize("name", ["nano", "alpamayo-r1"])
def test_decoder_builds(name, kind, tmp_path):
    config = narrowed(name)
    graph = portable_decoder(config, ZeroWeights(config, tmp_path / "model.safetensors"), 8, kind,
                             "fp16", CAPACITY, (0,))
    content = graph.serialised()
    layers, count = layers_of(content, tmp_path), config.text.num_layers
    expected = (2 * count, 2 * count, count) if kind == "trt" else (0, 0, 0)
    assert tuple(layers[fused] for fused in FUSED) == expected
    engine = build_engine(trt, content, tmp_path, graph.signature()[0], [RANGES],
                          BuildOptions(configure=sm86))
    assert engine.nbytes > 0
    assert not [message for message in TOLD.messages if "Unused Input" in message]
