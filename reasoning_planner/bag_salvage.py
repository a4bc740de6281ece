"""What can still be read of a damaged recording: mcap, sqlite3 or ROS 1, cut short or unfinished.

A recorder that loses power leaves a file without its index; a copy that breaks off leaves one
without its end. `salvage` walks such a file from the front and notes where every whole message
lies; the bytes are read when asked for. Used by `bags.py` alone, after the ordinary reader gave
up. Formats: mcap.dev/spec, wiki.ros.org/Bags/Format/2.0, sqlite.org/fileformat.html.
"""

from __future__ import annotations

import bz2
import importlib
import shutil
import sqlite3
import struct
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Callable, Iterator, NamedTuple

import lz4.frame
from rosbags.interfaces import Qos
from rosbags.rosbag2.metadata import parse_qos
from rosbags.typesys import Stores, get_types_from_idl, get_types_from_msg, get_typestore

try:
    zstd = importlib.import_module("compression.zstd")       # Python >= 3.14
except ImportError:
    zstd = importlib.import_module("backports.zstd")

_MAGIC = {b"\x89MCAP0\r\n": "mcap", b"SQLite format 3\x00": "sqlite3", b"#ROSBAG V2.0\n": "ros1",
          b"\x28\xb5\x2f\xfd": "zstd"}
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_COPY_BYTES = 1 << 20


class Channel(NamedTuple):
    """One topic of one publisher."""

    topic: str
    type: str
    definition: str = ""
    encoding: str = ""          # "ros2msg", "ros2idl" or empty
    qos: tuple[Qos, ...] = ()


class Entry(NamedTuple):
    """Where one message lies; sorts by time, then by place in the file."""

    log_time_ns: int
    order: int
    channel: int
    block: int                  # index of the block; -1 in a database
    offset: int                 # of the message in its unpacked block; of its cell in a database
    size: int


class Block(NamedTuple):
    """A stretch of the file that is unpacked at once."""

    offset: int
    size: int
    compression: str


@dataclass
class Salvage:
    """The index of a damaged file.

    Attributes:
        channels: key -> Channel.
        entries: every whole message, in time order.
        lost: what is known to be missing, a phrase.
        is_ros1: messages are in ROS 1's serialisation, not CDR.
        read: an entry -> its bytes.
    """

    channels: dict[int, Channel] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)
    lost: str = ""
    is_ros1: bool = False
    read: Callable[[Entry], bytes] = lambda entry: b""

    def typestore(self) -> Any:
        """The file's own definitions, as far as they parse."""
        types: dict[str, Any] = {}
        for channel in self.channels.values():
            parse = get_types_from_idl if channel.encoding == "ros2idl" else get_types_from_msg
            arguments = (channel.definition,) if channel.encoding == "ros2idl" else (
                channel.definition, channel.type)
            if not channel.encoding:
                continue
            try:
                types.update(parse(*arguments))
            except Exception:       # a garbled definition: its messages stay undecoded
                continue
        store = get_typestore(Stores.EMPTY)
        store.register(types)
        return store


def storage_kind(file: Path) -> str:
    """ "mcap", "sqlite3", "ros1" or "zstd" by the first bytes; else a phrase saying what it is."""
    with file.open("rb") as stream:
        head = stream.read(16)
    if not head:
        return "an empty file"
    return next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)),
                f"a file that starts with {head[:8]!r}")


def unpacked(data: bytes) -> bytes:
    """A message that was compressed on its own, unpacked. CDR never starts like zstd."""
    return zstd.decompress(data) if data.startswith(_ZSTD_MAGIC) else data


def unpack_zstd(packed: Path, target: Path) -> str:
    """Unpack a file as far as it goes; returns what went wrong, empty if nothing."""
    try:
        with zstd.open(packed, "rb") as source, target.open("wb") as sink:
            while piece := source.read(_COPY_BYTES):
                sink.write(piece)
    except (EOFError, zstd.ZstdError) as error:
        return f"{packed}: unpacked to {target.stat().st_size} bytes, then: {error or 'cut short'}"
    return ""


@contextmanager
def salvage(file: Path, kind: str) -> Iterator[Salvage]:
    """Index a damaged file; it stays open until the context ends."""
    with file.open("rb") as stream:
        if kind == "sqlite3":
            yield _scan_database(file, stream)
        else:
            yield (_scan_mcap if kind == "mcap" else _scan_ros1)(stream)


class _Blocks:
    """Blocks of a file; the one unpacked last is kept, since messages come block by block."""

    def __init__(self, stream: BinaryIO):
        self._stream = stream
        self._blocks: list[Block] = []
        self._latest: tuple[int, bytes] = (-1, b"")

    def add(self, block: Block) -> int:
        self._blocks.append(block)
        return len(self._blocks) - 1

    def unpack(self, index: int) -> bytes:
        if self._latest[0] != index:
            block = self._blocks[index]
            self._stream.seek(block.offset)
            self._latest = (index, _inflate(self._stream.read(block.size), block.compression))
        return self._latest[1]

    def read(self, entry: Entry) -> bytes:
        return self.unpack(entry.block)[entry.offset:entry.offset + entry.size]


def _inflate(data: bytes, compression: str) -> bytes:
    """Unpack as far as the bytes go; nothing if they are garbled."""
    decompressors = {"zstd": lambda: zstd.ZstdDecompressor(), "bz2": bz2.BZ2Decompressor,
                     "lz4": lz4.frame.LZ4FrameDecompressor}
    if compression in ("", "none"):
        return data
    if compression not in decompressors:
        return b""
    try:
        return decompressors[compression]().decompress(data)
    except (zstd.ZstdError, OSError, RuntimeError, EOFError):
        return b""


class _Cut(Exception):
    """The bytes end inside a record."""


class _Cursor:
    """Reads little-endian fields out of bytes."""

    def __init__(self, data: bytes, position: int = 0):
        self.data = data
        self.position = position

    def take(self, size: int) -> bytes:
        piece = self.data[self.position:self.position + size]
        if len(piece) < size:
            raise _Cut
        self.position += size
        return piece

    def number(self, form: str) -> int:
        return struct.unpack("<" + form, self.take(struct.calcsize("<" + form)))[0]

    def text(self) -> str:
        return self.take(self.number("I")).decode(errors="replace")


# --- mcap ---------------------------------------------------------------------------------------

_SCHEMA, _CHANNEL, _MESSAGE, _CHUNK, _DATA_END = 3, 4, 5, 6, 15
_MCAP_MESSAGE_HEAD = struct.Struct("<HIQQ")     # channel, sequence, log time, publish time


def _scan_mcap(stream: BinaryIO) -> Salvage:
    found = Salvage()
    blocks = _Blocks(stream)
    found.read = blocks.read
    schemas: dict[int, tuple[str, str, str]] = {}
    size = stream.seek(0, 2)
    position, cut_records = 8, 0
    while position + 9 <= size:
        stream.seek(position)
        opcode, length = struct.unpack("<BQ", stream.read(9))
        body = position + 9
        held = min(length, size - body)
        if opcode == _DATA_END:
            break
        if opcode == _CHUNK:
            stream.seek(body)
            block = _mcap_chunk(stream.read(min(held, 64)), body, held)
            if block is not None:
                index = blocks.add(block)
                cut_records += _scan_mcap_records(blocks.unpack(index), index, schemas, found)
        elif opcode in (_SCHEMA, _CHANNEL, _MESSAGE):
            index = blocks.add(Block(position, 9 + held, ""))
            cut_records += _scan_mcap_records(blocks.unpack(index), index, schemas, found)
        if held < length:
            found.lost = f"{length - held} bytes of the last record and all after it are lost"
        position = body + length
    else:
        found.lost = found.lost or f"all after byte {min(position, size)} is lost"
    found.lost = found.lost or f"{cut_records} records were unreadable"
    found.entries.sort()
    return found


def _mcap_chunk(head: bytes, body: int, held: int) -> Block | None:
    """The packed records of a chunk record whose body starts at `body`."""
    try:
        cursor = _Cursor(head, 8 + 8 + 8 + 4)       # times, unpacked size, checksum
        compression = cursor.text()
        packed_size = cursor.number("Q")
    except _Cut:
        return None
    return Block(body + cursor.position, min(packed_size, held - cursor.position), compression)


def _scan_mcap_records(data: bytes, block: int, schemas: dict[int, tuple[str, str, str]],
                       found: Salvage) -> int:
    """Note the schemas, channels and messages of one block; returns how many records were cut."""
    cursor = _Cursor(data)
    while cursor.position < len(data):
        try:
            opcode, length = cursor.number("B"), cursor.number("Q")
            start = cursor.position
            if opcode == _MESSAGE and start + length <= len(data) and length >= 22:
                channel, _, log_time, _ = _MCAP_MESSAGE_HEAD.unpack_from(data, start)
                if channel in found.channels:
                    found.entries.append(Entry(log_time, len(found.entries), channel, block,
                                               start + 22, length - 22))
            elif opcode in (_SCHEMA, _CHANNEL):
                _read_mcap_description(opcode, _Cursor(cursor.take(length)), schemas, found)
            if start + length > len(data):
                raise _Cut
            cursor.position = start + length
        except _Cut:
            return 1
    return 0


def _read_mcap_description(opcode: int, record: _Cursor, schemas: dict[int, tuple[str, str, str]],
                           found: Salvage) -> None:
    key = record.number("H")
    if opcode == _SCHEMA:
        schemas[key] = (record.text(), record.text(), record.text())
        return
    type_name, encoding, definition = schemas.get(record.number("H"), ("", "", ""))
    topic, _ = record.text(), record.text()
    metadata, end = {}, record.number("I") + record.position
    while record.position < end:
        name = record.text()
        metadata[name] = record.text()
    found.channels.setdefault(key, Channel(topic, type_name, definition, encoding,
                                           _qos(metadata.get("offered_qos_profiles", ""))))


def _qos(text: str) -> tuple[Qos, ...]:
    try:
        return tuple(parse_qos(text))
    except Exception:       # hand-made or garbled YAML: as if not recorded
        return ()


# --- ROS 1 --------------------------------------------------------------------------------------

_ROS1_MESSAGE, _ROS1_CHUNK, _ROS1_CONNECTION = 2, 5, 7


def _scan_ros1(stream: BinaryIO) -> Salvage:
    found = Salvage(is_ros1=True)
    blocks = _Blocks(stream)
    found.read = blocks.read
    size = stream.seek(0, 2)
    position = stream.seek(13)
    while position + 4 <= size:
        stream.seek(position)
        try:
            # Headers are some hundred bytes; a chunk's data is not read here.
            header, data_offset, length = _ros1_header(stream.read(4096))
        except _Cut:
            break
        body = position + data_offset
        held = max(0, min(length, size - body))
        if _ros1_op(header) == _ROS1_CHUNK:
            compression = header.get("compression", b"none").decode(errors="replace")
            index = blocks.add(Block(body, held, compression))
            _scan_ros1_records(blocks.unpack(index), index, found)
        elif _ros1_op(header) in (_ROS1_CONNECTION, _ROS1_MESSAGE):
            index = blocks.add(Block(position, data_offset + held, ""))
            _scan_ros1_records(blocks.unpack(index), index, found)
        position = body + length
    found.lost = (f"the file ends inside a record, {position - size} bytes of which are lost with "
                  "all that followed" if position > size else "whatever followed is lost")
    found.entries.sort()
    return found


def _ros1_header(data: bytes, position: int = 0) -> tuple[dict[str, bytes], int, int]:
    """The fields of a record's header, where its data starts, and how long the data is."""
    cursor = _Cursor(data, position)
    end = cursor.number("I") + cursor.position
    fields: dict[str, bytes] = {}
    while cursor.position < end:
        name, _, value = cursor.take(cursor.number("I")).partition(b"=")
        fields[name.decode(errors="replace")] = value
    length = cursor.number("I")
    return fields, cursor.position, length


def _ros1_op(header: dict[str, bytes]) -> int:
    return int.from_bytes(header.get("op", b"\0")[:1], "little")


def _scan_ros1_records(data: bytes, block: int, found: Salvage) -> None:
    position = 0
    while position < len(data):
        try:
            header, start, length = _ros1_header(data, position)
            if start + length > len(data):
                return
            key = int.from_bytes(header.get("conn", b""), "little")
            if _ros1_op(header) == _ROS1_CONNECTION:
                found.channels.setdefault(key, _ros1_channel(header, data[start:start + length]))
            elif _ros1_op(header) == _ROS1_MESSAGE and key in found.channels:
                time = header.get("time", b"").ljust(8, b"\0")
                seconds, nanoseconds = struct.unpack("<II", time)
                found.entries.append(Entry(seconds * 10**9 + nanoseconds, len(found.entries), key,
                                           block, start, length))
            position = start + length
        except (_Cut, struct.error):
            return


def _ros1_channel(header: dict[str, bytes], data: bytes) -> Channel:
    # The data of a connection record is a header without a length of its own.
    fields, _, _ = _ros1_header(struct.pack("<I", len(data)) + data + b"\0\0\0\0")
    package, _, name = fields.get("type", b"").decode(errors="replace").rpartition("/")
    definition = fields.get("message_definition", b"").decode(errors="replace")
    topic = header.get("topic", b"").decode(errors="replace")
    return Channel(topic, f"{package}/msg/{name}", definition, "ros2msg" if definition else "")


# --- sqlite3 ------------------------------------------------------------------------------------

_LEAF_PAGE = 0x0D
_NULL, _INT64, _FIRST_BLOB = 0, 6, 12
_KEY_KINDS = (1, 2, 3, 4, 8, 9)         # integers of 1 to 4 bytes, and the constants 0 and 1


def absorb_wal(file: Path, folder: Path) -> Path:
    """A copy of a database in `folder`, with the write-ahead log that lies beside it taken in."""
    copy = folder / file.name
    shutil.copyfile(file, copy)
    shutil.copyfile(f"{file}-wal", f"{copy}-wal")
    with closing(sqlite3.connect(copy)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return copy


def has_wal(file: Path) -> bool:
    """Whether a recorder left a write-ahead log that is not yet in the database."""
    wal = Path(f"{file}-wal")
    return wal.exists() and wal.stat().st_size > 0


def _scan_database(file: Path, stream: BinaryIO) -> Salvage:
    """Rows of `messages`, out of the leaf pages themselves.

    In a file cut short the pages that lead to the rows are missing, since a b-tree's inner pages
    are written after the leaves they split from: SQL finds nothing even where most rows are left.
    """
    found = Salvage(lost="what follows is lost")
    _read_database_topics(file, found)
    pages = _Pages(stream)
    for start in pages.message_cells():
        columns = pages.row(start)
        if columns is not None and columns[0] in found.channels:
            key, stamp_ns, data = columns
            found.entries.append(Entry(stamp_ns, len(found.entries), key, -1, start, len(data)))
    found.lost = (f"{pages.declared - pages.held} of {pages.declared} pages are lost"
                  if pages.held < pages.declared else "the rest is unreadable")
    found.entries.sort()

    def read(entry: Entry) -> bytes:
        columns = pages.row(entry.offset)
        assert columns is not None, "a row that was whole when indexed"
        return columns[2]
    found.read = read
    return found


def _read_database_topics(file: Path, found: Salvage) -> None:
    with closing(sqlite3.connect(f"file:{file}?mode=ro&immutable=1", uri=True)) as connection:
        try:
            # Without this, sqlite refuses a file shorter than its header says.
            connection.execute("PRAGMA writable_schema = ON")
            columns = [row[1] for row in connection.execute("PRAGMA table_info(topics)")]
            qos = "offered_qos_profiles" if "offered_qos_profiles" in columns else "''"
            definitions = _database_definitions(connection)
            for key, topic, kind, text in connection.execute(
                    f"SELECT id, name, type, {qos} FROM topics"):
                definition, encoding = definitions.get(kind, ("", ""))
                found.channels[key] = Channel(topic, kind, definition, encoding, _qos(text))
        except sqlite3.Error:
            return      # the topics read so far count; without any, no message is found either


def _database_definitions(connection: sqlite3.Connection) -> dict[str, tuple[str, str]]:
    """Type name -> (definition, encoding); empty for recorders older than ROS 2 Iron."""
    try:
        rows = connection.execute(
            "SELECT topic_type, encoded_message_definition, encoding FROM message_definitions")
        return {kind: (text, encoding) for kind, text, encoding in rows}
    except sqlite3.Error:
        return {}


class _Pages:
    """The pages of a database file, without its b-tree. Source: sqlite.org/fileformat.html 1.6."""

    def __init__(self, stream: BinaryIO):
        self._stream = stream
        head = stream.read(100).ljust(100, b"\0")
        size = int.from_bytes(head[16:18], "big")
        self._size = 65536 if size == 1 else max(size, 512)
        self._usable = self._size - head[20]
        self.declared = int.from_bytes(head[28:32], "big")
        self.held = stream.seek(0, 2) // self._size

    def message_cells(self) -> Iterator[int]:
        """File offsets of the cells on leaf pages (any table's)."""
        for number in range(1, self.held):      # page 1 holds the schema
            page = self._read(number * self._size, self._size)
            if page[0] != _LEAF_PAGE:
                continue
            count = int.from_bytes(page[3:5], "big")
            for i in range(min(count, (self._usable - 8) // 2)):
                offset = int.from_bytes(page[8 + 2 * i:10 + 2 * i], "big")
                if 8 <= offset < self._usable:
                    yield number * self._size + offset

    def row(self, start: int) -> tuple[int, int, bytes] | None:
        """(topic id, time, data) of the cell at `start`; None if cut or not of `messages`."""
        page_end = (start // self._size) * self._size + self._usable
        cell = self._read(start, page_end - start)
        size, at = _varint(cell, 0)
        _, at = _varint(cell, at)               # row id
        payload = self._payload(cell, at, size)
        if payload is None:
            return None
        header_size, at = _varint(payload, 0)
        kinds: list[int] = []
        while at < min(header_size, len(payload)):
            kind, at = _varint(payload, at)
            kinds.append(kind)
        is_message = (len(kinds) == 4 and kinds[0] == _NULL and kinds[1] in _KEY_KINDS
                      and kinds[2] == _INT64 and kinds[3] >= _FIRST_BLOB and kinds[3] % 2 == 0)
        if not is_message:
            return None
        width = kinds[1] if kinds[1] <= 4 else 0        # 8 and 9 stand for the values 0 and 1
        key = int.from_bytes(payload[at:at + width], "big") if width else kinds[1] - 8
        stamp_ns = int.from_bytes(payload[at + width:at + width + 8], "big", signed=True)
        return key, stamp_ns, payload[at + width + 8:]

    def _payload(self, cell: bytes, at: int, size: int) -> bytes | None:
        """A record, gathered from its overflow pages; None if one is missing."""
        limit = self._usable - 35
        local = size
        if size > limit:
            least = (self._usable - 12) * 32 // 255 - 23
            local = least + (size - least) % (self._usable - 4)
            local = local if local <= limit else least
        parts = [cell[at:at + local]]
        missing = size - len(parts[0])
        following = int.from_bytes(cell[at + local:at + local + 4], "big") if missing else 0
        while missing > 0:
            if not 1 < following <= self.held:
                return None
            page = self._read((following - 1) * self._size, self._usable)
            parts.append(page[4:4 + missing])
            missing -= len(parts[-1])
            following = int.from_bytes(page[:4], "big")
        return b"".join(parts)

    def _read(self, offset: int, size: int) -> bytes:
        self._stream.seek(offset)
        return self._stream.read(size)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A big-endian base-128 number and where it ends; 0 past the end of the data."""
    value = 0
    for i, byte in enumerate(data[at:at + 9]):
        if i == 8:
            return (value << 8) | byte, at + 9
        value = (value << 7) | (byte & 0x7F)
        if byte < 0x80:
            return value, at + i + 1
    return 0, len(data)
