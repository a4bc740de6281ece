"""Which topic of a bag is which input of the planner.

`resolve` takes what a survey found and either decides or, where more than one topic would do, says
so with a proposal as YAML: the text that `--topics FILE` reads, the best candidate first, the
others beside it as comments.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Mapping, Optional, Sequence

import numpy as np

from ..errors import DataError
from .survey import CameraTopic, PoseTopic, Survey, base_from_frame
from .topics_file import SLOT_NAMES, proposal, wanted_cameras

LEFT, FRONT, RIGHT, TELE = range(4)
# Of one camera's topics the first that is there: the pixels as the driver gave them.
_PREFERRED = ("image_raw", "image_color", "image", "image_rect_color", "image_rect")
_NOT_A_CAMERA = {"depth", "disparity", "mask", "segmentation", "semantic", "debug",
                 "compresseddepth", "theora", "overlay", "rois", "visualization", "viz", "label"}
_AHEAD_RAD, _BEHIND_RAD = np.radians(20.0), np.radians(110.0)
_TELE_SHARE = 0.6                   # of the front camera's angle is what a telephoto sees at most
_UPRIGHT = 0.5                      # cosine of the tilt up to which a frame counts as level


@dataclass(frozen=True)
class TopicMap:
    """Topics by input.

    Attributes:
        odometry: topic of the poses.
        cameras: topic of each camera slot, "" where the bag has none.
        base_frame: the vehicle's reference frame, to which poses are brought.
        notes: what was assumed, one line each.
    """

    odometry: str
    cameras: tuple[str, ...] = ()
    base_frame: str = ""
    notes: tuple[str, ...] = ()


@dataclass
class _Findings:
    """Candidates by input, best first, and what makes a choice unsure."""

    odometry: list[PoseTopic] = field(default_factory=list)
    cameras: dict[int, list[CameraTopic]] = field(default_factory=dict)
    doubts: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class AmbiguousTopics(DataError):
    """More than one topic would do; `proposal` is a file for `--topics`."""

    def __init__(self, text: str, proposal: str):
        self.proposal = proposal
        super().__init__(text)


def resolve(found: Survey, slots: int, anchor: int, wanted: Optional[Mapping[str, Any]] = None,
            odometry_only: bool = False) -> TopicMap:
    """Choose a topic for every input.

    Args:
        found: of the bag.
        slots, anchor: camera slots of the planner, and the one whose stamp is t0.
        wanted: as `read_topics` gives it; decides alone where it names a topic.
        odometry_only: cameras are not looked for.
    Raises:
        AmbiguousTopics: more than one topic would do.
        DataError: no topic would do; names what the bag holds.
    """
    wanted = wanted or {}
    findings = _Findings()
    if "odometry" in wanted:
        findings.odometry = [_named(found, found.poses, wanted["odometry"], "poses")]
    else:
        _find_odometry(found, findings)
    if not odometry_only:
        if "cameras" in wanted:
            for slot, name in wanted_cameras(wanted["cameras"], slots).items():
                findings.cameras[slot] = [_named(found, found.cameras, name, "images")]
        else:
            _find_cameras(found, slots, anchor, findings)
        if anchor not in findings.cameras and not findings.doubts:
            raise DataError(_no_camera(found, anchor))
    if findings.doubts:
        raise AmbiguousTopics(f"{found.bag_name}: {'; '.join(findings.doubts)}, expected one "
                              "choice for each: correct the proposal and give it by --topics",
                              proposal(found, findings.notes, findings.odometry,
                                       findings.cameras, 0 if odometry_only else slots))
    return _decided(found, findings, slots, wanted)


def _decided(found: Survey, findings: _Findings, slots: int,
             wanted: Mapping[str, Any]) -> TopicMap:
    odometry = findings.odometry[0]
    child = odometry.child_frame_id
    base = wanted.get("base_frame") or ("base_link" if child in ("", "base_link") or
                                        _joins(found, child, "base_link") else child)
    notes = [*findings.notes, *_notes_on(found, odometry, base)]
    cameras = tuple(findings.cameras[slot][0].topic.name if slot in findings.cameras else ""
                    for slot in range(slots)) if findings.cameras else ()
    notes += [f"no camera for slot {slot} ({SLOT_NAMES[slot]})"
              for slot, name in enumerate(cameras) if not name]
    notes += [f"{camera.topic.name}: stamps are zero, the log time is used"
              for chosen in findings.cameras.values() for camera in chosen[:1]
              if not camera.stamped]
    return TopicMap(odometry.topic.name, cameras, base, tuple(notes))


def _joins(found: Survey, child: str, parent: str) -> bool:
    return base_from_frame(found.transforms, parent, child) is not None


# Odometry

def _find_odometry(found: Survey, findings: _Findings) -> None:
    usable = [p for p in found.poses if not p.stands_against_twist and len(p.samples) > 1]
    findings.notes += [f"{p.topic.name} is not used: its poses stay in place while its twist "
                       f"says {p.twist_m:.0f} m" for p in found.poses if p.stands_against_twist]
    if not usable:
        raise DataError(_no_odometry(found, findings.notes))
    findings.odometry = sorted(usable, key=_odometry_rank)
    best = _odometry_rank(findings.odometry[0])[:3]
    rivals = [p.topic.name for p in findings.odometry if _odometry_rank(p)[:3] == best]
    if len(rivals) > 1:
        findings.doubts.append(f"{' and '.join(rivals)} may be the odometry")


def _odometry_rank(pose: PoseTopic) -> tuple[Any, ...]:
    """Smaller is better; topics that agree in the first three cannot be told apart."""
    return (not pose.shape.twist, pose.frame_id != "map",
            pose.child_frame_id not in ("base_link", ""),
            "kinematic_state" not in pose.topic.name, -pose.topic.count, pose.topic.name)


def _no_odometry(found: Survey, notes: Sequence[str]) -> str:
    held = sorted({f"{t.name} ({t.type})" for t in found.topics.values()})
    undefined = (f"; no definition of {', '.join(found.undefined)}: --msg-path gives one"
                 if found.undefined else "")
    because = f" ({'; '.join(notes)})" if notes else ""
    return (f"{found.bag_name}: no odometry{because}, expected a topic with header, pose and "
            "twist such as nav_msgs/msg/Odometry; it holds "
            f"{', '.join(held) or 'no message'}{undefined}")


def _notes_on(found: Survey, odometry: PoseTopic, base: str) -> list[str]:
    name, child = odometry.topic.name, odometry.child_frame_id
    notes = []
    if not odometry.stamped:
        notes.append(f"{name}: stamps are zero, the log time is used")
    if not odometry.shape.twist:
        notes.append(f"{name}: poses without a twist, speeds come from the poses")
    if not child:
        notes.append(f"{name}: no child frame, the pose is taken as that of {base}")
    elif child != base and not _joins(found, child, base):
        notes.append(f"{name}: no transform from {child} to {base} in the bag, the pose of "
                     f"{child} is taken as that of {base}")
    if not _is_level(odometry):
        notes.append(f"{name}: the z axis of {child or 'its poses'} does not point up, expected x "
                     "ahead, y left, z up (REP-103): plans in that frame mean nothing unless the "
                     "vehicle stands")
    if odometry.refused:
        notes.append(f"{name}: {odometry.refused} messages could not be read")
    return notes


def _is_level(odometry: PoseTopic) -> bool:
    x, y, z, w = odometry.samples[len(odometry.samples) // 2].quaternion_xyzw
    norm = x * x + y * y + z * z + w * w
    return not norm > 0.0 or 1.0 - 2.0 * (x * x + y * y) / norm > _UPRIGHT


# Cameras

def _find_cameras(found: Survey, slots: int, anchor: int, findings: _Findings) -> None:
    cameras = [c for c in found.cameras if not _words(c.topic.name) & _NOT_A_CAMERA]
    groups = _by_camera(cameras)
    if not groups:
        raise DataError(_no_camera(found, anchor))
    if len(groups) == 1:
        findings.cameras[anchor] = groups[0]
        return
    assigned: dict[int, list[list[CameraTopic]]] = {}
    for group in groups:
        slot = _slot_of(group[0], groups)
        if slot is not None and slot < slots:
            assigned.setdefault(slot, []).append(group)
    for slot, rivals in sorted(assigned.items()):
        findings.cameras[slot] = [camera for group in rivals for camera in group]
        if len(rivals) > 1:
            names = " and ".join(group[0].topic.name for group in rivals)
            findings.doubts.append(f"{names} may be the {SLOT_NAMES[slot]} camera")
    if anchor not in assigned:
        findings.cameras.setdefault(anchor, [c for group in groups for c in group])
        findings.doubts.append(f"none of {len(groups)} cameras is known to be the "
                               f"{SLOT_NAMES[anchor]} one")
    if anchor in assigned and _by_name_alone(groups):
        findings.notes.append("cameras were told apart by their topics' names: the bag has no "
                              "mounting (tf_static) for them")


def _by_camera(cameras: Sequence[CameraTopic]) -> list[list[CameraTopic]]:
    """Topics of one camera together, the preferred one first."""
    groups: dict[str, list[CameraTopic]] = {}
    for camera in cameras:
        path = re.sub(r"/compressed$", "", camera.topic.name)
        groups.setdefault(camera.frame_id or path.rpartition("/")[0], []).append(camera)
    return [sorted(group, key=_preference) for group in groups.values()]


def _preference(camera: CameraTopic) -> tuple[Any, ...]:
    name = re.sub(r"/compressed$", "", camera.topic.name).rpartition("/")[2]
    rank = _PREFERRED.index(name) if name in _PREFERRED else len(_PREFERRED)
    return rank, -camera.topic.count, camera.compressed, camera.topic.name


def _words(topic: str) -> set[str]:
    return set(re.split(r"[^a-z0-9]+", topic.lower()))


def _slot_of(camera: CameraTopic, groups: Sequence[Sequence[CameraTopic]]) -> Optional[int]:
    """The slot a camera looks for: by its mounting where the bag has it, else by its name."""
    yaw = camera.yaw_rad
    if np.isfinite(yaw):
        if abs(yaw) > _BEHIND_RAD:
            return None
        if abs(yaw) > _AHEAD_RAD:
            return LEFT if yaw > 0.0 else RIGHT
        angles = [g[0].field_of_view_rad for g in groups if abs(g[0].yaw_rad) <= _AHEAD_RAD]
        widest = max((angle for angle in angles if np.isfinite(angle)), default=np.nan)
        return TELE if camera.field_of_view_rad <= _TELE_SHARE * widest else FRONT
    return _slot_by_name(camera.topic.name)


def _slot_by_name(topic: str) -> Optional[int]:
    words = set(re.split(r"[^a-z]+", topic.lower()))
    if words & {"rear", "back", "backward"}:
        return None
    if words & {"tele", "telephoto", "narrow"}:
        return TELE
    if words & {"left", "fl"}:
        return LEFT
    if words & {"right", "fr"}:
        return RIGHT
    if words & {"front", "forward", "center", "centre", "wide"}:
        return FRONT
    numbers = re.findall(r"(?:camera|cam|image)_?(\d)", topic.lower())
    return int(numbers[0]) if len(numbers) == 1 and int(numbers[0]) < 4 else None


def _by_name_alone(groups: Sequence[Sequence[CameraTopic]]) -> bool:
    return not any(np.isfinite(group[0].yaw_rad) for group in groups)


def _no_camera(found: Survey, anchor: int) -> str:
    trouble = "; ".join(found.unreadable)
    held = sorted({f"{t.name} ({t.type})" for t in found.topics.values()})
    return (f"{found.bag_name}: no image topic for the {SLOT_NAMES[anchor]} camera, whose stamp "
            f"is t0{f' ({trouble})' if trouble else ''}, expected sensor_msgs/msg/Image or "
            f"CompressedImage; it holds {', '.join(held) or 'no message'}; --odometry-only "
            "evaluates the kinematic planner on the odometry alone")


def _named(found: Survey, candidates: Sequence[Any], name: str, what: str) -> Any:
    for candidate in candidates:
        if candidate.topic.name == name:
            return candidate
    fitting = ", ".join(c.topic.name for c in candidates) or "none"
    held = f"is a {found.topics[name].type}" if name in found.topics else "is not in the bag"
    raise DataError(f"{found.bag_name}: topic {name} {held}, expected one with {what}: "
                    f"{fitting}")
