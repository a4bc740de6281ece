"""Reading recorded drives: rosbag2 (mcap, sqlite3, zstd, with or without metadata.yaml), ROS 1.

Messages come out as CDR bytes in the order they were logged, ROS 1 messages converted, so that a
player can publish them and an evaluation can decode them. What a damaged bag has lost is listed
in `Bag.losses` and logged; what it still holds is read. No ROS installation is needed, and
nothing here knows what the topics mean. Times are log times, not header stamps.
"""

from __future__ import annotations

import heapq
import logging
import tempfile
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Collection, Iterable, Iterator, Mapping, Protocol

from . import bag_salvage
from .errors import DataError, MissingDependencyError

try:
    from rosbags.highlevel import AnyReader
    from rosbags.typesys import Stores, get_types_from_msg, get_typestore
except ImportError as error:
    raise MissingDependencyError(
        f"rosbags is not installed ({error}), needed to read bags: pip install rosbags") from error

_log = logging.getLogger(__name__)
_EXPECTED = "expected a rosbag2 folder, or an .mcap, .db3 or .bag file"
_SUFFIXES = {"mcap": ".mcap", "sqlite3": ".db3", "ros1": ".bag"}


@dataclass(frozen=True)
class QosProfile:
    """The part of a recorded QoS profile that a publisher must repeat.

    Attributes:
        reliability: "reliable", "best_effort", or "unknown" and the like where not recorded.
        durability: "volatile", "transient_local", or "unknown" and the like.
        history: "keep_last", "keep_all", or "unknown" and the like.
        depth: queue length; 0 where not recorded.
    """

    reliability: str
    durability: str
    history: str
    depth: int


@dataclass(frozen=True)
class Topic:
    """One recorded topic.

    Attributes:
        name: as recorded.
        type: e.g. "nav_msgs/msg/Odometry" (ROS 1 names are normalised); of a topic recorded with
            two types, the one with more messages.
        count: messages in the bag.
        qos: profiles offered by its publishers; empty where not recorded.
    """

    name: str
    type: str
    count: int
    qos: tuple[QosProfile, ...] = ()


@dataclass(frozen=True)
class RawMessage:
    """One message as CDR bytes (4-byte encapsulation header included)."""

    topic: str
    type: str
    log_time_ns: int
    data: bytes


class _Source(Protocol):
    """One recording that can be read: a whole one, or what is left of a damaged one."""

    topics: list[Topic]
    start_ns: int           # log time of the first message
    end_ns: int             # log time of the last message

    def messages(self, names: Collection[str], start_ns: int) -> Iterator[RawMessage]: ...

    def typestore(self, type_name: str) -> Any: ...


class Bag:
    """An open bag.

    Attributes:
        path: as given to `open_bag`.
        topics: name -> Topic, by name; topics without messages included.
        start_ns, end_ns: log times of the first and the last message; both 0 for an empty bag.
        message_count: messages in the bag.
    """

    def __init__(self, path: Path, sources: list[_Source], losses: list[str],
                 given: Any = None):
        self.path = path
        self._given = given
        self._sources = sources
        self._losses = losses
        self.topics = _joined([topic for source in sources for topic in source.topics])
        self.message_count = sum(topic.count for topic in self.topics.values())
        filled = [s for s in sources if any(t.count for t in s.topics)]
        self.start_ns = min((s.start_ns for s in filled), default=0)
        self.end_ns = max((s.end_ns for s in filled), default=0)

    @property
    def duration_s(self) -> float:
        """Seconds from the first message to the last."""
        return (self.end_ns - self.start_ns) * 1e-9

    @property
    def losses(self) -> tuple[str, ...]:
        """What could not be read, one line each; complete once the messages have been read."""
        return tuple(self._losses)

    def messages(self, topics: Collection[str] | None = None,
                 start_offset_s: float = 0.0) -> Iterator[RawMessage]:
        """Messages in log time order.

        Args:
            topics: names to read; None for all.
            start_offset_s: skip messages logged earlier than this after the bag's start.
        Raises:
            DataError: a name in `topics` is not in the bag.
        """
        names = set(self.topics if topics is None else topics)
        if unknown := sorted(names - set(self.topics)):
            raise DataError(f"{self.path}: given topic {', '.join(unknown)}, expected one of "
                            + (", ".join(self.topics) or "none: the bag has no topics"))
        start_ns = self.start_ns + round(start_offset_s * 1e9)
        return self._read(names, start_ns)

    def _read(self, names: set[str], start_ns: int) -> Iterator[RawMessage]:
        expected = sum(self.topics[name].count for name in names)
        received = 0
        known_losses = len(self._losses)
        streams = [self._guarded(source, names, start_ns) for source in self._sources]
        for raw in heapq.merge(*streams, key=lambda raw: raw.log_time_ns):
            received += 1
            yield raw
        unexplained = received != expected and len(self._losses) == known_losses
        if unexplained and start_ns <= self.start_ns:
            self._lose(f"{self.path}: {received} messages read, {expected} expected: "
                       "the bag disagrees with its own metadata")

    def _guarded(self, source: _Source, names: set[str], start_ns: int) -> Iterator[RawMessage]:
        """Read a source as far as it goes."""
        expected = sum(topic.count for topic in source.topics if topic.name in names)
        received, refused = 0, 0
        reason = ""
        try:
            for raw in source.messages(names, start_ns):
                if raw.data:
                    received += 1
                    yield raw
                else:
                    refused += 1
        # A reader fed with damaged bytes fails in many ways (IndexError, zlib, struct, apsw ...).
        except Exception as error:
            reason = _one_line(error)
        if reason:
            self._lose(f"{self.path}: reading stopped after {received} of {expected} messages: "
                       f"{reason}")
        if refused:
            self._lose(f"{self.path}: {refused} messages could not be converted to CDR")

    def _lose(self, line: str) -> None:
        if line not in self._losses:
            self._losses.append(line)
            _log.warning(line)

    def decode(self, raw: RawMessage) -> Any:
        """The message as an object with the fields of its definition; arrays are numpy arrays.

        Raises:
            DataError: the type has no definition in the bag or among the standard messages, or
                the bytes do not fit it.
        """
        store = self._typestore(raw.type)
        if store is None:
            raise DataError(f"{raw.topic}: given type {raw.type}, expected a standard message or "
                            "one whose definition is in the bag")
        try:
            return store.deserialize_cdr(raw.data, raw.type)
        except Exception as error:      # as above: any error of the decoder means damaged bytes
            raise DataError(f"{raw.topic} at {raw.log_time_ns} ns: given {len(raw.data)} bytes, "
                            f"expected a {raw.type}: {_one_line(error)}") from error

    def fields(self, type_name: str) -> dict[str, str]:
        """The fields of a message type: name -> type, "[]" behind a sequence's or an array's.

        Empty where the type has no definition in the bag, among the standard messages or given.
        """
        store = self._typestore(type_name)
        return {} if store is None else {
            name: _type_of(field) for name, field in store.fielddefs[type_name][1]}

    def _typestore(self, type_name: str) -> Any:
        stores = [source.typestore(type_name) for source in self._sources]
        return next((store for store in [*stores, _store_with(type_name, self._given)]
                     if store is not None), None)


def _type_of(field: Any) -> str:
    """A field's type in rosbags' syntax tree, as .msg files write it."""
    kind, content = field
    if kind.name == "NAME":
        return content
    return content[0] if kind.name == "BASE" else _type_of(content[0]) + "[]"


def _joined(topics: list[Topic]) -> dict[str, Topic]:
    """One entry a name, from all files and all types."""
    by_name: dict[str, Topic] = {}
    for topic in sorted(topics, key=lambda t: (t.name, -t.count)):
        first = by_name.get(topic.name)
        if first is None:
            by_name[topic.name] = topic
        else:
            more = tuple(q for q in topic.qos if q not in first.qos)
            by_name[topic.name] = replace(first, count=first.count + topic.count,
                                          qos=first.qos + more)
    return by_name


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if text else type(error).__name__


def read_definitions(folders: Iterable[str | Path]) -> dict[str, str]:
    """Message definitions of source folders: type name -> text of PACKAGE/msg/NAME.msg.

    Raises:
        DataError: a folder is missing or holds no such file.
    """
    texts: dict[str, str] = {}
    for folder in map(Path, folders):
        files = [file for file in sorted(folder.resolve().rglob("*.msg"))
                 if file.parent.name == "msg"]
        if not files:
            raise DataError(f"{folder}: no message definition, expected a folder with "
                            "PACKAGE/msg/NAME.msg")
        texts |= {f"{file.parent.parent.name}/msg/{file.stem}":
                  file.read_text(encoding="utf-8", errors="replace") for file in files}
    return texts


def _given_store(definitions: Mapping[str, str]) -> Any:
    """The standard messages and the given ones; of one name the standard message stays."""
    store = get_typestore(Stores.ROS2_HUMBLE)
    types: dict[str, Any] = {}
    for name, text in definitions.items():
        try:
            types |= get_types_from_msg(text, name)
        except Exception as error:      # the parser's own error type is not exported
            raise DataError(f"definition of {name}: {_one_line(error)}") from error
    store.register({name: kind for name, kind in types.items() if name not in store.fielddefs})
    return store


@contextmanager
def open_bag(path: str | Path,
             definitions: Mapping[str, str] | None = None) -> Iterator[Bag]:
    """Open a bag for reading.

    Args:
        path: rosbag2 folder; .mcap, .db3 or .bag file, also compressed as a whole by zstd; or a
            folder of such files without metadata.yaml.
        definitions: type name -> .msg text, for types that neither the bag nor the standard
            messages define; see `read_definitions`.
    Raises:
        DataError: the path is missing, no bag, or damaged so that no message can be found; a
            definition cannot be parsed.
    """
    path = Path(path)
    given = _given_store(definitions) if definitions else None
    losses: list[str] = []
    with ExitStack() as stack:
        sources = _open_sources(path, stack, losses)
        for line in losses:
            _log.warning(line)
        yield Bag(path, sources, losses, given)


def _open_sources(path: Path, stack: ExitStack, losses: list[str]) -> list[_Source]:
    try:
        if not path.is_dir():
            return [_open_file(path, stack, losses)]
        files = sorted(f for f in path.iterdir() if f.is_file() and _looks_like_bag(f))
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}, {_EXPECTED}") from error
    if (path / "metadata.yaml").exists():
        try:
            return [_Whole(path, stack)]
        except Exception as error:      # metadata of any form may be wrong; the files still count
            reason = _one_line(error)
        if not files:
            raise DataError(f"{path}: {reason}, {_EXPECTED}")
        losses.append(f"{path}: {reason}; read file by file instead")
    if not files:
        raise DataError(f"{path}: holds no metadata.yaml and no recording, {_EXPECTED}")
    sources: list[_Source] = []
    for file in files:
        try:
            sources.append(_open_file(file, stack, losses))
        except (DataError, OSError) as error:
            losses.append(str(error))
    if not sources:
        raise DataError(losses[-1])
    return sources


def _looks_like_bag(file: Path) -> bool:
    names = [file.suffix, Path(file.stem).suffix]
    return any(suffix in _SUFFIXES.values() for suffix in names)


def _open_file(file: Path, stack: ExitStack, losses: list[str]) -> _Source:
    """One storage file: through rosbags, or if it is damaged through the salvager."""
    kind = bag_salvage.storage_kind(file)
    if kind == "zstd":
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="bag_"))
        packed, file = file, Path(folder) / file.stem
        if problem := bag_salvage.unpack_zstd(packed, file):
            losses.append(problem)
        kind = bag_salvage.storage_kind(file)
    if kind == "sqlite3" and bag_salvage.has_wal(file):
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="bag_"))
        file = bag_salvage.absorb_wal(file, Path(folder))
    if kind not in _SUFFIXES:
        raise DataError(f"{file}: {kind}, {_EXPECTED}")
    if file.suffix != _SUFFIXES[kind]:
        raise DataError(f"{file}: a {kind} recording by another name, "
                        f"expected a name ending in {_SUFFIXES[kind]}")
    try:
        return _Whole(file, stack)
    except Exception as error:      # what rosbags refuses, for whatever reason, may be salvaged
        reason = _one_line(error)
    salvage = stack.enter_context(bag_salvage.salvage(file, kind))
    if not salvage.entries:
        raise DataError(f"{file}: {reason}; no message found in {file.stat().st_size} bytes, "
                        f"expected a {kind} recording")
    losses.append(f"{file}: {reason}; {len(salvage.entries)} messages recovered, {salvage.lost}")
    return _Salvaged(salvage)


def _qos_profiles(recorded: Any) -> tuple[QosProfile, ...]:
    return tuple(QosProfile(q.reliability.name.lower(), q.durability.name.lower(),
                            q.history.name.lower(), q.depth) for q in recorded)


class _Whole:
    """An undamaged recording, through rosbags' AnyReader."""

    def __init__(self, path: Path, stack: ExitStack):
        # Only bags older than ROS 2 Iron lack definitions, so Humble's messages stand in.
        self._standard = get_typestore(Stores.ROS2_HUMBLE)
        self._reader = stack.enter_context(
            AnyReader([path], default_typestore=self._standard))
        self._store = self._reader.typestore
        if not self._reader.is2:
            self._store = _cdr_typestore(self._store.fielddefs, self._standard)
        counts: Counter[tuple[str, str]] = Counter()
        qos: dict[tuple[str, str], list[QosProfile]] = {}
        for c in self._reader.connections:
            counts[c.topic, c.msgtype] += c.msgcount
            if hasattr(c.ext, "offered_qos_profiles"):
                profiles = _qos_profiles(c.ext.offered_qos_profiles)
            else:
                durability = "transient_local" if c.ext.latching else "volatile"
                profiles = (QosProfile("reliable", durability, "unknown", 0),)
            known = qos.setdefault((c.topic, c.msgtype), [])
            known += [p for p in profiles if p not in known]
        self.topics = [Topic(name, kind, count, tuple(qos[name, kind]))
                       for (name, kind), count in counts.items()]
        self.start_ns = self._reader.start_time
        self.end_ns = self._reader.end_time - 1

    def messages(self, names: Collection[str], start_ns: int) -> Iterator[RawMessage]:
        connections = [c for c in self._reader.connections if c.topic in names]
        if not connections:
            return
        for c, stamp_ns, data in self._reader.messages(connections, start=start_ns):
            if not self._reader.is2:
                data = _cdr_from_ros1(self._store, data, c.msgtype)
            yield RawMessage(c.topic, c.msgtype, stamp_ns, bag_salvage.unpacked(bytes(data)))

    def typestore(self, type_name: str) -> Any:
        return _store_with(type_name, self._store, self._standard)


class _Salvaged:
    """What is left of a damaged recording."""

    def __init__(self, salvage: bag_salvage.Salvage):
        self._salvage = salvage
        self._standard = get_typestore(Stores.ROS2_HUMBLE)
        self._store = salvage.typestore()
        if salvage.is_ros1:
            self._store = _cdr_typestore(self._store.fielddefs, self._standard)
        counts = Counter(entry.channel for entry in salvage.entries)
        self.topics = [Topic(c.topic, c.type, counts[key], _qos_profiles(c.qos))
                       for key, c in salvage.channels.items()]
        self.start_ns = salvage.entries[0].log_time_ns
        self.end_ns = salvage.entries[-1].log_time_ns

    def messages(self, names: Collection[str], start_ns: int) -> Iterator[RawMessage]:
        for entry in self._salvage.entries:
            channel = self._salvage.channels[entry.channel]
            if channel.topic not in names or entry.log_time_ns < start_ns:
                continue
            data = self._salvage.read(entry)
            if self._salvage.is_ros1:
                data = _cdr_from_ros1(self._store, data, channel.type)
            yield RawMessage(channel.topic, channel.type, entry.log_time_ns,
                             bag_salvage.unpacked(data))

    def typestore(self, type_name: str) -> Any:
        return _store_with(type_name, self._store, self._standard)


def _store_with(type_name: str, *stores: Any) -> Any:
    return next((store for store in stores
                 if store is not None and type_name in store.fielddefs), None)


def _cdr_typestore(definitions: Any, standard: Any) -> Any:
    """ROS 1 definitions with ROS 2's Header.

    The converter drops the header's `seq` by itself and then goes by the definition, so that with
    ROS 1's Header, which has `seq`, it refuses every message with a stamp.
    """
    header = "std_msgs/msg/Header"
    store = get_typestore(Stores.EMPTY)
    store.register({**definitions, header: standard.fielddefs[header]})
    return store


def _cdr_from_ros1(store: Any, data: bytes, type_name: str) -> bytes:
    """CDR bytes; empty where the message does not fit its definition."""
    try:
        return bytes(store.ros1_to_cdr(data, type_name))
    except Exception:       # generated converters raise anything on damaged bytes
        return b""
