"""Which parameter files concern a node: the patterns that ROS knows."""

import pytest

pytest.importorskip("rclpy", reason="needs ROS 2: make ros")

from reasoning_planner.parameters import foreign_files, is_changeable

NODE = "/left/reasoning_planner"


@pytest.mark.parametrize("text, fits", [
    ("/**: {ros__parameters: {a: 1}}", True),
    ("/left/reasoning_planner: {ros__parameters: {a: 1}}", True),
    ("left: {reasoning_planner: {ros__parameters: {a: 1}}}", True),
    ("/left/*: {ros__parameters: {a: 1}}", True),
    ("/*/reasoning_planner: {ros__parameters: {a: 1}}", True),
    ("/**/reasoning_planner: {ros__parameters: {a: 1}}", True),
    ("other: {ros__parameters: {a: 1}}\n/**: {ros__parameters: {a: 1}}", True),
    ("reasoning_planner: {ros__parameters: {a: 1}}", False),
    ("/right/reasoning_planner: {ros__parameters: {a: 1}}", False),
    ("/left/reasoning_planner_2: {ros__parameters: {a: 1}}", False),
    ("/*: {ros__parameters: {a: 1}}", False),
    ("/: {ros__parameters: {a: 1}}", False),
    ("{}", True), ("a: 1", True), ("[", True)])
def test_patterns(tmp_path, text, fits):
    path = tmp_path / "some.yaml"
    path.write_text(text)
    arguments = ["node", "--ros-args", "-p", "x:=1", "--params-file", str(path)]
    problems = foreign_files(arguments, NODE)
    assert (problems == []) == fits
    assert fits or problems[0].startswith(f"{path}: holds parameters of /")


def test_a_missing_file_and_a_flag_without_one_are_left_to_ros():
    assert foreign_files(["--params-file", "/no/such.yaml", "--params-file"], NODE) == []


def test_what_may_change_is_a_known_parameter():
    from reasoning_planner.config import NodeConfig, flattened

    names = flattened(NodeConfig())
    changeable = [name for name in names if is_changeable(name)]
    assert {"deadline_s", "route_text", "policies.model_failed", "limits.max_speed_mps"} <= \
        set(changeable)
    assert not [name for name in changeable if name.startswith(("model.", "cameras.", "history."))]
