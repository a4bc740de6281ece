"""What one benchmark run is made of: a loaded target, who writes which scenes, and the rows.

Read `plan_heats` and `run_heats`. Knows no options and no files of the report.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Mapping, Sequence

import numpy as np
from tqdm import tqdm

from ..errors import ConfigError, MissingDependencyError
from ..models.draft_config import CONFIG_NAME
from ..runtimes.base import Runtime
from ..runtimes.draft_base import load_draft_config
from ..runtimes.engine_manifest import find_engines
from ..runtimes.factory import create_runtime
from ..runtimes.manifest import load_config
from ..speculative.cost_curve import CostCurve
from ..tokenization.text_tokenizer import TextTokenizer
from ..vla import checkpoint_directory
from .bench_categories import acceptance_tables
from .bench_loop import (Key, Measurement, measure_engine, measure_round_ms, read_prompt,
                         run_interleaved, warm_passes)
from .bench_methods import (AUTOREGRESSIVE, EASD, GENERATE, METHODS, PEERS, EntropyLog, Parts,
                            calibrated_easd)
from .bench_report import BenchFacts
from .bench_rows import RowHead, agreement, make_row, paired_speedup
from .bench_runs import Contender, DecoderContender
from .bench_scenes import COLD, CONTINUOUS, FIRST_WARM_UP_SEED, PEER, SceneSource
from .summary import describe_hardware

SAMPLED_TEMPERATURE = 0.6       # of methods that only sampling gives a meaning: Alpamayo's own
WARM_UP_SCENES = 2
EASD_SCENES = 10                # to set the thresholds of entropy-aware acceptance
ROUND_SCENES = 6                # to measure what a round costs besides its pass


@dataclass
class Bench:
    """A loaded target, what there is to draft with, and where scenes come from."""

    runtime: Runtime
    tokenizer: TextTokenizer
    parts: Parts
    threads: int
    max_new_tokens: int

    @classmethod
    def load(cls, checkpoint: str | Path, corpus: Path | None = None, draft: Path | None = None, *,
             runtime: str = "ort", threads: int, max_new_tokens: int) -> Bench:
        """Load a target.

        Args:
            checkpoint: its folder, or the name of one that comes with the package.
            corpus, draft: to draft from; None: those in the checkpoint's folder, if any.
            runtime: one of runtimes.factory.RUNTIMES.
            threads: of every engine.
            max_new_tokens: longest text.
        Raises:
            ModelError, DataError, ConfigError: a file is missing, damaged or foreign.
            MissingDependencyError: the runtime's engine is not installed.
        """
        checkpoint = checkpoint_directory(checkpoint)
        parts = Parts(checkpoint, load_config(checkpoint),
                      corpus or _existing(checkpoint / "corpus.npz"),
                      draft or _existing(checkpoint / "draft", CONFIG_NAME), runtime)
        layers = load_draft_config(parts.draft).feature_layers if parts.draft else ()
        engine = create_runtime(runtime, checkpoint, threads=threads, hidden_layers=layers)
        return cls(engine, TextTokenizer.load(checkpoint / "tokenizer.json"), parts, threads,
                   max_new_tokens)

    @property
    def engines(self) -> Path:
        """Folder of the engines, or the graphs, that the runtime found."""
        return find_engines(self.parts.checkpoint, self.runtime.name) or self.parts.checkpoint

    @property
    def source(self) -> SceneSource:
        """Where scenes come from."""
        return SceneSource(self.runtime, self.tokenizer)

    def calibrate(self) -> CostCurve:
        """Measure T(k) and what a round costs besides; methods are sized by it from now on."""
        first, *scenes = self.source.cold(1 + ROUND_SCENES, FIRST_WARM_UP_SEED)
        warm_passes(self.runtime, first, logits=False)
        curve = measure_engine(self.runtime, first)
        rounds_ms = {name: measure_round_ms(self.runtime, scenes, self._contender(
            name, replace(self.parts, costs=curve))) for name in ("corpus_b8", "flat_rope_b8")
            if not METHODS[name].obstacle(self.parts)}
        if rounds_ms:
            round_ms = min(rounds_ms.values())
            curve = replace(curve, round_ms=round_ms,
                            draft_ms=rounds_ms.get("flat_rope_b8", round_ms) - round_ms)
        self.parts = replace(self.parts, costs=curve)
        return curve

    def entrants(self, methods: Sequence[str], kind: str, temperature: float
                 ) -> tuple[dict[Key, Contender], dict[str, str]]:
        """Who writes scenes of one kind, plain decoding with them; and why others do not.

        Methods that only sampling gives a meaning run on cold scenes, at SAMPLED_TEMPERATURE
        where the rest decodes greedily.
        """
        keys: list[Key] = []
        obstacles: dict[str, str] = {}
        for name in methods:
            sampled = METHODS[name].only_sampled and temperature == 0.0
            at = SAMPLED_TEMPERATURE if sampled else temperature
            obstacle = METHODS[name].obstacle(replace(self.parts, kind=kind, temperature=at))
            if obstacle:
                obstacles[name] = obstacle
            elif not (sampled and kind == CONTINUOUS):
                keys += [(AUTOREGRESSIVE, at), (name, at)]
        parts = replace(self.parts, kind=kind)
        return {(name, at): self._contender(name, replace(parts, temperature=at))
                for name, at in dict.fromkeys(keys)}, obstacles

    def peers(self, names: Sequence[str], temperature: float
              ) -> tuple[dict[Key, Contender], dict[str, str]]:
        """Contenders of the other library, and why some are none."""
        parts = replace(self.parts, temperature=temperature)
        obstacles = {name: PEERS[name].obstacle(parts) for name in names}
        chosen = dict.fromkeys((GENERATE, *(name for name in names if not obstacles[name])))
        if not names:
            return {}, {}
        try:
            from .bench_peers import make_contenders

            made = make_contenders(list(chosen), parts, self.threads, self._stop_id,
                                   self.max_new_tokens)
        except ImportError as error:
            return {}, dict.fromkeys(names, f"{error.name} is not installed: pip install "
                                            f"'reasoning_planner[bench]'")
        except MissingDependencyError as error:
            return {}, dict.fromkeys(names, str(error))
        return ({(peer.name, temperature): peer for peer in made},
                {name: reason for name, reason in obstacles.items() if reason})

    def calibrate_easd(self, temperature: float) -> None:
        """Set the thresholds of entropy-aware acceptance by scenes that are not measured."""
        parts = replace(self.parts, temperature=temperature or SAMPLED_TEMPERATURE)
        logs: list[EntropyLog] = []

        def rule(seed: int) -> EntropyLog:
            logs.append(EntropyLog(parts, np.random.default_rng(seed)))
            return logs[-1]

        contender = DecoderContender(EASD, self.runtime, METHODS[EASD].proposer(parts), rule,
                                     self._stop_id, self.max_new_tokens)
        for seed, scene in enumerate(self.source.cold(EASD_SCENES, FIRST_WARM_UP_SEED)):
            contender.write(scene, read_prompt(self.runtime, scene, True), seed)
        self.parts = replace(self.parts, easd=calibrated_easd(logs))

    def facts(self, left_out: Mapping[str, str]) -> BenchFacts:
        """What the page says besides the rows."""
        return BenchFacts(self.parts.costs, left_out, self.parts.model.name,
                          _description(self.parts.draft), _description(self.parts.corpus),
                          self.threads, describe_hardware())

    @property
    def _stop_id(self) -> int:
        return self.tokenizer.special.traj_future_start

    def _contender(self, name: str, parts: Parts) -> Contender:
        method = METHODS[name]
        return DecoderContender(name, self.runtime, method.proposer(parts),
                                lambda seed: method.rule(parts, seed), self._stop_id,
                                self.max_new_tokens)


@dataclass(frozen=True)
class Heat:
    """Scenes of one kind and who writes them."""

    kind: str
    scenes: int
    contenders: dict[Key, Contender]


def plan_heats(bench: Bench, methods: Sequence[str], peers: Sequence[str], scenes: int,
               cycles: int, temperature: float) -> tuple[list[Heat], dict[str, str]]:
    """What is run, and why some of what was asked for is not.

    Raises:
        ConfigError: nothing can be run.
    """
    cold, cold_obstacles = bench.entrants(methods, COLD, temperature)
    drive, drive_obstacles = bench.entrants(methods, CONTINUOUS, temperature)
    others, left_out = bench.peers(peers, temperature)
    left_out |= {name: drive_obstacles[name] for name in methods
                 if name in cold_obstacles and name in drive_obstacles}
    if others:
        own, _ = bench.entrants([AUTOREGRESSIVE], COLD, temperature)
        cold = {**own, **cold, **others}
    heats = [heat for heat in (Heat(COLD, scenes, cold), Heat(CONTINUOUS, cycles, drive))
             if heat.contenders and heat.scenes]
    if not heats:
        raise ConfigError([f"--methods: given {', '.join([*methods, *peers])}, expected one that "
                           f"can take part: "
                           + "; ".join(f"{name}: {why}" for name, why in left_out.items())])
    return heats, left_out


def run_heats(bench: Bench, heats: Sequence[Heat]) -> list[dict[str, Any]]:
    """Rows of bench.json, those of each kind of scene together."""
    rows: list[dict[str, Any]] = []
    with tqdm(total=sum(heat.scenes for heat in heats), desc="bench", unit="scene",
              disable=not sys.stderr.isatty()) as bar:
        for heat in heats:
            source = bench.source
            scenes = (source.cold if heat.kind == COLD else source.continuous)(heat.scenes)
            sampled = any(temperature for _, temperature in heat.contenders)
            for warm in source.cold(WARM_UP_SCENES, FIRST_WARM_UP_SEED):
                warm_passes(bench.runtime, warm, sampled)
                run_interleaved(bench.runtime, [warm], heat.contenders, None)
            greedy = (AUTOREGRESSIVE, 0.0) if (AUTOREGRESSIVE, 0.0) in heat.contenders else None
            measured = run_interleaved(bench.runtime, scenes, heat.contenders, greedy, bar.update)
            rows += rows_of(measured, heat.kind, bench)
    return rows


def rows_of(measured: Measurement, kind: str, bench: Bench) -> list[dict[str, Any]]:
    """One row a contender."""
    rows = []
    own = measured.texts.get((AUTOREGRESSIVE, 0.0))
    for (name, temperature), texts in measured.texts.items():
        peer = name in PEERS
        head = RowHead(name, PEER if peer else kind,
                       "transformers" if peer else bench.runtime.name,
                       peer or METHODS[name].lossless, temperature,
                       GENERATE if peer else AUTOREGRESSIVE)
        greedy = own is not None and temperature == 0.0
        compared = agreement(texts, own, measured.scores) if greedy else None
        row = make_row(head, texts, measured.texts[head.reference, temperature], compared)
        row |= acceptance_tables(
            texts, measured.scene_classes,
            [bench.tokenizer.token_texts(text.token_ids) for text in texts],
            measured.scores if greedy and compared.exact == compared.compared else None)
        if peer:
            row["times_as_long_as"] = _against_ours(texts, measured, temperature)
        if name == EASD:
            row["thresholds_nats"] = {"target": round(bench.parts.easd.target_entropy, 5),
                                      "draft": round(bench.parts.easd.draft_entropy, 5)}
        rows.append(row)
    return rows


def _against_ours(texts, measured: Measurement, temperature: float) -> dict[str, list[float]]:
    """How many times as long as each of our methods a peer took: ratio, low, high."""
    ratios = {}
    for (name, at), ours in measured.texts.items():
        if name in METHODS and at == temperature:
            found = paired_speedup([t.total_ms for t in texts], [t.total_ms for t in ours])
            ratios[name] = [round(found.value, 3), *found.as_list()]
    return ratios


def _existing(path: Path, inside: str = "") -> Path | None:
    return path if (path / inside).exists() else None


def _description(path: Path | None) -> str:
    """A file's last name: no path of one machine."""
    return path.name if path else ""
