"""Passes of fixed shapes against the ordinary ones: the same tokens, the same numbers.

On a processor they run eagerly; what only a GPU shows, capture and replay, is marked `gpu`.
"""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from reasoning_planner.errors import MissingDependencyError, ModelError
from reasoning_planner.models.draft import Draft, DraftSession
from reasoning_planner.models.draft_config import DraftConfig
from reasoning_planner.runtimes.base import tree_visibility
from reasoning_planner.runtimes.factory import create_runtime
from reasoning_planner.runtimes.torch_draft import TorchDraft
from reasoning_planner.runtimes.torch_graphs import StaticDraftSession
from reasoning_planner.runtimes.torch_runtime import TorchRuntime, load_target, random_target
from tiny_checkpoint import tiny_config, write_checkpoint

TOLERANCE = 1e-4
LAYERS = (0, 2)
PROMPT = np.arange(5, 25)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_cuda])]

pytestmark = pytest.mark.usefixtures("single_thread")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("static") / "tiny", tiny_config())


@pytest.fixture(scope="module")
def oracle(checkpoint):
    return TorchRuntime(load_target(checkpoint), capacity=96, hidden_layers=LAYERS)


@pytest.fixture(scope="module", params=DEVICES)
def fixed(request, checkpoint):
    return TorchRuntime(load_target(checkpoint, request.param), capacity=96, hidden_layers=LAYERS,
                        fixed_shapes=True)


def no_images(runtime):
    vision = runtime.config.vision
    return np.zeros((0, 1 + len(vision.deepstack_indexes), vision.tokens_per_image,
                     vision.out_hidden_size), np.float32)


def prefilled(runtime):
    return runtime.prefill(PROMPT, no_images(runtime))


def assert_same(given, expected):
    assert np.array_equal(given.token_ids, expected.token_ids)
    assert np.array_equal(given.top_ids, expected.top_ids)
    finite = np.isfinite(expected.logits)
    assert np.array_equal(finite, np.isfinite(given.logits))
    assert np.abs(given.logits[finite] - expected.logits[finite]).max() < TOLERANCE
    assert np.abs(given.top_log_probs - expected.top_log_probs).max() < TOLERANCE
    assert len(given.hidden_states) == len(LAYERS)
    for mine, theirs in zip(given.hidden_states, expected.hidden_states):
        assert mine.shape == theirs.shape and np.abs(mine - theirs).max() < TOLERANCE


@pytest.mark.parametrize("counts", [(1, 1, 1), (4, 1, 8), (64, 1)])
def test_blocks_agree(fixed, oracle, counts):
    for runtime in (fixed, oracle):
        prefilled(runtime)
    generator = np.random.default_rng(sum(counts))
    for count in counts:
        tokens = generator.integers(0, 300, count)
        assert_same(*(runtime.extend(tokens, logits=True) for runtime in (fixed, oracle)))
        assert fixed.length == oracle.length


def test_a_tree_its_path_and_what_follows_agree(fixed, oracle):
    visible, depths = tree_visibility([-1, 0, 0, 1, 2, 4])
    tokens = np.array([7, 11, 12, 13, 14, 15])
    for runtime in (fixed, oracle):
        prefilled(runtime)
    assert_same(*(runtime.extend(tokens, indices=len(PROMPT) + depths, visible=visible,
                                 logits=True) for runtime in (fixed, oracle)))
    for runtime in (fixed, oracle):
        runtime.keep(len(PROMPT), [0, 2, 4])
    assert_same(*(runtime.extend(np.array([33, 34]), logits=True) for runtime in (fixed, oracle)))


def test_rollback_and_acting_agree(fixed, oracle):
    noise = np.random.default_rng(1).standard_normal((64, 2), np.float32)
    actions = []
    for runtime in (fixed, oracle):
        prefilled(runtime)
        runtime.extend(np.array([30, 31, 32]))
        runtime.crop(len(PROMPT) + 1)
        runtime.extend(np.array([40]))
        actions.append(runtime.act(noise))
    assert np.abs(actions[0] - actions[1]).max() < 1e-3


def test_the_logits_leave_the_device_only_when_asked(fixed):
    prefilled(fixed)
    assert fixed.extend(np.array([1])).logits is None


def test_a_pass_gone_wrong_does_not_reach_the_next_prompt(fixed, oracle):
    prefilled(fixed)
    fixed._cache._store.fill_(torch.nan)
    assert not np.isfinite(fixed.extend(np.array([7])).top_log_probs).all()
    for runtime in (fixed, oracle):
        prefilled(runtime)
    assert_same(*(runtime.extend(np.array([7, 8]), logits=True) for runtime in (fixed, oracle)))


def test_a_long_block_takes_the_ordinary_way(checkpoint, oracle):
    runtime = TorchRuntime(load_target(checkpoint), capacity=128, hidden_layers=LAYERS,
                           fixed_shapes=True)
    for each in (runtime, oracle):
        prefilled(each)
    tokens = np.arange(70)
    assert_same(*(each.extend(tokens, logits=True) for each in (runtime, oracle)))
    assert_same(*(each.extend(np.array([3]), logits=True) for each in (runtime, oracle)))


# The draft

@pytest.fixture(scope="module", params=DEVICES)
def draft(request, checkpoint):
    target = load_target(checkpoint, request.param)
    config = DraftConfig.for_target(target.config.text, block_length=5)
    made = Draft(config, target)
    made.initialise(3)
    return made.to(request.param)


@pytest.mark.parametrize("last", [None, 4])
def test_a_draft_of_fixed_shapes_agrees(draft, last):
    generator = np.random.default_rng(4)
    width = len(draft.config.feature_layers) * draft.config.hidden_size
    sessions = (DraftSession(draft, 40), StaticDraftSession(draft, 40, 4))
    for count in (11, 3):
        rows = generator.standard_normal((count, width), np.float32)
        start = sessions[0].length
        places = np.tile(np.arange(start, start + count), (3, 1))
        for session in sessions:
            session.append(rows, places)
        block = np.tile(np.arange(start + count, start + count + 5), (3, 1))
        expected = sessions[0].block(7, block, last)
        given = sessions[1].block(7, block, last)
        finite = np.isfinite(expected)
        assert np.abs(given[finite] - expected[finite]).max() < TOLERANCE
        token_ids, top_ids, top_log_probs = sessions[1].choose(7, block, last)
        assert np.array_equal(token_ids, expected.argmax(1)) and top_ids.shape == (4, 4)
        assert np.all(np.diff(top_log_probs) <= 0) and np.all(top_log_probs < 0)


def test_a_draft_runtime_of_fixed_shapes_drafts_the_same(draft, checkpoint):
    config = load_target(checkpoint).config
    generator = np.random.default_rng(5)
    hidden = [generator.standard_normal((12, config.text.hidden_size), np.float32)
              for _ in draft.config.feature_layers]
    blocks = []
    for fixed_shapes in (False, True):
        runtime = TorchDraft(draft, config, capacity=40, fixed_shapes=fixed_shapes)
        runtime.begin(np.arange(12), hidden)
        blocks.append(runtime.draft(9, [layer[:0] for layer in hidden]))
    assert np.array_equal(blocks[0].token_ids, blocks[1].token_ids)
    assert np.array_equal(blocks[0].top_ids, blocks[1].top_ids)
    assert np.abs(blocks[0].top_log_probs - blocks[1].top_log_probs).max() < TOLERANCE


# Devices

def test_random_weights_compute(checkpoint):
    runtime = TorchRuntime(random_target(load_target(checkpoint).config, "cpu", torch.float32))
    assert np.isfinite(prefilled(runtime).top_log_probs).all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_is_refused_where_there_is_none(checkpoint):
    with pytest.raises(MissingDependencyError, match="sees no CUDA device") as refused:
        create_runtime("torch", checkpoint, provider="cuda")
    assert "\n" not in str(refused.value)


def test_torch_has_no_other_provider(checkpoint):
    with pytest.raises(ModelError, match="given 'tensorrt' for torch"):
        create_runtime("torch", checkpoint, provider="tensorrt")


@pytest.mark.gpu
@needs_cuda
def test_a_checkpoint_on_cuda(checkpoint, oracle):
    runtime = TorchRuntime.load(checkpoint, device="cuda", capacity=96, hidden_layers=LAYERS)
    assert runtime.name == "torch-cuda"
    step, expected = (prefilled(r) for r in (runtime, oracle))
    assert np.abs(step.top_log_probs - expected.top_log_probs).max() < 0.1      # bfloat16
