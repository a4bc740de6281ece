"""Subscriptions that fit what publishers offer, and what does not fit said in words.

RELIABLE while every publisher offers it (large messages are lost otherwise), best effort as soon
as one does not. A wrong type or an incompatible QoS, silent in ROS, is a problem here.
"""

from __future__ import annotations

from typing import Any, Callable

from rclpy.event_handler import (PublisherEventCallbacks, SubscriptionEventCallbacks,
                                 UnsupportedEventTypeError)
from rclpy.node import Node
from rclpy.qos import QoSDurabilityPolicy, QoSProfile, QoSReliabilityPolicy

BEST_EFFORT, RELIABLE = QoSReliabilityPolicy.BEST_EFFORT, QoSReliabilityPolicy.RELIABLE


class AdaptiveSubscription:
    """One input topic. `tend()` about once a second."""

    def __init__(self, node: Node, kind: type, topic: str, callback: Callable[..., Any], *,
                 depth: int, reliability: str = "auto", latched: bool = False):
        """
        Args:
            topic: as in code, e.g. "~/input/image0".
            callback: given the message, or the message and its info.
            reliability: "auto", "reliable" or "best_effort".
            latched: transient local where publishers offer it, for what is said only once.
        """
        self._node, self._kind, self._callback = node, kind, callback
        self._depth, self._reliability, self._latched = depth, reliability, latched
        self._asked_topic = topic
        self.topic = node.resolve_topic_name(topic)
        self.lost = 0                   # messages that the middleware says it lost
        self.problems: tuple[str, ...] = ()
        self._qos = self._profile(RELIABLE if reliability != "best_effort" else BEST_EFFORT,
                                  latched)
        self._subscription = self._subscribe()

    @property
    def is_reliable(self) -> bool:
        """Whether it asks for reliable delivery now."""
        return self._qos.reliability == RELIABLE

    def tend(self) -> None:
        """Look at the topic's publishers: subscribe otherwise, or say what does not fit."""
        publishers = self._node.get_publishers_info_by_topic(self.topic)
        type_name = _type_name(self._kind)
        fitting = [p for p in publishers if p.topic_type == type_name]
        wanted = self._wanted(fitting)
        if (wanted.reliability, wanted.durability) != (self._qos.reliability,
                                                       self._qos.durability):
            self._node.get_logger().info(
                f"{self.topic}: subscribed anew, {wanted.reliability.name.lower()}, "
                f"{wanted.durability.name.lower()}, as its publishers offer")
            self._qos = wanted
            self.destroy()
            self._subscription = self._subscribe()
        self.problems = (*self._foreign(publishers, type_name), *self._incompatible(fitting))

    def destroy(self) -> None:
        """End the subscription."""
        if self._subscription is not None:
            self._node.destroy_subscription(self._subscription)
            self._subscription = None

    def _profile(self, reliability: QoSReliabilityPolicy, latched: bool) -> QoSProfile:
        return QoSProfile(depth=self._depth, reliability=reliability,
                          durability=(QoSDurabilityPolicy.TRANSIENT_LOCAL if latched
                                      else QoSDurabilityPolicy.VOLATILE))

    def _wanted(self, publishers: list[Any]) -> QoSProfile:
        """The most that every publisher offers; what is asked for now where there is none."""
        if not publishers:
            return self._qos
        reliability = self._qos.reliability
        if self._reliability == "auto":
            lacking = any(p.qos_profile.reliability == BEST_EFFORT for p in publishers)
            reliability = BEST_EFFORT if lacking else RELIABLE
        latched = self._latched and not any(
            p.qos_profile.durability == QoSDurabilityPolicy.VOLATILE for p in publishers)
        return self._profile(reliability, latched)

    def _subscribe(self) -> Any:
        def make(**events: Any) -> Any:
            return self._node.create_subscription(
                self._kind, self._asked_topic, self._callback, self._qos,
                event_callbacks=SubscriptionEventCallbacks(
                    incompatible_qos=lambda event: self.tend(), use_default_callbacks=False,
                    **events))
        try:
            return make(message_lost=self._on_lost)
        except UnsupportedEventTypeError:       # not every middleware counts what it loses
            return make()

    def _on_lost(self, event: Any) -> None:
        self.lost += event.total_count_change

    def _foreign(self, publishers: list[Any], type_name: str) -> list[str]:
        others = sorted({p.topic_type for p in publishers} - {type_name})
        return [f"{self.topic}: a publisher of {', '.join(others)}, expected {type_name}"
                ] if others else []

    def _incompatible(self, publishers: list[Any]) -> list[str]:
        return [f"{self.topic}: nothing is received from {_endpoint(publisher)}: {why}"
                for publisher in publishers
                if (why := incompatibility(publisher.qos_profile, self._qos))]


class OutputWatch:
    """Looks for subscribers of an output that cannot hear it."""

    def __init__(self, node: Node, topic: str, qos: QoSProfile):
        self._node, self._qos = node, qos
        self.topic = node.resolve_topic_name(topic)

    def problems(self) -> tuple[str, ...]:
        """What does not fit now."""
        return tuple(
            f"{self.topic}: {_endpoint(subscriber)} cannot hear it: {why}"
            for subscriber in self._node.get_subscriptions_info_by_topic(self.topic)
            if (why := incompatibility(self._qos, subscriber.qos_profile)))


def no_events() -> PublisherEventCallbacks:
    """For publishers that an OutputWatch looks after.

    rclpy's default callbacks cost two entities a publisher in every round of the executor's loop:
    20 of them make it 0.3 ms slower.
    """
    return PublisherEventCallbacks(use_default_callbacks=False)


def incompatibility(offered: QoSProfile, requested: QoSProfile) -> str:
    """Why a publisher and a subscriber do not connect; empty when they do.

    Reliability and durability: what we offer and request leaves the other policies at "any", and
    rclpy's own check takes the infinite deadlines that other nodes report for a request.
    """
    if offered.reliability == BEST_EFFORT and requested.reliability == RELIABLE:
        return "reliable delivery is requested, best effort offered"
    if (offered.durability == QoSDurabilityPolicy.VOLATILE
            and requested.durability == QoSDurabilityPolicy.TRANSIENT_LOCAL):
        return "transient local durability is requested, volatile offered"
    return ""


def _endpoint(info: Any) -> str:
    return f"node {info.node_namespace.rstrip('/')}/{info.node_name}"


def _type_name(kind: type) -> str:
    """sensor_msgs.msg.Image -> "sensor_msgs/msg/Image"."""
    return f"{kind.__module__.split('.')[0]}/msg/{kind.__name__}"
