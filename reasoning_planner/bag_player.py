"""The node `bag_player`: publishes a recorded drive over DDS, as it was recorded, with /clock.

For replays without a ROS installation that has rosbag2 (`bags.py` reads the bag). Messages go out
as the bytes that were recorded, at their log times, on publishers with the recorded QoS. It knows
nothing of the planner. Started with ROS arguments only:

    bag_player --ros-args -p bag:=drive -p rate:=0.5 -r /tf:=/tf_recorded
"""

from __future__ import annotations

import importlib
import signal
import sys
import time
from dataclasses import dataclass
from typing import Any, Iterator, NamedTuple

import rclpy
from builtin_interfaces.msg import Time
from rclpy.duration import Duration
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.publisher import Publisher
from rclpy.qos import DurabilityPolicy, HistoryPolicy, QoSProfile, ReliabilityPolicy
from rclpy.signals import SignalHandlerOptions
from rosgraph_msgs.msg import Clock

from .bags import Bag, Topic, open_bag
from .config import flattened, from_mapping, nested
from .errors import ConfigError, DataError, PlannerError

CLOCK_TOPIC = "/clock"
STATIC_TF_TOPIC = "/tf_static"
DEFAULT_DEPTH = 10
_LATCHED_LIMIT = 1000           # static transforms kept for late subscribers
_LONGEST_WAIT_S = 0.05          # signals are seen this late at most
_QUEUE_BYTES = 32 << 20         # of one topic, on their way to the subscribers
_QUEUE_LIMIT = 1000             # messages
_END_TIMEOUT_S = 5.0            # for the last messages to arrive
_NOT_OURS = ("use_sim_time", "start_type_description_service")


@dataclass(frozen=True)
class PlayerConfig:
    """The node's parameters."""

    bag: str = ""                   # path of the bag
    rate: float = 1.0               # bag seconds per wall second
    start_offset_s: float = 0.0     # bag seconds to skip
    loop: bool = False              # start again at the end; time then jumps back
    topics: tuple = ()              # names to play, as recorded; empty for all
    clock_rate_hz: float = 100.0    # of /clock in wall time; 0 publishes none
    wait_for_subscribers: tuple = ()    # recorded names (or /clock) that need a subscriber first
    wait_timeout_s: float = 30.0    # give up waiting for them
    start_delay_s: float = 0.0      # pause before the first message

    def __post_init__(self) -> None:
        problems = [] if self.bag else ["bag: given nothing, expected the path of a bag"]
        for name, low, high in (("rate", 1e-3, 1e3), ("start_offset_s", 0.0, 1e9),
                                ("clock_rate_hz", 0.0, 1e4), ("wait_timeout_s", 0.0, 1e9),
                                ("start_delay_s", 0.0, 1e9)):
            value = getattr(self, name)
            if not low <= value <= high:
                problems.append(f"{name}: given {value!r}, expected {low} <= value <= {high}")
        for name in ("topics", "wait_for_subscribers"):
            value = getattr(self, name)
            if not all(isinstance(item, str) and item for item in value):
                problems.append(f"{name}: given {list(value)!r}, expected topic names")
        if problems:
            raise ConfigError(problems)


def read_parameters(node: Node) -> PlayerConfig:
    """The node's parameters as given on its command line, checked; the rest get their defaults.

    Raises:
        ConfigError: every unknown, ill-typed or out-of-range parameter.
    """
    given: dict[str, Any] = {}
    for name, parameter in node.get_parameters_by_prefix("").items():
        if name not in _NOT_OURS and not name.startswith("qos_overrides."):
            is_list = parameter.type_.name.endswith("_ARRAY")
            given[name] = tuple(parameter.value) if is_list else parameter.value
    config = from_mapping(PlayerConfig, nested(given))
    for name, value in flattened(config).items():
        if not node.has_parameter(name) and value != ():    # an empty list has no type in ROS
            node.declare_parameter(name, value)
    return config


def qos_for(topic: Topic) -> QoSProfile:
    """The QoS to publish a recorded topic with.

    What its publishers offered. Where several differed, whatever connects to every subscriber
    that any of them reached: reliable before best effort, transient local before volatile. Where
    nothing was recorded: reliable, volatile, depth 10. Static transforms are always latched.
    """
    latched = topic.name == STATIC_TF_TOPIC
    efforts = {profile.reliability for profile in topic.qos}
    local = latched or any(p.durability == "transient_local" for p in topic.qos)
    depth = max((p.depth for p in topic.qos), default=0) or DEFAULT_DEPTH
    if latched:
        depth = max(depth, min(topic.count, _LATCHED_LIMIT))
    keep_all = any(p.history == "keep_all" for p in topic.qos)
    return QoSProfile(
        history=HistoryPolicy.KEEP_ALL if keep_all else HistoryPolicy.KEEP_LAST, depth=depth,
        reliability=(ReliabilityPolicy.BEST_EFFORT if efforts == {"best_effort"}
                     else ReliabilityPolicy.RELIABLE),
        durability=DurabilityPolicy.TRANSIENT_LOCAL if local else DurabilityPolicy.VOLATILE)


def message_class(type_name: str) -> type:
    """The Python class of e.g. "nav_msgs/msg/Odometry".

    Raises:
        ImportError: the package is not installed or has no such message.
    """
    package, _, name = type_name.partition("/msg/")
    found = getattr(importlib.import_module(f"{package}.msg"), name, None)
    if found is None:
        raise ImportError(f"package {package} has no message {name!r}")
    return found


class StopFlag:
    """Set by SIGINT and SIGTERM; asked between messages."""

    def __init__(self) -> None:
        self.is_set = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._set)

    def _set(self, number: int, frame: Any) -> None:
        self.is_set = True


class _Outlet(NamedTuple):
    """One publisher and the QoS that was recorded."""

    publisher: Any
    qos: QoSProfile

    @property
    def is_latched(self) -> bool:
        return self.qos.durability == DurabilityPolicy.TRANSIENT_LOCAL


def send_queue(bag: Bag, topic: Topic, qos: QoSProfile) -> QoSProfile:
    """The recorded QoS with a longer queue, which subscribers neither see nor need.

    A reliable writer overwrites its oldest message when the queue is full, and played faster
    than recorded, or after a slow read, it fills. Waiting for acknowledgements instead would
    stall the drive: Fast DDS readers may send them as late as the 3 s heartbeat (measured: one
    gap of 1.1 s in 5 s of drive). Latched topics keep their depth, which subscribers do see.
    """
    if (qos.durability == DurabilityPolicy.TRANSIENT_LOCAL
            or qos.reliability == ReliabilityPolicy.BEST_EFFORT):
        return qos
    first = next(bag.messages([topic.name]), None)
    fitting = _QUEUE_BYTES // len(first.data) if first else 0
    depth = max(qos.depth, min(topic.count, fitting, _QUEUE_LIMIT))
    return QoSProfile(history=qos.history, depth=depth, reliability=qos.reliability,
                      durability=qos.durability)


class BagPlayer:
    """Plays an open bag on a node."""

    def __init__(self, node: Node, executor: SingleThreadedExecutor, bag: Bag,
                 config: PlayerConfig, stop: StopFlag):
        self._node = node
        self._executor = executor
        self._bag = bag
        self._config = config
        self._stop = stop
        self._clock = (node.create_publisher(Clock, CLOCK_TOPIC, DEFAULT_DEPTH)
                       if config.clock_rate_hz else None)
        self._next_tick_s = 0.0
        self._bag_time_ns = 0       # as last published on /clock in this pass
        self._outlets = dict(self._open_outlets())
        if not self._outlets:
            raise DataError(f"{bag.path}: none of its {len(bag.topics)} topics can be published")
        if config.start_offset_s > bag.duration_s:
            raise DataError(f"{bag.path}: given start_offset_s {config.start_offset_s:g}, "
                            f"expected less than its {bag.duration_s:.3f} s")

    def _open_outlets(self) -> Iterator[tuple[str, _Outlet]]:
        """A publisher for each topic that is asked for and whose type is installed."""
        wanted = self._config.topics or tuple(self._bag.topics)
        if unknown := [name for name in wanted if name not in self._bag.topics]:
            raise DataError(f"{self._bag.path}: given topic {', '.join(unknown)}, expected some "
                            f"of {', '.join(self._bag.topics)}")
        for name in dict.fromkeys(wanted):
            topic = self._bag.topics[name]
            if topic.count == 0:
                continue
            if name == CLOCK_TOPIC and self._clock is not None:
                self._warn(f"{name}: recorded clock skipped, this node publishes its own")
                continue
            qos = qos_for(topic)
            try:
                publisher = self._node.create_publisher(
                    message_class(topic.type), name, send_queue(self._bag, topic, qos))
            # Missing packages, broken type support, names that DDS refuses: each its own error.
            except Exception as error:
                self._warn(f"{name}: skipped, {topic.type} cannot be published: "
                           f"{' '.join(str(error).split())}")
                continue
            yield name, _Outlet(publisher, qos)

    def _warn(self, line: str) -> None:
        self._node.get_logger().warning(line)

    def run(self) -> None:
        """Play the bag, once or until stopped.

        Raises:
            DataError: a topic that was to be waited for got no subscriber in time.
        """
        self._publish_latched()
        self._wait_for_subscribers()
        self._idle_until(time.monotonic() + self._config.start_delay_s)
        while not self._stop.is_set:
            sent = self._play_once()
            self._node.get_logger().info(f"{sent} messages of {self._bag.path} published")
            if not self._config.loop:
                break
        self._wait_until_confirmed()

    def _publish_latched(self) -> None:
        """Static transforms, and what latched topics held when the played part begins."""
        latched = [name for name, outlet in self._outlets.items() if outlet.is_latched]
        if not latched:
            return
        start_ns = self._bag.start_ns + round(self._config.start_offset_s * 1e9)
        for raw in self._bag.messages(latched):
            if raw.topic == STATIC_TF_TOPIC or raw.log_time_ns < start_ns:
                self._outlets[raw.topic].publisher.publish(raw.data)
            elif STATIC_TF_TOPIC not in latched:
                break

    def _publishers(self) -> dict[str, Publisher]:
        """All by topic, /clock's too."""
        publishers = {name: outlet.publisher for name, outlet in self._outlets.items()}
        if self._clock is not None:
            publishers[CLOCK_TOPIC] = self._clock
        return publishers

    def _wait_for_subscribers(self) -> None:
        publishers = self._publishers()
        waiting = set(self._config.wait_for_subscribers)
        if unknown := sorted(waiting - set(publishers)):
            raise DataError(f"wait_for_subscribers: given {', '.join(unknown)}, "
                            f"expected some of {', '.join(sorted(publishers))}")
        give_up_s = time.monotonic() + self._config.wait_timeout_s
        while waiting and not self._stop.is_set:
            waiting = {n for n in waiting if not publishers[n].get_subscription_count()}
            if waiting and time.monotonic() > give_up_s:
                raise DataError(f"no subscriber to {', '.join(sorted(waiting))} within "
                                f"{self._config.wait_timeout_s:g} s")
            self._executor.spin_once(timeout_sec=_LONGEST_WAIT_S if waiting else 0.0)

    def _play_once(self) -> int:
        """One pass; returns the number of messages sent."""
        names = [name for name in self._outlets if name != STATIC_TF_TOPIC]
        start_ns = self._bag.start_ns + round(self._config.start_offset_s * 1e9)
        start_s = time.monotonic()
        self._next_tick_s = start_s
        self._bag_time_ns = 0
        sent = 0
        for raw in self._bag.messages(names, self._config.start_offset_s):
            if raw.type != self._bag.topics[raw.topic].type:
                continue        # recorded with two types: a publisher has one
            bag_s = (raw.log_time_ns - start_ns) * 1e-9
            self._idle_until(start_s + bag_s / self._config.rate, raw.log_time_ns)
            if self._stop.is_set:
                return sent
            self._outlets[raw.topic].publisher.publish(raw.data)
            sent += 1
        self._tick(self._bag.end_ns)
        return sent

    def _idle_until(self, due_s: float, due_ns: int | None = None) -> None:
        """Wait on the monotonic clock, serving the node and publishing /clock meanwhile.

        Args:
            due_s: monotonic time to return at, at once if it has passed.
            due_ns: bag time of the message due then; /clock never runs ahead of it, however late
                the message is. None while the bag does not play.
        """
        while not self._stop.is_set:
            now_s = time.monotonic()
            wait_s = due_s - now_s
            if due_ns is not None and self._clock is not None:
                if now_s >= self._next_tick_s:
                    ahead_ns = round(max(wait_s, 0.0) * self._config.rate * 1e9)
                    self._tick(due_ns - ahead_ns)
                    period_s = 1.0 / self._config.clock_rate_hz
                    on_time = self._next_tick_s + period_s > now_s
                    self._next_tick_s = (self._next_tick_s if on_time else now_s) + period_s
                wait_s = min(wait_s, self._next_tick_s - now_s)
            if now_s >= due_s:
                return
            self._executor.spin_once(timeout_sec=min(max(wait_s, 0.0), _LONGEST_WAIT_S))

    def _tick(self, bag_time_ns: int) -> None:
        if self._clock is not None:
            self._bag_time_ns = max(self._bag_time_ns, bag_time_ns)     # floats round
            seconds, nanoseconds = divmod(self._bag_time_ns, 10**9)
            self._clock.publish(Clock(clock=Time(sec=seconds, nanosec=nanoseconds)))

    def _wait_until_confirmed(self) -> None:
        """Let the last messages arrive; leaving earlier would take them along."""
        give_up_s = time.monotonic() + _END_TIMEOUT_S
        slice_s = Duration(seconds=_LONGEST_WAIT_S)
        for name, publisher in self._publishers().items():
            while not self._stop.is_set and not publisher.wait_for_all_acked(slice_s):
                if time.monotonic() > give_up_s:
                    self._warn(f"{name}: not every subscriber confirmed the last messages "
                               f"within {_END_TIMEOUT_S:g} s")
                    break


def main(argv: list[str] | None = None) -> int:
    """Run the node.

    Returns:
        0 at the end of the bag and on SIGINT and SIGTERM; 1, after one line on stderr, when the
        bag or a parameter cannot be used or nobody subscribed in time.
    """
    stop = StopFlag()
    try:
        rclpy.init(args=argv, signal_handler_options=SignalHandlerOptions.NO)
        node = Node("bag_player", automatically_declare_parameters_from_overrides=True)
        executor = SingleThreadedExecutor()
        executor.add_node(node)
        try:
            config = read_parameters(node)
            with open_bag(config.bag) as bag:
                BagPlayer(node, executor, bag, config, stop).run()
        finally:
            node.destroy_node()
            executor.shutdown()
        return 0
    except (PlannerError, RuntimeError) as error:   # RuntimeError: rcl's, e.g. bad ROS arguments
        print(f"bag_player: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    finally:
        rclpy.try_shutdown()


if __name__ == "__main__":
    sys.exit(main())
