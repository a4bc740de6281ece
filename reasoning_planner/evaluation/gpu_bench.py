"""What the stages of a cycle cost in PyTorch, against what reading the weights once would cost.

Random weights of a configuration's size: times do not depend on them. Says for a given acceptance
length (tau, tokens a target pass) what speculation gains:

    python -m reasoning_planner.evaluation.gpu_bench --tau 2.7 3.7 6.25
    python -m reasoning_planner.evaluation.gpu_bench --device cpu --config nano
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Mapping, Sequence

import numpy as np

from .summary import describe_hardware, plain, replace_text
from ..errors import ConfigError, MissingDependencyError, PlannerError
from ..models.config import ModelConfig, preset
from ..models.draft_config import DraftConfig
from ..runtimes.base import Runtime
from ..runtimes.draft_base import DraftRuntime
from ..runtimes.platforms import NUM_IMAGES, PROMPT_TEXT

NEW_TOKENS = 15         # of a usual reasoning, stop tokens included (alpamayo 7.3)
COMMITTED = 2           # tokens a draft is given in a measured round
VERIFY_SIZES = (4, 8, 16)
WARM_UP = 2             # runs of each stage that do not count: the first captures its graph


@dataclass(frozen=True)
class Floor:
    """Bytes of weights that a stage must read at least, whatever computes it."""

    decode: int
    draft: int
    expert_step: int

    @classmethod
    def of(cls, config: ModelConfig, draft: DraftConfig, weight_bytes: int) -> Floor:
        """
        Args:
            weight_bytes: of one weight.
        """
        text, expert = config.text, config.expert
        layer = _layer_weights(text.hidden_size, text.num_heads, text)
        head = text.hidden_size * text.vocab_size
        acting = _layer_weights(expert.hidden_size, expert.num_heads, text,
                                expert.intermediate_size)
        drafting = _layer_weights(draft.hidden_size, draft.num_heads, draft)
        joined = len(draft.feature_layers) * draft.hidden_size ** 2
        return cls(weight_bytes * (text.num_layers * layer + head),
                   weight_bytes * (draft.num_layers * drafting + joined + head),
                   weight_bytes * text.num_layers * acting)

    def milliseconds(self, bandwidth_gbps: float, num_steps: int) -> dict[str, float]:
        """Stage -> least time at a bandwidth in 1e9 bytes a second; verifying reads as decoding
        does."""
        per_byte = 1e3 / (bandwidth_gbps * 1e9)
        return {"decode": self.decode * per_byte, "draft": self.draft * per_byte,
                "expert": self.expert_step * num_steps * per_byte}


def _layer_weights(hidden: int, heads: int, shape: Any, intermediate: int | None = None) -> int:
    """Matrices of one decoder layer: q and o, k and v, and the three of the MLP."""
    attention = 2 * hidden * shape.head_dim * (heads + shape.num_kv_heads)
    return attention + 3 * hidden * (intermediate or shape.intermediate_size)


def speed_up(times_ms: Mapping[str, float], size: int, tau: float) -> dict[str, float]:
    """What writing with a draft gains.

    Args:
        times_ms: "decode_1", "verify_<size>", "draft", and the other stages of a cycle.
        size: tokens of a verifying pass.
        tau: tokens a verifying pass yields, the corrected one included; at most `size`.
    Returns:
        `reasoning`, of the tokens alone; `cycle`, of prefill, NEW_TOKENS tokens and action.
    """
    if not 1.0 <= tau <= size:
        raise ConfigError([f"tau: given {tau}, expected 1 to the verified tokens, {size}"])
    per_token = (times_ms[f"verify_{size}"] + times_ms["draft"]) / tau
    rest = times_ms["prefill"] + times_ms["expert"]
    return {"reasoning": times_ms["decode_1"] / per_token,
            "cycle": (rest + NEW_TOKENS * times_ms["decode_1"])
            / (rest + NEW_TOKENS * per_token)}


def measure(runtime: Runtime, draft: DraftRuntime, repeats: int) -> dict[str, float]:
    """Median milliseconds of every stage."""
    config = runtime.config
    generator = np.random.default_rng(0)
    vision = config.vision
    images = generator.integers(0, 256, (NUM_IMAGES, vision.image_height, vision.image_width, 3),
                                dtype=np.uint8)
    ids = prompt_ids(config, generator)
    times = {"encode_4": _median_ms(lambda: runtime.encode_images(images[:4]), repeats)}
    features = runtime.encode_images(images)
    times["prefill"] = _median_ms(lambda: runtime.prefill(ids, features), repeats)
    states = runtime.prefill(ids, features).hidden_states
    for size in (1, *VERIFY_SIZES):
        name = "decode_1" if size == 1 else f"verify_{size}"
        times[name] = _median_ms(lambda: _pass(runtime, size), repeats)
    noise = generator.standard_normal((config.flow.num_waypoints, config.flow.action_size),
                                      np.float32)
    times["expert"] = _median_ms(lambda: runtime.act(noise), repeats)
    draft.begin(ids, states)
    committed = [layer[:COMMITTED] for layer in states]
    times["draft"] = _median_ms(lambda: draft.draft(int(ids[-1]), committed), repeats)
    return times


def prompt_ids(config: ModelConfig, generator: np.random.Generator) -> np.ndarray:
    """(n,) int64: images and text in Alpamayo's numbers, the text random."""
    visual = np.full(NUM_IMAGES * config.vision.tokens_per_image, config.tokens.image_pad_id)
    low = min(config.tokens.text_vocab_size, config.tokens.image_pad_id, config.tokens.im_start_id,
              config.tokens.endoftext_id)
    text = generator.integers(0, low, PROMPT_TEXT)
    return np.concatenate((text[:20], visual, text[20:])).astype(np.int64)


def _pass(runtime: Runtime, size: int) -> None:
    length = runtime.length
    runtime.extend(np.zeros(size, np.int64))
    runtime.crop(length)


def _median_ms(work: Callable[[], Any], repeats: int) -> float:
    times = []
    for _ in range(repeats + WARM_UP):
        started_s = time.perf_counter()
        work()
        times.append(1e3 * (time.perf_counter() - started_s))
    return float(np.median(times[WARM_UP:]))


def report(config: ModelConfig, draft: DraftConfig, times_ms: Mapping[str, float],
           bandwidth_gbps: float, weight_bytes: int, taus: Sequence[float]) -> dict[str, Any]:
    """Times, floors, and gains, as --out writes them."""
    floor = Floor.of(config, draft, weight_bytes)
    least = floor.milliseconds(bandwidth_gbps, config.flow.num_steps)
    floors = {name: least["decode"] for name in times_ms if name.startswith(("decode", "verify"))}
    floors |= {name: least[name] for name in ("draft", "expert")}
    size = draft.block_length
    return {"config": config.name,
            "prompt_tokens": NUM_IMAGES * config.vision.tokens_per_image + PROMPT_TEXT,
            "bandwidth_gbps": bandwidth_gbps,
            "bytes": {"decode": floor.decode, "draft": floor.draft,
                      "expert_step": floor.expert_step},
            "ms": dict(times_ms), "floor_ms": floors,
            "share_of_floor": {name: floors[name] / times_ms[name] for name in floors},
            "verified_tokens": size,
            "speed_up": [{"tau": tau, **speed_up(times_ms, size, tau)} for tau in taus]}


def table(found: Mapping[str, Any]) -> str:
    """The report for a terminal."""
    lines = [f"{found['config']}, {found['runtime']}, prompt of {found['prompt_tokens']} tokens, "
             f"{found['bandwidth_gbps']:.0f} GB/s",
             f"{'stage':<12}{'ms':>10}{'floor ms':>10}{'of it':>8}"]
    for name, ms in found["ms"].items():
        least = found["floor_ms"].get(name)
        rest = f"{least:>10.3f}{least / ms:>8.0%}" if least is not None else ""
        lines.append(f"{name:<12}{ms:>10.3f}{rest}")
    lines += [f"tau {row['tau']:g}: reasoning {row['reasoning']:.2f}x, cycle {row['cycle']:.2f}x "
              f"({found['verified_tokens']} tokens verified)" for row in found["speed_up"]]
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--config", default="alpamayo-r1", help="preset (default: %(default)s)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tau", type=float, nargs="+", default=[2.7, 3.7, 6.25], metavar="T",
                        help="tokens a target pass yields (default: 2.7 3.7 6.25)")
    parser.add_argument("--block", type=int, default=8, metavar="B",
                        help="tokens of a draft's block, as many are verified: 4, 8 or 16")
    parser.add_argument("--bandwidth-gbps", type=float, metavar="GBPS",
                        help="of the memory; default: measured by a copy")
    parser.add_argument("--repeats", type=int, default=20, help="of each stage (default: 20)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the figures as JSON")


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    if args.block not in VERIFY_SIZES or args.repeats < 1:
        raise ConfigError([f"block, repeats: given {args.block}, {args.repeats}, expected a block "
                           f"of {', '.join(map(str, VERIFY_SIZES))} and 1 repeat or more"])
    config = preset(args.config)
    draft_config = DraftConfig.for_target(config.text, block_length=args.block)
    try:
        from ..runtimes.torch_draft import TorchDraft
        from ..runtimes.torch_runtime import (TorchRuntime, measure_bandwidth_gbps, random_target,
                                              weights_dtype)
    except ImportError as error:
        raise MissingDependencyError(f"gpu_bench: {error.name} is not installed: pip install "
                                     f"'reasoning_planner[train]'") from error
    dtype = weights_dtype(args.device)
    target = random_target(config, args.device, dtype)
    room = (NUM_IMAGES * config.vision.tokens_per_image + PROMPT_TEXT + max(VERIFY_SIZES)
            + COMMITTED * (args.repeats + WARM_UP))
    runtime = TorchRuntime(target, capacity=room, hidden_layers=draft_config.feature_layers,
                           fixed_shapes=True)
    draft = TorchDraft.random(draft_config, target, room)
    times_ms = measure(runtime, draft, args.repeats)
    bandwidth = args.bandwidth_gbps or measure_bandwidth_gbps(args.device)
    found = {"hardware": describe_hardware(), "runtime": f"torch, {args.device}, {dtype}",
             **report(config, draft_config, times_ms, bandwidth, dtype.itemsize, args.tau)}
    if args.out:
        replace_text(args.out, json.dumps(plain(found), indent=1) + "\n")
    print(table(found))
    return 0


def main(argv: list[str] | None = None) -> int:
    """Exit 1 when there is no such device."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    try:
        return run(parser.parse_args(argv))
    except PlannerError as error:
        print(f"gpu_bench: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
