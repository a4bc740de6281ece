"""The values passed between the stages. No ROS, no model code, no behaviour beyond shape checks.

Axes follow REP-103 (x forward, y left, z up), frames REP-105. Transforms are named target first:
`map_from_base` maps points of `base_link` into `map`. Stamps are integer nanoseconds.
"""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field

import numpy as np

HISTORY_LENGTH = 16          # ego poses, t0 - 1.5 s .. t0
HORIZON_LENGTH = 64          # waypoints, t0 + 0.1 s .. t0 + 6.4 s
STEP_NS = 100_000_000        # 0.1 s between two poses, frames or waypoints
STEP_S = 0.1


class Reason(str, enum.Enum):
    """Why an input was dropped, a plan degraded or a cycle given up. Values appear in messages."""

    # inputs
    NO_CAMERA = "no camera image received"
    CAMERAS_MISSING = "cameras missing"
    CAMERA_LATE = "camera late"
    CAMERA_DECODE = "camera image refused"
    NO_ODOMETRY = "no odometry received"
    ODOMETRY_STALE = "odometry stale"
    ODOMETRY_GAP = "odometry gap"
    ODOMETRY_INVALID = "odometry invalid"
    HISTORY_SHORT = "ego history too short"
    WRONG_FRAME = "odometry frame unexpected"
    OUT_OF_ORDER = "stamp out of order"
    SUPERSEDED = "superseded by a newer frame"
    TIME_JUMP = "time jumped"
    NO_CLOCK = "no clock yet"
    # planning
    DEADLINE_MISSED = "deadline missed"
    PLAN_NAN = "plan not finite"
    PLAN_OVER_LIMIT = "plan over limits"
    PLAN_TOO_OLD = "plan too old"
    PLAN_LEFT = "vehicle off the plan"
    DRAFT_FAILED = "draft failed"
    NO_MODEL = "no model loaded"
    MODEL_FAILED = "model failed"
    REASONING_UNFINISHED = "reasoning unfinished"


@dataclass(frozen=True)
class Refusal:
    """A typed 'no': what could not be used and why. Returned, not raised, by the stages."""

    reason: Reason
    detail: str

    def __str__(self) -> str:
        return f"{self.reason.value}: {self.detail}"


class PlannerState(enum.IntEnum):
    """What state the planner is in."""

    WAITING = 0          # inputs have not yet arrived, or no clock
    PLANNING = 1         # plans are made, every input present
    DEGRADED = 2         # plans are made, but see the reasons
    BLOCKED = 3          # no plan can be made, see the reasons


@dataclass(frozen=True)
class Deadline:
    """A moment on the monotonic clock after which a stage gives up and says so."""

    monotonic_s: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """The deadline `seconds` from now."""
        return cls(time.monotonic() + seconds)

    @classmethod
    def never(cls) -> Deadline:
        """For offline use: no deadline."""
        return cls(float("inf"))

    @property
    def remaining_s(self) -> float:
        """Seconds left, negative once passed."""
        return self.monotonic_s - time.monotonic()

    @property
    def passed(self) -> bool:
        """Whether the moment is behind us."""
        return self.remaining_s <= 0.0


@dataclass(frozen=True)
class OdometrySample:
    """One odometry message, reduced.

    Attributes:
        stamp_ns: header stamp.
        position: (3,) float64, metres, of `base_link` in `frame_id`.
        quaternion_xyzw: (4,) float64, unit norm, rotation `frame_id` from `base_link`.
        linear_velocity: (3,) float64, m/s, in `base_link`.
        angular_velocity: (3,) float64, rad/s, in `base_link`.
    """

    stamp_ns: int
    position: np.ndarray
    quaternion_xyzw: np.ndarray
    linear_velocity: np.ndarray
    angular_velocity: np.ndarray


@dataclass(frozen=True)
class CameraFrame:
    """One decoded image.

    Attributes:
        slot: index of the camera slot, 0..N-1 as configured.
        stamp_ns: header stamp.
        image: (H, W, 3) uint8, RGB.
    """

    slot: int
    stamp_ns: int
    image: np.ndarray


@dataclass(frozen=True)
class EgoHistory:
    """16 past poses at 10 Hz, oldest first, in the ego frame at t0 (last pose is the identity).

    Attributes:
        stamp_ns: t0.
        positions: (16, 3) float64, metres.
        rotations: (16, 3, 3) float64, base(t0) from base(t).
        map_from_base: (4, 4) float64, pose at t0 in the odometry's frame.
        speed_mps: forward speed at t0 from the odometry twist (interpolated).
        yaw_rate_rps: yaw rate at t0 from the odometry twist (interpolated).
    """

    stamp_ns: int
    positions: np.ndarray
    rotations: np.ndarray
    map_from_base: np.ndarray
    speed_mps: float
    yaw_rate_rps: float

    def __post_init__(self) -> None:
        assert self.positions.shape == (HISTORY_LENGTH, 3), self.positions.shape
        assert self.rotations.shape == (HISTORY_LENGTH, 3, 3), self.rotations.shape
        assert self.map_from_base.shape == (4, 4), self.map_from_base.shape


@dataclass(frozen=True)
class Observation:
    """All that one planning cycle sees, anchored at t0.

    Attributes:
        stamp_ns: t0, the anchor camera's stamp.
        frame_id: fixed frame of `history.map_from_base` (usually `map`).
        history: ego motion up to t0.
        frames: per camera slot, 4 frames oldest first; None where no frame was within tolerance.
        degraded: reasons that do not forbid planning (a missing camera, a late one).
        route_text: navigation instruction, e.g. "Turn right in 30m"; empty for none.
    """

    stamp_ns: int
    frame_id: str
    history: EgoHistory
    frames: tuple[tuple[CameraFrame | None, ...], ...]
    degraded: tuple[Refusal, ...] = ()
    route_text: str = ""


@dataclass(frozen=True)
class Trajectory:
    """A planned motion in the ego frame at t0. Row 0 is the pose at t0, row i is t0 + 0.1 i s.

    N is 65 as planned; fewer, but at least 2, once what has passed is cropped (reanchor.py), and
    t0 is then the moment of row 0.

    Attributes:
        positions: (N, 2) float64, metres, x forward and y left.
        yaw_rad: (N,) float64, heading relative to t0.
        speed_mps: (N,) float64, signed along the heading.
        acceleration_mps2: (N,) float64, along the heading; the last row repeats the one before.
        curvature_1pm: (N,) float64; the last row repeats the one before.
    """

    positions: np.ndarray
    yaw_rad: np.ndarray
    speed_mps: np.ndarray
    acceleration_mps2: np.ndarray
    curvature_1pm: np.ndarray

    def __post_init__(self) -> None:
        n = len(self.positions)
        assert 2 <= n <= HORIZON_LENGTH + 1, n
        assert self.positions.shape == (n, 2), self.positions.shape
        for name in ("yaw_rad", "speed_mps", "acceleration_mps2", "curvature_1pm"):
            assert getattr(self, name).shape == (n,), (name, getattr(self, name).shape)

    @property
    def yaw_rate_rps(self) -> np.ndarray:
        """(N,) float64, rad/s."""
        return self.curvature_1pm * self.speed_mps

    @property
    def time_from_start_ns(self) -> np.ndarray:
        """(N,) int64, nanoseconds after t0."""
        return np.arange(len(self.positions), dtype=np.int64) * STEP_NS


class TokenOrigin(enum.IntEnum):
    """Which part wrote a reasoning token."""

    DELIBERATIVE = 0     # plain target decoding
    ROUTINE = 1          # proposed by the draft, accepted by the target
    RECOVERED = 2        # the target's own token after a rejected draft token
    BONUS = 3            # the target's token after a wholly accepted block
    TEMPORAL = 4         # proposed from the previous cycle's text, accepted
    CORPUS = 5           # proposed from the corpus, accepted


@dataclass(frozen=True)
class Reasoning:
    """The chain of causation and how it was written.

    Attributes:
        text: the sentence, without special tokens; empty when the planner does not reason.
        token_ids: generated ids, stop tokens included.
        token_texts: one string a token.
        origins: one origin a token.
        rounds: target passes spent on the text.
        proposed: draft tokens put to the target.
        accepted: draft tokens the target accepted.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    token_texts: tuple[str, ...] = ()
    origins: tuple[TokenOrigin, ...] = ()
    rounds: int = 0
    proposed: int = 0
    accepted: int = 0

    @property
    def tokens_per_target_pass(self) -> float:
        """Tokens committed per target pass, bonus included; 0 when nothing was generated."""
        return len(self.token_ids) / self.rounds if self.rounds else 0.0


class PlanStatus(enum.IntEnum):
    """What kind of plan this is."""

    OK = 0               # the model's plan, every input present
    DEGRADED = 1         # the model's plan, but see the reasons
    KINEMATIC = 2        # the kinematic fallback
    LAST_VALID = 3       # an earlier plan, re-anchored
    STOP = 4             # a stopping plan
    REFUSED = 5          # no plan: see the reasons


@dataclass(frozen=True)
class StageTimings:
    """Wall time of each stage, milliseconds; zero for a stage that did not run."""

    encode_ms: float = 0.0
    prefill_ms: float = 0.0
    reason_ms: float = 0.0
    act_ms: float = 0.0
    total_ms: float = 0.0


@dataclass(frozen=True)
class Plan:
    """The result of one cycle.

    Attributes:
        plan_id: 16 bytes, unique; a re-anchored plan keeps it.
        stamp_ns: moment of the trajectory's row 0: t0 of the observation it was made from, or
            later, when it was re-anchored.
        frame_id: fixed frame of `map_from_base`.
        map_from_base: (4, 4) float64, pose at `stamp_ns`.
        trajectory: the motion in the ego frame at `stamp_ns`.
        status, reasons: what kind of plan, and why it is not better.
        reasoning: the text and its statistics.
        timings: per stage.
        planner: name of what made it ("kinematic", "nano", ...).
        reanchored_from_ns: t0 of the observation, of a re-anchored plan; None otherwise.
    """

    plan_id: bytes
    stamp_ns: int
    frame_id: str
    map_from_base: np.ndarray
    trajectory: Trajectory
    status: PlanStatus
    reasons: tuple[Refusal, ...] = ()
    reasoning: Reasoning = field(default_factory=Reasoning)
    timings: StageTimings = field(default_factory=StageTimings)
    planner: str = "kinematic"
    reanchored_from_ns: int | None = None

    @property
    def observed_ns(self) -> int:
        """t0 of the observation it was made from: what its age counts from."""
        return self.stamp_ns if self.reanchored_from_ns is None else self.reanchored_from_ns
