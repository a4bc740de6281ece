"""A rosbag2 of the KITTI clip in test/data: `python -m reasoning_planner.evaluation.kitti_drive`.

Topics, all reliable, at 10 Hz with header stamps equal to log times:
    /camera/left/image_raw/compressed  sensor_msgs/CompressedImage, the clip's JPEGs byte for byte
                                       (raw images would make 24 MB of 5)
    /camera/left/camera_info           sensor_msgs/CameraInfo, rectified: no distortion
    /localization/kinematic_state      nav_msgs/Odometry, map -> base_link, twist in base_link
    /tf_static                         base_link -> camera_left_optical, once, transient local
Odometry stays at the 10 Hz at which KITTI gives poses: nothing is interpolated, and 0.1 s between
samples is half of what the planner bridges.

Mounting. base_link is the ground below the rear axle. The camera is 1.65 m above the road (KITTI
paper) and 1.03 m ahead of the rear axle: 0.81 m + 0.27 m from GPS/IMU to camera (KITTI's
calibration files), less 0.05 m from GPS/IMU to axle (KITTI's set-up drawing, where 1.68 m from
camera to front axle and a wheelbase of 2.71 m agree). Assumed: the camera is on the centre line
and looks straight ahead and level. With this the rear axle drifts outwards by 1.4 degrees of slip
at 4.6 m/s^2, as a tyre does, and upwards by up to 0.2 m/s, so the camera in truth looks about one
degree down. The map frame is base_link at frame 0.

Times. The clip has no times of its own: frame i is at 2011-10-03 12:00:00 UTC (the day these
intrinsics were in use; the hour is made up) plus i * 0.1 s exactly, where KITTI's true period is
about 0.104 s, so speeds are some 4 % high.

Knows nothing of the planner; needs `rosbags`, not ROS.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from rosbags.interfaces import (Qos, QosDurability, QosHistory, QosLiveliness, QosReliability,
                                QosTime)
from rosbags.rosbag2 import StoragePlugin, Writer
from rosbags.typesys import Stores, get_typestore

from ..datatypes import STEP_NS, STEP_S
from ..errors import DataError, PlannerError
from ..perception.frames import compose, inverse, quaternion_from_matrix, transform

START_NS = 1_317_643_200 * 10**9        # 2011-10-03 12:00:00 UTC
CAMERA_HEIGHT_M = 1.65
CAMERA_AHEAD_OF_REAR_AXLE_M = 1.03

IMAGE_TOPIC = "/camera/left/image_raw/compressed"
CAMERA_INFO_TOPIC = "/camera/left/camera_info"
ODOMETRY_TOPIC = "/localization/kinematic_state"
STATIC_TF_TOPIC = "/tf_static"
MAP_FRAME, BASE_FRAME, CAMERA_FRAME = "map", "base_link", "camera_left_optical"

# Columns: the optical axes (x right, y down, z forward) in base_link (x forward, y left, z up).
BASE_FROM_CAMERA = transform(np.array([[0.0, 0.0, 1.0], [-1.0, 0.0, 0.0], [0.0, -1.0, 0.0]]),
                             np.array([CAMERA_AHEAD_OF_REAR_AXLE_M, 0.0, CAMERA_HEIGHT_M]))


@dataclass(frozen=True)
class Clip:
    """A drive as KITTI stores it.

    Attributes:
        images: N encoded JPEGs.
        width, height: pixels.
        projection: (3, 4) float64, P0: pixels from the left camera's rectified frame.
        world_from_camera: (N, 4, 4) float64, camera axes, world = camera at frame 0.
    """

    images: tuple[bytes, ...]
    width: int
    height: int
    projection: np.ndarray
    world_from_camera: np.ndarray


def read_clip(folder: str | Path) -> Clip:
    """Read image_l/*.jpg, poses.txt and calib.txt.

    Raises:
        DataError: a file is missing, no JPEG or no table of 12 numbers a row, or there is not one
            pose for each image.
    """
    folder = Path(folder)
    poses = _matrices(folder / "poses.txt")
    projections = _matrices(folder / "calib.txt")
    files = sorted((folder / "image_l").glob("*.jpg"))
    if len(files) != len(poses) or len(files) < 3:
        raise DataError(f"{folder}: given {len(files)} images in image_l and {len(poses)} poses, "
                        "expected as many of one as of the other, 3 or more")
    images = tuple(file.read_bytes() for file in files)
    for file, image in zip(files, images):
        if not image.startswith(b"\xff\xd8"):
            raise DataError(f"{file}: given a file that starts with {image[:4]!r}, "
                            "expected a JPEG")
    first = cv2.imdecode(np.frombuffer(images[0], np.uint8), cv2.IMREAD_UNCHANGED)
    if first is None:
        raise DataError(f"{files[0]}: the JPEG cannot be decoded")
    last_row = np.broadcast_to([0.0, 0.0, 0.0, 1.0], (len(poses), 1, 4))
    return Clip(images, first.shape[1], first.shape[0], projections[0],
                np.concatenate([poses, last_row], axis=1))


def _matrices(file: Path) -> np.ndarray:
    """(N, 3, 4) float64 from a text file of 12 numbers a line."""
    try:
        rows = np.loadtxt(file, dtype=np.float64, ndmin=2)
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: {error}, expected rows of 12 numbers") from error
    if rows.size == 0 or rows.shape[1] != 12 or not np.isfinite(rows).all():
        raise DataError(f"{file}: given a table of shape {rows.shape}, "
                        "expected rows of 12 finite numbers")
    return rows.reshape(-1, 3, 4)


def base_poses(world_from_camera: np.ndarray) -> np.ndarray:
    """Camera poses in camera axes -> base_link poses in REP-103 axes.

    Args:
        world_from_camera: (N, 4, 4) float64; the first is the identity up to rounding.
    Returns:
        (N, 4, 4) float64, map_from_base; map is base_link at frame 0.
    """
    camera_from_base = inverse(BASE_FROM_CAMERA)
    world_from_base = [compose(pose, camera_from_base) for pose in world_from_camera]
    map_from_world = inverse(world_from_base[0])
    return np.stack([compose(map_from_world, pose) for pose in world_from_base])


def body_twists(map_from_base: np.ndarray, period_s: float = STEP_S) -> np.ndarray:
    """Velocities in the moving frame, from poses alone.

    Inside, the constant twist that leads from the pose before to the pose after (a central
    difference on SE(3), exact for a steady turn); at either end, the twists of the two nearest
    steps extrapolated by half a step.

    Args:
        map_from_base: (N, 4, 4) float64, N >= 3, evenly spaced in time.
        period_s: time between two poses.
    Returns:
        (N, 6) float64: linear velocity in m/s, angular velocity in rad/s, both in base_link.
    """
    n = len(map_from_base)
    assert n >= 3, n
    twists = np.empty((n, 6))
    for i in range(1, n - 1):
        twists[i] = _twist(map_from_base[i - 1], map_from_base[i + 1], 2.0 * period_s)
    for end, inner, far in ((0, 1, 2), (n - 1, n - 2, n - 3)):
        sign = 1.0 if end == 0 else -1.0
        near = _twist(map_from_base[end], map_from_base[inner], sign * period_s)
        next_one = _twist(map_from_base[inner], map_from_base[far], sign * period_s)
        twists[end] = 1.5 * near - 0.5 * next_one
    return twists


def _twist(a: np.ndarray, b: np.ndarray, period_s: float) -> np.ndarray:
    """(6,) the constant body twist that leads from pose a to pose b: the logarithm on SE(3)."""
    motion = compose(inverse(a), b)
    turn = cv2.Rodrigues(motion[:3, :3])[0].ravel()
    angle = float(np.linalg.norm(turn))
    cross = np.array([[0.0, -turn[2], turn[1]], [turn[2], 0.0, -turn[0]],
                      [-turn[1], turn[0], 0.0]])
    factor = 1.0 / 12.0         # limit of the term below for no turn
    if angle > 1e-4:
        factor = (1.0 - 0.5 * angle / np.tan(0.5 * angle)) / angle**2
    straight = (np.eye(3) - 0.5 * cross + factor * cross @ cross) @ motion[:3, 3]
    return np.concatenate([straight, turn]) / period_s


def write_drive(clip: Clip, out: str | Path) -> None:
    """Write a clip as a rosbag2 folder (mcap); the same clip gives the same bytes.

    The folder appears under its name once it is complete.

    Raises:
        DataError: `out` exists or cannot be written.
    """
    out = Path(out)
    if out.exists():
        raise DataError(f"{out}: exists already, expected the name of a bag to be made")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as folder:
            unfinished = Path(folder) / out.name        # rosbag2 names the file like the folder
            with Writer(unfinished, version=8, storage_plugin=StoragePlugin.MCAP) as writer:
                _write_messages(clip, writer)
            os.replace(unfinished, out)
    except OSError as error:
        raise DataError(f"{out}: cannot be written: {error.strerror or error}") from error


def _write_messages(clip: Clip, writer: Writer) -> None:
    # Humble's definitions of these messages are those of every later ROS 2.
    messages = _Messages(get_typestore(Stores.ROS2_HUMBLE))
    kinds = {STATIC_TF_TOPIC: "tf2_msgs/msg/TFMessage", ODOMETRY_TOPIC: "nav_msgs/msg/Odometry",
             CAMERA_INFO_TOPIC: "sensor_msgs/msg/CameraInfo",
             IMAGE_TOPIC: "sensor_msgs/msg/CompressedImage"}
    connections = {topic: writer.add_connection(
        topic, kind, typestore=messages.store,
        offered_qos_profiles=[_qos(latched=topic == STATIC_TF_TOPIC)])
        for topic, kind in kinds.items()}

    def write(topic: str, stamp_ns: int, message: Any) -> None:
        data = messages.store.serialize_cdr(message, kinds[topic])
        writer.write(connections[topic], stamp_ns, data)

    poses = base_poses(clip.world_from_camera)
    write(STATIC_TF_TOPIC, START_NS, messages.static_tf(START_NS))
    for i, (pose, twist, image) in enumerate(zip(poses, body_twists(poses), clip.images)):
        stamp_ns = START_NS + i * STEP_NS
        write(ODOMETRY_TOPIC, stamp_ns, messages.odometry(stamp_ns, pose, twist))
        write(CAMERA_INFO_TOPIC, stamp_ns, messages.camera_info(stamp_ns, clip))
        write(IMAGE_TOPIC, stamp_ns, messages.image(stamp_ns, image))


def _qos(latched: bool) -> Qos:
    forever = QosTime(9_223_372_036, 854_775_807)       # the largest int64 of nanoseconds
    durability = QosDurability.TRANSIENT_LOCAL if latched else QosDurability.VOLATILE
    return Qos(QosHistory.KEEP_LAST, 1 if latched else 10, QosReliability.RELIABLE, durability,
               forever, forever, QosLiveliness.AUTOMATIC, forever, False)


class _Messages:
    """Makes the messages of the drive."""

    def __init__(self, store: Any):
        self.store = store

    def _make(self, kind: str, *fields: Any) -> Any:
        return self.store.types[kind](*fields)

    def _header(self, stamp_ns: int, frame: str) -> Any:
        stamp = self._make("builtin_interfaces/msg/Time", *divmod(stamp_ns, 10**9))
        return self._make("std_msgs/msg/Header", stamp, frame)

    def _rotation(self, rotation: np.ndarray) -> Any:
        return self._make("geometry_msgs/msg/Quaternion",
                          *map(float, quaternion_from_matrix(rotation)))

    def _vector(self, values: np.ndarray, kind: str = "Vector3") -> Any:
        return self._make(f"geometry_msgs/msg/{kind}", *map(float, values))

    def static_tf(self, stamp_ns: int) -> Any:
        motion = self._make("geometry_msgs/msg/Transform",
                            self._vector(BASE_FROM_CAMERA[:3, 3]),
                            self._rotation(BASE_FROM_CAMERA[:3, :3]))
        stamped = self._make("geometry_msgs/msg/TransformStamped",
                             self._header(stamp_ns, BASE_FRAME), CAMERA_FRAME, motion)
        return self._make("tf2_msgs/msg/TFMessage", [stamped])

    def odometry(self, stamp_ns: int, pose: np.ndarray, twist: np.ndarray) -> Any:
        unknown = np.zeros(36)      # a covariance of zeros says "not known"
        pose_message = self._make("geometry_msgs/msg/Pose", self._vector(pose[:3, 3], "Point"),
                                  self._rotation(pose[:3, :3]))
        twist_message = self._make("geometry_msgs/msg/Twist", self._vector(twist[:3]),
                                   self._vector(twist[3:]))
        return self._make(
            "nav_msgs/msg/Odometry", self._header(stamp_ns, MAP_FRAME), BASE_FRAME,
            self._make("geometry_msgs/msg/PoseWithCovariance", pose_message, unknown),
            self._make("geometry_msgs/msg/TwistWithCovariance", twist_message, unknown))

    def camera_info(self, stamp_ns: int, clip: Clip) -> Any:
        whole = self._make("sensor_msgs/msg/RegionOfInterest", 0, 0, 0, 0, False)
        return self._make(
            "sensor_msgs/msg/CameraInfo", self._header(stamp_ns, CAMERA_FRAME), clip.height,
            clip.width, "plumb_bob", np.zeros(5), clip.projection[:, :3].ravel(),
            np.eye(3).ravel(), clip.projection.ravel(), 0, 0, whole)

    def image(self, stamp_ns: int, jpeg: bytes) -> Any:
        return self._make("sensor_msgs/msg/CompressedImage", self._header(stamp_ns, CAMERA_FRAME),
                          "mono8; jpeg compressed mono8", np.frombuffer(jpeg, np.uint8))


def main(argv: list[str] | None = None) -> int:
    """Make the bag; returns 0, or 1 with one line on stderr saying what is wrong."""
    parser = argparse.ArgumentParser(prog="python -m reasoning_planner.evaluation.kitti_drive",
                                     description="Make a rosbag2 (mcap) of a KITTI clip.")
    parser.add_argument("--clip", required=True, type=Path, metavar="DIR",
                        help="folder with image_l/, poses.txt and calib.txt")
    parser.add_argument("--out", required=True, type=Path, metavar="BAG",
                        help="bag folder to make")
    parser.add_argument("--force", action="store_true", help="replace the bag if it exists")
    arguments = parser.parse_args(argv)
    try:
        clip = read_clip(arguments.clip)
        if arguments.force and (arguments.out / "metadata.yaml").exists():
            shutil.rmtree(arguments.out)
        write_drive(clip, arguments.out)
    except PlannerError as error:
        print(f"kitti_drive: {error}", file=sys.stderr)
        return 1
    print(f"{arguments.out}: {len(clip.images)} frames, "
          f"{(len(clip.images) - 1) * STEP_S:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
