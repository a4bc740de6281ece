"""A long drive in a loop: does the node's memory grow, does its status ever fail to come?

Plays a bag through `bag_player` in a loop, with simulated time that jumps back at every start, and
watches `planner_node` meanwhile: resident memory of the node and of the model's process, and the
time between two status messages, of which the node promises one every 0.5 s.

    python -m reasoning_planner.evaluation.soak --minutes 30

From any folder but the repository's root, which hides the built messages.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..conversions import stamp_ns
from ..errors import PlannerError
from ..world.drive import make_drive
from ..world.rosbag import write_bag
from .node_runs import Listener, NodeProcess, NodeRunError, environment

STATUS_PERIOD_S = 0.5
MISSED_AFTER_S = 2.0 * STATUS_PERIOD_S      # a status is missed when none comes for so long
START_TIMEOUT_S = 180.0
SAMPLE_PERIOD_S = 5.0
EDGE_SAMPLES = 12                           # a minute at either end, of which the median counts
MAX_GROWTH_MB = 20.0
IMAGES = tuple(f"/world/camera{slot}/image_raw" for slot in range(4))
ODOMETRY = "/world/odometry"


@dataclass
class Figures:
    """What came out.

    Attributes:
        seconds: watched, warm-up left out.
        loops: times that the stamps of the status went back.
        statuses, plans, repeats: messages heard.
        longest_status_gap_s: between two statuses.
        missed: gaps longer than MISSED_AFTER_S.
        rss_mb: per process: at the beginning and end (medians over a minute) and the most.
        growth_mb: node and model's process together.
        process_starts: of the model's process, 1 when it never died.
    """

    seconds: float = 0.0
    loops: int = 0
    statuses: int = 0
    plans: int = 0
    repeats: int = 0
    longest_status_gap_s: float = 0.0
    missed: int = 0
    rss_mb: dict[str, dict[str, float]] = field(default_factory=dict)
    growth_mb: float = 0.0
    process_starts: int = 0

    @property
    def passed(self) -> bool:
        """Whether the bars are met."""
        return self.growth_mb < MAX_GROWTH_MB and self.missed == 0


class Watch(Listener):
    """Counts what the planner says and keeps none of it."""

    def __init__(self, env: dict[str, str]):
        self.figures = Figures()
        self._status_s: float | None = None
        self._stamp_ns = 0
        super().__init__(env)

    def on_plan(self, msg: Any) -> None:
        """A PlannedTrajectory."""
        self.figures.plans += int(not msg.repeat)
        self.figures.repeats += int(msg.repeat)

    def on_status(self, msg: Any) -> None:
        """A PlannerStatus."""
        now_s, now_ns = time.monotonic(), stamp_ns(msg.header.stamp)
        self.figures.statuses += 1
        self.figures.loops += int(now_ns < self._stamp_ns)
        self._stamp_ns = now_ns
        if self._status_s is not None:
            self.note_gap(now_s - self._status_s)
        self._status_s = now_s

    def note_gap(self, gap_s: float) -> None:
        """Time without a status."""
        self.figures.longest_status_gap_s = max(self.figures.longest_status_gap_s, gap_s)
        self.figures.missed += int(gap_s > MISSED_AFTER_S)

    def begin(self) -> None:
        """Count from here on."""
        self.figures = Figures()
        self._status_s = time.monotonic()

    def finish(self, seconds: float) -> Figures:
        """The figures; silence up to now counts."""
        self.note_gap(time.monotonic() - (self._status_s or 0.0))
        self.figures.seconds = round(seconds, 1)
        self.figures.longest_status_gap_s = round(self.figures.longest_status_gap_s, 3)
        return self.figures


def soak(bag: Path, args: argparse.Namespace) -> Figures:
    """Play the bag and watch.

    Raises:
        NodeRunError: a process did not start, or ended early or not cleanly.
    """
    env = environment()
    remappings = [f"~/input/image{slot}:={topic}" for slot, topic in enumerate(args.images)]
    remappings.append(f"~/input/odometry:={args.odometry}")
    parameters: dict[str, object] = {
        "use_sim_time": True, "model.checkpoint": args.model, "deadline_s": args.deadline,
        "max_plan_age_s": 6.0, "cameras.count": len(args.images),
        "cameras.compressed": args.compressed, "status_period_s": STATUS_PERIOD_S}
    played: dict[str, object] = {
        "bag": str(bag.resolve()), "loop": True, "rate": args.rate,
        "wait_for_subscribers": [args.odometry, "/clock"], "wait_timeout_s": START_TIMEOUT_S}
    with ExitStack() as stack:
        watch = stack.enter_context(Watch(env))
        node = stack.enter_context(NodeProcess(parameters, env, remappings=remappings))
        player = stack.enter_context(NodeProcess(played, env, "reasoning_planner.bag_player"))
        watch.wait_for(lambda: watch.figures.plans > 0 or not (node.is_running
                                                               and player.is_running),
                       START_TIMEOUT_S, "a plan")
        _watch_for(watch, args.warm_up, (node, player), {})
        watch.begin()
        rss_mb: dict[str, list[float]] = {}
        start_s = time.monotonic()
        _watch_for(watch, args.minutes * 60.0, (node, player), rss_mb)
        figures = watch.finish(time.monotonic() - start_s)
    _summarise(figures, rss_mb)
    figures.process_starts = int(watch.heard.diagnostics["engine"].get("process starts", 0))
    return figures


def _watch_for(watch: Watch, seconds: float, processes: tuple[NodeProcess, ...],
               rss_mb: dict[str, list[float]]) -> None:
    """Listen for so long; append the memory of the processes every SAMPLE_PERIOD_S."""
    until_s, sample_s = time.monotonic() + seconds, time.monotonic()
    while time.monotonic() < until_s:
        watch.spin(0.1)
        if time.monotonic() < sample_s:
            continue
        sample_s += SAMPLE_PERIOD_S
        if not all(process.is_running for process in processes):
            raise NodeRunError("planner_node or bag_player ended early")
        model_pid = watch.heard.diagnostics.get("engine", {}).get("process id", "")
        for name, pid in (("node", processes[0].pid), ("model", int(model_pid or 0))):
            if pid:
                rss_mb.setdefault(name, []).append(resident_mb(pid))


def resident_mb(pid: int) -> float:
    """Resident memory of a process in 10^6 bytes, 0 when it has just ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    except OSError:
        return 0.0
    return next((int(line.split()[1]) * 1024 / 1e6 for line in status.splitlines()
                 if line.startswith("VmRSS:")), 0.0)


def _summarise(figures: Figures, rss_mb: dict[str, list[float]]) -> None:
    for name, samples in rss_mb.items():
        begin, end = (float(np.median(part)) for part in (samples[:EDGE_SAMPLES],
                                                          samples[-EDGE_SAMPLES:]))
        figures.rss_mb[name] = {"begin": round(begin, 2), "end": round(end, 2),
                                "max": round(max(samples), 2)}
        figures.growth_mb += end - begin
    figures.growth_mb = round(figures.growth_mb, 2)


def main(argv: list[str] | None = None) -> int:
    """Print the figures; exit 1 when a bar is missed or the run failed."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--warm-up", type=float, default=60.0, help="seconds before counting")
    parser.add_argument("--bag", type=Path, default=None,
                        help="bag to play (default: 20 s of the synthetic world)")
    parser.add_argument("--images", nargs="+", default=IMAGES, help="its image topics, by slot")
    parser.add_argument("--compressed", action="store_true", help="they are CompressedImage")
    parser.add_argument("--odometry", default=ODOMETRY, help="its odometry topic")
    parser.add_argument("--model", default="nano", help='checkpoint; "" for the kinematic planner')
    parser.add_argument("--deadline", type=float, default=2.0, help="seconds of a cycle")
    parser.add_argument("--rate", type=float, default=1.0, help="playing speed")
    parser.add_argument("--out", type=Path, default=None, help="JSON file for the figures")
    args = parser.parse_args(argv)
    try:
        with tempfile.TemporaryDirectory() as folder:
            bag = args.bag or write_bag(make_drive(0, 20.0), Path(folder, "drive"))
            figures = soak(bag, args)
    except PlannerError as error:
        print(f"soak: {error}", file=sys.stderr)
        return 1
    text = json.dumps({**asdict(figures), "passed": figures.passed}, indent=2)
    print(text)
    if args.out is not None:
        partial = args.out.with_name(f".{args.out.name}.{os.getpid()}")
        partial.write_text(text + "\n", encoding="utf-8")
        partial.replace(args.out)
    return 0 if figures.passed else 1


if __name__ == "__main__":
    sys.exit(main())
