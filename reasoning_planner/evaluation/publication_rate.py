"""How often a trajectory is published while the model takes as long as it likes.

planner_node runs with a model that takes --model-ms for every plan and is fed in real time; what
it publishes is counted for --seconds: the last plan, re-anchored, fills the time between two new
ones.

    python -m reasoning_planner.evaluation.publication_rate --seconds 60 --model-ms 700

From any folder but the repository's root, which hides the built messages.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any, Sequence

import numpy as np

from ..errors import PlannerError
from .node_runs import Drive, Listener, NodeProcess, environment, machine_load

WARM_UP_S = 5.0
START_TIMEOUT_S = 120.0
LOWEST_HZ, HIGHEST_HZ = 9.0, 11.0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """One run.

    Raises:
        NodeRunError: the node did not start, or ended early or not cleanly.
    """
    env = environment() | {"SLOW_MODEL_MS": str(args.model_ms), "SLOW_MODEL_KIND": args.kind}
    parameters: dict[str, object] = {"model.checkpoint": "slow", "isolation": args.isolation,
                                     "deadline_s": 30.0, "max_plan_age_s": 6.0}
    with (NodeProcess(parameters, env, "reasoning_planner.evaluation.slow_model") as node,
          Listener(env) as listener):
        drive = Drive(listener, size=(args.height, args.width))
        listener.wait_for(lambda: drive.is_heard() or not node.is_running, START_TIMEOUT_S,
                          "planner_node subscribes its inputs")
        drive.run(START_TIMEOUT_S, until=lambda: bool(listener.heard.plans)
                  or not node.is_running)
        drive.run(WARM_UP_S)
        listener.heard.plans.clear()
        drive.run(args.seconds)
        plans = list(listener.heard.plans)
    return {"model_ms": args.model_ms, "isolation": args.isolation, "seconds": args.seconds,
            "new_plans": sum(not plan.repeat for _, plan in plans),
            "machine_load": machine_load(),
            **rates([arrived_s for arrived_s, _ in plans], args.seconds)}


def rates(arrivals_s: Sequence[float], seconds: float) -> dict[str, Any]:
    """Mean rate, the rates of the slowest and fastest second, and the longest gap in ms.

    Args:
        arrivals_s: rising, monotonic.
        seconds: how long was listened.
    """
    if len(arrivals_s) < 2:
        return {"rate_hz": len(arrivals_s) / seconds, "passed": False}
    times_s = np.asarray(arrivals_s)
    counts = np.searchsorted(times_s, times_s + 1.0) - np.arange(len(times_s))
    whole = counts[times_s <= times_s[-1] - 1.0]
    rate_hz = (len(times_s) - 1) / (times_s[-1] - times_s[0])
    return {"rate_hz": round(float(rate_hz), 3),
            "slowest_second_hz": int(whole.min(initial=len(times_s))),
            "fastest_second_hz": int(whole.max(initial=0)),
            "longest_gap_ms": round(float(np.diff(times_s).max()) * 1e3, 1),
            "passed": bool(LOWEST_HZ <= rate_hz <= HIGHEST_HZ)}


def main(argv: list[str] | None = None) -> int:
    """Print the figures; exit 1 when the rate is not between the bars or the run failed."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--model-ms", type=float, default=700.0)
    parser.add_argument("--kind", choices=("sleep", "busy"), default="sleep",
                        help="how the model spends the time")
    parser.add_argument("--isolation", choices=("process", "thread"), default="process")
    parser.add_argument("--width", type=int, default=640)
    parser.add_argument("--height", type=int, default=480)
    args = parser.parse_args(argv)
    try:
        figures = measure(args)
    except PlannerError as error:
        print(f"publication_rate: {error}", file=sys.stderr)
        return 1
    print(json.dumps(figures, indent=2))
    return 0 if figures["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
