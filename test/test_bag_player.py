"""Bags over real DDS: the node in its own process, subscribers here, bytes compared."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.ros
rclpy = pytest.importorskip("rclpy", reason="plays bags through ROS 2")
pytest.importorskip("rosbags", reason="makes bags through rosbags")

from rclpy.executors import SingleThreadedExecutor
from rclpy.qos import (DurabilityPolicy, HistoryPolicy, QoSProfile,
                       ReliabilityPolicy)
from rclpy.serialization import deserialize_message
from rosbags.interfaces import (Qos, QosDurability, QosHistory, QosLiveliness,
                                QosReliability, QosTime)
from rosbags.rosbag1 import Writer as Ros1Writer
from rosbags.rosbag2 import StoragePlugin, Writer
from rosbags.typesys import Stores, get_types_from_msg, get_typestore
from rosgraph_msgs.msg import Clock

import reasoning_planner
from reasoning_planner import bag_player
from reasoning_planner.bags import QosProfile, Topic, open_bag
from reasoning_planner.errors import ConfigError

# Two runs on one host must not hear each other. Above 101, Linux may lend DDS's ports to others.
DOMAIN = 2 + os.getpid() % 99
START_NS = 1_700_000_000 * 10**9
STEP_NS = 20_000_000
COUNT = 50
END_NS = START_NS + (COUNT - 1) * STEP_NS + 5
TEXT, BLOB, FOREIGN = "std_msgs/msg/String", "std_msgs/msg/UInt8MultiArray", "no_msgs/msg/Such"
RELIABLE, BEST_EFFORT = ReliabilityPolicy.RELIABLE, ReliabilityPolicy.BEST_EFFORT
VOLATILE, TRANSIENT = DurabilityPolicy.VOLATILE, DurabilityPolicy.TRANSIENT_LOCAL
SECONDS = 20.0      # until a test gives up; a loaded machine takes seconds to start a node


def _qos(reliability: str, durability: str, depth: int) -> Qos:
    forever = QosTime(9_223_372_036, 854_775_807)
    return Qos(QosHistory.KEEP_LAST, depth, QosReliability[reliability],
               QosDurability[durability], forever, forever, QosLiveliness.AUTOMATIC, forever,
               False)


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    """One second: text, best effort text, latched text, late static transforms, a big finish."""
    path = tmp_path_factory.mktemp("player") / "bag"
    store = get_typestore(Stores.ROS2_HUMBLE)
    store.register(get_types_from_msg("int32 x", FOREIGN))
    make = store.types

    with Writer(path, version=8, storage_plugin=StoragePlugin.MCAP) as writer:
        def add(topic, kind, *qos):
            return writer.add_connection(topic, kind, typestore=store,
                                         offered_qos_profiles=[_qos(*qos)] if qos else [])

        text = add("/text", TEXT)
        quick = add("/quick", TEXT, "BEST_EFFORT", "VOLATILE", 3)
        latched = add("/latched", TEXT, "RELIABLE", "TRANSIENT_LOCAL", 2)
        static = add("/tf_static", TEXT, "RELIABLE", "TRANSIENT_LOCAL", 1)
        blob = add("/blob", BLOB, "RELIABLE", "VOLATILE", 4)
        foreign = add("/foreign", FOREIGN)

        def write(connection, stamp_ns, message):
            data = store.serialize_cdr(message, connection.msgtype)
            writer.write(connection, stamp_ns, data)

        for i in range(COUNT):
            stamp_ns = START_NS + i * STEP_NS
            write(text, stamp_ns, make[TEXT](f"text {i}"))
            write(quick, stamp_ns + 1, make[TEXT](f"quick {i}"))
            write(foreign, stamp_ns + 2, make[FOREIGN](i))
            if i % 10 == 0:
                write(latched, stamp_ns + 3, make[TEXT](f"latched {i}"))
            if i in (20, 30):
                write(static, stamp_ns + 4, make[TEXT](f"static {i}"))
        layout = make["std_msgs/msg/MultiArrayLayout"]([], 0)
        for i in range(12):         # 7 MB in no time at all, three times the send queue
            write(blob, END_NS, make[BLOB](layout, np.full(600_000, i, np.uint8)))
    return path


@pytest.fixture(scope="module")
def node():
    context = rclpy.Context()
    rclpy.init(context=context, domain_id=DOMAIN)
    node = rclpy.create_node("listener", context=context)
    yield node
    node.destroy_node()
    context.try_shutdown()


class Listener:
    """Collects raw messages of some topics while a player runs."""

    def __init__(self, node, **topics):
        self.node = node
        self.raw = {f"/{name}": [] for name in topics}
        self.times = {f"/{name}": [] for name in topics}
        self.endpoints = {}
        self.executor = SingleThreadedExecutor(context=node.context)
        self.executor.add_node(node)
        self.subscriptions = []
        for name, (kind, reliability, durability) in topics.items():
            qos = QoSProfile(depth=1000, history=HistoryPolicy.KEEP_LAST,
                             reliability=reliability, durability=durability)
            self.subscriptions.append(node.create_subscription(
                bag_player.message_class(kind), f"/{name}", self._store_under(f"/{name}"), qos,
                raw=True))

    def _store_under(self, topic):
        def store(data):
            self.raw[topic].append(data)
            self.times[topic].append(time.monotonic())
        return store

    def spin(self, until):
        """Serve the callbacks until the condition holds."""
        give_up = time.monotonic() + SECONDS
        while not until():
            assert time.monotonic() < give_up, {t: len(m) for t, m in self.raw.items()}
            self.executor.spin_once(timeout_sec=0.02)
            for topic in self.raw:
                if topic not in self.endpoints:
                    if found := self.node.get_publishers_info_by_topic(topic):
                        self.endpoints[topic] = found[0].qos_profile

    def close(self):
        for subscription in self.subscriptions:
            self.node.destroy_subscription(subscription)
        self.executor.remove_node(self.node)
        self.executor.shutdown()

    @property
    def clock_ns(self):
        clocks = [deserialize_message(data, Clock).clock for data in self.raw["/clock"]]
        return [clock.sec * 10**9 + clock.nanosec for clock in clocks]

    @property
    def jumps_ns(self):
        """The backward steps of /clock."""
        clock_ns = self.clock_ns
        return [b - a for a, b in zip(clock_ns, clock_ns[1:]) if b < a]


@pytest.fixture
def listen(node):
    listeners = []

    def make(**topics):
        listeners.append(Listener(node, **topics))
        return listeners[-1]
    yield make
    for listener in listeners:
        listener.close()


@pytest.fixture
def play():
    """Starts players; none outlives its test."""
    players = []

    def start(*parameters, remap=()):
        arguments = [a for p in parameters for a in ("-p", p)] + [
            a for r in remap for a in ("-r", r)]
        source = str(Path(reasoning_planner.__file__).parents[1])
        path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH", "")]))
        players.append(subprocess.Popen(
            [sys.executable, "-m", "reasoning_planner.bag_player", "--ros-args", *arguments],
            env={**os.environ, "ROS_DOMAIN_ID": str(DOMAIN), "PYTHONPATH": path},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return players[-1]
    yield start
    for player in players:
        if player.poll() is None:
            player.kill()
        player.communicate()


def _recorded(path, topic):
    with open_bag(path) as bag:
        return [raw.data for raw in bag.messages([topic])]


def _texts(raws):
    return [raw[8:].rstrip(b"\0").decode() for raw in raws]


def _padded(raws):
    """DDS fills a payload up to a multiple of 4 bytes."""
    return [raw + bytes(-len(raw) % 4) for raw in raws]


def test_every_message_arrives_byte_for_byte_with_its_qos(recording, listen, play):
    heard = listen(text=(TEXT, RELIABLE, VOLATILE), quick=(TEXT, BEST_EFFORT, VOLATILE),
                   latched=(TEXT, RELIABLE, TRANSIENT), tf_static=(TEXT, RELIABLE, TRANSIENT),
                   blob=(BLOB, RELIABLE, VOLATILE),
                   clock=("rosgraph_msgs/msg/Clock", RELIABLE, VOLATILE))
    player = play(f"bag:={recording}", "rate:=2", "start_delay_s:=0.3",
                  "wait_for_subscribers:=[/text, /blob, /latched, /quick, /clock]")
    heard.spin(until=lambda: player.poll() is not None)
    _, errors = player.communicate()
    assert player.returncode == 0, errors
    reliable = ("/text", "/blob", "/latched", "/tf_static")
    expected = {topic: len(_recorded(recording, topic)) for topic in reliable}
    heard.spin(until=lambda: heard.clock_ns[-1] >= END_NS and all(      # what DDS still holds
        len(heard.raw[topic]) >= count for topic, count in expected.items()))
    for topic in reliable:
        assert _padded(heard.raw[topic]) == _padded(_recorded(recording, topic)), topic
    quick = _padded(_recorded(recording, "/quick"))
    assert set(_padded(heard.raw["/quick"])) <= set(quick)
    assert len(heard.raw["/quick"]) >= COUNT * 0.9

    def offered(topic):
        qos = heard.endpoints[topic]
        return qos.reliability, qos.durability
    assert offered("/text") == offered("/blob") == (RELIABLE, VOLATILE)
    assert offered("/quick") == (BEST_EFFORT, VOLATILE)
    assert offered("/latched") == offered("/tf_static") == (RELIABLE, TRANSIENT)

    clock_ns = heard.clock_ns
    assert clock_ns == sorted(clock_ns)
    assert START_NS <= clock_ns[0] < START_NS + 200_000_000
    assert clock_ns[-1] == END_NS
    assert 25 <= len(clock_ns) <= 60        # 0.5 s at 100 Hz

    span_s = heard.times["/text"][-1] - heard.times["/text"][0]
    assert 0.45 < span_s < 0.9              # 0.98 s of bag at twice the speed
    gaps_s = np.diff(heard.times["/text"])
    assert gaps_s.max() < 0.4               # nothing waits for acknowledgements on the way
    assert errors.count("WARN") == 1 and "/foreign: skipped, no_msgs/msg/Such" in errors
    assert "Traceback" not in errors


def test_offset_keeps_what_was_latched_and_names_can_be_remapped(recording, listen, play):
    heard = listen(other=(TEXT, RELIABLE, VOLATILE), latched=(TEXT, RELIABLE, TRANSIENT),
                   tf_static=(TEXT, RELIABLE, TRANSIENT))
    player = play(f"bag:={recording}", "start_offset_s:=0.9", "clock_rate_hz:=0", "rate:=1",
                  "topics:=[/text, /latched, /tf_static]", "wait_for_subscribers:=[/text]",
                  "start_delay_s:=0.3", remap=["/text:=/other"])
    heard.spin(until=lambda: player.poll() is not None)
    assert player.returncode == 0
    assert _texts(heard.raw["/other"]) == [f"text {i}" for i in range(45, 50)]
    assert _texts(heard.raw["/latched"])[-1] == "latched 40"
    assert _texts(heard.raw["/tf_static"]) == ["static 20", "static 30"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_loop_jumps_back_until_stopped(recording, listen, play, number):
    heard = listen(text=(TEXT, RELIABLE, VOLATILE),
                   clock=("rosgraph_msgs/msg/Clock", BEST_EFFORT, VOLATILE))
    player = play(f"bag:={recording}", "topics:=[/text]", "loop:=true", "rate:=5",
                  "wait_for_subscribers:=[/text, /clock]", "start_delay_s:=0.3")
    heard.spin(until=lambda: len(heard.raw["/text"]) > 2 * COUNT and len(heard.jumps_ns) >= 2)
    player.send_signal(number)
    _, errors = player.communicate(timeout=10)
    assert player.returncode == 0, errors
    assert "Traceback" not in errors
    assert _texts(heard.raw["/text"])[:2 * COUNT] == 2 * [f"text {i}" for i in range(COUNT)]
    assert all(jump < -900_000_000 for jump in heard.jumps_ns)


def test_sigterm_while_waiting_is_a_clean_exit(recording, play, listen):
    heard = listen(tf_static=(TEXT, RELIABLE, TRANSIENT))
    player = play(f"bag:={recording}", "wait_for_subscribers:=[/text]")
    heard.spin(until=lambda: len(heard.raw["/tf_static"]) == 2)     # it is up, and waits
    player.send_signal(signal.SIGTERM)
    _, errors = player.communicate(timeout=10)
    assert player.returncode == 0 and "Traceback" not in errors


SLOW_SUBSCRIBER = """
import rclpy
from rclpy.qos import QoSProfile
from std_msgs.msg import String
rclpy.init()
node = rclpy.create_node("slow")
subscription = node.create_subscription(
    String, "/text", lambda message: print(message.data, flush=True), QoSProfile(depth=1000))
print("up", flush=True)
rclpy.spin(node)
"""


def test_the_end_waits_for_a_subscriber_that_lags(recording, play):
    slow = subprocess.Popen([sys.executable, "-c", SLOW_SUBSCRIBER], stdout=subprocess.PIPE,
                            env={**os.environ, "ROS_DOMAIN_ID": str(DOMAIN)}, text=True)
    try:
        assert slow.stdout.readline() == "up\n"
        player = play(f"bag:={recording}", "topics:=[/text]", "rate:=2",
                      "wait_for_subscribers:=[/text]", "start_delay_s:=0.3")
        heard = [slow.stdout.readline().strip()]
        slow.send_signal(signal.SIGSTOP)        # 0.5 s of playing are ahead
        with pytest.raises(subprocess.TimeoutExpired):
            player.wait(timeout=1.5)
        slow.send_signal(signal.SIGCONT)
        heard += [slow.stdout.readline().strip() for _ in range(COUNT - 1)]
        assert heard == [f"text {i}" for i in range(COUNT)]
        assert player.wait(timeout=SECONDS) == 0
    finally:
        slow.kill()
        slow.communicate()


def test_ros1_and_cut_bags_play(listen, play, tmp_path):
    store = get_typestore(Stores.ROS1_NOETIC)
    path = tmp_path / "old.bag"
    with Ros1Writer(path) as writer:
        connection = writer.add_connection("/text", TEXT, typestore=store)
        for i in range(5):
            message = store.types[TEXT](f"old {i}")
            writer.write(connection, START_NS + i * 10**8, store.serialize_ros1(message, TEXT))
    path.write_bytes(path.read_bytes()[:-50])       # the index is gone
    heard = listen(text=(TEXT, RELIABLE, VOLATILE),
                   clock=("rosgraph_msgs/msg/Clock", RELIABLE, VOLATILE))
    player = play(f"bag:={path}", "wait_for_subscribers:=[/text, /clock]", "start_delay_s:=0.3")
    heard.spin(until=lambda: player.poll() is not None)
    _, errors = player.communicate()
    assert player.returncode == 0
    assert _texts(heard.raw["/text"]) == [f"old {i}" for i in range(5)]
    assert "5 messages recovered" in errors
    assert len(set(heard.clock_ns)) > 15        # 40 ticks between five messages, no leaps
    assert heard.jumps_ns == []


@pytest.fixture
def play_here(monkeypatch, capfd):
    """Runs `main` in this process: (return code, lines on stderr)."""
    monkeypatch.setenv("ROS_DOMAIN_ID", str(DOMAIN))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def run(*parameters):
        arguments = [a for p in parameters for a in ("-p", p)]
        code = bag_player.main(["bag_player", "--ros-args", *arguments])
        return code, capfd.readouterr().err.splitlines()
    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("parameters, words", [
    ([], "bag: given nothing, expected the path of a bag"),
    (["bag:=/no/such/bag"], "/no/such/bag: No such file"),
    (["bag:=BAG", "rat:=1", "loop:=3"], "rat: unknown parameter"),
    (["bag:=BAG", "rate"], "Couldn't parse"),
    (["bag:=BAG", "topics:=[/foreign]"], "none of its 6 topics can be published"),
    (["bag:=BAG", "start_offset_s:=7"], "given start_offset_s 7, expected less than its 0.98"),
    (["bag:=BAG", "wait_for_subscribers:=[/text]", "wait_timeout_s:=0"],
     "no subscriber to /text within 0 s"),
])
def test_what_cannot_be_played_is_one_line(recording, play_here, parameters, words):
    code, lines = play_here(*(p.replace("BAG", str(recording)) for p in parameters))
    assert code == 1
    ours = [line for line in lines if line.startswith("bag_player: ")]
    assert len(ours) == 1 and words in ours[0]
    assert not any("Traceback" in line for line in lines)


@pytest.mark.parametrize("name, profiles, expected", [
    ("/a", (), (RELIABLE, VOLATILE, 10)),
    ("/a", (QosProfile("best_effort", "volatile", "keep_last", 5),), (BEST_EFFORT, VOLATILE, 5)),
    ("/a", (QosProfile("reliable", "volatile", "unknown", 0),), (RELIABLE, VOLATILE, 10)),
    ("/a", (QosProfile("best_effort", "volatile", "keep_last", 5),
            QosProfile("reliable", "transient_local", "keep_last", 1)), (RELIABLE, TRANSIENT, 5)),
    ("/tf_static", (), (RELIABLE, TRANSIENT, 30)),
])
def test_qos_repeats_what_was_recorded(name, profiles, expected):
    qos = bag_player.qos_for(Topic(name, TEXT, 30, profiles))
    assert (qos.reliability, qos.durability, qos.depth) == expected
    assert qos.history == HistoryPolicy.KEEP_LAST


def test_all_wrong_parameters_are_named():
    with pytest.raises(ConfigError) as caught:
        bag_player.PlayerConfig(rate=0.0, clock_rate_hz=-1.0)
    assert [p.split(":")[0] for p in caught.value.problems] == ["bag", "rate", "clock_rate_hz"]
