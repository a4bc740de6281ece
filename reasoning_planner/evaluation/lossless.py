"""Is every text the target's own? Each proposer, block and shape against token-by-token decoding.

Held-out scenes of the world: a prompt is read once, then written behind by every proposer with
blocks of 1 .. 16 tokens, as chains and as trees, and by a useless one. Where the expert acts too,
its path must be the same. With --bag, the drive of a bag as the node would plan it.

    python -m reasoning_planner.evaluation.lossless --scenes 500 --out out/lossless.json
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterable, Iterator, Sequence

import numpy as np
from tqdm import tqdm

from ..actions.unicycle import controls_to_path, denormalise_controls
from ..datatypes import Deadline, TokenOrigin
from ..errors import PlannerError
from ..runtimes.base import Runtime
from ..runtimes.draft_base import load_draft_config
from ..runtimes.manifest import replace_file
from ..speculative.acceptance import GreedyRule
from ..speculative.decoder import Generation, SpeculativeDecoder
from ..speculative.proposer import (Commit, DraftContext, NoProposer, PromptContext, Proposer)
from ..speculative.registry import ProposerConfig, create_proposer
from ..speculative.stats import SpeculationStats
from ..speculative.token_tree import EMPTY, ROOT, TokenTree, merge, within
from ..vla import VlaConfig, checkpoint_directory
from .bench_loop import read_prompt
from .bench_runs import differs_by_tie, score_text
from .bench_scenes import FIRST_COLD_SEED, BenchScene
from .bench_setup import Bench
from .recheck import write_twice

CHAIN, TREE = "chain", "tree"
LARGEST_BLOCK = 16
MOST_NODES = 31                 # of a tree
PATH_TOLERANCE_M = 1e-3
PATH_SPEED_MPS = 10.0           # the paths are compared as driven from this speed
BAG_BLOCKS = (4, 8, 16)
USELESS = "useless"
USELESS_BLOCKS = (2, 8, 16)     # it takes a pass a token, whatever the block


class UselessProposer:
    """Random tokens: whatever it proposes, the text must not notice."""

    name, origin, runs_network = USELESS, TokenOrigin.ROUTINE, False

    def __init__(self, vocab_size: int, generator: np.random.Generator):
        self._vocab_size, self._generator = vocab_size, generator

    def reset(self, prompt: PromptContext) -> None:
        """See Proposer."""

    def observe(self, commit: Commit) -> None:
        """See Proposer."""

    def propose(self, context: DraftContext) -> TokenTree:
        """See Proposer."""
        count = min(context.depth, context.budget, LARGEST_BLOCK - 1)
        ids = self._generator.integers(self._vocab_size, size=max(count, 0)).tolist()
        return TokenTree(tuple(ids), tuple(range(ROOT, len(ids) - 1)),
                         (self.origin,) * len(ids), (0.01,) * len(ids), (None,) * len(ids))


class Shaped:
    """A proposer cut to a block, its chains given random brothers where a tree is wanted."""

    def __init__(self, proposer: Proposer, block: int, shape: str, vocab_size: int):
        self.name, self.origin = proposer.name, proposer.origin
        self.runs_network = proposer.runs_network
        self._proposer, self._block, self._shape = proposer, block, shape
        self._vocab_size, self._generator = vocab_size, np.random.default_rng(block)

    def reset(self, prompt: PromptContext) -> None:
        """See Proposer."""
        self._proposer.reset(prompt)

    def observe(self, commit: Commit) -> None:
        """See Proposer."""
        self._proposer.observe(commit)

    def propose(self, context: DraftContext) -> TokenTree:
        """See Proposer."""
        depth = min(self._block - 1, context.depth)
        if depth < 1:
            return EMPTY
        tree = within(self._proposer.propose(
            DraftContext(context.token_ids, depth, context.budget)), depth, context.budget)
        if self._shape == TREE and len(tree):
            tree = within(merge([tree, self._brothers(tree)]), depth,
                          min(MOST_NODES, context.budget))
        return tree

    def _brothers(self, tree: TokenTree) -> TokenTree:
        """The tree with a wrong turn beside each of its nodes."""
        count = len(tree)
        wrong = self._generator.integers(self._vocab_size, size=count).tolist()
        return TokenTree((*tree.token_ids, *wrong), (*tree.parents, *tree.parents),
                         (*tree.origins, *tree.origins), (*tree.probs, *(0.5 * p for p in
                                                                         tree.probs)),
                         (None,) * (2 * count))


@dataclass
class Writer:
    """One proposer at one block and shape, and what came of it.

    Attributes:
        acts: whether the expert's path behind its text is compared too.
    """

    proposer: str
    block: int
    shape: str
    decoder: SpeculativeDecoder
    acts: bool
    stats: SpeculationStats
    texts: int = 0
    mismatches: int = 0
    ties: int = 0
    largest_gap_m: float = 0.0

    def row(self) -> dict[str, Any]:
        """As the file of results has it."""
        return {"proposer": self.proposer, "shape": self.shape, "block": self.block,
                "texts": self.texts, "mismatches": self.mismatches, "ties": self.ties,
                "tokens_per_pass": round(self.stats.acceptance_length, 3),
                "draft_failures": self.stats.draft_failures,
                "largest_path_gap_m": self.largest_gap_m if self.acts else None}


def make_writers(bench: Bench, blocks: Iterable[int]) -> list[Writer]:
    """Every proposer there is something to draft from for, at every block and in both shapes.

    Raises:
        PlannerError: a file is damaged or foreign.
    """
    vocabulary = bench.runtime.config.text.vocab_size
    writers = []
    for block in blocks:
        for name, largest in _proposers(bench).items():
            if name == USELESS and block not in USELESS_BLOCKS:
                continue
            for shape in (CHAIN, TREE):
                if block <= largest and (block > 1 or shape == CHAIN):
                    shaped = Shaped(_make(bench, name, block), block, shape, vocabulary)
                    writers.append(Writer(name, block, shape, _decoder(bench, shaped),
                                          block in (8, largest), SpeculationStats()))
    return writers


def _proposers(bench: Bench) -> dict[str, int]:
    """Largest block of each."""
    found = {USELESS: LARGEST_BLOCK, "temporal": LARGEST_BLOCK, "merged": LARGEST_BLOCK}
    if bench.parts.corpus is not None:
        found["corpus"] = LARGEST_BLOCK
    if bench.parts.draft is not None:
        found["flat_rope"] = load_draft_config(bench.parts.draft).block_length
    return found


def _make(bench: Bench, name: str, block: int) -> Proposer:
    parts = bench.parts
    if name == USELESS:
        return UselessProposer(parts.model.text.vocab_size, np.random.default_rng(block))
    names = (name,) if name != "merged" else tuple(
        n for n in ("corpus", "flat_rope", "temporal") if n in _proposers(bench))
    count = max(block - 1, 1)
    return create_proposer(ProposerConfig(
        names=names, corpus=str(parts.corpus or ""), draft=str(parts.draft or ""),
        checkpoint=str(parts.checkpoint), draft_runtime=parts.draft_runtime,
        draft_threads=bench.threads, num_speculative_tokens=count, max_nodes=count,
        costs=parts.costs))


def _decoder(bench: Bench, proposer: Proposer) -> SpeculativeDecoder:
    return SpeculativeDecoder(bench.runtime, proposer, bench.tokenizer.special.traj_future_start,
                              bench.max_new_tokens)


def compare_scene(bench: Bench, scene: BenchScene, writers: Sequence[Writer], act: bool
                  ) -> Iterator[dict[str, Any]]:
    """Let all writers write one scene behind one prompt; yields what differs."""
    runtime = bench.runtime
    prompt = read_prompt(runtime, scene, False)
    length = runtime.length
    own = _decoder(bench, NoProposer()).write(prompt, GreedyRule(), Deadline.never())
    path = _path(runtime) if act else None
    for writer in writers:
        runtime.crop(length)
        text = writer.decoder.write(prompt, GreedyRule(), Deadline.never())
        gap_m = 0.0
        if path is not None and writer.acts:
            gap_m = float(np.abs(_path(runtime) - path).max())
            writer.largest_gap_m = max(writer.largest_gap_m, gap_m)
        writer.texts += 1
        writer.stats.add(text.stats)
        if text.token_ids != own.token_ids or gap_m > PATH_TOLERANCE_M:
            runtime.crop(length)
            yield _difference(runtime, prompt, scene, writer, text, own)


def _path(runtime: Runtime) -> np.ndarray:
    """(65, 3) metres, of the expert behind the text in the cache."""
    flow = runtime.config.flow
    noise = np.random.default_rng(0).standard_normal((flow.num_waypoints, flow.action_size),
                                                     np.float32)
    return controls_to_path(*denormalise_controls(runtime.act(noise)), PATH_SPEED_MPS).positions


def _difference(runtime: Runtime, prompt: PromptContext, scene: BenchScene, writer: Writer,
                text: Generation, own: Generation) -> dict[str, Any]:
    tie = differs_by_tie(text.token_ids, own.token_ids,
                         score_text(runtime, prompt.step, own.token_ids).margins)
    writer.ties += tie
    writer.mismatches += not tie
    return {"scene": scene.name, "proposer": writer.proposer, "block": writer.block,
            "shape": writer.shape, "tie": tie, "token_ids": list(text.token_ids),
            "own": list(own.token_ids)}


def check_scenes(bench: Bench, scenes: int, acting: int, blocks: Iterable[int],
                 first_seed: int = FIRST_COLD_SEED) -> dict[str, Any]:
    """All writers on held-out scenes.

    Args:
        acting: scenes on which the expert's paths are compared too, evenly among them.
    Returns:
        scenes, texts, mismatches, ties, largest_path_gap_m, rows and differences.
    """
    writers = make_writers(bench, blocks)
    every = max(scenes // acting, 1) if acting else scenes + 1
    differences: list[dict[str, Any]] = []
    with tqdm(total=scenes, desc="lossless", unit="scene",
              disable=not sys.stderr.isatty()) as bar:
        for number, scene in enumerate(bench.source.cold(scenes, first_seed)):
            differences += compare_scene(bench, scene, writers, number % every == 0 and acting > 0)
            bar.update()
    return {"scenes": scenes, "texts": sum(w.texts for w in writers),
            "mismatches": sum(w.mismatches for w in writers),
            "ties": sum(w.ties for w in writers),
            "largest_path_gap_m": max((w.largest_gap_m for w in writers), default=0.0),
            "rows": [writer.row() for writer in writers], "differences": differences}


def check_bag(bag: Path, checkpoint: Path, choices: Sequence[str], threads: int) -> dict[str, Any]:
    """The drive of a bag, planned as the node does, by each proposer and without."""
    rows = []
    for choice in choices:
        for block in BAG_BLOCKS:
            twice = write_twice(bag, checkpoint, VlaConfig(
                proposer=choice, num_speculative_tokens=block - 1), threads)
            rows.append({"proposer": choice, "block": block,
                         "texts": len(twice.speculative_ms), "mismatches": twice.mismatches,
                         "largest_path_gap_m": twice.largest_gap_m})
    return {"bag": bag.name, "mismatches": sum(row["mismatches"] for row in rows), "rows": rows}


def main(argv: list[str] | None = None) -> int:
    """Write the results and print a summary; exit 1 where a text or path is not the target's."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", default="nano", help="folder, or a shipped one's name")
    parser.add_argument("--draft", type=Path, help="release of train-draft with its graph")
    parser.add_argument("--scenes", type=int, default=500)
    parser.add_argument("--acting", type=int, default=50, help="scenes whose paths are compared")
    parser.add_argument("--bag", type=Path, help="a drive to compare too")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("out/lossless.json"))
    args = parser.parse_args(argv)
    try:
        bench = Bench.load(args.checkpoint, None, args.draft, threads=args.threads,
                           max_new_tokens=VlaConfig().max_new_tokens)
        found = check_scenes(bench, args.scenes, args.acting, range(1, LARGEST_BLOCK + 1))
        if args.bag:
            choices = [name for name in _proposers(bench) if name != USELESS]
            found["drive"] = check_bag(args.bag, checkpoint_directory(args.checkpoint), choices,
                                       args.threads)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        replace_file(args.out, json.dumps(found, indent=1).encode())
    except PlannerError as error:
        print(f"lossless: {error}", file=sys.stderr)
        return 1
    print(f"{found['texts']} texts of {found['scenes']} scenes: {found['mismatches']} are not the "
          f"target's, {found['ties']} ties; paths within {found['largest_path_gap_m']:.2g} m"
          + (f"; {args.bag.name}: {found['drive']['mismatches']} of "
             f"{sum(row['texts'] for row in found['drive']['rows'])}" if args.bag else ""))
    wrong = found["mismatches"] + (found["drive"]["mismatches"] if args.bag else 0)
    return int(wrong > 0 or found["largest_path_gap_m"] > PATH_TOLERANCE_M)


if __name__ == "__main__":
    sys.exit(main())
