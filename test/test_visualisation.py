"""Markers and the picture with the path, over real DDS; nothing while nobody listens."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import yaml

pytest.importorskip("rclpy", reason="needs ROS 2: make ros")
pytest.importorskip("reasoning_planner.msg", reason="needs the built workspace: make ros")

from ros_harness import IMAGE, SPEED_MPS, nanoseconds, running
from sensor_msgs.msg import Image
from visualization_msgs.msg import Marker, MarkerArray

CONFIG = Path(__file__).resolve().parent.parent / "config"


@pytest.mark.ros
def test_a_plan_is_drawn_for_who_listens():
    with running() as vehicle:
        shown, pictures = [], []
        vehicle.drive(0, 17)                            # nobody listens yet: a plan all the same
        vehicle.node.create_subscription(MarkerArray, "/reasoning_planner/debug/markers",
                                         shown.append, 10)
        vehicle.node.create_subscription(Image, "/reasoning_planner/debug/image",
                                         pictures.append, 10)
        assert vehicle.wait_for(lambda: vehicle.node.count_publishers(
            "/reasoning_planner/debug/markers") > 0)
        vehicle.spin(0.5)
        vehicle.drive(18, 26)
        assert vehicle.wait_for(lambda: shown and pictures)
    path, footprints, text = shown[-1].markers
    assert {marker.header.frame_id for marker in shown[-1].markers} == {"map"}
    assert path.type == Marker.LINE_STRIP and len(path.points) == len(path.colors)
    start_m = SPEED_MPS * (nanoseconds(path.header.stamp) - vehicle.start_ns) * 1e-9
    assert path.points[0].x == pytest.approx(start_m, abs=0.1)
    assert path.points[-1].x > path.points[0].x + 40.0
    ys = [point.y for point in footprints.points[:8]]       # four edges of the first rectangle
    assert max(ys) - min(ys) == pytest.approx(1.85) and len(footprints.points) % 8 == 0
    assert text.text.startswith("kinematic")
    picture = pictures[-1]
    assert (picture.height, picture.width, picture.encoding) == (*IMAGE.shape[:2], "rgb8")
    seen = np.frombuffer(picture.data, np.uint8).reshape(picture.height, picture.width, 3)
    assert (seen[-5:] == IMAGE[-5:]).all(), "without a calibration no path"


def test_the_layouts_name_topics_that_exist():
    root = Path(__file__).resolve().parent.parent / "reasoning_planner"
    sources = "".join((root / f"{name}.py").read_text()
                      for name in ("node", "debug_topics", "visualisation", "debug_image"))
    rviz = yaml.safe_load((CONFIG / "planner.rviz").read_text())
    topics = [display["Topic"]["Value"] for display in rviz["Visualization Manager"]["Displays"]
              if "Topic" in display]
    text = (CONFIG / "foxglove_layout.json").read_text()
    json.loads(text)
    topics += re.findall(r'"(/reasoning_planner/[a-z_/]+)', text)
    own = [topic for topic in topics if topic.startswith("/reasoning_planner/")]
    assert len(own) >= 5
    for topic in own:
        name = topic.removeprefix("/reasoning_planner/")
        known = f"~/{name}" in sources or (name.endswith("_ms") and "~/debug/{name}_ms" in sources)
        assert known, topic
