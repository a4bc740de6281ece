"""Runtimes against the PyTorch oracle, and each against itself: blocks, trees, rollback, refusals.

Tolerances: float32 on both sides, other orders of summation. Logits and hidden states 1e-4 (the
largest seen is 1e-5), trajectories 1 mm.
"""

import shutil

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from reasoning_planner.actions.unicycle import (controls_to_path,
                                                denormalise_controls)
from reasoning_planner.errors import ModelError
from reasoning_planner.export.to_onnx import export
from reasoning_planner.models import rope
from reasoning_planner.models.config import preset
from reasoning_planner.runtimes import positions
from reasoning_planner.runtimes.base import default_capacity, tree_visibility
from reasoning_planner.runtimes.factory import create_runtime
from reasoning_planner.runtimes.manifest import MANIFEST_NAME
from reasoning_planner.tokenization.prompt import build_prompt
from reasoning_planner.tokenization.text_tokenizer import TextTokenizer
from tiny_checkpoint import write_checkpoint

TOLERANCE = 1e-4
LAYERS = (0, 1, 3)
NUM_IMAGES = 16


@pytest.fixture(scope="module")
def checkpoint(exported_checkpoint):
    return exported_checkpoint


@pytest.fixture(scope="module")
def ort(checkpoint):
    return create_runtime("ort", checkpoint, threads=1, hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def oracle(checkpoint):
    torch.set_num_threads(1)
    return create_runtime("torch", checkpoint, hidden_layers=LAYERS)


@pytest.fixture(params=["ort", "torch"])
def runtime(request, ort, oracle):
    return ort if request.param == "ort" else oracle


@pytest.fixture(scope="module")
def images():
    generator = np.random.default_rng(3)
    return generator.integers(0, 256, (NUM_IMAGES, 64, 128, 3), dtype=np.uint8)


def prompt_of(folder, config, seed=5):
    tokenizer = TextTokenizer.load(folder / "tokenizer.json")
    history = (np.random.default_rng(seed).integers(0, 1000, 48)
               + tokenizer.special.first_history_bin)
    grids = np.tile([1, *config.vision.grid], (NUM_IMAGES, 1))
    return build_prompt(tokenizer, history, grids, "alpamayo-r1").input_ids


@pytest.fixture(scope="module")
def prompt(checkpoint, ort):
    return prompt_of(checkpoint, ort.config)


@pytest.fixture(scope="module")
def features(ort, images):
    return ort.encode_images(images)


def decode(runtime, step, count):
    """Greedy tokens and the logits that chose each."""
    tokens, rows = [], []
    for _ in range(count):
        tokens.append(int(step.token_ids[-1]))
        step = runtime.extend(np.array(tokens[-1:]), logits=True)
        rows.append(step.logits[0])
    return tokens, np.stack(rows)


def assert_close(given, expected, tolerance=TOLERANCE):
    finite = np.isfinite(expected)
    assert np.array_equal(finite, np.isfinite(given))
    assert np.abs(given[finite] - expected[finite]).max() <= tolerance


def assert_steps_close(given, expected):
    assert np.array_equal(given.token_ids, expected.token_ids)
    assert np.array_equal(given.top_ids, expected.top_ids)
    assert_close(given.top_log_probs, expected.top_log_probs)
    assert_close(given.logits, expected.logits)
    assert len(given.hidden_states) == len(expected.hidden_states) == len(LAYERS)
    for mine, theirs in zip(given.hidden_states, expected.hidden_states):
        assert mine.shape == theirs.shape
        assert_close(mine, theirs)


# Against the oracle

def test_vision_agrees(ort, oracle, images):
    assert_close(ort.encode_images(images[:3]), oracle.encode_images(images[:3]))


def test_text_and_action_agree(ort, oracle, prompt, features):
    first, expected = (r.prefill(prompt, features, logits=True) for r in (ort, oracle))
    assert_steps_close(first, expected)
    tokens, logits = decode(ort, first, 32)
    expected_tokens, expected_logits = decode(oracle, expected, 32)
    assert tokens == expected_tokens and len(set(tokens)) > 5
    assert_close(logits, expected_logits)
    assert not set(tokens) & set(ort.config.tokens.trajectory_bins)
    noise = np.random.default_rng(1).standard_normal((64, 2), np.float32)
    for steps in (None, 4):
        controls, expected = ort.act(noise, steps), oracle.act(noise, steps)
        path, expected_path = (controls_to_path(*denormalise_controls(c), 12.0)
                               for c in (controls, expected))
        assert np.abs(path.positions - expected_path.positions).max() < 1e-3
        assert np.abs(controls - noise).max() > 0.1
    assert ort.length == oracle.length == len(prompt) + 32


def test_a_tree_agrees(ort, oracle, prompt, features):
    visible, depths = tree_visibility([-1, 0, 0, 1, 2, 4])
    steps = []
    for runtime in (ort, oracle):
        runtime.prefill(prompt, features)
        steps.append(runtime.extend(np.array([7, 11, 12, 13, 14, 15]), logits=True,
                                    indices=len(prompt) + depths, visible=visible))
    assert_steps_close(*steps)


def test_the_nano_preset_agrees(tmp_path, images):
    folder = write_checkpoint(tmp_path / "nano", preset("nano"))
    export(folder)
    runtimes = [create_runtime(name, folder, threads=1) for name in ("ort", "torch")]
    ids = prompt_of(folder, runtimes[0].config)
    features = runtimes[0].encode_images(images)
    results = [decode(r, r.prefill(ids, features), 6) for r in runtimes]
    assert results[0][0] == results[1][0]
    assert_close(results[0][1], results[1][1])


def test_positions_are_those_of_the_model(prompt, ort):
    config = ort.config
    text = config.text
    is_visual = prompt == config.tokens.image_pad_id
    ids, delta = positions.mrope_position_ids(is_visual, config.vision.merged_grid)
    expected, expected_delta = rope.mrope_position_ids(
        torch.from_numpy(is_visual)[None], [config.vision.merged_grid] * NUM_IMAGES)
    assert np.array_equal(ids, expected[:, 0].numpy()) and delta == int(expected_delta[0])
    for given, oracle_ids in ((ids, expected), (ids[0], expected[0])):
        tables = positions.rope_cos_sin(given, text.head_dim, text.rope_theta, text.mrope_section)
        wanted = rope.rope_cos_sin(oracle_ids, text.head_dim, text.rope_theta, text.mrope_section)
        for table, want in zip(tables, wanted):
            assert table.dtype == np.float32
            assert np.abs(table - want[0].numpy()).max() < 1e-4    # an ulp of position x frequency


# Each runtime against itself

def test_an_image_is_the_same_in_any_company(runtime, images):
    together = runtime.encode_images(images[:5])
    for i in range(5):
        assert np.array_equal(runtime.encode_images(images[i:i + 1])[0], together[i])
    assert runtime.encode_images(images[:0]).shape == (0, *together.shape[1:])


def test_a_block_verifies_as_decoding_does(runtime, prompt, features):
    tokens, logits = decode(runtime, runtime.prefill(prompt, features), 8)
    for count in (2, 5, 8):
        runtime.crop(len(prompt))
        block = runtime.extend(np.array(tokens[:count]), logits=True)
        assert list(block.token_ids[:-1]) == tokens[1:count]
        assert_close(block.logits, logits[:count])
        assert runtime.length == len(prompt) + count


def test_each_path_of_a_tree_is_as_if_alone(runtime, prompt, features):
    parents = [-1, 0, 0, 1, 2, 2, 5]
    tokens = np.array([21, 22, 23, 24, 25, 26, 27])
    visible, depths = tree_visibility(parents)
    runtime.prefill(prompt, features)
    tree = runtime.extend(tokens, indices=len(prompt) + depths, visible=visible, logits=True)
    for path in ([0, 1, 3], [0, 2, 4], [0, 2, 5, 6]):
        runtime.crop(len(prompt))
        alone = runtime.extend(tokens[path], logits=True)
        assert_close(tree.logits[path], alone.logits)


def test_the_accepted_path_of_a_tree_stays(runtime, prompt, features):
    visible, depths = tree_visibility([-1, 0, 0, 1, 2, 2, 5])
    tokens, path = np.array([21, 22, 23, 24, 25, 26, 27]), [0, 2, 5]
    runtime.prefill(prompt, features)
    runtime.extend(tokens, indices=len(prompt) + depths, visible=visible)
    runtime.keep(len(prompt), path)
    assert runtime.length == len(prompt) + 3
    after = runtime.extend(np.array([33]), logits=True)
    runtime.crop(len(prompt))
    runtime.extend(tokens[path])
    assert_close(after.logits, runtime.extend(np.array([33]), logits=True).logits)


def test_rollback_leaves_no_trace(runtime, prompt, features):
    tokens, logits = decode(runtime, runtime.prefill(prompt, features), 3)
    runtime.crop(len(prompt))
    runtime.extend(np.array([30, 31, 32, 33, 34]))
    runtime.crop(len(prompt))
    again = [runtime.extend(np.array([token]), logits=True).logits[0] for token in tokens]
    assert np.array_equal(np.stack(again), logits)


def test_acting_leaves_the_cache_and_repeats_itself(runtime, prompt, features):
    step = runtime.prefill(prompt, features)
    noise = np.random.default_rng(2).standard_normal((64, 2), np.float32)
    expected, actions = step.token_ids, runtime.act(noise)
    assert np.array_equal(runtime.act(noise), actions)
    after = runtime.extend(expected, logits=True).logits
    runtime.prefill(prompt, features)
    assert np.array_equal(runtime.extend(expected, logits=True).logits, after)


def test_a_rejected_token_does_not_reach_the_expert(runtime, prompt, features):
    noise = np.zeros((64, 2), np.float32)
    runtime.prefill(prompt, features)
    clean = runtime.act(noise)
    runtime.extend(np.array([30, 31, 32]))
    assert not np.array_equal(runtime.act(noise), clean)
    runtime.crop(len(prompt))
    assert np.array_equal(runtime.act(noise), clean)


def test_a_step_owns_its_numbers(runtime, prompt, features):
    first = runtime.prefill(prompt, features)
    step = runtime.extend(first.token_ids, logits=True)
    kept = step.logits.copy(), step.hidden_states[0].copy()
    runtime.extend(np.array([9]), logits=True)
    assert np.array_equal(step.logits, kept[0])
    assert np.array_equal(step.hidden_states[0], kept[1])
    assert first.logits is None
    assert step.top_ids[0, 0] == step.token_ids[0]


def test_the_cache_is_written_in_place(ort, prompt, features):
    buffers = [buffer.ctypes.data for buffer in ort._cache.values()]
    step = ort.prefill(prompt, features)
    for buffer in ort._cache.values():
        buffer[:, :, len(prompt):] = 9.0        # what earlier tests left
    before = ort._cache["key_0"].copy()
    ort.extend(step.token_ids)
    changed = np.flatnonzero((ort._cache["key_0"] != before).any(axis=(0, 1, 3)))
    assert list(changed) == [len(prompt)]
    assert [buffer.ctypes.data for buffer in ort._cache.values()] == buffers


def test_what_lies_behind_the_length_is_never_read(ort, prompt, features):
    def cycle():
        step = ort.prefill(prompt, features, logits=True)
        tree = ort.extend(np.array([7, 8, 9]), logits=True)
        return step.logits, tree.logits, ort.act(np.ones((64, 2), np.float32))

    expected = cycle()
    for buffer in ort._cache.values():
        buffer[:] = np.nan                      # what a cycle gone wrong may leave
    for given, clean in zip(cycle(), expected):
        assert np.array_equal(given, clean)


# Refusals

def test_a_prompt_that_does_not_fit_is_refused(runtime, prompt, features):
    capacity = runtime.capacity
    with pytest.raises(ModelError, match=f"cache of {capacity}"):
        runtime.prefill(np.concatenate([prompt, np.full(capacity, 5)]), features)
    runtime.prefill(prompt, features)
    with pytest.raises(ModelError, match="block"):
        runtime.extend(np.full(capacity - len(prompt) + 1, 5))
    runtime.extend(np.full(capacity - len(prompt), 5))
    assert np.isfinite(runtime.act(np.zeros((64, 2), np.float32))).all()
    with pytest.raises(ModelError, match="block"):
        runtime.extend(np.array([5]))


def test_images_and_placeholders_must_match(runtime, prompt, features):
    with pytest.raises(ModelError, match="image"):
        runtime.prefill(prompt, features[:-1])


def replaced(checkpoint, folder, name, content):
    shutil.copytree(checkpoint, folder)
    (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("name", ["model.safetensors", "decoder.onnx", "tokenizer.json"])
def test_a_file_of_another_export_is_refused(checkpoint, tmp_path, name):
    content = bytearray((checkpoint / name).read_bytes())
    content[-5] ^= 1
    folder = replaced(checkpoint, tmp_path / "foreign", name, bytes(content))
    with pytest.raises(ModelError, match=f"{name}.*sha256") as refused:
        create_runtime("ort", folder)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name, content, complaint", [
    (MANIFEST_NAME, b"{}", "damaged"), (MANIFEST_NAME, b"not JSON", "damaged"),
    ("config.json", b'{"name": 1}', "sha256")])
def test_damaged_files_are_refused(checkpoint, tmp_path, name, content, complaint):
    folder = replaced(checkpoint, tmp_path / "damaged", name, content)
    with pytest.raises(ModelError, match=complaint):
        create_runtime("ort", folder)


@pytest.mark.parametrize("name", [MANIFEST_NAME, "model.safetensors", "vision.onnx"])
def test_a_missing_file_is_named(checkpoint, tmp_path, name):
    folder = tmp_path / "missing"
    shutil.copytree(checkpoint, folder)
    (folder / name).unlink()
    with pytest.raises(ModelError, match=name):
        create_runtime("ort", folder)


def test_graphs_may_lie_elsewhere(checkpoint, tmp_path, prompt, features, ort):
    export(checkpoint, tmp_path)
    elsewhere = create_runtime("ort", checkpoint, graphs=tmp_path, capacity=len(prompt) + 8)
    assert np.array_equal(elsewhere.prefill(prompt, features).top_log_probs,
                          ort.prefill(prompt, features).top_log_probs)


def test_wrong_requests_are_refused(checkpoint, tmp_path):
    with pytest.raises(ModelError, match="expected one of ort, torch"):
        create_runtime("cuda", checkpoint)
    with pytest.raises(ModelError, match="hidden_layers"):
        create_runtime("ort", checkpoint, hidden_layers=(4,))
    with pytest.raises(ModelError, match="config.json"):
        create_runtime("torch", tmp_path)
    shutil.copy(checkpoint / "config.json", tmp_path)
    with pytest.raises(ModelError, match="safetensors"):
        create_runtime("torch", tmp_path)


def test_room_for_the_models_prompts():
    assert default_capacity(preset("alpamayo-r1")) == 3392
    assert default_capacity(preset("nano")) <= preset("nano").text.max_positions


def test_a_tree_sees_its_ancestors():
    visible, depths = tree_visibility([-1, 0, 0, 1])
    assert list(depths) == [0, 1, 1, 2]
    assert visible.tolist() == [[True, False, False, False], [True, True, False, False],
                                [True, False, True, False], [True, True, False, True]]
