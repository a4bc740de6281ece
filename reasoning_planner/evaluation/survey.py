"""What a bag holds that an evaluation can use: poses, cameras, their mounting and calibration.

Topics are found by what their messages hold, not by the name of their type: a header, a pose and a
twist are odometry, whoever defined the message. Reads every pose and one message of each camera.
Decides nothing: `topics.py` does.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Iterable, Iterator, Mapping, Optional, Sequence

import numpy as np

from ..bags import Bag, RawMessage, Topic
from ..conversions import stamp_ns as nanoseconds
from ..datatypes import OdometrySample
from ..errors import DataError
from ..perception import frames
from ..perception.frames import optical

HEADER = "std_msgs/msg/Header"
CAMERA_INFO = "sensor_msgs/msg/CameraInfo"
TF = "tf2_msgs/msg/TFMessage"
PINHOLE_MODELS = ("", "plumb_bob", "rational_polynomial")
_POSES = {"geometry_msgs/msg/Pose": (), "geometry_msgs/msg/PoseWithCovariance": ("pose",)}
_TWISTS = {"geometry_msgs/msg/Twist": (), "geometry_msgs/msg/TwistWithCovariance": ("twist",)}
_POSE_ONLY = ("geometry_msgs/msg/PoseStamped", "geometry_msgs/msg/PoseWithCovarianceStamped")
_RAW_FIELDS = {"header", "height", "width", "encoding", "step", "data"}
_COMPRESSED_FIELDS = {"header", "format", "data"}
_STRIDE_NS = 1_000_000_000          # lengths are measured in such steps: noise does not add up


@dataclass(frozen=True)
class PoseShape:
    """Where a message keeps its pose and, if it has one, its twist: names to follow."""

    pose: tuple[str, ...]
    twist: tuple[str, ...] = ()
    has_child_frame: bool = False


@dataclass(frozen=True)
class PoseTopic:
    """A topic that says where the vehicle was.

    Attributes:
        topic: as recorded.
        shape: how to read its messages.
        frame_id, child_frame_id: of the first message; the second is empty where there is none.
        stamped: header stamps are set; otherwise the log time has to serve.
        samples: what could be read, as recorded: (N,) in log order.
        refused: messages that could not be read.
    """

    topic: Topic
    shape: PoseShape
    frame_id: str
    child_frame_id: str
    stamped: bool
    samples: tuple[OdometrySample, ...]
    refused: int = 0

    @property
    def moved_m(self) -> float:
        """Length of the way by the poses."""
        rows = _every(self.samples, _STRIDE_NS)
        steps = np.diff([s.position for s in rows], axis=0) if len(rows) > 1 else np.zeros((0, 3))
        return float(np.linalg.norm(steps, axis=1).sum())

    @property
    def twist_m(self) -> float:
        """Length of the way by the twists."""
        speeds = np.array([np.linalg.norm(s.linear_velocity) for s in self.samples])
        seconds = np.clip(np.diff([s.stamp_ns for s in self.samples]) * 1e-9, 0.0, 1.0)
        return float(np.sum(0.5 * (speeds[1:] + speeds[:-1]) * seconds)) if len(speeds) else 0.0

    @property
    def stands_against_twist(self) -> bool:
        """The poses stay where they are although the twist says that the vehicle drove."""
        return self.moved_m < 0.01 * self.twist_m and self.twist_m > 1.0


@dataclass(frozen=True)
class Calibration:
    """A camera_info: (3, 3) k in pixels, (D,) distortion, whether its model is a pinhole's."""

    k: np.ndarray
    distortion: np.ndarray
    width: int
    height: int
    is_pinhole: bool

    @property
    def field_of_view_rad(self) -> float:
        """Horizontal; NaN without a focal length."""
        focal = float(self.k[0, 0])
        return 2.0 * float(np.arctan(0.5 * self.width / focal)) if focal > 0.0 else np.nan


@dataclass(frozen=True)
class CameraTopic:
    """A topic with images.

    Attributes:
        topic: as recorded.
        compressed: files (JPEG, PNG) rather than pixels.
        frame_id: of the first image.
        stamped: header stamps are set.
        calibration: of the nearest camera_info topic, None without one.
        base_from_camera: (4, 4) optical frame (z ahead) in the base; None where unknown.
    """

    topic: Topic
    compressed: bool
    frame_id: str
    stamped: bool
    calibration: Optional[Calibration]
    base_from_camera: Optional[np.ndarray]

    @property
    def yaw_rad(self) -> float:
        """Where it looks, seen from above, 0 ahead and positive to the left; NaN if unknown."""
        if self.base_from_camera is None:
            return np.nan
        ahead = self.base_from_camera[:3, 2]
        return float(np.arctan2(ahead[1], ahead[0]))

    @property
    def field_of_view_rad(self) -> float:
        """Horizontal; NaN without a calibration."""
        return self.calibration.field_of_view_rad if self.calibration else np.nan


@dataclass(frozen=True)
class Survey:
    """What was found in one bag.

    Attributes:
        bag_name: for messages.
        duration_s: by log times.
        topics: every topic with messages, by name.
        poses: odometry, then plain poses where there is no odometry that moves.
        cameras: every image topic, by name.
        transforms: child frame -> (parent frame, (4, 4) parent_from_child).
        undefined: types that have no definition.
        unreadable: topics of which the first message could not be read, with the reason.
    """

    bag_name: str
    duration_s: float
    topics: Mapping[str, Topic]
    poses: tuple[PoseTopic, ...]
    cameras: tuple[CameraTopic, ...]
    transforms: Mapping[str, tuple[str, np.ndarray]]
    undefined: tuple[str, ...]
    unreadable: tuple[str, ...] = ()

    def rate_hz(self, topic: str) -> float:
        """Messages a second over the whole bag."""
        return self.topics[topic].count / self.duration_s if self.duration_s > 0.0 else 0.0


def survey(bag: Bag, name: str) -> Survey:
    """Look through a bag once for its poses, and at the first message of everything else."""
    filled = {t.name: t for t in bag.topics.values() if t.count}
    fields = {t.type: bag.fields(t.type) for t in filled.values()}
    transforms = static_transforms(bag)
    poses = _odometry_topics(bag, filled, fields)
    if all(p.stands_against_twist for p in poses):
        poses += _read_poses(bag, {t.name: pose_shape(fields[t.type]) for t in filled.values()
                                   if t.type in _POSE_ONLY})
    base_frame = next((p.child_frame_id for p in poses if p.child_frame_id), "base_link")
    infos = {t.name: _calibration(bag, t.name) for t in filled.values() if t.type == CAMERA_INFO}
    cameras, unreadable = [], []
    for topic in filled.values():
        is_compressed = is_image(fields[topic.type])
        if is_compressed is None:
            continue
        try:
            cameras.append(_camera(bag, topic, is_compressed, infos, transforms,
                                   _known_base(base_frame, transforms)))
        except DataError as error:
            unreadable.append(str(error))
    return Survey(name, bag.duration_s, filled, tuple(poses), tuple(cameras), transforms,
                  tuple(sorted(kind for kind, held in fields.items() if not held)),
                  tuple(unreadable))


# Poses

def pose_shape(fields: Mapping[str, str]) -> Optional[PoseShape]:
    """How to read a pose out of messages with these fields; None when there is none."""
    if fields.get("header") != HEADER:
        return None
    pose = next(((name, *_POSES[kind]) for name, kind in fields.items() if kind in _POSES), None)
    twist = next(((name, *_TWISTS[kind]) for name, kind in fields.items() if kind in _TWISTS), ())
    return None if pose is None else PoseShape(pose, twist, "child_frame_id" in fields)


def _odometry_topics(bag: Bag, filled: Mapping[str, Topic],
                     fields: Mapping[str, Mapping[str, str]]) -> list[PoseTopic]:
    shapes = {t.name: pose_shape(fields[t.type]) for t in filled.values()}
    return _read_poses(bag, {name: shape for name, shape in shapes.items()
                             if shape is not None and shape.twist and shape.has_child_frame})


def _read_poses(bag: Bag, shapes: Mapping[str, Optional[PoseShape]]) -> list[PoseTopic]:
    """Every message of some topics in one pass over the bag."""
    shapes = {name: shape for name, shape in shapes.items() if shape is not None}
    samples: dict[str, list[OdometrySample]] = {name: [] for name in shapes}
    first: dict[str, Any] = {}
    refused = dict.fromkeys(shapes, 0)
    for raw in bag.messages(list(shapes)) if shapes else ():
        try:
            message = bag.decode(raw)
        except DataError:
            refused[raw.topic] += 1
            continue
        opened = first.setdefault(raw.topic, message)
        stamped = nanoseconds(opened.header.stamp) != 0
        samples[raw.topic].append(sample_of(message, shapes[raw.topic],
                                            None if stamped else raw.log_time_ns))
    return [PoseTopic(bag.topics[name], shapes[name], first[name].header.frame_id,
                      getattr(first[name], "child_frame_id", ""),
                      nanoseconds(first[name].header.stamp) != 0, tuple(samples[name]),
                      refused[name]) for name in shapes if name in first]


def sample_of(message: Any, shape: PoseShape, stamp_ns: Optional[int] = None) -> OdometrySample:
    """A message as OdometrySample in its own frames, unchecked; no twist gives zeros.

    Args:
        stamp_ns: instead of the header's.
    """
    pose = functools.reduce(getattr, shape.pose, message)
    zero = np.zeros(3)
    twist = functools.reduce(getattr, shape.twist, message) if shape.twist else None
    return OdometrySample(
        stamp_ns=nanoseconds(message.header.stamp) if stamp_ns is None else stamp_ns,
        position=vector(pose.position), quaternion_xyzw=vector(pose.orientation, "xyzw"),
        linear_velocity=zero if twist is None else vector(twist.linear),
        angular_velocity=zero if twist is None else vector(twist.angular))


def vector(value: Any, names: str = "xyz") -> np.ndarray:
    """Fields of a message -> (len(names),) float64."""
    return np.array([getattr(value, name) for name in names], dtype=np.float64)


def _every(samples: Iterable[OdometrySample], stride_ns: int) -> list[OdometrySample]:
    kept: list[OdometrySample] = []
    for sample in samples:
        if np.isfinite(sample.position).all() and (
                not kept or sample.stamp_ns - kept[-1].stamp_ns >= stride_ns):
            kept.append(sample)
    return kept


# Cameras

def is_image(fields: Mapping[str, str]) -> Optional[bool]:
    """True for compressed images, False for raw ones, None for anything else."""
    names = set(fields)
    if fields.get("header") != HEADER or fields.get("data") != "uint8[]":
        return None
    return False if _RAW_FIELDS <= names else True if _COMPRESSED_FIELDS <= names else None


def header_stamp_ns(raw: RawMessage) -> int:
    """The header's stamp of a message that begins with a header, without decoding the rest.

    Raises:
        DataError: too short for one.
    """
    if len(raw.data) < 12:
        raise DataError(f"{raw.topic}: given {len(raw.data)} bytes, expected a header")
    seconds, rest = struct.unpack_from("<iI" if raw.data[1] & 1 else ">iI", raw.data, 4)
    return seconds * 1_000_000_000 + rest


def _camera(bag: Bag, topic: Topic, compressed: bool,
            infos: Mapping[str, Optional[Calibration]],
            transforms: Mapping[str, tuple[str, np.ndarray]], base_frame: str) -> CameraTopic:
    header = _first(bag, topic.name).header
    near = nearest_info(topic.name, infos)
    info = infos[near] if near is not None else None
    return CameraTopic(topic, compressed, header.frame_id, nanoseconds(header.stamp) != 0, info,
                       optical(base_from_frame(transforms, base_frame, header.frame_id)))


def nearest_info(image_topic: str, info_topics: Iterable[str]) -> Optional[str]:
    """The camera_info nearest to an image topic: in its namespace, or in one above."""
    namespaces = list(PurePosixPath(image_topic).parents)
    return max((name for name in info_topics if PurePosixPath(name).parent in namespaces),
               key=lambda name: name.count("/"), default=None)


def _first(bag: Bag, topic: str) -> Any:
    for raw in bag.messages([topic]):
        return bag.decode(raw)
    raise DataError(f"{topic}: no message could be read")


def _calibration(bag: Bag, topic: str) -> Optional[Calibration]:
    try:
        info = _first(bag, topic)
    except DataError:
        return None
    return calibration_from_msg(info)


def calibration_from_msg(info: Any) -> Calibration:
    """sensor_msgs/CameraInfo -> Calibration, whatever its numbers are."""
    return Calibration(np.asarray(info.k, dtype=np.float64).reshape(3, 3),
                       np.asarray(info.d, dtype=np.float64), int(info.width), int(info.height),
                       info.distortion_model in PINHOLE_MODELS)


# Mounting

def static_transforms(bag: Bag) -> dict[str, tuple[str, np.ndarray]]:
    """child frame -> (parent frame, parent_from_child), of the messages that can be read."""
    return transforms_of(_readable(bag, static_topics(bag)))


def _readable(bag: Bag, topics: Sequence[str]) -> Iterator[Any]:
    for raw in bag.messages(topics) if topics else ():
        try:
            yield bag.decode(raw)
        except DataError:
            continue


def static_topics(bag: Bag) -> list[str]:
    """Every tf_static topic with messages."""
    return [t.name for t in bag.topics.values()
            if t.type == TF and t.count and t.name.endswith("tf_static")]


def transforms_of(messages: Iterable[Any]) -> dict[str, tuple[str, np.ndarray]]:
    """TFMessages -> child frame -> (parent frame, parent_from_child)."""
    transforms = {}
    for message in messages:
        for item in message.transforms:
            rotation = frames.normalised_quaternion(vector(item.transform.rotation, "xyzw"))
            if isinstance(rotation, np.ndarray):
                matrix = frames.transform(frames.matrix_from_quaternion(rotation),
                                          vector(item.transform.translation))
                transforms[item.child_frame_id] = (item.header.frame_id, matrix)
    return transforms


def _known_base(child_frame: str, transforms: Mapping[str, tuple[str, np.ndarray]]) -> str:
    """base_link where the mounting speaks of it, else the odometry's own frame."""
    named = {"base_link"} & ({parent for parent, _ in transforms.values()} | set(transforms))
    return "base_link" if named else child_frame


def base_from_frame(transforms: Mapping[str, tuple[str, np.ndarray]], base_frame: str,
                    frame: str) -> Optional[np.ndarray]:
    """(4, 4) from a frame to the base, both anywhere in one tree; None when they do not meet."""
    up_from_base = _to_root(transforms, base_frame)
    up_from_frame = _to_root(transforms, frame)
    for name, common_from_frame in up_from_frame.items():
        if name in up_from_base:
            return frames.compose(frames.inverse(up_from_base[name]), common_from_frame)
    return None


def _to_root(transforms: Mapping[str, tuple[str, np.ndarray]],
             frame: str) -> dict[str, np.ndarray]:
    """Each frame from this one up to the root -> (4, 4) that_from_this."""
    found = {frame: np.eye(4)}
    while frame in transforms:
        parent, parent_from_child = transforms[frame]
        if parent in found:             # a loop: the bag contradicts itself
            break
        found[parent] = frames.compose(parent_from_child, found[frame])
        frame = parent
    return found
