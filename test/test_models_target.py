"""The target without an oracle: caches, trees, the action expert, flow, the checkpoint's names."""

import dataclasses

import pytest

torch = pytest.importorskip("torch", reason="the reference models are PyTorch")

from reasoning_planner.models import flow, masks, rope
from reasoning_planner.models.config import (
    ExpertConfig, FlowConfig, ModelConfig, TextConfig, TokenConfig, VisionConfig, preset)
from reasoning_planner.models.kv_cache import KVCache, PrefixAttention
from reasoning_planner.models.target import Target, count_parameters, is_constant
from reasoning_planner.models.vision import image_patches

TOLERANCE = 1e-4
MIB = 2 ** 20


def tiny_config() -> ModelConfig:
    tokens = TokenConfig.extending(300)
    return ModelConfig(
        "tiny",
        TextConfig(vocab_size=tokens.vocab_size, hidden_size=48, num_layers=4, num_heads=4,
                   num_kv_heads=2, head_dim=16, intermediate_size=64, rope_theta=10_000.0,
                   mrope_section=(4, 2, 2)),
        VisionConfig(depth=3, hidden_size=32, num_heads=2, intermediate_size=48,
                     out_hidden_size=48, num_position_embeddings=16, deepstack_indexes=(0, 1, 2),
                     image_height=64, image_width=96),
        ExpertConfig(hidden_size=32, intermediate_size=40, num_heads=4,
                     projector_hidden_size=24),
        FlowConfig(num_waypoints=8), tokens)


@pytest.fixture(scope="module")
def target() -> Target:
    model = Target(tiny_config())
    model.initialise(seed=0)
    return model.eval()


def a_prompt(config: ModelConfig, images: int = 2, batch: int = 1, seed: int = 0):
    """(B, L) ids and patches of a prompt with images between text."""
    generator = torch.Generator().manual_seed(seed)
    tokens, vision = config.tokens, config.vision
    rows = []
    for _ in range(batch):
        text = torch.randint(0, 250, (12,), generator=generator).tolist()
        row = text[:5]
        for _ in range(images):
            row += [tokens.vision_start_id, *[tokens.image_pad_id] * vision.tokens_per_image,
                    tokens.vision_end_id]
        rows.append(row + text[5:] + [tokens.cot_start_id])
    pixels = torch.randint(0, 256, (batch * images, vision.image_height, vision.image_width, 3),
                           generator=generator, dtype=torch.uint8)
    return torch.tensor(rows), image_patches(pixels, vision) if images else None


def prefilled(target: Target, ids, patches, capacity: int = 128, **options):
    cache = target.new_cache(capacity, ids.shape[0])
    vision = None if patches is None else target.encode_images(patches, target.config.vision.grid)
    return target.prefill(ids, cache, vision, **options), cache


def test_patches_hold_the_normalised_pixels():
    vision = tiny_config().vision
    pixels = torch.zeros(1, 64, 96, 3, dtype=torch.uint8)
    pixels[0, 17, 2, 1] = 255               # patch row 1, column 0: third of its merged block
    patches = image_patches(pixels, vision)
    assert patches.shape == (1, 24, 768)
    assert patches[0, 2].reshape(3, 16, 16)[1, 1, 2] == 1.0
    assert int((patches == -1.0).sum()) == patches.numel() - 1


@pytest.mark.parametrize("images", [0, 2])
def test_cached_equals_uncached(target, images):
    ids, patches = a_prompt(target.config, images, batch=2)
    whole = target.forward_text(ids, patches)
    step, cache = prefilled(target, ids[:, :-4], patches, num_logits=3)
    assert (step.logits - whole[:, -7:-4]).abs().max() < TOLERANCE
    one = target.extend(ids[:, -4:-3], cache, step.rope_delta)
    block = target.extend(ids[:, -3:], cache, step.rope_delta)
    logits = torch.cat((one.logits, block.logits), dim=1)
    assert (logits - whole[:, -4:]).abs().max() < TOLERANCE


def test_selected_layers_are_the_same_with_and_without_cache(target):
    ids, patches = a_prompt(target.config)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[:, -1] = True
    trained = target.training_logits(ids, mask, patches, select_layers=(2, 0))
    step, _ = prefilled(target, ids, patches, select_layers=(2, 0))
    for ours, theirs in zip(trained.selected, step.selected):
        assert (ours - theirs).abs().max() < TOLERANCE
    assert (trained.selected[0] - trained.selected[1]).abs().max() > 0.01


def test_crop_forgets_a_rejected_block(target):
    ids, patches = a_prompt(target.config)
    step, cache = prefilled(target, ids, patches)
    length = cache.length
    target.extend(torch.tensor([[9, 8, 7]]), cache, step.rope_delta)
    cache.crop(length + 1)
    after = target.extend(torch.tensor([[5]]), cache, step.rope_delta)
    step, cache = prefilled(target, ids, patches)
    direct = target.extend(torch.tensor([[9, 5]]), cache, step.rope_delta)
    assert (after.logits[:, -1] - direct.logits[:, -1]).abs().max() < TOLERANCE


def test_tree_equals_its_paths(target):
    parents = [-1, 0, 0, 1, 2, 4, -1]
    nodes = torch.tensor([[11, 12, 13, 14, 15, 16, 17]])
    ids, patches = a_prompt(target.config)
    step, cache = prefilled(target, ids, patches)
    start = cache.length
    depths = masks.tree_depths(parents)
    assert depths == [0, 1, 1, 2, 2, 3, 0]
    tree = target.extend(nodes, cache, step.rope_delta, torch.tensor(depths) + start,
                         masks.tree_mask(parents, start))
    for leaf in (3, 5, 6):
        path = [leaf]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        step, linear_cache = prefilled(target, ids, patches)
        linear = target.extend(nodes[:, path], linear_cache, step.rope_delta)
        assert (tree.logits[:, path] - linear.logits).abs().max() < TOLERANCE
    path = [0, 2, 4, 5]
    cache.compact(start, path)
    step, linear_cache = prefilled(target, ids, patches)
    target.extend(nodes[:, path], linear_cache, step.rope_delta)
    for layer in range(target.config.text.num_layers):
        for ours, theirs in zip(cache.layer(layer), linear_cache.layer(layer)):
            assert (ours - theirs).abs().max() < TOLERANCE


def test_a_wrong_tree_mask_is_seen(target):
    ids, _ = a_prompt(target.config, images=0)
    results = []
    for parents in ([-1, 0, 1], [-1, 0, 0]):
        step, cache = prefilled(target, ids, None)
        start = cache.length
        results.append(target.extend(torch.tensor([[1, 2, 3]]), cache, step.rope_delta,
                                     torch.arange(start, start + 3),
                                     masks.tree_mask(parents, start)).logits[:, -1])
    assert (results[0] - results[1]).abs().max() > 0.01


def test_cache_bounds():
    cache = KVCache(num_layers=1, batch=1, num_kv_heads=1, capacity=4, head_dim=2)
    new = torch.ones(1, 1, 3, 2)
    cache.attend(0, new, new, new, None)
    cache.advance(3)
    address = cache.layer(0)[0].data_ptr()
    for wrong in (lambda: cache.attend(0, new, new, new, None), lambda: cache.crop(4),
                  lambda: cache.advance(2), lambda: cache.compact(0, [1, 0]),
                  lambda: cache.compact(1, [2])):
        with pytest.raises(AssertionError):
            wrong()
    cache.compact(0, [0, 2])
    assert cache.length == 2 and cache.layer(0)[0].data_ptr() == address


def set_next_token(target: Target, monkeypatch, after: int) -> None:
    """Make the model stop after `after` tokens, whatever it would write."""
    stop = target.config.tokens.traj_future_start_id
    masked = target.mask_trajectory_bins
    calls = []

    def chosen(logits):
        calls.append(1)
        logits = masked(logits)
        logits[..., stop] = 1e9 if len(calls) == after else -1e9
        return logits

    monkeypatch.setattr(target, "mask_trajectory_bins", chosen)


def test_generation_stops_and_the_stop_tokens_keys_exist(target, monkeypatch):
    set_next_token(target, monkeypatch, after=5)
    ids, patches = a_prompt(target.config)
    step, cache = prefilled(target, ids, patches)
    text = target.generate(step, cache, max_new_tokens=20)
    assert text.token_ids.shape == (1, 5) and bool(text.finished.all())
    assert int(text.token_ids[0, -1]) == target.config.tokens.traj_future_start_id
    assert cache.length == ids.shape[1] + 5 == int(text.offset[0])
    whole = torch.cat((ids, text.token_ids), dim=1)
    _, direct = prefilled(target, whole, patches)
    for layer in range(target.config.text.num_layers):
        for ours, theirs in zip(cache.layer(layer), direct.layer(layer)):
            assert (ours[:, :, -1] - theirs[:, :, -1]).abs().max() < TOLERANCE


def test_generation_without_stop_says_so_and_never_writes_a_bin(target):
    biased = Target(target.config)
    biased.load_state_dict(target.state_dict())
    ids, _ = a_prompt(target.config, images=0, batch=2)
    with torch.no_grad():                   # trajectory bins would win every argmax
        bins = target.config.tokens.trajectory_bins
        biased.lm_head.weight[bins.start:bins.stop] *= 100.0
    step, cache = prefilled(biased, ids, None)
    assert int(step.logits[0, -1].argmax()) in bins
    text = biased.generate(step, cache, max_new_tokens=6)
    assert not bool(text.finished.any())
    assert not any(token in bins for token in text.token_ids.flatten().tolist())
    assert text.offset.tolist() == [cache.length] * 2


def test_training_logits_are_those_of_the_whole_pass(target):
    ids, patches = a_prompt(target.config, batch=3)
    label_mask = torch.zeros_like(ids, dtype=torch.bool)
    label_mask[0, -2:] = label_mask[1, -3:-1] = label_mask[2, -1] = True
    trained = target.training_logits(ids, label_mask, patches)
    whole = target.forward_text(ids, patches)
    assert torch.equal(trained.labels, ids[label_mask])
    assert (trained.logits - whole[:, :-1][label_mask[:, 1:]]).abs().max() < TOLERANCE


def test_right_padding_changes_nothing(target):
    ids, patches = a_prompt(target.config)
    padded = torch.cat((ids, torch.full((1, 6), target.config.tokens.endoftext_id)), dim=1)
    whole = target.forward_text(padded, patches)[:, :ids.shape[1]]
    assert (whole - target.forward_text(ids, patches)).abs().max() < TOLERANCE


def test_expert_crop_equals_mask(target):
    ids, patches = a_prompt(target.config, batch=2)
    step, cache = prefilled(target, ids, patches)
    target.extend(torch.tensor([[4, 5, 6], [7, 8, 9]]), cache, step.rope_delta)
    offset = torch.full((2,), ids.shape[1] + 1)          # two rejected tokens lie behind
    noise, time = torch.randn(2, 8, 2), torch.tensor([0.3, 0.7])
    masked = target.training_velocity(cache, offset, step.rope_delta, noise, time)
    cos, sin = target.waypoint_cos_sin(offset, step.rope_delta)
    cropped = target.velocity(noise, time, PrefixAttention(cache, int(offset[0])), cos, sin, None)
    assert (masked - cropped).abs().max() < TOLERANCE
    seen = target.training_velocity(cache, offset + 2, step.rope_delta, noise, time)
    assert (masked - seen).abs().max() > TOLERANCE       # they would have been seen unmasked


def test_rows_with_different_offsets_act_as_alone(target):
    ids, patches = a_prompt(target.config, batch=2)
    step, cache = prefilled(target, ids, patches)
    target.extend(torch.tensor([[4, 5, 6], [7, 8, 9]]), cache, step.rope_delta)
    offset = torch.tensor([ids.shape[1] + 1, ids.shape[1] + 3])
    noise = torch.randn(2, 8, 2)
    # One step: the features reach 100 cycles per unit, so random weights magnify rounding.
    together = target.act(cache, offset, step.rope_delta, noise, num_steps=1)
    half = patches.shape[0] // 2
    for row, tokens in enumerate(([[4]], [[7, 8, 9]])):
        alone, own = prefilled(target, ids[row:row + 1], patches[row * half:(row + 1) * half])
        target.extend(torch.tensor(tokens), own, alone.rope_delta)
        actions = target.act(own, offset[row:row + 1], alone.rope_delta, noise[row:row + 1],
                             num_steps=1)
        assert (together[row] - actions[0]).abs().max() < TOLERANCE


def test_any_committed_token_changes_what_the_expert_sees(target):
    ids, patches = a_prompt(target.config)
    reasoning = [4, 5, 6, target.config.tokens.traj_future_start_id]
    noise = torch.randn(1, 8, 2)
    plans, keys = [], []
    for changed in range(-1, len(reasoning)):
        tokens = list(reasoning)
        if changed >= 0:
            tokens[changed] = 77
        step, cache = prefilled(target, ids, patches)
        target.extend(torch.tensor([tokens]), cache, step.rope_delta)
        offset = torch.tensor([cache.length])
        keys.append(torch.stack([torch.cat(cache.layer(i), dim=-1) for i in range(4)]))
        plans.append(target.act(cache, offset, step.rope_delta, noise, num_steps=2))
    for changed in range(len(reasoning)):
        position = ids.shape[1] + changed
        difference = (keys[changed + 1] - keys[0]).abs()
        assert difference[..., :position, :].max() == 0.0
        assert difference[..., position:, :].max() > 0.01
        assert (plans[changed + 1] - plans[0]).abs().max() > 1e-5


def test_expert_loss_leaves_the_decoder_alone(target):
    ids, patches = a_prompt(target.config)
    label_mask = torch.zeros_like(ids, dtype=torch.bool)
    label_mask[:, -1] = True
    trained = target.training_logits(ids, label_mask, patches, collect_kv=True)
    velocity = target.training_velocity(trained.prompt_kv, torch.tensor([ids.shape[1]]),
                                        trained.rope_delta, torch.randn(1, 8, 2),
                                        torch.tensor([0.5]))
    target.zero_grad()
    velocity.square().sum().backward()
    grads = {name: weight.grad for name, weight in target.named_parameters()}
    assert all((grad is None) == name.startswith("vlm.") for name, grad in grads.items())
    target.zero_grad()


def test_mrope_positions_by_hand():
    visual = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 0, 0]], dtype=torch.bool)
    ids, delta = rope.mrope_position_ids(visual, [(2, 3)])
    assert ids[:, 0].tolist() == [[0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
                                  [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
                                  [0, 1, 2, 3, 4, 2, 3, 4, 5, 6]]
    assert delta.tolist() == [-3]


def test_rope_delta_of_the_alpamayo_prompt():
    visual = torch.tensor([[0] * 20 + ([0] + [1] * 180 + [0]) * 16 + [0] * 74], dtype=torch.bool)
    assert visual.shape[1] == 3006
    _, delta = rope.mrope_position_ids(visual, [(10, 18)] * 16)
    assert delta.tolist() == [-2592]


def test_mrope_axes_of_the_target():
    axes = rope.mrope_axes((24, 20, 20)).tolist()
    assert axes[:6] == [0, 1, 2, 0, 1, 2] and axes[57:] == [0, 1, 2, 0, 0, 0, 0]
    assert [axes.count(axis) for axis in range(3)] == [24, 20, 20]


def test_flat_and_mrope_scores_agree_between_text_after_the_images():
    visual = torch.tensor([[0] * 3 + [1] * 6 + [0] * 9], dtype=torch.bool)
    mrope_ids, _ = rope.mrope_position_ids(visual, [(2, 3)])
    flat_ids = rope.flat_position_ids(1, visual.shape[1])
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, visual.shape[1], 16, generator=generator, dtype=torch.float64)
    scores = []
    for ids in (mrope_ids, flat_ids):
        cos, sin = rope.rope_cos_sin(ids, 16, 10_000.0, (4, 2, 2))
        scores.append(rope.rotate(q, cos, sin) @ rope.rotate(k, cos, sin).transpose(-1, -2))
    difference = (scores[0] - scores[1]).abs()[0, 0]
    assert difference[9:, 9:].max() < 1e-5
    assert difference[9:, 3:9].max() > 0.1


def test_flow_round_trips():
    actions = torch.tensor([[[-9.8, 0.33], [0.0, 0.0]]], dtype=torch.float64)
    normal = flow.normalise_actions(actions)
    assert float(normal[0, 1, 0]) == pytest.approx(-0.02902694707164455 / 0.6810426736454882)
    assert (flow.denormalise_actions(normal) - actions).abs().max() < 1e-12
    assert flow.normalise_actions(actions.half()).dtype == torch.float32
    noise = torch.randn(1, 2, 2, dtype=torch.float64)
    times = torch.tensor([0.25])
    noisy, velocity = flow.training_pair(normal, noise, times)
    assert (noisy + 0.75 * velocity - normal).abs().max() < 1e-12
    for steps in (1, 5, 10):                # a straight path is integrated exactly
        end = flow.integrate(lambda x, t: normal - noise, noise, steps)
        assert (end - normal).abs().max() < 1e-6


def test_flow_integration_visits_the_grid():
    seen = []
    flow.integrate(lambda x, t: (seen.append(t.tolist()), torch.zeros_like(x))[1],
                   torch.zeros(2, 3, 2), 5)
    assert seen == [pytest.approx([k / 5] * 2) for k in range(5)]


def test_flow_times_follow_the_beta_distribution():
    times = flow.sample_time(200_000, FlowConfig(), torch.Generator().manual_seed(0))
    assert 0.0 <= float(times.min()) and float(times.max()) < 0.999
    assert float(times.mean()) == pytest.approx(0.999 * (1 - 1.5 / 2.5), abs=0.003)
    below = float((times < 0.999 * 0.5).float().mean())
    assert below == pytest.approx(1 - 0.5 ** 1.5, abs=0.005)


def alpamayo_shapes() -> dict[str, tuple[int, ...]]:
    """The checkpoint's tensors, written out from the published sizes."""
    shapes = {"vlm.lm_head.weight": (155_697, 4096), "action_out_proj.weight": (2, 2048),
              "action_out_proj.bias": (2,), "action_in_proj.norm.weight": (2048,),
              "action_in_proj.norm.bias": (2048,)}
    trunk = "action_in_proj.encoder.trunk."
    for index, size in ((0, (512, 60)), (3, (512, 512)), (6, (2048, 512))):
        shapes |= {f"{trunk}{index}.weight": size, f"{trunk}{index}.bias": size[:1]}
    shapes |= {f"{trunk}{index}.weight": (512,) for index in (2, 5)}
    for prefix, hidden, query, mlp in (("vlm.model.language_model", 4096, 4096, 12_288),
                                       ("expert", 2048, 2048, 8256)):
        shapes[f"{prefix}.norm.weight"] = (hidden,)
        for i in range(36):
            layer = f"{prefix}.layers.{i}."
            for name, size in (
                    ("self_attn.q_proj", (query, hidden)), ("self_attn.k_proj", (1024, hidden)),
                    ("self_attn.v_proj", (1024, hidden)), ("self_attn.o_proj", (hidden, query)),
                    ("self_attn.q_norm", (128,)), ("self_attn.k_norm", (128,)),
                    ("mlp.gate_proj", (mlp, hidden)), ("mlp.up_proj", (mlp, hidden)),
                    ("mlp.down_proj", (hidden, mlp)), ("input_layernorm", (hidden,)),
                    ("post_attention_layernorm", (hidden,))):
                shapes[f"{layer}{name}.weight"] = size
    shapes["vlm.model.language_model.embed_tokens.weight"] = (155_697, 4096)
    visual = "vlm.model.visual."
    shapes |= {f"{visual}patch_embed.proj.weight": (1152, 3, 2, 16, 16),
               f"{visual}patch_embed.proj.bias": (1152,),
               f"{visual}pos_embed.weight": (2304, 1152)}
    modules = {}
    for i in range(27):
        modules |= {f"blocks.{i}.attn.qkv": (3456, 1152), f"blocks.{i}.attn.proj": (1152, 1152),
                    f"blocks.{i}.mlp.linear_fc1": (4304, 1152),
                    f"blocks.{i}.mlp.linear_fc2": (1152, 4304),
                    f"blocks.{i}.norm1": (1152,), f"blocks.{i}.norm2": (1152,)}
    for merger, norm in (("merger", 1152), *((f"deepstack_merger_list.{i}", 4608)
                                             for i in range(3))):
        modules |= {f"{merger}.norm": (norm,), f"{merger}.linear_fc1": (4608, 4608),
                    f"{merger}.linear_fc2": (4096, 4608)}
    for name, size in modules.items():
        shapes |= {f"{visual}{name}.weight": size, f"{visual}{name}.bias": size[:1]}
    return shapes


@pytest.mark.parametrize("name", ["alpamayo-r1", "alpamayo-1.5"])
def test_checkpoint_names_and_shapes(name):
    with torch.device("meta"):
        model = Target(preset(name))
    assert {k: tuple(v.shape) for k, v in model.state_dict().items()} == alpamayo_shapes()
    # 416 tensors of expert and action, of which 7 are constants that the code states
    held = [key for key in model.state_dict() if not key.startswith("vlm.")]
    assert len(held) == 416 - 7
    assert is_constant("action_in_proj.sinus.0.freqs") and is_constant("action_space.accel_std")
    assert not any(is_constant(key) for key in model.state_dict())


def test_alpamayo_sizes():
    with torch.device("meta"):
        model = Target(preset("alpamayo-r1"))
    counts = count_parameters(model.named_parameters())

    def bf16_mib(module):
        return 2 * sum(weight.numel() for weight in module.parameters()) / MIB

    assert bf16_mib(model.language_model.layers[0]) == pytest.approx(368.0, abs=0.05)
    assert bf16_mib(model.visual.blocks[0]) == pytest.approx(29.1, abs=0.05)
    assert bf16_mib(model.expert.layers[0]) == pytest.approx(120.8, abs=0.05)
    assert 2 * counts["total"] / 2 ** 30 == pytest.approx(20.64, abs=0.01)
    assert counts["expert"] + counts["action"] == pytest.approx(2.3e9, rel=0.02)


@pytest.mark.parametrize("name", ["nano", "nano-fast"])
def test_nano_fits_its_budget(name):
    config = preset(name).with_tokens(TokenConfig.extending(1200))
    with torch.device("meta"):
        counts = count_parameters(Target(config).named_parameters())
    assert counts["total"] <= 13_000_000
    assert config.vision.tokens_per_image == 8


@pytest.mark.parametrize("name", ["alpamayo-r1", "alpamayo-1.5", "nano", "nano-fast"])
def test_names_without_torch_agree(name):
    keys = pytest.importorskip("reasoning_planner.models.checkpoint_keys")
    with torch.device("meta"):
        held = Target(preset(name)).state_dict()
    assert {key: tuple(value.shape) for key, value in held.items()} == keys.expected_tensors(
        preset(name))
    assert all(is_constant(key) for key in keys.constant_tensors(preset(name)))


def test_fourier_precision_is_a_setting_of_the_generation():
    config = tiny_config()
    outputs = []
    for in_float32 in (True, False):
        changed = dataclasses.replace(
            config, expert=dataclasses.replace(config.expert, fourier_float32=in_float32))
        model = Target(changed)
        model.initialise(seed=0)
        features = model.action_in_proj.features(torch.tensor([0.37], dtype=torch.bfloat16))
        outputs.append(features.float())
    assert (outputs[0] - outputs[1]).abs().max() > 0.1
