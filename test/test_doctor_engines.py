"""doctor on engines: what each platform lacks here, and whether built ones are still right."""

import argparse
import sys
import types

import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("torch", reason="the tiny checkpoint is made with it")

from reasoning_planner import doctor
from reasoning_planner.export.build_engines import build_engines
from reasoning_planner.runtimes.platforms import load_platforms
from tiny_checkpoint import tiny_config, write_checkpoint


def findings(checkpoint=None):
    return {finding.name: finding for finding in doctor.engine_findings(checkpoint)}


def test_a_platform_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    found = findings()
    assert found["for cpu"].state == "ok" and "build-engines" in found["for cpu"].remedy
    for name in ("x86", "orin-jp6", "thor-jp7", "jp7.2"):
        finding = found[f"for {name}"]
        assert finding.state == "optional"
        assert finding.found.startswith("TensorRT is not installed")
        assert "cuda-python" in finding.remedy
    assert "10.3 <= version < 10.13" in found["for orin-jp6"].remedy
    assert "JetPack" in found["for orin-jp6"].remedy
    assert "pip install tensorrt" in found["for x86"].remedy


def test_a_machine_without_a_device_says_so(monkeypatch):
    monkeypatch.setattr(doctor, "NVIDIA_DEVICES", ("/nowhere",))
    assert findings()["for x86"].found.endswith("no NVIDIA device")


def test_another_version_of_tensorrt_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt", types.SimpleNamespace(__version__="10.3.0"))
    monkeypatch.setattr(doctor, "_wanting_for_tensorrt", lambda: [])
    found = findings()
    assert found["for orin-jp6"].state == "ok"
    assert found["for thor-jp7"].found == "TensorRT 10.3.0 is another"


def test_engines_beside_a_checkpoint_are_checked(tmp_path, capsys, single_thread):
    checkpoint = write_checkpoint(tmp_path / "tiny", tiny_config())
    out = checkpoint / "engines" / "cpu"
    out.mkdir(parents=True)
    build_engines(load_platforms()["cpu"], checkpoint, out, measure=False)
    assert findings(checkpoint)["engines cpu"].state == "ok"
    write_checkpoint(checkpoint, tiny_config(), seed=2)
    stale = findings(checkpoint)["engines cpu"]
    assert stale.state == "missing" and "another checkpoint" in stale.found
    assert doctor.run(argparse.Namespace(json=False, checkpoint=checkpoint)) == 1
    assert "MISSING engines cpu" in capsys.readouterr().out
