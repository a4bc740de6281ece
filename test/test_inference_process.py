"""The model's process: real processes, asked, killed, late, interrupted."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import slow_model

from reasoning_planner.config import ModelSettings
from reasoning_planner.datatypes import (CameraFrame, Deadline, EgoHistory, Observation, Reason,
                                         Refusal)
from reasoning_planner.errors import ModelError
from reasoning_planner.inference_process import InferenceProcess

HISTORY = EgoHistory(1, np.zeros((16, 3)), np.tile(np.eye(3), (16, 1, 1)), np.eye(4), 7.0, 0.0)


def observation(images=(), text=""):
    frames = tuple(tuple(None if image is None else CameraFrame(slot, 5 + k, image)
                         for k, image in enumerate(row)) for slot, row in enumerate(images))
    return Observation(9, "map", HISTORY, frames, route_text=text)


@pytest.fixture
def reports():
    return []


@pytest.fixture
def process(reports):
    made = InferenceProcess(slow_model.load, ModelSettings("some"), reports.append)
    assert made.start(60.0)
    yield made
    made.close()


def ask(process, *arguments, within_s=30.0, **named):
    return process.plan_trajectory(observation(*arguments, **named), Deadline.after(within_s))


def heard(answer):
    """(pid, frames known before, sums of the images) out of the model's text."""
    pid, known, sums = answer.reasoning.text.split(" ", 2)
    return int(pid), int(known), json.loads(sums)


def wait_for(condition, timeout_s=30.0):
    until = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)
    return condition()


def ended(pid):
    """Gone, or a zombie whose parent has not asked yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_it_is_the_model_it_loaded_in_another_process(process):
    assert (process.name, process.runtime_name) == ("echo", "test")
    assert process.description == {"weights": "none"} and process.absent == ""
    answer = ask(process)
    assert heard(answer)[0] == process.health().pid != os.getpid()
    assert answer.trajectory.speed_mps[0] == 7.0 and answer.timings.act_ms == 1.0
    assert process.health().loaded and process.health().problem == ""


def test_frames_arrive_as_they_are_and_each_only_once(process):
    random = np.random.default_rng(0)

    def image(height, width):
        return random.integers(0, 255, (height, width, 3), dtype=np.uint8)

    first, second = [[image(4, 6), image(8, 5), None]], [[image(3, 3)]]
    assert heard(ask(process, first))[1:] == (0, [int(i.sum()) for i in first[0][:2]] + [-1])
    both = first + second
    pid, known, sums = heard(ask(process, both))
    assert known == 2 and sums == [-1 if i is None else int(i.sum()) for r in both for i in r]
    larger = [[image(480, 640), first[0][1]]]                  # the shared memory must grow
    assert heard(ask(process, larger))[1:] == (1, [int(i.sum()) for i in larger[0]])
    same_stamp_other_pixels = [[image(4, 6), first[0][1]]]
    assert heard(ask(process, same_stamp_other_pixels))[2][0] == \
        int(same_stamp_other_pixels[0][0].sum())
    twice = [[first[0][0]], [first[0][0]]]                     # one image in two slots
    assert heard(ask(process, twice))[2] == [int(first[0][0].sum())] * 2


def test_an_error_of_the_model_is_one_here(process):
    with pytest.raises(ModelError, match="told to fail"):
        ask(process, text="fail")
    assert heard(ask(process))[0] == process.health().pid


def test_a_late_answer_is_dropped_and_the_next_one_is_the_right_one(process):
    late = ask(process, text="sleep 0.6", within_s=0.1)
    assert late.reason is Reason.DEADLINE_MISSED
    still = ask(process, within_s=0.1)
    assert still.reason is Reason.DEADLINE_MISSED and "earlier cycle" in still.detail
    images = [[np.full((2, 2, 3), 9, np.uint8)]]
    assert heard(ask(process, images))[2] == [108]


@pytest.mark.parametrize("text, told", [("die", "with exit code 3"), ("bug", "with exit code 1")])
def test_a_death_is_told_and_the_process_started_again(process, reports, text, told):
    pid = process.health().pid
    answer = ask(process, text=text)
    assert isinstance(answer, Refusal) and answer.reason is Reason.MODEL_FAILED
    assert told in answer.detail and told in reports[-1]
    assert ended(pid) and process.health().starts == 2
    assert wait_for(lambda: not isinstance(ask(process), Refusal))
    assert process.health().problem == "" and process.health().pid != pid


def test_kill_9_is_noticed_without_a_cycle_and_frames_are_sent_anew(process, reports):
    images = [[np.full((2, 2, 3), 1, np.uint8)]]
    ask(process, images)
    killed_s = time.monotonic()
    os.kill(process.health().pid, signal.SIGKILL)
    assert wait_for(lambda: process.tend() or process.health().starts == 2)
    assert "signal 9 (SIGKILL)" in reports[-1] and "SIGKILL" in process.health().problem
    assert wait_for(lambda: process.tend() or process.health().loaded)
    print(f"loaded again after {time.monotonic() - killed_s:.2f} s")
    assert heard(ask(process, images))[1:] == (0, [12])


def test_a_process_that_cannot_load_is_tried_again_ever_more_slowly(reports):
    process = InferenceProcess(slow_model.load_and_die, ModelSettings("some"), reports.append)
    try:
        assert not process.start(1.5)
        answer = ask(process)
        assert answer.reason is Reason.MODEL_FAILED and "exit code 7" in answer.detail
        assert wait_for(lambda: process.tend() or len(reports) >= 3)
        assert reports[0].endswith("starting again")
        assert reports[1].endswith("starting again in 0.5 s")
        assert reports[2].endswith("starting again in 1 s")
    finally:
        process.close()


def test_an_absent_model_says_why_in_every_answer(reports):
    process = InferenceProcess(slow_model.load_absent, ModelSettings("some"), reports.append)
    try:
        assert process.start(60.0)
        assert reports == ["no model: as told"] and process.name == "kinematic"
        assert ask(process) == Refusal(Reason.NO_MODEL, "as told") and process.absent == "as told"
    finally:
        process.close()


def test_closing_ends_it_at_once_even_at_work(process):
    pid = process.health().pid
    assert ask(process, text="sleep 60", within_s=0.1).reason is Reason.DEADLINE_MISSED
    started_s = time.monotonic()
    process.close()
    process.close()
    assert ended(pid) and time.monotonic() - started_s < 10.0
    process.tend()
    assert process.health().pid == 0


def test_an_interruption_ends_a_question_in_hand(process):
    threading.Timer(0.3, process.interrupt).start()
    started_s = time.monotonic()
    answer = ask(process, text="sleep 2", within_s=60.0)
    assert answer.reason is Reason.DEADLINE_MISSED and time.monotonic() - started_s < 1.9
    process.resume()
    assert heard(ask(process))[2] == []


def test_loading_can_be_cancelled(reports):
    process = InferenceProcess(slow_model.load, ModelSettings("some"), reports.append)
    assert not process.start(60.0, cancelled=lambda: True)
    process.close()


def test_it_ends_with_the_process_that_started_it(tmp_path):
    code = ("import os, sys, time; sys.path[:0] = [sys.argv[1]]\n"
            "import slow_model\n"
            "from reasoning_planner.config import ModelSettings\n"
            "from reasoning_planner.inference_process import InferenceProcess\n"
            "process = InferenceProcess(slow_model.load, ModelSettings('some'), print)\n"
            "assert process.start(60.0)\n"
            "print(process.health().pid, flush=True)\n"
            "time.sleep(60)\n")
    parent = subprocess.Popen([sys.executable, "-c", code, os.path.dirname(__file__)],
                              stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    assert wait_for(lambda: ended(pid))
