"""The file that says which topic is which input: read for `--topics`, written as a proposal."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Mapping, Sequence

import numpy as np
import yaml

from ..errors import ConfigError
from .survey import CameraTopic, PoseTopic, Survey

SLOT_NAMES = ("front_left", "front", "front_right", "front_tele", "camera4", "camera5", "camera6",
              "camera7")
KEYS = ("odometry", "cameras", "base_frame")


def read_topics(path: Path) -> dict[str, Any]:
    """A `--topics` file.

    Raises:
        ConfigError: it cannot be read, is no YAML mapping, or has an unknown or empty key.
    """
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise ConfigError([f"{path}: {reason}, expected a YAML file of topics"]) from error
    if not isinstance(content, dict) or not content:
        raise ConfigError([f"{path}: given {type(content).__name__}, expected "
                           f"{', '.join(KEYS)}"])
    problems = [f"{path}: unknown key {key!r}, expected one of {', '.join(KEYS)}"
                for key in content if key not in KEYS]
    problems += [f"{path}: {key}: given {content[key]!r}, expected a name"
                 for key in ("odometry", "base_frame")
                 if key in content and not (isinstance(content[key], str) and content[key])]
    if problems:
        raise ConfigError(problems)
    wanted_cameras(content.get("cameras", {}), len(SLOT_NAMES))
    return content


def wanted_cameras(given: Any, slots: int) -> dict[int, str]:
    """Slot -> topic, from a mapping by slot name or a list in the order of the slots."""
    names = SLOT_NAMES[:slots]
    if isinstance(given, list):
        if len(given) > slots:
            raise ConfigError([f"cameras: given {len(given)} topics, expected at most {slots}"])
        given = dict(zip(names, given))
    if not isinstance(given, dict):
        raise ConfigError([f"cameras: given {given!r}, expected topics by {', '.join(names)}"])
    problems = [f"cameras: unknown slot {name!r}, expected one of {', '.join(names)}"
                for name in given if name not in names]
    problems += [f"cameras.{name}: given {topic!r}, expected a topic" for name, topic in
                 given.items() if topic is not None and not isinstance(topic, str)]
    if problems:
        raise ConfigError(problems)
    return {names.index(name): topic for name, topic in given.items() if topic}


def proposal(found: Survey, notes: Sequence[str], odometry: Sequence[PoseTopic],
             cameras: Mapping[int, Sequence[CameraTopic]], slots: int) -> str:
    """The YAML text: chosen topics, rivals as comments, what each of them is behind it.

    Args:
        odometry, cameras: candidates, best first; cameras by slot.
        slots: how many camera slots to list; 0 leaves cameras out.
    """
    lines = [f"# topics of {found.bag_name} for --topics; of alternatives the first is proposed",
             *[f"# {note}" for note in notes]]
    lines += _choices("odometry", [(p.topic.name, _describe_pose(found, p)) for p in odometry])
    if slots:
        lines.append("cameras:")
        for slot in range(slots):
            lines += _choices(f"  {SLOT_NAMES[slot]}", [
                (c.topic.name, _describe_camera(found, c)) for c in cameras.get(slot, ())])
    return "\n".join(lines) + "\n"


def _choices(key: str, options: Sequence[tuple[str, str]]) -> list[str]:
    if not options:
        return [f"{key}: null"]
    (first, told), *others = options
    indent = " " * (len(key) - len(key.lstrip()))
    return [f"{key}: {first}  # {told}",
            *[f"{indent}# {key.strip()}: {name}  # {what}" for name, what in others]]


def _describe_pose(found: Survey, pose: PoseTopic) -> str:
    return (f"{pose.topic.type}, {found.rate_hz(pose.topic.name):.0f} Hz, "
            f"{pose.frame_id or '(no frame)'} -> {pose.child_frame_id or '(no child frame)'}, "
            f"{pose.moved_m:.0f} m driven")


def _describe_camera(found: Survey, camera: CameraTopic) -> str:
    parts = [camera.topic.type, f"{found.rate_hz(camera.topic.name):.0f} Hz"]
    if np.isfinite(camera.yaw_rad):
        parts.append(f"looks {np.degrees(camera.yaw_rad):+.0f} degrees")
    if np.isfinite(camera.field_of_view_rad):
        parts.append(f"field of view {np.degrees(camera.field_of_view_rad):.0f} degrees")
    return ", ".join(parts)
