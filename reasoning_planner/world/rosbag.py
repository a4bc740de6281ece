"""Writes a drive as a rosbag2: four cameras, odometry, calibration and mounting, no ROS needed.

Topics: /world/camera{0..3}/image_raw (or image_raw/compressed), /world/camera{0..3}/camera_info,
/world/odometry, /tf_static. The cameras' optical frames look along z (REP-103). Knows nothing of
scenes beyond the frames and odometry of a `WorldDrive`.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import cv2
import numpy as np

from ..errors import DataError, MissingDependencyError
from .drive import DriveFrame, WorldDrive
from .render import RIG, Camera

START_NS = 1_700_000_000_000_000_000      # log time and stamp of t = 0
_OPTICAL = np.array(((0.0, 0.0, 1.0), (-1.0, 0.0, 0.0), (0.0, -1.0, 0.0)))


def write_bag(drive: WorldDrive, path: Path, size: tuple[int, int] = (64, 128),
              compressed: bool = False, progress=iter) -> Path:
    """Write a whole drive; the folder appears under its name only when it is complete.

    Args:
        drive: from `make_drive`.
        path: the bag's folder, not there yet.
        size: (H, W) of the images.
        compressed: JPEG of quality 90 instead of raw images.
        progress: wraps the iterable of frames, e.g. tqdm.
    Returns:
        `path`.
    Raises:
        DataError: the folder exists.
        MissingDependencyError: the rosbags package is not installed.
    """
    try:
        from rosbags.rosbag2 import Writer
    except ImportError as error:
        raise MissingDependencyError("writing a bag needs rosbags: pip install rosbags") from error
    path = Path(path)
    if path.exists():
        raise DataError(f"{path}: exists already, expected a new folder")
    partial = path.with_name(f".{path.name}.partial")
    if partial.exists():
        shutil.rmtree(partial)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with Writer(partial, version=9) as writer:
            messages = Messages(writer, compressed)
            messages.mounting(drive)
            odometry = iter(drive.odometry())
            row = next(odometry, None)
            for frame in progress(drive.frames(size)):
                while row is not None and row[0] <= frame.time_s + 1e-6:
                    messages.odometry(row)
                    row = next(odometry, None)
                messages.images(frame, size)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    partial.rename(path)
    return path


class Messages:
    """Builds, serialises and writes the messages of one bag."""

    def __init__(self, writer, compressed: bool):
        from rosbags.interfaces import Qos, QosDurability, QosHistory, QosLiveliness
        from rosbags.interfaces import QosReliability, QosTime
        from rosbags.typesys import Stores, get_typestore
        self._writer, self._compressed = writer, compressed
        self._store = get_typestore(Stores.ROS2_HUMBLE)
        forever = QosTime(2147483647, 4294967295)
        latched = Qos(QosHistory.KEEP_LAST, 1, QosReliability.RELIABLE,
                      QosDurability.TRANSIENT_LOCAL, forever, forever, QosLiveliness.AUTOMATIC,
                      forever, False)
        image = "CompressedImage" if compressed else "Image"
        suffix = "/compressed" if compressed else ""
        self._images = [self._topic(f"/world/camera{i}/image_raw{suffix}",
                                    f"sensor_msgs/msg/{image}") for i in range(len(RIG))]
        self._infos = [self._topic(f"/world/camera{i}/camera_info", "sensor_msgs/msg/CameraInfo")
                       for i in range(len(RIG))]
        self._odometry = self._topic("/world/odometry", "nav_msgs/msg/Odometry")
        self._tf = self._topic("/tf_static", "tf2_msgs/msg/TFMessage", (latched,))

    def _topic(self, name: str, kind: str, qos: tuple = ()):
        return self._writer.add_connection(name, kind, typestore=self._store,
                                           offered_qos_profiles=qos)

    def _new(self, kind: str, **fields):
        return self._store.types[kind](**fields)

    def _header(self, stamp_ns: int, frame_id: str):
        stamp = self._new("builtin_interfaces/msg/Time", sec=stamp_ns // 10 ** 9,
                          nanosec=stamp_ns % 10 ** 9)
        return self._new("std_msgs/msg/Header", stamp=stamp, frame_id=frame_id)

    def _vector(self, x: float, y: float, z: float, kind: str = "Vector3"):
        return self._new(f"geometry_msgs/msg/{kind}", x=float(x), y=float(y), z=float(z))

    def _quaternion(self, x: float, y: float, z: float, w: float):
        return self._new("geometry_msgs/msg/Quaternion", x=float(x), y=float(y), z=float(z),
                         w=float(w))

    def _write(self, connection, stamp_ns: int, message) -> None:
        self._writer.write(connection, stamp_ns,
                           self._store.serialize_cdr(message, connection.msgtype))

    def mounting(self, drive: WorldDrive) -> None:
        """/tf_static: where each camera sits."""
        transforms = []
        for i, camera in enumerate(RIG):
            rotation = self._quaternion(*_quaternion_xyzw(camera.base_from_camera() @ _OPTICAL))
            transform = self._new("geometry_msgs/msg/Transform",
                                  translation=self._vector(*camera.position), rotation=rotation)
            transforms.append(self._new("geometry_msgs/msg/TransformStamped",
                                        header=self._header(START_NS, "base_link"),
                                        child_frame_id=f"camera{i}_optical", transform=transform))
        self._write(self._tf, START_NS,
                    self._new("tf2_msgs/msg/TFMessage", transforms=transforms))

    def odometry(self, row: np.ndarray) -> None:
        """One row of `WorldDrive.odometry`."""
        t, x, y, yaw, speed, yaw_rate = (float(value) for value in row)
        stamp_ns = _stamp_ns(t)
        pose = self._new("geometry_msgs/msg/Pose", position=self._vector(x, y, 0.0, "Point"),
                         orientation=self._quaternion(0.0, 0.0, math.sin(0.5 * yaw),
                                                      math.cos(0.5 * yaw)))
        twist = self._new("geometry_msgs/msg/Twist", linear=self._vector(speed, 0.0, 0.0),
                          angular=self._vector(0.0, 0.0, yaw_rate))
        zeros = np.zeros(36)
        self._write(self._odometry, stamp_ns, self._new(
            "nav_msgs/msg/Odometry", header=self._header(stamp_ns, "map"),
            child_frame_id="base_link",
            pose=self._new("geometry_msgs/msg/PoseWithCovariance", pose=pose, covariance=zeros),
            twist=self._new("geometry_msgs/msg/TwistWithCovariance", twist=twist,
                            covariance=zeros)))

    def images(self, frame: DriveFrame, size: tuple[int, int]) -> None:
        """The images of one moment, each with its calibration."""
        stamp_ns = _stamp_ns(frame.time_s)
        for i, (camera, image) in enumerate(zip(RIG, frame.images)):
            header = self._header(stamp_ns, f"camera{i}_optical")
            self._write(self._images[i], stamp_ns, self._image(header, image))
            self._write(self._infos[i], stamp_ns, self._info(header, camera, size))

    def _image(self, header, image: np.ndarray):
        if self._compressed:
            _, data = cv2.imencode(".jpg", image[..., ::-1], (cv2.IMWRITE_JPEG_QUALITY, 90))
            return self._new("sensor_msgs/msg/CompressedImage", header=header,
                             format="rgb8; jpeg compressed bgr8", data=data.reshape(-1))
        height, width = image.shape[:2]
        return self._new("sensor_msgs/msg/Image", header=header, height=height, width=width,
                         encoding="rgb8", is_bigendian=0, step=3 * width,
                         data=np.ascontiguousarray(image).reshape(-1))

    def _info(self, header, camera: Camera, size: tuple[int, int]):
        height, width = size
        focal = camera.focal_px(width)
        k = np.array((focal, 0.0, 0.5 * width, 0.0, focal, 0.5 * height, 0.0, 0.0, 1.0))
        p = np.zeros((3, 4))
        p[:, :3] = k.reshape(3, 3)
        region = self._new("sensor_msgs/msg/RegionOfInterest", x_offset=0, y_offset=0, height=0,
                           width=0, do_rectify=False)
        return self._new("sensor_msgs/msg/CameraInfo", header=header, height=height, width=width,
                         distortion_model="plumb_bob", d=np.zeros(5), k=k,
                         r=np.eye(3).reshape(-1), p=p.reshape(-1), binning_x=0, binning_y=0,
                         roi=region)


def _stamp_ns(time_s: float) -> int:
    return START_NS + int(round(time_s * 1000.0)) * 1_000_000


def _quaternion_xyzw(rotation: np.ndarray) -> np.ndarray:
    """(4,) unit quaternion of a (3, 3) rotation, by the eigenvector of Bar-Itzhack's matrix."""
    m = rotation
    table = np.array((
        (m[0, 0] - m[1, 1] - m[2, 2], m[1, 0] + m[0, 1], m[2, 0] + m[0, 2], m[2, 1] - m[1, 2]),
        (m[1, 0] + m[0, 1], m[1, 1] - m[0, 0] - m[2, 2], m[2, 1] + m[1, 2], m[0, 2] - m[2, 0]),
        (m[2, 0] + m[0, 2], m[2, 1] + m[1, 2], m[2, 2] - m[0, 0] - m[1, 1], m[1, 0] - m[0, 1]),
        (m[2, 1] - m[1, 2], m[0, 2] - m[2, 0], m[1, 0] - m[0, 1],
         m[0, 0] + m[1, 1] + m[2, 2]))) / 3.0
    quaternion = np.linalg.eigh(table)[1][:, -1]
    return quaternion if quaternion[3] >= 0.0 else -quaternion
