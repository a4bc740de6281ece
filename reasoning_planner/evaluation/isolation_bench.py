"""How much inference delays the node's callbacks: the model in a thread, or in its own process.

For each variant a planner_node is fed in real time while its model works without a pause, and the
time from the publication of an odometry message to its callback is read from the node's own
diagnostics. Models: nano on ONNX Runtime, one that counts in Python, the worst there is, and none
at all: what the node and the machine take without inference.

    python -m reasoning_planner.evaluation.isolation_bench --seconds 20

From any folder but the repository's root, which hides the built messages.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from ..errors import PlannerError
from .node_runs import Drive, Listener, NodeProcess, environment, machine_load

WARM_UP_S = 5.0
START_TIMEOUT_S = 120.0
COLUMNS = ("p50", "p95", "p99", "max")


def measure(isolation: str, model: str, args: argparse.Namespace) -> dict[str, Any]:
    """One run; latencies in ms, and how many plans a second were made meanwhile."""
    env = environment()
    parameters: dict[str, object] = {
        "isolation": isolation, "model.checkpoint": "" if model == "none" else "nano",
        "model.threads": args.threads,
        "deadline_s": 30.0, "max_plan_age_s": 6.0, "diagnostics_period_s": 0.5}
    module = "reasoning_planner.node"
    if model not in ("nano", "none"):
        env |= {"SLOW_MODEL_MS": "500", "SLOW_MODEL_KIND": model}
        module = "reasoning_planner.evaluation.slow_model"
    with NodeProcess(parameters, env, module) as node, Listener(env) as listener:
        drive = Drive(listener, odometry_hz=args.odometry_hz, size=(args.height, args.width))
        listener.wait_for(lambda: drive.is_heard() or not node.is_running, START_TIMEOUT_S,
                          "planner_node subscribes its inputs")
        drive.run(WARM_UP_S)
        before = _published(listener)
        drive.run(args.seconds)
        values = listener.heard.diagnostics.get("transport", {})
        plans = _published(listener) - before
    return {"isolation": isolation, "model": model,
            **{f"{name}_ms": float(values[f"odometry callback {name}_ms"]) for name in COLUMNS},
            "samples": int(values["odometry callback samples"]),
            "plans_per_s": round(plans / args.seconds, 2), "machine_load": machine_load()}


def _published(listener: Listener) -> int:
    return listener.heard.statuses[-1][1].plans_published if listener.heard.statuses else 0


def main(argv: list[str] | None = None) -> int:
    """Print one line a variant; exit 1 when a run failed."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1,
                        help="of the engine (default: all processors)")
    parser.add_argument("--odometry-hz", type=float, default=100.0)
    parser.add_argument("--width", type=int, default=640)
    parser.add_argument("--height", type=int, default=480)
    parser.add_argument("--isolation", choices=("process", "thread"), action="append")
    parser.add_argument("--model", choices=("none", "nano", "sleep", "busy"),
                        action="append")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    rows = []
    try:
        for model in args.model or ("none", "nano", "busy"):
            for isolation in args.isolation or ("thread", "process"):
                if model == "none" and isolation != "process":
                    continue        # there is nothing to isolate
                rows.append(measure(isolation, model, args))
                if not args.json:
                    print(_line(rows[-1]), flush=True)
    except PlannerError as error:
        print(f"isolation_bench: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(rows, indent=2))
    return 0


def _line(row: dict[str, Any]) -> str:
    latencies = "  ".join(f"{name} {row[f'{name}_ms']:7.2f}" for name in COLUMNS)
    return (f"{row['model']:<6}{row['isolation']:<9}odometry callback [ms]  {latencies}  "
            f"({row['samples']} samples, {row['plans_per_s']} plans/s, machine's load "
            f"{row['machine_load']})")


if __name__ == "__main__":
    sys.exit(main())
