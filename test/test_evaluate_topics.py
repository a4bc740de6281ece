"""Which topic is which input: by mounting, by name, by what moves; and what is asked back."""

import numpy as np
import pytest

pytest.importorskip("rosbags")

from reasoning_planner.bags import Topic
from reasoning_planner.datatypes import OdometrySample
from reasoning_planner.errors import ConfigError, DataError
from reasoning_planner.evaluation import stream, survey, topics, topics_file
from reasoning_planner.perception import frames

COMPRESSED, RAW = "sensor_msgs/msg/CompressedImage", "sensor_msgs/msg/Image"
ODOMETRY = "nav_msgs/msg/Odometry"
LEVEL = (0.0, 0.0, 0.0, 1.0)


def pose_topic(name, frame="map", child="base_link", count=50, moves=True, speed=5.0,
               twist=("twist", "twist"), quaternion=LEVEL, stamped=True):
    samples = tuple(OdometrySample(
        i * 100_000_000, np.array([speed * 0.1 * i if moves else 0.0, 0.0, 0.0]),
        np.array(quaternion), np.array([speed if twist else 0.0, 0.0, 0.0]), np.zeros(3))
        for i in range(count))
    kind = ODOMETRY if twist else "geometry_msgs/msg/PoseStamped"
    return survey.PoseTopic(Topic(name, kind, count), survey.PoseShape(("pose",), twist,
                                                                       bool(twist)),
                            frame, child, stamped, samples)


def camera(name, yaw=None, angle=None, frame=None, kind=RAW, count=50, stamped=True):
    """A camera that looks `yaw` degrees to the left with a field of view of `angle` degrees."""
    base_from_camera = None
    if yaw is not None:
        turn = np.radians(yaw)
        rotation = np.array([[np.cos(turn), -np.sin(turn), 0], [np.sin(turn), np.cos(turn), 0],
                             [0, 0, 1.0]])
        base_from_camera = frames.transform(rotation @ frames.OPTICAL, np.array([1.5, 0, 1.5]))
    calibration = None
    if angle is not None:
        focal = 500.0 / np.tan(np.radians(angle) / 2.0)
        k = np.array([[focal, 0, 500.0], [0, focal, 300], [0, 0, 1]])
        calibration = survey.Calibration(k, np.zeros(5), 1000, 600, True)
    return survey.CameraTopic(Topic(name, kind, count), kind == COMPRESSED,
                              name if frame is None else frame, stamped, calibration,
                              base_from_camera)


def surveyed(poses=(), cameras=(), more=(), transforms=None, undefined=()):
    held = {item.topic.name: item.topic for item in (*poses, *cameras)}
    held |= {topic.name: topic for topic in more}
    return survey.Survey("bag", 10.0, held, tuple(poses), tuple(cameras), transforms or {},
                         undefined)


def resolved(*cameras, poses=(pose_topic("/odom"),), wanted=None, **more):
    return topics.resolve(surveyed(poses, cameras, **more), 4, 1, wanted)


# Cameras

def test_mounting_tells_the_cameras_apart():
    chosen = resolved(camera("/a", 0, 30), camera("/b", -60, 120), camera("/c", 60, 120),
                      camera("/d", 1, 120), camera("/e", 180, 120))
    assert chosen.cameras == ("/c", "/d", "/b", "/a")
    assert chosen.odometry == "/odom" and chosen.notes == ()


def test_names_tell_them_apart_where_the_mounting_is_not_known():
    chosen = resolved(camera("/cam/front_left/image"), camera("/cam/front_right/image"),
                      camera("/cam/front/image"), camera("/cam/front_tele/image"),
                      camera("/cam/rear_left/image"))
    assert chosen.cameras == ("/cam/front_left/image", "/cam/front/image",
                              "/cam/front_right/image", "/cam/front_tele/image")
    assert "names" in chosen.notes[0]
    numbered = [camera(f"/world/camera{i}/image_raw") for i in range(4)]
    assert resolved(*numbered).cameras == tuple(c.topic.name for c in numbered)


def test_the_only_camera_is_the_front_one():
    chosen = resolved(camera("/somewhere/image"))
    assert chosen.cameras == ("", "/somewhere/image", "", "")
    assert len([n for n in chosen.notes if "no camera for slot" in n]) == 3


def test_of_one_camera_the_drivers_pixels_are_taken():
    same = [camera("/cam/image_rect", 0, 90, "lens"),
            camera("/cam/image_raw/compressed", 0, 90, "lens", COMPRESSED),
            camera("/cam/image_raw", 0, 90, "lens"),
            camera("/cam/depth/image_raw", 0, 90, "lens", count=500)]
    assert resolved(*same).cameras[1] == "/cam/image_raw"
    fewer = [same[1], camera("/cam/image_raw", 0, 90, "lens", count=3)]
    assert resolved(*fewer).cameras[1] == "/cam/image_raw/compressed"


def test_two_cameras_ahead_are_a_choice_with_a_proposal_that_can_be_read_back(tmp_path):
    pair = [camera("/stereo/left", 0, 90), camera("/stereo/right", 0, 90)]
    with pytest.raises(topics.AmbiguousTopics, match="/stereo/left and /stereo/right") as asked:
        resolved(*pair)
    file = tmp_path / "topics.yaml"
    file.write_text(asked.value.proposal)
    wanted = topics_file.read_topics(file)
    assert resolved(*pair, wanted=wanted).cameras == ("", "/stereo/left", "", "")
    assert "# front: /stereo/right  # sensor_msgs/msg/Image, 5 Hz" in asked.value.proposal


def test_cameras_of_which_none_is_known_are_a_choice():
    with pytest.raises(topics.AmbiguousTopics, match="none of 2 cameras"):
        resolved(camera("/p/image"), camera("/q/image"))


def test_no_camera_names_what_the_bag_holds():
    with pytest.raises(DataError, match="/points.*--odometry-only"):
        resolved(more=(Topic("/points", "sensor_msgs/msg/PointCloud2", 5),))
    chosen = topics.resolve(surveyed((pose_topic("/odom"),)), 4, 1, odometry_only=True)
    assert chosen.cameras == ()


# Odometry

def test_the_localisation_is_preferred_to_wheel_odometry():
    poses = (pose_topic("/wheel", "odom"), pose_topic("/localization/kinematic_state"))
    assert resolved(camera("/c"), poses=poses).odometry == "/localization/kinematic_state"


def test_two_alike_are_a_choice():
    with pytest.raises(topics.AmbiguousTopics, match="/a and /b may be the odometry"):
        resolved(camera("/c"), poses=(pose_topic("/a"), pose_topic("/b")))


def test_poses_that_stay_in_place_against_their_twist_are_not_used():
    poses = (pose_topic("/odometry", "chassis", "", moves=False),
             pose_topic("/pose", "utm", "", twist=(), stamped=False))
    chosen = resolved(camera("/c"), poses=poses)
    assert chosen.odometry == "/pose" and chosen.base_frame == "base_link"
    notes = "; ".join(chosen.notes)
    for told in ("stay in place", "stamps are zero", "without a twist", "no child frame"):
        assert told in notes


def test_no_odometry_names_what_is_missing():
    with pytest.raises(DataError, match=r"NavSatFix.*no definition of a_msgs/msg/B: --msg-path"):
        resolved(camera("/c"), poses=(), undefined=("a_msgs/msg/B",),
                 more=(Topic("/gps", "sensor_msgs/msg/NavSatFix", 9),))


def test_another_frame_is_brought_to_the_base_where_the_bag_says_how():
    lever = frames.transform(np.eye(3), np.array([1.0, 0.0, 0.5]))
    poses = (pose_topic("/ins", child="imu"),)
    chosen = resolved(camera("/c"), poses=poses, transforms={"imu": ("base_link", lever)})
    assert chosen.base_frame == "base_link" and not chosen.notes[3:]
    alone = resolved(camera("/c"), poses=poses)
    assert alone.base_frame == "imu"
    named = resolved(camera("/c"), poses=poses, wanted={"base_frame": "base_link"})
    assert any("no transform from imu to base_link" in note for note in named.notes)


def test_a_frame_that_is_not_level_is_said():
    tilted = pose_topic("/ins", quaternion=(-0.49, 0.48, 0.5, 0.52))
    chosen = resolved(camera("/c"), poses=(tilted,))
    assert any("z axis" in note for note in chosen.notes)


def test_odometry_of_another_point_is_moved_with_its_twist():
    # The sensor is 1 m ahead of the base and looks to the left; the vehicle turns on the spot
    # about its base with 2 rad/s, so the sensor moves sideways with 2 m/s: ahead, as it sees it.
    left = np.array([[0.0, -1, 0], [1, 0, 0], [0, 0, 1]])
    base_from_sensor = frames.transform(left, np.array([1.0, 0.0, 0.0]))
    sensor = OdometrySample(5, np.array([11.0, 20.0, 0.0]),
                            frames.quaternion_from_matrix(left), np.array([2.0, 0, 0]),
                            np.array([0, 0, 2.0]))
    moved = stream.moved_to_base(sensor, frames.inverse(base_from_sensor))
    assert moved.position == pytest.approx([10.0, 20.0, 0.0])
    assert moved.quaternion_xyzw == pytest.approx([0, 0, 0, 1])
    assert moved.linear_velocity == pytest.approx([0, 0, 0], abs=1e-12)
    assert moved.angular_velocity == pytest.approx([0, 0, 2.0])


# The file

@pytest.mark.parametrize("text, told", [
    ("odometry: [1, 2]", "odometry"), ("lidar: /points", "'lidar'"), ("- /odom", "list"),
    ("cameras: {up: /c}", "'up'"), ("cameras: 3", "cameras"), (": : :", "topics.yaml"),
    ("", "None"),
    ("cameras: {front: 5}", "cameras.front"), ("cameras: [a, b, c, d, e, f, g, h, i]", "at most"),
])
def test_a_bad_file_is_told(tmp_path, text, told):
    file = tmp_path / "topics.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=told):
        topics_file.read_topics(file)


def test_a_list_of_cameras_is_in_the_order_of_the_slots(tmp_path):
    file = tmp_path / "topics.yaml"
    file.write_text("cameras: [null, /c]\n")
    chosen = resolved(camera("/b"), camera("/c"), wanted=topics_file.read_topics(file))
    assert chosen.cameras == ("", "/c", "", "")


def test_a_wanted_topic_of_the_wrong_kind_is_told():
    with pytest.raises(DataError, match="/points is a sensor_msgs/msg/PointCloud2.*/odom"):
        resolved(camera("/c"), wanted={"odometry": "/points"},
                 more=(Topic("/points", "sensor_msgs/msg/PointCloud2", 5),))
    with pytest.raises(DataError, match="/gone is not in the bag"):
        resolved(camera("/c"), wanted={"cameras": {"front": "/gone"}})


# What messages hold

def test_poses_and_images_are_known_by_their_fields():
    header = {"header": "std_msgs/msg/Header"}
    ours = header | {"state": "uint8", "pose": "geometry_msgs/msg/Pose",
                     "twist": "geometry_msgs/msg/Twist"}
    assert survey.pose_shape(ours) == survey.PoseShape(("pose",), ("twist",), False)
    assert survey.pose_shape({"pose": "geometry_msgs/msg/Pose"}) is None
    pixels = header | {"height": "uint32", "width": "uint32", "encoding": "string",
                       "step": "uint32", "is_bigendian": "uint8", "data": "uint8[]"}
    assert survey.is_image(pixels) is False
    assert survey.is_image(header | {"format": "string", "data": "uint8[]"}) is True
    assert survey.is_image(header | {"format": "string", "data": "string"}) is None


def test_frames_meet_anywhere_in_the_tree():
    def up(x):
        return frames.transform(np.eye(3), np.array([x, 0.0, 0.0]))
    transforms = {"base_link": ("chassis", up(1.0)), "lens": ("roof", up(2.0)),
                  "roof": ("chassis", up(4.0)), "loop": ("loop", up(1.0))}
    found = survey.base_from_frame(transforms, "base_link", "lens")
    assert found[:3, 3] == pytest.approx([5.0, 0, 0])
    assert survey.base_from_frame(transforms, "base_link", "nowhere") is None
    assert survey.base_from_frame(transforms, "loop", "lens") is None


def test_a_camera_is_calibrated_by_the_info_nearest_above_it():
    infos = ["/camera_info", "/front/camera_info", "/rear/camera_info", "/front/left/camera_info"]
    assert survey.nearest_info("/front/image_raw", infos) == "/front/camera_info"
    assert survey.nearest_info("/front/left/image_raw", infos) == "/front/left/camera_info"
    assert survey.nearest_info("/side/image_raw", infos) == "/camera_info"
    assert survey.nearest_info("/side/image_raw", infos[1:]) is None
