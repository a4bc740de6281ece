"""A drive's reasoning written twice on the same observations: with the draft and without.

The drive is replayed in lockstep, without ROS; both write in turn on each observation. Knows no
file of results.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ..bags import open_bag
from ..config import NodeConfig
from ..planner import Planner
from ..vla import VlaConfig, VlaModel
from .replay import Replay
from .stream import Inputs
from .survey import survey
from .topics import resolve


@dataclass(frozen=True)
class Recheck:
    """What came out.

    Attributes:
        autoregressive_ms, speculative_ms: of the reasoning step, one a cycle.
        mismatches: cycles whose tokens differ.
        largest_gap_m: between the two paths of a cycle, at any of their points.
    """

    autoregressive_ms: list[float]
    speculative_ms: list[float]
    mismatches: int
    largest_gap_m: float

    def run_info(self) -> dict[str, object]:
        """As `summary.summarise` takes it."""
        return {"autoregressive_ms": self.autoregressive_ms,
                "speculative_ms": self.speculative_ms, "lossless_mismatches": self.mismatches}


def write_twice(bag: Path, checkpoint: Path, asked: VlaConfig, threads: int = 1,
                engines: Path | None = None) -> Recheck:
    """Plan at every anchor image of a drive with 1 .. 4 cameras, both ways.

    Args:
        bag: its topics must be found by their types alone.
        checkpoint: of the model.
        asked: how; its `proposer` is the draft to compare.
        threads: of the engine.
        engines: folder of the model's engines; None: the checkpoint's own.
    Raises:
        PlannerError: the bag or the checkpoint cannot be used.
    """
    config = NodeConfig()
    with open_bag(bag) as opened:
        found = survey(opened, str(bag))
        topics = resolve(found, config.cameras.count, config.cameras.anchor)
        inputs = Inputs(opened, found, topics)
        config = replace(config, frame_id=inputs.frame_id, base_frame=inputs.base_frame)
        planners = [Planner(config, VlaModel.load(checkpoint, replace(asked, proposer=proposer),
                                                  threads=threads, graphs=engines))
                    for proposer in (asked.proposer, "none")]
        replay = Replay(config, planners, [name or "none" for name in topics.cameras], "recheck",
                        keep_times=True)
        pairs = [cycle.plans for cycle in replay.lockstep(inputs.by_stamp()) if cycle.plans]
    gaps = [np.abs(a.trajectory.positions - b.trajectory.positions).max() for a, b in pairs]
    return Recheck([plain.timings.reason_ms for _, plain in pairs],
                   [drafted.timings.reason_ms for drafted, _ in pairs],
                   sum(a.reasoning.token_ids != b.reasoning.token_ids for a, b in pairs),
                   float(max(gaps, default=0.0)))
