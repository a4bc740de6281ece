"""The main job on the real drive: bag -> DDS -> planner_node -> messages -> report.

Four processes and real ROS 2 in between: `bag_player` publishes the drive, `planner_node` plans,
`plan_recorder` writes down what it publishes; then the report is made from what was written. The
model runs on the engines that `build-engines --platform cpu` makes, left as they are when they are
up to date. Leaves report.html, summary.json, the bag, the records and the engines in --out. Needs
the built workspace: `make demo` sees to it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from ..datatypes import HORIZON_LENGTH, STEP_NS, STEP_S
from ..errors import MissingDependencyError, PlannerError
from ..export.build_engines import build_engines
from ..runtimes.platforms import load_platforms
from ..vla import VlaConfig, checkpoint_directory
from . import kitti_drive
from .recheck import write_twice
from .records import Records, read_records
from .report import make_report

NODE = "/reasoning_planner"
ANCHOR_SLOT = 1
MIN_CYCLES = 30                 # the drive has 51 frames
MIN_PLANS = 10                  # 36 of them have 1.5 s of history; a slow machine skips some
MODEL_RATE = 0.2                # a model on two processor cores is no real-time planner
MODEL_DEADLINE_S = 3.0
NOISE_SCALE = 0.0               # the middle of what the model deems likely, not a draw


class DemoError(PlannerError):
    """A part of the demo did not do what it must."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `reasoning-planner demo`."""
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="folder for results")
    parser.add_argument("--clip", type=Path, default=Path("test/data/kitti_right_turn"),
                        help="folder of the drive's frames and poses")
    parser.add_argument("--params", type=Path, default=Path("config/planner.param.yaml"),
                        help="parameter file of the node")
    parser.add_argument("--checkpoint", default="nano",
                        help="model: a folder, or a name that comes with the package, as nano "
                             "(default %(default)s); \"none\" for the kinematic planner")
    parser.add_argument("--rate", type=float, default=None,
                        help=f"playing speed, 1 is real time (default: {MODEL_RATE} with a model, "
                             "1 without)")
    parser.add_argument("--timeout", type=float, default=120.0,
                        help="seconds after which the run counts as hung")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")


def run(args: argparse.Namespace) -> int:
    """Make the bag, play it through the node, check what came out, write the report."""
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    bag, records = out / "drive", out / "records.jsonl"
    for stale in (bag, records, out / "report.html", out / "summary.json"):
        shutil.rmtree(stale) if stale.is_dir() else stale.unlink(missing_ok=True)
    kitti_drive.write_drive(kitti_drive.read_clip(args.clip), bag)
    engines = _build_engines(out / "engines", args) if _has_model(args) else None
    play_through_node(bag, records, args, engines)
    check(read_records(records), with_text=_has_model(args))
    summary = make_report(records, bag, out, {
        "bag_name": "KITTI odometry, right turn", "playing speed": _rate(args),
        **(_model_info(bag, args.checkpoint, engines) if engines else {}),
        "pictures": "KITTI, Geiger, Lenz and Urtasun, CVPR 2012, CC BY-NC-SA 3.0: not for "
                    "commercial use"})
    if args.json:
        print(json.dumps(summary, indent=2))
    else:
        print(f"{summary['plans_published']} plans in {summary['cycles']} cycles, planner "
              f"{', '.join(summary['planners'])}: {out / 'report.html'}")
    return 0


def _build_engines(folder: Path, args: argparse.Namespace) -> Path:
    """The model's engines for a processor, in `folder`."""
    build_engines(load_platforms()["cpu"], checkpoint_directory(args.checkpoint), folder,
                  measure=False)
    return folder


def play_through_node(bag: Path, records: Path, args: argparse.Namespace,
                      engines: Path | None = None) -> None:
    """Run the three nodes until the bag is played and the last plan is recorded."""
    inputs = {f"~/input/image{ANCHOR_SLOT}": kitti_drive.IMAGE_TOPIC,
              "~/input/odometry": kitti_drive.ODOMETRY_TOPIC}
    outputs = {f"~/input/{name}": f"{NODE}/output/{name}"
               for name in ("trajectory", "reasoning", "status")}
    with ExitStack() as stack:
        environment = _environment()
        node = stack.enter_context(_process(
            "planner_node", inputs, _node_parameters(args, engines), environment, args.params))
        recorder = stack.enter_context(_process(
            "plan_recorder", outputs, {"records": str(records)}, environment))
        player = stack.enter_context(_process(
            "bag_player", {}, {"bag": str(bag), "rate": _rate(args), "wait_for_subscribers":
                               [kitti_drive.IMAGE_TOPIC, kitti_drive.ODOMETRY_TOPIC]},
            environment))
        _wait(player, "bag_player", args.timeout)
        _wait_for_quiet(records, args.timeout)
        for process, name in ((node, "planner_node"), (recorder, "plan_recorder")):
            process.send_signal(signal.SIGINT)
            _wait(process, name, 20.0)


def _has_model(args: argparse.Namespace) -> bool:
    return args.checkpoint != "none"


def _model_info(bag: Path, checkpoint: str, engines: Path) -> dict[str, object]:
    """What plans do not say of their model: its text without a draft, on the same drive."""
    twice = write_twice(bag, checkpoint_directory(checkpoint), VlaConfig(noise_scale=NOISE_SCALE),
                        engines=engines)
    return {"model": checkpoint, "runtime": "ONNX Runtime, CPU", **twice.run_info()}


def _rate(args: argparse.Namespace) -> float:
    return args.rate if args.rate is not None else MODEL_RATE if _has_model(args) else 1.0


def _node_parameters(args: argparse.Namespace, engines: Path | None) -> dict[str, object]:
    parameters: dict[str, object] = {"use_sim_time": True, "cameras.compressed": True}
    if engines is not None:
        parameters |= {"model.checkpoint": str(checkpoint_directory(args.checkpoint).resolve()),
                       "model.engines": str(engines), "model.noise_scale": NOISE_SCALE,
                       "deadline_s": MODEL_DEADLINE_S}
    return parameters


def _environment() -> dict[str, str]:
    """The three nodes hear each other on this machine and nobody else."""
    return {**os.environ, "ROS_DOMAIN_ID": str(random.randrange(1, 101)),
            "ROS_AUTOMATIC_DISCOVERY_RANGE": "LOCALHOST", "ROS_LOCALHOST_ONLY": "1"}


def _process(executable: str, remappings: dict[str, str], parameters: dict[str, object],
             environment: dict[str, str], params_file: Path | None = None) -> subprocess.Popen:
    command = [str(_executable(executable)), "--ros-args"]
    if params_file is not None:
        command += ["--params-file", str(params_file)]
    for source, target in remappings.items():
        command += ["-r", f"{source}:={target}"]
    for name, value in parameters.items():
        command += ["-p", f"{name}:={json.dumps(value)}"]
    return _Killed(command, env=environment)


class _Killed(subprocess.Popen):
    """A process that does not outlive its with block."""

    def __exit__(self, *exception: object) -> None:
        if self.poll() is None:
            self.kill()
        super().__exit__(*exception)


def _executable(name: str) -> Path:
    try:
        from ament_index_python.packages import PackageNotFoundError, get_package_prefix
    except ImportError:
        raise MissingDependencyError("no ROS 2 in this environment, expected the sourced "
                                     "workspace: make ros prints the line") from None
    try:
        return Path(get_package_prefix("reasoning_planner"), "lib", "reasoning_planner", name)
    except PackageNotFoundError:
        raise MissingDependencyError("reasoning_planner is not built or not sourced, expected "
                                     "install/setup.bash: make ros prints the line") from None


def _wait(process: subprocess.Popen, name: str, timeout_s: float) -> None:
    try:
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        raise DemoError(f"{name}: still running after {timeout_s:g} s, expected its end") from None
    if code != 0:
        raise DemoError(f"{name}: exit code {code}, expected 0")


def _wait_for_quiet(records: Path, timeout_s: float, quiet_s: float = 1.5) -> None:
    """Until no new plan has been recorded for `quiet_s`: the last cycle is over."""

    end_s, seen, since_s = time.monotonic() + timeout_s, -1, time.monotonic()
    while time.monotonic() < end_s:
        count = len(read_records(records).plans) if records.exists() else 0
        if count != seen:
            seen, since_s = count, time.monotonic()
        elif time.monotonic() - since_s > quiet_s:
            return
        time.sleep(0.2)


def check(records: Records, with_text: bool = False) -> None:
    """What every run must show.

    Args:
        with_text: a model planned, so reasoning must have been published.
    Raises:
        DemoError: too few cycles or plans, a plan of another length or step, one not finite, or
            no text where there should be some.
    """
    cycles = max((status.cycles for status in records.statuses), default=0)
    if cycles < MIN_CYCLES or len(records.plans) < MIN_PLANS:
        raise DemoError(f"{cycles} cycles and {len(records.plans)} plans, expected at least "
                        f"{MIN_CYCLES} and {MIN_PLANS}")
    if with_text and not any(plan.text for plan in records.plans):
        why = {reason for plan in records.plans for reason, _ in plan.reasons}
        raise DemoError(f"no plan has a text, expected some; reasons: {', '.join(sorted(why))}")
    for plan in records.plans:
        steps = np.diff(plan.time_from_start_ns)
        # One that came late starts at the newest odometry: what has passed meanwhile is gone.
        fewest = HORIZON_LENGTH - math.ceil(plan.latency_ms * 1e-3 / STEP_S)
        if not (fewest <= len(plan.positions) <= HORIZON_LENGTH + 1 and (steps == STEP_NS).all()):
            raise DemoError(f"plan {plan.plan_id}, after {plan.latency_ms:.0f} ms: "
                            f"{len(plan.positions)} points, expected {fewest} to "
                            f"{HORIZON_LENGTH + 1} at 0.1 s")
        if not np.isfinite(plan.positions).all():
            raise DemoError(f"plan {plan.plan_id}: positions not finite")


if __name__ == "__main__":
    sys.exit("run it as: reasoning-planner demo")
