"""One run as one HTML page: records of what was planned beside the bag of what was driven.

`make_report` reads both, writes `report.html` and `summary.json`. The page needs no network: the
pictures are inlined. Needs no ROS. Numbers come from `summary.py`, pictures from `drawing.py`,
the layout from `templates/report.html.j2`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterable, Mapping, Optional, Sequence

import cv2
import numpy as np

from .. import bags, path_drawing
from ..datatypes import OdometrySample
from ..errors import DataError, MissingDependencyError
from ..path_drawing import Camera
from ..perception import frames
from . import drawing
from .drawing import Series
from .metrics import HORIZONS_S, PoseTrack, horizon_errors, track_of_odometry
from .records import STAGES, PlanRecord, Records, read_records
from .summary import (ScoredPlan, build_summary, by_horizon, replace_text, score_plans,
                      write_summary)
from .survey import (CAMERA_INFO, PINHOLE_MODELS, nearest_info, static_topics, transforms_of,
                     vector)

MOMENTS = 8
VEHICLE_WIDTH_M = 1.85
ODOMETRY = "nav_msgs/msg/Odometry"
IMAGES = ("sensor_msgs/msg/CompressedImage", "sensor_msgs/msg/Image")
PLANNER_NOTES = {
    "kinematic": "Kinematic planner: goes on from the ego motion alone. No model, no reasoning, "
                 "the camera is not used.",
    "nano": "nano stand-in: a small model with Alpamayo's layout, trained on a synthetic world. "
            "It is not an Alpamayo checkpoint.",
}


@dataclass(frozen=True)
class Drive:
    """What the report needs of a bag.

    Attributes:
        name: of the bag.
        track: the driven poses.
        image_topic: shown camera; empty when the bag has no images.
        image_stamps_ns: (I,) int64, header stamps of its images, rising.
        camera: calibration, None when the bag does not give one that can be used.
        distortion: (D,) float64 coefficients to undo before drawing; empty for rectified images.
        losses: what could not be read of the bag.
    """

    name: str
    track: PoseTrack
    image_topic: str
    image_stamps_ns: np.ndarray
    camera: Optional[Camera]
    distortion: np.ndarray
    losses: tuple[str, ...]


def make_report(records_path: Path, bag_path: Path, out_dir: Path,
                run_info: Mapping[str, Any]) -> dict[str, Any]:
    """Write `out_dir`/summary.json and `out_dir`/report.html.

    Args:
        records_path: JSON lines, as `records.append_record` leaves them.
        bag_path: the drive the records were made from.
        run_info: what neither file knows; every key may be missing. "bag_name", "planner",
            "planner_note", "model", "runtime", "hardware", "lossless_mismatches",
            "autoregressive_ms", "vehicle_width_m", "odometry_topic", "image_topic"; other keys
            with plain values are shown among what was run.
    Returns:
        The summary, as written.
    Raises:
        DataError: a file is missing or damaged, or the bag has no odometry.
    """
    records = read_records(records_path)
    drive = load_drive(bag_path, run_info.get("odometry_topic"), run_info.get("image_topic"))
    scored = score_plans(records.plans, drive.track)
    summary = build_summary(records, scored, run_info)
    page = render_page(records, drive, scored, summary, run_info, Path(bag_path))
    replace_text(Path(out_dir) / "report.html", page)
    write_summary(Path(out_dir) / "summary.json", summary)
    return summary


# The bag

def load_drive(bag_path: Path, odometry_topic: Optional[str] = None,
               image_topic: Optional[str] = None) -> Drive:
    """Read poses, calibration and image stamps; without names, the first topic of each type."""
    with bags.open_bag(bag_path) as bag:
        odometry = _pick(bag, (ODOMETRY,), odometry_topic)
        images = _pick(bag, IMAGES, image_topic)
        if odometry is None:
            raise DataError(f"{bag_path}: no topic of type {ODOMETRY}, "
                            "expected one with the poses that were driven")
        track, base_frame = _read_track(bag, odometry)
        stamps, image_frame = _read_image_stamps(bag, images)
        camera, distortion = _read_camera(bag, images, image_frame, base_frame)
        return Drive(name=Path(bag_path).name, track=track, image_topic=images or "",
                     image_stamps_ns=stamps, camera=camera, distortion=distortion,
                     losses=bag.losses)


def _pick(bag: bags.Bag, types: Sequence[str], wanted: Optional[str]) -> Optional[str]:
    if wanted is not None:
        return wanted
    return next((topic.name for kind in types for topic in bag.topics.values()
                 if topic.type == kind and topic.count), None)


def _decoded(bag: bags.Bag, topics: Iterable[str]) -> Iterable[Any]:
    return (bag.decode(raw) for raw in bag.messages(list(topics)))


def _stamp_ns(header: Any) -> int:
    return int(header.stamp.sec) * 1_000_000_000 + int(header.stamp.nanosec)


def _read_track(bag: bags.Bag, topic: str) -> tuple[PoseTrack, str]:
    """The driven poses and the name of the base frame; poses that are no rotation are left out."""
    samples, header_frame, base_frame = [], "", ""
    for message in _decoded(bag, [topic]):
        header_frame, base_frame = message.header.frame_id, message.child_frame_id
        rotation = frames.normalised_quaternion(vector(message.pose.pose.orientation, "xyzw"))
        position = vector(message.pose.pose.position)
        if isinstance(rotation, np.ndarray) and np.isfinite(position).all():
            samples.append(OdometrySample(
                _stamp_ns(message.header), position, rotation,
                vector(message.twist.twist.linear), vector(message.twist.twist.angular)))
    return track_of_odometry(samples, header_frame), base_frame or "base_link"


def _read_image_stamps(bag: bags.Bag, topic: Optional[str]) -> tuple[np.ndarray, str]:
    headers = [m.header for m in _decoded(bag, [topic])] if topic else []
    stamps = np.unique(np.array([_stamp_ns(h) for h in headers], dtype=np.int64))
    return stamps, headers[0].frame_id if headers else ""


def _read_camera(bag: bags.Bag, image_topic: Optional[str], image_frame: str,
                 base_frame: str) -> tuple[Optional[Camera], np.ndarray]:
    """The shown camera's calibration, and its distortion; None when the bag does not tell."""
    info_topic = nearest_info(image_topic or "", [
        t.name for t in bag.topics.values() if t.type == CAMERA_INFO and t.count])
    info = next(iter(_decoded(bag, [info_topic])), None) if info_topic else None
    topics = static_topics(bag)
    transforms = transforms_of(_decoded(bag, topics) if topics else ())
    base_from_camera = _base_from_frame(transforms, base_frame, image_frame)
    if info is None or base_from_camera is None or info.distortion_model not in PINHOLE_MODELS:
        return None, np.zeros(0)
    distortion = np.asarray(info.d, dtype=np.float64)
    camera = Camera(k=np.asarray(info.k, dtype=np.float64).reshape(3, 3),
                    base_from_camera=base_from_camera, size=(int(info.width), int(info.height)))
    return camera, distortion if distortion.any() else np.zeros(0)


def _base_from_frame(transforms: Mapping[str, tuple[str, np.ndarray]], base_frame: str,
                     frame: str) -> Optional[np.ndarray]:
    """Compose the transforms from a frame up to the base; None when they do not meet."""
    base_from_frame = np.eye(4)
    for _ in range(len(transforms) + 1):
        if frame == base_frame:
            return base_from_frame
        if frame not in transforms:
            return None
        frame, parent_from_child = transforms[frame]
        base_from_frame = frames.compose(parent_from_child, base_from_frame)
    return None


def read_images(bag_path: Path, drive: Drive, stamps_ns: Iterable[int]) -> dict[int, np.ndarray]:
    """The images of these header stamps, (H, W, 3) uint8 RGB; what cannot be decoded is absent."""
    wanted, images = set(stamps_ns), {}
    if not drive.image_topic or not wanted:
        return images
    with bags.open_bag(bag_path) as bag:
        for message in _decoded(bag, [drive.image_topic]):
            stamp_ns = _stamp_ns(message.header)
            if stamp_ns in wanted and stamp_ns not in images:
                image = _pixels(message)
                if image is not None and drive.camera is not None and len(drive.distortion):
                    image = cv2.undistort(image, drive.camera.k, drive.distortion)
                if image is not None:
                    images[stamp_ns] = image
    return images


def _pixels(message: Any) -> Optional[np.ndarray]:
    """A decoded CompressedImage or Image message -> RGB; None for an encoding not known here."""
    if hasattr(message, "format"):
        image = cv2.imdecode(np.asarray(message.data, dtype=np.uint8), cv2.IMREAD_COLOR)
        return None if image is None else cv2.cvtColor(image, cv2.COLOR_BGR2RGB)
    channels = {"rgb8": 3, "bgr8": 3, "mono8": 1}.get(message.encoding)
    if channels is None or message.data.size < message.height * message.step:
        return None
    rows = np.asarray(message.data).reshape(-1, message.step)[:message.height]
    image = rows[:, :message.width * channels].reshape(message.height, message.width, channels)
    return image[..., ::-1].copy() if message.encoding == "bgr8" else np.repeat(
        image, 3 // channels, axis=2)


# The page

def render_page(records: Records, drive: Drive, scored: Sequence[ScoredPlan],
                summary: Mapping[str, Any], run_info: Mapping[str, Any], bag_path: Path) -> str:
    """The whole page as HTML text."""
    start_ns = int(min(drive.track.stamps_ns[0], *drive.image_stamps_ns[:1]))
    width_m = float(run_info.get("vehicle_width_m", VEHICLE_WIDTH_M))
    chosen = choose_moments(scored, drive.image_stamps_ns, summary)
    images = read_images(bag_path, drive, [s.plan.stamp_ns for s in chosen])
    speed_range = _speed_range(scored)
    moments = [moment_view(s, images.get(s.plan.stamp_ns), drive.camera, width_m, speed_range,
                           start_ns) for s in chosen]
    return template("report.html.j2").render(
        summary=summary, run=run_rows(records, drive, summary, run_info),
        notes=planner_notes(summary["planners"], run_info), horizon=headline_horizon(summary),
        horizons=list(by_horizon(HORIZONS_S)), moments=moments,
        has_camera=drive.camera is not None, speed_range=speed_range,
        speed_stops=[f"rgb{stop}" for stop in path_drawing.SPEED_STOPS],
        map_svg=map_view(scored, chosen, drive.track), error_svg=error_view(scored),
        histograms=latency_views(records.plans), stages=STAGES,
        strip_svg=strip_view(records, drive, start_ns), bag_losses=drive.losses,
        reasons=Counter(reason for p in records.plans for reason, _ in p.reasons).most_common(),
        statuses=list(summary["plans_by_status"].items()),
        states=sorted({s.state for s in records.statuses}), bag_name=_bag_name(drive, run_info),
        duration_s=float(drive.track.stamps_ns[-1] - start_ns) * 1e-9)


def template(name: str) -> Any:
    """A template of this package, its filters set.

    Raises:
        MissingDependencyError: Jinja is not installed.
    """
    try:
        import jinja2
        from markupsafe import Markup
    except ImportError as error:
        raise MissingDependencyError(f"jinja2 is not installed ({error}), needed to write reports:"
                                     " pip install 'reasoning_planner[report]'") from error
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(str(Path(__file__).parent / "templates")),
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    environment.filters.update(number=number, svg=Markup)
    return environment.get_template(name)


def number(value: Optional[float], digits: Optional[int] = None, unit: str = "") -> str:
    """For people: three significant digits or a fixed count of decimals; a dash for null."""
    if value is None:
        return "–"
    if digits is None:
        digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    if abs(value) < 0.5 * 10.0 ** -digits:
        value = 0.0
    return f"{value:.{digits}f}{chr(0x202f) + unit if unit else ''}"


def headline_horizon(summary: Mapping[str, Any]) -> Optional[str]:
    """The furthest horizon that at least a third of the plans reach; None without any."""
    samples = summary["samples"]
    most = max(samples.values())
    reached = [name for name, count in samples.items() if count and 3 * count >= most]
    return reached[-1] if reached else None


def planner_notes(planners: Sequence[str], run_info: Mapping[str, Any]) -> list[str]:
    """One plain sentence on each planner, so that nobody takes a stand-in for the real thing."""
    if "planner_note" in run_info:
        return [str(run_info["planner_note"])]
    notes = {name: next((note for key, note in PLANNER_NOTES.items() if key in name.lower()),
                        f"Planner: {name}.") for name in planners}
    return list(dict.fromkeys(notes.values()))


def _bag_name(drive: Drive, run_info: Mapping[str, Any]) -> str:
    return str(run_info.get("bag_name", drive.name))


def run_rows(records: Records, drive: Drive, summary: Mapping[str, Any],
             run_info: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(name, value) rows of what was run, on what."""
    hardware = summary["hardware"] if isinstance(summary["hardware"], Mapping) else {}
    machine = [hardware.get("cpu"), _with_unit(hardware.get("cores"), "cores"),
               _with_unit(hardware.get("memory_gib"), "GiB memory")]
    system = [hardware.get("os"), _with_unit(hardware.get("python"), "Python", before=True)]
    rows = [
        ("Drive", _bag_name(drive, run_info)),
        ("Camera", drive.image_topic or "none"),
        ("Planner", str(run_info.get("planner") or ", ".join(summary["planners"]) or "none")),
        ("Model", str(summary["model"] or "none")),
        ("Runtime", str(summary["runtime"] or "none")),
        ("Machine", ", ".join(str(v) for v in machine if v)),
        ("GPU", str(hardware.get("gpu") or "none")),
        ("System", ", ".join(str(v) for v in system if v)),
    ]
    known = {"bag_name", "planner", "planner_note", "model", "runtime", "hardware",
             "autoregressive_ms", "speculative_ms", "odometry_topic", "image_topic",
             "vehicle_width_m", "lossless_mismatches"}
    rows += [(key.replace("_", " ").capitalize(), str(value)) for key, value in run_info.items()
             if key not in known and isinstance(value, (str, int, float))]
    if records.cut:
        rows.append(("Records", "the last line was incomplete and is left out"))
    return rows


def _with_unit(value: Any, unit: str, before: bool = False) -> Optional[str]:
    if not value:
        return None
    return f"{unit} {value}" if before else f"{value} {unit}"


# Views: each makes one part of the page from plain data

def choose_moments(scored: Sequence[ScoredPlan], image_stamps_ns: np.ndarray,
                   summary: Mapping[str, Any]) -> list[ScoredPlan]:
    """Up to `MOMENTS` plans spread over the drive, the one with the largest error among them."""
    pictured = [s for s in scored if s.plan.stamp_ns in set(image_stamps_ns.tolist())]
    candidates = sorted(pictured or scored, key=lambda s: s.plan.stamp_ns)
    if not candidates:
        return []
    rows = np.unique(np.linspace(0, len(candidates) - 1, MOMENTS).round().astype(int))
    worst = _worst(candidates, headline_horizon(summary))
    if worst is not None:
        rows[np.argmin(np.abs(rows - worst))] = worst
    return [candidates[row] for row in np.unique(rows)]


def _worst(scored: Sequence[ScoredPlan], horizon: Optional[str]) -> Optional[int]:
    if horizon is None:
        return None
    ade = horizon_errors([s.errors for s in scored], (float(horizon),)).each_ade_m[:, 0]
    return int(np.nanargmax(ade)) if np.isfinite(ade).any() else None


def _speed_range(scored: Sequence[ScoredPlan]) -> tuple[float, float]:
    """Whole m/s around all planned and driven speeds: one colour scale for the whole page."""
    speeds = [v for s in scored for v in (s.plan.speed_mps, s.truth_speed_mps)]
    low, high = drawing.padded(speeds, least=2.0) if speeds else (0.0, 10.0)
    return float(np.floor(max(low, 0.0))), float(np.ceil(high))


def moment_view(scored: ScoredPlan, image: Optional[np.ndarray], camera: Optional[Camera],
                width_m: float, speed_range: tuple[float, float],
                start_ns: int) -> dict[str, Any]:
    """Everything the gallery shows of one plan."""
    plan = scored.plan
    errors = by_horizon(horizon_errors([scored.errors]).ade_m)
    baseline = by_horizon(horizon_errors([scored.baseline_errors]).ade_m)
    reached = [name for name, value in errors.items() if np.isfinite(value)]
    if image is not None and camera is not None:
        image = path_drawing.draw_plan(
            image, camera, plan.map_from_base, plan.positions, plan.quaternions_xyzw,
            plan.speed_mps, plan.time_from_start_ns, scored.truth, width_m, speed_range)
    return {
        "time_s": (plan.stamp_ns - start_ns) * 1e-9,
        "image": None if image is None else drawing.jpeg_uri(image),
        "above": above_view(scored), "speed": speed_view(scored, speed_range),
        "plan": plan, "horizon": reached[-1] if reached else None,
        "ade_m": errors[reached[-1]] if reached else None,
        "baseline_ade_m": baseline[reached[-1]] if reached else None,
        "speed_mps": float(plan.speed_mps[0]),
        "tokens": list(zip(plan.token_texts, (o.lower() for o in plan.origins))),
    }


def above_view(scored: ScoredPlan, kinematic: Optional[np.ndarray] = None) -> str:
    """Bird's-eye view in the ego frame at t0, forward up; a dot at each whole second.

    Args:
        kinematic: (N, 3) the kinematic plan, drawn too.
    """
    base_from_map = frames.inverse(scored.plan.map_from_base)
    whole = scored.plan.time_from_start_ns % 1_000_000_000 == 0
    series = []
    lines = [(scored.baseline, "baseline"), (scored.plan.positions, "plan"),
             (scored.truth, "truth")]
    if kinematic is not None and len(kinematic) == len(whole):
        lines.insert(1, (kinematic, "kinematic"))
    for points, css in lines:
        ahead, left = frames.transform_points(base_from_map, points)[:, :2].T
        series.append(Series(-left, ahead, css))
        series.append(Series(-left[whole], ahead[whole], css, dots=True))
    return drawing.map_chart(series, "metres to the right", "metres ahead",
                             "Planned and driven path from above", width=460.0,
                             height_range=(360.0, 420.0))


def speed_view(scored: ScoredPlan, speed_range: tuple[float, float]) -> str:
    """Planned and driven speed over the horizon."""
    seconds = scored.plan.time_from_start_ns * 1e-9
    driven = scored.truth_speed_mps
    start = np.full(len(seconds), driven[0])
    return drawing.line_chart(
        [Series(seconds, start, "baseline"), Series(seconds, scored.plan.speed_mps, "plan"),
         Series(seconds, driven, "truth")],
        "seconds after t0", "m/s", "Planned and driven speed", x_range=(0.0, seconds[-1]),
        y_range=speed_range, size=(460.0, 420.0))


def map_view(scored: Sequence[ScoredPlan], chosen: Sequence[ScoredPlan],
             track: PoseTrack) -> str:
    """The whole drive from above with every plan, the gallery's moments numbered."""
    plans = [Series(s.plan.positions[:, 0], s.plan.positions[:, 1], "plan faint") for s in scored]
    driven = Series(track.positions[:, 0], track.positions[:, 1], "truth")
    marks = [(s.plan.map_from_base[0, 3], s.plan.map_from_base[1, 3], str(i))
             for i, s in enumerate(chosen, start=1)]
    return drawing.map_chart([*plans, driven], f"x in {track.frame_id}, m",
                             f"y in {track.frame_id}, m", "The whole drive from above", marks,
                             height_range=(280.0, 460.0), framed=driven)


def error_view(scored: Sequence[ScoredPlan]) -> Optional[str]:
    """Mean displacement over the horizon, each plan faint behind it; None without any sample."""
    grid = tuple(np.round(np.arange(1, 65) * 0.1, 1))
    ours, theirs = (horizon_errors(errors, grid) for errors in (
        [s.errors for s in scored], [s.baseline_errors for s in scored]))
    if not ours.samples.any():
        return None
    last = float(grid[int(np.flatnonzero(ours.samples)[-1])])
    seconds = np.array(grid)
    singles = [Series(seconds, row, "plan faint") for row in ours.each_fde_m]
    return drawing.line_chart(
        [*singles, Series(seconds, theirs.fde_m, "baseline"), Series(seconds, ours.fde_m, "plan")],
        "seconds after t0", "metres from the driven position", "Error over the horizon",
        x_range=(0.0, last),
        y_range=(0.0, drawing.padded([ours.each_fde_m, theirs.fde_m], [0.0])[1]),
        size=(560.0, 460.0))


def latency_views(plans: Sequence[PlanRecord]) -> list[tuple[str, str]]:
    """(heading, SVG) of the measured times there are."""
    times = (("Planning, whole cycle", np.array([p.timings_ms["total"] for p in plans])),
             ("Image arrival to published plan", np.array([p.latency_ms for p in plans])))
    return [(name, drawing.histogram(values[values > 0.0], "ms", name, "plan", height=200.0))
            for name, values in times if (values > 0.0).any()]


def strip_view(records: Records, drive: Drive, start_ns: int) -> str:
    """What came, what was planned and what state the node was in, over the drive's time."""
    end_ns = int(drive.track.stamps_ns[-1])
    planned = {p.stamp_ns: p for p in records.plans}
    frames_row = [(stamp, stamp, "st planned" if stamp in planned else "st unplanned",
                   "planned" if stamp in planned else "no plan from this image")
                  for stamp in drive.image_stamps_ns.tolist()]
    plans_row = [(p.stamp_ns, p.stamp_ns, f"st {p.status.lower()}",
                  "; ".join([p.status, *(f"{r}: {d}" for r, d in p.reasons)]))
                 for p in records.plans]
    states_row = [(s.stamp_ns, s.stamp_ns, f"st {s.state.lower()}",
                   "; ".join([s.state, *(f"{r}: {d}" for r, d in s.degraded)]))
                  for s in records.statuses if start_ns <= s.stamp_ns <= end_ns + 500_000_000]
    rows = [(name, _cells(row, start_ns)) for name, row in (
        ("camera images", frames_row), ("plans, at their t0", plans_row),
        ("node state", states_row)) if row]
    return drawing.time_strip(rows, (0.0, max((end_ns - start_ns) * 1e-9, 0.1) + 0.2),
                              "seconds of the drive", "What happened when")


def _cells(row: Sequence[tuple[int, int, str, str]],
           start_ns: int) -> list[tuple[float, float, str, str]]:
    """Cells as long as the usual distance to the next one, times in seconds of the drive."""
    stamps = np.array([cell[0] for cell in row])
    usual_ns = float(np.median(np.diff(stamps))) if len(stamps) > 1 else 1e8
    return [((begin - start_ns) * 1e-9, (begin - start_ns + usual_ns) * 1e-9, css,
             f"{(begin - start_ns) * 1e-9:.2f} s: {text}") for begin, _, css, text in row]
