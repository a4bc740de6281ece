"""The target on held-out scenes of the synthetic world: is its reasoning right, and does it help?

Reasoning counts as exact when it is one of the scene's valid wordings, letter for letter. Paths
are compared with the expert's, beside the kinematic planner's and the target's own with all images
black: what vision is worth is the difference.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any, Callable, Protocol, Sequence

import numpy as np
from tqdm import tqdm

from ..actions.kinematic import plan_kinematic
from ..config import KinematicConfig
from ..datatypes import Deadline, EgoHistory
from ..errors import DataError, MissingDependencyError
from ..runtimes.factory import create_runtime
from ..tokenization.text_tokenizer import TextTokenizer
from ..training.dataset import (FIRST_HELD_OUT_SEED, PromptLayout, Shard, check_seeds, shard_of,
                                world_version)
from ..training.provenance import git_commit
from ..training.validation import (MAX_NEW_TOKENS, exact_matches, fixed_noise, path_of,
                                   right_manoeuvres, true_paths)
from ..speculative.acceptance import GreedyRule
from ..speculative.decoder import SpeculativeDecoder
from ..speculative.proposer import NoProposer, PromptContext
from ..vla import VlaConfig, checkpoint_directory
from ..world.elements import FREE_ROAD, VISION_NEEDED
from ..world.language import MANOEUVRES
from ..world.samples import WorldSample, make_sample
from ..world.scene import KINDS

HORIZONS_S = (1.0, 2.0, 3.0, 5.0)
BATCH = 20


class Predictor(Protocol):
    """What is evaluated: everything between a sample and a path."""

    name: str
    image_size: tuple[int, int]

    def predict(self, shard: Shard, rows: Sequence[int], blind: bool
                ) -> tuple[Sequence[str], np.ndarray]:
        """Texts of the rows, and (N, 64, 2) float64 paths; `blind` blacks all images out."""


class EnginePredictor:
    """A runtime of the vehicle, one scene at a time."""

    def __init__(self, engine: str, checkpoint: Path, noise_scale: float, threads: int):
        self._tokenizer = TextTokenizer.load(checkpoint / "tokenizer.json")
        self._engine = create_runtime(engine, checkpoint, threads=threads)
        vision = self._engine.config.vision
        self.name = self._engine.name
        self.image_size = (vision.image_height, vision.image_width)
        self._layout = PromptLayout(self._tokenizer, self._engine.config)
        self._noise = fixed_noise(noise_scale)
        self._decoder = SpeculativeDecoder(self._engine, NoProposer(),
                                           self._tokenizer.special.traj_future_start,
                                           MAX_NEW_TOKENS)

    def predict(self, shard: Shard, rows: Sequence[int], blind: bool
                ) -> tuple[Sequence[str], np.ndarray]:
        """See Predictor."""
        found = [self._predict_one(shard, row, blind) for row in rows]
        return [text for text, _ in found], np.stack([path for _, path in found])

    def _predict_one(self, shard: Shard, row: int, blind: bool) -> tuple[str, np.ndarray]:
        images = np.stack([shard.images[row][place] for place in self._layout.places])
        features = self._engine.encode_images(np.zeros_like(images) if blind else images)
        prefilled = self._engine.prefill(self._layout.prompt(shard.history[row]), features)
        written = self._decoder.write(PromptContext(prefilled), GreedyRule(), Deadline.never())
        path = path_of(self._engine.act(self._noise), float(shard.v0_mps[row]))
        return self._tokenizer.decode(written.token_ids), path


def _torch_predictor(checkpoint: Path, noise_scale: float, threads: int) -> Predictor:
    try:
        from ..training.prediction import ReleasePredictor
    except ImportError as error:
        raise MissingDependencyError(f"{error.name} is not installed: pip install "
                                     "'reasoning_planner[train]'") from None
    return ReleasePredictor(checkpoint, noise_scale, threads)


RUNTIMES: dict[str, Callable[[Path, float, int], Predictor]] = {
    "torch": _torch_predictor,
    "ort": functools.partial(EnginePredictor, "ort"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--out", type=Path, default=Path("out/target/target.json"),
                        help="the report (default %(default)s)")
    parser.add_argument("--checkpoint", default="nano",
                        help="folder of a released target, or the name of one that comes with "
                             "the package (default %(default)s)")
    parser.add_argument("--scenes", type=int, default=200,
                        help="held-out scenes (default %(default)s)")
    parser.add_argument("--runtime", choices=sorted(RUNTIMES), default="torch")
    parser.add_argument("--noise-scale", type=float, default=VlaConfig.noise_scale, metavar="S",
                        help="of the noise a plan starts from; 0: its mean "
                             "(default %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="of the runtime")
    parser.add_argument("--json", action="store_true", help="print the report too")


def run(args: argparse.Namespace) -> int:
    """Evaluate and write the report."""
    if args.scenes < 1:
        raise DataError(f"--scenes: given {args.scenes}, expected 1 or more")
    checkpoint = checkpoint_directory(args.checkpoint)
    runtime = RUNTIMES[args.runtime](checkpoint, args.noise_scale, args.threads)
    report = {**evaluate(runtime, args.scenes), "noise_scale": args.noise_scale}
    report["checkpoint"] = _training_info(checkpoint)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=1) if args.json else _summary(report, args.out))
    return 0


def evaluate(runtime: Predictor, scenes: int) -> dict[str, Any]:
    """The report on held-out seeds FIRST_HELD_OUT_SEED .. + scenes - 1."""
    seeds = range(FIRST_HELD_OUT_SEED, FIRST_HELD_OUT_SEED + scenes)
    check_seeds(seeds, held_out=True)
    columns: dict[str, list[np.ndarray]] = {}
    started = time.monotonic()
    examples: list[dict[str, str]] = []
    with tqdm(total=scenes, desc="evaluate-target", unit="scene",
              disable=not sys.stderr.isatty()) as bar:
        for start in range(0, scenes, BATCH):
            samples = [make_sample(seed, None, runtime.image_size)
                       for seed in seeds[start:start + BATCH]]
            shard = shard_of(samples)
            rows = range(len(shard))
            texts, seen = runtime.predict(shard, rows, False)
            blind_texts, blind = runtime.predict(shard, rows, True)
            found = {"kind": shard.kinds, "manoeuvre": shard.manoeuvres,
                     "exact": exact_matches(texts, shard),
                     "right": right_manoeuvres(texts, shard),
                     "blind_exact": exact_matches(blind_texts, shard),
                     "blind_right": right_manoeuvres(blind_texts, shard),
                     "truth": true_paths(shard), "target": seen, "target_blind": blind,
                     "kinematic": kinematic_paths(samples)}
            for name, values in found.items():
                columns.setdefault(name, []).append(values)
            examples += [{"seed": int(shard.seeds[i]), "kind": KINDS[shard.kinds[i]],
                          "expected": shard.cocs[i][0], "written": texts[i]} for i in rows]
            bar.update(len(shard))
    table = {name: np.concatenate(parts) for name, parts in columns.items()}
    return {**figures(table), "world_version": world_version(),
            "seeds": {"first": seeds[0], "last": seeds[-1]}, "runtime": runtime.name,
            "hardware": f"{platform.processor() or platform.machine()}, "
                        f"{os.cpu_count()} logical cores",
            "commit": git_commit(), "seconds": round(time.monotonic() - started, 1),
            "wrong": [e for e, right in zip(examples, table["exact"]) if not right][:40]}


PLANNERS = ("target", "target_blind", "kinematic")


def figures(table: dict[str, np.ndarray]) -> dict[str, Any]:
    """Shares and mean errors of one row a scene; see `evaluate` for the columns."""
    errors = {name: _errors(table[name], table["truth"]) for name in PLANNERS}
    category = np.array([FREE_ROAD if KINDS[k] == FREE_ROAD else VISION_NEEDED
                         for k in table["kind"]])
    by_category = {name: category == name for name in (VISION_NEEDED, FREE_ROAD)}
    third = HORIZONS_S.index(3.0)
    return {
        "scenes": len(category),
        "coc_exact_match": _mean(table["exact"]),
        "manoeuvre_accuracy": _mean(table["right"]),
        "ade3_m": {name: {planner: _mean(errors[planner][chosen, third]) for planner in PLANNERS}
                   for name, chosen in by_category.items()},
        "blind": {"coc_exact_match": _mean(table["blind_exact"]),
                  "manoeuvre_accuracy": _mean(table["blind_right"])},
        "ade_m": {name: {planner: _by_horizon(errors[planner][chosen]) for planner in PLANNERS}
                  for name, chosen in by_category.items()},
        "by_kind": {kind: _kind_row(table, errors, table["kind"] == index, third)
                    for index, kind in enumerate(KINDS) if (table["kind"] == index).any()},
        "by_manoeuvre": {name: {"scenes": int((table["manoeuvre"] == index).sum()),
                                "right": _mean(table["right"][table["manoeuvre"] == index])}
                         for index, name in enumerate(MANOEUVRES)
                         if (table["manoeuvre"] == index).any()}}


def _kind_row(table: dict[str, np.ndarray], errors: dict[str, np.ndarray], chosen: np.ndarray,
              third: int) -> dict[str, Any]:
    return {"scenes": int(chosen.sum()), "coc_exact_match": _mean(table["exact"][chosen]),
            "manoeuvre_accuracy": _mean(table["right"][chosen]),
            "ade3_m": {name: _mean(values[chosen, third]) for name, values in errors.items()}}


def _errors(paths: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """(N, horizons) mean distance up to each horizon, metres."""
    distance = np.linalg.norm(paths - truth, axis=2)                    # (N, 64)
    return np.stack([distance[:, :round(h * 10)].mean(1) for h in HORIZONS_S], axis=1)


def _by_horizon(errors: np.ndarray) -> dict[str, float | None]:
    return {f"{h:g}s": _mean(errors[:, i]) for i, h in enumerate(HORIZONS_S)}


def _mean(values: np.ndarray) -> float | None:
    return round(float(np.mean(values)), 4) if len(values) else None


def kinematic_paths(samples: Sequence[WorldSample]) -> np.ndarray:
    """(N, 64, 2) float64, metres: what the fallback plans from the ego history alone."""
    config = KinematicConfig()
    return np.stack([plan_kinematic(EgoHistory(
        0, s.history_positions, s.history_rotations, np.eye(4), s.v0_mps, 0.0),
        config).positions[1:] for s in samples])


def _training_info(checkpoint: Path) -> dict[str, Any]:
    path = checkpoint / "training.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _summary(report: dict[str, Any], out: Path) -> str:
    lines = [f"{report['scenes']} held-out scenes: exact {report['coc_exact_match']:.1%}, "
             f"manoeuvre {report['manoeuvre_accuracy']:.1%}"]
    for name, values in report["ade3_m"].items():
        if values["target"] is not None:
            lines.append(f"{name}: ADE at 3 s " + ", ".join(
                f"{planner} {values[planner]:.3f} m" for planner in PLANNERS))
    return "\n".join([*lines, f"report: {out}"])
