"""ROS messages <-> our datatypes: one pure function each way.

Reading works on any object with the message's fields, so bags decoded without ROS go the same way
as messages from a subscription; only writing needs the message classes, imported when called.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Iterator, Mapping, Sequence

import numpy as np

from .datatypes import (OdometrySample, Plan, PlannerState, PlanStatus, Reason, Reasoning,
                        Refusal, TokenOrigin)
from .diagnoses import Diagnosis
from .perception.frames import quaternion_from_matrix
from .perception.images import RawCompressed, RawImage

NS_PER_S = 1_000_000_000


def stamp_ns(stamp: Any) -> int:
    """builtin_interfaces/Time or Duration -> integer nanoseconds."""
    return int(stamp.sec) * NS_PER_S + int(stamp.nanosec)


def stamp_fields(nanoseconds: int) -> dict[str, int]:
    """Integer nanoseconds -> the sec and nanosec of a Time or Duration."""
    sec, nanosec = divmod(int(nanoseconds), NS_PER_S)
    return {"sec": sec, "nanosec": nanosec}


def odometry_from_msg(msg: Any, frame_id: str, base_frame: str) -> OdometrySample | Refusal:
    """nav_msgs/Odometry -> OdometrySample, or why its frames do not fit.

    Args:
        msg: the message, from a subscription or a bag.
        frame_id: expected `header.frame_id`.
        base_frame: expected `child_frame_id`; an empty one in the message is let pass.
    """
    if msg.header.frame_id != frame_id:
        return Refusal(Reason.WRONG_FRAME, f"odometry header.frame_id is "
                       f"{msg.header.frame_id!r}, expected {frame_id!r}")
    if msg.child_frame_id not in ("", base_frame):
        return Refusal(Reason.WRONG_FRAME, f"odometry child_frame_id is "
                       f"{msg.child_frame_id!r}, expected {base_frame!r}")
    pose, twist = msg.pose.pose, msg.twist.twist
    return OdometrySample(
        stamp_ns=stamp_ns(msg.header.stamp),
        position=_xyz(pose.position),
        quaternion_xyzw=np.array([pose.orientation.x, pose.orientation.y,
                                  pose.orientation.z, pose.orientation.w], dtype=np.float64),
        linear_velocity=_xyz(twist.linear),
        angular_velocity=_xyz(twist.angular),
    )


def _xyz(vector: Any) -> np.ndarray:
    return np.array([vector.x, vector.y, vector.z], dtype=np.float64)


def image_from_msg(msg: Any) -> RawImage:
    """sensor_msgs/Image -> RawImage, undecoded; the bytes are shared, not copied."""
    return RawImage(encoding=msg.encoding, height=int(msg.height), width=int(msg.width),
                    step=int(msg.step), is_bigendian=bool(msg.is_bigendian), data=msg.data)


def compressed_from_msg(msg: Any) -> RawCompressed:
    """sensor_msgs/CompressedImage -> RawCompressed, undecoded; the bytes are shared."""
    return RawCompressed(format=msg.format, data=msg.data)


def trajectory_to_msg(plan: Plan, now_ns: int, latency_ms: float, repeat: bool = False) -> Any:
    """Plan -> reasoning_planner/PlannedTrajectory in `plan.frame_id`.

    Args:
        plan: any plan but a refused one.
        now_ns: node clock at publication, for `plan_age`.
        latency_ms: from the anchor image's arrival to the first publication.
        repeat: whether no new plan stands behind it.
    """
    from builtin_interfaces.msg import Duration, Time
    from unique_identifier_msgs.msg import UUID

    from .msg import PlannedTrajectory

    assert plan.status is not PlanStatus.REFUSED, "a refused plan has no trajectory"
    msg = PlannedTrajectory()
    msg.header.stamp = Time(**stamp_fields(plan.stamp_ns))
    msg.header.frame_id = plan.frame_id
    plan_id = UUID(uuid=np.frombuffer(plan.plan_id, dtype=np.uint8))
    msg.plan_id = plan_id
    msg.points = _points(plan)
    msg.observation_stamp = Time(**stamp_fields(plan.observed_ns))
    msg.plan_age = Duration(**stamp_fields(now_ns - plan.observed_ns))
    msg.latency_ms = float(latency_ms)
    msg.repeat = repeat
    msg.status = int(plan.status)
    msg.reasons = [str(reason) for reason in plan.reasons]
    msg.planner = plan.planner
    if plan.reasoning.text:
        msg.reasoning_id = plan_id
    return msg


def poses_in_map(plan: Plan) -> tuple[np.ndarray, np.ndarray]:
    """Poses of a plan in `plan.frame_id`: (N, 3) metres and (N, 4) unit quaternions xyzw."""
    path = plan.trajectory
    rotation, origin = plan.map_from_base[:3, :3], plan.map_from_base[:3, 3]
    positions = path.positions @ rotation[:, :2].T + origin
    x, y, z, w = quaternion_from_matrix(rotation)
    sine, cosine = np.sin(path.yaw_rad / 2.0), np.cos(path.yaw_rad / 2.0)
    turned = np.stack([x * cosine + y * sine, y * cosine - x * sine,
                       z * cosine + w * sine, w * cosine - z * sine], axis=1)
    return positions, turned


def plan_columns(plan: Plan) -> Iterator[tuple]:
    """A plan point by point, in Python's own numbers, since messages check each.

    Returns:
        time from t0 in ns, position (x, y, z) in metres and orientation (x, y, z, w) in
        `plan.frame_id`, speed m/s, acceleration m/s^2, yaw rate rad/s, curvature 1/m.
    """
    path = plan.trajectory
    columns = (path.time_from_start_ns, *poses_in_map(plan), path.speed_mps,
               path.acceleration_mps2, path.yaw_rate_rps, path.curvature_1pm)
    return zip(*(column.tolist() for column in columns))


def pose_msg(position: Sequence[float], quaternion_xyzw: Sequence[float]) -> Any:
    """geometry_msgs/Pose."""
    from geometry_msgs.msg import Point, Pose, Quaternion

    (px, py, pz), (x, y, z, w) = position, quaternion_xyzw
    return Pose(position=Point(x=px, y=py, z=pz), orientation=Quaternion(x=x, y=y, z=z, w=w))


def _points(plan: Plan) -> list[Any]:
    """N reasoning_planner/PlannedTrajectoryPoint, poses in `plan.frame_id`."""
    from builtin_interfaces.msg import Duration

    from .msg import PlannedTrajectoryPoint

    return [PlannedTrajectoryPoint(
        time_from_start=Duration(**stamp_fields(time_ns)), pose=pose_msg(position, orientation),
        velocity_mps=speed, acceleration_mps2=acceleration, yaw_rate_rps=yaw_rate,
        curvature_1pm=curvature)
        for time_ns, position, orientation, speed, acceleration, yaw_rate, curvature
        in plan_columns(plan)]


def deliberation_score(reasoning: Reasoning) -> float:
    """Share of the tokens that the target had to correct or write by itself, 0..1."""
    if not reasoning.origins:
        return 0.0
    own = sum(origin in (TokenOrigin.DELIBERATIVE, TokenOrigin.RECOVERED)
              for origin in reasoning.origins)
    return own / len(reasoning.origins)


def reasoning_to_msg(plan: Plan, base_frame: str) -> Any:
    """Plan -> reasoning_planner/ReasoningTrace."""
    from builtin_interfaces.msg import Time
    from unique_identifier_msgs.msg import UUID

    from .msg import ReasoningTrace

    msg = ReasoningTrace()
    msg.header.stamp = Time(**stamp_fields(plan.stamp_ns))
    msg.header.frame_id = base_frame
    msg.plan_id = UUID(uuid=np.frombuffer(plan.plan_id, dtype=np.uint8))
    reasoning, timings = plan.reasoning, plan.timings
    msg.text = reasoning.text
    msg.tokens = list(reasoning.token_texts)
    msg.token_ids = [int(i) for i in reasoning.token_ids]
    msg.token_origins = [int(origin) for origin in reasoning.origins]
    msg.rounds, msg.proposed, msg.accepted = (reasoning.rounds, reasoning.proposed,
                                              reasoning.accepted)
    msg.acceptance_length = float(reasoning.tokens_per_target_pass)
    msg.deliberation_score = float(deliberation_score(reasoning))
    for name in ("encode_ms", "prefill_ms", "reason_ms", "act_ms", "total_ms"):
        setattr(msg, name, float(getattr(timings, name)))
    msg.status = _trace_status(plan)
    return msg


def _trace_status(plan: Plan) -> int:
    from .msg import ReasoningTrace

    if not plan.reasoning.token_ids:
        return ReasoningTrace.STATUS_NONE
    reasons = {refusal.reason for refusal in plan.reasons}
    if Reason.REASONING_UNFINISHED in reasons:
        return ReasoningTrace.STATUS_TRUNCATED
    if plan.reasoning.proposed == 0:
        return ReasoningTrace.STATUS_TARGET_ONLY
    return ReasoningTrace.STATUS_COMPLETE


@dataclass(frozen=True)
class Status:
    """What the node says of itself; fields as in PlannerStatus.msg.

    Attributes:
        now_ns: node clock.
        state: what state it is in.
        reasons: why the state is not PLANNING.
        last_plan_ns: t0 of the plan in force, 0 when there is none.
        last_plan_status: its status.
        camera_rates_hz, camera_ages_s: one value a slot; age -1 when nothing came.
        drops: what was dropped or given up, by reason.
        plan_reasons, recent_reasons: why published new plans were not better, by reason: since
            activation, and among the last ones.
        latency_ms: of the last cycles, from the anchor image's arrival to the publication.
        planning_ms: of the last cycles, the planner's part of it.
        texts: (tokens, rounds, proposed, accepted) of the last texts.
    """

    now_ns: int
    state: PlannerState
    reasons: tuple[Refusal, ...]
    last_plan_ns: int
    cycles: int
    plans_published: int
    camera_topics: tuple[str, ...]
    camera_rates_hz: tuple[float, ...]
    camera_ages_s: tuple[float, ...]
    odometry_rate_hz: float
    odometry_age_s: float
    drops: Mapping[str, int]
    latency_ms: Sequence[float]
    planning_ms: Sequence[float] = ()
    plans_repeated: int = 0
    last_plan_status: PlanStatus | None = None
    plan_reasons: Mapping[str, int] = field(default_factory=dict)
    recent_reasons: Mapping[str, int] = field(default_factory=dict)
    texts: Sequence[tuple[int, int, int, int]] = ()
    planner: str = ""
    runtime: str = ""
    checkpoint_hash: str = ""
    engine_hash: str = ""

    @property
    def last_plan_age_s(self) -> float:
        """Of the plan in force; -1 when there is none."""
        return (self.now_ns - self.last_plan_ns) / NS_PER_S if self.last_plan_ns else -1.0


def status_to_msg(status: Status, base_frame: str) -> Any:
    """Status -> reasoning_planner/PlannerStatus."""
    from builtin_interfaces.msg import Time

    from .msg import PlannerStatus

    msg = PlannerStatus()
    msg.header.stamp = Time(**stamp_fields(status.now_ns))
    msg.header.frame_id = base_frame
    msg.state = int(status.state)
    msg.degraded_reasons = [str(reason) for reason in status.reasons]
    msg.last_plan_stamp = Time(**stamp_fields(status.last_plan_ns))
    msg.last_plan_age_s = status.last_plan_age_s
    msg.cycles, msg.plans_published = status.cycles, status.plans_published
    msg.plans_repeated = status.plans_repeated
    msg.camera_topics = list(status.camera_topics)
    msg.camera_rates_hz = list(status.camera_rates_hz)
    msg.camera_ages_s = list(status.camera_ages_s)
    msg.odometry_rate_hz, msg.odometry_age_s = status.odometry_rate_hz, status.odometry_age_s
    msg.drop_reasons = sorted(status.drops)
    msg.drop_counts = [int(status.drops[name]) for name in msg.drop_reasons]
    if len(status.latency_ms):
        quantiles = np.percentile(np.asarray(status.latency_ms), [50, 95, 99])
        msg.latency_p50_ms, msg.latency_p95_ms, msg.latency_p99_ms = map(float, quantiles)
    msg.planner, msg.runtime = status.planner, status.runtime
    msg.checkpoint_hash, msg.engine_hash = status.checkpoint_hash, status.engine_hash
    return msg


def diagnostics_to_msg(diagnoses: Sequence[Diagnosis], node_name: str, now_ns: int) -> Any:
    """Diagnoses -> diagnostic_msgs/DiagnosticArray, each named "<node>: <name>"."""
    from builtin_interfaces.msg import Time
    from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus, KeyValue

    msg = DiagnosticArray()
    msg.header.stamp = Time(**stamp_fields(now_ns))
    msg.status = [
        DiagnosticStatus(level=bytes([diagnosis.level]), name=f"{node_name}: {diagnosis.name}",
                         message=diagnosis.message, hardware_id=node_name,
                         values=[KeyValue(key=key, value=value)
                                 for key, value in diagnosis.values.items()])
        for diagnosis in diagnoses]
    return msg
