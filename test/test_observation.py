"""The observation builder with stand-in images: what is chosen, decoded, counted and refused."""

import threading

import numpy as np
import pytest

from reasoning_planner.config import CamerasConfig, HistoryConfig, PlannerConfig
from reasoning_planner.datatypes import Observation, OdometrySample, Reason, Refusal
from reasoning_planner.errors import InputError
from reasoning_planner.perception.images import RawImage
from reasoning_planner.perception.observation import NORMALISED, ObservationBuilder

START_NS = 1_700_000_000_000_000_000
MS = 1_000_000
TOPICS = ("/left/image", "/front/image", "/right/image", "/tele/image")
FRONT, RIGHT, TELE = 1, 2, 3


class Raw:
    """A stand-in for a message: its picture holds `value`, and it counts how often it is read."""

    def __init__(self, value=0, broken=False):
        self.value, self.broken, self.decoded = value, broken, 0

    def decode(self, topic):
        self.decoded += 1
        if self.broken:
            raise InputError(f"{topic}: data cut short")
        return np.full((2, 2, 3), self.value, np.uint8)


def odometry(ms, **changes):
    values = dict(stamp_ns=START_NS + ms * MS, position=np.array([0.01 * ms, 0.0, 0.0]),
                  quaternion_xyzw=np.array([0.0, 0.0, 0.0, 1.0]),
                  linear_velocity=np.array([10.0, 0.0, 0.0]), angular_velocity=np.zeros(3))
    return OdometrySample(**{**values, **changes})


def builder(**cameras):
    return ObservationBuilder(PlannerConfig(cameras=CamerasConfig(**cameras)), TOPICS)


def fed(until_ms=2000, slots=range(4), late_ms=(), odometry_until_ms=None, **cameras):
    """Odometry at 50 Hz; frames at 10 Hz, slot s shifted by s - 1 ms; some cameras late."""
    made = builder(**cameras)
    end_ms = until_ms if odometry_until_ms is None else odometry_until_ms
    for ms in range(0, end_ms + 1, 20):
        assert made.add_odometry(odometry(ms)) is None
    raws = {}
    for slot in slots:
        end = until_ms - dict(late_ms).get(slot, 0)
        for index, ms in enumerate(range(0, end + 1, 100)):
            raws[slot, ms] = Raw(10 * slot + index)
            assert made.add_frame(slot, START_NS + (ms + slot - FRONT) * MS,
                                  raws[slot, ms]) is None
    return made, raws


def stamp_of(ms):
    return START_NS + ms * MS


def reasons(observation):
    return [refusal.reason for refusal in observation.degraded]


def test_everything_present():
    made, _ = fed()
    t0_ns = made.next_anchor_ns()
    assert t0_ns == stamp_of(2000)
    seen = made.build(t0_ns, "Turn right in 30m")
    assert isinstance(seen, Observation) and seen.degraded == ()
    assert seen.stamp_ns == t0_ns and seen.frame_id == "map"
    assert seen.route_text == "Turn right in 30m"
    assert seen.history.stamp_ns == t0_ns and seen.history.speed_mps == pytest.approx(10.0)
    assert len(seen.frames) == 4
    for slot, row in enumerate(seen.frames):
        assert [(frame.stamp_ns - t0_ns) // MS for frame in row] == [
            offset + slot - FRONT for offset in (-300, -200, -100, 0)]
        assert [int(frame.image[0, 0, 0]) for frame in row] == [
            10 * slot + index for index in (17, 18, 19, 20)]
        assert {frame.slot for frame in row} == {slot}


def test_real_messages_are_decoded():
    made, _ = fed(slots=())
    for ms in (1700, 1800, 1900, 2000):
        data = bytes([1, 2, 3] * 4)
        made.add_frame(FRONT, stamp_of(ms), RawImage("bgr8", 2, 2, 6, False, data))
    seen = made.build(stamp_of(2000))
    assert (seen.frames[FRONT][-1].image == [3, 2, 1]).all()


def test_each_frame_is_decoded_once_over_many_cycles():
    made, raws = fed(until_ms=1900)
    for ms in range(2000, 3000, 100):
        for slot in range(4):
            raws[slot, ms] = Raw()
            made.add_frame(slot, stamp_of(ms + slot - FRONT), raws[slot, ms])
        for step in range(0, 100, 20):
            made.add_odometry(odometry(ms - 80 + step))
        assert isinstance(made.build(made.next_anchor_ns()), Observation)
    used = {key: raw.decoded for key, raw in raws.items() if key[1] >= 1700}
    assert set(used.values()) == {1}
    assert all(raw.decoded == 0 for key, raw in raws.items() if key[1] < 1700)


def test_memory_is_bounded():
    made, raws = fed(until_ms=20_000, buffer_frames=8)
    for ms in (19_700, 19_800, 20_000):
        assert isinstance(made.build(stamp_of(ms)), Observation)
    for camera in made._cameras:
        assert len(camera.raws) == len(camera.stamps_ns) == 8 and len(camera.decoded) == 4


def test_anchors_that_were_overtaken_are_counted():
    made, _ = fed()
    assert made.next_anchor_ns() == stamp_of(2000)
    assert made.counts() == {Reason.SUPERSEDED.value: 20}
    assert made.next_anchor_ns() is None
    for ms in (2100, 2200, 2300):
        made.add_frame(FRONT, stamp_of(ms), Raw())
        made.add_frame(RIGHT, stamp_of(ms), Raw())
    assert made.next_anchor_ns() == stamp_of(2300)
    assert made.counts() == {Reason.SUPERSEDED.value: 22}


def test_waiting_for_the_other_sensors():
    made, _ = fed(slots=(0, 1, 2), late_ms={RIGHT: 100}.items())
    assert not made.is_complete(stamp_of(2000))              # the right camera may yet come
    made.add_frame(RIGHT, stamp_of(2001), Raw())
    assert made.is_complete(stamp_of(2000))                  # the tele camera never came
    made.add_frame(FRONT, stamp_of(2100), Raw())
    assert not made.is_complete(stamp_of(2100))              # nor is odometry there
    assert not builder().is_complete(stamp_of(0))


def test_a_camera_that_gave_up_is_not_waited_for():
    made, _ = fed(late_ms={TELE: 1000}.items())
    assert made.is_complete(stamp_of(2000))


def test_a_camera_that_never_came():
    made, _ = fed(slots=(0, 1, 2))
    seen = made.build(stamp_of(2000))
    assert seen.frames[TELE] == (None,) * 4 and None not in seen.frames[RIGHT]
    assert reasons(seen) == [Reason.CAMERAS_MISSING]
    assert seen.degraded[0].detail == "slot 3 (/tele/image): nothing received"
    assert made.counts() == {Reason.CAMERAS_MISSING.value: 1}


def test_two_cameras_that_fell_silent_are_named_together():
    made, _ = fed(late_ms={RIGHT: 700, 0: 1500}.items())
    seen = made.build(stamp_of(2000))
    assert seen.frames[RIGHT] == seen.frames[0] == (None,) * 4
    assert reasons(seen) == [Reason.CAMERAS_MISSING]
    for words in ("slot 0 (/left/image): newest frame 1.501 s before t0",
                  "slot 2 (/right/image): newest frame 0.699 s before t0"):
        assert words in seen.degraded[0].detail


def test_a_camera_200_ms_late_is_named_and_its_stale_frame_not_used_at_t0():
    made, _ = fed(late_ms={RIGHT: 200}.items())
    seen = made.build(stamp_of(2000))
    assert [frame is None for frame in seen.frames[RIGHT]] == [False, False, True, True]
    assert seen.frames[RIGHT][1].stamp_ns == stamp_of(1801)
    assert reasons(seen) == [Reason.CAMERA_LATE]
    assert "/right/image" in seen.degraded[0].detail and "0.199 s" in seen.degraded[0].detail
    assert made.counts() == {Reason.CAMERA_LATE.value: 1}


def test_a_dropped_frame_is_named():
    made, _ = fed(slots=(0, 1, 3))
    for ms in (1700, 1900, 2000):
        made.add_frame(RIGHT, stamp_of(ms), Raw())
    seen = made.build(stamp_of(2000))
    assert [frame is None for frame in seen.frames[RIGHT]] == [False, True, False, False]
    assert reasons(seen) == [Reason.CAMERAS_MISSING]
    assert seen.degraded[0].detail == "slot 2 (/right/image): no frame at t0 + -200 ms"


def test_the_nearest_frame_within_tolerance_is_used():
    made, _ = fed(slots=(FRONT,))
    for ms in (1649, 1760, 1830, 1940, 2051):
        made.add_frame(RIGHT, stamp_of(ms), Raw())
    row = made.build(stamp_of(2000)).frames[RIGHT]
    assert [frame and (frame.stamp_ns - START_NS) // MS for frame in row] == [
        None, 1830, 1940, None]


def test_a_damaged_image_is_refused_once_and_named():
    made, raws = fed(until_ms=2100)
    raws[RIGHT, 1900].broken = True
    for ms in (2000, 2100):
        seen = made.build(stamp_of(ms))
        place = 2 if ms == 2000 else 1
        assert seen.frames[RIGHT][place] is None and seen.frames[RIGHT][place + 1] is not None
        assert reasons(seen) == [Reason.CAMERA_DECODE]
        assert "/right/image" in seen.degraded[0].detail
    assert raws[RIGHT, 1900].decoded == 1
    assert made.counts() == {Reason.CAMERA_DECODE.value: 1}


def test_without_the_anchors_own_frame_there_is_no_observation():
    made, raws = fed(late_ms={FRONT: 100}.items())
    refusal = made.build(stamp_of(2000))
    assert isinstance(refusal, Refusal) and refusal.reason is Reason.NO_CAMERA
    assert "/front/image" in refusal.detail
    raws[FRONT, 1900].broken = True
    refusal = made.build(stamp_of(1900))
    assert refusal.reason is Reason.CAMERA_DECODE and "/front/image" in refusal.detail
    assert made.counts() == {Reason.NO_CAMERA.value: 1, Reason.CAMERA_DECODE.value: 1}
    assert builder().build(stamp_of(0)).reason is Reason.NO_CAMERA


def test_odometry_that_stopped_is_refused_before_anything_is_decoded():
    made, raws = fed(odometry_until_ms=1940)
    refusal = made.build(stamp_of(2000))
    assert refusal.reason is Reason.ODOMETRY_STALE and "0.060" in refusal.detail
    assert all(raw.decoded == 0 for raw in raws.values())
    assert made.counts() == {Reason.ODOMETRY_STALE.value: 1}
    made, _ = fed(odometry_until_ms=-1)
    assert made.build(stamp_of(2000)).reason is Reason.NO_ODOMETRY


def test_odometry_refused_by_us_or_by_the_caller_is_counted():
    made = builder()
    assert made.add_odometry(odometry(0)) is None
    nan = odometry(10, position=np.array([np.nan, 0.0, 0.0]))
    assert made.add_odometry(nan).reason is Reason.ODOMETRY_INVALID
    assert made.add_odometry(odometry(0)).reason is Reason.OUT_OF_ORDER
    foreign = Refusal(Reason.WRONG_FRAME, "odom, expected map")
    assert made.add_odometry(foreign) is foreign
    made.add_odometry(odometry(20, quaternion_xyzw=np.array([0.0, 0.0, 0.0, 1.02])))
    assert made.counts() == {Reason.ODOMETRY_INVALID.value: 1, Reason.OUT_OF_ORDER.value: 1,
                             Reason.WRONG_FRAME.value: 1, NORMALISED: 1}


def test_repeated_older_and_zero_stamps_of_frames_are_dropped():
    made, _ = fed()
    for stamp_ns in (stamp_of(2000), stamp_of(1950), 0, 0, 0, 0, -1):
        refusal = made.add_frame(FRONT, stamp_ns, Raw())
        assert refusal.reason is Reason.OUT_OF_ORDER and "/front/image" in refusal.detail
    assert made.counts() == {Reason.OUT_OF_ORDER.value: 7} and made.epoch == 0
    assert made.next_anchor_ns() == stamp_of(2000)


def test_reset_forgets_all_but_the_counts():
    made, _ = fed()
    made.next_anchor_ns()
    made.reset(Reason.TIME_JUMP)
    assert made.epoch == 1 and made.next_anchor_ns() is None
    assert made.build(stamp_of(2000)).reason is Reason.NO_CAMERA
    assert made.counts() == {Reason.SUPERSEDED.value: 20, Reason.TIME_JUMP.value: 1,
                             Reason.NO_CAMERA.value: 1}
    assert made.add_frame(FRONT, stamp_of(50), Raw()) is None
    assert made.add_odometry(odometry(0)) is None


def test_a_bag_that_loops_without_a_clock_resets_once_and_goes_on():
    made, _ = fed()
    for ms in range(0, 2001, 20):
        made.add_odometry(odometry(ms))
        if ms % 100 == 0:
            for slot in range(4):
                made.add_frame(slot, stamp_of(ms), Raw())
    assert made.epoch == 1
    assert isinstance(made.build(made.next_anchor_ns()), Observation)
    assert made.counts()[Reason.TIME_JUMP.value] == 1


def test_a_few_stray_stamps_do_not_reset():
    made, _ = fed()
    for ms in (100, 200, 150, 160, 155):                     # never three that rise
        made.add_odometry(odometry(ms))
        made.add_frame(RIGHT, stamp_of(ms), Raw())
    for ms in (1700, 1750, 1800, 1850):                      # rising, yet not far back
        made.add_odometry(odometry(ms))
    assert made.epoch == 0
    assert isinstance(made.build(stamp_of(2000)), Observation)


def test_a_single_stamp_from_the_future_does_not_deafen_the_planner():
    made, _ = fed()
    made.add_odometry(odometry(1_000_000))
    for ms in range(2020, 4100, 20):
        made.add_odometry(odometry(ms))
        if ms % 100 == 0:
            made.add_frame(FRONT, stamp_of(ms), Raw())
    assert made.epoch == 1
    assert isinstance(made.build(made.next_anchor_ns()), Observation)


def test_a_reset_while_decoding_drops_the_observation():
    made, raws = fed()

    def decode(topic):
        made.reset(Reason.TIME_JUMP)
        return np.zeros((2, 2, 3), np.uint8)

    raws[RIGHT, 2000].decode = decode
    assert made.build(stamp_of(2000)).reason is Reason.TIME_JUMP


def test_rates_and_ages():
    made, _ = fed(slots=(0, 1, 2), late_ms={RIGHT: 500}.items())
    left, front, right, tele = made.camera_rates(stamp_of(2020))
    assert (front.slot, front.topic, front.received) == (FRONT, "/front/image", 21)
    assert front.rate_hz == pytest.approx(10.0) and front.age_s == pytest.approx(0.02)
    assert right.rate_hz == pytest.approx(10.0) and right.age_s == pytest.approx(0.519)
    assert (tele.rate_hz, tele.age_s, tele.received) == (0.0, float("inf"), 0)
    assert made.camera_rates(stamp_of(60_000))[FRONT].rate_hz == 0.0


def test_topics_must_match_the_slots():
    with pytest.raises(InputError, match="2 image topics.*count = 4"):
        ObservationBuilder(PlannerConfig(), TOPICS[:2])


def test_callbacks_may_run_while_observations_are_built():
    made = ObservationBuilder(PlannerConfig(history=HistoryConfig(max_gap_s=1.0)), TOPICS)
    for ms in range(0, 2000, 20):
        made.add_odometry(odometry(ms))
    done = threading.Event()
    failures = []

    def camera(slot):
        for ms in range(0, 6000, 5):
            made.add_frame(slot, stamp_of(2000 + ms), Raw())
            if slot == FRONT:
                made.add_odometry(odometry(2000 + ms))

    def plan():
        while not done.is_set():
            t0_ns = made.next_anchor_ns()
            if t0_ns is None:
                continue
            seen = made.build(t0_ns)
            expected = (Reason.NO_CAMERA, Reason.ODOMETRY_STALE)
            if not isinstance(seen, Observation) and seen.reason not in expected:
                failures.append(seen)

    threads = [threading.Thread(target=camera, args=(slot,)) for slot in range(4)]
    planner = threading.Thread(target=plan)
    for thread in [planner, *threads]:
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    planner.join()
    assert failures == []
    assert [rate.received for rate in made.camera_rates(stamp_of(8000))] == [1200] * 4
