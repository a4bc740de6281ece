"""The commands that measure the node: their arithmetic, and one short run of the soak."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("rclpy", reason="needs ROS 2: make ros")
pytest.importorskip("reasoning_planner.msg", reason="needs the built workspace: make ros")

from reasoning_planner.evaluation import isolation_bench, publication_rate, restart_bench, soak
from reasoning_planner.world.drive import make_drive
from reasoning_planner.world.rosbag import write_bag

pytestmark = pytest.mark.ros


def test_rates_of_an_even_and_an_uneven_topic():
    even = publication_rate.rates([0.1 * i for i in range(101)], 10.0)
    assert even["rate_hz"] == pytest.approx(10.0) and even["passed"]
    assert even["slowest_second_hz"] == 10 and even["fastest_second_hz"] in (10, 11)
    assert even["longest_gap_ms"] == pytest.approx(100.0)
    hole = publication_rate.rates([0.1 * i for i in range(101) if not 30 <= i < 50], 10.0)
    assert hole["longest_gap_ms"] == pytest.approx(2100.0) and hole["slowest_second_hz"] == 1
    assert hole["rate_hz"] == pytest.approx(8.0) and not hole["passed"]
    assert not publication_rate.rates([1.0], 10.0)["passed"]


@pytest.mark.parametrize("growth_mb, missed, passed", [
    (19.9, 0, True), (20.0, 0, False), (-3.0, 0, True), (0.0, 1, False)])
def test_a_soak_passes_with_little_growth_and_no_missed_status(growth_mb, missed, passed):
    assert soak.Figures(growth_mb=growth_mb, missed=missed).passed == passed


def test_a_short_soak(tmp_path):
    command = [sys.executable, "-m", "reasoning_planner.evaluation.soak", "--minutes", "0.05",
               "--warm-up", "0.5", "--model", "", "--rate", "3", "--out", "soak.json",
               "--bag", str(write_bag(make_drive(0, 4.0), tmp_path / "drive"))]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ended.stdout, ended.stderr
    figures = json.loads((tmp_path / "soak.json").read_text())
    assert json.loads(ended.stdout) == figures
    assert ended.returncode == (0 if figures["passed"] else 1)
    assert figures["seconds"] >= 3.0 and figures["statuses"] > 3 and figures["plans"] > 3
    assert figures["rss_mb"]["node"]["begin"] > 20.0 and "model" not in figures["rss_mb"]


@pytest.mark.parametrize("command", [isolation_bench, publication_rate, restart_bench, soak])
def test_help_and_bad_usage(command, capsys):
    for arguments, code in ((["--help"], 0), (["--no-such-option"], 2)):
        with pytest.raises(SystemExit) as ended:
            command.main(arguments)
        assert ended.value.code == code
    assert "python -m" in capsys.readouterr().out
