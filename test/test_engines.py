"""Engines of a processor, and every way an engine can be the wrong one.

TensorRT's own engines are in test_trt_runtime.py; what is refused there is refused here first,
with ONNX Runtime, for real.
"""

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("torch", reason="the tiny checkpoint is made with it")

from reasoning_planner.errors import MissingDependencyError, ModelError
from reasoning_planner.export import build_engines as command
from reasoning_planner.export.build_engines import build_engines
from reasoning_planner.export.to_onnx import export
from reasoning_planner.runtimes import ort_runtime
from reasoning_planner.runtimes.engine_manifest import (ENGINE_MANIFEST,
                                                        EngineManifest,
                                                        find_engines)
from reasoning_planner.runtimes.factory import create_runtime
from reasoning_planner.runtimes.platforms import SizeRange, load_platforms
from reasoning_planner.speculative.cost_curve import (CostCurve,
                                                      load_cost_curve,
                                                      save_cost_curve)
from tiny_checkpoint import tiny_config, write_checkpoint

pytestmark = pytest.mark.usefixtures("single_thread")


@pytest.fixture(scope="module")
def checkpoint(exported_checkpoint):
    return exported_checkpoint


@pytest.fixture(scope="module")
def built(checkpoint, tmp_path_factory):
    """Engines for the processor, away from the checkpoint."""
    out = tmp_path_factory.mktemp("engines") / "cpu"
    out.mkdir()
    build_engines(load_platforms()["cpu"], checkpoint, out)
    return out


# Building for a processor

def test_the_built_manifest_says_what_was_built(built, checkpoint):
    manifest = EngineManifest.load(built)
    assert (manifest.platform, manifest.runtime, manifest.graphs) == ("cpu", "ort", "ort")
    assert manifest.builder.startswith("onnxruntime ") and manifest.model == "tiny"
    assert set(manifest.checkpoint) == {"config.json", "tokenizer.json", "model.safetensors"}
    decoder = manifest.engines["decoder"].tensors
    assert decoder["past_key_0"] == {"name": "past_key_0", "dtype": "float32",
                                     "shape": [1, 2, "capacity", 16]}
    curve = CostCurve.from_dict(manifest.costs)
    assert curve.sizes == (1, 2, 4, 8, 16) and min(curve.cost_ms) > 0
    assert load_cost_curve(built) == curve


def test_built_engines_write_what_the_export_writes(built, checkpoint):
    engines = create_runtime("ort", checkpoint, graphs=built, threads=1)
    graphs = create_runtime("ort", checkpoint, threads=1)
    assert engines.capacity == EngineManifest.load(built).capacity
    ids = np.arange(5, 30)
    features = np.zeros((0, 4, 16, 48), np.float32)
    given, expected = (r.prefill(ids, features) for r in (engines, graphs))
    assert np.array_equal(given.top_log_probs, expected.top_log_probs)


def test_engines_beside_a_checkpoint_are_found(built, checkpoint, tmp_path):
    folder = tmp_path / "checkpoint"
    shutil.copytree(checkpoint, folder)
    assert find_engines(folder, "ort") is None
    shutil.copytree(built, folder / "engines" / "cpu")
    for name in ("vision.onnx", "decoder.onnx", "expert.onnx", "ort_manifest.json"):
        (folder / name).unlink()
    assert create_runtime("ort", folder, threads=1).name == "ort"
    shutil.copytree(built, folder / "engines" / "again")
    with pytest.raises(ModelError, match="expected one"):
        create_runtime("ort", folder)


def test_the_command_builds_and_tells(checkpoint, tmp_path):
    ran = subprocess.run(
        [sys.executable, "-m", "reasoning_planner.cli", "build-engines", "--platform", "cpu",
         "--checkpoint", str(checkpoint), "--out", str(tmp_path / "out"), "--no-measure",
         "--json"], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    assert told["platform"] == "cpu" and set(told["engines"]) == {"vision", "decoder", "expert"}
    assert EngineManifest.load(Path(told["folder"])).costs is None


def test_a_platform_that_needs_tensorrt_says_so(checkpoint, tmp_path, capsys, monkeypatch):
    from reasoning_planner import cli

    monkeypatch.setattr(command, "installed_tensorrt", lambda: None)
    out = tmp_path / "out"
    assert cli.main(["build-engines", "--platform", "x86", "--checkpoint", str(checkpoint),
                     "--out", str(out)]) == 1
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "tensorrt is not installed" in told
    assert not out.exists()


def test_a_pinned_checkpoint_is_the_only_one(checkpoint, tmp_path):
    cpu = load_platforms()["cpu"]
    with pytest.raises(ModelError, match="which the platform cpu asks for"):
        build_engines(dataclasses.replace(cpu, source_sha256="0" * 64), checkpoint,
                      tmp_path / "out", measure=False)
    assert not (tmp_path / "out" / ENGINE_MANIFEST).exists()
    source = build_engines(cpu, checkpoint, tmp_path / "out", measure=False).source_sha256
    build_engines(dataclasses.replace(cpu, source_sha256=source), checkpoint, tmp_path / "out",
                  measure=False)


def test_a_platform_too_small_for_the_prompts(checkpoint, tmp_path):
    cpu = load_platforms()["cpu"]
    small = dataclasses.replace(cpu, capacity=128, profiles=dataclasses.replace(
        cpu.profiles, prefill=SizeRange(1, 128, 128)))
    with pytest.raises(ModelError, match="capacity: given 128 tokens, expected more than 176"):
        build_engines(small, checkpoint, tmp_path)
    short = dataclasses.replace(cpu, profiles=dataclasses.replace(
        cpu.profiles, prefill=SizeRange(1, 100, 100)))
    with pytest.raises(ModelError, match="profiles.prefill.maximum: given 100"):
        build_engines(short, checkpoint, tmp_path)


@pytest.fixture
def builds(monkeypatch):
    """One entry for each time that engines are really built."""
    seen, build = [], command._built
    monkeypatch.setattr(command, "_built", lambda *given: seen.append(given) or build(*given))
    return seen


def test_what_is_up_to_date_is_left_as_it_is(built, checkpoint, tmp_path, builds):
    folder, cpu = copied(built, tmp_path), load_platforms()["cpu"]
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert build_engines(cpu, checkpoint, folder) == EngineManifest.load(built)
    assert not builds
    assert before == {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    build_engines(cpu, checkpoint, folder, measure=False, rebuild=True)
    assert len(builds) == 1 and EngineManifest.load(folder).costs is None


@pytest.mark.parametrize("changed", ["engine", "manifest", "graph", "builder", "platform",
                                     "weights"])
def test_what_is_not_is_built_again(built, checkpoint, tmp_path, builds, changed):
    source, cpu = tmp_path / "checkpoint", load_platforms()["cpu"]
    shutil.copytree(checkpoint, source)
    folder = copied(built, tmp_path, **({"builder": "onnxruntime 1.0"} if changed == "builder"
                                        else {}))
    if changed == "engine":
        (folder / "decoder.onnx").write_bytes(b"")
    if changed == "manifest":
        (folder / ENGINE_MANIFEST).write_text("{")
    if changed == "graph":
        export(source, top_k=5)
    if changed == "platform":
        cpu = dataclasses.replace(cpu, capacity=8192)
    if changed == "weights":
        with open(source / "tokenizer.json", "a", encoding="utf-8") as file:
            file.write(" ")
    build_engines(cpu, source, folder, measure=False)
    assert len(builds) == 1
    create_runtime("ort", source, graphs=folder, threads=1)


def test_graphs_in_the_checkpoint_are_taken(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "export", lambda *given: pytest.fail("exported"))
    build_engines(load_platforms()["cpu"], checkpoint, tmp_path / "out", measure=False)
    for name in ("decoder.onnx", "vision.onnx", "expert.onnx"):
        assert (tmp_path / "out" / name).read_bytes() == (checkpoint / name).read_bytes()


def test_a_folder_that_cannot_be_made(checkpoint, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="cannot be made"):
        build_engines(load_platforms()["cpu"], checkpoint, tmp_path / "file" / "out")


def test_a_curve_that_is_measured_later_is_written_to_the_engines(built, tmp_path):
    folder = copied(built, tmp_path, costs=None)
    assert load_cost_curve(folder) is None
    curve = CostCurve((1, 4), (1.0, 2.0), 0.1)
    save_cost_curve(curve, folder, {"threads": 1})
    assert load_cost_curve(folder) == curve and EngineManifest.load(folder).costs["threads"] == 1
    assert EngineManifest.load(folder).engines == EngineManifest.load(built).engines


# The wrong engine

def copied(built, tmp_path, **changes):
    folder = tmp_path / "engines"
    shutil.copytree(built, folder)
    dataclasses.replace(EngineManifest.load(folder), **changes).save(folder)
    return folder


def refused(name, checkpoint, folder, **arguments):
    with pytest.raises(ModelError) as error:
        create_runtime(name, checkpoint, graphs=folder, **arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_engines_of_another_checkpoint(built, tmp_path):
    other = write_checkpoint(tmp_path / "other", tiny_config(), seed=1)
    told = refused("ort", other, built)
    assert "engines of another checkpoint" in told and "build-engines --checkpoint" in told


def test_a_changed_engine(built, checkpoint, tmp_path):
    folder = copied(built, tmp_path)
    content = bytearray((folder / "decoder.onnx").read_bytes())
    content[-5] ^= 1
    (folder / "decoder.onnx").write_bytes(content)
    assert "decoder.onnx: given sha256" in refused("ort", checkpoint, folder)


@pytest.mark.parametrize("name", ["decoder.onnx", "ort_manifest.json"])
def test_a_missing_engine(built, checkpoint, tmp_path, name):
    folder = copied(built, tmp_path)
    (folder / name).unlink()
    assert name in refused("ort", checkpoint, folder)


def test_engines_of_another_runtime(built, checkpoint, tmp_path):
    folder = copied(built, tmp_path, runtime="trt", platform="orin-jp6")
    assert "platform orin-jp6 for the runtime trt, expected the runtime ort" in refused(
        "ort", checkpoint, folder)
    assert "platform cpu for the runtime ort, expected the runtime trt" in refused(
        "trt", checkpoint, built)


def test_no_engines_at_all(checkpoint, tmp_path):
    told = refused("trt", checkpoint, None)
    assert "no engines for the runtime trt" in told and "build-engines" in told
    assert "engine.json" in refused("trt", checkpoint, tmp_path)
    assert "build-engines" in refused("ort", checkpoint, tmp_path)


@pytest.mark.parametrize("content", [b"{}", b"not JSON", b'{"engines": {"a": {"b": 1}}}'])
def test_a_damaged_engine_manifest(built, checkpoint, tmp_path, content):
    folder = copied(built, tmp_path)
    (folder / ENGINE_MANIFEST).write_bytes(content)
    assert "damaged" in refused("ort", checkpoint, folder)


def test_a_manifest_of_another_version(built, checkpoint, tmp_path):
    assert "given format 2" in refused("ort", checkpoint, copied(built, tmp_path, format=2))


def test_more_tokens_than_the_engines_hold(built, checkpoint):
    most = EngineManifest.load(built).capacity
    assert f"expected at most {most}" in refused("ort", checkpoint, built, capacity=most + 1)


def test_a_prompt_too_long_for_the_engines(built, checkpoint):
    runtime = create_runtime("ort", checkpoint, graphs=built, threads=1)
    with pytest.raises(ModelError, match=f"cache of {runtime.capacity}"):
        runtime.prefill(np.zeros(runtime.capacity + 1, np.int64), np.zeros((0, 4, 16, 48)))


# Providers

def test_what_a_runtime_has_no_use_for_is_refused(built, checkpoint):
    assert "for the runtime torch, expected none" in refused("torch", checkpoint, built)
    assert "given 'cuda' for the runtime trt" in refused("trt", checkpoint, None, provider="cuda")


def test_an_unknown_provider(checkpoint):
    assert "expected one of cpu, cuda, tensorrt" in refused("ort", checkpoint, None,
                                                            provider="rocm")


@pytest.mark.parametrize("provider", ["cuda", "tensorrt"])
def test_a_provider_that_is_not_in_the_build(checkpoint, provider):
    if "CUDAExecutionProvider" in ort_runtime.ort.get_available_providers():
        pytest.skip("this ONNX Runtime has it")
    with pytest.raises(MissingDependencyError, match="onnxruntime-gpu") as told:
        create_runtime("ort", checkpoint, provider=provider)
    assert "CPUExecutionProvider" in str(told.value) and "\n" not in str(told.value)


def test_a_provider_that_cannot_start_is_no_cpu_in_disguise(checkpoint, monkeypatch):
    if "CUDAExecutionProvider" in ort_runtime.ort.get_available_providers():
        pytest.skip("this ONNX Runtime has it")
    monkeypatch.setattr(ort_runtime, "require_provider", lambda provider: None)
    with pytest.raises(ModelError, match="CUDAExecutionProvider"):
        create_runtime("ort", checkpoint, provider="cuda")


def test_another_provider_that_is_here_computes_the_same(checkpoint, monkeypatch):
    available = ort_runtime.ort.get_available_providers()
    others = [name for name in available if name != "CPUExecutionProvider"]
    if not others:
        pytest.skip("this ONNX Runtime has the CPU alone")
    monkeypatch.setitem(ort_runtime.PROVIDERS, "other", (others[-1],))
    ids, features = np.arange(5, 30), np.zeros((0, 4, 16, 48), np.float32)
    given, expected = (create_runtime("ort", checkpoint, threads=1, provider=provider)
                       .prefill(ids, features) for provider in ("other", "cpu"))
    assert np.array_equal(given.token_ids, expected.token_ids)


@pytest.mark.gpu
@pytest.mark.parametrize("provider", ["cuda", "tensorrt"])
def test_a_gpu_provider_agrees_with_the_cpu(checkpoint, provider):
    if "CUDAExecutionProvider" not in ort_runtime.ort.get_available_providers():
        pytest.skip("ONNX Runtime without CUDA")
    ids, features = np.arange(5, 30), np.zeros((0, 4, 16, 48), np.float32)
    given, expected = (create_runtime("ort", checkpoint, threads=1, provider=name)
                       .prefill(ids, features) for name in (provider, "cpu"))
    assert np.abs(given.top_log_probs - expected.top_log_probs).max() < 1e-2
