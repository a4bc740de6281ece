"""The interleaved run: every contender writes every scene's text behind the same cached prompt.

Also what is measured before it: warm passes of every size, and T(k). Knows contenders, not how
they are made, and no statistics.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Callable, Iterable, Sequence

import numpy as np

from ..runtimes.base import Runtime
from ..speculative.cost_curve import CostCurve, measure_cost_curve
from ..speculative.proposer import PromptContext
from .bench_runs import Contender, Scores, TimedText, score_text
from .bench_scenes import BenchScene

ORDER_SEED = 0
LARGEST_PASS = 32
CURVE_SIZES = (1, 2, 4, 8, 12, 16, 24, 32)
CURVE_REPEATS = 25
SETTLE_S = 0.002        # for worker threads of the engine before to stop spinning

Key = tuple[str, float]     # of a contender: method and temperature


@dataclass
class Measurement:
    """Texts by contender, in the order of the scenes.

    Attributes:
        texts: one a scene for each contender.
        scenes: their names.
        scene_classes: their kinds.
        scores: what the target thinks of its own greedy text of each scene; empty without one.
    """

    texts: dict[Key, list[TimedText]] = field(default_factory=dict)
    scenes: list[str] = field(default_factory=list)
    scene_classes: list[str] = field(default_factory=list)
    scores: list[Scores] = field(default_factory=list)


def run_interleaved(runtime: Runtime, scenes: Iterable[BenchScene],
                    contenders: dict[Key, Contender], greedy: Key | None,
                    done: Callable[[], None] = lambda: None) -> Measurement:
    """Let all contenders write all scenes, in an order drawn anew for each.

    Args:
        runtime: reads the prompts; contenders of this package write behind them in its cache.
        greedy: the contender whose texts are the target's own; None: nobody decodes greedily.
        done: called after each scene.
    """
    measured = Measurement({key: [] for key in contenders})
    order = np.random.default_rng(ORDER_SEED)
    keys = list(contenders)
    for number, scene in enumerate(scenes):
        prompt = read_prompt(runtime, scene, any(temperature for _, temperature in keys))
        length = runtime.length
        for place in order.permutation(len(keys)):
            runtime.crop(length)
            time.sleep(SETTLE_S)
            text = contenders[keys[place]].write(scene, prompt, number)
            measured.texts[keys[place]].append(text)
        if greedy is not None:
            runtime.crop(length)
            own = measured.texts[greedy][-1].token_ids
            measured.scores.append(score_text(runtime, prompt.step, own))
        measured.scenes.append(scene.name)
        measured.scene_classes.append(scene.scene_class)
        done()
    return measured


def read_prompt(runtime: Runtime, scene: BenchScene, logits: bool) -> PromptContext:
    """The target reads a scene's prompt."""
    step = runtime.prefill(scene.input_ids, scene.features, logits=logits)
    return PromptContext(step, scene.input_ids, scene.features)


def warm_passes(runtime: Runtime, scene: BenchScene, logits: bool) -> None:
    """A pass of every size: the first of a size is slower, whoever happens to make it."""
    read_prompt(runtime, scene, logits)
    length = runtime.length
    for size in range(1, LARGEST_PASS + 1):
        for with_logits in (False, True) if logits else (False,):
            runtime.extend(np.zeros(size, np.int64), logits=with_logits)
            runtime.crop(length)


def measure_engine(runtime: Runtime, scene: BenchScene, round_ms: float = 0.0) -> CostCurve:
    """T(k) behind a prompt of the usual length."""
    read_prompt(runtime, scene, False)
    return measure_cost_curve(runtime, CURVE_SIZES, CURVE_REPEATS, round_ms)


def measure_round_ms(runtime: Runtime, scenes: Sequence[BenchScene], contender: Contender
                     ) -> float:
    """What a round of a contender costs besides its pass, in the median of all texts but one.

    Args:
        scenes: the first is to warm up.
    """
    spent = []
    for number, scene in enumerate(scenes):
        text = contender.write(scene, read_prompt(runtime, scene, False), number)
        spent.append((text.total_ms - text.verify_ms) / max(text.stats.passes, 1))
    return float(np.median(spent[1:]))
