"""nano's own draft: it is whole, small, the target's, and its guesses are worth a pass."""

import json
from pathlib import Path

import pytest

pytest.importorskip("onnxruntime", reason="runs the graphs")
pytest.importorskip("tokenizers", reason="nano's prompts")

from reasoning_planner.datatypes import Deadline
from reasoning_planner.evaluation.bench_scenes import SceneSource
from reasoning_planner.runtimes.draft_base import load_draft_config, target_sha256
from reasoning_planner.runtimes.draft_factory import create_draft
from reasoning_planner.runtimes.factory import create_runtime
from reasoning_planner.speculative.acceptance import GreedyRule
from reasoning_planner.speculative.block_draft_proposer import (BlockDraftConfig,
                                                                BlockDraftProposer)
from reasoning_planner.speculative.decoder import SpeculativeDecoder
from reasoning_planner.speculative.proposer import NoProposer, PromptContext
from reasoning_planner.speculative.selection import DRAFT_FOLDER
from reasoning_planner.tokenization.text_tokenizer import TextTokenizer
from reasoning_planner.vla import checkpoint_directory

NANO = checkpoint_directory("nano")
DRAFT = Path(NANO) / DRAFT_FOLDER
SCENES, LONGEST = 6, 32


def test_it_is_small_and_says_where_it_comes_from():
    assert sum(path.stat().st_size for path in DRAFT.iterdir()) <= 8e6
    config = load_draft_config(DRAFT)
    assert config.rope == "flat" and config.context == "full"
    assert config.target_sha256 == target_sha256(NANO)
    info = json.loads((DRAFT / "training.json").read_text())
    assert {"seed", "data_version", "texts", "schedule", "minutes", "figures"} <= set(info)


def test_its_guesses_are_worth_a_pass_and_change_no_token():
    draft = create_draft("ort", DRAFT, NANO, threads=1)
    runtime = create_runtime("ort", NANO, threads=1, hidden_layers=draft.config.feature_layers)
    scenes = list(SceneSource(runtime, TextTokenizer.load(NANO / "tokenizer.json")).cold(SCENES))
    stop = runtime.config.tokens.traj_future_start_id
    tokens = passes = 0
    for scene in scenes:
        alone, drafted = (
            SpeculativeDecoder(runtime, proposer, stop, LONGEST).write(
                PromptContext(runtime.prefill(scene.input_ids, scene.features), scene.input_ids,
                              scene.features), GreedyRule(), Deadline.never())
            for proposer in (NoProposer(), BlockDraftProposer(draft, BlockDraftConfig(7))))
        assert drafted.token_ids == alone.token_ids
        tokens += len(drafted.token_ids) - 1
        passes += drafted.stats.passes
    assert tokens / passes > 4.0        # 5.6 and more on many scenes; a useless draft has 1
