"""Bags of every kind are read whole; damaged ones as far as they go, with what is lost said."""

from __future__ import annotations

import functools
import shutil
import sqlite3
import tempfile
from pathlib import Path

import numpy as np
import pytest

rosbag2 = pytest.importorskip("rosbags.rosbag2", reason="reads bags through rosbags")
from rosbags.interfaces import (Qos, QosDurability, QosHistory, QosLiveliness,
                                QosReliability, QosTime)
from rosbags.rosbag1 import Writer as Ros1Writer
from rosbags.rosbag2 import (CompressionFormat, CompressionMode, StoragePlugin,
                             Writer)
from rosbags.typesys import Stores, get_typestore

from reasoning_planner.bags import QosProfile, open_bag
from reasoning_planner.errors import DataError

START_NS = 1_700_000_000 * 10**9
STEP_NS = 10_000_000
COUNT = 150         # of each topic: 300 messages, over 2 MB, so that an mcap has several chunks
TEXT, BYTES = "std_msgs/msg/String", "std_msgs/msg/UInt8MultiArray"
LATCHED = QosProfile("best_effort", "transient_local", "keep_last", 7)


@functools.cache
def _payload(i: int) -> np.ndarray:
    return np.random.default_rng(i).integers(0, 256, 5000 + 97 * i, dtype=np.uint8)


def _messages(store):
    make = store.types
    layout = make["std_msgs/msg/MultiArrayLayout"]([], 0)
    for i in range(COUNT):
        yield "/text", TEXT, START_NS + i * STEP_NS, make[TEXT](f"number {i}")
        yield "/bytes", BYTES, START_NS + i * STEP_NS + 1, make[BYTES](layout, _payload(i))


def _qos() -> Qos:
    forever = QosTime(9_223_372_036, 854_775_807)
    return Qos(QosHistory.KEEP_LAST, 7, QosReliability.BEST_EFFORT, QosDurability.TRANSIENT_LOCAL,
               forever, forever, QosLiveliness.AUTOMATIC, forever, False)


@functools.cache
def _folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory()


def _write_ros2(path: Path, plugin=StoragePlugin.MCAP, mode=CompressionMode.NONE) -> Path:
    """A copy of a bag that is made once."""
    made = Path(_folder().name) / f"{plugin.name}_{mode.name}"
    if not made.exists():
        _make_ros2(made / "bag", plugin, mode)
    return shutil.copytree(made / "bag", path)


def _make_ros2(path: Path, plugin: StoragePlugin, mode: CompressionMode) -> None:
    store = get_typestore(Stores.ROS2_HUMBLE)
    writer = Writer(path, version=9, storage_plugin=plugin)
    writer.set_compression(mode, CompressionFormat.ZSTD)
    with writer:
        connections = {"/text": writer.add_connection("/text", TEXT, typestore=store,
                                                      offered_qos_profiles=[_qos()]),
                       "/bytes": writer.add_connection("/bytes", BYTES, typestore=store)}
        for topic, kind, stamp_ns, message in _messages(store):
            writer.write(connections[topic], stamp_ns, store.serialize_cdr(message, kind))


def _write_ros1(path: Path, compression=None) -> Path:
    made = Path(_folder().name) / f"{compression}.bag"
    if not made.exists():
        _make_ros1(made, compression)
    return shutil.copy(made, path)


def _make_ros1(path: Path, compression) -> None:
    store = get_typestore(Stores.ROS1_NOETIC)
    writer = Ros1Writer(path)
    if compression:
        writer.set_compression(compression)
    with writer:
        connections = {"/text": writer.add_connection("/text", TEXT, typestore=store, latching=1),
                       "/bytes": writer.add_connection("/bytes", BYTES, typestore=store)}
        for topic, kind, stamp_ns, message in _messages(store):
            writer.write(connections[topic], stamp_ns, store.serialize_ros1(message, kind))


def _storage_file(bag: Path) -> Path:
    return next(f for f in bag.iterdir() if f.name != "metadata.yaml")


def _assert_prefix(bag, least: int = 1) -> int:
    """Every message read is the one that was written, none is out of order; returns the count."""
    seen = {"/text": 0, "/bytes": 0}
    latest_ns = 0
    for raw in bag.messages():
        i = seen[raw.topic]
        seen[raw.topic] += 1
        assert raw.log_time_ns == START_NS + i * STEP_NS + (raw.topic == "/bytes")
        assert raw.log_time_ns >= latest_ns
        latest_ns = raw.log_time_ns
        data = bag.decode(raw).data
        assert data == f"number {i}" if raw.topic == "/text" else (data == _payload(i)).all()
    assert sum(seen.values()) >= least
    return sum(seen.values())


KINDS = [(plugin, mode) for plugin in StoragePlugin for mode in CompressionMode
         if (plugin, mode) != (StoragePlugin.SQLITE3, CompressionMode.STORAGE)]


@pytest.mark.parametrize("plugin, mode", KINDS)
@pytest.mark.parametrize("with_metadata", [True, False])
def test_rosbag2_is_read_whole(tmp_path, plugin, mode, with_metadata):
    path = _write_ros2(tmp_path / "bag", plugin, mode)
    if not with_metadata:
        (path / "metadata.yaml").unlink()
    with open_bag(path) as bag:
        assert {t.name: (t.type, t.count) for t in bag.topics.values()} == {
            "/text": (TEXT, COUNT), "/bytes": (BYTES, COUNT)}
        assert bag.topics["/text"].qos == (LATCHED,)
        assert bag.topics["/bytes"].qos == ()
        assert bag.start_ns == START_NS
        assert bag.end_ns == START_NS + (COUNT - 1) * STEP_NS + 1
        assert _assert_prefix(bag) == bag.message_count == 2 * COUNT
        assert bag.losses == ()


@pytest.mark.parametrize("compression", [None, *Ros1Writer.CompressionFormat])
def test_ros1_is_read_whole_and_converted_to_cdr(tmp_path, compression):
    with open_bag(_write_ros1(tmp_path / "old.bag", compression)) as bag:
        assert bag.topics["/text"].qos[0].durability == "transient_local"
        assert bag.topics["/bytes"].qos[0].durability == "volatile"
        assert _assert_prefix(bag) == 2 * COUNT
        first = next(bag.messages(["/text"]))
        assert first.data == b"\x00\x01\x00\x00\x09\x00\x00\x00number 0\x00"
        assert bag.losses == ()


@pytest.mark.parametrize("is_cut", [False, True])
def test_ros1_header_loses_its_sequence_number(tmp_path, is_cut):
    kind = "geometry_msgs/msg/PointStamped"
    store = get_typestore(Stores.ROS1_NOETIC)
    make = store.types
    header = make["std_msgs/msg/Header"](41, make["builtin_interfaces/msg/Time"](5, 6), "map")
    point = make[kind](header, make["geometry_msgs/msg/Point"](1.0, 2.0, 3.0))
    path = tmp_path / "old.bag"
    with Ros1Writer(path) as writer:
        connection = writer.add_connection("/point", kind, typestore=store)
        writer.write(connection, 7, store.serialize_ros1(point, kind))
    if is_cut:      # the index goes, the message stays
        path.write_bytes(path.read_bytes()[:-100])
    with open_bag(path) as bag:
        raw, = bag.messages()
        assert raw.log_time_ns == 7
        assert raw.data == (b"\x00\x01\x00\x00" b"\x05\0\0\0" b"\x06\0\0\0" b"\x04\0\0\0map\0"
                            + np.array([1.0, 2.0, 3.0]).tobytes())
        decoded = bag.decode(raw)
        assert (decoded.header.stamp.nanosec, decoded.header.frame_id, decoded.point.z) == (
            6, "map", 3.0)
        assert bool(bag.losses) == is_cut


def test_topics_and_offset_select_messages(tmp_path):
    with open_bag(_write_ros2(tmp_path / "bag")) as bag:
        picked = list(bag.messages(["/text"], start_offset_s=1.0))
        assert {raw.topic for raw in picked} == {"/text"}
        assert picked[0].log_time_ns == START_NS + 100 * STEP_NS
        assert len(picked) == COUNT - 100
        with pytest.raises(DataError, match="given topic /other, expected one of /bytes, /text"):
            bag.messages(["/text", "/other"])
        assert bag.losses == ()


def test_files_of_a_split_bag_are_merged(tmp_path):
    first, second = _write_ros2(tmp_path / "bag"), _write_ros1(tmp_path / "b.bag")
    folder = tmp_path / "both"
    folder.mkdir()
    shutil.copy(_storage_file(first), folder / "both_0.mcap")
    shutil.copy(second, folder / "both_1.bag")
    with open_bag(folder) as bag:
        times = [raw.log_time_ns for raw in bag.messages()]
        assert len(times) == bag.message_count == 4 * COUNT
        assert times == sorted(times)


@pytest.mark.parametrize("plugin, mode", KINDS)
def test_cut_rosbag2_is_read_as_far_as_it_goes(tmp_path, plugin, mode):
    path = _write_ros2(tmp_path / "bag", plugin, mode)
    file = _storage_file(path)
    file.write_bytes(file.read_bytes()[:file.stat().st_size * 7 // 10])
    with open_bag(path) as bag:
        # 70 % of the bytes; zstd and sqlite lose up to a block more.
        count = _assert_prefix(bag, least=COUNT // 2)
        assert count < 2 * COUNT
        assert str(file.name) in " ".join(bag.losses)
        assert "lost" in bag.losses[-1]
        assert bag.topics["/text"].qos == (LATCHED,)


@pytest.mark.parametrize("compression", [None, *Ros1Writer.CompressionFormat])
def test_cut_ros1_bag_is_read_as_far_as_it_goes(tmp_path, compression):
    path = _write_ros1(tmp_path / "old.bag", compression)
    path.write_bytes(path.read_bytes()[:path.stat().st_size * 7 // 10])
    with open_bag(path) as bag:
        assert COUNT // 2 < _assert_prefix(bag) < 2 * COUNT
        assert "lost" in bag.losses[0]


def test_every_cut_of_an_mcap_gives_messages_or_one_line(tmp_path):
    whole = _storage_file(_write_ros2(tmp_path / "bag")).read_bytes()
    counts = []
    for size in [0, 1, 8, 9, 40, 2000, *range(3000, len(whole), len(whole) // 9), len(whole) - 1]:
        cut = tmp_path / "cut.mcap"
        cut.write_bytes(whole[:size])
        try:
            with open_bag(cut) as bag:
                counts.append(_assert_prefix(bag, least=0))
                assert bag.losses
        except DataError as error:
            counts.append(0)
            assert "\n" not in str(error) and "expected" in str(error)
    assert counts == sorted(counts)
    assert counts[-1] == 2 * COUNT


def test_a_garbled_chunk_ends_the_reading_and_is_said(tmp_path):
    path = _write_ros2(tmp_path / "bag", mode=CompressionMode.STORAGE)
    file = _storage_file(path)
    data = bytearray(file.read_bytes())
    second_chunk = data.index(b"\x28\xb5\x2f\xfd", data.index(b"\x28\xb5\x2f\xfd") + 1)
    data[second_chunk:second_chunk + 4] = bytes(4)
    file.write_bytes(data)
    with open_bag(path) as bag:
        assert _assert_prefix(bag) < 2 * COUNT
        assert len(bag.losses) == 1
        assert "reading stopped after" in bag.losses[0]


def test_write_ahead_log_of_a_killed_recorder_is_read(tmp_path):
    path = _write_ros2(tmp_path / "bag", StoragePlugin.SQLITE3)
    file = _storage_file(path)
    recorder = sqlite3.connect(file)
    recorder.execute("PRAGMA journal_mode = WAL")
    recorder.execute("PRAGMA wal_autocheckpoint = 0")
    topic, = recorder.execute("SELECT id FROM topics WHERE name = '/text'").fetchone()
    text = b"\x00\x01\x00\x00\x05\x00\x00\x00late\x00"
    recorder.execute("INSERT INTO messages (topic_id, timestamp, data) VALUES (?, ?, ?)",
                     (topic, START_NS + 10**12, text))
    recorder.commit()
    killed = tmp_path / "killed"
    killed.mkdir()
    for part in path.glob("bag.db3*"):
        shutil.copy(part, killed)
    recorder.close()
    with open_bag(killed) as bag:
        raws = list(bag.messages())
        assert len(raws) == 2 * COUNT + 1
        assert raws[-1].data == text


def test_one_bad_file_of_a_split_bag_leaves_the_others(tmp_path):
    path = _write_ros2(tmp_path / "bag")
    (path / "metadata.yaml").unlink()
    (path / "bag_1.mcap").write_bytes(b"not a bag")
    with open_bag(path) as bag:
        assert _assert_prefix(bag) == 2 * COUNT
        assert len(bag.losses) == 1 and "bag_1.mcap" in bag.losses[0]


def test_metadata_that_names_a_missing_file_is_survived(tmp_path):
    path = _write_ros2(tmp_path / "bag")
    _storage_file(path).rename(path / "renamed.mcap")
    with open_bag(path) as bag:
        assert _assert_prefix(bag) == 2 * COUNT
        assert "missing" in bag.losses[0]


@pytest.mark.parametrize("make, words", [
    (lambda p: None, "No such file"),
    (lambda p: p.mkdir(), "holds no metadata.yaml and no recording"),
    (lambda p: p.write_bytes(b""), "an empty file"),
    (lambda p: p.write_text("stamp,x,y\n"), "starts with b'stamp,x,'"),
    (lambda p: p.write_bytes(b"SQLite format 3\0" + bytes(500)), "another name"),
    (lambda p: (p.mkdir(), (p / "metadata.yaml").write_text("[1, 2")), "expected a rosbag2"),
    (lambda p: (p.mkdir(), (p / "x.db3").write_bytes(b"SQLite format 3\0" + bytes(500))),
     "no message found"),
    (lambda p: (p.mkdir(), (p / "x.bag").write_bytes(b"#ROSBAG V2.0\n" + bytes(500))),
     "no message found"),
])
def test_what_is_no_bag_is_one_line(tmp_path, make, words):
    path = tmp_path / "thing"
    make(path)
    with pytest.raises(DataError) as caught:
        with open_bag(path):
            pass
    text = str(caught.value)
    assert str(path) in text and words in text and "expected" in text and "\n" not in text


def test_undecodable_messages_are_refused_by_name(tmp_path):
    with open_bag(_write_ros2(tmp_path / "bag")) as bag:
        raw = next(bag.messages(["/text"]))
        foreign = type(raw)("/x", "other_msgs/msg/Thing", 0, raw.data)
        with pytest.raises(DataError, match="/x: given type other_msgs/msg/Thing"):
            bag.decode(foreign)
        short = type(raw)("/text", TEXT, 0, raw.data[:9])
        with pytest.raises(DataError, match="given 9 bytes, expected a std_msgs/msg/String"):
            bag.decode(short)
