"""The inputs of a bag as the planner takes them, one after the other, in bounded memory.

In order of the header stamps (lockstep), or of the log times at which they arrived (real time).
Images stay undecoded: the observation decodes those it needs.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from typing import Any, Iterable, Iterator, Union

import numpy as np

from ..bags import Bag, RawMessage
from ..conversions import compressed_from_msg, image_from_msg
from ..datatypes import OdometrySample, Reason, Refusal
from ..errors import DataError
from ..perception import frames
from ..perception.images import RawCompressed, RawImage
from .survey import (CameraTopic, PoseTopic, Survey, base_from_frame, header_stamp_ns, sample_of)
from .topics import TopicMap

WINDOW_NS = 1_000_000_000        # a message logged this much after its turn is given out late
WINDOW_BYTES = 256 << 20         # and earlier, where so much would have to be held
ODOMETRY = -1


@dataclass(frozen=True)
class Event:
    """One input.

    Attributes:
        stamp_ns: header stamp, or the log time where stamps are not set.
        arrival_ns: log time.
        slot: camera slot, or `ODOMETRY`.
        payload: what came; a Refusal for a message that could not be used.
        size: bytes as recorded.
    """

    stamp_ns: int
    arrival_ns: int
    slot: int
    payload: Union[OdometrySample, RawImage, RawCompressed, Refusal]
    size: int


class Inputs:
    """Turns the messages of one bag into events.

    Attributes:
        frame_id: of the poses.
        base_frame: to which the poses were brought.
    """

    def __init__(self, bag: Bag, found: Survey, topics: TopicMap, log_stamps: bool = False):
        """
        Args:
            log_stamps: take log times for stamps, whatever the headers say.
        """
        self._bag = bag
        self._log_stamps = log_stamps
        self._pose = next(p for p in found.poses if p.topic.name == topics.odometry)
        by_name = {c.topic.name: c for c in found.cameras}
        self._cameras: dict[str, tuple[int, CameraTopic]] = {
            name: (slot, by_name[name]) for slot, name in enumerate(topics.cameras) if name}
        self.frame_id = self._pose.frame_id
        self.base_frame = topics.base_frame
        child = self._pose.child_frame_id or topics.base_frame
        self._child_from_base = base_from_frame(found.transforms, child, topics.base_frame)

    def by_arrival(self) -> Iterator[Event]:
        """In log order."""
        for raw in self._bag.messages([self._pose.topic.name, *self._cameras]):
            yield self._event(raw)

    def by_stamp(self) -> Iterator[Event]:
        """In order of the stamps, as far as `WINDOW_NS` and `WINDOW_BYTES` reach."""
        return ordered(self.by_arrival())

    def driven(self) -> list[OdometrySample]:
        """The poses of the survey, brought to the base frame: the truth plans are compared with.

        Left out are those that are no rotation or not finite.
        """
        return [sample for sample in map(self._in_base, self._stamped(self._pose))
                if isinstance(sample, OdometrySample)]

    def _stamped(self, pose: PoseTopic) -> Iterable[OdometrySample]:
        if not (self._log_stamps and pose.stamped):
            yield from pose.samples
            return
        for raw in self._bag.messages([pose.topic.name]):
            try:
                yield sample_of(self._bag.decode(raw), pose.shape, raw.log_time_ns)
            except DataError:
                continue

    def _event(self, raw: RawMessage) -> Event:
        if raw.topic in self._cameras:
            return self._image(raw, *self._cameras[raw.topic])
        stamped = self._pose.stamped and not self._log_stamps
        try:
            message = self._bag.decode(raw)
        except DataError as error:
            return Event(raw.log_time_ns, raw.log_time_ns, ODOMETRY,
                         Refusal(Reason.ODOMETRY_INVALID, str(error)), len(raw.data))
        sample = sample_of(message, self._pose.shape, None if stamped else raw.log_time_ns)
        return Event(sample.stamp_ns, raw.log_time_ns, ODOMETRY, self._checked(message, sample),
                     len(raw.data))

    def _checked(self, message: Any, sample: OdometrySample) -> OdometrySample | Refusal:
        """The sample in the base frame, unless its message speaks of other frames than the first.
        """
        child = getattr(message, "child_frame_id", "")
        given, expected = ((message.header.frame_id, child),
                           (self._pose.frame_id, self._pose.child_frame_id))
        if given != expected:
            return Refusal(Reason.WRONG_FRAME, f"odometry from {given[1]!r} to {given[0]!r}, "
                           f"expected {expected[1]!r} to {expected[0]!r} as at first")
        return self._in_base(sample)

    def _in_base(self, sample: OdometrySample) -> OdometrySample | Refusal:
        if self._child_from_base is None or (self._child_from_base == np.eye(4)).all():
            rotation = frames.normalised_quaternion(sample.quaternion_xyzw)
            finite = np.isfinite(sample.position).all()
            return sample if finite and not isinstance(rotation, Refusal) else Refusal(
                Reason.ODOMETRY_INVALID, "a pose that is no rotation or not finite")
        return moved_to_base(sample, self._child_from_base)

    def _image(self, raw: RawMessage, slot: int, camera: CameraTopic) -> Event:
        stamped = camera.stamped and not self._log_stamps
        try:
            stamp_ns = header_stamp_ns(raw) if stamped else raw.log_time_ns
            message = self._bag.decode(raw)
        except DataError as error:
            return Event(raw.log_time_ns, raw.log_time_ns, slot,
                         Refusal(Reason.CAMERA_DECODE, str(error)), len(raw.data))
        convert = compressed_from_msg if camera.compressed else image_from_msg
        return Event(stamp_ns, raw.log_time_ns, slot, convert(message), len(raw.data))


def moved_to_base(sample: OdometrySample,
                  child_from_base: np.ndarray) -> OdometrySample | Refusal:
    """Odometry of another point of the vehicle, as that of the base frame.

    Args:
        sample: of the child frame.
        child_from_base: (4, 4), fixed to the vehicle.
    """
    rotation = frames.normalised_quaternion(sample.quaternion_xyzw)
    if isinstance(rotation, Refusal):
        return rotation
    map_from_child = frames.transform(frames.matrix_from_quaternion(rotation), sample.position)
    map_from_base = frames.compose(map_from_child, child_from_base)
    turn, lever = child_from_base[:3, :3], child_from_base[:3, 3]
    velocity = sample.linear_velocity + np.cross(sample.angular_velocity, lever)
    return replace(sample, position=map_from_base[:3, 3],
                   quaternion_xyzw=frames.quaternion_from_matrix(map_from_base[:3, :3]),
                   linear_velocity=turn.T @ velocity,
                   angular_velocity=turn.T @ sample.angular_velocity)


def ordered(events: Iterable[Event], window_ns: int = WINDOW_NS,
            window_bytes: int = WINDOW_BYTES) -> Iterator[Event]:
    """Events in order of their stamps, as far as holding some back allows.

    An event is given out once the newest arrival is `window_ns` later than its own, or once more
    than `window_bytes` are held. What comes with an older stamp after that is given out late: the
    planner's inputs refuse it as out of order, as they would on the vehicle.
    """
    held: list[tuple[int, int, Event]] = []
    held_bytes = 0
    for number, event in enumerate(events):
        heapq.heappush(held, (event.stamp_ns, number, event))
        held_bytes += event.size
        while held and (held[0][2].arrival_ns <= event.arrival_ns - window_ns
                        or held_bytes > window_bytes):
            ready = heapq.heappop(held)[2]
            held_bytes -= ready.size
            yield ready
    while held:
        yield heapq.heappop(held)[2]
