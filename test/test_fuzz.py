"""20,000 damaged messages through decoding, conversions, observation builder and planner.

Bytes of serialised messages are flipped, cut and spliced; fields are drawn by hypothesis. Nothing
may crash: what cannot be used is refused by a typed refusal or error, what is used gives finite
plans.
"""

import struct
from collections import Counter
from types import SimpleNamespace as Fields

import cv2
import numpy as np
import pytest

pytest.importorskip("hypothesis", reason="draws the fields")
pytest.importorskip("rosbags", reason="serialises the messages")

from evaluation_bags import Messages
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rosbags.rosbag2 import Writer

from reasoning_planner import conversions
from reasoning_planner.bags import RawMessage, open_bag
from reasoning_planner.config import CamerasConfig, PlannerConfig
from reasoning_planner.datatypes import Deadline, Observation, PlanStatus, Reason, Refusal
from reasoning_planner.errors import DataError, InputError
from reasoning_planner.evaluation.survey import calibration_from_msg
from reasoning_planner.perception.images import ENCODINGS
from reasoning_planner.perception.observation import ObservationBuilder
from reasoning_planner.planner import Planner

try:
    from reasoning_planner.msg import PlannedTrajectory     # noqa: F401 only where it is built
    HAS_MESSAGES = True
except ImportError:
    HAS_MESSAGES = False

START_NS = 1_700_000_000_000_000_000
STEP_NS = 100_000_000
ODOMETRY, INFO = "/odometry", "/camera_info"
RAW, COMPRESSED = ("/image0", "/image1"), ("/image2", "/image3")
TYPES = {ODOMETRY: "nav_msgs/msg/Odometry", INFO: "sensor_msgs/msg/CameraInfo",
         **dict.fromkeys(RAW, "sensor_msgs/msg/Image"),
         **dict.fromkeys(COMPRESSED, "sensor_msgs/msg/CompressedImage")}
HEADER_BYTES = 140              # where most of what is read of any message lies
FLIPPED, DRAWN = 18_000, 2_000
PICTURE = np.random.default_rng(0).integers(0, 255, (24, 32, 3), dtype=np.uint8)
JPEG, PNG = (cv2.imencode(kind, PICTURE)[1] for kind in (".jpg", ".png"))
CONFIG = PlannerConfig(cameras=CamerasConfig(anchor=1))


class Pipeline:
    """What the node does with a message, one after another; all outcomes counted."""

    def __init__(self):
        self.builder = ObservationBuilder(CONFIG, (*RAW, *COMPRESSED))
        self.planner = Planner(CONFIG)
        self.outcomes = Counter()

    def take(self, topic, msg):
        """One message; a camera_info has no state to change."""
        if topic == INFO:
            calibration = calibration_from_msg(msg)
            assert calibration.k.shape == (3, 3) and not calibration.field_of_view_rad < 0.0
            self.outcomes["camera_info"] += 1
            return
        if topic == ODOMETRY:
            refusal = self.builder.add_odometry(
                conversions.odometry_from_msg(msg, CONFIG.frame_id, CONFIG.base_frame))
        else:
            convert = (conversions.image_from_msg if topic in RAW
                       else conversions.compressed_from_msg)
            stamp_ns = conversions.stamp_ns(msg.header.stamp)
            refusal = self.builder.add_frame(int(topic[-1]), stamp_ns, convert(msg))
            self.decode(convert(msg), topic)
        assert refusal is None or isinstance(refusal, Refusal)
        self.outcomes[refusal.reason if refusal else "kept"] += 1

    def decode(self, raw, topic):
        """Every image, not only those that an observation needs."""
        try:
            image = raw.decode(topic)
        except InputError as error:
            assert str(error).startswith(topic)
            self.outcomes["image refused"] += 1
        else:
            assert image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] == 3
            self.outcomes["image decoded"] += 1

    def plan(self):
        """A cycle, where there is an anchor frame."""
        t0_ns = self.builder.next_anchor_ns()
        if t0_ns is None:
            return
        observation = self.builder.build(t0_ns)
        if isinstance(observation, Refusal):
            self.outcomes["no observation"] += 1
            return
        assert isinstance(observation, Observation)
        plan = self.planner.plan(observation, Deadline.never())
        self.outcomes[plan.status] += 1
        path = plan.trajectory
        for values in (path.positions, path.yaw_rad, path.speed_mps, path.acceleration_mps2,
                       path.curvature_1pm, plan.map_from_base):
            assert np.isfinite(values).all()
        if HAS_MESSAGES and plan.status is not PlanStatus.REFUSED:
            conversions.trajectory_to_msg(plan, t0_ns, 1.0)
            conversions.reasoning_to_msg(plan, CONFIG.base_frame)


# Bytes -------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def bag(tmp_path_factory):
    """One good message a topic."""
    make, path = Messages(), tmp_path_factory.mktemp("fuzz") / "bag"
    region = make.new("sensor_msgs/msg/RegionOfInterest", x_offset=0, y_offset=0, height=0,
                      width=0, do_rectify=False)
    pose, twist = make.motion(0.0, 0.1)
    header = make.header(START_NS, "map")
    messages = {
        ODOMETRY: dict(child_frame_id="base_link", pose=pose, twist=twist),
        INFO: dict(height=24, width=32, distortion_model="plumb_bob", d=np.zeros(5),
                   k=np.eye(3).reshape(-1), r=np.eye(3).reshape(-1), p=np.zeros(12), binning_x=0,
                   binning_y=0, roi=region),
        **dict.fromkeys(RAW, dict(encoding="rgb8", height=24, width=32, step=96, is_bigendian=0,
                                  data=PICTURE.reshape(-1))),
        COMPRESSED[0]: dict(format="jpeg", data=JPEG.reshape(-1)),
        COMPRESSED[1]: dict(format="png", data=PNG.reshape(-1))}
    with Writer(path, version=9) as writer:
        for topic, fields in messages.items():
            msg = make.new(TYPES[topic], header=header, **fields)
            connection = writer.add_connection(topic, TYPES[topic], typestore=make.store)
            writer.write(connection, START_NS, make.store.serialize_cdr(msg, TYPES[topic]))
    with open_bag(path) as opened:
        yield opened


def damaged(data, random):
    """Up to 6 bytes changed, most in the header; some messages cut, lengthened or spliced."""
    data = bytearray(data)
    for _ in range(random.integers(1, 7)):
        reach = len(data) if random.random() < 0.4 else min(HEADER_BYTES, len(data))
        data[random.integers(0, reach)] = random.integers(0, 256)
    kind = random.random()
    if kind < 0.08:
        del data[random.integers(0, len(data)):]
    elif kind < 0.12:
        data += random.bytes(random.integers(1, 50))
    elif kind < 0.16:
        at, length = random.integers(0, len(data)), random.integers(1, 20)
        data[at:at + length] = data[:random.integers(0, 20)]
    return bytes(data)


def stamped(data, time_ns):
    """CDR with the stamp of its header replaced: sec and nanosec behind the encapsulation."""
    return data[:4] + struct.pack("<iI", *divmod(time_ns, 10**9)) + data[12:]


def test_damaged_bytes(bag):
    random = np.random.default_rng(6)
    good = {raw.topic: raw.data for raw in bag.messages()}
    pipeline, count, step = Pipeline(), 0, 0
    while count < FLIPPED:
        step += 1
        share = (0.05, 0.95)[step // 30 % 2]        # 3 s quiet, and 3 s as bad as can be
        now_ns = START_NS + step * STEP_NS
        due = [(ODOMETRY, now_ns - STEP_NS + k * STEP_NS // 5) for k in range(1, 6)]
        due += [(topic, now_ns) for topic in (*RAW, *COMPRESSED, INFO)]
        for topic, time_ns in due:
            data = stamped(good[topic], time_ns)
            if random.random() < share:
                data, count = damaged(data, random), count + 1
            try:
                msg = bag.decode(RawMessage(topic, TYPES[topic], time_ns, data))
            except DataError:
                pipeline.outcomes["bytes refused"] += 1
            else:
                pipeline.take(topic, msg)
        if step % 2 or share < 0.5:
            pipeline.plan()
    outcomes = pipeline.outcomes
    assert count >= FLIPPED
    for expected in ("bytes refused", "image refused", "image decoded", "kept", "no observation",
                     Reason.OUT_OF_ORDER, Reason.ODOMETRY_INVALID, Reason.WRONG_FRAME,
                     PlanStatus.KINEMATIC):
        assert outcomes[expected] > 10, (expected, outcomes)


# Fields ------------------------------------------------------------------------------------------

NUMBERS = st.one_of(st.floats(), st.floats(-200.0, 200.0), st.sampled_from(
    [0.0, -0.0, 1.0, np.nan, np.inf, -np.inf, 1e308, -1e308, 5e-324, 1e39]))
SIZES = st.one_of(st.integers(0, 70), st.integers(0, 2**32 - 1))
STAMPS = st.one_of(
    st.integers(0, 40).map(lambda step: START_NS + step * STEP_NS // 2),
    st.builds(lambda sec, nanosec: sec * 10**9 + nanosec, st.integers(-2**31, 2**31 - 1),
              st.integers(0, 2**32 - 1)))
HEADERS = st.builds(lambda stamp, frame: Fields(
    stamp=Fields(sec=stamp // 10**9, nanosec=stamp % 10**9), frame_id=frame),
    STAMPS, st.sampled_from(("map", "map", "map", "", "odom", "ma\x00p", "\ud800")))
XYZ = st.builds(lambda x, y, z: Fields(x=x, y=y, z=z), NUMBERS, NUMBERS, NUMBERS)
QUATERNIONS = st.one_of(
    st.just(Fields(x=0.0, y=0.0, z=0.6, w=-0.8)),
    st.builds(lambda x, y, z, w: Fields(x=x, y=y, z=z, w=w), *4 * [NUMBERS]))
BYTES = st.one_of(st.binary(max_size=64), st.sampled_from([
    JPEG.tobytes(), PNG.tobytes(), JPEG.tobytes()[:99], PNG.tobytes()[:60], bytes(6000)]))
ODOMETRIES = st.builds(lambda header, child, position, orientation, linear, angular: Fields(
    header=header, child_frame_id=child,
    pose=Fields(pose=Fields(position=position, orientation=orientation)),
    twist=Fields(twist=Fields(linear=linear, angular=angular))),
    HEADERS, st.sampled_from(("base_link", "base_link", "", "imu")), XYZ, QUATERNIONS, XYZ, XYZ)
IMAGES = st.builds(lambda header, encoding, height, width, step, big, data: Fields(
    header=header, encoding=encoding, height=height, width=width, step=step, is_bigendian=big,
    data=data), HEADERS, st.one_of(st.sampled_from(ENCODINGS), st.text(max_size=8)), SIZES, SIZES,
    SIZES, st.integers(0, 255), BYTES)
COMPRESSED_IMAGES = st.builds(
    lambda header, text, data: Fields(header=header, format=text, data=data), HEADERS,
    st.one_of(st.sampled_from(("jpeg", "", "bayer_rggb8; jpeg compressed bgr8", "rgb8; png "
                               "compressed rgb8")), st.text(max_size=8)), BYTES)
INFOS = st.builds(
    lambda header, k, d, width, height, model: Fields(
        header=header, k=k, d=d, width=width, height=height, distortion_model=model),
    HEADERS, st.lists(NUMBERS, min_size=9, max_size=9), st.lists(NUMBERS, max_size=8), SIZES,
    SIZES, st.sampled_from(("plumb_bob", "fisheye", "")))
MESSAGES = st.one_of(
    st.tuples(st.just(ODOMETRY), ODOMETRIES), st.tuples(st.sampled_from(RAW), IMAGES),
    st.tuples(st.sampled_from(COMPRESSED), COMPRESSED_IMAGES), st.tuples(st.just(INFO), INFOS))


def driven(pipeline, until):
    """Good odometry and anchor images, so that what is drawn meets a full buffer."""
    for step in range(2 * until):
        stamp = Fields(sec=(START_NS + step * STEP_NS // 2) // 10**9,
                       nanosec=(START_NS + step * STEP_NS // 2) % 10**9)
        pose = Fields(position=Fields(x=0.5 * step, y=0.0, z=0.0),
                      orientation=Fields(x=0.0, y=0.0, z=0.0, w=1.0))
        twist = Fields(linear=Fields(x=10.0, y=0.0, z=0.0), angular=Fields(x=0.0, y=0.0, z=0.0))
        pipeline.take(ODOMETRY, Fields(
            header=Fields(stamp=stamp, frame_id="map"), child_frame_id="base_link",
            pose=Fields(pose=pose), twist=Fields(twist=twist)))
        if step % 2 == 0:
            pipeline.take(RAW[1], Fields(
                header=Fields(stamp=stamp, frame_id=""), encoding="rgb8", height=24, width=32,
                step=96, is_bigendian=0, data=PICTURE.tobytes()))


def test_drawn_fields():
    seen = Counter()

    @settings(max_examples=DRAWN // 20, derandomize=True, database=None, deadline=None,
              suppress_health_check=list(HealthCheck))
    @given(st.lists(MESSAGES, min_size=20, max_size=24), st.sampled_from((0, 18)))
    def survives(messages, steps):
        pipeline = Pipeline()
        driven(pipeline, steps)
        for topic, msg in messages:
            pipeline.take(topic, msg)
            pipeline.plan()
        seen.update(pipeline.outcomes)
        seen["messages"] += len(messages)

    survives()
    assert seen["messages"] >= DRAWN
    for expected in ("image refused", "kept", Reason.ODOMETRY_INVALID, Reason.OUT_OF_ORDER,
                     PlanStatus.KINEMATIC):
        assert seen[expected] > 10, (expected, seen)
