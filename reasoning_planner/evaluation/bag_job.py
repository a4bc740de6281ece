"""One bag evaluated into one folder: what a process, or a machine of a cluster, does at a time.

The folder holds plans.csv (a row a cycle), plans.jsonl (the plans as records), plans/ (the plans
as a rosbag2), moments.json with the worst images, and result.json. The last is written last: a
folder with a result of the same fingerprint is finished, any other is done anew.
"""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, Mapping, Optional

import cv2
import numpy as np

from .. import path_drawing
from ..bags import Bag, open_bag
from ..config import ModelSettings, NodeConfig
from ..datatypes import Plan
from ..errors import DataError, ModelError
from ..model_loading import AbsentModel, load_model
from ..planner import Model, Planner
from .driving_log import Condition, DrivingLog
from .fingerprint import bag_id, fingerprint_of
from .latency import stage_quantiles
from .metrics import PoseTrack, track_of_odometry
from .moments import WorstMoments, write_moments
from .overlay_video import OverlayVideo
from .plan_bag import PlanBag
from .records import STAGES, PlanRecord, StatusRecord, line_of, record_of_plan
from .replay import Cycle, Replay, refusal_of_bag
from .score_table import csv_of, empty_row, table_of
from .scores import Scored, score_plan
from .stream import Event, Inputs
from .summary import replace_text
from .survey import Survey, base_from_frame, header_stamp_ns, optical, survey
from .topics import TopicMap, resolve

LOCKSTEP, REALTIME = "lockstep", "realtime"
FORMAT = 1                      # of the files in a bag's folder; others are done anew
_OTHER_CLOCK_MS = 3.6e6         # stamps so far from the log time are of another clock
_CLOCKS_APART_NS = 10_000_000_000
_TRACK_POINTS, _PATHS = 400, 60

Progress = Callable[[float], None]


@dataclass(frozen=True)
class Settings:
    """How bags are evaluated; the same for all bags of a run.

    Attributes:
        config: of the planner and the model; frames are taken from the bag.
        mode: "lockstep" or "realtime".
        topics: as `topics_file.read_topics` gives it; None: found by type.
        definitions: message definitions beside those of the bags.
        odometry_only: plan without cameras.
        samples: plans of the model for each observation.
        check_draft: let the model write every text without its draft too.
        period_s: least time from one t0 to the next in lockstep.
        rate: speed of the bag in real time mode.
        keep_times: keep measured times in lockstep too.
        log_stamps: take log times for stamps.
        video: write overlay.webm.
        log_condition: write driving_log.jsonl with this condition.
        vehicle_width_m: of the drawn path.
    """

    config: NodeConfig = field(default_factory=NodeConfig)
    mode: str = LOCKSTEP
    topics: Optional[Mapping[str, Any]] = None
    definitions: Mapping[str, str] = field(default_factory=dict)
    odometry_only: bool = False
    samples: int = 1
    check_draft: bool = False
    period_s: float = 0.0
    rate: float = 1.0
    keep_times: bool = False
    log_stamps: bool = False
    video: bool = False
    log_condition: Optional[Condition] = None
    vehicle_width_m: float = 1.85


@dataclass(frozen=True)
class Task:
    """One bag and the folder for what it gives.

    Attributes:
        name: unique in its run.
        fresh: do it even if the folder holds the result already.
        given: the bag's path on the command line, where `bag` is another way there.
    """

    bag: Path
    name: str
    folder: Path
    settings: Settings
    fresh: bool = False
    given: str = ""

    @property
    def label(self) -> str:
        """The bag as it was given: what messages and results call it."""
        return self.given or str(self.bag)


def evaluate_bag(task: Task, progress: Progress = lambda share: None) -> dict[str, Any]:
    """Evaluate one bag, unless its folder holds the result already.

    Returns:
        What result.json holds; beside it "reused" and the measured "times_ms", which it does not.
    Raises:
        DataError: the bag cannot be read, lacks an input, or gave no plan at all.
        ModelError: the model cannot be loaded.
    """
    cv2.setNumThreads(1)        # one bag, one process, one core
    identity = {**asdict(task.settings), "format": FORMAT, "name": task.name,
                "bag": bag_id(task.bag)}
    fingerprint = fingerprint_of(identity, task.settings.config.model.checkpoint)
    finished = None if task.fresh else read_result(task.folder)
    if finished is not None and finished["fingerprint"] == fingerprint:
        return {**finished, "reused": True, "times_ms": {}}
    shutil.rmtree(task.folder, ignore_errors=True)
    task.folder.mkdir(parents=True)
    try:
        with open_bag(task.bag, task.settings.definitions) as bag:
            run = _Run(task, bag)
            run.replay(progress)
            result, times = run.finish(fingerprint)
    except BaseException:
        shutil.rmtree(task.folder, ignore_errors=True)
        raise
    replace_text(task.folder / "result.json", json.dumps(result, indent=1, allow_nan=False) + "\n")
    return {**result, "reused": False, "times_ms": times}


def read_result(folder: Path) -> Optional[dict[str, Any]]:
    """The result of a finished folder, None for any other."""
    try:
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return result if isinstance(result, dict) and "fingerprint" in result else None


# One run

class _Run:
    """The work on one open bag."""

    def __init__(self, task: Task, bag: Bag):
        self._task, self._bag = task, bag
        self._bag_id = bag_id(task.bag)
        settings = task.settings
        cameras = settings.config.cameras
        found = survey(bag, task.label)
        self._topics = resolve(found, cameras.count, cameras.anchor, settings.topics,
                               settings.odometry_only)
        self._inputs = Inputs(bag, found, self._topics, settings.log_stamps)
        self._track = track_of_odometry(self._inputs.driven(), self._inputs.frame_id or "map")
        anchor_topic = self._topics.cameras[cameras.anchor] if self._topics.cameras else ""
        if anchor_topic and not settings.log_stamps:
            _require_one_clock(bag, found, anchor_topic, self._track)
        config = replace(settings.config, frame_id=self._track.frame_id,
                         base_frame=self._inputs.base_frame)
        self._planners = _planners(config, settings.samples, settings.check_draft)
        self._replay = Replay(config, self._planners, _slot_topics(self._topics), task.name,
                              settings.keep_times or settings.mode == REALTIME,
                              settings.period_s)
        self._camera, self._distortion = _camera(found, anchor_topic, self._inputs.base_frame)
        self._rows: list[dict[str, Any]] = []
        self._times: list[dict[str, float]] = []
        self._paths: list[np.ndarray] = []
        self._moments = WorstMoments()
        self._log = DrivingLog(settings.log_condition or Condition())

    def replay(self, progress: Progress) -> None:
        """Every cycle of the bag through the planner, into rows, records and pictures."""
        task, previous = self._task, None
        plans = PlanBag(task.folder / "plans")
        video = OverlayVideo(task.folder / "overlay.webm", self._camera,
                             task.settings.vehicle_width_m)
        with (task.folder / "plans.jsonl").open("w", encoding="utf-8") as records:
            records.write(line_of(self._status("WAITING")) + "\n")
            for cycle in self._cycles(progress):
                scored, kinematic = self._score(cycle, previous)
                if scored is None or kinematic is None:
                    continue
                previous = scored
                image = self._rectified(cycle.image)
                records.write(line_of(scored.plan) + "\n")
                plans.add(cycle.arrival_ns, scored.plan, kinematic, scored.beside_truth,
                          scored.row)
                self._moments.add(scored.row, scored.beside_truth, kinematic, image)
                if task.settings.video:
                    video.add(image, scored.plan, scored.beside_truth)
            records.write(line_of(self._status("PLANNING")) + "\n")
        plans.close()
        video.close()
        if previous is None:
            raise DataError(f"{task.label}: no plan in {self._replay.cycles} cycles: "
                            + refusal_of_bag(self._replay.dropped))

    def _cycles(self, progress: Progress) -> Iterator[Cycle]:
        settings = self._task.settings
        if settings.odometry_only:
            return self._replay.odometry_alone(self._watched(self._inputs.by_stamp(), progress))
        if settings.mode == REALTIME:
            return self._replay.realtime(self._watched(self._inputs.by_arrival(), progress),
                                         settings.rate)
        return self._replay.lockstep(self._watched(self._inputs.by_stamp(), progress))

    def _watched(self, events: Iterable[Event], progress: Progress) -> Iterator[Event]:
        """The events, telling which share of the bag's time they have come to."""
        start_ns, length_ns = self._bag.start_ns, max(self._bag.end_ns - self._bag.start_ns, 1)
        for event in events:
            progress((event.arrival_ns - start_ns) / length_ns)
            yield event

    def _score(self, cycle: Cycle, previous: Optional[Scored]
               ) -> tuple[Optional[Scored], Optional[PlanRecord]]:
        """Add the cycle's row; with a plan also its scores and the kinematic record."""
        row = self._row_of(cycle)
        self._rows.append(row)
        self._times.append({stage: getattr(cycle.measured, f"{stage}_ms") for stage in STAGES})
        if not cycle.plans or cycle.baseline is None:
            self._log_cycle(row, None)
            return None, None
        plans = cycle.plans
        if self._task.settings.check_draft:
            *plans, undrafted = plans
            row |= _without_draft(plans[0], undrafted)
        samples = [record_of_plan(plan, latency_ms=cycle.latency_ms) for plan in plans]
        kinematic = record_of_plan(cycle.baseline)
        scored = score_plan(row, samples, kinematic, previous, self._track)
        self._paths.append(scored.plan.positions[::5, :2])
        self._log_cycle(row, scored.plan)
        return scored, kinematic

    def _row_of(self, cycle: Cycle) -> dict[str, Any]:
        start_ns = int(self._track.stamps_ns[0])
        row = empty_row((self._task.name, self._bag_id), cycle.t0_ns, cycle.arrival_ns,
                        (cycle.t0_ns - start_ns) * 1e-9)
        age_ms = (cycle.arrival_ns - cycle.t0_ns) * 1e-6
        row["reasons"] = "; ".join(dict.fromkeys(r.reason.value for r in cycle.refusals))
        row["image_age_ms"] = (age_ms if abs(age_ms) < _OTHER_CLOCK_MS
                               and not self._task.settings.odometry_only else np.nan)
        row["odometry_age_ms"] = cycle.odometry_age_ms
        row["latency_ms"] = cycle.latency_ms or np.nan
        row["plan_age_ms"] = cycle.plan_age_ms or np.nan
        return row

    def _log_cycle(self, row: Mapping[str, Any], plan: Optional[PlanRecord]) -> None:
        self._log.add(row, plan, self._inputs.base_frame)

    def _rectified(self, image: Optional[np.ndarray]) -> Optional[np.ndarray]:
        if image is None or self._camera is None or not len(self._distortion):
            return image
        k = self._camera.scaled_to(image).k
        return cv2.undistort(np.ascontiguousarray(image), k, self._distortion)

    def _status(self, state: str) -> StatusRecord:
        planned = sum(row["planned"] for row in self._rows)
        stamp_ns = self._rows[-1]["stamp_ns"] if self._rows else int(self._track.stamps_ns[0])
        return StatusRecord(stamp_ns, state, dropped_by_reason=self._replay.dropped,
                            cycles=self._replay.cycles, plans_published=int(planned))

    def finish(self, fingerprint: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Write the tables; returns what result.json holds, and the measured times."""
        folder, settings = self._task.folder, self._task.settings
        replace_text(folder / "plans.csv", csv_of(table_of(self._rows)))
        write_moments(folder, self._moments.chosen())
        if settings.log_condition is not None:
            self._log.write(folder / "driving_log.jsonl")
        return self._result(fingerprint), stage_quantiles(self._times, STAGES)

    def _result(self, fingerprint: str) -> dict[str, Any]:
        model = self._planners[0].model
        steps = np.diff(self._track.positions[:, :2], axis=0)
        return {
            "fingerprint": fingerprint, "name": self._task.name, "bag": self._task.label,
            "bag_id": self._bag_id,
            "mode": "odometry only" if self._task.settings.odometry_only
            else self._task.settings.mode,
            "model": model.name if model else None,
            "runtime": getattr(model, "runtime_name", None) if model else None,
            "topics": {"odometry": self._topics.odometry,
                       "cameras": list(self._topics.cameras)},
            "frame_id": self._track.frame_id, "base_frame": self._inputs.base_frame,
            "notes": list(self._topics.notes), "losses": list(self._bag.losses),
            "duration_s": self._bag.duration_s, "start_ns": int(self._track.stamps_ns[0]),
            "driven_m": float(np.linalg.norm(steps, axis=1).sum()),
            "cycles": self._replay.cycles,
            "plans": int(sum(row["planned"] for row in self._rows)),
            "dropped_by_reason": self._replay.dropped,
            "passed": self._log.success if self._task.settings.log_condition else None,
            "camera": _plain_camera(self._camera),
            "vehicle_width_m": self._task.settings.vehicle_width_m,
            "track": _thinned(self._track.positions[:, :2], _TRACK_POINTS),
            "paths": [np.round(self._paths[i], 2).tolist() for i in _spread(
                len(self._paths), _PATHS)],
        }


def _planners(config: NodeConfig, samples: int, check_draft: bool) -> list[Planner]:
    """The planner under test, then the same model with other noise, then without its draft."""
    model = _loaded(config.model)
    models = [model] + [_with_noise(model, seed) for seed in range(1, samples)]
    if check_draft:
        models.append(_loaded(replace(config.model, proposer="none")))
    return [Planner(config, sample) for sample in models]


def _loaded(settings: ModelSettings) -> Optional[Model]:
    model = load_model(settings, lambda why: None)
    if isinstance(model, AbsentModel):
        raise ModelError(model.why)
    return model


def _without_draft(plan: Plan, undrafted: Plan) -> dict[str, float]:
    """Columns that say whether the draft changed the text, and what it saved."""
    if not plan.reasoning.rounds or not undrafted.reasoning.rounds:
        return {}
    differs = plan.reasoning.token_ids != undrafted.reasoning.token_ids
    return {"draft_mismatch": float(differs),
            "autoregressive_ms": undrafted.timings.reason_ms or np.nan}


def _with_noise(model: Any, seed: int) -> Any:
    """The same engine, frames and text, another plan: the expert starts from other noise."""
    other = copy.copy(model)
    other.config = replace(model.config, noise_seed=seed)
    return other


def _slot_topics(topics: TopicMap) -> list[str]:
    """A name for every camera slot, for refusals."""
    return [name or "not in the bag" for name in topics.cameras]


def _camera(found: Survey, topic: str,
            base_frame: str) -> tuple[Optional[path_drawing.Camera], np.ndarray]:
    """The anchor camera as pictures need it, and its distortion; None where it is not known."""
    none = (None, np.zeros(0))
    if not topic:
        return none
    shown = next(c for c in found.cameras if c.topic.name == topic)
    mounted = optical(base_from_frame(found.transforms, base_frame, shown.frame_id))
    calibration = shown.calibration
    if calibration is None or mounted is None or not calibration.is_pinhole or not (
            calibration.k[0, 0] > 0.0 and calibration.width and calibration.height):
        return none
    camera = path_drawing.Camera(calibration.k, mounted, (calibration.width, calibration.height))
    distortion = calibration.distortion
    return camera, distortion if distortion.any() else np.zeros(0)


def _require_one_clock(bag: Bag, found: Survey, topic: str, track: PoseTrack) -> None:
    """Images and odometry must be stamped by one clock.

    Raises:
        DataError: they are not.
    """
    stamped = {c.topic.name: c.stamped for c in found.cameras}[topic]
    raw = next(iter(bag.messages([topic])), None)
    if raw is None:
        return
    stamp_ns = header_stamp_ns(raw) if stamped else raw.log_time_ns
    first_ns, last_ns = int(track.stamps_ns[0]), int(track.stamps_ns[-1])
    apart_ns = max(first_ns - stamp_ns, stamp_ns - last_ns)
    if apart_ns > _CLOCKS_APART_NS:
        raise DataError(f"{found.bag_name}: {topic} begins {apart_ns * 1e-9:.0f} s outside of the "
                        "odometry by their stamps, expected one clock for both: --stamps log "
                        "takes the log times instead")


def _plain_camera(camera: Optional[path_drawing.Camera]) -> Optional[dict[str, Any]]:
    return None if camera is None else {
        "k": camera.k.tolist(), "base_from_camera": camera.base_from_camera.tolist(),
        "size": list(camera.size)}


def camera_of(plain: Optional[Mapping[str, Any]]) -> Optional[path_drawing.Camera]:
    """The camera of a result.json."""
    return None if plain is None else path_drawing.Camera(
        np.array(plain["k"]), np.array(plain["base_from_camera"]), tuple(plain["size"]))


def _thinned(points: np.ndarray, count: int) -> list[list[float]]:
    return np.round(points[_spread(len(points), count)], 2).tolist()


def _spread(length: int, count: int) -> np.ndarray:
    """Up to `count` indices spread over 0 .. length - 1, ends included."""
    return np.unique(np.linspace(0, max(length - 1, 0), min(count, length)).round().astype(int))
