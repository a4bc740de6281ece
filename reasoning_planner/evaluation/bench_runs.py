"""One text written by one method, timed: how long drafting, verifying and the loop took.

A `Contender` is what the benchmark lets write one text after another. The prompt is read before
and costs nothing here: only the reasoning step is timed, the closing pass included. Knows no
statistics and no page.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Callable, Protocol, Sequence

import numpy as np

from ..datatypes import Deadline, TokenOrigin
from ..runtimes.base import Runtime, Step
from ..speculative.acceptance import Accepted, AcceptanceRule
from ..speculative.decoder import SpeculativeDecoder
from ..speculative.proposer import Commit, DraftContext, PromptContext, Proposer
from ..speculative.stats import SpeculationStats
from ..speculative.token_tree import TokenTree
from .bench_scenes import BenchScene

DRAFTED = frozenset((TokenOrigin.ROUTINE, TokenOrigin.TEMPORAL, TokenOrigin.CORPUS))
TIE_NATS = 1e-3     # two tokens whose log probabilities are closer than this are a tie


@dataclass(frozen=True)
class TimedText:
    """A text and what it cost.

    Attributes:
        token_ids: as committed, stop token included.
        origins: of each.
        stats: counts of this text.
        total_ms: wall time behind the prefill.
        draft_ms, verify_ms, accept_ms: in the proposer, in passes of the target, in the
            acceptance rule.
    """

    token_ids: tuple[int, ...]
    origins: tuple[TokenOrigin, ...]
    stats: SpeculationStats
    total_ms: float
    draft_ms: float
    verify_ms: float
    accept_ms: float

    @property
    def host_ms(self) -> float:
        """What is none of them: the loop itself."""
        return self.total_ms - self.draft_ms - self.verify_ms - self.accept_ms


class Contender(Protocol):
    """Writes texts for the benchmark.

    Attributes:
        name: of its row.
    """

    name: str

    def write(self, scene: BenchScene, prompt: PromptContext, seed: int) -> TimedText:
        """Write the text of a scene.

        Args:
            prompt: as the benchmark's runtime has read it; its cache ends there.
            seed: of whatever is drawn.
        """


class TimedRuntime:
    """A runtime whose passes are timed; see runtimes.base.Runtime."""

    def __init__(self, runtime: Runtime):
        self._runtime = runtime
        self.name, self.config = runtime.name, runtime.config
        self.verify_s = 0.0

    @property
    def capacity(self) -> int:
        """See base.Runtime."""
        return self._runtime.capacity

    @property
    def length(self) -> int:
        """See base.Runtime."""
        return self._runtime.length

    def extend(self, token_ids: np.ndarray, *, indices: np.ndarray | None = None,
               visible: np.ndarray | None = None, logits: bool = False) -> Step:
        """See base.Runtime."""
        started_s = time.perf_counter()
        step = self._runtime.extend(token_ids, indices=indices, visible=visible, logits=logits)
        self.verify_s += time.perf_counter() - started_s
        return step

    def crop(self, length: int) -> None:
        """See base.Runtime."""
        self._runtime.crop(length)

    def keep(self, start: int, nodes: Sequence[int]) -> None:
        """See base.Runtime."""
        self._runtime.keep(start, nodes)


class TimedProposer:
    """A proposer whose calls are timed; see speculative.proposer.Proposer."""

    def __init__(self, proposer: Proposer):
        self._proposer = proposer
        self.name, self.origin = proposer.name, proposer.origin
        self.runs_network = proposer.runs_network
        self.draft_s = 0.0

    def reset(self, prompt: PromptContext) -> None:
        """See Proposer."""
        started_s = time.perf_counter()
        self._proposer.reset(prompt)
        self.draft_s += time.perf_counter() - started_s

    def propose(self, context: DraftContext) -> TokenTree:
        """See Proposer."""
        started_s = time.perf_counter()
        tree = self._proposer.propose(context)
        self.draft_s += time.perf_counter() - started_s
        return tree

    def observe(self, commit: Commit) -> None:
        """See Proposer."""
        started_s = time.perf_counter()
        self._proposer.observe(commit)
        self.draft_s += time.perf_counter() - started_s


class TimedRule:
    """An acceptance rule whose time is counted; see speculative.acceptance.AcceptanceRule."""

    def __init__(self, rule: AcceptanceRule):
        self._rule = rule
        self.name, self.lossless, self.needs_logits = rule.name, rule.lossless, rule.needs_logits
        self.accept_s = 0.0

    def accept(self, tree: TokenTree, step: Step) -> Accepted:
        """See AcceptanceRule."""
        started_s = time.perf_counter()
        accepted = self._rule.accept(tree, step)
        self.accept_s += time.perf_counter() - started_s
        return accepted


class DecoderContender:
    """This package's loop with one proposer."""

    def __init__(self, name: str, runtime: Runtime, proposer: Proposer,
                 rule: Callable[[int], AcceptanceRule], stop_id: int, max_new_tokens: int):
        """
        Args:
            rule: acceptance rule of a text, given the text's seed.
        """
        self.name, self._rule = name, rule
        self._runtime, self._proposer = TimedRuntime(runtime), TimedProposer(proposer)
        self._decoder = SpeculativeDecoder(self._runtime, self._proposer, stop_id, max_new_tokens)

    def write(self, scene: BenchScene, prompt: PromptContext, seed: int) -> TimedText:
        """See Contender."""
        rule = TimedRule(self._rule(seed))
        self._runtime.verify_s = self._proposer.draft_s = 0.0
        started_s = time.perf_counter()
        written = self._decoder.write(prompt, rule, Deadline.never())
        total_s = time.perf_counter() - started_s
        return TimedText(written.token_ids, written.origins, written.stats, 1e3 * total_s,
                         1e3 * self._proposer.draft_s, 1e3 * self._runtime.verify_s,
                         1e3 * rule.accept_s)


@dataclass(frozen=True)
class Scores:
    """What the target thinks of a greedy text of n tokens, its own.

    Attributes:
        margins: (n,) nats between the likeliest token and the next.
        entropies: (n,) nats, over the likeliest tokens the runtime names, renormalised.
    """

    margins: np.ndarray
    entropies: np.ndarray


def score_text(runtime: Runtime, prompt: Step, token_ids: Sequence[int]) -> Scores:
    """One pass over a text behind the prompt in the cache; the cache is as before."""
    length = runtime.length
    rows = [prompt.top_log_probs[-1:]]
    if len(token_ids) > 1:
        rows.append(runtime.extend(np.array(token_ids[:-1])).top_log_probs)
        runtime.crop(length)
    log_probs = np.concatenate(rows).astype(np.float64)                     # (n, k)
    probs = np.exp(log_probs - log_probs[:, :1])
    probs /= probs.sum(axis=1, keepdims=True)
    entropies = -(probs * np.log(np.maximum(probs, 1e-30))).sum(axis=1)
    margins = log_probs[:, 0] - log_probs[:, 1]
    return Scores(margins, entropies)


def differs_by_tie(token_ids: Sequence[int], reference: Sequence[int], margins: np.ndarray
                   ) -> bool:
    """Whether two different greedy texts part at two tokens that are as likely."""
    place = next((i for i, (a, b) in enumerate(zip(token_ids, reference)) if a != b),
                 min(len(token_ids), len(reference)))
    return place < len(margins) and bool(margins[place] < TIE_NATS)
