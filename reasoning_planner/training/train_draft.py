"""Train a block draft for a frozen target: distillation on the target's own greedy texts.

First the target writes a text for every sample of the world, and the hidden states that the draft
reads are kept on disk (OUT/rollouts); then the draft learns to write the same, and its graph for
ONNX Runtime is written beside its weights (OUT/release). FlatRoPE is --rope flat; --rope and
--context are the switches that it is compared by. The defaults are what nano's draft took.

Interrupt it, or give --minutes: it saves, and the same command with --resume goes on where it
was, with the same next step. --start-from takes the weights of a draft that another target had.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Iterator

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from ..errors import DataError
from ..models.draft import Draft
from ..models.draft_config import CONTEXTS, ROPES, DraftConfig
from ..models.draft_release import INFO_NAME, load_draft, save_draft
from ..models.target import Target
from ..runtimes.draft_base import load_draft_config, target_sha256
from ..vla import checkpoint_directory
from .checkpoint import load_release, load_state, save_state
from .dataset import PromptLayout, ShardStore, data_version, render_shards
from .draft_losses import draft_loss
from .draft_sequences import Sequences, held_out_figures
from .provenance import git_commit
from .rollouts import (Rollouts, RolloutsPlan, RolloutStore, make_rollouts, num_shards,
                       write_rollouts)
from .train_target import StopRequest, learning_rate, step_seed, validation_shard

STATE_NAME = "state.pt"
SAVE_EVERY_S = 240.0


@dataclass(frozen=True)
class DraftSchedule:
    """Steps, rates and the loss.

    Attributes:
        rows: texts a step; blocks: places in each that a draft begins at, drawn anew.
        gamma: of the weights exp(-(j - 1) / gamma) of the drafted places j.
        total_variation: weight of that term; 0 leaves it out.
    """

    steps: int = 600
    rate: float = 3e-3
    rows: int = 16
    blocks: int = 6
    gamma: float = 6.0
    total_variation: float = 0.0
    warmup: int = 50
    weight_decay: float = 0.02
    clip_norm: float = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--checkpoint", default="nano",
                        help="the target: folder of a release of train-target, or the name of one "
                        "that comes with the package (default %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out/draft"),
                        help="folder of rollouts, state, log and release (default %(default)s)")
    parser.add_argument("--data", type=Path, default=None,
                        help="folder of the rendered shards (default OUT/data)")
    parser.add_argument("--rollouts", type=Path, default=None,
                        help="folder of the target's texts (default OUT/rollouts)")
    parser.add_argument("--shards", type=int, default=10,
                        help="shards of 500 samples (default %(default)s)")
    parser.add_argument("--augment", type=float, default=0.5, metavar="SHARE",
                        help="of the samples that lose cameras or colours, as in the target's own "
                        "training (default %(default)s)")
    parser.add_argument("--layers", type=int, default=2, help="of the draft (default %(default)s)")
    parser.add_argument("--feature-layers", type=_numbers, default=None, metavar="N,N",
                        help="of the target (0 = first), whose outputs the draft reads (default: "
                        "where 24, 30, 31, 32, 34 of 36 are)")
    parser.add_argument("--block-length", type=int, default=16,
                        help="the last committed token and the drafted ones; fewer of them may "
                        "be proposed (default %(default)s)")
    parser.add_argument("--rope", choices=ROPES, default="flat", help="(default %(default)s)")
    parser.add_argument("--context", choices=CONTEXTS, default="full",
                        help="what the draft sees of the prompt (default %(default)s)")
    parser.add_argument("--context-k", type=int, default=64, metavar="K",
                        help="tokens that --context last_k sees (default %(default)s)")
    parser.add_argument("--steps", type=int, default=DraftSchedule.steps)
    parser.add_argument("--rate", type=float, default=DraftSchedule.rate, help="peak")
    parser.add_argument("--rows", type=int, default=DraftSchedule.rows, help="texts a step")
    parser.add_argument("--blocks", type=int, default=DraftSchedule.blocks,
                        help="drafts a text and step")
    parser.add_argument("--gamma", type=float, default=DraftSchedule.gamma,
                        help="weights exp(-(j - 1) / gamma) (default %(default)s)")
    parser.add_argument("--total-variation", type=float, default=0.0, metavar="WEIGHT",
                        help="of the total variation term (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of everything drawn")
    parser.add_argument("--minutes", type=float, default=math.inf,
                        help="save and stop cleanly after so long")
    parser.add_argument("--resume", action="store_true",
                        help="go on from OUT/state.pt if it is there")
    parser.add_argument("--start-from", type=Path, default=None, metavar="DIR",
                        help="release of a draft of the same shape, to begin with its weights")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--validate-every", type=int, default=250, metavar="STEPS")
    parser.add_argument("--validate-scenes", type=int, default=200, metavar="N")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


class DraftTrainer:
    """Draft, optimiser and place in the schedule; its state dict is all a later process needs."""

    def __init__(self, config: DraftConfig, target: Target, input_ids: np.ndarray,
                 schedule: DraftSchedule, store: RolloutStore, seed: int):
        """
        Args:
            target: frozen, lends embedding and lm_head.
            input_ids: (L,) int64, any prompt of the rollouts' layout.
        """
        self.config, self.schedule, self.store, self.seed = config, schedule, store, seed
        self.step, self.minutes = 0, 0.0
        target.requires_grad_(False)
        self._target = target
        self.draft = Draft(config, target)
        self.draft.initialise(seed)
        self._sequences = Sequences(self.draft, target, input_ids)
        self.optimiser = self._new_optimiser()

    def _new_optimiser(self) -> torch.optim.AdamW:
        groups: dict[bool, list[nn.Parameter]] = {}
        for parameter in self.draft.parameters():
            groups.setdefault(parameter.dim() > 1, []).append(parameter)
        return torch.optim.AdamW(
            [{"params": parameters, "weight_decay": self.schedule.weight_decay * decayed}
             for decayed, parameters in groups.items()],
            lr=self.schedule.rate, betas=(0.9, 0.98))

    def state_dict(self) -> dict[str, Any]:
        """Everything, as plain values and tensors."""
        return {"draft": self.draft.state_dict(), "optimiser": self.optimiser.state_dict(),
                "step": self.step, "minutes": self.minutes, "seed": self.seed,
                "config": self.config.to_dict(), "schedule": asdict(self.schedule)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where `state_dict` was made; the schedule stays this trainer's own.

        Raises:
            DataError: it is of another draft or target.
        """
        if state["config"] != self.config.to_dict():
            raise DataError(f"training state: given a draft {state['config']}, expected "
                            f"{self.config.to_dict()}")
        self.step, self.minutes, self.seed = state["step"], state["minutes"], state["seed"]
        self.draft.load_state_dict(state["draft"])
        self.optimiser.load_state_dict(state["optimiser"])

    def start_from(self, folder: Path) -> None:
        """Begin with the weights of a release, whose target may have been another.

        Raises:
            DataError: it is a draft of another shape.
            ModelError: a file is missing or damaged.
        """
        given = load_draft_config(folder)
        if replace(given, target_sha256=self.config.target_sha256) != self.config:
            raise DataError(f"{folder}: given a draft {given.to_dict()}, expected "
                            f"{self.config.to_dict()} but for the target's weights")
        self.draft.load_state_dict(load_draft(folder, given, self._target).state_dict())

    @property
    def finished(self) -> bool:
        """Whether all steps are done."""
        return self.step >= self.schedule.steps

    def train_step(self) -> dict[str, float]:
        """One step; returns what it measured."""
        schedule = self.schedule
        rng = step_seed(self.seed, 0, self.step)
        indexes = rng.integers(len(self.store), size=schedule.rows)
        last = np.maximum(self.store.lengths(indexes) - 1, 1)
        starts = rng.integers(0, last[:, None], size=(schedule.rows, schedule.blocks))
        starts[:, 0] = 0            # where every text's first round begins
        blocks = self.store.blocks(indexes, starts, self.config.block_length - 1)
        self.draft.train()
        self.optimiser.zero_grad(set_to_none=True)
        found = draft_loss(self.draft, self._sequences.hidden(blocks), blocks.labels,
                           blocks.valid, blocks.before if schedule.total_variation else None,
                           schedule.gamma)
        loss = found.cross_entropy + schedule.total_variation * found.total_variation
        loss.backward()
        norm = float(nn.utils.clip_grad_norm_(self.draft.parameters(), schedule.clip_norm))
        share = learning_rate(self.step, schedule.steps, schedule.warmup)
        for group in self.optimiser.param_groups:
            group["lr"] = schedule.rate * share
        if math.isfinite(norm):
            self.optimiser.step()
        self.step += 1
        return {"loss": float(loss.detach()), "cross_entropy": float(found.cross_entropy.detach()),
                "total_variation": float(found.total_variation.detach()), "right": found.right,
                "grad_norm": norm}

    def validate(self, rollouts: Rollouts) -> dict[str, float]:
        """See draft_sequences.held_out_figures."""
        self.draft.eval()
        return held_out_figures(self._sequences, rollouts)


def train(trainer: DraftTrainer, validation: Rollouts, stop: StopRequest, validate_every: int
          ) -> Iterator[dict[str, Any]]:
    """Steps until the end or the stop request, one log record each."""
    while not trainer.finished and not stop:
        started = time.monotonic()
        record: dict[str, Any] = {"step": trainer.step, **trainer.train_step()}
        seconds = time.monotonic() - started
        trainer.minutes += seconds / 60.0
        record["rows_per_s"] = trainer.schedule.rows / seconds
        if trainer.step % validate_every == 0 or trainer.finished:
            record |= {f"held_out_{k}": v for k, v in trainer.validate(validation).items()}
        yield record


def run(args: argparse.Namespace) -> int:
    """Train, or go on training; 0 also when stopped by --minutes."""
    stop = StopRequest(time.monotonic() + 60.0 * args.minutes)
    torch.set_num_threads(args.threads)
    checkpoint = checkpoint_directory(args.checkpoint)
    target, tokenizer = load_release(checkpoint)
    origin = target_sha256(checkpoint)
    config = _config(args, target, origin)
    layout = PromptLayout(tokenizer, target.config)
    resumed = args.resume and (args.out / STATE_NAME).exists()
    state = load_state(args.out / STATE_NAME) if resumed else None
    stop.listen()
    data = args.data or args.out / "data"
    samples = _samples(args, data, target)
    written = args.rollouts or args.out / "rollouts"
    plan = RolloutsPlan(origin, config.feature_layers, layout.length, args.augment)
    if not _roll_out(written, target, layout, samples, plan, stop):
        print(f"{written}: rollouts not finished, go on with the same command")
        return 0
    store = RolloutStore.open(written, config.feature_layers, len(samples))
    trainer = DraftTrainer(config, target, layout.prompt(np.zeros((16, 3))), _schedule(args),
                           store, args.seed)
    if args.start_from is not None:
        trainer.start_from(args.start_from)
    if state is not None:
        trainer.load_state_dict(state)
    figures = _train_and_log(trainer, _held_out(args, data, target, layout, config), stop, args)
    save_state(trainer.state_dict(), args.out / STATE_NAME)
    info = {"seed": trainer.seed, "target": target.config.name, "target_sha256": origin,
            "data_version": data_version(data), "texts": len(store), "step": trainer.step,
            "minutes": round(trainer.minutes, 2),
            "started_from": None if args.start_from is None else _origin(args.start_from),
            "schedule": asdict(trainer.schedule), "figures": figures,
            "parameters": sum(p.numel() for p in trainer.draft.parameters()),
            "commit": git_commit()}
    release = args.out / "release"
    save_draft(trainer.draft, release, info)
    _export(release, checkpoint)
    print(f"{release}: step {trainer.step}, "
          f"{'finished' if trainer.finished else 'not finished, go on with --resume'}")
    return 0


def _config(args: argparse.Namespace, target: Target, origin: str) -> DraftConfig:
    chosen = {} if args.feature_layers is None else {"feature_layers": args.feature_layers}
    return DraftConfig.for_target(
        target.config.text, num_layers=args.layers, block_length=args.block_length,
        rope=args.rope, context=args.context, context_k=args.context_k, target_sha256=origin,
        **chosen)


def _origin(folder: Path) -> dict[str, Any]:
    """What a draft's training.json says of the weights that another one begins with."""
    try:
        info = json.loads((folder / INFO_NAME).read_text(encoding="utf-8"))
        return {name: info[name] for name in ("target_sha256", "data_version", "texts", "step",
                                              "minutes", "schedule", "started_from")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder / INFO_NAME}: {type(error).__name__} {error}, expected what "
                        f"train-draft writes") from error


def _export(release: Path, checkpoint: Path) -> None:
    """The graph for ONNX Runtime, where onnx is installed."""
    try:
        from ..export.draft_graph import export_draft
    except ModuleNotFoundError as error:
        print(f"{release}: no graph written, {error.name} is not installed: pip install onnx",
              file=sys.stderr)
        return
    export_draft(release, checkpoint)


def _schedule(args: argparse.Namespace) -> DraftSchedule:
    for name in ("steps", "rows", "blocks", "rate", "gamma"):
        if not getattr(args, name) > 0:
            raise DataError(f"--{name}: given {getattr(args, name)}, expected more than 0")
    return DraftSchedule(args.steps, args.rate, args.rows, args.blocks, args.gamma,
                         args.total_variation)


def _samples(args: argparse.Namespace, root: Path, target: Target) -> ShardStore:
    vision = target.config.vision
    with tqdm(total=args.shards, desc="render", unit="shard",
              disable=not sys.stderr.isatty()) as bar:
        render_shards(root, args.shards, (vision.image_height, vision.image_width), 1,
                      lambda index: bar.update())
    return ShardStore.open(root, args.shards)


def _roll_out(root: Path, target: Target, layout: PromptLayout, samples: ShardStore,
              plan: RolloutsPlan, stop: StopRequest) -> bool:
    with tqdm(total=num_shards(samples), desc="rollouts", unit="shard",
              disable=not sys.stderr.isatty()) as bar:
        def done() -> bool:
            bar.update()
            return not stop

        return write_rollouts(root, target, layout, samples, plan, done)


def _held_out(args: argparse.Namespace, data: Path, target: Target, layout: PromptLayout,
              config: DraftConfig) -> Rollouts:
    vision = target.config.vision
    shard = validation_shard(data, args.validate_scenes,
                             (vision.image_height, vision.image_width))
    return make_rollouts(target, layout, shard, range(len(shard)), config.feature_layers)


def _train_and_log(trainer: DraftTrainer, validation: Rollouts, stop: StopRequest,
                   args: argparse.Namespace) -> dict[str, Any]:
    """Returns the newest held-out figures."""
    figures: dict[str, Any] = {}
    saved = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    with open(args.out / "log.jsonl", "a", encoding="utf-8") as log, tqdm(
            total=trainer.schedule.steps, initial=trainer.step, desc="train-draft", unit="step",
            disable=not sys.stderr.isatty()) as bar:
        for record in train(trainer, validation, stop, args.validate_every):
            bar.update()
            held_out = {k: v for k, v in record.items() if k.startswith("held_out_")}
            figures |= _rounded(held_out)
            if held_out or record["step"] % 10 == 0:
                log.write(json.dumps({"time_s": round(time.time(), 1), **_rounded(record)}) + "\n")
                log.flush()
            bar.set_postfix_str(f"{record['loss']:.3f}")
            if time.monotonic() - saved > SAVE_EVERY_S:
                save_state(trainer.state_dict(), args.out / STATE_NAME)
                saved = time.monotonic()
    return figures


def _rounded(record: dict[str, Any]) -> dict[str, Any]:
    return {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in record.items()}
