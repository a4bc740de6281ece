"""The block draft: FlatRoPE against M-RoPE, switches, caching, and as a proposer."""

import dataclasses
import json

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the reference models are PyTorch")
pytest.importorskip("safetensors", reason="drafts are stored as safetensors")
pytest.importorskip("tokenizers", reason="the tiny checkpoint has a tokenizer")

from reasoning_planner.datatypes import Deadline, Reason, TokenOrigin
from reasoning_planner.errors import ConfigError, ModelError
from reasoning_planner.models import rope
from reasoning_planner.models.config import preset
from reasoning_planner.models.draft import Draft, DraftSession, blocks_mask
from reasoning_planner.models.draft_config import CONTEXTS, ROPES, DraftConfig, feature_layers
from reasoning_planner.models.draft_positions import (
    history_tokens, kept_in_context, place_prompt, visible_context, visual_tokens)
from reasoning_planner.models.draft_release import load_draft, save_draft
from reasoning_planner.models.target import Target
from reasoning_planner.runtimes.base import Step
from reasoning_planner.runtimes.draft_base import Placement, block_of, target_sha256
from reasoning_planner.runtimes.torch_draft import TorchDraft
from reasoning_planner.runtimes.torch_runtime import TorchRuntime, load_target
from reasoning_planner.speculative.acceptance import GreedyRule
from reasoning_planner.speculative.block_draft_proposer import (BlockDraftConfig,
                                                                BlockDraftProposer)
from reasoning_planner.speculative.decoder import SpeculativeDecoder
from reasoning_planner.speculative.proposer import (Commit, DraftContext, NoProposer,
                                                    PromptContext)
from tiny_checkpoint import tiny_config, write_checkpoint

TOLERANCE = 2e-5
BLOCK, LAYERS = 5, (1, 3)

pytestmark = pytest.mark.usefixtures("single_thread")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("draft") / "tiny", tiny_config())


@pytest.fixture(scope="module")
def target(checkpoint):
    return load_target(checkpoint)


def a_draft(target, seed=0, **changes):
    values = {"block_length": BLOCK, "feature_layers": LAYERS, **changes}
    draft = Draft(DraftConfig.for_target(target.config.text, **values), target)
    draft.initialise(seed)
    return draft.eval()


def a_prompt(config, images=2, history=6):
    """(L,) ids: text, images, ego history, text, cot_start."""
    tokens = config.tokens
    image = [tokens.vision_start_id, *[tokens.image_pad_id] * config.vision.tokens_per_image,
             tokens.vision_end_id]
    past = [tokens.traj_history_start_id, *[tokens.history_bin_start] * history,
            tokens.traj_history_end_id]
    return np.array([5, 6, 7, *image * images, *past, 8, 9, tokens.cot_start_id])


def mrope_of(config, ids):
    """(3, L) and rope_delta, as the target has them."""
    positions, delta = rope.mrope_position_ids(
        torch.from_numpy(visual_tokens(ids, config.tokens))[None],
        [config.vision.merged_grid] * 2)
    return positions[:, 0].numpy(), int(delta)


def some_states(draft, length, seed=0):
    generator = np.random.default_rng(seed)
    size = draft.config.hidden_size * len(draft.config.feature_layers)
    return generator.standard_normal((length, size)).astype(np.float32)


# FlatRoPE, as the paper's claims are stated for Alpamayo


def alpamayo_layout():
    """is_visual (L,) of 16 images of 10 x 18 tokens between delimiters, text around them."""
    image = [0, *[1] * 180, 0]
    return np.array([0] * 20 + image * 16 + [0] * 50 + [0] * 30, bool)


@pytest.fixture(scope="module")
def rotations():
    """float64 cos and sin of 20 more tokens' sequence, for "flat" and "mrope"; and positions."""
    visual, text = alpamayo_layout(), preset("alpamayo-r1").text
    mrope, delta = rope.mrope_position_ids(torch.from_numpy(visual)[None], [(10, 18)] * 16)
    inverse = rope.inverse_frequencies(text.head_dim, text.rope_theta).double()
    axes = rope.mrope_axes(text.mrope_section)
    found = {}
    for name in ("flat", "mrope"):
        placed = place_prompt(name, visual, mrope[:, 0].numpy(), int(delta))
        positions = torch.from_numpy(placed.of(0, len(visual) + 20)).double()
        angles = positions.T[:, axes] * inverse
        found[name] = (angles.cos()[None], angles.sin()[None], positions, placed.delta)
    return found


def scores(rotation, q, k):
    """(queries, keys) float64."""
    cos, sin, _, _ = rotation
    return (rope.rotate(q, cos, sin)[0, 0] @ rope.rotate(k, cos, sin)[0, 0].T) / 128 ** 0.5


def test_behind_the_images_flat_and_mrope_score_alike(rotations):
    length, last = rotations["flat"][0].shape[1], int(np.flatnonzero(alpamayo_layout())[-1])
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, length, 128, generator=generator, dtype=torch.float64)
    flat, mrope = (scores(rotations[name], q, k) for name in ("flat", "mrope"))
    behind, visual = slice(last + 1, None), np.flatnonzero(alpamayo_layout())
    assert (flat[behind, behind] - mrope[behind, behind]).abs().max() < 1e-12
    assert (flat[behind][:, visual] - mrope[behind][:, visual]).abs().max() > 0.1


def test_visual_keys_move_away_and_score_less(rotations):
    visual = np.flatnonzero(alpamayo_layout())
    last_query = rotations["flat"][0].shape[1] - 1
    assert len(visual) == 2880 and rotations["mrope"][3] == -2592 and rotations["flat"][3] == 0
    furthest = {name: float((r[2][:, last_query:] - r[2][:, visual]).max())
                for name, r in rotations.items()}
    assert 380 < furthest["mrope"] <= 420 and 2900 < furthest["flat"] <= 3000 + 20
    shared = np.unique(rotations["mrope"][2][:, visual].numpy())
    assert len(shared) <= 16 * 18 and len(np.unique(rotations["flat"][2][:, visual])) == 2880
    # A key that matches its query in every channel: what the rotation leaves of that.
    alike = torch.ones(1, 1, last_query + 1, 128, dtype=torch.float64)
    flat, mrope = (scores(rotations[name], alike, alike)[last_query, visual].mean()
                   for name in ("flat", "mrope"))
    assert flat < 0.9 * mrope                   # 5.58 and 6.77 of the unrotated 11.31
    shares = {name: scores(rotations[name], alike, alike)[last_query].softmax(-1)
              for name in ("flat", "mrope")}
    history = slice(int(visual[-1]) + 1, int(visual[-1]) + 51)
    gain = [float(shares[name][history].sum()) for name in ("flat", "mrope")]
    assert gain[0] > 1.5 * gain[1]              # their scores stay, what is shared out grows
    row_and_column = rotations["flat"][2][:, visual]
    assert (row_and_column[0] == row_and_column[1]).all()       # no row or column phase


# Positions


def test_positions_of_each_rope():
    visual = np.array([0, 0, 1, 1, 1, 1, 0, 0], bool)
    mrope = np.array([[0, 1, 2, 2, 2, 2, 4, 5], [0, 1, 2, 2, 3, 3, 4, 5],
                      [0, 1, 2, 3, 2, 3, 4, 5]])
    expected = {"flat": [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]] * 3,
                "mrope": [[*row, 6, 7] for row in mrope.tolist()],
                "text_only": [[0, 1, 1, 1, 1, 1, 2, 3, 4, 5]] * 3,
                "local_reset": [[0, 1, 2, 3, 4, 5, 6, 7, 0, 1]] * 3}
    assert set(expected) == set(ROPES)
    for name, ids in expected.items():
        placed = place_prompt(name, visual, mrope, -2)
        assert placed.of(0, 10).tolist() == ids, name
        assert placed.of(7, 9).tolist() == [row[7:9] for row in ids], name


def test_a_runtimes_placement_follows_the_prompt():
    config = tiny_config()
    draft = DraftConfig.for_target(config.text, rope="mrope", context="history_masked",
                                   feature_layers=LAYERS)
    for history in (6, 4, 6):
        ids = a_prompt(config, history=history)
        placed = Placement(draft, config, ids)
        kept = ~history_tokens(ids, config.tokens)
        positions, delta = mrope_of(config, ids)
        assert np.array_equal(placed.prompt(), positions[:, kept])
        assert np.array_equal(placed.advance(1), np.full((3, 1), len(ids) + delta))
        assert placed.block()[0, 0] == len(ids) + 1 + delta
    with pytest.raises(ModelError, match="draft prompt"):
        Placement(draft, config, ids[:10])        # part of an image


def test_history_lies_between_its_delimiters():
    config = tiny_config()
    ids = a_prompt(config)
    history = history_tokens(ids, config.tokens)
    assert history.sum() == 6 and (ids[history] == config.tokens.history_bin_start).all()
    assert not (history & visual_tokens(ids, config.tokens)).any()


def test_visible_context_by_switch():
    kept = np.array([1, 0, 1, 1], bool)
    anchors = np.array([[4, 6]])
    full = DraftConfig()
    seen = visible_context(full, np.ones(4, bool), anchors, 7)
    assert seen.tolist() == [[[True] * 4 + [False] * 3, [True] * 6 + [False]]]
    seen = visible_context(dataclasses.replace(full, context="no_visual"), kept, anchors, 7)
    assert seen[0].sum(-1).tolist() == [3, 5] and not seen[:, :, 1].any()
    last = dataclasses.replace(full, context="last_k", context_k=2)
    seen = visible_context(last, np.ones(4, bool), anchors, 7)
    assert np.flatnonzero(seen[0, 1]).tolist() == [4, 5]


# The model


def masked_blocks(draft, model, states, last_ids, anchors):
    """(A, BLOCK - 1, V): all blocks in one pass, as training has them."""
    ids = a_prompt(model)
    visual = visual_tokens(ids, model.tokens)
    placed = place_prompt(draft.config.rope, visual, *mrope_of(model, ids))
    kept = kept_in_context(draft.config, visual, history_tokens(ids, model.tokens))
    context = torch.from_numpy(placed.of(0, len(states)))[:, None]
    kv = draft.context_kv(torch.from_numpy(states)[None], *draft.cos_sin(context))
    mask = blocks_mask(torch.from_numpy(
        visible_context(draft.config, kept, np.array([anchors]), len(states))), BLOCK)
    inside = np.concatenate([placed.of(a, a + BLOCK) for a in anchors], axis=1)
    with torch.no_grad():
        hidden = draft.block_hidden(torch.tensor([last_ids]), kv,
                                    *draft.cos_sin(torch.from_numpy(inside)[:, None]), mask)
        return draft.logits(hidden)[0]


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("context", CONTEXTS)
def test_a_cached_context_is_the_uncached_one(target, name, context):
    draft, model = a_draft(target, rope=name, context=context, context_k=7), target.config
    ids = a_prompt(model)
    length, layers = len(ids), len(draft.config.feature_layers)
    states = some_states(draft, length + 9)
    anchors, last_ids = [length, length + 3, length + 9], [10, 11, 12]
    expected = masked_blocks(draft, model, states, last_ids, anchors)
    runtime = TorchDraft(draft, model)
    runtime.begin(ids, np.split(states[:length], layers, axis=1))
    done = length
    for row, (anchor, last_id) in enumerate(zip(anchors, last_ids)):
        block = runtime.draft(last_id, np.split(states[done:anchor], layers, axis=1))
        done = anchor
        wanted = expected[row].log_softmax(-1)
        assert block.token_ids.tolist() == wanted.argmax(-1).tolist()
        top = wanted.gather(1, torch.from_numpy(block.top_ids))
        assert np.abs(top.numpy() - block.top_log_probs).max() < TOLERANCE


def _touch(draft, model, where):
    """Change of block logits when the context's hidden states change at some indexes."""
    length = len(a_prompt(model))
    states = some_states(draft, length + 4)
    changed = states.copy()
    changed[where] += 1.0
    before, after = (masked_blocks(draft, model, given, [10], [length + 2])[0]
                     for given in (states, changed))
    text = slice(0, model.tokens.text_vocab_size)
    return float((before - after)[:, text].abs().max())


def test_each_context_ignores_what_it_says(target):
    model = target.config
    ids = a_prompt(model)
    visual = np.flatnonzero(visual_tokens(ids, model.tokens))
    history = np.flatnonzero(history_tokens(ids, model.tokens))
    length = len(ids)
    full, blind = a_draft(target), a_draft(target, context="no_visual")
    unaware = a_draft(target, context="history_masked")
    short = a_draft(target, context="last_k", context_k=4)
    for where in (visual, history, [0], [length + 1]):
        assert _touch(full, model, where) > 1e-3
    assert _touch(blind, model, visual) == 0.0 < _touch(blind, model, history)
    assert _touch(unaware, model, history) == 0.0 < _touch(unaware, model, visual)
    assert _touch(short, model, range(length - 2)) == 0.0 < _touch(short, model, [length - 2])


def test_nothing_committed_later_leaks_into_a_block(target):
    draft, model = a_draft(target), target.config
    length = len(a_prompt(model))
    assert _touch(draft, model, [length + 2, length + 3]) == 0.0     # the anchor and behind it
    states = some_states(draft, length + 4)
    one, other = (masked_blocks(draft, model, states, [10, last], [length, length + 1])
                  for last in (11, 12))
    assert torch.equal(one[0], other[0]) and not torch.equal(one[1], other[1])


def test_a_block_sees_itself_in_both_directions(target):
    draft = a_draft(target)
    longer = Draft(dataclasses.replace(draft.config, block_length=BLOCK + 1), target)
    longer.load_state_dict(draft.state_dict())
    states, found = some_states(draft, 9), []
    for model in (draft, longer):
        session = DraftSession(model, 16)
        session.append(states, np.arange(27).reshape(3, 9) % 9)
        positions = np.broadcast_to(np.arange(9, 9 + model.config.block_length),
                                    (3, model.config.block_length))
        found.append(session.block(10, positions)[0])
    text = slice(0, target.config.tokens.text_vocab_size)
    assert np.abs(found[0][text] - found[1][text]).max() > 1e-3     # one MASK more is seen


def test_rope_modes_differ_where_images_are(target):
    model = target.config
    length = len(a_prompt(model))
    found = {}
    for name in ROPES:
        draft = a_draft(target, rope=name)
        found[name] = masked_blocks(draft, model, some_states(draft, length + 2), [10],
                                    [length + 2])[0, :, :model.tokens.text_vocab_size]
    for name in ROPES[1:]:
        assert (found["flat"] - found[name]).abs().max() > 1e-3, name
    blind = {name: a_draft(target, rope=name, context="last_k", context_k=5) for name in ROPES}
    near = {name: masked_blocks(draft, model, some_states(draft, length + 2), [10],
                                [length + 2])[0, :, :model.tokens.text_vocab_size]
            for name, draft in blind.items()}
    for name in ("mrope", "text_only"):         # behind the images all are relative alike
        assert (near["flat"] - near[name]).abs().max() < 1e-4, name


def test_text_logits_are_the_logits_without_bins(target):
    draft = a_draft(target)
    hidden = torch.randn(3, draft.config.hidden_size)
    full, text = draft.logits(hidden), draft.text_logits(hidden)
    bins = target.config.tokens.trajectory_bins
    assert torch.isinf(full[:, bins.start:bins.stop]).all()
    ids = torch.tensor([0, bins.start - 1, bins.stop, target.config.tokens.cot_end_id])
    assert torch.allclose(full[:, ids], text[:, draft.text_columns(ids)])
    assert text.shape[1] == full.shape[1] - len(bins)


def test_nano_draft_is_small_and_owns_no_lent_weight():
    target = Target(preset("nano"))
    config = DraftConfig.for_target(target.config.text)
    assert config.feature_layers == (8, 10, 11) and feature_layers(36) == (24, 30, 31, 32, 34)
    draft = Draft(config, target)
    count = sum(p.numel() for p in draft.parameters())
    assert count == sum(v.numel() for v in draft.state_dict().values()) and 2 * count <= 8e6
    assert not [name for name in draft.state_dict() if "embed_tokens" in name or "head" in name]


@pytest.mark.parametrize("changes", [{"rope": "round"}, {"context": "some"}, {"kind": "tree"},
                                     {"block_length": 1}, {"feature_layers": (3, 1)},
                                     {"num_heads": 5}, {"mrope_section": (4, 4, 4)}])
def test_wrong_configurations_are_refused(changes):
    with pytest.raises(ConfigError, match=next(iter(changes))):
        DraftConfig(**changes)


def test_configuration_round_trip(target):
    config = DraftConfig.for_target(target.config.text, context="last_k")
    assert DraftConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    with pytest.raises(ConfigError, match="expected"):
        DraftConfig.from_dict({"rope": "flat"})
    with pytest.raises(ConfigError, match="nano"):
        config.require_target(preset("nano"))


def test_release_round_trip_and_its_refusals(target, checkpoint, tmp_path):
    sha = target_sha256(checkpoint)
    draft = a_draft(target, target_sha256=sha)
    save_draft(draft, tmp_path / "a", {"seed": 0})
    loaded = TorchDraft.load(tmp_path / "a", checkpoint)
    assert loaded.config == draft.config
    for name, value in load_draft(tmp_path / "a", draft.config, target).state_dict().items():
        assert torch.equal(value, draft.state_dict()[name].half().float()), name
    save_draft(a_draft(target, target_sha256="0" * 64), tmp_path / "b", {})
    with pytest.raises(ModelError, match="trained on"):
        TorchDraft.load(tmp_path / "b", checkpoint)
    (tmp_path / "a" / "draft.safetensors").write_bytes(b"nothing")
    with pytest.raises(ModelError, match="draft.safetensors"):
        TorchDraft.load(tmp_path / "a", checkpoint)
    with pytest.raises(ModelError, match="train-draft"):
        TorchDraft.load(tmp_path / "nowhere", checkpoint)


# As a proposer


class NaNDraft:
    """A draft whose probabilities are none."""

    name = "nan"

    def __init__(self, config):
        self.config = config

    def begin(self, input_ids, hidden_states):
        pass

    def draft(self, last_id, hidden_states):
        count = self.config.block_length - 1
        return dataclasses.replace(block_of(np.eye(count, 9, dtype=np.float32)),
                                   top_log_probs=np.full((count, 4), np.nan, np.float32))


class TeacherDraft:
    """Right about the known text, wrong at every third place; checks what it is given."""

    name = "teacher"

    def __init__(self, config, text):
        self.config, self.text, self.given = config, text, []

    def begin(self, input_ids, hidden_states):
        self.given = [np.concatenate(hidden_states, axis=1)]

    def draft(self, last_id, hidden_states):
        self.given.append(np.concatenate(hidden_states, axis=1))
        done = sum(map(len, self.given[1:])) + 1
        assert self.text[done - 1] == last_id, "tokens and hidden states got out of step"
        ids = [*self.text[done:], *[4] * 9][:self.config.block_length - 1]
        ids = [i if (done + n) % 3 else 4 for n, i in enumerate(ids)]
        logits = np.full((len(ids), 60), 0.0, np.float32)
        block = block_of(logits)
        return dataclasses.replace(block, token_ids=np.array(ids))


@pytest.fixture(scope="module")
def written(target):
    """A target-only text: (runtime, prompt, generation)."""
    runtime = TorchRuntime(target, capacity=128, hidden_layers=LAYERS)
    vision = target.config.vision
    images = np.random.default_rng(0).integers(
        0, 256, (2, vision.image_height, vision.image_width, 3), dtype=np.uint8)
    features, ids = runtime.encode_images(images), a_prompt(target.config)

    def write(proposer):
        prompt = PromptContext(runtime.prefill(ids, features), ids, features)
        decoder = SpeculativeDecoder(runtime, proposer, target.config.tokens.traj_future_start_id,
                                     24)
        return decoder.write(prompt, GreedyRule(), Deadline.after(60.0)), runtime

    return write, write(NoProposer())[0], ids, features


def failures(generation):
    return [refusal.reason for refusal in generation.refusals].count(Reason.DRAFT_FAILED)


def test_a_random_draft_changes_no_text(target, written):
    write, alone, _, _ = written
    found, _ = write(BlockDraftProposer(TorchDraft(a_draft(target), target.config)))
    assert found.token_ids == alone.token_ids and failures(found) == 0
    assert found.stats.proposed > 20


def test_the_draft_is_given_every_committed_token_once(target, written):
    write, alone, ids, features = written
    teacher = TeacherDraft(a_draft(target).config, alone.token_ids)
    found, runtime = write(BlockDraftProposer(teacher))
    assert found.token_ids == alone.token_ids and failures(found) == 0
    assert TokenOrigin.ROUTINE in found.origins and TokenOrigin.RECOVERED in found.origins
    given = np.concatenate(teacher.given)
    runtime.prefill(ids, features)
    expected = runtime.extend(np.array(alone.token_ids))
    count = len(given) - len(ids)
    assert count > 12
    assert np.abs(given[len(ids):] - np.concatenate(expected.hidden_states, axis=1)[:count]
                  ).max() < 1e-4


def test_a_draft_that_is_not_a_number_is_dropped(target, written):
    write, alone, ids, _ = written
    found, _ = write(BlockDraftProposer(NaNDraft(a_draft(target).config)))
    assert found.token_ids == alone.token_ids and failures(found) == 1
    broken = a_draft(target)
    with torch.no_grad():
        broken.fc.weight.fill_(float("nan"))
    found, _ = write(BlockDraftProposer(TorchDraft(broken, target.config)))
    assert found.token_ids == alone.token_ids and failures(found) == 1


def test_refusals_of_the_draft_runtime(target):
    draft = TorchDraft(a_draft(target), target.config, capacity=60)
    ids, size = a_prompt(target.config), draft.config.hidden_size
    layers = len(draft.config.feature_layers)
    with pytest.raises(ModelError, match="begin"):
        draft.draft(3, [np.zeros((0, size), np.float32)] * layers)
    with pytest.raises(ModelError, match="hidden_layers"):
        draft.begin(ids, [np.zeros((len(ids), size), np.float32)])
    with pytest.raises(ModelError, match="one each"):
        draft.begin(ids, [np.zeros((2, size), np.float32)] * layers)
    draft.begin(ids, [np.zeros((len(ids), size), np.float32)] * layers)
    with pytest.raises(ModelError, match="cache of 60"):
        draft.draft(3, [np.zeros((30, size), np.float32)] * layers)
    step = Step(np.zeros(1, np.int64), np.zeros((1, 1)), np.zeros((1, 1)), ())
    with pytest.raises(ModelError, match="input_ids"):
        BlockDraftProposer(draft).reset(PromptContext(step))


def test_a_draft_ends_where_it_is_unsure_or_has_no_room(target):
    class Fixed(NaNDraft):
        def draft(self, last_id, hidden_states):
            logits = np.zeros((4, 9), np.float32)
            logits[:, 5] = [9.0, 9.0, 0.0, 9.0]
            return block_of(logits)

    proposer = BlockDraftProposer(Fixed(a_draft(target).config),
                                  BlockDraftConfig(min_path_prob=0.5))
    proposer.observe(Commit((3,)))
    assert proposer.propose(DraftContext((3,), 9, 9)).token_ids == (5, 5)
    assert len(proposer.propose(DraftContext((3,), 1, 9))) == 1
    assert len(proposer.propose(DraftContext((3,), 0, 9))) == 0
    with pytest.raises(ConfigError, match="min_path_prob"):
        BlockDraftConfig(min_path_prob=2.0)
