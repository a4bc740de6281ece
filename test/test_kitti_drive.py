"""The drive made from the clip in test/data is the drive that was driven."""

from __future__ import annotations

import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest

pytest.importorskip("rosbags", reason="writes a bag through rosbags")

from reasoning_planner.bags import QosProfile, open_bag
from reasoning_planner.evaluation import kitti_drive
from reasoning_planner.perception.frames import (matrix_from_quaternion,
                                                 rotation_from_vector, transform)

CLIP = Path(__file__).parent / "data" / "kitti_right_turn"
FRAMES = 51


@pytest.fixture(scope="module")
def drive(tmp_path_factory):
    path = tmp_path_factory.mktemp("kitti") / "drive"
    assert kitti_drive.main(["--clip", str(CLIP), "--out", str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def messages(drive):
    """Topic -> [(log time, decoded message)]."""
    by_topic = {}
    with open_bag(drive) as bag:
        for raw in bag.messages():
            by_topic.setdefault(raw.topic, []).append((raw.log_time_ns, bag.decode(raw)))
        assert bag.losses == ()
    return by_topic


def _vector(message):
    return np.array([message.x, message.y, message.z])


def _pose(odometry):
    pose = odometry.pose.pose
    q = pose.orientation
    return transform(matrix_from_quaternion(np.array([q.x, q.y, q.z, q.w])),
                     _vector(pose.position))


def _stamp_ns(header):
    return header.stamp.sec * 10**9 + header.stamp.nanosec


def test_clip_is_small_and_names_its_licence():
    assert sum(f.stat().st_size for f in CLIP.rglob("*") if f.is_file()) <= 5_000_000
    assert len(list((CLIP / "image_l").glob("*.jpg"))) == FRAMES
    licence = (CLIP / "LICENSE.txt").read_text()
    assert "CC BY-NC-SA 3.0" in licence and "not installed" in licence
    assert "Geiger" in (CLIP / "SOURCE.txt").read_text()


def test_topics_types_counts_and_qos(drive):
    reliable = QosProfile("reliable", "volatile", "keep_last", 10)
    with open_bag(drive) as bag:
        assert {t.name: (t.type, t.count, t.qos[0]) for t in bag.topics.values()} == {
            "/camera/left/image_raw/compressed": (
                "sensor_msgs/msg/CompressedImage", FRAMES, reliable),
            "/camera/left/camera_info": ("sensor_msgs/msg/CameraInfo", FRAMES, reliable),
            "/localization/kinematic_state": ("nav_msgs/msg/Odometry", FRAMES, reliable),
            "/tf_static": ("tf2_msgs/msg/TFMessage", 1,
                           QosProfile("reliable", "transient_local", "keep_last", 1))}
        assert bag.end_ns - bag.start_ns == 5 * 10**9
        assert bag.start_ns == 1_317_643_200 * 10**9
    assert sum(f.stat().st_size for f in drive.iterdir()) < 5_100_000


def test_stamps_are_exact_and_equal_for_all_topics(messages):
    for topic in (kitti_drive.IMAGE_TOPIC, kitti_drive.CAMERA_INFO_TOPIC,
                  kitti_drive.ODOMETRY_TOPIC):
        for i, (log_ns, message) in enumerate(messages[topic]):
            assert log_ns == _stamp_ns(message.header) == kitti_drive.START_NS + i * 10**8


def test_images_are_the_clips_bytes(messages):
    files = sorted((CLIP / "image_l").glob("*.jpg"))
    for file, (_, message) in zip(files, messages[kitti_drive.IMAGE_TOPIC]):
        assert message.data.tobytes() == file.read_bytes()
        assert message.format == "mono8; jpeg compressed mono8"
        assert message.header.frame_id == "camera_left_optical"
        assert cv2.imdecode(message.data, cv2.IMREAD_COLOR).shape == (376, 1241, 3)


def test_camera_info(messages):
    _, info = messages[kitti_drive.CAMERA_INFO_TOPIC][0]
    assert (info.width, info.height, info.header.frame_id) == (1241, 376, "camera_left_optical")
    k, p = info.k.reshape(3, 3), info.p.reshape(3, 4)
    assert k[0, 0] == k[1, 1] == p[0, 0] == 718.856
    assert (k[0, 2], k[1, 2], k[2, 2]) == (607.1928, 185.2157, 1.0)
    assert (p[:, 3] == 0).all() and (info.r.reshape(3, 3) == np.eye(3)).all()
    assert (info.d == 0).all()


def test_mounting_puts_the_optical_axis_ahead(messages):
    (_, tf), = messages[kitti_drive.STATIC_TF_TOPIC]
    motion, = tf.transforms
    assert (motion.header.frame_id, motion.child_frame_id) == ("base_link", "camera_left_optical")
    q = motion.transform.rotation
    base_from_camera = transform(matrix_from_quaternion(np.array([q.x, q.y, q.z, q.w])),
                                 _vector(motion.transform.translation))
    for camera, base in (([0, 0, 0], [1.03, 0, 1.65]), ([0, 0, 10], [11.03, 0, 1.65]),
                         ([1, 0, 0], [1.03, -1, 1.65]), ([0, 1, 0], [1.03, 0, 0.65])):
        np.testing.assert_allclose((base_from_camera @ [*camera, 1.0])[:3], base, atol=1e-12)


def test_the_drive_turns_right_in_map_axes(messages):
    odometry = [m for _, m in messages[kitti_drive.ODOMETRY_TOPIC]]
    assert {(m.header.frame_id, m.child_frame_id) for m in odometry} == {("map", "base_link")}
    poses = np.stack([_pose(m) for m in odometry])
    np.testing.assert_allclose(poses[0], np.eye(4), atol=1e-6)
    assert poses[5, 0, 3] == pytest.approx(4.9, abs=0.2)            # first half second: ahead
    assert (np.diff(poses[:, 1, 3]) < 0.0).all()                     # right is -y
    assert poses[-1, 1, 3] == pytest.approx(-39.0, abs=0.1)
    assert np.abs(poses[:, 2, 3]).max() < 1.5                        # a street, no ramp
    yaw = np.degrees(np.arctan2(poses[-1, 1, 0], poses[-1, 0, 0]))
    assert yaw == pytest.approx(-97.9, abs=0.1)
    length = np.linalg.norm(np.diff(poses[:, :3, 3], axis=0), axis=1).sum()
    assert length == pytest.approx(51.9, abs=0.1)


def test_camera_pose_and_mounting_agree_with_the_clip(messages):
    """Through the mounting, base_link's poses give back KITTI's camera poses."""
    clip = kitti_drive.read_clip(CLIP)
    for i in (0, 7, 50):
        map_from_camera = (_pose(messages[kitti_drive.ODOMETRY_TOPIC][i][1])
                           @ kitti_drive.BASE_FROM_CAMERA)
        camera0_from_camera = np.linalg.inv(kitti_drive.BASE_FROM_CAMERA) @ map_from_camera
        np.testing.assert_allclose(camera0_from_camera, clip.world_from_camera[i], atol=2e-5)


def test_twist_is_in_base_link_and_agrees_with_the_poses(messages):
    odometry = [m for _, m in messages[kitti_drive.ODOMETRY_TOPIC]]
    poses = [_pose(m) for m in odometry]
    linear = np.stack([_vector(m.twist.twist.linear) for m in odometry])
    angular = np.stack([_vector(m.twist.twist.angular) for m in odometry])
    assert 9.4 < linear[:, 0].min() and linear[:, 0].max() < 13.0       # forward, about 10 m/s
    assert np.abs(linear[:, 1:]).max() < 0.35           # a car goes where it points
    assert -0.5 < angular[:, 2].min() and angular[:, 2].max() < 0.0     # to the right
    assert np.abs(angular[:, :2]).max() < 0.15
    for i in range(FRAMES - 1):         # half the step with either end's twist leads there
        predicted = poses[i]
        for j in (i, i + 1):
            turn = rotation_from_vector(angular[j] * 0.05)
            middle = rotation_from_vector(angular[j] * 0.025)
            predicted = predicted @ transform(turn, middle @ linear[j] * 0.05)
        np.testing.assert_allclose(predicted[:3, 3], poses[i + 1][:3, 3], atol=0.012)
        np.testing.assert_allclose(predicted[:3, :3], poses[i + 1][:3, :3], atol=0.004)


def test_twist_of_a_steady_turn_is_exact():
    speed, rate, period = 10.0, -0.5, 0.1
    poses = []
    for i in range(5):
        yaw = rate * i * period
        position = speed / rate * np.array([np.sin(yaw), 1.0 - np.cos(yaw), 0.0])
        poses.append(transform(rotation_from_vector(np.array([0.0, 0.0, yaw])), position))
    expected = np.tile([speed, 0, 0, 0, 0, rate], (5, 1))
    np.testing.assert_allclose(kitti_drive.body_twists(np.stack(poses)), expected, atol=1e-9)
    standing = kitti_drive.body_twists(np.tile(np.eye(4), (4, 1, 1)))
    np.testing.assert_array_equal(standing, np.zeros((4, 6)))


def test_same_clip_same_bytes_and_no_overwriting(drive, tmp_path, capsys):
    again = tmp_path / "drive"
    arguments = ["--clip", str(CLIP), "--out", str(again)]
    assert kitti_drive.main(arguments) == 0
    for file in drive.iterdir():
        assert (again / file.name).read_bytes() == file.read_bytes()
    assert [p.name for p in tmp_path.iterdir()] == ["drive"]        # nothing temporary is left
    capsys.readouterr()
    assert kitti_drive.main(arguments) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert kitti_drive.main([*arguments, "--force"]) == 0


@pytest.mark.parametrize("spoil, words", [
    (lambda c: (c / "image_l" / "000010.jpg").unlink(), "given 50 images in image_l and 51 poses"),
    (lambda c: (c / "image_l" / "000010.jpg").write_bytes(b"\x89PNG"), "expected a JPEG"),
    (lambda c: (c / "poses.txt").unlink(), "poses.txt"),
    (lambda c: (c / "poses.txt").write_text("1 2 3\n"), "expected rows of 12 finite numbers"),
    (lambda c: (c / "calib.txt").write_text("P0: 1 2\n"), "expected rows of 12 numbers"),
])
def test_a_spoilt_clip_is_one_line_and_leaves_nothing(tmp_path, capsys, spoil, words):
    clip = tmp_path / "clip"
    shutil.copytree(CLIP, clip)
    spoil(clip)
    assert kitti_drive.main(["--clip", str(clip), "--out", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["clip"]
