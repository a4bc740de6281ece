"""Export: small graphs that point into the checkpoint, the same every time, or a clear refusal."""

import argparse
import hashlib
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("torch")

from reasoning_planner.errors import ModelError
from reasoning_planner.export import to_onnx
from reasoning_planner.export.decoder_graph import decoder_graph
from reasoning_planner.export.expert_graph import expert_graph
from reasoning_planner.export.graph_builder import StoredWeights
from reasoning_planner.export.vision_graph import vision_graph
from reasoning_planner.models.checkpoint_keys import expected_tensors
from reasoning_planner.models.config import preset
from reasoning_planner.runtimes.manifest import Manifest, load_config
from reasoning_planner.training.safetensors_stream import StoredTensor, read_header
from tiny_checkpoint import tiny_config, write_checkpoint

GRAPHS = ("vision", "decoder", "expert")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny", tiny_config())


@pytest.fixture(scope="module")
def exported(checkpoint, tmp_path_factory):
    out = tmp_path_factory.mktemp("graphs")
    to_onnx.export(checkpoint, out)
    return out


def initialisers(path):
    return onnx.load(path, load_external_data=False).graph.initializer


def test_every_weight_is_read_where_the_checkpoint_has_it(checkpoint, exported):
    stored = read_header(checkpoint / "model.safetensors")
    seen = set()
    for name in GRAPHS:
        for tensor in initialisers(exported / f"{name}.onnx"):
            if tensor.data_location != onnx.TensorProto.EXTERNAL:
                continue
            entry = {item.key: item.value for item in tensor.external_data}
            expected = stored[tensor.name]
            assert entry == {"location": "model.safetensors", "offset": str(expected.begin),
                             "length": str(expected.num_bytes)}
            assert tuple(tensor.dims) == expected.shape
            assert tensor.data_type == onnx.TensorProto.FLOAT16
            seen.add(tensor.name)
    assert seen == set(expected_tensors(load_config(checkpoint)))


def test_graphs_hold_no_weights_of_their_own(exported):
    for name in GRAPHS:
        inline = sum(len(tensor.raw_data) for tensor in initialisers(exported / f"{name}.onnx"))
        assert inline < 10_000, name


def test_the_same_checkpoint_gives_the_same_bytes(checkpoint, exported, tmp_path):
    to_onnx.export(checkpoint, tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["decoder.onnx", "expert.onnx", "ort_manifest.json", "vision.onnx"]
    for name in names:
        content = (tmp_path / name).read_bytes()
        assert content == (exported / name).read_bytes(), name
        assert str(tmp_path).encode() not in content and b"/home" not in content


def test_the_manifest_is_what_was_written(checkpoint, exported):
    manifest = Manifest.load(exported)
    for name in GRAPHS:
        graph = manifest.graphs[name]
        content = (exported / graph.file).read_bytes()
        assert hashlib.sha256(content).hexdigest() == graph.sha256
        model = onnx.load_from_string(content)
        assert [v.name for v in model.graph.input] == [t["name"] for t in graph.inputs]
        assert [v.name for v in model.graph.output] == [t["name"] for t in graph.outputs]
    assert {"name": "noise", "dtype": "float32", "shape": [1, 64, 2]} in (
        manifest.graphs["expert"].inputs)
    assert set(manifest.checkpoint) == {"config.json", "tokenizer.json", "model.safetensors"}


class ImaginedWeights:
    """Weights of a model too large to hold, in files that do not exist."""

    def __init__(self, config, path):
        self._shapes, self._path = expected_tensors(config), path

    def __getitem__(self, name):
        shape = self._shapes[name]
        return StoredTensor(name, "BF16", shape, self._path, 0, 2 * math.prod(shape))


@pytest.mark.parametrize("name", ["alpamayo-r1", "nano"])
def test_graphs_are_below_a_megabyte_whatever_the_model(name, tmp_path):
    config = preset(name)
    weights = ImaginedWeights(config, tmp_path / "model-00001.safetensors")
    for graph in (decoder_graph(config, weights, 8), vision_graph(config, weights),
                  expert_graph(config, weights)):
        content = graph.serialised()
        assert len(content) < to_onnx.MAX_GRAPH_BYTES
        onnx.load_from_string(content)


def test_the_command_says_what_it_wrote(checkpoint, tmp_path, capsys):
    parser = argparse.ArgumentParser()
    to_onnx.add_arguments(parser)
    args = parser.parse_args(["--checkpoint", str(checkpoint), "--out", str(tmp_path / "new")])
    assert to_onnx.run(args) == 0
    assert "decoder.onnx" in capsys.readouterr().err
    assert not [path for path in (tmp_path / "new").iterdir() if path.name.startswith(".")]


def test_export_needs_no_torch(checkpoint, exported, tmp_path):
    code = ("import sys; sys.modules['torch'] = None\n"
            "from pathlib import Path\n"
            "from reasoning_planner.export.to_onnx import export\n"
            "export(Path(sys.argv[1]), Path(sys.argv[2]))")
    done = subprocess.run([sys.executable, "-c", code, str(checkpoint), str(tmp_path)],
                          cwd=Path(__file__).resolve().parent.parent, capture_output=True,
                          text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    for name in GRAPHS:
        content = (tmp_path / f"{name}.onnx").read_bytes()
        assert content == (exported / f"{name}.onnx").read_bytes()


def broken(checkpoint, folder, change):
    """A copy of the checkpoint whose header was changed."""
    shutil.copytree(checkpoint, folder)
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:8 + size])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size:])
    return folder


@pytest.mark.parametrize("change, complaint", [
    (lambda header: header.pop("expert.norm.weight"), "expert.norm.weight"),
    (lambda header: header["expert.norm.weight"].update(shape=[4, 10]), "expert.norm.weight"),
    (lambda header: header["expert.norm.weight"].update(dtype="U16"), "U16")])
def test_a_checkpoint_of_another_model_is_refused(checkpoint, tmp_path, change, complaint):
    folder = broken(checkpoint, tmp_path / "broken", change)
    with pytest.raises(ModelError, match=complaint) as refused:
        to_onnx.export(folder)
    assert "\n" not in str(refused.value)
    assert not (folder / "decoder.onnx").exists()


def test_a_directory_without_weights_is_refused(checkpoint, tmp_path):
    shutil.copy(checkpoint / "config.json", tmp_path)
    with pytest.raises(ModelError, match="safetensors"):
        to_onnx.export(tmp_path)
    with pytest.raises(ModelError, match="config.json"):
        to_onnx.export(tmp_path / "nowhere")
    with pytest.raises(ModelError, match="top_k"):
        to_onnx.export(checkpoint, tmp_path, top_k=0)


def test_weights_in_shards_are_found(checkpoint, tmp_path):
    from safetensors.numpy import load_file, save_file
    weights = load_file(checkpoint / "model.safetensors")
    names = sorted(weights)
    for i in range(2):
        save_file({name: weights[name] for name in names[i::2]},
                  tmp_path / f"model-{i + 1:05d}-of-00002.safetensors")
    found = StoredWeights(tmp_path)
    found.require({name: weights[name].shape for name in names})
    tensor = found[names[1]]
    raw = b"".join(tensor.chunks())
    assert np.array_equal(np.frombuffer(raw, "<f2").reshape(tensor.shape), weights[names[1]])
