"""Small made-up drives as bags, for the tests of the replay evaluation."""

import cv2
import numpy as np
from rosbags.rosbag1 import Writer as Ros1Writer
from rosbags.rosbag2 import StoragePlugin, Writer
from rosbags.typesys import Stores, get_types_from_msg, get_typestore

START_NS = 1_700_000_000 * 10**9
STEP_NS = 100_000_000
SPEED_MPS, YAW_RATE_RPS = 8.0, 0.1
ODOMETRY, IMAGE = "/localization/kinematic_state", "/sensing/front/image_raw/compressed"
KINEMATIC_STATE = "autoware_localization_msgs/msg/KinematicState"
KINEMATIC_STATE_TEXT = """std_msgs/Header header
string child_frame_id
geometry_msgs/PoseWithCovariance pose_with_covariance
geometry_msgs/TwistWithCovariance twist_with_covariance
geometry_msgs/AccelWithCovariance accel_with_covariance
"""


def pose_at(seconds, rate_rps=YAW_RATE_RPS):
    """(x, y, yaw) on the arc that the made-up vehicle drives."""
    yaw = rate_rps * seconds
    radius = SPEED_MPS / rate_rps
    return radius * np.sin(yaw), radius * (1.0 - np.cos(yaw)), yaw


class Messages:
    """Builds messages of one typestore."""

    def __init__(self, ros1=False):
        self.ros1 = ros1
        self.store = get_typestore(Stores.ROS1_NOETIC if ros1 else Stores.ROS2_HUMBLE)

    def new(self, kind, **fields):
        return self.store.types[kind](**fields)

    def header(self, stamp_ns, frame_id):
        time = self.new("builtin_interfaces/msg/Time", sec=stamp_ns // 10**9,
                        nanosec=stamp_ns % 10**9)
        more = {"seq": 0} if self.ros1 else {}
        return self.new("std_msgs/msg/Header", stamp=time, frame_id=frame_id, **more)

    def xyz(self, kind, x=0.0, y=0.0, z=0.0):
        return self.new(f"geometry_msgs/msg/{kind}", x=float(x), y=float(y), z=float(z))

    def motion(self, seconds, rate_rps):
        """(PoseWithCovariance, TwistWithCovariance)."""
        x, y, yaw = pose_at(seconds, rate_rps)
        turned = self.new("geometry_msgs/msg/Quaternion", x=0.0, y=0.0, z=float(np.sin(yaw / 2)),
                          w=float(np.cos(yaw / 2)))
        pose = self.new("geometry_msgs/msg/Pose", position=self.xyz("Point", x, y),
                        orientation=turned)
        twist = self.new("geometry_msgs/msg/Twist", linear=self.xyz("Vector3", SPEED_MPS),
                         angular=self.xyz("Vector3", 0.0, 0.0, rate_rps))
        zeros = np.zeros(36)
        return (self.new("geometry_msgs/msg/PoseWithCovariance", pose=pose, covariance=zeros),
                self.new("geometry_msgs/msg/TwistWithCovariance", twist=twist, covariance=zeros))

    def odometry(self, seconds, rate_rps=YAW_RATE_RPS, frame_id="map", child="base_link"):
        pose, twist = self.motion(seconds, rate_rps)
        return self.new("nav_msgs/msg/Odometry", header=self.header(stamp(seconds), frame_id),
                        child_frame_id=child, pose=pose, twist=twist)

    def kinematic_state(self, seconds):
        pose, twist = self.motion(seconds, YAW_RATE_RPS)
        zero = self.xyz("Vector3")
        accel = self.new("geometry_msgs/msg/AccelWithCovariance", covariance=np.zeros(36),
                         accel=self.new("geometry_msgs/msg/Accel", linear=zero, angular=zero))
        return self.new(KINEMATIC_STATE, header=self.header(stamp(seconds), "map"),
                        child_frame_id="base_link", pose_with_covariance=pose,
                        twist_with_covariance=twist, accel_with_covariance=accel)

    def image(self, seconds, size=(32, 64), frame_id="front_optical"):
        grey = 60 + int(10 * seconds) % 120
        _, data = cv2.imencode(".jpg", np.full((*size, 3), grey, np.uint8))
        return self.new("sensor_msgs/msg/CompressedImage", format="jpeg", data=data.reshape(-1),
                        header=self.header(stamp(seconds), frame_id))


def stamp(seconds):
    return START_NS + int(round(seconds * 1e9))


def timeline(make, seconds, odometry_hz=20.0, images=(IMAGE,), odometry=None):
    """(topic, type, log time, message), by log time; images are logged 5 ms after their stamp."""
    odometry = odometry or (ODOMETRY, "nav_msgs/msg/Odometry", make.odometry)
    name, kind, message_at = odometry
    rows = [(name, kind, stamp(t), message_at(t))
            for t in np.arange(0.0, seconds + 1e-6, 1.0 / odometry_hz)]
    rows += [(topic, "sensor_msgs/msg/CompressedImage", stamp(t) + 5_000_000, make.image(t))
             for topic in images for t in np.arange(0.0, seconds + 1e-6, 0.1)]
    return sorted(rows, key=lambda row: row[2])


def write_ros2(path, seconds=5.0, plugin=StoragePlugin.MCAP, rows=None, make=None):
    """A rosbag2 folder."""
    make = make or Messages()
    rows = rows if rows is not None else timeline(make, seconds)
    with Writer(path, version=9, storage_plugin=plugin) as writer:
        connections = {}
        for topic, kind, log_ns, message in rows:
            if topic not in connections:
                connections[topic] = writer.add_connection(topic, kind, typestore=make.store)
            writer.write(connections[topic], log_ns, make.store.serialize_cdr(message, kind))
    return path


def write_ros1(path, seconds=5.0):
    """A ROS 1 bag file."""
    make = Messages(ros1=True)
    with Ros1Writer(path) as writer:
        connections = {}
        for topic, kind, log_ns, message in timeline(make, seconds):
            if topic not in connections:
                connections[topic] = writer.add_connection(topic, kind, typestore=make.store)
            writer.write(connections[topic], log_ns, make.store.serialize_ros1(message, kind))
    return path


def autoware_messages():
    """Messages that know Autoware's KinematicState."""
    make = Messages()
    make.store.register(get_types_from_msg(KINEMATIC_STATE_TEXT, KINEMATIC_STATE))
    return make


def write_kinematic_state(path, seconds=4.0, plugin=StoragePlugin.MCAP):
    """A bag whose odometry is Autoware's KinematicState, defined in the bag."""
    make = autoware_messages()
    rows = timeline(make, seconds, odometry=(ODOMETRY, KINEMATIC_STATE, make.kinematic_state))
    return write_ros2(path, plugin=plugin, rows=rows, make=make)
