"""The target: vision tower, text decoder and action expert joined, with the checkpoint's names.

Its state dict maps one to one to an Alpamayo 1 / 1.5 checkpoint. It knows nothing of prompts,
cameras or drafts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Iterable, Sequence

import torch
from torch import nn

from . import flow, rope
from .config import ModelConfig
from .expert import ActionInProjection, Expert
from .kv_cache import AttentionBackend, CausalAttention, KVCache, PrefixAttention, PromptKV
from .masks import causal_mask, prefix_mask
from .text import TextModel
from .vision import VisionFeatures, VisionTower

# In a checkpoint of Alpamayo 1 but constants of the code here: see expert.py and flow.py.
_CONSTANT_PREFIXES = ("action_space.", "action_in_proj.sinus.",
                      "action_in_proj.timestep_fourier_encoder.")


def is_constant(name: str) -> bool:
    """Whether a checkpoint's tensor is one that the code states and the model does not hold."""
    return name.startswith(_CONSTANT_PREFIXES)


@dataclass(frozen=True)
class Step:
    """A pass of the text decoder with a cache.

    Attributes:
        logits: (B, m, V), of the last m = `num_logits` tokens.
        last_hidden: (B, n, hidden), after the final norm.
        selected: (B, n, hidden) for each layer asked for, before the final norm.
        rope_delta: (B,) int64; None from `extend`, which was given it.
    """

    logits: torch.Tensor
    last_hidden: torch.Tensor
    selected: tuple[torch.Tensor, ...]
    rope_delta: torch.Tensor | None = None


@dataclass(frozen=True)
class TrainingPass:
    """A differentiable pass over whole sequences.

    Attributes:
        logits: (M, V), one row for each labelled token, rows of the batch after one another.
        labels: (M,) int64, those tokens.
        prompt_kv: detached keys and values, for `training_velocity`; None unless collected.
        selected: (B, L, hidden) for each layer asked for, before the final norm.
        rope_delta: (B,) int64.
    """

    logits: torch.Tensor
    labels: torch.Tensor
    prompt_kv: PromptKV | None
    selected: tuple[torch.Tensor, ...]
    rope_delta: torch.Tensor


@dataclass(frozen=True)
class Generation:
    """Greedy text.

    Attributes:
        token_ids: (B, T) int64, stop token included; endoftext after it.
        lengths: (B,) int64, tokens of each row up to and with the stop token.
        offset: (B,) int64, prompt length + lengths: the keys the action expert may see.
        finished: (B,) bool, False where no stop token came within the limit.
    """

    token_ids: torch.Tensor
    lengths: torch.Tensor
    offset: torch.Tensor
    finished: torch.Tensor


@dataclass(frozen=True)
class _Inputs:
    """Everything a text pass over a prompt needs."""

    embeds: torch.Tensor
    deepstack: tuple[torch.Tensor, ...]
    cos: torch.Tensor
    sin: torch.Tensor
    rope_delta: torch.Tensor


class Target(nn.Module):
    """A vision-language-action model of the Alpamayo architecture."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        text = config.text
        self.vlm = nn.ModuleDict({
            "model": nn.ModuleDict({"visual": VisionTower(config.vision),
                                    "language_model": TextModel(text)}),
            "lm_head": nn.Linear(text.hidden_size, text.vocab_size, bias=False)})
        self.expert = Expert(config.expert, text)
        self.action_in_proj = ActionInProjection(config.expert, config.flow)
        self.action_out_proj = nn.Linear(config.expert.hidden_size, config.flow.action_size)

    @property
    def language_model(self) -> TextModel:
        """The text decoder."""
        return self.vlm["model"]["language_model"]

    @property
    def visual(self) -> VisionTower:
        """The vision tower."""
        return self.vlm["model"]["visual"]

    @property
    def lm_head(self) -> nn.Linear:
        """Hidden state -> logits."""
        return self.vlm["lm_head"]

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Weights to train from: normal, deviation 0.02, residual outputs scaled by depth."""
        generator = torch.Generator().manual_seed(seed)
        depths = {"expert.": self.config.text.num_layers, "vlm.model.visual.":
                  self.config.vision.depth, "vlm.model.language_model.":
                  self.config.text.num_layers}
        for name, weight in self.named_parameters():
            if name.endswith("bias"):
                weight.zero_()
            elif weight.dim() == 1:
                weight.fill_(1.0)
            else:
                fan_in = weight[0].numel()
                std = 0.02 if "embed" in name else fan_in ** -0.5
                depth = next((d for p, d in depths.items() if name.startswith(p)), 1)
                if name.endswith(("o_proj.weight", "down_proj.weight", "attn.proj.weight",
                                  "mlp.linear_fc2.weight")):
                    std /= math.sqrt(2 * depth)
                weight.normal_(0.0, std, generator=generator)

    # Prompt

    def encode_images(self, patches: torch.Tensor, grid: tuple[int, int]) -> VisionFeatures:
        """Images -> visual tokens; depends on the images alone, so a planner keeps it by frame.

        Args:
            patches: (N, rows * columns, C * patch * patch), from `vision.image_patches`.
            grid: rows and columns of patches.
        """
        return self.visual(patches, grid)

    def is_visual(self, input_ids: torch.Tensor) -> torch.Tensor:
        """(B, L) bool, True at image and video placeholders."""
        tokens = self.config.tokens
        return (input_ids == tokens.image_pad_id) | (input_ids == tokens.video_pad_id)

    def cos_sin(self, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(3, B, n) or (B, n) positions -> two (B, n, head_dim / 2) float32."""
        text = self.config.text
        return rope.rope_cos_sin(position_ids, text.head_dim, text.rope_theta, text.mrope_section)

    def position_ids(self, input_ids: torch.Tensor, grid: tuple[int, int]
                     ) -> tuple[torch.Tensor, torch.Tensor]:
        """M-RoPE ids and rope_delta of prompts whose images all have one grid.

        Returns:
            (3, B, L) int64, or (3, 1, L) where all rows have one layout, the usual case; and
            (B,) int64.
        """
        is_visual = self.is_visual(input_ids)
        same = bool((is_visual == is_visual[:1]).all())
        rows = is_visual[:1] if same else is_visual
        merge = self.config.vision.spatial_merge_size
        merged = (grid[0] // merge, grid[1] // merge)
        count, rest = divmod(int(rows.sum()), merged[0] * merged[1])
        assert rest == 0, f"visual tokens are no multiple of the grid {merged}"
        ids, delta = rope.mrope_position_ids(rows, [merged] * count)
        return ids, (delta.expand(input_ids.shape[0]) if same else delta)

    def _inputs(self, input_ids: torch.Tensor, vision: VisionFeatures | None,
                grid: tuple[int, int]) -> _Inputs:
        """Embed the prompt and put the visual tokens in their places."""
        embeds = self.language_model.embed_tokens(input_ids)            # (B, L, hidden)
        position_ids, rope_delta = self.position_ids(input_ids, grid)
        cos, sin = self.cos_sin(position_ids)
        deepstack: tuple[torch.Tensor, ...] = ()
        if vision is not None:
            where = self.is_visual(input_ids).nonzero(as_tuple=True)
            assert where[0].numel() == vision.tokens.shape[0] * vision.tokens.shape[1], (
                f"{where[0].numel()} placeholders for {tuple(vision.tokens.shape[:2])} tokens")
            embeds = embeds.index_put(where, vision.tokens.flatten(0, 1))
            empty = torch.zeros_like(embeds)
            deepstack = tuple(empty.index_put(where, feature.flatten(0, 1))
                              for feature in vision.deepstack)
        return _Inputs(embeds, deepstack, cos, sin, rope_delta)

    def _vision(self, patches: torch.Tensor | None, grid: tuple[int, int]
                ) -> VisionFeatures | None:
        return None if patches is None else self.encode_images(patches, grid)

    # Uncached passes

    def forward_text(self, input_ids: torch.Tensor, patches: torch.Tensor | None = None,
                     grid: tuple[int, int] | None = None,
                     backend: AttentionBackend | None = None) -> torch.Tensor:
        """Logits at every position, (B, L, V), without a cache.

        Args:
            input_ids: (B, L) int64, right-padded where lengths differ.
            patches: (N, rows * columns, C * patch * patch), images in reading order; None for
                text alone.
            grid: rows and columns of patches; None is the configured image size.
            backend: where attention happens; None is a plain causal pass.
        """
        grid = grid or self.config.vision.grid
        given = self._inputs(input_ids, self._vision(patches, grid), grid)
        output = self.language_model(given.embeds, given.cos, given.sin, None,
                                     backend or CausalAttention(), given.deepstack)
        return self.lm_head(output.last_hidden)

    def training_logits(self, input_ids: torch.Tensor, label_mask: torch.Tensor,
                        patches: torch.Tensor | None = None,
                        grid: tuple[int, int] | None = None, collect_kv: bool = False,
                        select_layers: Sequence[int] = ()) -> TrainingPass:
        """A pass over a batch of right-padded prompts; lm_head runs at labelled positions only.

        Args:
            input_ids: (B, L) int64.
            label_mask: (B, L) bool, True at the tokens to be predicted (column 0 is False); the
                hidden state before each of them is what lm_head reads.
            patches, grid: as in `forward_text`; the images of row 0, then of row 1, ...
            collect_kv: keep detached keys and values for the action expert.
        """
        assert not bool(label_mask[:, 0].any()), "the first token of a row cannot be predicted"
        grid = grid or self.config.vision.grid
        given = self._inputs(input_ids, self._vision(patches, grid), grid)
        backend = CausalAttention(collect=collect_kv)
        output = self.language_model(given.embeds, given.cos, given.sin, None, backend,
                                     given.deepstack, select_layers)
        predicting = output.last_hidden[:, :-1][label_mask[:, 1:]]      # (M, hidden)
        return TrainingPass(self.lm_head(predicting), input_ids[label_mask],
                            backend if collect_kv else None, output.selected, given.rope_delta)

    # Cached passes

    def new_cache(self, capacity: int, batch: int = 1) -> KVCache:
        """An empty cache of this model's shape, dtype and device."""
        text = self.config.text
        weight = self.lm_head.weight
        return KVCache(text.num_layers, batch, text.num_kv_heads, capacity, text.head_dim,
                       weight.dtype, weight.device)

    @torch.no_grad()
    def prefill(self, input_ids: torch.Tensor, cache: KVCache,
                vision: VisionFeatures | None = None, grid: tuple[int, int] | None = None,
                select_layers: Sequence[int] = (), num_logits: int = 1) -> Step:
        """Fill an empty cache with prompts of one length.

        Args:
            input_ids: (B, L) int64, no padding.
            vision: from `encode_images`, the images of row 0, then of row 1, ...
            num_logits: how many of the last positions get logits.
        """
        assert cache.length == 0, f"the cache already holds {cache.length} tokens"
        given = self._inputs(input_ids, vision, grid or self.config.vision.grid)
        output = self.language_model(given.embeds, given.cos, given.sin, None, cache,
                                     given.deepstack, select_layers)
        cache.advance(input_ids.shape[1])
        logits = self.lm_head(output.last_hidden[:, -num_logits:])
        return Step(logits, output.last_hidden, output.selected, given.rope_delta)

    @torch.no_grad()
    def extend(self, token_ids: torch.Tensor, cache: KVCache, rope_delta: torch.Tensor,
               indices: torch.Tensor | None = None, mask: torch.Tensor | None = None,
               select_layers: Sequence[int] = ()) -> Step:
        """Decode one token, verify a block or verify a tree, and leave all of it in the cache.

        Args:
            token_ids: (B, n) int64.
            rope_delta: (B,) int64, from `prefill`.
            indices: (n,) or (B, n) int64, index of each token in the sequence; a tree's nodes
                have cache.length + depth. None: one after the other.
            mask: additive (1 or B, 1, n, cache.length + n), from `masks.tree_mask`; None causal.
        Returns:
            logits of all n tokens.
        """
        batch, count = token_ids.shape
        if indices is None:
            indices = torch.arange(cache.length, cache.length + count, device=token_ids.device)
        cos, sin = self.cos_sin(indices.expand(batch, count) + rope_delta[:, None])
        embeds = self.language_model.embed_tokens(token_ids)
        if mask is None and count > 1:
            mask = causal_mask(count, cache.length, embeds.dtype, embeds.device)
        output = self.language_model(embeds, cos, sin, mask, cache, (), select_layers)
        cache.advance(count)
        return Step(self.lm_head(output.last_hidden), output.last_hidden, output.selected)

    def mask_trajectory_bins(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits with the trajectory bins at -inf: what text is chosen from."""
        bins = self.config.tokens.trajectory_bins
        masked = logits.clone()
        masked[..., bins.start:bins.stop] = -math.inf
        return masked

    @torch.no_grad()
    def generate(self, prefilled: Step, cache: KVCache, max_new_tokens: int) -> Generation:
        """Greedy text after `prefill`, up to traj_future_start, whose keys are then in the cache.

        A row that stops early is fed endoftext; those keys lie behind its offset.
        """
        tokens = self.config.tokens
        step, start = prefilled, cache.length
        rope_delta = prefilled.rope_delta
        assert rope_delta is not None, "generate follows prefill"
        written: list[torch.Tensor] = []
        lengths = torch.zeros(cache.batch, dtype=torch.int64, device=step.logits.device)
        finished = torch.zeros_like(lengths, dtype=torch.bool)
        while len(written) < max_new_tokens and not bool(finished.all()):
            chosen = self.mask_trajectory_bins(step.logits[:, -1]).argmax(-1)   # (B,)
            chosen = torch.where(finished, tokens.endoftext_id, chosen)
            lengths += (~finished).to(torch.int64)
            finished |= chosen == tokens.traj_future_start_id
            written.append(chosen)
            step = self.extend(chosen[:, None], cache, rope_delta)
        token_ids = torch.stack(written, dim=1) if written else lengths.new_zeros(cache.batch, 0)
        return Generation(token_ids, lengths, start + lengths, finished)

    # Action

    def velocity(self, noisy: torch.Tensor, time: torch.Tensor, backend: AttentionBackend,
                 cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor | None
                 ) -> torch.Tensor:
        """One evaluation of the expert, (B, waypoints, 2); `backend` holds the prompt's keys."""
        hidden = self.action_in_proj(noisy, time)
        hidden = self.expert(hidden, cos, sin, mask, backend)
        return self.action_out_proj(hidden).to(noisy.dtype)

    def waypoint_cos_sin(self, offset: torch.Tensor, rope_delta: torch.Tensor
                         ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotation of the waypoints, which follow the stop token; two (B, waypoints, D / 2)."""
        steps = torch.arange(self.config.flow.num_waypoints, device=offset.device)
        return self.cos_sin(steps + (rope_delta + offset)[:, None])

    def training_velocity(self, prompt: PromptKV, offset: torch.Tensor, rope_delta: torch.Tensor,
                          noisy: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """The expert's velocity, differentiable in its own weights; masked form.

        Args:
            prompt: `TrainingPass.prompt_kv`, or a cache.
            offset: (B,) int64, index of traj_future_start + 1.
            rope_delta: (B,) int64.
            noisy: (B, waypoints, 2), normalised actions from `flow.training_pair`.
            time: (B,).
        """
        capacity = prompt.layer(0)[0].shape[2]
        mask = prefix_mask(offset, capacity, noisy.shape[1], self.action_out_proj.weight.dtype)
        cos, sin = self.waypoint_cos_sin(offset, rope_delta)
        return self.velocity(noisy, time, PrefixAttention(prompt), cos, sin, mask)

    @torch.no_grad()
    def act(self, prompt: PromptKV, offset: torch.Tensor, rope_delta: torch.Tensor,
            noise: torch.Tensor, num_steps: int | None = None) -> torch.Tensor:
        """Integrate the flow from noise to normalised actions.

        Rows that share one offset read a cropped prefix and need no mask; others are masked.

        Args:
            prompt: cache or collected keys; rows past `offset` are not read.
            offset: (B,) int64, index of traj_future_start + 1.
            rope_delta: (B,) int64.
            noise: (B, waypoints, 2), standard normal.
            num_steps: Euler steps; None is the configured number.
        Returns:
            (B, waypoints, 2); `flow.denormalise_actions` gives m/s^2 and 1/m.
        """
        cos, sin = self.waypoint_cos_sin(offset, rope_delta)
        shared = bool((offset == offset[0]).all())
        if shared:
            backend, mask = PrefixAttention(prompt, int(offset[0])), None
        else:
            backend = PrefixAttention(prompt)
            mask = prefix_mask(offset, prompt.layer(0)[0].shape[2], noise.shape[1],
                               self.action_out_proj.weight.dtype)
        return flow.integrate(
            lambda x, time: self.velocity(x, time, backend, cos, sin, mask), noise,
            num_steps or self.config.flow.num_steps)


def count_parameters(parts: Iterable[tuple[str, torch.Tensor]]) -> dict[str, int]:
    """Parameters by part: vision, text, embedding, lm_head, expert, action, total."""
    prefixes = {"vlm.model.visual.": "vision", "vlm.model.language_model.embed_tokens.":
                "embedding", "vlm.model.language_model.": "text", "vlm.lm_head.": "lm_head",
                "expert.": "expert", "action_": "action"}
    counts = dict.fromkeys(prefixes.values(), 0)
    for name, weight in parts:
        part = next(part for prefix, part in prefixes.items() if name.startswith(prefix))
        counts[part] += weight.numel()
    return {**counts, "total": sum(counts.values())}
