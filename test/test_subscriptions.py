"""Subscriptions that fit their publishers, over real DDS: what is said only once above all."""

import time

import pytest

pytest.importorskip("rclpy", reason="needs ROS 2: make ros")

import rclpy
from rclpy.context import Context
from rclpy.executors import SingleThreadedExecutor
from rclpy.qos import QoSDurabilityPolicy, QoSProfile
from ros_harness import domain_id
from std_msgs.msg import String

from reasoning_planner.subscriptions import AdaptiveSubscription

pytestmark = pytest.mark.ros
LATCHED = QoSProfile(depth=1, durability=QoSDurabilityPolicy.TRANSIENT_LOCAL)


class Side:
    """A node in a context of its own, as in another process."""

    def __init__(self, name, domain):
        self.context = Context()
        rclpy.init(context=self.context, domain_id=domain)
        self.node = rclpy.create_node(name, context=self.context)
        self.executor = SingleThreadedExecutor(context=self.context)
        self.executor.add_node(self.node)

    def close(self):
        self.executor.shutdown()
        self.node.destroy_node()
        rclpy.try_shutdown(context=self.context)


@pytest.fixture
def sides():
    domain = domain_id()
    made = [Side("map_server", domain), Side("planner", domain)]
    yield made
    for side in made:
        side.close()


def wait_for(sides, condition, tend=lambda: None, timeout_s=20.0):
    until_s = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < until_s:
        tend()
        for side in sides:
            side.executor.spin_once(timeout_sec=0.02)
    return condition()


def listen(side, heard):
    return AdaptiveSubscription(side.node, String, "/route", lambda msg: heard.append(msg.data),
                                depth=1, latched=True)


def test_what_was_latched_before_is_heard(sides):                                   # row 11
    server, planner = sides
    publisher = server.node.create_publisher(String, "/route", LATCHED)
    publisher.publish(String(data="turn left"))
    heard = []
    subscription = listen(planner, heard)
    assert wait_for(sides, lambda: heard == ["turn left"], subscription.tend)
    assert subscription.problems == ()


def test_a_latched_topic_recorded_volatile_is_heard_too(sides):                     # row 11
    server, planner = sides
    publisher = server.node.create_publisher(String, "/route", 1)
    heard = []
    subscription = listen(planner, heard)

    def say_again():
        subscription.tend()
        publisher.publish(String(data="turn left"))

    assert wait_for(sides, lambda: "turn left" in heard, say_again)
    assert subscription.problems == ()


def test_a_latched_topic_that_nobody_publishes_is_no_problem(sides):                # row 11
    _, planner = sides
    heard = []
    subscription = listen(planner, heard)
    wait_for([planner], lambda: False, subscription.tend, timeout_s=0.3)
    assert heard == [] and subscription.problems == ()
    server_later = sides[0].node.create_publisher(String, "/route", LATCHED)
    server_later.publish(String(data="at last"))
    assert wait_for(sides, lambda: heard == ["at last"], subscription.tend)
