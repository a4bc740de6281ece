"""Rigid motions: conventions by hand-worked numbers, then properties on random ones."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra.numpy import arrays
from transforms3d.quaternions import quat2mat

from reasoning_planner.datatypes import Reason, Refusal
from reasoning_planner.perception import frames

HALF = np.sqrt(0.5)
LEFT = np.array([0.0, 0.0, HALF, HALF])          # 90 degrees about z, xyzw
components = arrays(np.float64, 4, elements=st.floats(-1.0, 1.0)).filter(
    lambda q: np.linalg.norm(q) > 0.1)


def unit(quaternion):
    return quaternion / np.linalg.norm(quaternion)


def test_quaternions_are_xyzw_and_turn_left():
    rotation = frames.matrix_from_quaternion(LEFT)
    np.testing.assert_allclose(rotation @ [1.0, 0.0, 0.0], [0.0, 1.0, 0.0], atol=1e-12)
    assert frames.yaw_from_matrix(rotation) == pytest.approx(np.pi / 2)
    np.testing.assert_allclose(frames.quaternion_from_matrix(rotation), LEFT, atol=1e-12)


def test_compose_reads_target_first():
    map_from_base = frames.transform(frames.matrix_from_quaternion(LEFT), [10.0, 20.0, 0.0])
    base_from_camera = frames.transform(np.eye(3), [2.0, 0.0, 1.0])
    map_from_camera = frames.compose(map_from_base, base_from_camera)
    np.testing.assert_allclose(frames.transform_points(map_from_camera, np.zeros((1, 3))),
                               [[10.0, 22.0, 1.0]], atol=1e-12)


@settings(max_examples=30, deadline=None)
@given(components, arrays(np.float64, (3,), elements=st.floats(-6e6, 6e6)))
def test_inverse_undoes_at_utm_size(quaternion, translation):
    a_from_b = frames.transform(frames.matrix_from_quaternion(unit(quaternion)), translation)
    points = np.array([[1.0, -2.0, 3.0], [0.0, 0.0, 0.0]])
    there = frames.transform_points(a_from_b, points)
    np.testing.assert_allclose(frames.transform_points(frames.inverse(a_from_b), there), points,
                               atol=1e-7)


@settings(max_examples=30, deadline=None)
@given(components)
def test_matrix_and_quaternion_round_trip(quaternion):
    there = frames.matrix_from_quaternion(unit(quaternion))
    np.testing.assert_allclose(there, quat2mat(np.roll(unit(quaternion), 1)), atol=1e-12)
    back = frames.matrix_from_quaternion(frames.quaternion_from_matrix(there))
    np.testing.assert_allclose(back, there, atol=1e-9)
    np.testing.assert_allclose(there @ there.T, np.eye(3), atol=1e-9)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("vector", [[0.0, 0.0, 0.0], [0.0, 0.0, 1e-9], [0.3, -0.2, 0.9],
                                    [0.0, 0.0, 3.1]])
def test_rotation_vectors_round_trip(vector, sign):
    end = frames.matrix_from_quaternion(LEFT) @ frames.rotation_from_vector(np.array(vector))
    between = frames.vector_between(LEFT, sign * frames.quaternion_from_matrix(end))
    np.testing.assert_allclose(between, vector, atol=1e-12)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("fraction", [0.0, 0.25, 0.5, 1.0, 1.5])
def test_slerp_takes_the_shorter_arc_at_constant_rate(sign, fraction):
    between = frames.slerp(np.array([0.0, 0.0, 0.0, 1.0]), sign * LEFT, fraction)
    assert np.linalg.norm(between) == pytest.approx(1.0)
    yaw = frames.yaw_from_matrix(frames.matrix_from_quaternion(between))
    assert yaw == pytest.approx(fraction * np.pi / 2)


def test_slerp_between_equal_rotations():
    np.testing.assert_allclose(frames.slerp(LEFT, LEFT, 0.3), LEFT, atol=1e-12)
    nearly = unit(LEFT + [1e-8, 0.0, 0.0, 0.0])
    np.testing.assert_allclose(frames.slerp(LEFT, nearly, 0.5), unit(LEFT + nearly), atol=1e-12)


@pytest.mark.parametrize("norm", [0.91, 0.999, 1.0, 1.02, 1.09])
def test_a_norm_near_one_is_normalised(norm):
    np.testing.assert_allclose(frames.normalised_quaternion(norm * -LEFT), -LEFT, atol=1e-12)


@pytest.mark.parametrize("quaternion", [
    [0.0, 0.0, 0.0, 0.0], [np.nan, 0.0, 0.0, 1.0], [np.inf, 0.0, 0.0, 0.0],
    [0.0, 0.0, 0.0, 0.89], [0.0, 0.0, 0.0, 1.11]])
def test_no_rotation_is_refused(quaternion):
    refusal = frames.normalised_quaternion(np.array(quaternion))
    assert isinstance(refusal, Refusal) and refusal.reason is Reason.ODOMETRY_INVALID
    assert "norm" in refusal.detail and str(quaternion[0]) in refusal.detail
