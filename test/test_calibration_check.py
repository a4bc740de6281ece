"""Cameras that do not look where their slots do: which, and where they look."""

import math

import numpy as np
import pytest

from reasoning_planner.calibration_check import (Mountings, SeenCamera, StaticTransform,
                                                 check_calibration, slots_of_inputs)
from reasoning_planner.diagnoses import Level
from reasoning_planner.perception.frames import quaternion_from_matrix

OPTICAL = np.array(((0.0, 0.0, 1.0), (-1.0, 0.0, 0.0), (0.0, -1.0, 0.0)))
ALL = slots_of_inputs((0, 1, 2, 3))
YAWS = {0: 60.0, 1: 0.0, 2: -60.0, 3: 0.0}
FOVS = {0: 120.0, 1: 120.0, 2: 120.0, 3: 30.0}


def quaternion(rotation):
    return tuple(quaternion_from_matrix(rotation).tolist())


def around_z(degrees):
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return np.array(((c, -s, 0.0), (s, c, 0.0), (0.0, 0.0, 1.0)))


def rig(yaws, scale=1.0):
    """Each camera on a bracket on a sensor kit that is itself turned by 10 degrees."""
    mountings = Mountings()
    kit = around_z(10.0)
    mountings.add(StaticTransform("base_link", "kit", tuple(np.array(quaternion(kit)) * scale)))
    for i, yaw in yaws.items():
        mountings.add(StaticTransform("kit", f"camera{i}", quaternion(kit.T @ around_z(yaw))))
        mountings.add(StaticTransform(f"camera{i}", f"camera{i}_optical", quaternion(OPTICAL)))
    return mountings


def cameras(fovs=FOVS, width=1920):
    return {i: SeenCamera(f"camera{i}_optical", width,
                          width / (2.0 * math.tan(math.radians(fov) / 2.0)))
            for i, fov in fovs.items()}


def check(yaws=YAWS, fovs=FOVS, expected=ALL, **options):
    return check_calibration(cameras(fovs), rig(yaws, **options), "base_link", expected)


def test_a_right_rig_is_right_and_says_its_angles():
    found = check()
    assert found.level is Level.OK and found.message == "OK"
    assert found.values["image0 yaw_deg"] == "60.0" and found.values["image3 fov_deg"] == "30.0"
    assert check(scale=1.02).level is Level.OK, "a quaternion that is not quite of unit norm"


def test_swapped_sides_are_an_error_that_says_which():
    found = check({**YAWS, 0: -60.0, 2: 60.0})
    assert found.level is Level.ERROR
    assert found.message.startswith("image0 and image2 are swapped: image0, the front left "
                                    "camera, looks 60 degrees to the right")


def test_cameras_named_by_their_body_frame_are_turned_to_the_optical_one():
    bodies = {i: SeenCamera(f"camera{i}", 1920, item.focal_px) for i, item in cameras().items()}
    assert check_calibration(bodies, rig(YAWS), "base_link", ALL).level is Level.OK
    found = check_calibration(bodies, rig({**YAWS, 0: -60.0, 2: 60.0}), "base_link", ALL)
    assert found.message.startswith("image0 and image2 are swapped")


def test_the_mounting_has_its_place_too():
    mountings = Mountings()
    mountings.add(StaticTransform("base_link", "kit", quaternion(around_z(90.0)), (1.0, 0, 2.0)))
    mountings.add(StaticTransform("kit", "optical", quaternion(OPTICAL), (0.5, 0.0, 0.0)))
    found = mountings.pose_of("optical", "base_link")
    assert found[:3, 3] == pytest.approx([1.0, 0.5, 2.0])
    assert found[:3, 2] == pytest.approx([0.0, 1.0, 0.0], abs=1e-12), "it looks to the left"


def test_one_that_looks_elsewhere_is_named():
    found = check({**YAWS, 1: 180.0})
    assert found.level is Level.ERROR
    assert found.message == ("image1, the front camera, looks 180 degrees to the left, "
                             "expected ahead")


def test_a_wrong_lens_is_a_warning():
    found = check(fovs={**FOVS, 1: 30.0, 2: 60.0})
    assert found.level is Level.WARN
    assert "image1, the front camera, sees 30 degrees, expected about 120" in found.message
    assert "image2, the front right camera, sees 60 degrees" in found.message


def test_wide_and_telephoto_swapped_is_an_error_too():
    found = check(fovs={**FOVS, 1: 30.0, 3: 120.0})
    assert found.level is Level.ERROR
    assert found.message == ("image1 and image3 are swapped: image1, the front camera, sees 30 "
                             "degrees, image3, the front telephoto camera, sees 120 degrees")


def test_a_fisheye_sees_farther_than_a_pinhole_of_its_focal_length():
    seen = SeenCamera("front", 1920, 1920 / math.radians(120.0), model="equidistant")
    assert math.degrees(seen.fov_rad) == pytest.approx(120.0)


def test_inputs_are_judged_by_the_slot_they_are_mapped_to():
    mapped = slots_of_inputs((2, 1, 0, -1))
    assert mapped == {2: 0, 1: 1, 0: 2}
    assert check(expected=mapped).level is Level.ERROR
    assert check({**YAWS, 0: -60.0, 2: 60.0}, expected=mapped).level is Level.OK


@pytest.mark.parametrize("mountings", [Mountings(), rig({1: 0.0})])
def test_what_is_not_known_is_not_judged(mountings):
    found = check_calibration(cameras(), mountings, "base_link", ALL)
    assert found.level is Level.OK and found.values["image0 yaw_deg"] == "nan"
    blind = {0: SeenCamera("camera0_optical", 1920, 0.0)}
    assert check_calibration(blind, mountings, "base_link", ALL).level is Level.OK


def test_a_circle_of_frames_and_a_zero_quaternion_end():
    mountings = Mountings()
    mountings.add(StaticTransform("a", "b", (0.0, 0.0, 0.0, 1.0)))
    mountings.add(StaticTransform("b", "a", (0.0, 0.0, 0.0, 1.0)))
    mountings.add(StaticTransform("base_link", "c", (0.0, 0.0, 0.0, 0.0)))
    assert math.isnan(mountings.yaw_of("a", "base_link"))
    assert math.isnan(mountings.yaw_of("c", "base_link"))
