"""Replay recorded drives through the planner and report how good its plans are. No ROS needed.

Reads rosbag2 (sqlite3, mcap, zstd) and ROS 1 bags. OUT holds report.html (self-contained),
summary.json, plans.csv, and a folder for every bag with the plans as an mcap for Foxglove beside
the bag. A bag that was finished before, with the same settings and the same code, is not done
again.

lockstep: a plan for every image of the anchor camera, as if planning took no time; the same bag
gives the same files. realtime: the bag's clock runs on while the planner plans, with the times it
really takes here; images that come meanwhile are dropped, as on the vehicle.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Iterator, Mapping, Optional, Sequence

import yaml

from ..bags import read_definitions
from ..config import NodeConfig, from_mapping
from ..errors import ConfigError, DataError
from .aggregate import summarise
from .bag_job import LOCKSTEP, REALTIME, Settings, Task
from .driving_log import Condition
from .evaluation_report import write_report
from .executors import Done, folder_of, run_here, run_in_processes, run_on_ray
from .latency import quantiles
from .score_table import csv_of, joined, read_csv
from .summary import replace_text, write_summary
from .topics_file import read_topics


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `reasoning-planner evaluate`."""
    parser.add_argument("bags", nargs="+", type=Path, metavar="BAG",
                        help="rosbag2 folder, .mcap, .db3 or ROS 1 .bag file")
    parser.add_argument("--out", type=Path, default=Path("out/evaluate"), metavar="DIR",
                        help="folder for results (default %(default)s)")
    parser.add_argument("--topics", type=Path, metavar="FILE",
                        help="YAML: which topic is which input; without it they are found by "
                             "type, and where that leaves a choice a proposal is printed")
    parser.add_argument("--msg-path", type=Path, action="append", default=[], metavar="DIR",
                        help="folder with PACKAGE/msg/*.msg, for types the bag does not define; "
                             "may be given more than once")
    parser.add_argument("--mode", choices=(LOCKSTEP, REALTIME), default=LOCKSTEP,
                        help="default %(default)s")
    parser.add_argument("--odometry-only", action="store_true",
                        help="no cameras: the kinematic planner on the odometry alone")
    _add_planner_arguments(parser)
    _add_work_arguments(parser)
    parser.add_argument("--video", action="store_true",
                        help="also a film of every bag with the paths drawn in (overlay.webm)")
    parser.add_argument("--jsonl", action="store_true",
                        help="also results as driving_log_replayer_v2 writes them")
    parser.add_argument("--pass-ade-m", type=float, default=Condition.ade_m, metavar="M",
                        help="with --jsonl: a plan passes up to this ADE at 3 s (default "
                             "%(default)s)")
    parser.add_argument("--pass-rate", type=float, default=Condition.pass_rate, metavar="PERCENT",
                        help="with --jsonl: of plans that must pass (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")


def _add_planner_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE",
                        help="parameter file of the node; the same planner settings")
    parser.add_argument("--checkpoint", metavar="NAME",
                        help="model: a folder, or a name that comes with the package, as nano; "
                             "\"none\" for the kinematic planner (default: as --config says, "
                             "else none)")
    parser.add_argument("--noise-scale", type=float, metavar="S",
                        help="of the noise a plan of the model starts from; 0: its mean")
    parser.add_argument("--deadline", type=float, metavar="S",
                        help="of a cycle in real time mode (default: as --config says, else "
                             f"{NodeConfig.deadline_s} s)")
    parser.add_argument("--samples", type=int, default=1, metavar="K",
                        help="plans of the model for each observation, for minADE_k (default 1)")
    parser.add_argument("--check-draft", action="store_true",
                        help="write every text without the draft too: is it the same, and how "
                             "much slower (with --times or in real time mode)")
    parser.add_argument("--period", type=float, default=0.0, metavar="S",
                        help="least time from one t0 to the next in lockstep; 0 (default): every "
                             "image")
    parser.add_argument("--rate", type=float, default=1.0,
                        help="speed of the bag in real time mode (default 1)")
    parser.add_argument("--times", action="store_true",
                        help="keep the measured times in lockstep too; the files then differ from "
                             "run to run")
    parser.add_argument("--stamps", choices=("header", "log"), default="header",
                        help="log: take log times for the messages' stamps")
    parser.add_argument("--vehicle-width", type=float, default=Settings.vehicle_width_m,
                        metavar="M", help="of the drawn path (default %(default)s)")


def _add_work_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--jobs", type=int, default=1, metavar="N",
                        help="bags at a time, a process each (default 1)")
    parser.add_argument("--fresh", action="store_true",
                        help="do again what was finished before")
    parser.add_argument("--executor", choices=("local", "ray"), default="local",
                        help="ray: on a Ray cluster, bags and --out on shared storage")
    parser.add_argument("--ray-address", metavar="ADDRESS",
                        help="of the cluster, \"auto\" for the running one; default: a Ray of "
                             "this machine's own")
    parser.add_argument("--ray-gpus", type=float, default=0.0, metavar="N",
                        help="GPUs a bag asks of the cluster (default 0)")


def run(args: argparse.Namespace) -> int:
    """Evaluate the bags, write the report; 1 when a bag failed."""
    settings = settings_of(args)
    tasks = make_tasks(args.bags, args.out, settings, args.fresh)
    finished = list(_with_progress(args, tasks))
    done = [d for d in finished if d.result is not None]
    failed = [d for d in finished if d.result is None]
    if proposals := [d.proposal for d in failed if d.proposal]:
        print(proposals[0], end="")         # ready to copy, or to be sent to a file
    for item in failed:
        print(f"reasoning-planner evaluate: {item.error}", file=sys.stderr)
    if not done:
        return 1
    order = {task.name: i for i, task in enumerate(tasks)}
    done.sort(key=lambda d: order[d.task.name])
    summary = write_run(args.out, done, failed, run_info_of(args, settings))
    if args.json:
        print(json.dumps(summary, indent=2))
    else:
        print("\n".join(console_lines(summary, done, args.out)))
    return 1 if failed else 0


# What is asked for

def settings_of(args: argparse.Namespace) -> Settings:
    """The settings of the command line.

    Raises:
        ConfigError: values out of range, or that contradict each other.
    """
    config = read_config(args.config)
    model = config.model
    if args.checkpoint is not None:
        model = replace(model, checkpoint="" if args.checkpoint == "none" else args.checkpoint)
    if args.noise_scale is not None:
        model = replace(model, noise_scale=args.noise_scale)
    if args.deadline is not None:
        config = replace(config, deadline_s=args.deadline)
    if args.odometry_only:
        if args.checkpoint not in (None, "none"):
            raise ConfigError(["--odometry-only: given with --checkpoint, expected one of them: a "
                               "model needs cameras"])
        if args.mode == REALTIME:
            raise ConfigError(["--odometry-only: given with --mode realtime, expected lockstep"])
        model = replace(model, checkpoint="")
    problems = [f"{name}: given {value}, expected {what}" for name, value, good, what in (
        ("--samples", args.samples, args.samples >= 1, "1 or more"),
        ("--samples", args.samples, args.samples == 1 or bool(model.checkpoint),
         "1 for the kinematic planner"),
        ("--check-draft", "it", not args.check_draft or bool(model.checkpoint),
         "a model (--checkpoint)"),
        ("--period", args.period, 0.0 <= args.period <= 60.0, "0 .. 60 s"),
        ("--rate", args.rate, 0.01 <= args.rate <= 100.0, "0.01 .. 100"),
        ("--jobs", args.jobs, args.jobs >= 1, "1 or more"),
        ("--pass-rate", args.pass_rate, 0.0 <= args.pass_rate <= 100.0, "0 .. 100 percent"),
        ("--pass-ade-m", args.pass_ade_m, args.pass_ade_m > 0.0, "more than 0 m"),
        ("--vehicle-width", args.vehicle_width, 0.1 <= args.vehicle_width <= 10.0,
         "0.1 .. 10 m")) if not good]
    if problems:
        raise ConfigError(problems)
    return Settings(
        config=replace(config, model=model), mode=args.mode,
        topics=read_topics(args.topics) if args.topics else None,
        definitions=read_definitions(args.msg_path), odometry_only=args.odometry_only,
        samples=args.samples, check_draft=args.check_draft, period_s=args.period,
        rate=args.rate, keep_times=args.times, log_stamps=args.stamps == "log",
        video=args.video, vehicle_width_m=args.vehicle_width,
        log_condition=Condition(args.pass_ade_m, args.pass_rate) if args.jsonl else None)


def read_config(path: Optional[Path]) -> NodeConfig:
    """The node's parameter file (NODE: ros__parameters: ...); the defaults without one.

    Raises:
        ConfigError: the file cannot be read, or holds what is no parameter.
    """
    if path is None:
        return NodeConfig()
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise ConfigError([f"{path}: {reason}, expected a parameter file"]) from error
    nodes = content.values() if isinstance(content, dict) else ()
    values = next((node["ros__parameters"] for node in nodes
                   if isinstance(node, dict) and "ros__parameters" in node), None)
    if not isinstance(values, dict):
        raise ConfigError([f"{path}: no ros__parameters, expected the node's parameter file"])
    return from_mapping(NodeConfig, {name: value for name, value in values.items()
                                     if name != "use_sim_time"})


def make_tasks(bags: Sequence[Path], out: Path, settings: Settings,
               fresh: bool = False) -> list[Task]:
    """One task a bag, each with a name of its own; a bag given twice is done once.

    Raises:
        DataError: a bag is not there.
    """
    missing = [str(bag) for bag in bags if not bag.exists()]
    if missing:
        raise DataError(f"{', '.join(missing)}: no such file or folder, expected bags")
    tasks: list[Task] = []
    names: dict[str, int] = {}
    for bag in dict.fromkeys(bags):
        stem = bag.resolve().name if bag.is_dir() else bag.stem
        names[stem] = names.get(stem, 0) + 1
        name = stem if names[stem] == 1 else f"{stem}_{names[stem]}"
        tasks.append(Task(bag, name, folder_of(out, name), settings, fresh))
    return tasks


def run_info_of(args: argparse.Namespace, settings: Settings) -> dict[str, Any]:
    """What the summary keeps of the command line."""
    return {"mode": "odometry only" if args.odometry_only else args.mode,
            "samples_k": args.samples, "period_s": args.period,
            "rate": args.rate if args.mode == REALTIME else None,
            "deadline_s": settings.config.deadline_s if args.mode == REALTIME else None,
            "checkpoint": settings.config.model.checkpoint or None,
            "noise_scale": settings.config.model.noise_scale
            if settings.config.model.checkpoint else None}


# The work

def _with_progress(args: argparse.Namespace, tasks: Sequence[Task]) -> Iterator[Done]:
    """The tasks as they are done, behind a progress bar when somebody watches."""
    shares = dict.fromkeys((task.name for task in tasks), 0.0)
    with ExitStack() as stack:
        bar = None
        if sys.stderr.isatty():
            from tqdm import tqdm
            bar = stack.enter_context(tqdm(
                total=float(len(tasks)), unit="bag", bar_format="{l_bar}{bar}| {n:.2f}/"
                "{total:.0f} bags [{elapsed}, {remaining} left{postfix}]"))

        def report(name: str, share: float) -> None:
            if bar is not None:
                bar.update(min(share, 1.0) - shares[name])
                bar.set_postfix_str(name, refresh=False)
            shares[name] = min(share, 1.0)

        for done in _executed(args, tasks, report):
            report(done.task.name, 1.0)
            yield done


def _executed(args: argparse.Namespace, tasks: Sequence[Task], report: Any) -> Iterator[Done]:
    if args.executor == "ray":
        return run_on_ray(tasks, report, args.ray_address, args.ray_gpus)
    if args.jobs > 1 and len(tasks) > 1:
        return run_in_processes(tasks, report, min(args.jobs, len(tasks)))
    return run_here(tasks, report)


def write_run(out: Path, done: Sequence[Done], failed: Sequence[Done],
              run_info: Mapping[str, Any]) -> dict[str, Any]:
    """plans.csv, summary.json and report.html out of the folders of the bags; the summary."""
    results = [d.result for d in done]
    table = joined([read_csv(d.task.folder / "plans.csv") for d in done])
    kept = [{name: value for name, value in result.items()
             if name not in ("reused", "times_ms")} for result in results]
    summary = summarise(table, kept, {**run_info, "failed": [d.error for d in failed]})
    replace_text(out / "plans.csv", csv_of(table))
    write_summary(out / "summary.json", summary)
    write_report(out / "report.html", summary, table, kept,
                 {d.task.name: d.task.folder for d in done})
    return summary


def console_lines(summary: Mapping[str, Any], done: Sequence[Done], out: Path) -> list[str]:
    """A line a bag and the totals, for people."""
    lines = []
    for item in done:
        metrics = summary["bags"][item.task.name]["metrics"]
        reused = ", finished before" if item.result["reused"] else ""
        lines.append(f"{item.task.name}: {item.result['plans']} plans in "
                     f"{item.result['cycles']} cycles, ADE at 3 s "
                     f"{_metres(metrics['ade_m']['3'])}{reused}")
    times = [item.result["times_ms"]["total"]["p50"] for item in done
             if item.result["times_ms"]]
    took = quantiles([t for t in times if t is not None], ("p50",))["p50"]
    lines.append(f"all: ADE at 3 s {_metres(summary['ade_m']['3'])}, constant velocity "
                 f"{_metres(summary['baseline_ade_m']['3'])}, kinematic "
                 f"{_metres(summary['kinematic_ade_m']['3'])}"
                 + (f"; planning took {took:.0f} ms (median) here" if took else ""))
    lines.append(f"report: {out / 'report.html'}")
    return lines


def _metres(value: Optional[float]) -> str:
    return "unknown" if value is None else f"{value:.2f} m"
