"""Projection and charts against hand-worked numbers."""

import base64
import xml.etree.ElementTree

import numpy as np
import pytest

cv2 = pytest.importorskip("cv2")

from reasoning_planner import path_drawing
from reasoning_planner.evaluation import drawing

# 100 px focal length, centre (160, 60); 1.5 m above the ground, 1 m ahead of the base, level.
CAMERA = path_drawing.Camera(
    k=np.array([[100.0, 0, 160], [0, 100, 60], [0, 0, 1]]),
    base_from_camera=np.array([[0.0, 0, 1, 1.0], [-1, 0, 0, 0], [0, -1, 0, 1.5], [0, 0, 0, 1]]),
    size=(320, 120))


def straight_plan(n=65, speed=10.0):
    positions = np.stack([np.arange(n) * 0.1 * speed, np.zeros(n), np.zeros(n)], axis=1)
    return positions, np.tile([0.0, 0.0, 0.0, 1.0], (n, 1)), np.full(n, speed)


def draw(image, truth=None, width_m=2.0):
    positions, quaternions, speed = straight_plan()
    truth = np.full((2, 3), np.nan) if truth is None else truth
    return path_drawing.draw_plan(image, CAMERA, np.eye(4), positions, quaternions, speed,
                                  np.arange(65) * 100_000_000, truth, width_m, (0.0, 20.0))


def test_project_by_hand():
    # 11 m ahead of the base is 10 m ahead of the camera: 2 m left -> 20 px left of the centre,
    # 1.5 m below the camera -> 15 px under it.
    points = CAMERA.from_fixed(np.eye(4), np.array([[11.0, 2.0, 0.0], [11.0, 0.0, 1.5]]))
    assert points == pytest.approx(np.array([[-2.0, 1.5, 10.0], [0.0, 0.0, 10.0]]))
    assert CAMERA.project(points) == pytest.approx(np.array([[140.0, 75.0], [160.0, 60.0]]))


def test_the_pose_of_the_base_is_taken_out():
    # The base stands at (5, 7) and looks along y: (5, 18) is 11 m ahead of it.
    map_from_base = np.array([[0.0, -1, 0, 5], [1, 0, 0, 7], [0, 0, 1, 0], [0, 0, 0, 1]])
    points = CAMERA.from_fixed(map_from_base, np.array([[5.0, 18.0, 0.0]]))
    assert CAMERA.project(points)[0] == pytest.approx([160.0, 75.0])


def test_points_behind_the_camera_have_no_pixel():
    pixels = CAMERA.project(np.array([[0.0, 1.5, -10.0], [0.0, 1.5, 0.0], [0.0, 1.5, 0.5],
                                      [0.0, 1.5, 1.0]]))
    assert np.isnan(pixels[:3]).all()
    assert pixels[3] == pytest.approx([160.0, 210.0])


def test_clipping_cuts_at_the_near_plane():
    triangle = np.array([[0.0, 1.0, -1.0], [2.0, 1.0, 3.0], [-2.0, 1.0, 3.0]])
    clipped = path_drawing.clip_near(triangle)
    assert clipped == pytest.approx(np.array([[-1, 1, 1], [1, 1, 1], [2, 1, 3], [-2, 1, 3]]))
    segment = path_drawing.clip_near(triangle[:2], closed=False)
    assert segment == pytest.approx(np.array([[1, 1, 1], [2, 1, 3]]))
    assert path_drawing.clip_near(triangle - [0, 0, 9]).shape == (0, 3)


def test_ribbon_has_the_width_of_the_vehicle():
    turned = np.array([[0.0, 0.0, np.sqrt(0.5), np.sqrt(0.5)]])                 # left is -x
    left, right = path_drawing.ribbon_edges(np.zeros((1, 3)), turned, 2.0)
    assert left[0] == pytest.approx([-1.0, 0.0, 0.0])
    assert right[0] == pytest.approx([1.0, 0.0, 0.0])


def test_ribbon_lies_where_the_projection_says():
    image = np.full((120, 320, 3), 100, np.uint8)
    drawn = draw(image)
    assert (image == 100).all()                                # the input stays as it was
    changed = (drawn != 100).any(axis=2)
    # In row 90 (30 px under the horizon) the ground is 5 m from the camera: 1 m is 20 px.
    columns = np.flatnonzero(changed[90])
    assert columns.min() == pytest.approx(140, abs=1.5)
    assert columns.max() == pytest.approx(180, abs=1.5)
    assert not changed[:61, 130:163].any()                     # nothing above the horizon
    assert changed[119, 160]                                   # and on to the lower edge
    expected = 100 * 0.45 + 0.55 * path_drawing.speed_colours(np.array([10.0]), 0.0, 20.0)[0]
    assert drawn[90, 160] == pytest.approx(expected, abs=1.0)


def test_driven_path_is_a_white_line_with_gaps():
    image = np.full((120, 320, 3), 100, np.uint8)
    truth = np.array([[4.0, 1.0, 0], [8.0, 1.0, 0], [np.nan] * 3, [11.0, 1.0, 0], [30.0, 1.0, 0]])
    drawn = draw(image, truth, width_m=0.2)
    # 1 m left of the centre line: 5 m from the camera 20 px (row 90), 9 m: 11.1 px (row 76.7).
    assert drawn[90, 140].min() > 200
    assert drawn[77, 149].max() < 160


def test_a_path_wholly_behind_leaves_the_image_alone():
    image = np.full((120, 320, 3), 100, np.uint8)
    positions, quaternions, speed = straight_plan()
    positions[:, 0] -= 100.0
    drawn = path_drawing.draw_plan(image, CAMERA, np.eye(4), positions, quaternions, speed,
                                   np.arange(65) * 100_000_000, positions, 2.0, (0.0, 20.0))
    assert (drawn == image).all()


def test_speed_colours_reach_both_ends():
    colours = path_drawing.speed_colours(np.array([-5.0, 0.0, 10.0, 20.0, 99.0]), 0.0, 20.0)
    assert colours.tolist() == [list(path_drawing.SPEED_STOPS[i]) for i in (0, 0, 2, 4, 4)]


def test_jpeg_uri_scales_down():
    uri = drawing.jpeg_uri(np.zeros((100, 400, 3), np.uint8), max_width=200)
    data = np.frombuffer(base64.b64decode(uri.partition(",")[2]), np.uint8)
    assert cv2.imdecode(data, cv2.IMREAD_COLOR).shape == (50, 200, 3)


@pytest.mark.parametrize("low, high, expected", [
    (0.0, 10.0, [0, 2, 4, 6, 8, 10]), (-0.3, 0.31, [-0.2, 0.0, 0.2]), (3.0, 3.0, [3.0])])
def test_nice_ticks(low, high, expected):
    assert drawing.nice_ticks(low, high).tolist() == expected


def test_charts_are_well_formed_and_escape_text():
    series = [drawing.Series(np.array([0.0, 1.0, 2.0, 3.0]), np.array([0.0, np.nan, 2.0, 3.0]),
                             "plan"),
              drawing.Series(np.array([1.0]), np.array([1.0]), "truth", dots=True)]
    charts = [drawing.line_chart(series, "a < b", "m & n", "title"),
              drawing.map_chart(series, "x", "y", "title", marks=[(1.0, 1.0, "<1>")]),
              drawing.histogram(np.array([1.0, 1.0, 2.0]), "ms", "title", "plan"),
              drawing.time_strip([("row", [(0.0, 0.1, "st", "a & b")])], (0.0, 1.0), "s", "t")]
    for chart in charts:
        root = xml.etree.ElementTree.fromstring(chart)
        assert root.tag == "svg" and "nan" not in chart
    path = xml.etree.ElementTree.fromstring(charts[0]).find("path").attrib["d"]
    assert path.count("M") == 2 and path.count("L") == 1      # the gap begins a new stroke


def test_map_keeps_its_proportions():
    plot_width = 560.0 - drawing.MARGIN_LEFT - drawing.MARGIN_RIGHT
    square = drawing.Series(np.array([0.0, 100, 100, 0, 0]), np.array([0.0, 0, 10, 10, 0]), "plan")
    chart = xml.etree.ElementTree.fromstring(drawing.map_chart([square], "x", "y", "t"))
    points = [tuple(map(float, p.split())) for p in
              chart.find("path").attrib["d"].replace("M", "L").split("L")[1:]]
    width, height = points[1][0] - points[0][0], points[0][1] - points[2][1]
    assert width < plot_width and width / height == pytest.approx(10.0, rel=0.01)
