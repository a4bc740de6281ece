"""The order in which inputs come, and which frames are planned for in lockstep and real time."""

import time
import tracemalloc

import numpy as np
import pytest

pytest.importorskip("rosbags")
cv2 = pytest.importorskip("cv2")

import evaluation_bags as made

from reasoning_planner.actions.kinematic import plan_kinematic
from reasoning_planner.config import CamerasConfig, KinematicConfig, NodeConfig
from reasoning_planner.datatypes import OdometrySample, PlanStatus, Reason, Refusal
from reasoning_planner.evaluation.replay import Replay
from reasoning_planner.evaluation.stream import ODOMETRY, Event, ordered
from reasoning_planner.perception.images import RawCompressed
from reasoning_planner.planner import ModelResult, Planner

MS = 1_000_000
CONFIG = NodeConfig(cameras=CamerasConfig(count=1, anchor=0), deadline_s=5.0)
JPEG = cv2.imencode(".jpg", np.zeros((16, 16, 3), np.uint8))[1].tobytes()


class SlowModel:
    """Takes its time, then goes on as the vehicle moves."""

    name = "slow"

    def __init__(self, seconds):
        self.seconds = seconds

    def plan_trajectory(self, observation, deadline):
        time.sleep(self.seconds)
        return ModelResult(plan_kinematic(observation.history, KinematicConfig()))


def odometry_at(seconds):
    x, y, yaw = made.pose_at(seconds)
    quaternion = np.array([0.0, 0.0, np.sin(yaw / 2), np.cos(yaw / 2)])
    sample = OdometrySample(made.stamp(seconds), np.array([x, y, 0.0]), quaternion,
                            np.array([made.SPEED_MPS, 0, 0]), np.array([0, 0, made.YAW_RATE_RPS]))
    return Event(sample.stamp_ns, sample.stamp_ns + 2 * MS, ODOMETRY, sample, 700)


def image_at(seconds, delay_ms=20):
    stamp_ns = made.stamp(seconds)
    return Event(stamp_ns, stamp_ns + delay_ms * MS, 0, RawCompressed("jpeg", JPEG), len(JPEG))


def drive(seconds, images=True):
    """Odometry at 50 Hz and a camera at 10 Hz, by arrival."""
    events = [odometry_at(t) for t in np.arange(0.0, seconds + 1e-6, 0.02)]
    if images:
        events += [image_at(t) for t in np.arange(0.0, seconds + 1e-6, 0.1)]
    return sorted(events, key=lambda event: event.arrival_ns)


def replay(model=None, config=CONFIG, **more):
    return Replay(config, [Planner(config, model)], ["/camera"], "seed", True, **more)


# Order

def event(stamp_ms, arrival_ms, size=1):
    return Event(stamp_ms * MS, arrival_ms * MS, 0, Refusal(Reason.CAMERA_DECODE, ""), size)


def stamps_of(events, **limits):
    return [e.stamp_ns // MS for e in ordered(events, **limits)]


def test_inputs_come_in_the_order_of_their_stamps():
    late = [event(0, 0), event(30, 40), event(10, 60), event(20, 61), event(50, 62)]
    assert stamps_of(late) == [0, 10, 20, 30, 50]
    assert [e.arrival_ns // MS for e in ordered(late)] == [0, 60, 61, 40, 62]


def test_what_comes_too_late_is_given_out_late():
    events = [event(0, 0), event(100, 100), event(200, 200), event(300, 400), event(50, 500)]
    assert stamps_of(events, window_ns=150 * MS) == [0, 100, 200, 50, 300]
    assert stamps_of(events, window_ns=450 * MS) == [0, 50, 100, 200, 300]


def test_no_more_is_held_than_allowed():
    events = [event(1000 - i, i, 10) for i in range(100)]
    held = []

    def counted():
        for e in events:
            held.append(e)
            yield e
    given = 0
    for _ in ordered(counted(), window_bytes=55):
        given += 1
        assert len(held) - given <= 6
    assert given == 100


# Lockstep

def test_lockstep_plans_for_every_image_whatever_planning_takes():
    cycles = list(replay(SlowModel(0.005)).lockstep(ordered(drive(3.0))))
    assert [c.t0_ns for c in cycles] == [made.stamp(0.1 * i) for i in range(31)]
    planned = [c for c in cycles if c.plans]
    assert len(planned) == 16 and all(c.plans[0].status is PlanStatus.OK for c in planned)
    assert all(c.refusals[0].reason is Reason.HISTORY_SHORT for c in cycles[:15])
    assert planned[0].arrival_ns - planned[0].t0_ns == 20 * MS
    assert planned[0].latency_ms == 0.0 and planned[0].measured.total_ms >= 5.0


def test_lockstep_waits_for_odometry_past_the_image():
    # Odometry logged 50 ms after the image of its moment: with it, no history is extrapolated.
    slow = [Event(e.stamp_ns, e.arrival_ns + 70 * MS, e.slot, e.payload, e.size)
            if e.slot == ODOMETRY else e for e in drive(2.0)]
    slow.sort(key=lambda e: e.arrival_ns)
    cycles = list(replay().lockstep(ordered(slow)))
    assert all(c.odometry_age_ms <= 0.0 for c in cycles if c.plans)


def test_the_same_inputs_give_the_same_plans():
    runs = [[c.plans[0] for c in Replay(CONFIG, [Planner(CONFIG)], ["/c"], "seed", False)
             .lockstep(ordered(drive(2.0))) if c.plans] for _ in range(2)]
    for first, second in zip(*runs):
        assert first.plan_id == second.plan_id and first.timings == second.timings
        assert (first.trajectory.positions == second.trajectory.positions).all()
    assert len({plan.plan_id for plan in runs[0]}) == len(runs[0])


def test_a_period_thins_the_images_out():
    cycles = list(replay(period_s=0.5).lockstep(ordered(drive(2.0))))
    assert [c.t0_ns for c in cycles] == [made.stamp(0.5 * i) for i in range(5)]


# Real time

def test_images_are_dropped_while_a_slow_model_plans():
    run = replay(SlowModel(0.25))
    cycles = list(run.realtime(drive(4.0)))
    planned = [c for c in cycles if c.plans]
    # 2.5 s remain once there is history: at 0.25 s each no more than 11 plans fit.
    assert 1 <= len(planned) <= 11
    assert run.dropped[Reason.SUPERSEDED.value] >= 12
    assert len(cycles) + run.dropped[Reason.SUPERSEDED.value] == 41
    for cycle in planned:
        assert cycle.latency_ms >= 250.0
        assert cycle.plan_age_ms == pytest.approx(cycle.latency_ms + 20.0)
    last_ns = made.stamp(4.0) + 20 * MS                 # no image arrives after this
    ends_ns = [min(c.t0_ns + c.plan_age_ms * MS, last_ns) for c in planned]
    assert all(later.t0_ns + 20 * MS >= end - 101 * MS
               for end, later in zip(ends_ns, planned[1:])), "the newest image is taken"


def test_at_a_lower_rate_the_same_model_keeps_up():
    run = replay(SlowModel(0.02))
    cycles = list(run.realtime(drive(3.0), rate=0.02))     # 5 s for every image
    assert len(cycles) == 31 and Reason.SUPERSEDED.value not in run.dropped
    assert all(20.0 <= c.latency_ms < 5000.0 for c in cycles if c.plans)


def test_a_missed_deadline_is_a_stop():
    config = NodeConfig(cameras=CONFIG.cameras, deadline_s=0.05)
    cycles = list(replay(SlowModel(0.1), config).realtime(drive(2.0)))
    plans = [c.plans[0] for c in cycles if c.plans]
    assert plans and all(p.status is PlanStatus.STOP for p in plans)
    assert plans[0].reasons[0].reason is Reason.DEADLINE_MISSED


# Odometry alone, damage, memory

def test_odometry_alone_plans_every_tenth_of_a_second():
    run = Replay(CONFIG, [Planner(CONFIG)], (), "seed", False)
    cycles = list(run.odometry_alone(ordered(drive(3.0, images=False))))
    assert [c.t0_ns for c in cycles] == [made.stamp(0.1 * i) for i in range(31)]
    assert sum(bool(c.plans) for c in cycles) == 16
    assert run.dropped == {Reason.HISTORY_SHORT.value: 15}


def test_damaged_images_are_counted():
    events = [Event(e.stamp_ns, e.arrival_ns, e.slot, Refusal(Reason.CAMERA_DECODE, "cut"), 1)
              if e.slot == 0 and e.stamp_ns == made.stamp(1.8) else e for e in drive(2.0)]
    run = replay()
    cycles = list(run.lockstep(ordered(events)))
    assert len(cycles) == 20 and run.dropped[Reason.CAMERA_DECODE.value] == 1


def test_memory_does_not_grow_with_the_drive():
    big = bytes(200_000)

    def endless(seconds):
        for t in np.arange(0.0, seconds, 0.02):
            yield odometry_at(t)
            if round(t * 50) % 5 == 0:
                stamp_ns = made.stamp(t)
                # A new buffer each: what is kept costs memory.
                yield Event(stamp_ns, stamp_ns, 0, RawCompressed("jpeg", bytearray(big)), len(big))

    def peak(seconds):
        tracemalloc.start()
        for _ in replay().lockstep(ordered(endless(seconds))):
            pass
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most
    short, long = peak(4.0), peak(12.0)         # 8 MB and 24 MB of images
    assert long < 1.2 * short + 1_000_000, (short, long)
