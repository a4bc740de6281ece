"""Importing a checkpoint: synthetic ones of the real layout, whole, damaged and large."""

import argparse
import dataclasses
import hashlib
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from reasoning_planner.errors import DataError
from reasoning_planner.models import config as model_config
from reasoning_planner.models.checkpoint_keys import constant_tensors, expected_tensors
from reasoning_planner.tokenization.prompt import FIXED_TEXTS
from reasoning_planner.tokenization.text_tokenizer import train_text_tokenizer
from reasoning_planner.training import import_checkpoint as command
from reasoning_planner.training import safetensors_stream
from reasoning_planner.training.import_checkpoint import CheckpointMismatch, import_checkpoint

CONSTANTS = {"accel_mean": 0.02902694707164455, "accel_std": 0.6810426736454882,
             "curvature_mean": 0.0002692167976330542, "curvature_std": 0.026148280660833106}
BASE_SIZE = 300
Q_NORM = "expert.layers.1.self_attn.q_norm.weight"
TRUNK = "action_in_proj.encoder.trunk.3.weight"


def tiny_config(hidden=32, num_layers=2, intermediate=64):
    nano = model_config.preset("nano").with_tokens(
        model_config.TokenConfig.extending(BASE_SIZE))
    text = dataclasses.replace(nano.text, hidden_size=hidden, num_layers=num_layers,
                               intermediate_size=intermediate)
    vision = dataclasses.replace(nano.vision, depth=2, hidden_size=16, num_heads=2,
                                 intermediate_size=24, out_hidden_size=hidden,
                                 deepstack_indexes=(0, 1))
    expert = dataclasses.replace(nano.expert, hidden_size=24, intermediate_size=40,
                                 projector_hidden_size=20, max_fourier_frequency=100.0)
    return dataclasses.replace(nano, name="tiny", text=text, vision=vision, expert=expert)


CONFIG = tiny_config()


def bf16(values):
    """float32 -> bfloat16 by cutting, as bytes."""
    return (np.asarray(values, dtype=np.float32).view(np.uint32) >> 16).astype("<u2").tobytes()


def entry(shape, dtype="BF16", data=None, seed=0):
    if data is None:
        data = bf16(np.random.default_rng(seed).standard_normal(math.prod(shape)))
    return {"dtype": dtype, "shape": list(shape), "data": data}


def learned(config):
    return {name: entry(shape, seed=seed)
            for seed, (name, shape) in enumerate(expected_tensors(config).items())}


def float32_entry(values, shape):
    return entry(shape, "F32", np.asarray(values, dtype="<f4").tobytes())


def alpamayo_1_constants(config=CONFIG):
    frequencies = np.logspace(0, 2, config.expert.num_fourier_frequencies)
    return {name: float32_entry(frequencies if name.endswith("freqs")
                                else CONSTANTS[name.rsplit(".")[-1]], shape)
            for name, shape in constant_tensors(config).items()}


def write_file(path, tensors):
    """A safetensors file, written independently of the code under test."""
    header, position = {"__metadata__": {"format": "pt"}}, 0
    for name, given in tensors.items():
        offsets = [position, position := position + len(given["data"])]
        header[name] = {"dtype": given["dtype"], "shape": given["shape"], "data_offsets": offsets}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text
                     + b"".join(given["data"] for given in tensors.values()))


def read_file(path):
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    assert start % 8 == 0
    header = json.loads(raw[8:start])
    assert header.pop("__metadata__") == {"format": "pt"}
    return {name: {"dtype": e["dtype"], "shape": e["shape"],
                   "data": raw[start + e["data_offsets"][0]:start + e["data_offsets"][1]]}
            for name, e in header.items()}


def write(directory, tensors, num_shards=3, described=None):
    """A checkpoint as the publisher lays it out: shards, an index, config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    names = sorted(tensors)
    weight_map = {}
    for i in range(num_shards):
        shard = f"model-{i + 1:05d}-of-{num_shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[i::num_shards]}
        write_file(directory / shard, part)
        weight_map |= dict.fromkeys(part, shard)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    described = {"model_type": "alpamayo1_5"} if described is None else described
    (directory / "config.json").write_text(json.dumps(described))
    return directory


def imported(source, out, **kwargs):
    return import_checkpoint(source, out, CONFIG, **kwargs)


def read_back(out):
    tensors = {}
    for path in sorted(out.glob("*.safetensors")):
        tensors |= read_file(path)
    return tensors


def assert_nothing_left(folder):
    assert [path.name for path in folder.iterdir() if path.name != "in"] == []


def test_keys_are_those_of_the_target():
    torch = pytest.importorskip("torch")
    from reasoning_planner.models.target import Target
    for config in (CONFIG, model_config.preset("nano"), model_config.preset("alpamayo-1.5")):
        with torch.device("meta"):
            state = Target(config).state_dict()
        assert expected_tensors(config) == {k: tuple(v.shape) for k, v in state.items()}


def test_counts_of_the_released_model():
    config = model_config.preset("alpamayo-r1")
    expected = expected_tensors(config)
    assert sum(map(math.prod, expected.values())) == 11_078_526_194
    names = [*expected, *constant_tensors(config)]
    assert sum(name.startswith(("expert", "action")) for name in names) == 416


@pytest.mark.parametrize("chunk_bytes", [64, 4 << 20])
def test_every_tensor_arrives_unchanged(tmp_path, monkeypatch, chunk_bytes):
    monkeypatch.setattr(safetensors_stream, "CHUNK_BYTES", chunk_bytes)
    tensors = learned(CONFIG)
    report = imported(write(tmp_path / "in", tensors), tmp_path / "out")
    found = read_back(tmp_path / "out")
    assert list(found) == list(expected_tensors(CONFIG))
    for name, given in tensors.items():
        assert found[name] == given, name
    assert report.num_tensors == len(tensors)
    assert report.num_bytes == sum(len(given["data"]) for given in tensors.values())


def test_manifest_has_the_hash_of_every_file_and_the_place_of_every_tensor(tmp_path):
    report = imported(write(tmp_path / "in", learned(CONFIG)), tmp_path / "out",
                      max_shard_bytes=200_000)
    out = tmp_path / "out"
    manifest = json.loads((out / "manifest.json").read_text())
    names = {path.name for path in out.iterdir()}
    assert names == {*manifest["files"], "manifest.json"}
    assert len(list(out.glob("model-*.safetensors"))) > 2
    for name, described in manifest["files"].items():
        raw = (out / name).read_bytes()
        assert described == {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
        assert report.files[name] == described["sha256"]
    for tensor, name in manifest["tensors"].items():
        assert tensor in read_file(out / name)
    assert manifest["action_constants"] == CONSTANTS
    stored = json.loads((out / "config.json").read_text())
    assert model_config.ModelConfig.from_dict(stored) == CONFIG


def test_weights_of_the_target_survive_the_round_trip(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file, save_file

    from reasoning_planner.models.target import Target
    target = Target(CONFIG).to(torch.bfloat16)
    given = target.state_dict()
    (tmp_path / "in").mkdir()
    save_file(given, tmp_path / "in" / "model.safetensors")
    (tmp_path / "in" / "config.json").write_text("{}")
    imported(tmp_path / "in", tmp_path / "out", max_shard_bytes=300_000)
    weights = {}
    for path in (tmp_path / "out").glob("*.safetensors"):
        weights |= load_file(path)
    target.load_state_dict(weights, strict=True)
    assert all(torch.equal(weights[name], given[name]) for name in given)


def test_alpamayo_1s_constants_are_accepted_and_left_out(tmp_path):
    tensors = learned(CONFIG) | alpamayo_1_constants()
    described = {"model_type": "alpamayo_r1", "action_space_cfg": CONSTANTS}
    report = imported(write(tmp_path / "in", tensors, described=described), tmp_path / "out")
    assert set(read_back(tmp_path / "out")) == set(expected_tensors(CONFIG))
    assert len(report.notes) == 1 and "pass --tokenizer" in report.notes[0]


def test_constants_rounded_to_bfloat16_are_no_difference(tmp_path):
    rounded = {name: entry((1,), data=bf16(CONSTANTS[name.split(".")[1]]))
               for name in constant_tensors(CONFIG) if name.startswith("action_space.")}
    report = imported(write(tmp_path / "in", learned(CONFIG) | rounded), tmp_path / "out")
    assert [note for note in report.notes if "action_space" in note] == []


def test_other_constants_are_reported_and_not_used(tmp_path):
    other = {"action_space.accel_std": float32_entry(1.0, ()),
             "action_in_proj.sinus.1.freqs": float32_entry(np.arange(10), (1, 10))}
    described = {"model_type": "alpamayo1_5", "action_space_cfg": {"curvature_std": 0.2}}
    source = write(tmp_path / "in", learned(CONFIG) | other, described=described)
    notes = imported(source, tmp_path / "out").notes
    assert ("action_space.accel_std: the checkpoint has [1.0], "
            "[0.6810426736454882] is used") in notes
    assert any(note.startswith("action_in_proj.sinus.1.freqs: ") for note in notes)
    assert any(note.startswith("config.json action_space_cfg.curvature_std: ") for note in notes)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["action_constants"] == CONSTANTS and manifest["notes"] == notes


def _missing(tensors):
    del tensors[Q_NORM]


def _unexpected(tensors):
    tensors["vlm.model.extra.weight"] = entry((3,))


def _wrong_shape(tensors):
    tensors[TRUNK] = entry((20, 21))


def _wrong_dtype(tensors):
    tensors[Q_NORM] = float32_entry(np.ones(32), (32,))


def _huge_constant(tensors):
    tensors["action_space.accel_std"] = entry((64,))


def _not_finite(tensors):
    tensors[TRUNK] = entry((20, 20), data=bf16([1.0] * 399 + [np.nan]))


@pytest.mark.parametrize("damage, line", [
    (_missing, f"{Q_NORM}: missing, expected BF16 (32,)"),
    (_unexpected, "vlm.model.extra.weight: unexpected, given BF16 (3,)"),
    (_wrong_shape, f"{TRUNK}: given shape (20, 21), expected (20, 20)"),
    (_wrong_dtype, f"{Q_NORM}: given dtype F32, expected BF16"),
    (_huge_constant, "action_space.accel_std: given BF16 (64,), expected floating-point ()"),
    (_not_finite, f"{TRUNK}: given a NaN or an infinity, expected finite weights")])
def test_each_fault_is_named_and_nothing_is_written(tmp_path, damage, line):
    tensors = learned(CONFIG)
    damage(tensors)
    source = write(tmp_path / "in", tensors)
    with pytest.raises(CheckpointMismatch) as raised:
        imported(source, tmp_path / "out")
    assert raised.value.problems == [line]
    assert_nothing_left(tmp_path)


def test_all_faults_are_named_at_once(tmp_path):
    tensors = learned(CONFIG)
    for damage in (_missing, _unexpected, _wrong_shape):
        damage(tensors)
    with pytest.raises(CheckpointMismatch) as raised:
        imported(write(tmp_path / "in", tensors), tmp_path / "out")
    assert len(raised.value.problems) == 3


def _cut_short(source):
    path = source / "model-00002-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def _lose_a_shard(source):
    (source / "model-00002-of-00003.safetensors").unlink()


def _not_safetensors(source):
    (source / "model-00001-of-00003.safetensors").write_bytes(b"version https://git-lfs...")


def _twice(source):
    (source / "model-00001-of-00003.safetensors").write_bytes(
        (source / "model-00002-of-00003.safetensors").read_bytes())


def _index_leads_outside(source):
    (source / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "../elsewhere.safetensors"}}))


@pytest.mark.parametrize("damage, words", [
    (_cut_short, "cut short while it was copied"),
    (_lose_a_shard, "model-00002-of-00003.safetensors: cannot be read (No such file"),
    (_not_safetensors, "expected a safetensors file"),
    (_twice, "expected in one"),
    (_index_leads_outside, "expected a name without folders"),
    (lambda source: (source / "model.safetensors.index.json").write_text("{}"), "no weight_map"),
    (lambda source: (source / "config.json").write_text("{"), "damaged JSON"),
    (lambda source: (source / "config.json").unlink(), "config.json: cannot be read")])
def test_damaged_files_are_refused(tmp_path, damage, words):
    source = write(tmp_path / "in", learned(CONFIG))
    damage(source)
    with pytest.raises(DataError) as raised:
        imported(source, tmp_path / "out")
    assert words in str(raised.value) and "\n" not in str(raised.value)
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize("header", [
    b'{"a": 3}', b'[1]', b'{"a": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 5]}}',
    b'{"a": {"dtype": "X9", "shape": [2], "data_offsets": [0, 4]}}',
    b'{"a": {"dtype": "BF16", "shape": [2], "data_offsets": [-4, 0]}}', b"\xff\xfe"])
def test_damaged_headers_are_refused(tmp_path, header):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "config.json").write_text("{}")
    (tmp_path / "in" / "model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(DataError) as raised:
        imported(tmp_path / "in", tmp_path / "out")
    assert "model.safetensors: " in str(raised.value) and "\n" not in str(raised.value)


def test_existing_output_is_left_alone(tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(DataError, match="given a path that exists"):
        imported(write(tmp_path / "in", learned(CONFIG)), tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_full_disk_is_found_before_anything_is_copied(tmp_path, monkeypatch):
    monkeypatch.setattr(command.shutil, "disk_usage", lambda _: argparse.Namespace(free=10))
    with pytest.raises(DataError, match="of free disk"):
        imported(write(tmp_path / "in", learned(CONFIG)), tmp_path / "out")
    assert_nothing_left(tmp_path)


def test_interrupted_import_leaves_nothing(tmp_path):
    def stop(done_bytes, total_bytes):
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        imported(write(tmp_path / "in", learned(CONFIG)), tmp_path / "out", progress=stop)
    assert_nothing_left(tmp_path)


# The command

def run(*arguments):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args([str(argument) for argument in arguments]))


@pytest.fixture
def tiny_presets(monkeypatch):
    monkeypatch.setattr(command, "preset", lambda name: dataclasses.replace(CONFIG, name=name))


def test_command_reads_the_version_and_takes_the_tokenizer(tmp_path, tiny_presets, capsys):
    tensors = learned(CONFIG) | alpamayo_1_constants()
    source = write(tmp_path / "in", tensors, described={"model_type": "alpamayo_r1"})
    train_text_tokenizer(FIXED_TEXTS, BASE_SIZE).save(source / "tokenizer.json")
    assert run(source, "--out", tmp_path / "out", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["model"] == "alpamayo-r1" and report["notes"] == []
    assert "tokenizer.json" in report["files"]


def test_command_names_every_problem_on_a_line_of_its_own(tmp_path, tiny_presets, capsys):
    tensors = learned(CONFIG)
    _missing(tensors)
    _wrong_shape(tensors)
    assert run(write(tmp_path / "in", tensors), "--out", tmp_path / "out") == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and lines[0].startswith(Q_NORM) and lines[1].startswith(TRUNK)
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize("model_type", ["alpamayo2_super", None])
def test_command_refuses_other_models(tmp_path, capsys, model_type):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    assert run(tmp_path, "--out", tmp_path / "out") == 1
    assert f"given model_type {model_type!r}, expected one of alpamayo_r1, alpamayo1_5" in (
        capsys.readouterr().err)


def test_command_refuses_a_tokenizer_of_another_size(tmp_path, tiny_presets, capsys):
    train_text_tokenizer(["a"], BASE_SIZE).save(tmp_path / "other.json")
    source = write(tmp_path / "in", learned(CONFIG))
    assert run(source, "--out", tmp_path / "out", "--tokenizer", tmp_path / "other.json") == 1
    error = capsys.readouterr().err
    assert "given 263 text tokens, expected 300" in error and error.count("\n") == 1


MEASURE = """
import sys
from pathlib import Path
from reasoning_planner.training import import_checkpoint as command
from reasoning_planner.training import safetensors_stream
from test_import_checkpoint import tiny_config

def peak_kib():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

source, out = map(Path, sys.argv[1:])
before = peak_kib()
report = command.import_checkpoint(source, out, tiny_config(hidden=2048, intermediate=2560))
print(report.num_bytes, (peak_kib() - before) * 1024, "torch" in sys.modules)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_memory_does_not_grow_with_the_checkpoint(tmp_path):
    config = tiny_config(hidden=2048, intermediate=2560)
    tensors = {name: entry(shape, data=bytes(2 * math.prod(shape)))
               for name, shape in expected_tensors(config).items()}
    source = write(tmp_path / "in", tensors, num_shards=5)
    done = subprocess.run([sys.executable, "-c", MEASURE, source, tmp_path / "out"],
                          check=True, capture_output=True, text=True, timeout=120,
                          cwd=Path(__file__).parent, env={"PYTHONPATH": ":".join(sys.path)})
    num_bytes, growth, torch_loaded = done.stdout.split()
    assert int(num_bytes) > 100e6
    assert int(growth) < 32e6
    assert torch_loaded == "False"
