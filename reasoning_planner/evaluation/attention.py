"""Where drafts look, and what it brings: FlatRoPE against its rivals, on held-out scenes.

For drafts that were trained alike, the share of attention on visual, history, instruction and
reasoning tokens, by layer and head, and the tokens a target pass commits with each. Leaves
attention.json and a table. Train the drafts on one folder of rollouts:

  reasoning-planner train-draft --out out/flat
  reasoning-planner train-draft --out out/mrope --rope mrope --data out/flat/data \\
      --rollouts out/flat/rollouts
  reasoning-planner attention --drafts out/flat/release out/mrope/release --data out/flat/data
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError
from ..models.draft_positions import PARTS
from ..training.draft_judge import DraftJudge, Judged
from ..training.train_target import validation_shard
from ..vla import checkpoint_directory
from .bootstrap import paired_interval
from .summary import replace_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--drafts", nargs="+", type=Path, required=True, metavar="DIR",
                        help="releases of train-draft; the others are compared with the first")
    parser.add_argument("--checkpoint", default="nano",
                        help="the target they were trained on (default %(default)s)")
    parser.add_argument("--scenes", type=int, default=200,
                        help="held-out scenes (default %(default)s)")
    parser.add_argument("--data", type=Path, default=Path("out/draft/data"),
                        help="folder where the rendered scenes are kept (default %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out/attention"),
                        help="folder of attention.json (default %(default)s)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(args: argparse.Namespace) -> int:
    """Measure and write the report."""
    for name in ("scenes", "threads"):
        if getattr(args, name) < 1:
            raise DataError(f"--{name}: given {getattr(args, name)}, expected 1 or more")
    judge = DraftJudge(checkpoint_directory(args.checkpoint), args.threads)
    shard = validation_shard(args.data, args.scenes, judge.image_size)
    judged = judge.judge(args.drafts, shard)
    report = {"scenes": len(shard), "prompt_tokens": judge.prompt_tokens(),
              "drafts": [described(one, judged[0]) for one in judged]}
    args.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report, indent=1, allow_nan=False) + "\n"
    replace_text(args.out / "attention.json", text)
    print(text if args.json else table(report), end="")
    return 0


def described(one: Judged, first: Judged) -> dict[str, Any]:
    """A draft's part of the report; passes saved are against the first draft's."""
    saved = paired_interval((first.passes - one.passes).astype(float), np.arange(len(one.passes)))
    interval = [None if np.isnan(end) else round(end, 4) for end in (saved.low, saved.high)]
    return {"rope": one.config.rope, "context": one.config.context,
            "context_k": one.config.context_k if one.config.context == "last_k" else None,
            **{name: round(value, 4) for name, value in one.figures.items()},
            "passes_saved_a_text": round(saved.mean, 4), "passes_saved_ci95": interval,
            "mean": _named(one.shares.mean(axis=(0, 1))),
            "by_layer_and_head": [[_named(head) for head in layer] for layer in one.shares],
            "mean_of_these_weights_with_the_other_rope":
                None if one.swapped is None else _named(one.swapped.mean(axis=(0, 1)))}


def _named(shares: np.ndarray) -> dict[str, float]:
    return {part: round(float(share), 5) for part, share in zip(PARTS, shares)}


def table(report: dict[str, Any]) -> str:
    """Lines for a terminal: each draft, then its heads."""
    lines = [f"{'draft':<24}{'tau at 8':>9}{'tau':>7}" + "".join(f"{p:>13}" for p in PARTS)]
    for one in report["drafts"]:
        name = f"{one['rope']}, {one['context']}"
        lines.append(f"{name:<24}{one['tokens_per_pass_8']:>9.2f}{one['tokens_per_pass']:>7.2f}"
                     + _percents(one["mean"]))
        for i, layer in enumerate(one["by_layer_and_head"]):
            lines += [f"{f'  layer {i}, head {j}':<40}" + _percents(head)
                      for j, head in enumerate(layer)]
        swapped = one["mean_of_these_weights_with_the_other_rope"]
        if swapped is not None:
            lines.append(f"{'  same weights, other rope':<40}" + _percents(swapped))
    return "\n".join(lines) + "\n"


def _percents(shares: dict[str, float]) -> str:
    return "".join(f"{f'{100 * share:.2f} %':>13}" for share in shares.values())
