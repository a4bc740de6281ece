"""What one planning cycle sees: buffers filled by callbacks, read at t0.

Callbacks only store; images are decoded when an observation is built, each frame once however many
cycles use it. One lock guards everything and is not held while decoding. Knows stamps, not clocks:
the caller passes "now" where it is needed. No ROS, no resizing, no model.
"""

from __future__ import annotations

import bisect
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from .ego_history import OdometryBuffer, stamp_rate
from ..config import PlannerConfig
from ..datatypes import (STEP_NS, CameraFrame, EgoHistory, Observation, OdometrySample, Reason,
                         Refusal)
from ..errors import InputError

FRAMES_PER_CAMERA = 4
FRAME_OFFSETS_NS = tuple(-STEP_NS * i for i in reversed(range(FRAMES_PER_CAMERA)))
NORMALISED = "quaternion normalised"     # key of `counts()` beside the values of Reason

_JUMP_BACK_NS = 500_000_000   # a stamp this far back may be a clock that was set back ...
_JUMP_STAMPS = 3              # ... and is, once so many in a row rise from there


class RawFrame(Protocol):
    """An undecoded image: `images.RawImage`, `images.RawCompressed` or a stand-in for tests."""

    def decode(self, topic: str) -> np.ndarray:
        """(H, W, 3) uint8 RGB, or InputError naming the topic."""


@dataclass(frozen=True)
class CameraRate:
    """How one camera is doing.

    Attributes:
        slot, topic: which camera.
        rate_hz: of the stamps of the last 2 s; 0 with fewer than two or after 2 s of silence.
        age_s: now less the newest stamp; infinity while nothing came.
        received: frames kept since the start.
    """

    slot: int
    topic: str
    rate_hz: float
    age_s: float
    received: int


@dataclass
class _StampGuard:
    """Tells a stray late stamp from a clock that was set back."""

    newest_ns: int = 0
    _strays_ns: list[int] = field(default_factory=list)

    def accepts(self, stamp_ns: int) -> bool:
        """Whether the stamp is newer than all before it; it is then the newest."""
        if stamp_ns <= self.newest_ns:
            return False
        self.newest_ns = stamp_ns
        self._strays_ns.clear()
        return True

    def set_back(self, stamp_ns: int) -> bool:
        """Note a stamp that was not accepted; true once they show that time starts anew."""
        if stamp_ns <= 0 or self.newest_ns - stamp_ns < _JUMP_BACK_NS:
            return False
        if self._strays_ns and stamp_ns <= self._strays_ns[-1]:
            self._strays_ns.clear()
        self._strays_ns.append(stamp_ns)
        return len(self._strays_ns) >= _JUMP_STAMPS


class _Camera:
    """The newest frames of one camera, undecoded, and what decoding them gave."""

    def __init__(self, slot: int, topic: str, capacity: int):
        self.slot = slot
        self.topic = topic
        self.capacity = capacity
        self.guard = _StampGuard()
        self.stamps_ns: list[int] = []
        self.raws: list[RawFrame] = []
        self.decoded: dict[int, CameraFrame | Refusal] = {}
        self.received = 0

    def clear(self) -> None:
        self.guard = _StampGuard()
        self.stamps_ns.clear()
        self.raws.clear()
        self.decoded.clear()

    def add(self, stamp_ns: int, raw: RawFrame) -> None:
        self.stamps_ns.append(stamp_ns)
        self.raws.append(raw)
        self.received += 1
        if len(self.raws) > self.capacity:
            self.decoded.pop(self.stamps_ns.pop(0), None)
            self.raws.pop(0)

    def nearest(self, wanted_ns: int, tolerance_ns: int) -> int | None:
        """Stamp of the frame nearest to a moment, None where none is within tolerance."""
        right = bisect.bisect_left(self.stamps_ns, wanted_ns)
        around = self.stamps_ns[max(right - 1, 0):right + 1]
        best = min(around, key=lambda stamp: abs(stamp - wanted_ns), default=None)
        return best if best is not None and abs(best - wanted_ns) <= tolerance_ns else None

    def raw_at(self, stamp_ns: int) -> RawFrame:
        return self.raws[bisect.bisect_left(self.stamps_ns, stamp_ns)]

    def forget_decoded_before(self, stamp_ns: int) -> None:
        for old in [stamp for stamp in self.decoded if stamp < stamp_ns]:
            del self.decoded[old]

    def rate(self, now_ns: int) -> CameraRate:
        rate_hz, age_s = stamp_rate(self.stamps_ns, now_ns)
        return CameraRate(self.slot, self.topic, rate_hz, age_s, self.received)


@dataclass(frozen=True)
class _Pick:
    """The frame chosen for one place of an observation: decoded already, or still raw."""

    stamp_ns: int
    raw: RawFrame
    decoded: CameraFrame | Refusal | None


class ObservationBuilder:
    """Stores odometry and images as they come and builds the observation at an anchor stamp.

    Thread-safe. A stamp of 0, a repeated or an older stamp is dropped and counted; three rising
    stamps in a row at least 0.5 s back mean that the source's time starts anew (a bag that loops
    without a clock), and everything is reset.

    Attributes:
        topics: image topics, by camera slot.
    """

    def __init__(self, config: PlannerConfig, image_topics: Sequence[str]):
        if len(image_topics) != config.cameras.count:
            raise InputError(f"{len(image_topics)} image topics, "
                             f"expected cameras.count = {config.cameras.count}")
        self.topics = tuple(image_topics)
        self._config = config
        self._lock = threading.Lock()
        self._odometry = OdometryBuffer(config.history)
        self._odometry_guard = _StampGuard()
        self._cameras = [_Camera(slot, topic, config.cameras.buffer_frames)
                         for slot, topic in enumerate(self.topics)]
        self._counts: Counter[str] = Counter()
        self._epoch = 0
        self._unplanned = 0          # anchor frames since the last one that was taken
        self._tolerance_ns = round(config.cameras.tolerance_s * 1e9)

    @property
    def epoch(self) -> int:
        """Rises at every reset: a result begun in an earlier epoch is to be dropped."""
        with self._lock:
            return self._epoch

    def add_odometry(self, sample: OdometrySample | Refusal) -> Refusal | None:
        """Keep a sample; a Refusal, the caller's or our own, is counted and given back."""
        with self._lock:
            refusal = sample if isinstance(sample, Refusal) else self._odometry.add(sample)
            if refusal is None:
                self._odometry_guard.accepts(sample.stamp_ns)
                return None
            self._counts[refusal.reason.value] += 1
            if (refusal.reason is Reason.OUT_OF_ORDER and sample is not refusal
                    and self._odometry_guard.set_back(sample.stamp_ns)):
                self._reset(Reason.TIME_JUMP)
            return refusal

    def add_frame(self, slot: int, stamp_ns: int, raw: RawFrame) -> Refusal | None:
        """Keep an undecoded image of a camera slot, or count it and say why not."""
        with self._lock:
            camera = self._cameras[slot]
            if not camera.guard.accepts(stamp_ns):
                refusal = Refusal(Reason.OUT_OF_ORDER,
                                  f"{camera.topic}: stamp {stamp_ns} ns, expected later than "
                                  f"{camera.guard.newest_ns} ns")
                self._counts[refusal.reason.value] += 1
                if camera.guard.set_back(stamp_ns):
                    self._reset(Reason.TIME_JUMP)
                return refusal
            camera.add(stamp_ns, raw)
            self._unplanned += int(slot == self._config.cameras.anchor)
            return None

    def next_anchor_ns(self) -> int | None:
        """Take the newest anchor stamp not taken before; those it overtook are superseded."""
        with self._lock:
            if not self._unplanned:
                return None
            self._counts[Reason.SUPERSEDED.value] += self._unplanned - 1
            self._unplanned = 0
            return self._cameras[self._config.cameras.anchor].stamps_ns[-1]

    def is_complete(self, t0_ns: int) -> bool:
        """Whether waiting longer can add nothing to the observation at t0.

        True once the odometry is newer than t0 and every camera that was heard from in the last
        `late_after_s` has a frame at t0 or a newer one.
        """
        late_ns = round(self._config.cameras.late_after_s * 1e9)
        with self._lock:
            newest = [c.stamps_ns[-1] for c in self._cameras if c.stamps_ns]
            odometry_ns = self._odometry.newest_ns
        awaited = [stamp for stamp in newest if stamp >= t0_ns - late_ns]
        return (odometry_ns is not None and odometry_ns >= t0_ns
                and all(stamp >= t0_ns - self._tolerance_ns for stamp in awaited))

    def build(self, t0_ns: int, route_text: str = "") -> Observation | Refusal:
        """The observation at an anchor stamp.

        Returns:
            The observation, its `degraded` naming cameras that are silent, late, lack frames or
            sent what cannot be decoded; or a Refusal: `NO_CAMERA` or `CAMERA_DECODE` for the
            anchor's own frame, those of `OdometryBuffer.history_at`, `TIME_JUMP` when a reset
            came while decoding.
        """
        with self._lock:
            epoch = self._epoch
            anchor = self._cameras[self._config.cameras.anchor]
            if anchor.nearest(t0_ns, 0) is None:
                return self._counted(Refusal(
                    Reason.NO_CAMERA, f"{anchor.topic}: no frame at t0 = {t0_ns} ns; "
                    + _last_heard(anchor, t0_ns)))
            history = self._odometry.history_at(t0_ns)
            if isinstance(history, Refusal):
                return self._counted(history)
            picks = [self._picks(camera, t0_ns) for camera in self._cameras]
        decoded = [[self._decoded(camera, pick) for pick in row]
                   for camera, row in zip(self._cameras, picks)]
        with self._lock:
            if self._epoch != epoch:
                return self._counted(Refusal(Reason.TIME_JUMP, "reset while images were decoded"))
            self._remember(decoded, picks, t0_ns)
            if isinstance(decoded[anchor.slot][-1], Refusal):
                return decoded[anchor.slot][-1]
            degraded = self._degraded(decoded, t0_ns)
        return Observation(
            stamp_ns=t0_ns,
            frame_id=self._config.frame_id,
            history=history,
            frames=tuple(tuple(item if isinstance(item, CameraFrame) else None for item in row)
                         for row in decoded),
            degraded=degraded,
            route_text=route_text,
        )

    def newest_history(self) -> EgoHistory | Refusal:
        """The ego history at the newest odometry sample; not counted where there is none."""
        with self._lock:
            newest_ns = self._odometry.newest_ns
            if newest_ns is None:
                return Refusal(Reason.NO_ODOMETRY, "nothing usable so far")
            return self._odometry.history_at(newest_ns)

    def reset(self, reason: Reason) -> None:
        """Forget odometry and frames, count the reason, begin a new epoch; counts stay."""
        with self._lock:
            self._reset(reason)

    def counts(self) -> dict[str, int]:
        """How often each reason occurred since the start, and `NORMALISED` quaternions.

        Inputs dropped (once each), cycles refused, cycles degraded, resets.
        """
        with self._lock:
            counts = dict(self._counts)
            if self._odometry.normalised:
                counts[NORMALISED] = self._odometry.normalised
        return {name: count for name, count in counts.items() if count}

    def camera_rates(self, now_ns: int) -> tuple[CameraRate, ...]:
        """Rate and age of every camera, by slot."""
        with self._lock:
            return tuple(camera.rate(now_ns) for camera in self._cameras)

    def odometry_rate(self, now_ns: int) -> tuple[float, float]:
        """(rate in Hz over the last 2 s, age in s of the newest sample, infinity for none)."""
        with self._lock:
            return self._odometry.rate(now_ns)

    def _reset(self, reason: Reason) -> None:
        self._odometry.clear()
        self._odometry_guard = _StampGuard()
        for camera in self._cameras:
            camera.clear()
        self._unplanned = 0
        self._epoch += 1
        self._counts[reason.value] += 1

    def _counted(self, refusal: Refusal) -> Refusal:
        self._counts[refusal.reason.value] += 1
        return refusal

    def _picks(self, camera: _Camera, t0_ns: int) -> list[_Pick | None]:
        """The nearest frame to each of the 4 moments."""
        stamps = [camera.nearest(t0_ns + offset, self._tolerance_ns)
                  for offset in FRAME_OFFSETS_NS]
        return [None if stamp is None
                else _Pick(stamp, camera.raw_at(stamp), camera.decoded.get(stamp))
                for stamp in stamps]

    @staticmethod
    def _decoded(camera: _Camera, pick: _Pick | None) -> CameraFrame | Refusal | None:
        """The frame of a pick, decoded unless it was before; a Refusal when it cannot be."""
        if pick is None or pick.decoded is not None:
            return None if pick is None else pick.decoded
        try:
            return CameraFrame(camera.slot, pick.stamp_ns, pick.raw.decode(camera.topic))
        except InputError as error:
            return Refusal(Reason.CAMERA_DECODE, str(error))

    def _remember(self, decoded: list[list[CameraFrame | Refusal | None]],
                  picks: list[list[_Pick | None]], t0_ns: int) -> None:
        """Keep what was decoded for later cycles, forget what none can use, count refusals."""
        oldest_ns = t0_ns + FRAME_OFFSETS_NS[0] - self._tolerance_ns
        for camera, row, chosen in zip(self._cameras, decoded, picks):
            for item, pick in zip(row, chosen):
                if pick is None or pick.stamp_ns in camera.decoded:
                    continue
                camera.decoded[pick.stamp_ns] = item
                self._counts[Reason.CAMERA_DECODE.value] += int(isinstance(item, Refusal))
            camera.forget_decoded_before(oldest_ns)

    def _degraded(self, decoded: list[list[CameraFrame | Refusal | None]],
                  t0_ns: int) -> tuple[Refusal, ...]:
        """What is wrong with the cameras at t0: silent, then late, then lacking, then refused."""
        late_ns = round(self._config.cameras.late_after_s * 1e9)
        silent, late, lacking, refused = [], [], [], []
        for camera, row in zip(self._cameras, decoded):
            missing = [offset for item, offset in zip(row, FRAME_OFFSETS_NS) if item is None]
            where = f"slot {camera.slot} ({camera.topic})"
            if len(missing) == FRAMES_PER_CAMERA:
                silent.append(f"{where}: {_last_heard(camera, t0_ns)}")
            elif camera.stamps_ns[-1] < t0_ns - late_ns:
                late.append(Refusal(Reason.CAMERA_LATE, f"{where}: {_last_heard(camera, t0_ns)}"))
            elif missing:
                moments = ", ".join(f"{offset // 1_000_000} ms" for offset in missing)
                lacking.append(f"{where}: no frame at t0 + {moments}")
            refused += dict.fromkeys(item for item in row if isinstance(item, Refusal))
        absent = silent + lacking
        missed = [Refusal(Reason.CAMERAS_MISSING, "; ".join(absent))] if absent else []
        for refusal in (*missed, *late):
            self._counted(refusal)
        return (*missed, *late, *refused)


def _last_heard(camera: _Camera, t0_ns: int) -> str:
    if not camera.stamps_ns:
        return "nothing received"
    return f"newest frame {(t0_ns - camera.stamps_ns[-1]) * 1e-9:.3f} s before t0"
