"""planner_node and the inputs that other nodes died of: over real DDS, survived, counted, named.

Each test takes the kind of fault from reports against other nodes; the row is named in its line.
"""

import cv2
import numpy as np
import pytest

pytest.importorskip("rclpy", reason="needs ROS 2: make ros")
pytest.importorskip("reasoning_planner.msg", reason="needs the built workspace: make ros")

import rclpy
from rclpy.context import Context
from rclpy.qos import QoSDurabilityPolicy, QoSProfile, QoSReliabilityPolicy
from rclpy.serialization import serialize_message
from ros_harness import IMAGE, STEP_NS, nanoseconds, running
from sensor_msgs.msg import CompressedImage, Image

from reasoning_planner.msg import PlannedTrajectory, PlannerStatus

pytestmark = pytest.mark.ros
HOUR_NS = 3600 * 10**9
# A busy machine may deliver the other cameras long after the anchor: the default is 0.06 s.
PATIENT = {"settle_s": 0.5, "diagnostics_period_s": 0.2}
BEST_EFFORT = QoSProfile(depth=20, reliability=QoSReliabilityPolicy.BEST_EFFORT)


@pytest.fixture(scope="module")
def shared():
    """One planner that all of it must leave at work."""
    with running(PATIENT) as vehicle:
        yield vehicle


@pytest.fixture
def vehicle(shared):
    """At 1.8 s of a new drive, with plans."""
    shared.fresh()
    shared.drive(0, 18)
    assert shared.wait_for(lambda: shared.new_plans())
    return shared


@pytest.fixture(scope="module")
def shared_compressed():
    """The same for CompressedImage."""
    with running({**PATIENT, "cameras.compressed": True},
                 camera_type=CompressedImage) as vehicle:
        yield vehicle


def step(vehicle, number, edits=None, odometry_edit=None, stamps=None):
    """Step `number` of the drive with some messages changed, by slot."""
    now_ns = vehicle.start_ns + number * STEP_NS
    before = vehicle.cycles
    vehicle.tick(now_ns)
    for k in range(1, 6):
        vehicle.publish_odometry(now_ns - STEP_NS + k * STEP_NS // 5, edit=odometry_edit)
    for slot in range(4):
        vehicle.publish_image(slot, (stamps or {}).get(slot, now_ns), (edits or {}).get(slot))
    vehicle.wait_for(lambda: vehicle.cycles > before, 1.5)


def drive_on(vehicle, first=20, last=26):
    """All is well (again): the newest plan is of the last step, and has no complaint."""
    vehicle.drive(first, last)
    end_ns = vehicle.start_ns + last * STEP_NS
    assert vehicle.wait_for(lambda: vehicle.newest_plan_ns() == end_ns)
    assert vehicle.new_plans()[-1].reasons == []


def image(encoding, array, step_bytes=None):
    """An edit that gives an image another encoding and content."""
    def edit(msg):
        msg.encoding, msg.height, msg.width = encoding, array.shape[0], array.shape[1]
        msg.step = step_bytes or array.strides[0]
        msg.data = array.tobytes()
    return edit


YUV = np.full((48, 64, 2), 128, np.uint8)


def test_every_camera_s_encoding_is_seen(vehicle):                                # rows 13, 16
    encodings = {
        "yuyv": YUV, "yuv422_yuy2": YUV, "uyvy": YUV, "yuv422": YUV,
        "bgra8": np.zeros((90, 160, 4), np.uint8), "mono8": np.zeros((48, 64), np.uint8),
        "rgb8": IMAGE, "mono16": np.full((48, 64), 40000, np.uint16)}
    for number, (encoding, array) in enumerate(encodings.items(), 19):
        step(vehicle, number, {slot: image(encoding, array) for slot in range(4)})
        t0_ns = vehicle.start_ns + number * STEP_NS
        assert vehicle.wait_for(lambda: vehicle.newest_plan_ns() == t0_ns), encoding
        assert vehicle.new_plans()[-1].reasons == [], encoding
    assert vehicle.dropped("camera image refused") == 0


def test_rows_with_padding_are_seen_and_short_data_is_refused(vehicle):            # row 15
    padded = np.zeros((8, 1920, 3), np.uint8)
    narrow = image("bgr8", padded[:, :1918], 5760)

    def with_padding(msg):
        narrow(msg)
        msg.data = padded.tobytes()

    for number in range(19, 23):
        step(vehicle, number, {slot: with_padding for slot in range(4)})
    assert vehicle.wait_for(
        lambda: vehicle.newest_plan_ns() == vehicle.start_ns + 22 * STEP_NS)
    assert vehicle.new_plans()[-1].reasons == []
    step(vehicle, 23, {1: lambda msg: setattr(msg, "data", IMAGE.tobytes()[:-1])})
    vehicle.wait_for_reason("camera image refused")
    assert "image1" in vehicle.last_reasons() and vehicle.dropped("camera image refused") == 1
    drive_on(vehicle, 24, 28)


def test_the_size_may_change_in_mid_run(vehicle):
    for number, height in enumerate((48, 96, 48, 1, 200), 19):
        step(vehicle, number, {1: image("rgb8", np.zeros((height, 64, 3), np.uint8))})
    assert vehicle.wait_for(
        lambda: vehicle.newest_plan_ns() == vehicle.start_ns + 23 * STEP_NS)
    drive_on(vehicle, 24, 28)


@pytest.mark.parametrize("name, stamp_of", [
    ("duplicate", lambda now_ns: now_ns - STEP_NS),
    ("out of order", lambda now_ns: now_ns - 3 * STEP_NS // 2),
    ("0", lambda now_ns: 0),
    ("an hour old", lambda now_ns: now_ns - HOUR_NS)])
def test_a_camera_s_stray_stamp_is_dropped(vehicle, name, stamp_of):
    step(vehicle, 19, stamps={2: stamp_of(vehicle.start_ns + 19 * STEP_NS)})
    assert vehicle.wait_for(lambda: vehicle.dropped("stamp out of order") == 1)
    drive_on(vehicle, 20, 27)


def test_a_camera_an_hour_ahead_is_missed_by_name_and_comes_back(vehicle):
    for number in range(19, 23):
        step(vehicle, number, stamps={2: vehicle.start_ns + number * STEP_NS + HOUR_NS})
    vehicle.wait_for_reason("cameras missing")
    assert "image2" in vehicle.last_reasons()
    plan = vehicle.new_plans()[-1]
    assert plan.status == PlannedTrajectory.STATUS_KINEMATIC
    vehicle.drive(23, 60)               # its clock is set right: time begins anew for all
    assert vehicle.wait_for(lambda: vehicle.newest_plan_ns() == vehicle.start_ns + 60 * STEP_NS)
    assert vehicle.new_plans()[-1].reasons == []


def test_odometry_twice_and_out_of_order_is_dropped(vehicle):
    now_ns = vehicle.start_ns + 18 * STEP_NS
    for stamp_ns in (now_ns, now_ns - STEP_NS // 10):
        vehicle.publish_odometry(stamp_ns)
    assert vehicle.wait_for(lambda: vehicle.dropped("stamp out of order") == 2)
    drive_on(vehicle, 19, 22)


def scaled(factor):
    def edit(msg):
        msg.pose.pose.orientation.w *= factor
    return edit


def test_a_quaternion_nearly_of_norm_1_is_used_and_counted(vehicle):               # row 21
    step(vehicle, 19, odometry_edit=scaled(1.02))
    assert vehicle.wait_for(lambda: vehicle.dropped("quaternion normalised") == 5)
    drive_on(vehicle, 20, 22)


def test_the_sign_of_a_quaternion_does_not_matter(vehicle):                        # row 21
    for number in range(19, 30):
        step(vehicle, number, odometry_edit=scaled(-1.0 if number % 2 else 1.0))
    end_ns = vehicle.start_ns + 29 * STEP_NS
    assert vehicle.wait_for(lambda: vehicle.newest_plan_ns() == end_ns)
    plan = vehicle.new_plans()[-1]
    assert plan.reasons == [] and plan.points[0].velocity_mps == pytest.approx(10.0, abs=0.01)
    assert abs(plan.points[-1].pose.position.y) < 0.1


def test_a_jump_of_the_pose_is_waited_out(vehicle):                                # row 21
    def aside(msg):
        msg.pose.pose.position.y += 100.0

    step(vehicle, 19, odometry_edit=aside)
    vehicle.wait_for_reason("odometry gap")
    assert "position jumps by 100" in vehicle.last_reasons()
    assert vehicle.statuses[-1].state == PlannerStatus.STATE_BLOCKED
    assert vehicle.wait_for(lambda: vehicle.level("plan") == 2)
    for number in range(20, 36):
        step(vehicle, number, odometry_edit=aside)
    end_ns = vehicle.start_ns + 35 * STEP_NS
    assert vehicle.wait_for(lambda: vehicle.newest_plan_ns() == end_ns)
    assert vehicle.new_plans()[-1].points[0].pose.position.y == pytest.approx(100.0)
    moved = [plan for plan in vehicle.plans
             if plan.repeat and plan.points[0].pose.position.y > 50.0]
    assert all(plan.status == PlannedTrajectory.STATUS_STOP for plan in moved)


def test_an_image_newer_than_the_odometry_is_reached_up_to_a_limit(vehicle):       # row 30
    for number, ahead_ns, reached in ((19, 30_000_000, True), (20, 70_000_000, False)):
        now_ns = vehicle.start_ns + number * STEP_NS
        before = vehicle.cycles
        vehicle.tick(now_ns)
        for k in range(1, 6):
            vehicle.publish_odometry(now_ns - ahead_ns - STEP_NS + k * STEP_NS // 5)
        for slot in range(4):
            vehicle.publish_image(slot, now_ns)
        assert vehicle.wait_for(lambda: vehicle.cycles > before)
        vehicle.spin(0.1)
        assert (vehicle.newest_plan_ns() == now_ns) == reached
    assert vehicle.wait_for(lambda: vehicle.dropped("odometry stale") == 1)
    assert "0.070 s older than t0" in vehicle.last_reasons()
    drive_on(vehicle, 21, 26)


def test_a_clock_at_200_hz_does_not_hold_up_the_rest(vehicle):                     # row 7
    begin_ns = vehicle.now_ns
    for tick in range(1, 401):
        vehicle.tick(begin_ns + tick * 5_000_000)
        vehicle.spin(0.0)
    end_ns = begin_ns + 2 * 10**9
    assert vehicle.wait_for(
        lambda: vehicle.statuses and nanoseconds(vehicle.statuses[-1].header.stamp) == end_ns)


def test_simulated_time_set_back_and_forward(vehicle):                             # rows 4, 5, 6
    vehicle.start_ns -= 52 * 10**9
    vehicle.drive(0, 17)
    assert vehicle.wait_for(
        lambda: vehicle.newest_plan_ns() == vehicle.start_ns + 17 * STEP_NS)
    vehicle.start_ns += 450 * 10**9
    vehicle.drive(0, 17)
    assert vehicle.wait_for(
        lambda: vehicle.newest_plan_ns() == vehicle.start_ns + 17 * STEP_NS)
    assert vehicle.dropped("time jumped") >= 2


def test_after_a_jump_what_is_missing_is_said_anew(vehicle):
    vehicle.fresh()
    vehicle.wait_for_reason("no camera image received: nothing on")
    assert "no odometry received" in vehicle.last_reasons()


def test_damaged_bytes_on_the_wire_are_survived(vehicle):
    random = np.random.default_rng(3)
    stamp_ns = vehicle.start_ns + 18 * STEP_NS + 1
    vehicle.wait_for_reason("")
    dropped = sum(vehicle.drops.values())
    for publisher, kind in ((vehicle.odometry, "odometry"), (vehicle.cameras[2], "image")):
        sent = []
        make = vehicle.publish_odometry if kind == "odometry" else vehicle.publish_image
        arguments = (stamp_ns,) if kind == "odometry" else (2, stamp_ns)
        make(*arguments, edit=lambda msg: sent.append(serialize_message(msg)))
        for number in range(150):
            data = bytearray(sent[0])
            for _ in range(random.integers(1, 6)):
                data[random.integers(0, min(len(data), 700))] = random.integers(0, 256)
            publisher.publish(bytes(data[:random.integers(4, len(data))] if number % 3 == 0
                                    else data))
            vehicle.spin(0.002)
    assert vehicle.wait_for(lambda: sum(vehicle.drops.values()) > dropped + 50)
    vehicle.fresh()
    drive_on(vehicle, 0, 18)


# Quality of service and types

def test_best_effort_as_long_as_a_publisher_offers_no_better(vehicle):          # rows 9, 10
    def qos(name):
        return vehicle.values("transport").get(f"/reasoning_planner/input/{name} qos")

    assert vehicle.wait_for(lambda: qos("image2") == qos("odometry") == "reliable")
    topics = {"image2": Image, "odometry": type(vehicle.odometry.msg_type())}
    extra = [vehicle.node.create_publisher(kind, f"/reasoning_planner/input/{name}", BEST_EFFORT)
             for name, kind in topics.items()]
    assert vehicle.wait_for(lambda: qos("image2") == qos("odometry") == "best effort")
    assert qos("image1") == "reliable" and vehicle.level("transport") == 0
    drive_on(vehicle, 19, 23)           # the reliable publishers are heard all the same
    for publisher in extra:
        vehicle.node.destroy_publisher(publisher)
    assert vehicle.wait_for(lambda: qos("image2") == qos("odometry") == "reliable")
    vehicle.spin(0.5)
    drive_on(vehicle, 24, 28)


def test_a_publisher_of_another_type_is_named(vehicle):                            # row 17
    context = Context()                 # one participant has one type a topic
    rclpy.init(context=context, domain_id=vehicle.context.get_domain_id())
    driver = rclpy.create_node("driver", context=context)
    driver.create_publisher(CompressedImage, "/reasoning_planner/input/image3", 5)
    assert vehicle.wait_for(lambda: vehicle.level("transport") == 1)
    assert ("image3: a publisher of sensor_msgs/msg/CompressedImage, expected "
            "sensor_msgs/msg/Image") in vehicle.message("transport")
    driver.destroy_node()
    rclpy.try_shutdown(context=context)
    assert vehicle.wait_for(lambda: vehicle.level("transport") == 0)


def test_a_subscriber_that_cannot_hear_the_plans_is_named(vehicle):                # row 9
    latched = QoSProfile(depth=1, durability=QoSDurabilityPolicy.TRANSIENT_LOCAL)
    deaf = vehicle.node.create_subscription(
        PlannedTrajectory, "/reasoning_planner/output/trajectory", lambda msg: None, latched)
    assert vehicle.wait_for(lambda: vehicle.level("transport") == 1)
    assert "node /vehicle cannot hear it: transient local" in vehicle.message("transport")
    vehicle.node.destroy_subscription(deaf)
    assert vehicle.wait_for(lambda: vehicle.level("transport") == 0)


def test_what_must_be_reliable_and_is_not_is_said():                               # row 9
    with running({"image_reliability": "reliable", "diagnostics_period_s": 0.2},
                 awaited=False, reliable=False) as vehicle:
        assert vehicle.wait_for(lambda: "image1: nothing is received from node /vehicle: reliable "
                                "delivery is requested, best effort offered"
                                in vehicle.message("transport"))


# Compressed images

def compressed(content, name="jpeg"):
    def edit(msg):
        msg.format, msg.data = name, content
    return edit


def encoded(kind, array):
    return cv2.imencode(kind, array)[1].tobytes()


JPEG = encoded(".jpg", np.random.default_rng(0).integers(0, 255, (48, 64, 3), dtype=np.uint8))
HUGE = JPEG.replace(b"\x00\x30\x00\x40", b"\xff\xff\xff\xff", 1)    # 65535 x 65535 in its header


def test_compressed_images_good_and_bad(shared_compressed):                # rows 16, 17, 18
    vehicle = shared_compressed
    vehicle.fresh()
    good = compressed(JPEG)
    for number in range(19):
        step(vehicle, number, {slot: good for slot in range(4)})
    assert HUGE != JPEG
    assert vehicle.wait_for(lambda: vehicle.new_plans())
    number = 19
    for content, name, seen in (
            (encoded(".png", np.zeros((48, 64, 4), np.uint8)), "png", True),
            (encoded(".png", np.zeros((48, 64), np.uint16)), "png", True),
            (JPEG, "", True),
            (encoded(".png", np.zeros((48, 64, 3), np.uint8)), "bgr8; jpeg compressed bgr8", True),
            (JPEG, "h264", True),       # what it is counts, not what it is called
            (b"", "jpeg", False), (JPEG[:len(JPEG) // 2], "jpeg", False), (HUGE, "jpeg", False),
            (b"\x00" * 100, "jpeg", False)):
        refused = vehicle.dropped("camera image refused")
        step(vehicle, number, {**{slot: good for slot in range(4)}, 1: compressed(content, name)})
        if seen:
            t0_ns = vehicle.start_ns + number * STEP_NS
            assert vehicle.wait_for(lambda: vehicle.newest_plan_ns() == t0_ns), name
        else:
            vehicle.wait_for_reason("camera image refused")
            assert vehicle.wait_for(
                lambda: vehicle.dropped("camera image refused") == refused + 1), name
        for _ in range(4):              # until it has left the four frames of a plan
            number += 1
            step(vehicle, number, {slot: good for slot in range(4)})
        number += 1
    assert vehicle.new_plans()[-1].reasons == []
