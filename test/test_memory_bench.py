"""The memory measurement itself, on a small bag."""

import json

import pytest

pytest.importorskip("rosbags")
pytest.importorskip("jinja2")

from reasoning_planner.evaluation import memory_bench

SMALL = ["--gigabytes", "0.005", "--width", "192", "--height", "96"]


def test_a_bag_of_the_asked_size_is_evaluated_and_held_against_the_limit(capsys):
    assert memory_bench.main(SMALL) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["bag_gigabytes"] == pytest.approx(0.007, abs=0.003)
    assert 0.05 < figures["resident_gigabytes"] < 1.5
    assert memory_bench.main([*SMALL, "--limit-gigabytes", "0.01"]) == 1


def test_a_failed_evaluation_is_told(capsys):
    assert memory_bench.main([*SMALL, "--", "--samples", "0"]) == 1
    assert "--samples" in capsys.readouterr().err
