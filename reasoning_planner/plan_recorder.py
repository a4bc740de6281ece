"""The node `plan_recorder`: what the planner publishes, appended to a file of JSON lines.

It stands beside the planner, in the demo or during a replay on a vehicle; it plans nothing.
Parameter `records` names the file. Topics: ~/input/trajectory, ~/input/reasoning, ~/input/status.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from rclpy.node import Node
from rclpy.qos import QoSProfile

from .conversions import stamp_ns
from .datatypes import PlanStatus, TokenOrigin
from .errors import ConfigError
from .evaluation.records import (STAGES, STATES, PlanRecord, StatusRecord, append_record,
                                 split_reason)
from .msg import PlannedTrajectory, PlannerStatus, ReasoningTrace
from .perception.frames import matrix_from_quaternion, transform
from .spinning import spin_until_signalled

TRACES_KEPT = 50


class PlanRecorder(Node):
    """Joins each trajectory with its reasoning and writes one line for it."""

    def __init__(self) -> None:
        super().__init__("plan_recorder")
        name = self.declare_parameter("records", "").value
        if not name:
            raise ConfigError(["records: given an empty string, expected the file to append to"])
        self._path = Path(name)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._traces: dict[bytes, ReasoningTrace] = {}
        self._waiting: dict[bytes, tuple[PlannedTrajectory, int]] = {}
        qos = QoSProfile(depth=100)
        self.create_subscription(ReasoningTrace, "~/input/reasoning", self._on_reasoning, qos)
        self.create_subscription(PlannedTrajectory, "~/input/trajectory", self._on_trajectory,
                                 qos)
        self.create_subscription(PlannerStatus, "~/input/status", self._on_status, qos)

    def _on_reasoning(self, msg: ReasoningTrace) -> None:
        plan_id = bytes(msg.plan_id.uuid)
        if plan_id in self._waiting:
            self._write(*self._waiting.pop(plan_id), msg)
            return
        self._traces[plan_id] = msg
        while len(self._traces) > TRACES_KEPT:
            self._traces.pop(next(iter(self._traces)))

    def _on_trajectory(self, msg: PlannedTrajectory) -> None:
        if msg.repeat:                  # no new plan stands behind it
            return
        plan_id, received_ns = bytes(msg.plan_id.uuid), time.monotonic_ns()
        if plan_id in self._traces:
            self._write(msg, received_ns, self._traces.pop(plan_id))
        else:
            self._waiting[plan_id] = (msg, received_ns)

    def _on_status(self, msg: PlannerStatus) -> None:
        append_record(self._path, status_record(msg))

    def _write(self, msg: PlannedTrajectory, received_ns: int, trace: ReasoningTrace) -> None:
        append_record(self._path, plan_record(msg, received_ns, trace))

    def destroy_node(self) -> None:
        """Write the trajectories whose reasoning never came, then end."""
        for msg, received_ns in self._waiting.values():
            self._write(msg, received_ns, ReasoningTrace())
        self._waiting.clear()
        super().destroy_node()


def plan_record(msg: PlannedTrajectory, received_ns: int, trace: ReasoningTrace) -> PlanRecord:
    """PlannedTrajectory and its ReasoningTrace -> PlanRecord."""
    poses = [point.pose for point in msg.points]
    positions = np.array([[p.position.x, p.position.y, p.position.z] for p in poses])
    quaternions = np.array([[p.orientation.x, p.orientation.y, p.orientation.z, p.orientation.w]
                            for p in poses])

    def column(name: str) -> np.ndarray:
        return np.array([getattr(point, name) for point in msg.points], dtype=np.float64)

    return PlanRecord(
        stamp_ns=stamp_ns(msg.header.stamp), received_ns=received_ns,
        latency_ms=float(msg.latency_ms), frame_id=msg.header.frame_id,
        plan_id=bytes(msg.plan_id.uuid).hex(), status=PlanStatus(msg.status).name,
        planner=msg.planner,
        map_from_base=transform(matrix_from_quaternion(quaternions[0]), positions[0]),
        time_from_start_ns=np.array([stamp_ns(point.time_from_start) for point in msg.points],
                                    dtype=np.int64),
        positions=positions, quaternions_xyzw=quaternions,
        speed_mps=column("velocity_mps"), acceleration_mps2=column("acceleration_mps2"),
        yaw_rate_rps=column("yaw_rate_rps"), curvature_1pm=column("curvature_1pm"),
        reasons=tuple(split_reason(reason) for reason in msg.reasons),
        text=trace.text, token_texts=tuple(trace.tokens),
        origins=tuple(TokenOrigin(origin).name for origin in trace.token_origins),
        rounds=int(trace.rounds), proposed=int(trace.proposed), accepted=int(trace.accepted),
        timings_ms={stage: float(getattr(trace, f"{stage}_ms")) for stage in STAGES})


def status_record(msg: PlannerStatus) -> StatusRecord:
    """PlannerStatus -> StatusRecord."""
    counts: Any = zip(msg.drop_reasons, (int(count) for count in msg.drop_counts))
    return StatusRecord(
        stamp_ns=stamp_ns(msg.header.stamp), state=STATES[msg.state],
        degraded=tuple(split_reason(reason) for reason in msg.degraded_reasons),
        dropped_by_reason=dict(counts),
        camera_rates_hz=tuple(float(rate) for rate in msg.camera_rates_hz),
        camera_ages_s=tuple(float(age) for age in msg.camera_ages_s),
        cycles=int(msg.cycles), plans_published=int(msg.plans_published))


def main(argv: list[str] | None = None) -> int:
    """Record until SIGINT or SIGTERM. Exit code 0 then, 1 without a file name."""
    return spin_until_signalled(PlanRecorder, argv)


if __name__ == "__main__":
    sys.exit(main())
