"""A model in a process of its own, behind the same interface as one in this process.

`InferenceProcess` is a `planner.Model`: it sends an observation, waits for the answer no longer
than the deadline, and starts the process again when it died. Frames travel through anonymous
shared memory, each once; the rest is pickled. The process ends with this one, whatever ends it.
No ROS, and none in the process either: it imports the planner's core and the model's libraries.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, Callable

import numpy as np

from .config import ModelSettings
from .datatypes import CameraFrame, Deadline, Observation, Reason, Refusal
from .errors import ModelError, PlannerError
from .model_loading import AbsentModel
from .planner import Model, ModelResult

Load = Callable[[ModelSettings, Callable[[str], Any]], "Model | None"]

POLL_S = 0.05                   # how late an interruption is noticed at most
HANG_S = 30.0                   # without an answer for this long, the process is killed
EXIT_S = 1.0                    # one that closed its end has its exit code within this
END_S = 5.0                     # one that was killed is gone within this
NICENESS = 5                    # below the node: its callbacks come first, and take little
LONGEST_BACKOFF_S = 30.0
FIRST_BACKOFF_S = 0.5
START = ("import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
         "from reasoning_planner.inference_process import serve; "
         "serve(int(sys.argv[2]), int(sys.argv[3]))")


@dataclass(frozen=True)
class Loaded:
    """What the process says once it has loaded: whom it is, or why there is no model."""

    name: str
    runtime_name: str
    description: dict[str, str]
    reports: tuple[str, ...]
    absent: str = ""


@dataclass(frozen=True)
class _Request:
    """One observation, its frames apart.

    Attributes:
        layout: per camera slot and moment the key of a frame, None where there is none.
        new: key -> (slot, stamp_ns, shape, offset in the shared memory).
        size: bytes of the shared memory.
    """

    sequence: int
    observation: Observation
    deadline: Deadline
    layout: tuple[tuple[int | None, ...], ...]
    new: dict[int, tuple[int, int, tuple[int, ...], int]]
    size: int


@dataclass(frozen=True)
class Health:
    """How the process is: for status and diagnostics."""

    pid: int                    # 0: there is none now
    loaded: bool
    starts: int                 # 1 as long as it never died
    problem: str                # empty when it is well


class _Memory:
    """Bytes that two processes see, without a name: gone when both have ended."""

    def __init__(self, fd: int):
        self.fd = fd
        self._map: mmap.mmap | None = None

    def view(self, size: int) -> np.ndarray:
        """(size,) uint8. Views given before must not be used after one that is larger."""
        if self._map is None or len(self._map) < size:
            self._map = mmap.mmap(self.fd, size)
        return np.frombuffer(self._map, dtype=np.uint8, count=size)


@dataclass
class _Child:
    """One run of the process."""

    process: subprocess.Popen
    connection: Connection
    memory: _Memory
    memory_size: int = 0
    loaded: Loaded | None = None
    asked: int = 0                      # sequence of the request it is at, 0 for none
    asked_s: float = 0.0
    keys: dict[int, tuple[int, np.ndarray]] = field(default_factory=dict)   # by id of the image

    def end(self, grace_s: float = 0.0) -> None:
        """Kill it, after a grace to end by itself, and free what belongs to it."""
        self.connection.close()
        try:
            self.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:       # stuck in a driver: the system will reap it
            pass
        os.close(self.memory.fd)


class InferenceProcess:
    """See planner.Model; asked by one thread, tended and closed by any."""

    def __init__(self, load: Load, settings: ModelSettings, report: Callable[[str], Any]):
        """
        Args:
            load: function of a module, called in the process with the settings.
            report: told, in one line, what goes wrong with the process.
        """
        self._load, self._settings, self._report = load, settings, report
        self._lock = threading.Lock()           # held while the process is talked to
        self._interrupted = threading.Event()
        self._child: _Child | None = None
        self._closed = False
        self._sequence = 0
        self._next_key = 0
        self._starts = 0
        self._failures = 0                      # since the last answer
        self._start_at_s = 0.0
        self._problem = "not started"
        self._loaded: Loaded | None = None

    # What is known of the model ----------------------------------------------------------------

    @property
    def name(self) -> str:
        """Of the model; "kinematic" when it could not be loaded."""
        return self._loaded.name if self._loaded else "model"

    @property
    def runtime_name(self) -> str:
        """Of its engine."""
        return self._loaded.runtime_name if self._loaded else ""

    @property
    def description(self) -> dict[str, str]:
        """What the model says of itself."""
        return dict(self._loaded.description) if self._loaded else {}

    @property
    def absent(self) -> str:
        """Why there is no model; empty when there is one, or none is loaded yet."""
        return self._loaded.absent if self._loaded else ""

    def health(self) -> Health:
        """Does not wait for a cycle in hand."""
        child = self._child
        return Health(child.process.pid if child else 0, bool(child and child.loaded),
                      self._starts, self._problem)

    # Life --------------------------------------------------------------------------------------

    def start(self, timeout_s: float, cancelled: Callable[[], bool] = lambda: False) -> bool:
        """Start the process and wait until it has loaded.

        Returns:
            Whether it has, a model or the reason why there is none; false when it took too long
            (it goes on), ended (it is started again later), or `cancelled()` became true.
        """
        with self._lock:
            self._spawn()
            until_s = time.monotonic() + timeout_s
            while self._child is not None and not cancelled() and time.monotonic() < until_s:
                if self._poll_loaded(self._child, POLL_S):
                    return True
            return False

    def tend(self) -> None:
        """Notice a death and start again, also when no cycle asks; never waits."""
        if self._lock.acquire(blocking=False):
            try:
                self._tend()
            finally:
                self._lock.release()

    def interrupt(self) -> None:
        """Let a question in hand, and those after it, return at once."""
        self._interrupted.set()

    def resume(self) -> None:
        """The end of `interrupt`."""
        self._interrupted.clear()

    def close(self) -> None:
        """End the process, at once. Safe to repeat."""
        self._closed = True
        self._interrupted.set()
        with self._lock:
            if self._child is not None:
                self._child.end()
                self._child = None

    def _spawn(self) -> None:
        ours, theirs = Pipe()
        memory_fd = os.memfd_create("frames")
        command = [sys.executable, "-c", START, json.dumps(sys.path), str(theirs.fileno()),
                   str(memory_fd)]
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL,
                                       pass_fds=(theirs.fileno(), memory_fd))
        except OSError as error:
            ours.close()
            os.close(memory_fd)
            self._failed(f"the model's process cannot be started: {error.strerror}")
            return
        finally:
            theirs.close()
        self._starts += 1
        self._child = _Child(process, ours, _Memory(memory_fd))
        self._problem = "loading the model"
        try:
            ours.send((self._load, self._settings))
        except OSError:
            self._lost(self._child)

    def _tend(self) -> None:
        child = self._child
        if self._closed:
            return
        if child is None:
            if self._starts and time.monotonic() >= self._start_at_s:
                self._spawn()
        elif child.process.poll() is not None:
            self._lost(child)
        elif child.loaded is None:
            self._poll_loaded(child, 0.0)
        elif child.asked and time.monotonic() - child.asked_s > HANG_S:
            self._report(f"the model's process gave no answer for {HANG_S:g} s: killed")
            child.process.kill()
            self._lost(child)

    def _lost(self, child: _Child) -> None:
        """It died: free it, say so, start again, the later the oftener it died."""
        child.end(EXIT_S)
        self._child = None
        if not self._closed:
            self._failed(f"the model's process ended {_how(child.process.returncode)}")

    def _failed(self, problem: str) -> None:
        delay_s = (0.0 if self._failures == 0 else
                   min(FIRST_BACKOFF_S * 2.0 ** (self._failures - 1), LONGEST_BACKOFF_S))
        self._failures += 1
        self._problem = f"{problem}, starting again" + (f" in {delay_s:g} s" if delay_s else "")
        self._report(self._problem)
        self._start_at_s = time.monotonic() + delay_s
        if delay_s == 0.0:
            problem = self._problem
            self._spawn()
            self._problem = problem

    def _poll_loaded(self, child: _Child, wait_s: float) -> bool:
        """Whether it has said what it loaded; hears it if it just did."""
        if child.loaded is None and self._has_answer(child, wait_s):
            child.loaded = self._loaded = self._received(child)
            if child.loaded is None:
                return False
            for line in child.loaded.reports if self._starts == 1 else ():
                self._report(line)
            self._problem = child.loaded.absent
        return child.loaded is not None

    # Questions ---------------------------------------------------------------------------------

    def plan_trajectory(self, observation: Observation,
                        deadline: Deadline) -> ModelResult | Refusal:
        """See planner.Model; an answer later than the deadline is dropped when it comes."""
        with self._lock:
            self._tend()
            child = self._child
            if child is None or child.loaded is None:
                return Refusal(Reason.MODEL_FAILED, self._problem)
            if child.loaded.absent:
                return Refusal(Reason.NO_MODEL, child.loaded.absent)
            if child.asked and not self._answer(child, deadline):
                return self._no_answer("still at the plan of an earlier cycle")
            if not self._ask(child, observation, deadline):
                return Refusal(Reason.MODEL_FAILED, self._problem)
            answer = self._answer(child, deadline)
            return self._checked(answer[0]) if answer else self._no_answer("no answer in time")

    def _no_answer(self, why: str) -> Refusal:
        if self._child is None or not self._child.asked:        # it died meanwhile
            return Refusal(Reason.MODEL_FAILED, self._problem)
        return Refusal(Reason.DEADLINE_MISSED, f"{self.name}: {why}")

    @staticmethod
    def _checked(answer: Any) -> ModelResult | Refusal:
        if isinstance(answer, str):
            raise ModelError(answer)
        return answer

    def _ask(self, child: _Child, observation: Observation, deadline: Deadline) -> bool:
        """Send a request; false when the process is gone."""
        self._sequence += 1
        request = self._packed(child, observation, deadline)
        try:
            child.connection.send(request)
        except OSError:
            self._lost(child)
            return False
        child.asked, child.asked_s = request.sequence, time.monotonic()
        return True

    def _packed(self, child: _Child, observation: Observation, deadline: Deadline) -> _Request:
        """Write the frames that the process does not have into the shared memory."""
        known, kept, new, offset = child.keys, {}, {}, 0
        images: dict[int, np.ndarray] = {}
        for frame in (frame for row in observation.frames for frame in row if frame is not None):
            number = id(frame.image)
            if number in kept:
                continue
            if number not in known:
                self._next_key += 1
                new[self._next_key] = (frame.slot, frame.stamp_ns, frame.image.shape, offset)
                images[self._next_key] = frame.image
                offset += frame.image.nbytes
            kept[number] = known.get(number) or (self._next_key, frame.image)
        self._write(child, new, images, offset)
        child.keys = kept
        layout = tuple(tuple(None if frame is None else kept[id(frame.image)][0] for frame in row)
                       for row in observation.frames)
        return _Request(self._sequence, replace(observation, frames=()), deadline, layout, new,
                        offset)

    @staticmethod
    def _write(child: _Child, new: dict, images: dict[int, np.ndarray], size: int) -> None:
        if size == 0:
            return
        if size > child.memory_size:
            os.ftruncate(child.memory.fd, size)
            child.memory_size = size
        view = child.memory.view(size)
        for key, (_, _, shape, offset) in new.items():
            view[offset:offset + images[key].nbytes].reshape(shape)[...] = images[key]

    def _answer(self, child: _Child, deadline: Deadline) -> tuple[Any] | None:
        """What it answers before the deadline, in a tuple; None when nothing came."""
        while not self._interrupted.is_set():
            if self._has_answer(child, min(max(deadline.remaining_s, 0.0), POLL_S)):
                answer = self._received(child)
                if answer is None:
                    return None
                sequence, value = answer
                assert sequence == child.asked, (sequence, child.asked)
                child.asked = 0
                self._failures, self._problem = 0, ""
                return (value,)
            if self._child is not child or deadline.passed:
                return None
        return None

    def _has_answer(self, child: _Child, wait_s: float) -> bool:
        try:
            return child.connection.poll(wait_s)
        except (OSError, EOFError):
            self._lost(child)
            return False

    def _received(self, child: _Child) -> Any:
        """The next message, None when the process is gone."""
        try:
            return child.connection.recv()
        except (OSError, EOFError):
            self._lost(child)
            return None


def _how(return_code: int | None) -> str:
    if return_code is None:
        return "and cannot be reaped"
    if return_code >= 0:
        return f"with exit code {return_code}"
    return f"by signal {-return_code} ({signal.Signals(-return_code).name})"


# The other side ----------------------------------------------------------------------------------

def serve(connection_fd: int, memory_fd: int) -> None:
    """The process: load, then answer until the other side is gone."""
    for number in (signal.SIGINT, signal.SIGTERM):      # meant for the node, which ends this one
        signal.signal(number, signal.SIG_IGN)
    connection, memory = Connection(connection_fd), _Memory(memory_fd)
    try:
        load, settings = connection.recv()
        reports: list[str] = []
        model = load(settings, reports.append)
        connection.send(_introduction(model, reports))
        os.nice(NICENESS)       # not before: after a death the vehicle waits for the loading
        _answer_all(connection, memory, model)
    except (EOFError, OSError):
        pass


def _introduction(model: Any, reports: list[str]) -> Loaded:
    absent = model.why if isinstance(model, AbsentModel) else ""
    return Loaded(model.name, getattr(model, "runtime_name", ""),
                  dict(getattr(model, "description", {})), tuple(reports), absent)


def _answer_all(connection: Connection, memory: _Memory, model: Model) -> None:
    frames: dict[int, CameraFrame] = {}
    while True:
        request = connection.recv()
        frames = _frames(request, memory, frames)
        observation = replace(request.observation, frames=tuple(
            tuple(None if key is None else frames[key] for key in row)
            for row in request.layout))
        connection.send((request.sequence, _planned(model, observation, request.deadline)))


def _frames(request: _Request, memory: _Memory,
            known: dict[int, CameraFrame]) -> dict[int, CameraFrame]:
    """The frames of this request by key: those known, and copies of those that are new."""
    for key, (slot, stamp_ns, shape, offset) in request.new.items():
        size = int(np.prod(shape))
        image = memory.view(request.size)[offset:offset + size].reshape(shape).copy()
        known[key] = CameraFrame(slot, stamp_ns, image)
    return {key: known[key] for row in request.layout for key in row if key is not None}


def _planned(model: Model, observation: Observation,
             deadline: Deadline) -> ModelResult | Refusal | str:
    try:
        return model.plan_trajectory(observation, deadline)
    except PlannerError as error:
        return str(error)
