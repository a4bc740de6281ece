"""Text, vision, DeepStack, positions and greedy decoding against transformers' Qwen3-VL."""

import pytest

torch = pytest.importorskip("torch", reason="the reference models are PyTorch")
qwen3_vl = pytest.importorskip("transformers.models.qwen3_vl.modeling_qwen3_vl",
                               reason="transformers with Qwen3-VL is the oracle here")
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLConfig

from reasoning_planner.models import rope
from reasoning_planner.models.config import (
    ExpertConfig, FlowConfig, ModelConfig, TextConfig, TokenConfig, VisionConfig)
from reasoning_planner.models.target import Target
from reasoning_planner.models.vision import image_patches

TOLERANCE = 1e-4


def our_config() -> ModelConfig:
    tokens = TokenConfig.extending(300)
    return ModelConfig(
        "parity",
        TextConfig(vocab_size=tokens.vocab_size, hidden_size=64, num_layers=5, num_heads=4,
                   num_kv_heads=2, head_dim=32, intermediate_size=96, rope_theta=10_000.0,
                   mrope_section=(6, 5, 5)),
        VisionConfig(depth=4, hidden_size=64, num_heads=2, intermediate_size=80,
                     out_hidden_size=64, num_position_embeddings=49, deepstack_indexes=(0, 1, 3),
                     image_height=64, image_width=128),
        ExpertConfig(hidden_size=32, intermediate_size=40, num_heads=4,
                     projector_hidden_size=24),
        FlowConfig(), tokens)


def their_config(ours: ModelConfig) -> Qwen3VLConfig:
    text, vision, tokens = ours.text, ours.vision, ours.tokens
    return Qwen3VLConfig(
        image_token_id=tokens.image_pad_id, video_token_id=tokens.video_pad_id,
        vision_start_token_id=tokens.vision_start_id, vision_end_token_id=tokens.vision_end_id,
        tie_word_embeddings=False,
        text_config=dict(
            vocab_size=text.vocab_size, hidden_size=text.hidden_size,
            num_hidden_layers=text.num_layers, num_attention_heads=text.num_heads,
            num_key_value_heads=text.num_kv_heads, head_dim=text.head_dim,
            intermediate_size=text.intermediate_size, rms_norm_eps=text.rms_norm_eps,
            max_position_embeddings=4096, eos_token_id=None, bos_token_id=None, pad_token_id=None,
            rope_parameters=dict(rope_type="default", rope_theta=text.rope_theta,
                                 mrope_section=list(text.mrope_section),
                                 mrope_interleaved=True)),
        vision_config=dict(
            depth=vision.depth, hidden_size=vision.hidden_size, num_heads=vision.num_heads,
            intermediate_size=vision.intermediate_size, out_hidden_size=vision.out_hidden_size,
            patch_size=vision.patch_size, temporal_patch_size=vision.temporal_patch_size,
            spatial_merge_size=vision.spatial_merge_size,
            num_position_embeddings=vision.num_position_embeddings,
            deepstack_visual_indexes=list(vision.deepstack_indexes)))


@pytest.fixture(scope="module")
def pair():
    """Our target and their model with the same random weights, norms and biases included."""
    target = Target(our_config()).eval()
    target.initialise(seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in target.parameters():
            weight += 0.05 * torch.randn(weight.shape, generator=generator)
        target.language_model.embed_tokens.weight *= 10.0
    oracle = qwen3_vl.Qwen3VLForConditionalGeneration(their_config(target.config)).eval()
    weights = {name[len("vlm."):]: value for name, value in target.state_dict().items()
               if name.startswith("vlm.")}
    missing, unexpected = oracle.load_state_dict(weights, strict=False)
    assert not missing and not unexpected, (missing, unexpected)
    return target, oracle


def a_prompt(target: Target, images: int, batch: int = 1):
    generator = torch.Generator().manual_seed(images)
    tokens, vision = target.config.tokens, target.config.vision
    rows = []
    for _ in range(batch):
        row = torch.randint(0, 250, (7,), generator=generator).tolist()
        for _ in range(images):
            row += [tokens.vision_start_id, *[tokens.image_pad_id] * vision.tokens_per_image,
                    tokens.vision_end_id]
        rows.append(row + torch.randint(0, 250, (9,), generator=generator).tolist())
    pixels = torch.randint(0, 256, (batch * images, vision.image_height, vision.image_width, 3),
                           generator=generator, dtype=torch.uint8)
    return torch.tensor(rows), image_patches(pixels, vision) if images else None


def their_inputs(target: Target, ids, patches) -> dict:
    """The same prompt in the oracle's form: stills repeated in time, one row per patch."""
    inputs = dict(input_ids=ids, attention_mask=torch.ones_like(ids),
                  mm_token_type_ids=target.is_visual(ids).to(torch.int32))
    if patches is not None:
        repeated = patches.unflatten(-1, (3, 1, 256)).expand(-1, -1, -1, 2, -1)
        inputs["pixel_values"] = repeated.flatten(2).flatten(0, 1)
        rows, columns = target.config.vision.grid
        inputs["image_grid_thw"] = torch.tensor([[1, rows, columns]] * patches.shape[0])
    return inputs


@pytest.mark.parametrize("images, batch", [(0, 1), (1, 1), (5, 1), (3, 2)])
def test_logits(pair, images, batch):
    target, oracle = pair
    ids, patches = a_prompt(target, images, batch)
    with torch.no_grad():
        ours = target.forward_text(ids, patches)
        theirs = oracle(**their_inputs(target, ids, patches)).logits
    difference = float((ours - theirs).abs().max())
    print(f"logits, {images} images x {batch}: {difference:.1e} of {float(theirs.std()):.2f}")
    assert difference < TOLERANCE


def test_images_matter_to_the_logits(pair):
    target, _ = pair
    ids, patches = a_prompt(target, 2)
    with torch.no_grad():
        difference = target.forward_text(ids, patches) - target.forward_text(ids, -patches)
    assert difference[:, -1].abs().max() > 0.1


def test_vision_and_deepstack(pair):
    target, oracle = pair
    ids, patches = a_prompt(target, 3)
    inputs = their_inputs(target, ids, patches)
    with torch.no_grad():
        ours = target.encode_images(patches, target.config.vision.grid)
        theirs = oracle.model.visual(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"])
    pairs = [(ours.tokens, theirs.pooler_output),
             *zip(ours.deepstack, theirs.deepstack_features, strict=True)]
    for name, (a, b) in zip(("tokens", "deepstack 0", "deepstack 1", "deepstack 2"), pairs):
        difference = float((a.flatten(0, 1) - b).abs().max())
        print(f"{name}: {difference:.1e} of {float(b.std()):.2f}")
        assert difference < TOLERANCE


def test_positions(pair):
    target, oracle = pair
    tokens = target.config.tokens
    grids = [(2, 4), (5, 3), (1, 1), (3, 3)]

    def image(grid):
        return [tokens.image_pad_id] * (grid[0] * grid[1])

    rows = [[1, 2, *image(grids[0]), 3, *image(grids[1]), 4, 5],
            [*image(grids[2]), 6, *image(grids[3]), 7]]
    length = max(map(len, rows)) + 2
    ids = torch.zeros(2, length, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    ids[0, :len(rows[0])], mask[0, :len(rows[0])] = torch.tensor(rows[0]), 1    # right padding
    ids[1, -len(rows[1]):], mask[1, -len(rows[1]):] = torch.tensor(rows[1]), 1  # left padding
    visual = target.is_visual(ids)
    ours, delta = rope.mrope_position_ids(visual, grids, mask)
    grid_thw = torch.tensor([[1, 2 * r, 2 * c] for r, c in grids])
    theirs, their_delta = oracle.model.get_rope_index(
        ids, mm_token_type_ids=visual.to(torch.int32), image_grid_thw=grid_thw,
        attention_mask=mask)
    kept = mask.bool()
    assert torch.equal(ours[:, kept], theirs[:, kept])
    # The next token's position; our delta counts from the padded length, theirs from the other.
    assert (delta + length).tolist() == (their_delta.flatten() + mask.sum(1)).tolist()


@pytest.mark.parametrize("images", [0, 3])
def test_greedy_tokens_with_the_cache(pair, images):
    target, oracle = pair
    ids, patches = a_prompt(target, images)
    vision = None if patches is None else target.encode_images(patches, target.config.vision.grid)
    cache = target.new_cache(ids.shape[1] + 64)
    step = target.prefill(ids, cache, vision)
    rope_delta, ours = step.rope_delta, []
    for _ in range(64):
        token = step.logits[:, -1].argmax(-1)
        ours.append(int(token))
        step = target.extend(token[:, None], cache, rope_delta)
    theirs = oracle.generate(**their_inputs(target, ids, patches), max_new_tokens=64,
                             do_sample=False)[0, ids.shape[1]:].tolist()
    assert len(set(ours)) > 3, "degenerate text would prove nothing"
    assert ours == theirs
