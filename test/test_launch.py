"""Every launch file names only executables, parameters, arguments and topics that exist.

Where `launch` and `launch_ros` can be imported, the files are also run by them.
"""

import ast
import os
import re
import signal
from pathlib import Path

import pytest

from reasoning_planner.config import NodeConfig, flattened

ROOT = Path(__file__).resolve().parent.parent
LAUNCH_FILES = sorted((ROOT / "launch").glob("*.launch.py"))
NODES = {"planner_node": "node", "bag_player": "bag_player", "plan_recorder": "plan_recorder"}
NODE_SOURCES = "".join((ROOT / "reasoning_planner" / f"{name}.py").read_text()
                       for name in (*NODES.values(), "autoware_output", "route_input",
                                    "calibration_input"))


def strings(tree):
    """Every string constant, f-strings with their holes as *."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "*"
                          for part in node.values)


def calls(tree, name):
    """Positional and named arguments of every call of a function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == name:
            yield node.args, {keyword.arg: keyword.value for keyword in node.keywords}


def executables():
    text = (ROOT / "CMakeLists.txt").read_text()
    line = re.search(r"foreach\(executable_and_module ([^)]*)\)", text).group(1)
    return {pair.split("=")[0] for pair in line.split()}


def parameters_of(executable):
    """Names that a node of ours knows."""
    known = {"use_sim_time"}
    if executable == "planner_node":
        return known | set(flattened(NodeConfig()))
    source = (ROOT / "reasoning_planner" / f"{NODES[executable]}.py").read_text()
    fields = re.findall(r"^    (\w+): (?:str|float|bool|tuple) = ", source, re.MULTILINE)
    return known | set(fields) | set(re.findall(r'declare_parameter\("(\w+)"', source))


def overrides(tree):
    """The table OVERRIDES of a launch file: argument -> parameter."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "OVERRIDES":
            return {key.value: value.elts[0].value
                    for key, value in zip(node.value.keys, node.value.values)}
    return {}


def test_the_launch_files_are_there():
    assert {"planner.launch.py", "replay.launch.py", "autoware.launch.py"} <= {
        path.name for path in LAUNCH_FILES}


@pytest.mark.parametrize("path", LAUNCH_FILES, ids=lambda p: p.name)
def test_launch_files_name_only_what_exists(path):
    tree = ast.parse(path.read_text())
    nodes = [named for _, named in calls(tree, "Node")]
    included = [text for text in strings(tree) if text.endswith(".launch.py") and " " not in text]
    assert nodes or included
    for name in included:
        assert (ROOT / "launch" / name).is_file()
    for named in nodes:
        executable = named["executable"].value
        assert named["package"].value == "reasoning_planner" and executable in executables()
        for group in ast.walk(named["parameters"]):
            if isinstance(group, ast.Dict):
                assert {key.value for key in group.keys} <= parameters_of(executable)
    assert set(overrides(tree).values()) <= parameters_of("planner_node")
    for text in strings(tree):
        if text.startswith(("~/", "reasoning_planner/")):
            topic = text.replace("reasoning_planner/", "~/", 1)
            stem = re.escape(topic).replace(r"\*", r"(\{[^}]*\}|\d|\w+)")
            assert re.search(stem, NODE_SOURCES), f"{text}: no node of ours has this topic"


@pytest.mark.parametrize("path", LAUNCH_FILES, ids=lambda p: p.name)
def test_launch_files_use_only_declared_arguments(path):
    tree = ast.parse(path.read_text())
    declared = {args[0].value for args, _ in calls(tree, "DeclareLaunchArgument")
                if isinstance(args[0], ast.Constant)} | set(overrides(tree))
    used = {args[0].value for args, _ in calls(tree, "LaunchConfiguration")
            if isinstance(args[0], ast.Constant)}
    assert used and used <= declared, used - declared


# Run by launch -----------------------------------------------------------------------------------

@pytest.fixture
def launched(monkeypatch, tmp_path):
    """Runs a launch file of ours with arguments and event handlers; returns their exit codes."""
    launch = pytest.importorskip("launch", reason="launch is not among the ROS wheels; "
                                 "runs where a ROS distribution is sourced")
    pytest.importorskip("launch_ros", reason="needs launch_ros")
    pytest.importorskip("reasoning_planner.msg", reason="needs the built workspace: make ros")
    from ament_index_python.packages import get_package_share_directory
    from launch.actions import IncludeLaunchDescription, RegisterEventHandler
    from launch.event_handlers import OnProcessExit
    from launch.launch_description_sources import PythonLaunchDescriptionSource
    from ros_harness import domain_id

    monkeypatch.setenv("ROS_DOMAIN_ID", str(domain_id()))
    monkeypatch.setenv("ROS_AUTOMATIC_DISCOVERY_RANGE", "LOCALHOST")
    monkeypatch.setenv("ROS_LOG_DIR", str(tmp_path))

    def run(name, arguments, handlers=()):
        codes = []
        source = Path(get_package_share_directory("reasoning_planner"), "launch", name)
        service = launch.LaunchService(argv=[])
        service.include_launch_description(launch.LaunchDescription([
            *map(RegisterEventHandler, handlers),
            RegisterEventHandler(OnProcessExit(on_exit=lambda event, context: codes.append(
                (event.process_name.rpartition("-")[0], event.returncode)))),
            IncludeLaunchDescription(PythonLaunchDescriptionSource(str(source)),
                                     launch_arguments=arguments.items())]))
        assert service.run() == 0
        return codes

    return run


def test_the_planner_is_started_again_where_asked_and_ends_cleanly(launched):
    from launch.actions import Shutdown
    from launch.event_handlers import OnProcessIO

    pids = []

    def on_output(event):
        """The node is up once it misses its inputs: killed the first time, ended the second."""
        if b"no plan yet" not in event.text or event.pid in pids:
            return None
        pids.append(event.pid)
        if len(pids) == 2:
            return [Shutdown()]
        os.kill(event.pid, signal.SIGKILL)
        return None

    codes = launched("planner.launch.py", {"namespace": "some", "respawn": "true",
                                           "compressed": "true", "image1": "/front"},
                     [OnProcessIO(on_stderr=on_output, on_stdout=on_output)])
    assert codes == [("planner_node", -signal.SIGKILL), ("planner_node", 0)]


def test_a_replay_records_plans_and_ends_with_the_bag(launched, tmp_path):
    from reasoning_planner.evaluation.records import read_records
    from reasoning_planner.world.drive import make_drive
    from reasoning_planner.world.rosbag import write_bag

    bag, records = write_bag(make_drive(0, 4.0), tmp_path / "drive"), tmp_path / "plans.jsonl"
    codes = launched("replay.launch.py", {
        "bag": str(bag), "records": str(records), "namespace": "some", "rate": "0.5",
        "odometry": "/world/odometry",
        **{f"image{slot}": f"/world/camera{slot}/image_raw" for slot in range(4)}})
    assert sorted(codes) == [("bag_player", 0), ("plan_recorder", 0), ("planner_node", 0)]
    plans = read_records(records).plans
    assert len(plans) >= 10 and {plan.planner for plan in plans} == {"kinematic"}
