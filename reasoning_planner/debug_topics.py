"""Numbers under ~/debug, in milliseconds: for plots, and for Autoware's processing time checker.

Float64Stamped of autoware_internal_debug_msgs where that package is installed, else std_msgs'
Float64.
"""

from __future__ import annotations

from typing import Any, Callable

from rclpy.node import Node
from std_msgs.msg import Float64

from .conversions import stamp_fields
from .datatypes import Plan
from .subscriptions import no_events

STAGES = ("encode", "prefill", "reason", "act")
DEPTH = 10


class DebugTopics:
    """~/debug/processing_time_ms (a whole cycle), its stages, latency_ms and plan_age_ms."""

    def __init__(self, node: Node):
        self._node = node
        self._make = _stamped() or (lambda value, stamp_ns: Float64(data=value))
        kind = type(self._make(0.0, 0))
        names = ("processing_time", *(f"processing_time/{stage}" for stage in STAGES), "latency",
                 "plan_age")
        self._publishers = {name: node.create_publisher(kind, f"~/debug/{name}_ms", DEPTH,
                                                        event_callbacks=no_events())
                            for name in names}

    def publish_times(self, plan: Plan, latency_ms: float) -> None:
        """Of a new plan."""
        self._publish("processing_time", plan.timings.total_ms, plan.stamp_ns)
        for stage in STAGES:
            self._publish(f"processing_time/{stage}", getattr(plan.timings, f"{stage}_ms"),
                          plan.stamp_ns)
        self._publish("latency", latency_ms, plan.stamp_ns)

    def publish_age(self, plan: Plan, now_ns: int) -> None:
        """Of every published trajectory."""
        self._publish("plan_age", (now_ns - plan.observed_ns) * 1e-6, plan.stamp_ns)

    def destroy(self) -> None:
        """End the publishers."""
        for publisher in self._publishers.values():
            self._node.destroy_publisher(publisher)
        self._publishers = {}

    def _publish(self, name: str, value: float, stamp_ns: int) -> None:
        self._publishers[name].publish(self._make(float(value), stamp_ns))


def _stamped() -> Callable[[float, int], Any] | None:
    try:
        from autoware_internal_debug_msgs.msg import Float64Stamped
    except ImportError:
        return None
    from builtin_interfaces.msg import Time

    return lambda value, stamp_ns: Float64Stamped(stamp=Time(**stamp_fields(stamp_ns)), data=value)
