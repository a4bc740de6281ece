"""The anchor camera's picture with the plan in it: what is drawn, and over real DDS."""

import math
import shutil
import subprocess
import sys
from dataclasses import replace

import cv2
import numpy as np
import pytest

pytest.importorskip("rclpy", reason="needs ROS 2: make ros")
pytest.importorskip("reasoning_planner.msg", reason="needs the built workspace: make ros")

import autoware_messages
from ros_harness import IMAGE, domain_id, environment, nanoseconds, running
from sensor_msgs.msg import CameraInfo, Image

from reasoning_planner.config import VehicleConfig
from reasoning_planner.datatypes import (CameraFrame, EgoHistory, Observation, Plan, PlanStatus,
                                         Reasoning, Trajectory)
from reasoning_planner.debug_image import WIDTH, draw
from reasoning_planner.errors import DataError
from reasoning_planner.path_drawing import Lens
from reasoning_planner.perception.frames import OPTICAL, planar_transform, transform

NODE = "/reasoning_planner"
FOCAL_PX = 400.0
LENS = Lens(size=(640, 480), k=np.array([(FOCAL_PX, 0, 320), (0, FOCAL_PX, 240), (0, 0, 1)]),
            projection=np.zeros((3, 4)), distortion=np.zeros(5), model="plumb_bob",
            frame_id="front_optical")
MOUNTED = transform(OPTICAL, np.array([1.5, 0.0, 1.5]))
GREY = np.full((480, 640, 3), 100, np.uint8)


def plan(**changes):
    """Straight ahead for 64 steps at 10 m/s, from a pose that looks along the map's y."""
    n = 65
    path = Trajectory(positions=np.stack([np.arange(n), np.zeros(n)], axis=1), yaw_rad=np.zeros(n),
                      speed_mps=np.linspace(0.0, 20.0, n), acceleration_mps2=np.zeros(n),
                      curvature_1pm=np.zeros(n))
    made = Plan(plan_id=bytes(16), stamp_ns=5_250_000_000, frame_id="map",
                map_from_base=planar_transform(np.array([89_000.0, 42_000.0]), math.pi / 2),
                trajectory=path, status=PlanStatus.OK,
                reasoning=Reasoning(text="Slow down for the pedestrian who is about to cross the "
                                         "street ahead of us"), planner="nano")
    return replace(made, **changes)


def changed(picture):
    return (picture != GREY).any(axis=2)


def test_the_path_lies_on_the_road_ahead():
    drawn = changed(draw(GREY, plan(), LENS, MOUNTED, 2.0, False))
    # 7 m ahead of the base is 5.5 m ahead of the camera, 1.5 m below it.
    row = 240 + round(FOCAL_PX * 1.5 / 5.5)
    half_width = FOCAL_PX * 1.0 / 5.5
    columns = np.flatnonzero(drawn[row])
    assert columns.min() == pytest.approx(320 - half_width, abs=3)
    assert columns.max() == pytest.approx(320 + half_width, abs=3)
    assert not drawn[240 - 60:235].any(), "nothing above the horizon"


@pytest.mark.parametrize("lens, mounted, said", [
    (None, None, "no camera_info"), (LENS, None, "no static transform to front_optical"),
    (replace(LENS, k=np.zeros((3, 3))), MOUNTED, "not calibrated"),
    (replace(LENS, distortion=np.ones(4), model="own"), MOUNTED, "distortion model 'own'")])
def test_what_is_missing_is_said_in_the_picture(monkeypatch, lens, mounted, said):
    lines, put_text = [], cv2.putText
    monkeypatch.setattr(cv2, "putText", lambda image, text, *others: (
        lines.append(text), put_text(image, text, *others)))
    picture = draw(GREY, plan(), lens, mounted, 2.0, False)
    assert picture.shape == GREY.shape and not changed(picture)[200:].any()
    assert changed(picture)[:40].any()
    assert lines[0].startswith("path not drawn: ") and said in lines[0]


@pytest.mark.parametrize("model, distortion", [
    ("plumb_bob", np.array([-0.2, 0.05, 0.0, 0.0, 0.0])),
    ("rational_polynomial", np.array([-0.2, 0.05, 0.0, 0.0, 0.0, 0.01, 0.0, 0.0])),
    ("equidistant", np.array([0.05, 0.01, 0.0, 0.0]))])
def test_a_lens_is_undone_before_the_path_is_drawn(model, distortion):
    ray = np.array([[[0.5, 0.3, 1.0]]])
    lens = replace(LENS, model=model, distortion=distortion)
    project = cv2.fisheye.projectPoints if model == "equidistant" else cv2.projectPoints
    seen = project(ray, np.zeros(3), np.zeros(3), LENS.k, distortion)[0].reshape(2)
    picture = np.zeros_like(GREY)
    cv2.circle(picture, tuple(np.rint(seen).astype(int).tolist()), 4, (255, 255, 255), -1)
    flat, k = lens.rectify(picture, False)
    rows, columns = np.nonzero(flat[..., 0] > 128)
    assert (columns.mean(), rows.mean()) == pytest.approx(
        (320 + 0.5 * FOCAL_PX, 240 + 0.3 * FOCAL_PX), abs=1.0)
    assert k == pytest.approx(LENS.k)


def test_a_rectified_image_has_the_projections_matrix_at_its_own_size():
    projection = np.hstack([LENS.k * (0.9, 0.9, 1.0), np.zeros((3, 1))])
    lens = replace(LENS, projection=projection, distortion=np.ones(5))
    image, k = lens.rectify(GREY[::2, ::2], True)
    assert image.shape == (240, 320, 3) and k[0, 0] == pytest.approx(0.45 * FOCAL_PX)
    with pytest.raises(DataError, match="3 coefficients of plumb_bob"):
        replace(lens, distortion=np.ones(3)).rectify(GREY, False)


def test_large_pictures_are_shrunk_and_the_given_one_is_left_alone():
    image = np.full((1080, 1920, 3), 100, np.uint8)
    picture = draw(image, plan(), replace(LENS, size=(1920, 1080)), MOUNTED, 2.0, False)
    assert picture.shape == (540, WIDTH, 3) and (image == 100).all()
    small = draw(IMAGE, plan(), None, None, 2.0, False)
    assert small.shape == IMAGE.shape


# Over DDS ----------------------------------------------------------------------------------------

STATIC_TRANSFORM = """
import rclpy
from geometry_msgs.msg import TransformStamped
from rclpy.qos import QoSDurabilityPolicy, QoSProfile
from tf2_msgs.msg import TFMessage

rclpy.init()
node = rclpy.create_node("mounting")
latched = QoSProfile(depth=1, durability=QoSDurabilityPolicy.TRANSIENT_LOCAL)
item = TransformStamped()
item.header.frame_id, item.child_frame_id = "base_link", "front_optical"
item.transform.translation.x = item.transform.translation.z = 1.5
turned = item.transform.rotation
turned.x, turned.y, turned.z, turned.w = -0.5, 0.5, -0.5, 0.5
node.create_publisher(TFMessage, "/tf_static", latched).publish(TFMessage(transforms=[item]))
rclpy.spin(node)
"""


@pytest.mark.ros
def test_the_path_is_seen_by_who_listens():
    env = {}
    if shutil.which("colcon") is not None:
        env = autoware_messages.environment(autoware_messages.build())
    pictures = []
    with running(env=env) as vehicle:
        node = vehicle.node
        node.create_subscription(Image, f"{NODE}/debug/image", pictures.append, 10)
        info = CameraInfo(width=64, height=48, distortion_model="plumb_bob", d=[0.0] * 5,
                          k=[40.0, 0.0, 32.0, 0.0, 40.0, 24.0, 0.0, 0.0, 1.0])
        info.header.frame_id = "front_optical"
        calibration = node.create_publisher(CameraInfo, f"{NODE}/input/camera_info1", 1)
        mounting = subprocess.Popen([sys.executable, "-c", STATIC_TRANSFORM], cwd="/", env={
            **environment(vehicle.context.get_domain_id()), **env}) if env else None
        try:
            if mounting is not None:
                assert vehicle.wait_for(lambda: node.count_publishers("/tf_static") > 0, 30.0)
            assert vehicle.wait_for(lambda: calibration.get_subscription_count() > 0, 30.0)
            calibration.publish(info)
            vehicle.spin(0.5)
            vehicle.drive(0, 20)
            assert vehicle.wait_for(lambda: pictures, 30.0), "nothing shown"
            if mounting is not None:        # the road is drawn on, below the caption
                assert vehicle.wait_for(lambda: drawn_below(pictures[-1]), 30.0)
        finally:
            if mounting is not None:
                mounting.kill()
                mounting.wait()
        stamps = {nanoseconds(item.header.stamp) for item in vehicle.plans}
    picture = pictures[-1]
    assert picture.encoding == "rgb8" and (picture.width, picture.height) == (64, 48)
    assert nanoseconds(picture.header.stamp) in stamps
    assert picture.header.frame_id == "front_optical"


def drawn_below(msg):
    picture = np.frombuffer(msg.data, np.uint8).reshape(msg.height, msg.width, 3)
    return (picture[-2:] != IMAGE[-2:]).any()


@pytest.mark.ros
def test_nothing_is_made_while_nobody_listens(monkeypatch):
    import rclpy
    from rclpy.context import Context

    from reasoning_planner import debug_image, visualisation

    def fail(*arguments):
        raise AssertionError("made for nobody")
    monkeypatch.setattr(visualisation, "markers", fail)
    monkeypatch.setattr(debug_image, "draw", fail)
    context = Context()
    rclpy.init(context=context, domain_id=domain_id())
    node = rclpy.create_node("quiet", context=context)
    try:
        shown = debug_image.DebugImage(node, lambda slot: (None, None), fail, 2.0, False)
        shown.offer(observation(), plan(), 1)
        assert shown._thread is None
        visualisation.Visualisation(node, fail, VehicleConfig()).publish_markers(plan())
        shown.destroy()
    finally:
        node.destroy_node()
        rclpy.try_shutdown(context=context)


def observation():
    history = EgoHistory(0, np.zeros((16, 3)), np.tile(np.eye(3), (16, 1, 1)), np.eye(4), 0.0, 0.0)
    frames = tuple((CameraFrame(slot, 0, IMAGE),) * 4 for slot in range(4))
    return Observation(0, "map", history, frames)
