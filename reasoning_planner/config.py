"""Settings of every stage: frozen dataclasses, ranges checked when made, unknown keys refused.

YAML files and ROS parameters use the same names, nested names joined by a dot.
"""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass, field
from typing import Any, Mapping

from .errors import ConfigError


def _between(problems: list[str], name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        problems.append(f"{name}: given {value!r}, expected {low} <= value <= {high}")


def _one_of(problems: list[str], name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        problems.append(f"{name}: given {value!r}, expected one of {', '.join(choices)}")


def _finish(problems: list[str]) -> None:
    if problems:
        raise ConfigError(problems)


@dataclass(frozen=True)
class HistoryConfig:
    """How 16 ego poses are read out of buffered odometry."""

    max_gap_s: float = 0.2          # widest bridge between two odometry samples
    max_extrapolation_s: float = 0.05   # how far t0 may lie beyond the newest sample
    buffer_s: float = 4.0           # how much odometry is kept

    def __post_init__(self) -> None:
        problems: list[str] = []
        _between(problems, "history.max_gap_s", self.max_gap_s, 0.01, 1.0)
        _between(problems, "history.max_extrapolation_s", self.max_extrapolation_s, 0.0, 0.2)
        _between(problems, "history.buffer_s", self.buffer_s, 2.0, 60.0)
        _finish(problems)


@dataclass(frozen=True)
class CamerasConfig:
    """Camera slots, in the model's order, and how frames are matched to t0."""

    count: int = 4                  # subscribed as ~/input/image0 .. image{count-1}
    anchor: int = 1                 # slot whose stamp is t0
    compressed: bool = False        # subscribe sensor_msgs/CompressedImage instead of Image
    tolerance_s: float = 0.05       # a frame serves a slot within this of its nominal time
    late_after_s: float = 0.15      # a newest frame older than this against t0 is called late
    buffer_frames: int = 16         # frames kept per camera

    def __post_init__(self) -> None:
        problems: list[str] = []
        _between(problems, "cameras.count", self.count, 1, 8)
        _between(problems, "cameras.anchor", self.anchor, 0, max(self.count - 1, 0))
        _between(problems, "cameras.tolerance_s", self.tolerance_s, 0.0, 0.5)
        _between(problems, "cameras.late_after_s", self.late_after_s, 0.0, 5.0)
        _between(problems, "cameras.buffer_frames", self.buffer_frames, 4, 256)
        _finish(problems)


@dataclass(frozen=True)
class KinematicConfig:
    """Constant curvature and acceleration, both dying away.

    The three fitted defaults are a compromise of two drives, mean ADE in metres at 1 / 2 / 3 s
    (constant velocity in brackets):
        KITTI right turn, 10 m/s, 51 poses   0.153 / 0.585 / 1.36   (0.779 / 2.89 / 6.55)
        comma2k19 highway, 60 s, tilt of
        the mount taken out                  0.036 / 0.135 / 0.325  (0.094 / 0.313 / 0.657)
    Acceleration decay 1 / 2 / 4 s gives 1.29 / 1.36 / 1.42 at 3 s on KITTI, 0.381 / 0.325 / 0.308
    on comma2k19; curvature decay 2 / 4 / 10 s gives 1.87 / 1.36 / 1.28 on KITTI and no difference
    on the highway; windows of 0.3 and 0.8 s are worse on comma2k19 (0.348, 0.367 at 3 s).
    """

    acceleration_decay_s: float = 2.0   # time constant of the acceleration
    curvature_decay_s: float = 4.0      # time constant of the curvature
    fit_window_s: float = 0.5           # history used for the present acceleration and curvature
    standing_speed_mps: float = 0.15    # slower than this is standing still
    max_curvature_1pm: float = 0.2      # a car's tightest turn; also tames yaw jitter at a crawl
    stop_deceleration_mps2: float = 2.5     # of a stopping plan

    def __post_init__(self) -> None:
        problems: list[str] = []
        _between(problems, "kinematic.acceleration_decay_s", self.acceleration_decay_s, 0.05, 60.0)
        _between(problems, "kinematic.curvature_decay_s", self.curvature_decay_s, 0.05, 60.0)
        _between(problems, "kinematic.fit_window_s", self.fit_window_s, 0.2, 1.5)
        _between(problems, "kinematic.standing_speed_mps", self.standing_speed_mps, 0.0, 1.0)
        _between(problems, "kinematic.max_curvature_1pm", self.max_curvature_1pm, 1e-3, 1.0)
        _between(problems, "kinematic.stop_deceleration_mps2", self.stop_deceleration_mps2,
                 0.1, 9.8)
        _finish(problems)


@dataclass(frozen=True)
class LimitsConfig:
    """Bounds of a plan that may be published (magnitudes)."""

    max_speed_mps: float = 45.0
    max_acceleration_mps2: float = 9.8      # the target's own bound, alpamayo 4.4
    max_curvature_1pm: float = 0.33
    max_lateral_acceleration_mps2: float = 9.8
    speed_mismatch_mps: float = 0.5         # |v0 - odometry| allowed, plus the share below
    speed_mismatch_share: float = 0.1

    def __post_init__(self) -> None:
        problems: list[str] = []
        for name, high in (("max_speed_mps", 100.0), ("max_acceleration_mps2", 20.0),
                           ("max_curvature_1pm", 1.0), ("max_lateral_acceleration_mps2", 20.0)):
            _between(problems, f"limits.{name}", getattr(self, name), 1e-3, high)
        _between(problems, "limits.speed_mismatch_mps", self.speed_mismatch_mps, 0.0, 10.0)
        _between(problems, "limits.speed_mismatch_share", self.speed_mismatch_share, 0.0, 1.0)
        _finish(problems)


POLICIES = ("kinematic", "last_valid", "stop")
# What drafts a text; see speculative.selection.
PROPOSERS = ("auto", "none", "corpus", "temporal", "flat_rope", "merged")


@dataclass(frozen=True)
class PoliciesConfig:
    """What is published when the model gives no plan that may be followed.

    "kinematic": go on as the vehicle moves now, motion dying away. "last_valid": the last good
    plan, re-anchored, up to `max_plan_age_s` of age, then a stop: what was planned with eyes open
    is safer than motion alone, and it ends. "stop": brake at once. The kinematic plan, where it is
    over a limit, becomes a stop too.
    """

    deadline_missed: str = "last_valid"     # also reasoning that the deadline cut off
    plan_not_finite: str = "last_valid"
    plan_over_limit: str = "last_valid"
    model_failed: str = "last_valid"        # engine error, or its process died

    def __post_init__(self) -> None:
        problems: list[str] = []
        for item in dataclasses.fields(self):
            _one_of(problems, f"policies.{item.name}", getattr(self, item.name), POLICIES)
        _finish(problems)


@dataclass(frozen=True)
class ReanchorConfig:
    """How a plan already made is moved to the vehicle's present pose, see actions/reanchor.py."""

    max_deviation_m: float = 3.0    # vehicle farther than this from the plan: it is not followed
    blend_s: float = 1.0            # the plan's start is drawn to the vehicle over this time

    def __post_init__(self) -> None:
        problems: list[str] = []
        _between(problems, "reanchor.max_deviation_m", self.max_deviation_m, 0.01, 100.0)
        _between(problems, "reanchor.blend_s", self.blend_s, 0.0, 6.0)
        _finish(problems)


@dataclass(frozen=True)
class VehicleConfig:
    """Size, for what is drawn and for Autoware's wheel angle."""

    width_m: float = 1.85
    front_m: float = 3.8                # from the base frame to the front end
    rear_m: float = 1.0                 # and to the rear end
    wheel_base_m: float = 0.0           # for Autoware's front wheel angle, 0: left at 0

    def __post_init__(self) -> None:
        problems: list[str] = []
        for name, low, high in (("width_m", 0.1, 10.0), ("front_m", 0.0, 50.0),
                                ("rear_m", 0.0, 50.0), ("wheel_base_m", 0.0, 20.0)):
            _between(problems, f"vehicle.{name}", getattr(self, name), low, high)
        _finish(problems)


@dataclass(frozen=True)
class PlannerConfig:
    """Everything `planner.plan` needs besides the observation."""

    history: HistoryConfig = field(default_factory=HistoryConfig)
    cameras: CamerasConfig = field(default_factory=CamerasConfig)
    kinematic: KinematicConfig = field(default_factory=KinematicConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    policies: PoliciesConfig = field(default_factory=PoliciesConfig)
    reanchor: ReanchorConfig = field(default_factory=ReanchorConfig)
    frame_id: str = "map"           # expected frame of the odometry, frame of the plan
    base_frame: str = "base_link"
    deadline_s: float = 0.1         # planning budget of one cycle
    max_plan_age_s: float = 2.0     # past t0; an older plan is replaced by a stop

    def __post_init__(self) -> None:
        problems: list[str] = []
        _between(problems, "max_plan_age_s", self.max_plan_age_s, 0.1, 6.0)
        _between(problems, "deadline_s", self.deadline_s, 0.001, 60.0)
        for name in ("frame_id", "base_frame"):
            if not getattr(self, name):
                problems.append(f"{name}: given an empty string, expected a frame name")
        _finish(problems)


@dataclass(frozen=True)
class ModelSettings:
    """Which model plans, and how it is asked; without a checkpoint the kinematic planner does."""

    checkpoint: str = ""                # directory or the name of a shipped one; empty: no model
    runtime: str = "ort"                # ort, torch or trt
    provider: str = "cpu"               # where ort (cpu, cuda, tensorrt) or torch (cpu, cuda) runs
    engines: str = ""                   # folder of build-engines; empty: the checkpoint's own
    threads: int = 1                    # of the engine, 0: its own choice
    camera_slots: tuple[int, ...] = (0, 1, 2, 3)    # slot of each camera the model knows, or -1
    max_new_tokens: int = 64            # of reasoning
    expert_steps: int = 0               # Euler steps of the action expert, 0: the checkpoint's
    noise_scale: float = 1.0            # of the noise a plan starts from, 0: its mean
    proposer: str = "auto"              # drafts the text: PROPOSERS; auto: what the checkpoint has
    num_speculative_tokens: int = 15    # drafted for one pass of the target, at most
    temperature: float = 0.0            # of the text, 0: greedy
    top_p: float = 0.98                 # of a text that is sampled
    prompt_version: str = "alpamayo-r1"

    def __post_init__(self) -> None:
        problems: list[str] = []
        _one_of(problems, "model.runtime", self.runtime, ("ort", "torch", "trt"))
        _one_of(problems, "model.provider", self.provider, ("cpu", "cuda", "tensorrt"))
        _between(problems, "model.threads", self.threads, 0, 256)
        _between(problems, "model.max_new_tokens", self.max_new_tokens, 1, 1024)
        _between(problems, "model.expert_steps", self.expert_steps, 0, 100)
        _between(problems, "model.noise_scale", self.noise_scale, 0.0, 10.0)
        _one_of(problems, "model.proposer", self.proposer, PROPOSERS)
        _between(problems, "model.num_speculative_tokens", self.num_speculative_tokens, 1, 63)
        _between(problems, "model.temperature", self.temperature, 0.0, 10.0)
        _between(problems, "model.top_p", self.top_p, 1e-6, 1.0)
        _one_of(problems, "model.prompt_version", self.prompt_version,
                ("alpamayo-r1", "alpamayo-1.5"))
        if len(self.camera_slots) != 4 or not all(-1 <= slot < 8 for slot in self.camera_slots):
            problems.append(f"model.camera_slots: given {list(self.camera_slots)}, expected 4 "
                            "camera slots, -1 where there is no such camera")
        _finish(problems)


@dataclass(frozen=True)
class NodeConfig(PlannerConfig):
    """The planner's settings and those of the node around it: `config/planner.param.yaml`."""

    autostart: bool = True              # configure and activate without a lifecycle manager
    isolation: str = "process"          # the model runs in a process of its own, or in a "thread"
    load_timeout_s: float = 300.0       # for the model's process to load it
    image_reliability: str = "auto"     # reliable, best_effort, or auto: reliable where offered
    odometry_reliability: str = "auto"  # likewise
    settle_s: float = 0.06              # how long a cycle waits for inputs of the same moment
    silence_s: float = 0.5              # an input older than this is called silent in the status
    publish_rate_hz: float = 10.0       # the last plan is repeated at this rate until a newer one
    status_period_s: float = 0.5        # status heartbeat, also while no cycle runs
    diagnostics_period_s: float = 0.5   # of /diagnostics
    route_text: str = ""                # navigation instruction, e.g. "Turn right in 30m"
    route_source: str = "parameter"     # route_text, or a topic: text, lanelet_route
    check_calibration: bool = True      # camera_info and /tf_static against the model's cameras
    output_format: str = "native"       # or autoware: its Trajectory and CandidateTrajectories
    vehicle: VehicleConfig = field(default_factory=VehicleConfig)
    model: ModelSettings = field(default_factory=ModelSettings)

    def __post_init__(self) -> None:
        problems: list[str] = []
        try:
            super().__post_init__()
        except ConfigError as error:
            problems.extend(error.problems)
        _one_of(problems, "isolation", self.isolation, ("process", "thread"))
        _one_of(problems, "output_format", self.output_format, ("native", "autoware"))
        _one_of(problems, "route_source", self.route_source,
                ("parameter", "text", "lanelet_route"))
        for name in ("image_reliability", "odometry_reliability"):
            _one_of(problems, name, getattr(self, name), ("auto", "reliable", "best_effort"))
        for name, low, high in (
                ("load_timeout_s", 1.0, 3600.0), ("settle_s", 0.0, 0.5), ("silence_s", 0.05, 10.0),
                ("publish_rate_hz", 1.0, 50.0), ("status_period_s", 0.05, 1.0),
                ("diagnostics_period_s", 0.1, 10.0)):
            _between(problems, name, getattr(self, name), low, high)
        _finish(problems)


def _coerce(name: str, kind: Any, value: Any, problems: list[str]) -> Any:
    """An int stands for a float; every other difference of type is a problem."""
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if typing.get_origin(kind) is tuple:
        return _coerce_tuple(name, kind, value, problems)
    if kind is not Any and (not isinstance(value, kind)
                            or (kind is not bool and isinstance(value, bool))):
        problems.append(f"{name}: given {value!r} ({type(value).__name__}), "
                        f"expected {kind.__name__}")
    return value


def _coerce_tuple(name: str, kind: Any, value: Any, problems: list[str]) -> tuple:
    """Any sequence of the right kind of item becomes a tuple."""
    item = typing.get_args(kind)[0]
    if isinstance(value, (str, bytes)) or not hasattr(value, "__iter__"):
        problems.append(f"{name}: given {value!r} ({type(value).__name__}), "
                        f"expected a list of {item.__name__}")
        return ()
    return tuple(_coerce(f"{name}[{i}]", item, entry, problems) for i, entry in enumerate(value))


def _build(cls: type, mapping: Mapping[str, Any], prefix: str, problems: list[str]) -> Any:
    hints = typing.get_type_hints(cls)
    known = {f.name for f in dataclasses.fields(cls)}
    values: dict[str, Any] = {}
    for key, value in mapping.items():
        name = f"{prefix}{key}"
        if key not in known:
            problems.append(f"{name}: unknown parameter, expected one of "
                            + ", ".join(prefix + k for k in sorted(known)))
        elif dataclasses.is_dataclass(hints[key]):
            if isinstance(value, Mapping):
                values[key] = _build(hints[key], value, f"{name}.", problems)
            else:
                problems.append(f"{name}: given {value!r}, expected a group of parameters")
        else:
            values[key] = _coerce(name, hints[key], value, problems)
    usable = {k: v for k, v in values.items() if v is not None}
    try:
        return cls(**usable)
    except ConfigError as error:
        problems.extend(error.problems)
    except TypeError:
        assert problems, f"{cls.__name__} refused {usable!r} without a stated problem"
    return None


def from_mapping(cls: type, mapping: Mapping[str, Any]) -> Any:
    """Build a config dataclass from nested plain values.

    Args:
        cls: one of the dataclasses above.
        mapping: nested names and values, as read from YAML or from ROS parameters.
    Raises:
        ConfigError: with every problem found: name, given, expected.
    """
    problems: list[str] = []
    config = _build(cls, mapping, "", problems)
    _finish(problems)
    return config


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """{"history.max_gap_s": 0.2} -> {"history": {"max_gap_s": 0.2}}, the form YAML has.

    What is named below a value, as "deadline_s.x" beside "deadline_s", keeps its whole name: no
    dataclass knows it.
    """
    tree: dict[str, Any] = {}
    for name, value in sorted(flat.items()):        # a value before what is named below it
        *groups, leaf = name.split(".")
        node = tree
        for group in groups:
            node = node.setdefault(group, {})
            if not isinstance(node, dict):
                tree[name] = value
                break
        else:
            node[leaf] = value
    return tree


def flattened(config: Any, prefix: str = "") -> dict[str, Any]:
    """A config dataclass -> {"history.max_gap_s": 0.2, ...}, in declaration order."""
    flat: dict[str, Any] = {}
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        name = f"{prefix}{item.name}"
        if dataclasses.is_dataclass(value):
            flat.update(flattened(value, f"{name}."))
        else:
            flat[name] = value
    return flat
