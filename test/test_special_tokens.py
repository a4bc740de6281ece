"""The layout of the extended vocabulary against the ids of Alpamayo's released models."""

import pytest

from reasoning_planner.tokenization.special_tokens import (NUM_BINS, PADDING_TOKEN_NAMES,
                                                           QWEN3_BASE_SIZE, SPECIAL_TOKEN_NAMES,
                                                           SpecialTokens)

ALPAMAYO_IDS = {
    "prompt_start": 155669, "prompt_end": 155670, "image_start": 155671,
    "image_pre_tkn": 155672, "image_end": 155673, "traj_history_start": 155674,
    "traj_history_pre_tkn": 155675, "traj_history_end": 155676, "cot_start": 155677,
    "cot_end": 155678, "meta_action_start": 155679, "meta_action_end": 155680,
    "traj_future_start": 155681, "traj_future_pre_tkn": 155682, "traj_future_end": 155683,
    "traj_history": 155684, "traj_future": 155685, "vectorized_wm": 155686,
    "vectorized_wm_start": 155687, "vectorized_wm_end": 155688, "vectorized_wm_pre_tkn": 155689,
    "route_start": 155690, "route_pad": 155691, "route_end": 155692, "question_start": 155693,
    "question_end": 155694, "answer_start": 155695, "answer_end": 155696}


@pytest.mark.parametrize("name, token_id", ALPAMAYO_IDS.items())
def test_alpamayo_ids(name, token_id):
    assert getattr(SpecialTokens.for_base(QWEN3_BASE_SIZE), name) == token_id


def test_all_ids_are_covered():
    assert tuple(ALPAMAYO_IDS) == SPECIAL_TOKEN_NAMES
    assert PADDING_TOKEN_NAMES < set(SPECIAL_TOKEN_NAMES)


def test_alpamayo_bins_and_size():
    special = SpecialTokens.for_base(QWEN3_BASE_SIZE)
    assert special.bins == range(151_669, 155_669)
    assert special.first_future_bin == 151_669
    assert special.history_bins == range(154_669, 155_669)
    assert special.size == 155_697


def test_contents_stand_in_the_order_of_the_ids():
    special = SpecialTokens.for_base(QWEN3_BASE_SIZE)
    contents = special.contents()
    assert len(contents) == len(set(contents)) == NUM_BINS + 28 == special.size - 151_669
    assert contents[0] == "<i0>" and contents[3999] == "<i3999>"
    for name, token_id in ALPAMAYO_IDS.items():
        assert contents[token_id - 151_669] == f"<|{name}|>"


def test_small_base_has_the_same_layout_shifted():
    small, large = SpecialTokens.for_base(1000), SpecialTokens.for_base(QWEN3_BASE_SIZE)
    shift = QWEN3_BASE_SIZE - 1000
    assert small.contents() == large.contents()
    assert small.size + shift == large.size
    for name in SPECIAL_TOKEN_NAMES:
        assert getattr(small, name) + shift == getattr(large, name)


def test_no_base_is_refused():
    with pytest.raises(ValueError, match="base_size: given 0"):
        SpecialTokens.for_base(0)
