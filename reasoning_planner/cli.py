"""The console script `reasoning-planner <command>`.

Exit codes: 0 ok, 1 the work failed (one line says why), 2 bad usage. A command is a module with
`add_arguments(parser)` and `run(args) -> int`, imported only when it is the one asked for.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from dataclasses import dataclass

from .errors import PlannerError


@dataclass(frozen=True)
class Command:
    """Where a command lives and what it does, in one line."""

    module: str
    summary: str


COMMANDS = {
    "doctor": Command("doctor", "what this machine has, what is missing and how to get it"),
    "demo": Command("evaluation.demo", "play the real drive through the node, make a report"),
    "evaluate": Command("evaluation.evaluate",
                        "replay recorded drives through the planner, make a report; no ROS"),
    "compare": Command("evaluation.compare",
                       "two evaluations of the same drives, metric by metric"),
    "world": Command("world.command", "the synthetic driving world: scenes, or a rosbag2"),
    "train-target": Command("training.train_target", "train the stand-in on the synthetic world"),
    "evaluate-target": Command("evaluation.evaluate_target",
                               "the target on held-out scenes against the baselines"),
    "bench": Command("evaluation.bench",
                     "every way to write the reasoning, against plain decoding"),
    "train-draft": Command("training.train_draft",
                           "distil a block draft from the target's own texts"),
    "attention": Command("evaluation.attention",
                         "where drafts look, and what they bring, rope by rope"),
    "export": Command("export.to_onnx", "a checkpoint to the graphs that ONNX Runtime runs"),
    "build-engines": Command("export.build_engines",
                             "a checkpoint to the engines of a platform"),
    "import-checkpoint": Command("training.import_checkpoint",
                                 "an Alpamayo checkpoint -> our layout, verified"),
}


def main(argv: list[str] | None = None) -> int:
    """Run one command."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview())
        return 0 if arguments else 2
    name, *rest = arguments
    if name not in COMMANDS:
        print(f"reasoning-planner: unknown command {name!r}, expected one of "
              f"{', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    command = COMMANDS[name]
    module = importlib.import_module(f".{command.module}", __package__)
    parser = argparse.ArgumentParser(prog=f"reasoning-planner {name}",
                                     description=module.__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    module.add_arguments(parser)
    args = parser.parse_args(rest)
    try:
        return module.run(args)
    except PlannerError as error:
        print(f"reasoning-planner {name}: {error}", file=sys.stderr)
        return 1


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = ["usage: reasoning-planner <command> [options]", "", "commands:"]
    lines += [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    lines += ["", "reasoning-planner <command> --help says more."]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
