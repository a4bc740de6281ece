"""World samples as training data: seeds, wordings, cameras, prompt layout, shards on disk."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tokenizers")

from reasoning_planner.errors import DataError
from reasoning_planner.models.config import preset
from reasoning_planner.training.dataset import (
    ANCHOR, FIRST_HELD_OUT_SEED, FULL_PROMPT, SHORT_PROMPT, PromptLayout, ShardStore,
    augment_images, check_seeds, choose_wording, drop_cameras, load_shard, make_batch, make_shard,
    save_shard, to_grey, token_config, train_tokenizer)
from reasoning_planner.world.language import all_sentences


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer()


@pytest.fixture(scope="module")
def config(tokenizer):
    return preset("nano").with_tokens(token_config(tokenizer))


@pytest.fixture(scope="module")
def shard():
    return make_shard(range(6), (64, 128))


def test_training_and_held_out_seeds_are_disjoint():
    check_seeds((0, FIRST_HELD_OUT_SEED - 1), held_out=False)
    check_seeds((FIRST_HELD_OUT_SEED, FIRST_HELD_OUT_SEED + 199), held_out=True)
    with pytest.raises(DataError, match="given 10000000"):
        check_seeds((5, FIRST_HELD_OUT_SEED), held_out=False)
    with pytest.raises(DataError, match="given 9999999"):
        check_seeds((FIRST_HELD_OUT_SEED - 1,), held_out=True)
    with pytest.raises(DataError):
        check_seeds((-1,), held_out=False)


def test_every_sentence_survives_the_tokenizer_in_few_tokens(tokenizer):
    sentences = all_sentences()
    assert all(tokenizer.decode(tokenizer.encode(text)) == text for text in sentences)
    assert max(len(tokenizer.encode(text)) for text in sentences) <= 20
    assert train_tokenizer().encode(sentences[7]) == tokenizer.encode(sentences[7])


def test_prompt_layout_is_whole_or_cut(tokenizer, config):
    full = PromptLayout(tokenizer, config)
    short = PromptLayout(tokenizer, config, SHORT_PROMPT)
    still = full.prompt(np.zeros((16, 3)))
    pads = still == tokenizer.qwen.image_pad
    assert pads.sum() == 16 * 8 and len(FULL_PROMPT) == 16
    assert still[-1] == tokenizer.special.cot_start
    cut = short.prompt(np.zeros((16, 3)))
    assert (cut == tokenizer.qwen.image_pad).sum() == 4 * 8
    assert (cut == tokenizer.qwen.vision_start).sum() == 4
    assert full.length - short.length == 12 * 10
    moving = np.zeros((16, 3))
    moving[:, 0] = np.arange(-15, 1) * 0.8
    changed = np.flatnonzero(full.prompt(moving) != still)
    bins = tokenizer.special.history_bins
    assert all(still[i] in bins for i in changed) and len(changed) == 16


@pytest.mark.parametrize("random", [False, True])
def test_labels_are_the_text_and_two_stop_tokens(tokenizer, config, shard, random):
    layout = PromptLayout(tokenizer, config, SHORT_PROMPT)
    rng = np.random.default_rng(3) if random else None
    batch = make_batch(ShardStore([shard]), layout, [4, 0, 2], rng)
    for row, index in enumerate([4, 0, 2]):
        labels = batch.input_ids[row][batch.label_mask[row]]
        text = tokenizer.decode(labels[:-2])
        assert text in shard.cocs[index]
        assert random or text == shard.cocs[index][0]
        assert list(labels) == [*tokenizer.encode(text), tokenizer.special.cot_end,
                                tokenizer.special.traj_future_start]
        assert batch.label_mask[row, layout.length:batch.offset[row]].all()
        assert (batch.input_ids[row, batch.offset[row]:] == tokenizer.qwen.endoftext).all()
    assert batch.images.shape == (12, 64, 128, 3)
    if not random:
        assert (batch.images[4] == shard.images[0][SHORT_PROMPT[0]]).all()


def test_camera_dropout_keeps_the_anchor():
    rng = np.random.default_rng(0)
    drawn = np.stack([drop_cameras(rng, 0.5) for _ in range(400)])
    assert drawn[:, ANCHOR].all()
    counts = drawn.sum(1)
    assert (counts == 1).any() and (counts == 4).mean() > 0.5
    images = np.full((4, 4, 32, 32, 3), 100, np.uint8)
    alone = [augment_images(images, rng).reshape(4, 4, -1) for _ in range(200)]
    assert all((pictures[ANCHOR] > 0).all() for pictures in alone)
    assert any((pictures[3] == 0).all() for pictures in alone)


def test_grey_is_luma():
    image = np.array([[[255, 0, 0], [0, 255, 0]]], np.uint8)
    assert to_grey(image).tolist() == [[[76, 76, 76], [150, 150, 150]]]


def test_preferred_wording_is_the_commonest():
    rng = np.random.default_rng(0)
    valid = ("a.", "a", "b.", "b", "c.", "c")
    drawn = [choose_wording(valid, rng) for _ in range(2000)]
    shares = {text: drawn.count(text) / len(drawn) for text in valid}
    assert shares["a."] + shares["a"] == pytest.approx(0.75, abs=0.03)
    assert min(shares.values()) > 0.01 and shares["a."] > 2 * shares["a"]
    assert {choose_wording(("x.", "x"), rng) for _ in range(50)} == {"x.", "x"}


def test_shards_survive_the_disk(shard, tmp_path):
    save_shard(shard, tmp_path / "shard_0000")
    store = ShardStore.open(tmp_path)
    assert len(store) == 6
    found, row = store.place(5)
    assert row == 5 and (found.images[row] == shard.images[5]).all()
    assert found.cocs == shard.cocs and (found.controls == shard.controls).all()
    again = ShardStore([shard, shard]).place(7)
    assert again[1] == 1
    with pytest.raises(DataError, match="shard"):
        load_shard(tmp_path / "missing")
    with pytest.raises(DataError, match="no shards"):
        ShardStore.open(tmp_path / "missing")
