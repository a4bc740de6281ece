"""Every launch file names only executables, parameters and topics that exist.

Where `launch` and `launch_ros` can be imported, the file is also run by them.
"""

import ast
import re
from pathlib import Path

import pytest

from reasoning_planner.config import NodeConfig, flattened

ROOT = Path(__file__).resolve().parent.parent
LAUNCH_FILES = sorted((ROOT / "launch").glob("*.launch.py"))
NODE_SOURCES = "".join((ROOT / "reasoning_planner" / f"{name}.py").read_text()
                       for name in ("node", "bag_player", "plan_recorder"))


def strings(tree):
    """Every string constant, f-strings with their holes as *."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "*"
                          for part in node.values)


def node_calls(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Node":
            yield {keyword.arg: keyword.value for keyword in node.keywords}


def executables():
    text = (ROOT / "CMakeLists.txt").read_text()
    line = re.search(r"foreach\(executable_and_module ([^)]*)\)", text).group(1)
    return {pair.split("=")[0] for pair in line.split()}


def test_there_is_a_launch_file():
    assert "planner.launch.py" in [path.name for path in LAUNCH_FILES]


@pytest.mark.parametrize("path", LAUNCH_FILES, ids=lambda p: p.name)
def test_launch_files_name_only_what_exists(path):
    tree = ast.parse(path.read_text())
    calls = list(node_calls(tree))
    assert calls
    for call in calls:
        assert call["package"].value == "reasoning_planner"
        assert call["executable"].value in executables()
        for group in ast.walk(call["parameters"]):
            if isinstance(group, ast.Dict):
                names = {key.value for key in group.keys}
                assert names <= set(flattened(NodeConfig())) | {"use_sim_time"}
    for text in strings(tree):
        if text.startswith("~/"):
            stem = re.escape(text).replace(r"\*", r"(\{[^}]*\}|\d)")
            assert re.search(stem, NODE_SOURCES), f"{text}: no node of ours has this topic"


def test_the_launch_file_starts_the_node_and_ends_it_cleanly(tmp_path):
    launch = pytest.importorskip("launch", reason="launch is not among the ROS wheels; "
                                 "runs where a ROS distribution is sourced")
    pytest.importorskip("launch_ros", reason="needs launch_ros")
    pytest.importorskip("reasoning_planner.msg", reason="needs the built workspace: make ros")
    from ament_index_python.packages import get_package_share_directory
    from launch.actions import (IncludeLaunchDescription, RegisterEventHandler, Shutdown,
                                TimerAction)
    from launch.event_handlers import OnProcessExit
    from launch.launch_description_sources import PythonLaunchDescriptionSource

    codes = []
    source = Path(get_package_share_directory("reasoning_planner"), "launch", "planner.launch.py")
    description = launch.LaunchDescription([
        IncludeLaunchDescription(PythonLaunchDescriptionSource(str(source)),
                                 launch_arguments={"namespace": "some"}.items()),
        RegisterEventHandler(OnProcessExit(
            on_exit=lambda event, context: codes.append(event.returncode))),
        TimerAction(period=8.0, actions=[Shutdown()])])
    service = launch.LaunchService(argv=[])
    service.include_launch_description(description)
    assert service.run() == 0 and codes == [0]
