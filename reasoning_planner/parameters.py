"""The node's parameters: declared and checked at once, changed while it runs, and their files.

Knows ROS parameters and `config.py`; what a changed setting does is the node's business.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Callable, Iterator, Sequence

import yaml
from rcl_interfaces.msg import ParameterDescriptor, SetParametersResult
from rclpy.node import Node
from rclpy.parameter import Parameter

from .config import NodeConfig, flattened, from_mapping, nested
from .errors import ConfigError

OWN_PARAMETERS_OF_ROS = ("use_sim_time", "start_type_description_service")
# What may change while the node is configured; the rest is built into buffers and the model.
CHANGEABLE = ("deadline_s", "max_plan_age_s", "settle_s", "silence_s", "publish_rate_hz",
              "route_text")
CHANGEABLE_GROUPS = ("limits.", "policies.", "reanchor.", "kinematic.")


def read_parameters(node: Node) -> NodeConfig:
    """Declare what the parameter file left out, then check everything at once.

    Raises:
        ConfigError: every unknown, ill-typed or out-of-range parameter.
    """
    any_type = ParameterDescriptor(dynamic_typing=True)     # types are checked by NodeConfig
    for name, value in flattened(NodeConfig()).items():
        if node.has_parameter(name):
            node.set_descriptor(name, any_type)
        elif not any(node.has_parameter(group) for group in _groups(name)):
            node.declare_parameter(name, value, any_type)
    return from_mapping(NodeConfig, nested(_given(node)))


def _groups(name: str) -> Iterator[str]:
    """"a.b.c" -> "a", "a.b"."""
    parts = name.split(".")
    return (".".join(parts[:i]) for i in range(1, len(parts)))


def _given(node: Node) -> dict[str, Any]:
    return {name: parameter.value
            for name, parameter in node.get_parameters_by_prefix("").items() if _is_ours(name)}


def _is_ours(name: str) -> bool:
    return name not in OWN_PARAMETERS_OF_ROS and not name.startswith("qos_overrides")


def is_changeable(name: str) -> bool:
    """Whether a parameter may change while the node is configured."""
    return name in CHANGEABLE or name.startswith(CHANGEABLE_GROUPS)


def watch_parameters(node: Node, is_configured: Callable[[], bool],
                     apply: Callable[[NodeConfig], None]) -> None:
    """From now on check what is set, with the reason of a refusal, and hand it on.

    Args:
        is_configured: asked at every change; then only what `is_changeable` may change.
        apply: called with the whole new configuration.
    """
    def on_set(changes: list[Parameter]) -> SetParametersResult:
        ours = {change.name: change.value for change in changes if _is_ours(change.name)}
        if not ours:
            return SetParametersResult(successful=True)
        fixed = [name for name in ours if not is_changeable(name)] if is_configured() else []
        if fixed:
            return SetParametersResult(successful=False, reason="; ".join(
                f"{name}: fixed while the node is configured, expected a cleanup first"
                for name in fixed))
        try:
            config = from_mapping(NodeConfig, nested({**_given(node), **ours}))
        except ConfigError as error:
            return SetParametersResult(successful=False, reason=str(error))
        apply(config)
        return SetParametersResult(successful=True)

    node.add_on_set_parameters_callback(on_set)


# Files -------------------------------------------------------------------------------------------

def foreign_files(arguments: Sequence[str], node_name: str) -> list[str]:
    """Parameter files on a command line that hold nothing for this node, said in words.

    ROS reads such a file and drops it without a word, and the node runs with its defaults.

    Args:
        arguments: of the process.
        node_name: fully qualified.
    """
    problems = []
    for path in _parameter_files(arguments):
        try:
            tree = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError):       # ROS has read it, in whatever form
            continue
        names = sorted(set(_node_names(tree)))
        if names and not any(_matches(name, node_name) for name in names):
            problems.append(f"{path}: holds parameters of {', '.join(names)}, expected some of "
                            f"{node_name} or /**: none is used")
    return problems


def _parameter_files(arguments: Sequence[str]) -> Iterator[str]:
    for flag, value in zip(arguments, arguments[1:]):
        if flag == "--params-file":
            yield value


def _node_names(tree: Any, prefix: str = "") -> Iterator[str]:
    """Names above every `ros__parameters`, namespaces included."""
    if not isinstance(tree, dict):
        return
    for key, below in tree.items():
        if key == "ros__parameters":
            yield prefix or "/"
        else:
            yield from _node_names(below, f"{prefix}/{str(key).strip('/')}")


def _matches(pattern: str, node_name: str) -> bool:
    """`*` stands for one name, `**` for any number of them."""
    parts = [r"(/[^/]+)*" if part == "**" else "/" + re.escape(part).replace(r"\*", "[^/]*")
             for part in pattern.strip("/").split("/")]
    return re.fullmatch("".join(parts), node_name) is not None
