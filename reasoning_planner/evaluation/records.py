"""What a run leaves behind: one JSON line for every plan and every planner status.

The recorder node appends them while the planner runs; reports read them without ROS. Floats keep
their exact value through the file. Knows no messages, no bags and no metrics.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Iterable, Mapping, Union

import numpy as np

from ..conversions import poses_in_map
from ..datatypes import Plan, PlanStatus, TokenOrigin
from ..errors import DataError

STAGES = ("encode", "prefill", "reason", "act", "total")
STATES = ("WAITING", "PLANNING", "DEGRADED", "BLOCKED")


@dataclass(frozen=True, eq=False)
class PlanRecord:
    """One published plan with the reasoning that belongs to it.

    Attributes:
        stamp_ns: t0, the anchor camera's stamp.
        received_ns: when the recorder got the plan, on the recorder's monotonic clock.
        latency_ms: from the arrival of the image that set t0 to the publication of the plan.
        frame_id: frame of `positions` and `quaternions_xyzw`.
        plan_id: 32 hexadecimal digits.
        status: name of a `PlanStatus`.
        planner: what made the plan ("kinematic", "nano", ...).
        map_from_base: (4, 4) float64, pose at t0.
        time_from_start_ns: (N,) int64, strictly rising.
        positions: (N, 3) float64, metres, of the base frame in `frame_id`.
        quaternions_xyzw: (N, 4) float64, rotation `frame_id` from base.
        speed_mps, acceleration_mps2, yaw_rate_rps, curvature_1pm: (N,) float64.
        reasons: (reason, detail) pairs: why the plan is not better.
        text: the reasoning; empty when the planner does not reason.
        token_texts, origins: one string and one name of a `TokenOrigin` a token.
        rounds, proposed, accepted: target passes, draft tokens proposed and accepted.
        timings_ms: wall time of the `STAGES`; zero for a stage that did not run.
    """

    stamp_ns: int
    received_ns: int
    latency_ms: float
    frame_id: str
    plan_id: str
    status: str
    planner: str
    map_from_base: np.ndarray
    time_from_start_ns: np.ndarray
    positions: np.ndarray
    quaternions_xyzw: np.ndarray
    speed_mps: np.ndarray
    acceleration_mps2: np.ndarray
    yaw_rate_rps: np.ndarray
    curvature_1pm: np.ndarray
    reasons: tuple[tuple[str, str], ...] = ()
    text: str = ""
    token_texts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    rounds: int = 0
    proposed: int = 0
    accepted: int = 0
    timings_ms: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))

    def __post_init__(self) -> None:
        for problem in _plan_problems(self):
            raise DataError(f"plan record: {problem}")


@dataclass(frozen=True)
class StatusRecord:
    """One status of the planner node; counts run since its activation.

    Attributes:
        stamp_ns: node clock at publication.
        state: one of `STATES`.
        degraded: (reason, detail) pairs of the newest cycle.
        dropped_by_reason: how often each reason dropped an input or a cycle.
        camera_rates_hz, camera_ages_s: one value a camera slot; age -1 when nothing came.
        cycles, plans_published: planning cycles begun, trajectories published.
    """

    stamp_ns: int
    state: str
    degraded: tuple[tuple[str, str], ...] = ()
    dropped_by_reason: Mapping[str, int] = field(default_factory=dict)
    camera_rates_hz: tuple[float, ...] = ()
    camera_ages_s: tuple[float, ...] = ()
    cycles: int = 0
    plans_published: int = 0

    def __post_init__(self) -> None:
        if self.state not in STATES:
            raise DataError(f"status record: state: given {self.state!r}, "
                            f"expected one of {', '.join(STATES)}")


Record = Union[PlanRecord, StatusRecord]
KINDS: dict[str, type] = {"plan": PlanRecord, "status": StatusRecord}


@dataclass(frozen=True)
class Records:
    """A record file, in the order it was written; `cut` when its last line was incomplete."""

    plans: tuple[PlanRecord, ...]
    statuses: tuple[StatusRecord, ...]
    cut: bool = False


def _plan_problems(record: PlanRecord) -> list[str]:
    n = len(record.time_from_start_ns)
    shapes = {"map_from_base": (4, 4), "time_from_start_ns": (n,), "positions": (n, 3),
              "quaternions_xyzw": (n, 4), "speed_mps": (n,), "acceleration_mps2": (n,),
              "yaw_rate_rps": (n,), "curvature_1pm": (n,)}
    problems = [f"{name}: given shape {np.shape(getattr(record, name))}, expected {shape}"
                for name, shape in shapes.items() if np.shape(getattr(record, name)) != shape]
    if n and not np.all(np.diff(record.time_from_start_ns) > 0):
        problems.append("time_from_start_ns: expected strictly rising times")
    if record.status not in PlanStatus.__members__:
        problems.append(f"status: given {record.status!r}, expected one of "
                        + ", ".join(PlanStatus.__members__))
    unknown = [name for name in record.origins if name not in TokenOrigin.__members__]
    if unknown or len(record.origins) != len(record.token_texts):
        problems.append(f"origins: given {len(record.origins)} names, unknown {unknown}, expected "
                        f"{len(record.token_texts)} out of {', '.join(TokenOrigin.__members__)}")
    if set(record.timings_ms) != set(STAGES):
        problems.append(f"timings_ms: given {sorted(record.timings_ms)}, expected {STAGES}")
    return problems


def split_reason(text: str) -> tuple[str, str]:
    """"camera late: slot 1, 180 ms" -> ("camera late", "slot 1, 180 ms")."""
    reason, _, detail = text.partition(": ")
    return reason, detail


def record_of_plan(plan: Plan, received_ns: int = 0, latency_ms: float = 0.0) -> PlanRecord:
    """The record a plan leaves when it is made in this process, without messages."""
    positions, quaternions_xyzw = poses_in_map(plan)
    timings = {stage: float(getattr(plan.timings, f"{stage}_ms")) for stage in STAGES}
    return PlanRecord(
        stamp_ns=plan.stamp_ns, received_ns=received_ns, latency_ms=latency_ms,
        frame_id=plan.frame_id, plan_id=plan.plan_id.hex(), status=plan.status.name,
        planner=plan.planner, map_from_base=plan.map_from_base,
        time_from_start_ns=plan.trajectory.time_from_start_ns,
        positions=positions, quaternions_xyzw=quaternions_xyzw,
        speed_mps=plan.trajectory.speed_mps, acceleration_mps2=plan.trajectory.acceleration_mps2,
        yaw_rate_rps=plan.trajectory.yaw_rate_rps, curvature_1pm=plan.trajectory.curvature_1pm,
        reasons=tuple((r.reason.value, r.detail) for r in plan.reasons),
        text=plan.reasoning.text, token_texts=plan.reasoning.token_texts,
        origins=tuple(TokenOrigin(o).name for o in plan.reasoning.origins),
        rounds=plan.reasoning.rounds, proposed=plan.reasoning.proposed,
        accepted=plan.reasoning.accepted, timings_ms=timings)


def line_of(record: Record) -> str:
    """One JSON object in one line, without the line break."""
    kind = "plan" if isinstance(record, PlanRecord) else "status"
    values = {item.name: getattr(record, item.name) for item in dataclasses.fields(record)}
    return json.dumps({"kind": kind, **values}, default=_plain, ensure_ascii=False)


def _plain(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} does not fit into a record")


def record_of(line: str) -> Record:
    """The inverse of `line_of`.

    Raises:
        DataError: the line is not JSON, not a known record, or lacks a value.
    """
    try:
        values = json.loads(line)
    except ValueError as error:
        raise DataError(f"not JSON ({error})") from None
    kind = values.pop("kind", None) if isinstance(values, dict) else None
    if kind not in KINDS:
        raise DataError(f"kind: given {kind!r}, expected one of {', '.join(KINDS)}")
    items = {item.name: item for item in dataclasses.fields(KINDS[kind])}
    unknown = sorted(set(values) - set(items))
    missing = sorted(name for name in set(items) - set(values) if _is_required(items[name]))
    if unknown or missing:
        raise DataError(f"{kind} record: missing {missing}, unknown {unknown}")
    try:
        return KINDS[kind](**{name: _typed(items[name], value)
                              for name, value in values.items()})
    except (TypeError, ValueError) as error:
        raise DataError(f"{kind} record: {error}") from None


def _is_required(item: dataclasses.Field) -> bool:
    return item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING


def _typed(item: dataclasses.Field, value: Any) -> Any:
    """JSON's lists and numbers -> the type the field is declared with."""
    kind = str(item.type)
    if kind == "np.ndarray":
        dtype = np.int64 if item.name == "time_from_start_ns" else np.float64
        columns = {"positions": 3, "quaternions_xyzw": 4}.get(item.name)
        array = np.asarray(value, dtype=dtype)
        return array.reshape(-1, columns) if columns and array.size == 0 else array
    if kind.startswith("tuple[tuple"):
        return tuple((str(reason), str(detail)) for reason, detail in value)
    if kind.startswith("tuple"):
        return tuple(value)
    expected = {"int": int, "float": (int, float), "str": str}.get(kind, dict)
    if not isinstance(value, expected) or isinstance(value, bool):
        raise TypeError(f"{item.name}: given {value!r}, expected {kind}")
    return value


def write_records(path: Path, records: Iterable[Record]) -> None:
    """A new file with these records; an older one of that name is replaced."""
    text = "".join(line_of(record) + "\n" for record in records)
    Path(path).write_text(text, encoding="utf-8")


def append_record(path: Path, record: Record) -> None:
    """Add one record; a line that an earlier writer left incomplete is cut off first."""
    line = (line_of(record) + "\n").encode("utf-8")
    with open(path, "ab+") as file:
        _drop_incomplete_line(file)
        file.write(line)


def _drop_incomplete_line(file: Any) -> None:
    size = file.seek(0, os.SEEK_END)
    if size == 0:
        return
    file.seek(size - 1)
    if file.read(1) != b"\n":
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)


def read_records(path: Path) -> Records:
    """Read a record file; an incomplete last line is left out and told by `cut`.

    Raises:
        DataError: the file is missing or empty, or a line is damaged; names file and line.
    """
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}), "
                        "expected a file of plan records") from None
    *lines, tail = text.split(b"\n")
    records = [_record_at(path, number, line) for number, line in enumerate(lines, start=1)
               if line.strip()]
    if not records:
        raise DataError(f"{path}: holds no complete record, expected one JSON object a line")
    return Records(plans=tuple(r for r in records if isinstance(r, PlanRecord)),
                   statuses=tuple(r for r in records if isinstance(r, StatusRecord)),
                   cut=bool(tail.strip()))


def _record_at(path: Path, number: int, line: bytes) -> Record:
    try:
        return record_of(line.decode("utf-8"))
    except (DataError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: line {number}: {error}") from None
