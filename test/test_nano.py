"""The stand-in that comes with the package: complete, small, and the same on both runtimes."""

import json
import math

import numpy as np
import pytest

pytest.importorskip("onnxruntime", reason="runs the graphs")

from reasoning_planner.actions.unicycle import controls_to_path, denormalise_controls
from reasoning_planner.runtimes.factory import create_runtime
from reasoning_planner.tokenization.prompt import ALPAMAYO_R1, DEFAULT_CAMERA_IDS, build_prompt
from reasoning_planner.tokenization.text_tokenizer import TextTokenizer
from reasoning_planner.tokenization.trajectory_tokenizer import DeltaTrajectoryTokenizer
from reasoning_planner.vla import checkpoint_directory
from reasoning_planner.world.samples import make_sample

NANO = checkpoint_directory("nano")
HELD_OUT_SEED = 10_700_000      # of no training, validation or evaluation seed
DECODE_STEPS = 32


@pytest.fixture(scope="module")
def tokenizer():
    return TextTokenizer.load(NANO / "tokenizer.json")


def run_scene(runtime, tokenizer, seed):
    """(tokens of prefill and 32 decode steps, path of the expert behind them)."""
    sample = make_sample(seed)
    images = sample.images.reshape(-1, *sample.images.shape[2:])
    history = DeltaTrajectoryTokenizer(tokenizer.special).encode(sample.history_positions)
    grids = np.tile([1, *runtime.config.vision.grid], (len(images), 1))
    prompt = build_prompt(tokenizer, history, grids, ALPAMAYO_R1, DEFAULT_CAMERA_IDS)
    step = runtime.prefill(prompt.input_ids, runtime.encode_images(images))
    tokens = [int(step.token_ids[-1])]
    for _ in range(DECODE_STEPS):
        step = runtime.extend(np.array(tokens[-1:]))
        tokens.append(int(step.token_ids[-1]))
    noise = np.random.default_rng(seed).standard_normal((64, 2)).astype(np.float32)
    controls = runtime.act(noise)
    path = controls_to_path(*denormalise_controls(controls), sample.v0_mps)
    return tokens, path.positions


def test_its_files_fit_in_40_mb_and_name_themselves():
    assert sum(file.stat().st_size for file in NANO.iterdir()) <= 40e6
    config = json.loads((NANO / "config.json").read_text())
    assert config["name"] == "nano"
    info = json.loads((NANO / "training.json").read_text())
    assert {"seed", "commit"} <= set(info)


def test_onnx_runtime_equals_pytorch(tokenizer):
    pytest.importorskip("torch", reason="the oracle")
    ort = create_runtime("ort", NANO, threads=1)
    oracle = create_runtime("torch", NANO)
    for seed in range(HELD_OUT_SEED, HELD_OUT_SEED + 3):
        tokens, path = run_scene(ort, tokenizer, seed)
        expected_tokens, expected_path = run_scene(oracle, tokenizer, seed)
        assert tokens == expected_tokens
        assert np.abs(path - expected_path).max() < 1e-3


def test_it_writes_a_sentence_and_stops(tokenizer):
    ort = create_runtime("ort", NANO, threads=1)
    tokens, path = run_scene(ort, tokenizer, HELD_OUT_SEED)
    stop = tokenizer.special.traj_future_start
    assert stop in tokens
    text = tokenizer.decode(tokens[:tokens.index(stop)])
    assert len(text.split()) >= 3 and text[0].isupper()
    assert math.isfinite(path.sum())
