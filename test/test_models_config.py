"""Configurations: presets, JSON round trip, refusals."""

import dataclasses
import json

import pytest

from reasoning_planner.errors import ConfigError
from reasoning_planner.models.config import (
    CONTROL_TOKENS, ModelConfig, TextConfig, TokenConfig, VisionConfig, preset)


@pytest.mark.parametrize("name", ["alpamayo-r1", "alpamayo-1.5", "nano", "nano-fast"])
def test_json_round_trip(name):
    config = preset(name)
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_alpamayo_ids():
    tokens = preset("alpamayo-r1").tokens
    assert tokens.vocab_size == 155_697
    assert (tokens.trajectory_bins.start, tokens.trajectory_bins.stop) == (151_669, 155_669)
    assert (tokens.future_bin_start, tokens.history_bin_start) == (151_669, 154_669)
    assert preset("alpamayo-r1").vision.tokens_per_image == 180


def test_another_vocabulary():
    tokens = TokenConfig.extending(1200)
    config = preset("nano").with_tokens(tokens)
    assert config.text.vocab_size == tokens.vocab_size == 1200 + 4000 + 28
    assert tokens.image_pad_id == 1198 and tokens.traj_future_start_id == 5212


def test_ids_agree_with_the_tokenizer():
    special_tokens = pytest.importorskip("reasoning_planner.tokenization.special_tokens")
    for size in (151_669, 1000):
        control = {name: size - 20 + i for i, name in enumerate(CONTROL_TOKENS)}
        ours = dataclasses.asdict(TokenConfig.extending(size, control))
        theirs = special_tokens.SpecialTokens.for_base(size)
        assert tuple(special_tokens.QWEN_TOKEN_NAMES) == CONTROL_TOKENS
        expected = {**control, **dataclasses.asdict(theirs)}
        for name, value in ours.items():
            if name.endswith("_id"):
                assert value == expected[name[:-3]], name
        assert TokenConfig.extending(size, control).vocab_size == theirs.size


@pytest.mark.parametrize("make, said", [
    (lambda: TextConfig(num_heads=30), "text.num_heads: given 30"),
    (lambda: TextConfig(mrope_section=(24, 20, 19)), "sum to head_dim / 2 = 64"),
    (lambda: VisionConfig(image_width=100), "vision.image_width: given 100"),
    (lambda: VisionConfig(deepstack_indexes=(8, 16, 27)), "below depth = 27"),
    (lambda: TokenConfig(cot_start_id=155_697), "tokens.cot_start_id: given 155697"),
    (lambda: TokenConfig(cot_start_id=155_678), "distinct ids"),
    (lambda: preset("alpamayo-3"), "given 'alpamayo-3'"),
    (lambda: dataclasses.replace(preset("nano"), vision=VisionConfig()), "text.hidden_size = "),
    (lambda: ModelConfig.from_dict({**preset("nano").to_dict(), "colour": 1}), "colour: unknown"),
    (lambda: ModelConfig.from_dict({"name": "x"}), "text: missing"),
])
def test_refusals_name_the_value(make, said):
    with pytest.raises(ConfigError) as caught:
        make()
    assert said in str(caught.value)
