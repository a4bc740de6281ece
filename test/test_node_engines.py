"""planner_node on engines of build-engines: the right ones, the wrong ones, too small ones."""

import dataclasses
import shutil

import pytest
import yaml

pytest.importorskip("rclpy", reason="needs ROS 2: make ros")
pytest.importorskip("reasoning_planner.msg", reason="needs the built workspace: make ros")
pytest.importorskip("torch", reason="torch writes the random weights")
pytest.importorskip("onnx", reason="onnx writes the graphs")
pytest.importorskip("onnxruntime", reason="runs the graphs")

from ros_harness import Vehicle, domain_id, end, start_node
from tiny_checkpoint import tiny_config, write_checkpoint

from reasoning_planner.config import ModelSettings
from reasoning_planner.export.build_engines import build_engines
from reasoning_planner.model_loading import AbsentModel, load_model
from reasoning_planner.msg import PlannedTrajectory
from reasoning_planner.runtimes.engine_manifest import EngineManifest
from reasoning_planner.runtimes.platforms import load_platforms

pytestmark = [pytest.mark.ros, pytest.mark.usefixtures("single_thread")]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Without graphs of its own: whoever plans with it does so on engines."""
    return write_checkpoint(tmp_path_factory.mktemp("node") / "tiny", tiny_config())


@pytest.fixture(scope="module")
def engines(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("engines") / "cpu"
    build_engines(load_platforms()["cpu"], checkpoint, folder, measure=False)
    return folder


def parameter_file(folder, **model):
    path = folder / "planner.param.yaml"
    path.write_text(yaml.safe_dump({"reasoning_planner": {"ros__parameters": {
        "use_sim_time": True, "deadline_s": 20.0, "limits": {"max_speed_mps": 99.0},
        "model": {"max_new_tokens": 4, **model}}}}))
    return path


def plan_once(folder, **model):
    """(first plan, last status, values of the engine's diagnosis, stderr) of a node."""
    domain = domain_id()
    process = start_node(domain, arguments=("--params-file", str(parameter_file(folder, **model))))
    try:
        with Vehicle(domain) as vehicle:
            vehicle.wait_for_planner()
            vehicle.drive(0, 18)
            assert vehicle.wait_for(lambda: vehicle.plans and vehicle.statuses
                                    and vehicle.level("engine") >= 0, 30.0)
            plan, status, values = vehicle.plans[0], vehicle.statuses[-1], vehicle.values("engine")
    finally:
        code, errors = end(process)
    assert code == 0 and "Traceback" not in errors, errors
    return plan, status, values, errors


def test_engines_of_a_parameter_file_plan(checkpoint, engines, tmp_path):
    plan, status, values, errors = plan_once(tmp_path, checkpoint=str(checkpoint),
                                             engines=str(engines), provider="cpu")
    assert status.planner == "tiny" and status.runtime == "ort", errors
    assert not any("model" in reason for reason in plan.reasons), plan.reasons
    manifest = EngineManifest.load(engines)
    assert status.engine_hash == manifest.engines["decoder"].sha256
    assert status.checkpoint_hash == manifest.checkpoint["model.safetensors"]
    assert values["engine"] == f"cpu, float32, {manifest.builder}"


def test_engines_of_another_checkpoint_plan_nothing(engines, tmp_path):
    other = write_checkpoint(tmp_path / "other", tiny_config(), seed=1)
    plan, status, _, errors = plan_once(tmp_path, checkpoint=str(other), engines=str(engines))
    assert plan.status == PlannedTrajectory.STATUS_KINEMATIC and status.planner == "kinematic"
    assert any(reason.startswith("no model loaded") and "engines of another checkpoint" in reason
               for reason in plan.reasons), plan.reasons
    assert status.engine_hash == status.checkpoint_hash == ""
    first = next(line for line in errors.splitlines() if "another checkpoint" in line)
    assert "[ERROR]" in first and "no model, the kinematic planner plans" in first
    assert "build-engines --checkpoint" in first


def test_a_prompt_too_long_for_the_engines_is_said_in_the_plan(checkpoint, engines, tmp_path):
    small = tmp_path / "engines"
    shutil.copytree(engines, small)
    dataclasses.replace(EngineManifest.load(small), capacity=192).save(small)
    plan, status, _, _ = plan_once(tmp_path, checkpoint=str(checkpoint), engines=str(small))
    assert plan.planner == "kinematic" and plan.status not in (
        PlannedTrajectory.STATUS_OK, PlannedTrajectory.STATUS_DEGRADED)
    assert any("prompt: given" in reason and "cache of 192" in reason
               for reason in plan.reasons), plan.reasons
    assert status.planner == "tiny"         # loaded, and refuses this prompt


@pytest.mark.parametrize("settings, told", [
    ({"engines": "nowhere"}, "given neither engine.json nor ort_manifest.json, expected engines"),
    ({"runtime": "trt"}, "engines of platform cpu for the runtime ort, expected the runtime trt"),
    ({"runtime": "trt", "engines": ""}, "no engines for the runtime trt"),
    ({"runtime": "torch"}, "for the runtime torch, expected none"),
    ({"runtime": "torch", "engines": "", "provider": "tensorrt"}, "given 'tensorrt' for torch"),
    ({"provider": "cuda"}, "expected CUDAExecutionProvider"),
])
def test_what_cannot_run_is_one_line_and_no_other_runtime(checkpoint, engines, settings, told):
    if settings.get("provider") == "cuda":
        ort = pytest.importorskip("onnxruntime")
        if "CUDAExecutionProvider" in ort.get_available_providers():
            pytest.skip("this ONNX Runtime has it")
    reports = []
    model = load_model(dataclasses.replace(
        ModelSettings(checkpoint=str(checkpoint), engines=str(engines)), **settings),
        reports.append)
    assert isinstance(model, AbsentModel) and told in model.why
    assert len(reports) == 1 and "\n" not in reports[0]
