"""How soon planner_node plans again after its model's process was killed.

Kills the process with SIGKILL while the node is fed in real time, --kills times, and measures how
long it takes until /diagnostics has the engine at ERROR and until the model's next plan is
published, and how much processor time the new process took for it: on a machine that is busy
otherwise the first two are longer.

    python -m reasoning_planner.evaluation.restart_bench --model nano --kills 5

From any folder but the repository's root, which hides the built messages.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from ..datatypes import PlanStatus
from ..errors import PlannerError
from .node_runs import (Drive, Listener, NodeProcess, NodeRunError, environment,
                        machine_load)

START_TIMEOUT_S = 120.0
RECOVERY_TIMEOUT_S = 60.0
BETWEEN_S = 3.0                 # of planning before each kill
MAX_RECOVERY_S = 3.0
ERROR = 2
FROM_THE_MODEL = (PlanStatus.OK, PlanStatus.DEGRADED)


class _Run:
    """One node under way."""

    def __init__(self, node: NodeProcess, listener: Listener, drive: Drive):
        self._node, self._listener, self._drive = node, listener, drive

    @property
    def engine(self) -> dict[str, str]:
        """Newest values of the engine's diagnosis."""
        return self._listener.heard.diagnostics.get("engine", {})

    def is_error(self) -> bool:
        """Whether the engine is at ERROR."""
        return self._listener.heard.levels.get("engine") == ERROR

    def has_new_plan(self) -> bool:
        """Whether a new plan of the model came since the plans were last forgotten."""
        return any(not plan.repeat and plan.status in FROM_THE_MODEL
                   for _, plan in self._listener.heard.plans)

    def drive_until(self, condition: Any, what: str) -> float:
        """Seconds until the condition held."""
        start_s = time.monotonic()
        self._drive.run(RECOVERY_TIMEOUT_S, until=lambda: condition() or not self._node.is_running)
        if not condition():
            raise NodeRunError(f"{what}: not within {RECOVERY_TIMEOUT_S:g} s")
        return time.monotonic() - start_s

    def forget_plans(self) -> None:
        """Those heard so far, and the drive goes on until a moment later: none is under way."""
        self._drive.run(0.05)
        self._listener.heard.plans.clear()


def kill_once(run: _Run) -> dict[str, float]:
    """Seconds from SIGKILL to the ERROR on /diagnostics and to the model's next plan.

    The processor time is read up to 0.1 s after that plan, the period of /diagnostics here.
    """
    pid = int(run.engine["process id"])
    os.kill(pid, signal.SIGKILL)
    start_s = time.monotonic()
    run.forget_plans()
    told_s: list[float] = []

    def planned() -> bool:
        if run.is_error() and not told_s:
            told_s.append(time.monotonic() - start_s)
        return run.has_new_plan()

    run.drive_until(planned, "a plan of the model after its process was killed")
    planned_s = time.monotonic() - start_s
    run.drive_until(lambda: int(run.engine["process id"]) not in (0, pid), "a new process")
    used_s = processor_s(int(run.engine["process id"]))
    if not told_s:              # the period of /diagnostics may be longer than the recovery
        run.drive_until(lambda: planned() and bool(told_s), "engine at ERROR on /diagnostics")
    return {"error_s": round(told_s[0], 3), "planned_s": round(planned_s, 3),
            "processor_s": round(used_s, 3)}


def processor_s(pid: int) -> float:
    """Processor time that a process has used, all its threads together."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All kills of one node.

    Raises:
        NodeRunError: no recovery in time, or the node ended early or not cleanly.
    """
    env = environment()
    parameters: dict[str, object] = {"model.checkpoint": args.model, "deadline_s": 5.0,
                                     "max_plan_age_s": 6.0, "diagnostics_period_s": 0.1}
    module = "reasoning_planner.node"
    if args.model == "slow":
        env |= {"SLOW_MODEL_MS": "100"}
        module = "reasoning_planner.evaluation.slow_model"
    with NodeProcess(parameters, env, module) as node, Listener(env) as listener:
        drive = Drive(listener, size=(args.height, args.width))
        listener.wait_for(lambda: drive.is_heard() or not node.is_running, START_TIMEOUT_S,
                          "planner_node subscribes its inputs")
        run = _Run(node, listener, drive)
        kills = []
        for _ in range(args.kills):
            run.drive_until(run.has_new_plan, "a plan of the model")
            drive.run(BETWEEN_S)
            run.drive_until(lambda: not run.is_error(), "engine well again")
            kills.append(kill_once(run))
    slowest_s = max(kill["planned_s"] for kill in kills)
    return {"model": args.model, "kills": kills, "slowest_s": slowest_s,
            "machine_load": machine_load(),
            "passed": slowest_s <= MAX_RECOVERY_S}


def main(argv: list[str] | None = None) -> int:
    """Print the figures; exit 1 when a recovery took too long or the run failed."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="nano",
                        help='checkpoint, or "slow" for a model that loads at once')
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--height", type=int, default=64)
    args = parser.parse_args(argv)
    if args.kills < 1:
        parser.error(f"--kills: given {args.kills}, expected at least 1")
    try:
        figures = measure(args)
    except PlannerError as error:
        print(f"restart_bench: {error}", file=sys.stderr)
        return 1
    print(json.dumps(figures, indent=2))
    return 0 if figures["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
