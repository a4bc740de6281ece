"""Imports point one way, and ROS stands at the edge: style.md held by the syntax tree."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "reasoning_planner"
BASE = {"datatypes", "config", "errors"}
ROS_EDGE = {"node", "conversions", "bag_player", "plan_recorder", "spinning", "subscriptions",
            "parameters", "debug_topics", "autoware_output", "route_input",
            "calibration_input", "visualisation", "debug_image"}
ROS = {"rclpy", "rcl_interfaces", "builtin_interfaces", "sensor_msgs", "nav_msgs", "std_msgs",
       "geometry_msgs", "rosgraph_msgs", "autoware_planning_msgs",
       "autoware_internal_planning_msgs", "tf2_msgs", "unique_identifier_msgs", "lifecycle_msgs",
       "rosidl_runtime_py", "diagnostic_msgs", "visualization_msgs"}
NOT_USED = {"cv_bridge", "tf2_ros", "message_filters"}     # what other nodes stumbled over
TOP = {"evaluation", "training", "export"}
TOOLS = {"cli", "doctor", "plan_recorder"}       # stand on top like evaluation
# part -> parts of ours it may import, itself aside
ALLOWED = {
    "datatypes": set(), "config": {"errors"}, "errors": set(),
    "perception": BASE, "tokenization": BASE, "actions": BASE, "models": BASE,
    "runtimes": BASE | {"models"}, "speculative": BASE | {"runtimes"},
    "world": BASE | {"actions", "perception"},
    "planner": BASE | {"perception", "tokenization", "actions", "models", "runtimes",
                       "speculative"},
    "vla": BASE | {"planner", "perception", "tokenization", "actions", "models", "runtimes",
                   "speculative"},
    "conversions": BASE | {"perception", "msg", "diagnoses"},
    "spinning": {"errors"}, "cadence": set(), "diagnoses": set(), "subscriptions": set(),
    "parameters": {"config", "errors"},
    "debug_topics": {"conversions", "datatypes", "subscriptions"},
    "autoware_output": {"conversions", "datatypes", "errors", "subscriptions"},
    "route_input": {"datatypes", "diagnoses", "errors", "subscriptions"},
    "calibration_check": {"diagnoses", "datatypes", "perception"},
    "calibration_input": {"calibration_check", "diagnoses", "path_drawing", "subscriptions"},
    "path_drawing": {"errors", "perception"},
    "debug_image": BASE | {"conversions", "path_drawing", "subscriptions", "visualisation"},
    "visualisation": {"config", "conversions", "datatypes", "path_drawing", "perception",
                      "subscriptions"},
    "model_loading": BASE | {"planner", "vla", "runtimes"},
    "inference_process": BASE | {"planner", "model_loading"},
    "planning_worker": BASE | {"planner", "perception", "conversions", "cadence"},
    "watchdogs": BASE | {"conversions", "diagnoses"},
    "node": BASE | {"planner", "model_loading", "inference_process", "planning_worker",
                    "conversions", "msg", "spinning", "parameters", "subscriptions",
                    "debug_topics", "diagnoses", "watchdogs", "autoware_output", "route_input",
                    "calibration_input", "visualisation", "debug_image"},
    "bag_salvage": {"errors"}, "bags": BASE | {"bag_salvage"},
    "bag_player": BASE | {"bags", "spinning"},
}


def part_of(path):
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imported(path):
    """(parts of ours, outside packages) that one module imports, also inside functions."""
    ours, outside = set(), set()
    package = ["reasoning_planner", *path.relative_to(PACKAGE).parent.parts]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[:len(package) - node.level + 1] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            names = ([".".join(base)] if len(base) > 1 or not node.level
                     else [".".join([*base, alias.name]) for alias in node.names])
        else:
            continue
        for name in names:
            first, *rest = name.split(".")
            if first == "reasoning_planner":
                ours.update(rest[:1])
            else:
                outside.add(first)
    return ours, outside


MODULES = sorted(path for path in PACKAGE.rglob("*.py"))


def test_there_is_something_to_check():
    assert len(MODULES) > 20


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_one_way(path):
    part = part_of(path)
    ours, outside = imported(path)
    ours -= {part, "__init__"}
    if part in ALLOWED:
        assert ours <= ALLOWED[part], f"{part} must not import {sorted(ours - ALLOWED[part])}"
    elif part not in TOP | TOOLS | {"__init__"}:
        pytest.fail(f"{part}: a part this test does not know; say what it may import")
    if part not in TOP | TOOLS:
        assert not ours & TOP, f"{part} must not import {sorted(ours & TOP)}"
    if part not in ROS_EDGE | {"doctor"} and path.name != "node_runs.py":   # drives a real node
        assert not outside & ROS, f"{part} must not import {sorted(outside & ROS)}"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_heavy_libraries_have_their_own_file(path):
    _, outside = imported(path)
    part, name = part_of(path), path.name
    torch_files = {"torch_runtime.py", "torch_graphs.py", "device_memory.py", "bench_peers.py"}
    assert not outside & NOT_USED
    if part not in {"models", "training", "export"} and name not in torch_files:
        assert "torch" not in outside
    if "onnxruntime" in outside:
        assert name == "ort_runtime.py" or part in {"export", "evaluation", "training"}
    if "tensorrt" in outside:
        assert name == "trt_engine.py" or part in {"export", "doctor"}


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_every_module_says_what_it_holds(path):
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


def test_no_module_is_named_for_nothing():
    assert not [path for path in MODULES if path.stem in ("utils", "helpers")]
