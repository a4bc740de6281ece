"""Train the stand-in target on the synthetic world, in three stages.

  tower   the vision tower alone, on what the world knows about front and tele images
  joint   the whole model on the reasoning text, first on prompts of 4 images, then of 16; the
          action expert joins soon, reading detached keys and values
  expert  the action expert alone, on keys and values computed once for many steps; released are
          its weights averaged over the last steps

Interrupt it, or give --minutes: it saves, and --resume goes on with the same next step. For more
than one process: torchrun --nproc-per-node N -m reasoning_planner.training.train_target ...
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from tqdm import tqdm

from ..errors import DataError, PlannerError
from ..models.config import ModelConfig, preset
from ..models.target import Target, count_parameters
from ..tokenization.text_tokenizer import TextTokenizer
from ..world.language import all_sentences
from ..world.scene import KINDS
from . import losses
from .cached_keys import CachedKeys, bytes_of
from .checkpoint import load_release, load_state, save_release, save_state
from .dataset import (FIRST_HELD_OUT_SEED, FULL_PROMPT, NUM_ONE_HOT, SHORT_PROMPT, Batch,
                      PromptLayout, Shard, ShardStore, augment_images, data_version, load_shard,
                      make_batch, make_shard, render_shards, save_shard, token_config,
                      train_tokenizer)
from .prediction import predict_all
from .provenance import git_commit
from .validation import ade, exact_matches, right_manoeuvres, true_paths

STAGES = ("tower", "joint", "expert")
VALIDATION_SEED = FIRST_HELD_OUT_SEED + 500_000     # clear of evaluate-target's seeds
FRONT_AND_TELE = ((1, 3), (3, 3))
# What a vehicle ahead is doing shows in few pixels: most of the wrong manoeuvres are here.
HARD_KINDS = ("lead_follow", "lead_slow", "lead_braking", "lead_stopped", "green_light",
              "curve_left", "curve_right", "oncoming")
CACHED_AT_ONCE, MAX_CACHED_BYTES = 24, 6e9      # the bytes: over all processes
EXPERT_PARTS = ("expert.", "action_in_proj.", "action_out_proj.")


@dataclass(frozen=True)
class Schedule:
    """Steps, learning rates and mixture of the three stages.

    Attributes:
        steps: of each stage, in the order of STAGES.
        rates: peak learning rate of each stage; the tower gets `tower_share` of joint's.
        batches: rows a step over all processes, of each stage.
        tower_from: share of the joint stage during which the pretrained tower is left alone.
        full_from, full_until: share of the joint stage after which 16-image prompts begin, at
            `full_share` of the steps, and after which there are no others.
        hard_share: of the joint stage's rows, drawn from HARD_KINDS besides their own share.
        expert_from: share of the joint stage after which the expert learns too.
        cached_samples: of the expert stage, over all processes, whose keys and values are kept
            in memory (0.9 MB each for nano); 0 computes them anew in each step.
        cache_renewals: how often in the stage other samples take their place.
        average_decay: of the expert's released weights, the running mean of the stage's.
    """

    steps: tuple[int, int, int] = (860, 870, 390)
    rates: tuple[float, float, float] = (1e-3, 2e-3, 1.5e-3)
    batches: tuple[int, int, int] = (32, 16, 16)
    tower_share: float = 0.2
    warmup: int = 50
    tower_from: float = 0.4
    full_from: float = 0.4
    full_share: float = 0.3
    full_until: float = 0.88
    expert_from: float = 0.15
    hard_share: float = 0.0
    joint_draws: int = 2
    expert_draws: int = 4
    cached_samples: int = 2400
    cache_renewals: int = 1
    average_decay: float = 0.98
    privileged_weight: float = 0.3
    weight_decay: float = 0.02
    clip_norm: float = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--out", type=Path, default=Path("out/nano"),
                        help="folder of state, log and release (default %(default)s)")
    parser.add_argument("--data", type=Path, default=None,
                        help="folder of the rendered shards (default OUT/data)")
    parser.add_argument("--shards", type=int, default=40,
                        help="shards of 500 samples, 0.2 GB each (default %(default)s)")
    parser.add_argument("--preset", default="nano", help="model sizes (default %(default)s)")
    parser.add_argument("--steps", type=int, nargs=3, metavar=("TOWER", "JOINT", "EXPERT"),
                        default=Schedule.steps, help="steps of the stages")
    parser.add_argument("--seed", type=int, default=0, help="of everything drawn")
    parser.add_argument("--minutes", type=float, default=math.inf,
                        help="save and stop cleanly after so long")
    parser.add_argument("--resume", action="store_true", help="go on from OUT/state.pt")
    parser.add_argument("--start-from", type=Path, metavar="DIR",
                        help="begin with the weights of a release, optimiser fresh")
    parser.add_argument("--stage", choices=STAGES,
                        help="begin this stage anew, with --start-from or --resume")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", dest="changes",
                        help="other values in the schedule, as JSON: rates=[1e-3,5e-4,1e-3]")
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--validate-every", type=int, default=150, metavar="STEPS")
    parser.add_argument("--validate-scenes", type=int, default=64, metavar="N")


def stand_in_config(name: str, tokenizer: TextTokenizer) -> ModelConfig:
    """A preset with the ids of a trained tokenizer."""
    return preset(name).with_tokens(token_config(tokenizer))


def learning_rate(step: int, steps: int, warmup: int) -> float:
    """Share of the peak: linear warm-up, then a cosine down to 3 %."""
    rise = min(1.0, (step + 1) / warmup)
    return rise * (0.03 + 0.97 * 0.5 * (1.0 + math.cos(math.pi * min(1.0, step / steps))))


def step_seed(seed: int, stage: int, step: int, rank: int = 0) -> np.random.Generator:
    """All randomness of a step comes from its number, so a resumed run draws the same."""
    return np.random.default_rng((seed, stage, step, rank))


@torch.no_grad()
def smooth_history_bins(target: Target, seed: int, deviation: float = 0.3) -> None:
    """Embed the history bins as random mixtures of waves, so that near steps look alike.

    Each bin is met too seldom to learn its place on the axis by itself. Wavelengths from 8 m down
    to 6 cm: the finest resolve the 8 mm of one bin, the coarsest are unique over the axis.
    """
    tokens = target.config.tokens
    bins = torch.linspace(-1.0, 1.0, tokens.num_history_bins)[:, None]
    angles = math.pi * bins * 2.0 ** torch.arange(8)
    waves = torch.cat((2.0 * bins, angles.sin(), angles.cos()), dim=1)
    weight = target.language_model.embed_tokens.weight
    mixture = torch.randn(waves.shape[1], weight.shape[1],
                          generator=torch.Generator().manual_seed(seed))
    rows = waves @ mixture
    start = tokens.history_bin_start
    weight[start:start + tokens.num_history_bins] = deviation * rows / rows.std()


class Trainer:
    """Model, optimiser and place in the schedule; `train` moves it on.

    Its state dict is all that a later process needs.
    """

    def __init__(self, config: ModelConfig, tokenizer: TextTokenizer, schedule: Schedule,
                 store: ShardStore, seed: int, world_size: int = 1, rank: int = 0):
        self.config, self.tokenizer, self.schedule = config, tokenizer, schedule
        self.store, self.seed, self.world_size, self.rank = store, seed, world_size, rank
        self.stage, self.step = 0, 0
        self.average: dict[str, torch.Tensor] = {}
        self._cache: tuple[int, CachedKeys] | None = None       # its number in the stage
        self.target = Target(config)
        self.target.initialise(seed)
        smooth_history_bins(self.target, seed)
        losses.whiten_patches(self.target, self._some_images(256))
        self.sentences: dict[str, int] = {}
        self._learn_sentences()
        torch.manual_seed(seed)
        num_labels = store.place(0)[0].labels.shape[1]
        self.heads = losses.PrivilegedHeads(self.target, num_labels, NUM_ONE_HOT, 400)
        self.full = PromptLayout(tokenizer, config, FULL_PROMPT)
        self.short = PromptLayout(tokenizer, config, SHORT_PROMPT)
        self._check_cache()
        self.optimiser = self._new_optimiser()

    def _check_cache(self) -> None:
        """Refuse at the start what would not fit hours later."""
        count = self.schedule.cached_samples
        size = count * bytes_of(self.config.text, self._longest())
        if size > MAX_CACHED_BYTES:
            raise DataError(f"cached_samples: given {count}, which take {size / 1e9:.1f} GB, "
                            f"expected at most {MAX_CACHED_BYTES / 1e9:.0f} GB; fewer, or 0 to "
                            "compute keys and values in each step")

    def _some_images(self, count: int) -> torch.Tensor:
        """(count, H, W, 3) uint8, front and tele images in turn."""
        chosen = []
        for i in range(count):
            shard, row = self.store.place(i * len(self.store) // count)
            chosen.append(shard.images[row][FRONT_AND_TELE[i % 2]])
        return torch.from_numpy(np.stack(chosen))

    def _learn_sentences(self) -> None:
        """Number the preferred wordings in the order of their appearance; find the hard kinds."""
        hard: list[int] = []
        for index in range(len(self.store)):
            shard, row = self.store.place(index)
            if KINDS[shard.kinds[row]] in HARD_KINDS:
                hard.append(index)
            if len(self.sentences) < 400:
                self.sentences.setdefault(shard.cocs[row][0], len(self.sentences))
        self.hard = np.array(hard, np.int64)

    # Parameters

    def trained(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters this stage may change."""
        name = STAGES[self.stage]
        heads = [(f"heads.{n}", p) for n, p in self.heads.named_parameters()]
        target = list(self.target.named_parameters())
        if name == "tower":
            return [*heads, *((n, p) for n, p in target if n.startswith("vlm.model.visual."))]
        if name == "expert":
            return [(n, p) for n, p in target if n.startswith(EXPERT_PARTS)]
        return [*heads, *target]

    def _new_optimiser(self) -> torch.optim.AdamW:
        groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
        joint = STAGES[self.stage] == "joint"
        for name, parameter in self.trained():
            slow = joint and name.startswith("vlm.model.visual.")
            decayed = parameter.dim() > 1 and "embed" not in name
            groups.setdefault((slow, decayed), []).append(parameter)
        schedule = self.schedule
        return torch.optim.AdamW(
            [{"params": parameters, "weight_decay": schedule.weight_decay * decayed,
              "share": schedule.tower_share if slow else 1.0}
             for (slow, decayed), parameters in groups.items()],
            lr=schedule.rates[self.stage], betas=(0.9, 0.98))

    def state_dict(self) -> dict[str, Any]:
        """Everything, as plain values and tensors."""
        return {"target": self.target.state_dict(), "heads": self.heads.state_dict(),
                "optimiser": self.optimiser.state_dict(), "stage": self.stage, "step": self.step,
                "seed": self.seed, "sentences": self.sentences, "average": self.average,
                "config": self.config.to_dict(), "schedule": dataclasses.asdict(self.schedule)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where `state_dict` was made; the schedule stays this trainer's own."""
        self.stage, self.step = state["stage"], state["step"]
        self.seed, self.sentences = state["seed"], state["sentences"]
        self.target.load_state_dict(state["target"])
        self.heads.load_state_dict(state["heads"])
        self.average = state.get("average", {})
        self._cache = None
        self.optimiser = self._new_optimiser()
        if self.optimiser.state_dict()["param_groups"] and not self.finished:
            self.optimiser.load_state_dict(state["optimiser"])

    def begin(self, stage: str) -> None:
        """Start a stage anew, its optimiser fresh."""
        self.stage, self.step = STAGES.index(stage), 0
        self.average, self._cache = {}, None
        self.optimiser = self._new_optimiser()

    # Steps

    @property
    def finished(self) -> bool:
        """Whether all stages are done."""
        return self.stage == len(STAGES) - 1 and self.step >= self.schedule.steps[-1]

    @property
    def progress(self) -> float:
        """Share of the stage that is done."""
        return self.step / max(self.schedule.steps[self.stage], 1)

    def advance(self) -> None:
        """Enter the next stage where this one is over."""
        while self.step >= self.schedule.steps[self.stage] and not self.finished:
            self.stage, self.step = self.stage + 1, 0
            self.optimiser = self._new_optimiser()

    def train_step(self) -> dict[str, float]:
        """One step of the present stage; returns what it measured."""
        rng = step_seed(self.seed, self.stage, self.step, self.rank + 1)
        rows = self.schedule.batches[self.stage] // self.world_size
        indexes = self._draw(rows, rng)
        self.optimiser.zero_grad(set_to_none=True)
        compute = {"tower": self._tower_loss, "joint": self._joint_loss,
                   "expert": self._expert_loss}[STAGES[self.stage]]
        loss, measured = compute(indexes, rng)
        loss.backward()
        learning = [(name, p) for name, p in self.trained() if p.grad is not None]
        if self.world_size > 1:
            average_gradients([p for _, p in learning])
        norms = self._clip(learning)
        share = learning_rate(self.step, self.schedule.steps[self.stage], self.schedule.warmup)
        for group in self.optimiser.param_groups:
            group["lr"] = self.schedule.rates[self.stage] * share * group["share"]
        if all(math.isfinite(norm) for norm in norms):
            self.optimiser.step()
            self._follow()
        self.step += 1
        return {"loss": float(loss.detach()), "grad_norm": norms[0], **measured}

    @torch.no_grad()
    def _follow(self) -> None:
        """Move the averaged weights; the first steps count fully, not the stage's start."""
        if STAGES[self.stage] != "expert":
            return
        kept = min(self.schedule.average_decay, self.step / (self.step + 10.0))
        for name, parameter in self.trained():
            if name not in self.average:
                self.average[name] = parameter.detach().clone()
            self.average[name].lerp_(parameter.detach(), 1.0 - kept)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """The target with its averaged weights, where there are any."""
        own = dict(self.target.named_parameters())
        held = {name: own[name].detach().clone() for name in self.average}
        with torch.no_grad():
            for name, value in self.average.items():
                own[name].copy_(value)
        try:
            yield
        finally:
            with torch.no_grad():
                for name, value in held.items():
                    own[name].copy_(value)

    def _draw(self, rows: int, rng: np.random.Generator) -> np.ndarray:
        """Samples of a step; in the joint stage `hard_share` of them of HARD_KINDS."""
        indexes = rng.integers(len(self.store), size=rows)
        if STAGES[self.stage] == "joint" and len(self.hard):
            again = rng.random(rows) < self.schedule.hard_share
            indexes[again] = rng.choice(self.hard, size=int(again.sum()))
        return indexes

    def _clip(self, learning: list[tuple[str, nn.Parameter]]) -> list[float]:
        """Clip the expert's gradients by themselves: the two share no parameter."""
        expert = [p for name, p in learning if name.startswith(EXPERT_PARTS)]
        others = [p for name, p in learning if not name.startswith(EXPERT_PARTS)]
        return [float(nn.utils.clip_grad_norm_(part, self.schedule.clip_norm))
                for part in (others, expert) if part]

    def _sentence_ids(self, indexes: np.ndarray) -> torch.Tensor:
        places = [self.store.place(int(index)) for index in indexes]
        return torch.tensor([self.sentences.get(shard.cocs[row][0], 0) for shard, row in places])

    def _tower_loss(self, indexes: np.ndarray, rng: np.random.Generator
                    ) -> tuple[torch.Tensor, dict[str, float]]:
        places = [self.store.place(int(index)) for index in indexes]
        images = np.concatenate([augment_images(shard.images[row], rng, FRONT_AND_TELE)
                                 for shard, row in places])
        labels = np.stack([shard.labels[row] for shard, row in places])
        loss, right = losses.tower_loss(self.target, self.heads, torch.from_numpy(images),
                                        torch.from_numpy(labels), self._sentence_ids(indexes))
        return loss, {"sentence_accuracy": float(right)}

    def _layout(self) -> PromptLayout:
        """Short or whole prompts; every process decides alike."""
        schedule = self.schedule
        if STAGES[self.stage] == "expert" or self.progress >= schedule.full_until:
            return self.full
        draw = step_seed(self.seed, self.stage, self.step).random()
        whole = self.progress >= schedule.full_from and draw < schedule.full_share
        return self.full if whole else self.short

    def _text_pass(self, batch: Batch, layout: PromptLayout, with_tower: bool) -> losses.TextPass:
        trained = torch.tensor([with_tower and place in FRONT_AND_TELE
                                for place in layout.places])
        vision = losses.encode_rows(self.target, torch.from_numpy(batch.images),
                                    len(batch.offset), trained)
        return losses.text_pass(self.target, torch.from_numpy(batch.input_ids),
                                torch.from_numpy(batch.label_mask), vision)

    def _flow_loss(self, batch: Batch, given: losses.TextPass, draws: int,
                   rng: np.random.Generator) -> torch.Tensor:
        generator = torch.Generator().manual_seed(int(rng.integers(2 ** 62)))
        return losses.flow_loss(self.target, given, torch.from_numpy(batch.offset),
                                torch.from_numpy(batch.controls),
                                torch.from_numpy(batch.v0_mps), draws, generator)

    def _joint_loss(self, indexes: np.ndarray, rng: np.random.Generator
                    ) -> tuple[torch.Tensor, dict[str, float]]:
        layout, schedule = self._layout(), self.schedule
        batch = make_batch(self.store, layout, indexes, rng)
        given = self._text_pass(batch, layout, with_tower=self.progress >= schedule.tower_from)
        text = losses.text_loss(given.logits, given.labels, torch.from_numpy(batch.label_mask))
        known = self.heads.loss(self.heads.text(given.opening), torch.from_numpy(batch.labels),
                                self._sentence_ids(indexes))
        loss = text + schedule.privileged_weight * known
        measured = {"text": float(text.detach()), "privileged": float(known.detach()),
                    "images": float(len(layout.places))}
        if self.progress >= schedule.expert_from:
            velocity = self._flow_loss(batch, given, schedule.joint_draws, rng)
            loss = loss + velocity
            measured["flow"] = float(velocity.detach())
        return loss, measured

    def _expert_loss(self, indexes: np.ndarray, rng: np.random.Generator
                     ) -> tuple[torch.Tensor, dict[str, float]]:
        draws = self.schedule.expert_draws
        if self.schedule.cached_samples:
            keys = self._cached_keys()
            given = keys.rows(rng.integers(len(keys), size=len(indexes)))
            generator = torch.Generator().manual_seed(int(rng.integers(2 ** 62)))
            velocity = losses.flow_loss(self.target, given, given.offset, given.controls,
                                        given.v0_mps, draws, generator)
        else:
            batch, passed = self._frozen_pass(indexes, rng)
            velocity = self._flow_loss(batch, passed, draws, rng)
        return velocity, {"flow": float(velocity.detach())}

    @torch.no_grad()
    def _frozen_pass(self, indexes: np.ndarray, rng: np.random.Generator
                     ) -> tuple[Batch, losses.TextPass]:
        batch = make_batch(self.store, self.full, indexes, rng)
        return batch, self._text_pass(batch, self.full, with_tower=False)

    def _cached_keys(self) -> CachedKeys:
        """This step's samples; a resumed run computes the same ones again."""
        schedule = self.schedule
        each = math.ceil(max(schedule.steps[self.stage], 1) / (schedule.cache_renewals + 1))
        number = self.step // each
        if self._cache is None or self._cache[0] != number:
            self._cache = None                      # its memory is free before the next is taken
            self._cache = number, self._collect(number)
        return self._cache[1]

    def _collect(self, number: int) -> CachedKeys:
        count = max(self.schedule.cached_samples // self.world_size, 1)
        rng = np.random.default_rng((self.seed, self.stage, number, self.rank + 1, 1))
        drawn = rng.permutation(len(self.store))[:count] if count <= len(self.store) else (
            rng.integers(len(self.store), size=count))
        starts = range(0, count, CACHED_AT_ONCE)
        passes = (self._frozen_pass(drawn[start:start + CACHED_AT_ONCE], rng) for start in
                  tqdm(starts, desc="keys and values", leave=False,
                       disable=self.rank > 0 or not sys.stderr.isatty()))
        return CachedKeys.collect(passes, self.config.text, count, self._longest())

    def _longest(self) -> int:
        """Tokens of the longest prompt with its answer."""
        longest = max(map(len, map(self.full.answer, all_sentences())))
        return self.full.length + longest

    def validate(self, shard: Shard) -> dict[str, float]:
        """Text and plans on held-out samples, prompts as this stage sees them."""
        whole = STAGES[self.stage] == "expert" or self.progress > self.schedule.full_from
        planned = STAGES[self.stage] == "expert" or self.progress > self.schedule.expert_from
        layout = self.full if whole else self.short
        with self.averaged():
            found = predict_all(self.target, self.tokenizer, layout, shard, act=planned)
        values = {"coc_exact_match": float(exact_matches(found.texts, shard).mean()),
                  "manoeuvre_accuracy": float(right_manoeuvres(found.texts, shard).mean())}
        if planned:
            values["ade3_m"] = float(ade(found.paths, true_paths(shard), 3.0).mean())
        return values


def average_gradients(parameters: list[nn.Parameter]) -> None:
    """Mean over the processes, in one message."""
    flat = torch.cat([p.grad.flatten() for p in parameters])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters])):
        parameter.grad.copy_(part.view_as(parameter))


class StopRequest:
    """True from the moment `until` (time.monotonic) on, or once the process is asked to end."""

    def __init__(self, until: float = math.inf):
        self._until, self._asked = until, False

    def listen(self) -> None:
        """Take SIGINT and SIGTERM as the request."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: setattr(self, "_asked", True))

    def __bool__(self) -> bool:
        return self._asked or time.monotonic() >= self._until


def train(trainer: Trainer, validation: Shard | None, stop: StopRequest, validate_every: int
          ) -> Iterator[dict[str, Any]]:
    """Steps until the end or the stop request, one log record each.

    Every `validate_every` steps of the text stages the record has held-out figures too.
    """
    trainer.advance()
    while not trainer.finished and not _all_agree(bool(stop), trainer):
        started = time.monotonic()
        stage, step = STAGES[trainer.stage], trainer.step
        measured = trainer.train_step()
        took = time.monotonic() - started
        record = {"stage": stage, "step": step, **measured,
                  "samples_per_s": trainer.schedule.batches[trainer.stage] / took}
        due = trainer.step % validate_every == 0 or trainer.progress >= 1.0
        if due and stage != "tower" and trainer.rank == 0:
            record |= {f"held_out_{k}": v for k, v in trainer.validate(validation).items()}
        trainer.advance()
        yield record


def _all_agree(stop: bool, trainer: Trainer) -> bool:
    """Whether process 0 says stop: all must leave at the same step."""
    if trainer.world_size == 1:
        return stop
    flag = torch.tensor([float(stop)])
    dist.broadcast(flag, 0)
    return bool(flag.item())


def validation_shard(root: Path, count: int, size: tuple[int, int]) -> Shard:
    """Held-out samples for the log, rendered once."""
    folder = root / f"held_out_{VALIDATION_SEED}_{count}"
    if not folder.exists():
        save_shard(make_shard(range(VALIDATION_SEED, VALIDATION_SEED + count), size), folder)
    return load_shard(folder)


def _open_data(args: argparse.Namespace, root: Path, size: tuple[int, int], rank: int
               ) -> ShardStore:
    if rank == 0:
        with tqdm(total=args.shards, desc="render", unit="shard",
                  disable=not sys.stderr.isatty()) as bar:
            render_shards(root, args.shards, size, 1, lambda index: bar.update())
    if dist.is_initialized():
        dist.barrier()
    return ShardStore.open(root)


def _release(trainer: Trainer, args: argparse.Namespace, root: Path, figures: dict[str, Any]
             ) -> None:
    info = {"seed": trainer.seed, "data_version": data_version(root),
            "samples": len(trainer.store), "stage": STAGES[trainer.stage], "step": trainer.step,
            "schedule": dataclasses.asdict(trainer.schedule), "figures": figures,
            "parameters": count_parameters(trainer.target.named_parameters()),
            "commit": git_commit()}
    with trainer.averaged():
        save_release(trainer.target, trainer.tokenizer, args.out / "release", info)


def run(args: argparse.Namespace) -> int:
    """Train, or go on training; 0 also when stopped by --minutes."""
    stop = StopRequest(time.monotonic() + 60.0 * args.minutes)
    torch.set_num_threads(args.threads)
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world_size > 1 and not dist.is_initialized():
        dist.init_process_group("gloo")
    trainer, root = _prepare(args, rank, world_size)
    validation = validation_shard(root, args.validate_scenes, _image_size(trainer.config)) \
        if rank == 0 else None
    stop.listen()
    figures: dict[str, Any] = {}
    saved = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    schedule = trainer.schedule
    done = sum(schedule.steps[:trainer.stage]) + trainer.step
    with open(args.out / "log.jsonl", "a", encoding="utf-8") as log, tqdm(
            total=sum(schedule.steps), initial=done, desc="train-target", unit="step",
            disable=rank > 0 or not sys.stderr.isatty()) as bar:
        for record in train(trainer, validation, stop, args.validate_every):
            bar.update()
            if rank:
                continue
            held_out = {k: v for k, v in record.items() if k.startswith("held_out_")}
            figures |= held_out
            if held_out or record["step"] % 10 == 0:
                log.write(json.dumps({"time_s": round(time.time(), 1), **_rounded(record)}) + "\n")
                log.flush()
            bar.set_postfix_str(f"{record['stage']} {record['loss']:.3f}")
            if time.monotonic() - saved > 240.0:
                save_state(trainer.state_dict(), args.out / "state.pt")
                saved = time.monotonic()
    if rank == 0:
        save_state(trainer.state_dict(), args.out / "state.pt")
        _release(trainer, args, root, _rounded(figures))
        print(f"{args.out / 'release'}: stage {STAGES[trainer.stage]}, step {trainer.step}, "
              f"{'finished' if trainer.finished else 'not finished, go on with --resume'}")
    if world_size > 1:
        dist.destroy_process_group()
    return 0


def _image_size(config: ModelConfig) -> tuple[int, int]:
    return config.vision.image_height, config.vision.image_width


def _prepare(args: argparse.Namespace, rank: int, world_size: int) -> tuple[Trainer, Path]:
    root = args.data or args.out / "data"
    if args.start_from and args.resume:
        raise DataError("--start-from and --resume: given both, expected one of them")
    released = load_release(args.start_from) if args.start_from else None
    tokenizer = released[1] if released else train_tokenizer()
    config = released[0].config if released else stand_in_config(args.preset, tokenizer)
    state = load_state(args.out / "state.pt") if args.resume else None
    if state is not None and state["config"] != config.to_dict():
        raise DataError(f"{args.out / 'state.pt'}: holds another model than {args.preset}, "
                        "expected the sizes it was begun with")
    store = _open_data(args, root, _image_size(config), rank)
    schedule = dataclasses.replace(Schedule(), steps=tuple(args.steps), **changed(args.changes))
    trainer = Trainer(config, tokenizer, schedule, store, args.seed, world_size, rank)
    if released:
        trainer.target.load_state_dict(released[0].state_dict())
    elif state is not None:
        trainer.load_state_dict(state)
    if args.stage:
        trainer.begin(args.stage)
    return trainer, root


def changed(changes: list[str]) -> dict[str, Any]:
    """NAME=VALUE pairs as fields of a Schedule.

    Raises:
        DataError: no such field, or a value that is not JSON.
    """
    known = {f.name for f in dataclasses.fields(Schedule)} - {"steps"}
    values: dict[str, Any] = {}
    for change in changes:
        name, _, text = change.partition("=")
        try:
            value = json.loads(text)
        except ValueError:
            raise DataError(f"--set {change}: expected NAME=VALUE, the value in JSON") from None
        if name not in known:
            raise DataError(f"--set {name}: expected one of {', '.join(sorted(known))}")
        values[name] = tuple(value) if isinstance(value, list) else value
    return values


def _rounded(record: dict[str, Any]) -> dict[str, Any]:
    return {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in record.items()}


def main() -> int:
    """Entry for torchrun."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    try:
        return run(parser.parse_args())
    except PlannerError as error:
        print(f"train-target: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
