"""doctor on engines, and on what lets large images arrive.

What each platform lacks here, and whether built engines are still right.
"""

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


# Large images

def network(tmp_path, monkeypatch, buffers, fragments):
    monkeypatch.setattr(doctor, "KERNEL_LIMITS", tmp_path)
    for name, value in (("core/rmem_max", buffers), ("ipv4/ipfrag_high_thresh", fragments)):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(f"{value}\n")
    return {finding.name: finding for finding in doctor.examine()}


def test_small_buffers_are_a_warning_with_its_remedy(tmp_path, monkeypatch):
    found = network(tmp_path, monkeypatch, 212_992, 4_194_304)
    buffers, fragments = found["socket buffers"], found["IP fragments"]
    assert buffers.state == fragments.state == "warning"
    assert "net.core.rmem_max = 212992" in buffers.found and "images" in buffers.found
    assert buffers.remedy == "sudo sysctl -w net.core.rmem_max=2147483647"
    assert fragments.remedy == "sudo sysctl -w net.ipv4.ipfrag_high_thresh=134217728"


def test_large_ones_are_none(tmp_path, monkeypatch):
    found = network(tmp_path, monkeypatch, 2**31 - 1, 2**27)
    assert found["socket buffers"].state == found["IP fragments"].state == "ok"


@pytest.mark.parametrize("rmw, chosen, state", [
    ("rmw_fastrtps_cpp", "", "warning"), ("rmw_fastrtps_cpp", "LARGE_DATA", "ok"),
    ("rmw_cyclonedds_cpp", "", "optional")])
def test_the_transport_of_large_images(monkeypatch, rmw, chosen, state):
    pytest.importorskip("rclpy", reason="needs ROS 2: make ros")
    monkeypatch.setenv("FASTDDS_BUILTIN_TRANSPORTS", chosen)
    monkeypatch.setattr(doctor, "_rmw", lambda: doctor.Finding("RMW", "ok", rmw))
    found = doctor._transport()
    assert found.state == state
    assert ("LARGE_DATA" in found.remedy) == (state == "warning")
