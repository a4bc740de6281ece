"""The losslessness check: finds nothing on nano, and finds what is wrong on purpose."""

import json

import numpy as np
import pytest

pytest.importorskip("onnxruntime", reason="runs the graphs")
pytest.importorskip("tqdm")

from reasoning_planner.evaluation import lossless
from reasoning_planner.evaluation.bench_setup import Bench
from reasoning_planner.speculative.decoder import SpeculativeDecoder

SEED = 10_880_000
BLOCKS = (1, 2, 5, 16)


@pytest.fixture(scope="module")
def bench():
    return Bench.load("nano", threads=1, max_new_tokens=40)


def test_every_proposer_block_and_shape_writes_the_targets_text(bench):
    found = lossless.check_scenes(bench, 2, 1, BLOCKS, SEED)
    assert (found["mismatches"], found["ties"], found["differences"]) == (0, 0, [])
    assert found["largest_path_gap_m"] < 1e-4
    kinds = {(row["proposer"], row["shape"]) for row in found["rows"]}
    assert {(name, shape) for name in ("useless", "temporal", "merged", "corpus")
            for shape in ("chain", "tree")} <= kinds
    assert all(row["texts"] == 2 and row["draft_failures"] == 0 for row in found["rows"])
    speed = {(r["proposer"], r["block"]): r["tokens_per_pass"] for r in found["rows"]
             if r["shape"] == "chain"}
    assert speed["corpus", 16] > speed["corpus", 2] > speed["corpus", 1] == 1.0
    assert speed["useless", 16] == pytest.approx(1.0, abs=0.1)


def test_rejected_keys_left_in_the_cache_are_found(bench, monkeypatch):
    monkeypatch.setattr(SpeculativeDecoder, "_keep", lambda self, tree, accepted: None)
    found = lossless.check_scenes(bench, 1, 0, (8,), SEED)
    assert found["mismatches"] > 0
    assert {"scene", "proposer", "block", "shape", "tie", "token_ids", "own"} == set(
        found["differences"][0])


def test_another_path_is_found(bench, monkeypatch):
    calls = iter(range(100))
    monkeypatch.setattr(lossless, "_path", lambda runtime: np.full((65, 3), next(calls) * 0.01))
    found = lossless.check_scenes(bench, 1, 1, (8,), SEED)
    assert found["mismatches"] > 0 and found["largest_path_gap_m"] > 1e-3


def test_the_command_writes_its_results(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(lossless, "LARGEST_BLOCK", 2)
    out = tmp_path / "new" / "lossless.json"
    assert lossless.main(["--scenes", "1", "--acting", "0", "--out", str(out)]) == 0
    assert json.loads(out.read_text())["mismatches"] == 0
    assert "0 are not the target's" in capsys.readouterr().out
    assert lossless.main(["--checkpoint", str(tmp_path / "none"), "--out", str(out)]) == 1
    assert capsys.readouterr().err.startswith("lossless: ")
