"""The three losses of the target, and the training pass that feeds them.

Text: cross-entropy on the answer. Flow: squared error of the expert's velocity. Privileged: what
the world knows about a scene, read off pooled features by heads that are thrown away afterwards.
It knows no data set and no optimiser.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from ..models import flow
from ..models.kv_cache import CausalAttention, PromptKV
from ..models.target import Target
from ..models.vision import VisionFeatures, image_patches

FIRST_TOKENS, FIRST_WEIGHT = 3, 2.0     # the answer's opening says the manoeuvre
MAX_CURVATURE_WEIGHT = 25.0


@dataclass(frozen=True)
class TextPass:
    """A differentiable pass over B prompts with their answers.

    Attributes:
        logits: (M, V), one row for each answer token, rows of the batch after one another.
        labels: (M,) int64.
        opening: (B, hidden), the last prompt token's final state: it predicts the first word.
        prompt_kv: detached keys and values of the whole sequence.
        rope_delta: (B,) int64.
    """

    logits: torch.Tensor
    labels: torch.Tensor
    opening: torch.Tensor
    prompt_kv: PromptKV
    rope_delta: torch.Tensor


class Prompted(Protocol):
    """What the action expert reads of B prompts with their answers; see TextPass."""

    @property
    def prompt_kv(self) -> PromptKV:
        """Keys and values."""

    @property
    def rope_delta(self) -> torch.Tensor:
        """(B,) int64."""


def encode_rows(target: Target, images: torch.Tensor, rows: int, trained: torch.Tensor
                ) -> VisionFeatures:
    """Encode the images of B rows, with gradients for some of the columns alone.

    Args:
        images: (B * places, H, W, 3) uint8, row by row.
        rows: B.
        trained: (places,) bool; the tower learns from these images. All images of a column that
            is not trained are encoded without a graph, at a third of the cost.
    """
    config = target.config.vision
    patches = image_patches(images, config).unflatten(0, (rows, -1))    # (B, places, P, pixels)
    parts = []
    for chosen, graph in ((trained, True), (~trained, False)):
        if bool(chosen.any()):
            with torch.set_grad_enabled(graph and torch.is_grad_enabled()):
                parts.append(target.encode_images(patches[:, chosen].flatten(0, 1), config.grid))
    order = torch.argsort(torch.cat((trained.nonzero(), (~trained).nonzero())).flatten())

    def join(values: list[torch.Tensor]) -> torch.Tensor:
        columns = torch.cat([value.unflatten(0, (rows, -1)) for value in values], dim=1)
        return columns[:, order].flatten(0, 1)                          # (B * places, T, hidden)

    return VisionFeatures(join([part.tokens for part in parts]),
                          tuple(join(list(level)) for level in
                                zip(*(part.deepstack for part in parts))))


def text_pass(target: Target, input_ids: torch.Tensor, label_mask: torch.Tensor,
              vision: VisionFeatures) -> TextPass:
    """The text decoder over whole sequences, lm_head at the answers alone.

    Args:
        input_ids: (B, L) int64, right-padded.
        label_mask: (B, L) bool, tokens to be predicted.
        vision: the images of row 0, then of row 1, ...
    """
    model = target.language_model
    position_ids, rope_delta = target.position_ids(input_ids, target.config.vision.grid)
    cos, sin = target.cos_sin(position_ids)
    where = target.is_visual(input_ids).nonzero(as_tuple=True)
    embeds = model.embed_tokens(input_ids).index_put(where, vision.tokens.flatten(0, 1))
    empty = torch.zeros_like(embeds)
    deepstack = tuple(empty.index_put(where, level.flatten(0, 1)) for level in vision.deepstack)
    backend = CausalAttention(collect=True)
    hidden = model(embeds, cos, sin, None, backend, deepstack).last_hidden
    first = label_mask.to(torch.int64).argmax(1) - 1                    # (B,)
    opening = hidden[torch.arange(len(hidden)), first]
    logits = target.lm_head(hidden[:, :-1][label_mask[:, 1:]])
    return TextPass(logits, input_ids[label_mask], opening, backend, rope_delta)


def text_loss(logits: torch.Tensor, labels: torch.Tensor, label_mask: torch.Tensor
              ) -> torch.Tensor:
    """Weighted mean cross-entropy of the answers; the first tokens of each count double.

    Args:
        logits: (M, V).
        labels: (M,).
        label_mask: (B, L) bool with M True.
    """
    place = label_mask.cumsum(1)[label_mask]                            # 1, 2, ... in each row
    weight = torch.where(place <= FIRST_TOKENS, FIRST_WEIGHT, 1.0)
    losses = F.cross_entropy(logits, labels, reduction="none")
    return (losses * weight).sum() / weight.sum()


class RepeatedKV:
    """A prompt's keys and values, each row given `times` times in a row."""

    def __init__(self, prompt: PromptKV, times: int):
        self._prompt = prompt
        self._times = times

    def layer(self, layer_index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See PromptKV."""
        keys, values = self._prompt.layer(layer_index)
        return (keys.repeat_interleave(self._times, 0), values.repeat_interleave(self._times, 0))


def control_weights(v0_mps: torch.Tensor, num_waypoints: int) -> torch.Tensor:
    """What an error of each control costs in metres, roughly, squared.

    A constant error of the acceleration moves the place at time t by a t^2 / 2, one of the
    curvature by k v^2 t^2 / 2 sideways; early controls move all places after them. Without these
    weights a plan on a free road is off by 0.8 m at 3 s, nearly all of it curvature.

    Args:
        v0_mps: (B,).
    Returns:
        (B, num_waypoints, 2), mean 1.
    """
    early = 0.3 + 3.0 * (1.0 - torch.arange(num_waypoints) / 40.0).clamp(min=0.0) ** 1.5
    ratio = flow.CURVATURE_STD_1PM / flow.ACCELERATION_STD_MPS2 * v0_mps.square()
    curvature = ratio.square().clamp(1.0, MAX_CURVATURE_WEIGHT)         # (B,)
    channels = torch.stack((torch.ones_like(curvature), curvature), dim=1)
    weights = early[None, :, None] * channels[:, None, :]
    return weights / weights.mean()


def flow_loss(target: Target, given: Prompted, offset: torch.Tensor, controls: torch.Tensor,
              v0_mps: torch.Tensor, draws: int, generator: torch.Generator) -> torch.Tensor:
    """Mean squared error of the expert's velocity, under `control_weights`.

    Args:
        given: of B rows; its keys and values are read.
        offset: (B,) int64, index of traj_future_start + 1.
        controls: (B, 64, 2), normalised.
        v0_mps: (B,).
        draws: noise and time draws for each row: they share one prefill.
    """
    rows = len(controls) * draws
    actions = controls.repeat_interleave(draws, 0)
    noise = torch.randn(actions.shape, generator=generator)
    time = flow.sample_time(rows, target.config.flow, generator)
    noisy, velocity = flow.training_pair(actions, noise, time)
    predicted = target.training_velocity(
        RepeatedKV(given.prompt_kv, draws), offset.repeat_interleave(draws),
        given.rope_delta.repeat_interleave(draws), noisy, time)
    weights = control_weights(v0_mps, actions.shape[1]).repeat_interleave(draws, 0)
    return ((predicted - velocity).square() * weights).mean()


class PrivilegedHeads(nn.Module):
    """Readers of the world's labels: from each image alone, from a pair, and from the text model.

    `sentence` is the index of the scene's preferred wording among all that occur.
    """

    def __init__(self, target: Target, num_labels: int, num_one_hot: int, num_sentences: int):
        super().__init__()
        width = target.config.text.hidden_size
        pooled = width * (1 + len(target.config.vision.deepstack_indexes))
        pair = 2 * pooled * target.config.vision.tokens_per_image
        outputs = num_labels + num_sentences
        self.num_labels, self.num_one_hot = num_labels, num_one_hot
        self.single = nn.Linear(pooled, outputs)
        self.joint = nn.Sequential(nn.LayerNorm(pair), nn.Linear(pair, 256), nn.GELU(),
                                   nn.Linear(256, outputs))
        self.text = nn.Linear(width, outputs)

    def loss(self, output: torch.Tensor, labels: torch.Tensor, sentence: torch.Tensor
             ) -> torch.Tensor:
        """Cross-entropies of one-hots and sentence, Huber loss of the numbers.

        Args:
            output: (B, num_labels + num_sentences).
            labels: (B, num_labels).
            sentence: (B,) int64.
        """
        flags, numbers, scores = output.tensor_split((self.num_one_hot, self.num_labels), dim=1)
        wanted_flags, wanted_numbers = labels.tensor_split((self.num_one_hot,), dim=1)
        return (8.0 * F.binary_cross_entropy_with_logits(flags, wanted_flags)
                + 4.0 * F.smooth_l1_loss(numbers, wanted_numbers, beta=0.2)
                + F.cross_entropy(scores, sentence))


def pooled_features(vision: VisionFeatures) -> torch.Tensor:
    """(N, hidden * levels): the mean of each image's tokens, and of each DeepStack level's."""
    return torch.cat([level.mean(1) for level in (vision.tokens, *vision.deepstack)], dim=1)


def tower_loss(target: Target, heads: PrivilegedHeads, images: torch.Tensor, labels: torch.Tensor,
               sentence: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pretraining of the vision tower on pairs of images.

    Args:
        images: (B * 2, H, W, 3) uint8: front and tele of each row.
    Returns:
        the loss, and the joint head's share of right sentences.
    """
    config = target.config.vision
    vision = target.encode_images(image_patches(images, config), config.grid)
    pooled = pooled_features(vision)                                    # (B * 2, pooled)
    every = torch.cat((vision.tokens, *vision.deepstack), dim=2)        # (B * 2, T, pooled)
    joint = heads.joint(every.unflatten(0, (-1, 2)).flatten(1))
    loss = heads.loss(joint, labels, sentence) + 0.25 * heads.loss(
        heads.single(pooled), labels.repeat_interleave(2, 0), sentence.repeat_interleave(2))
    right = (joint[:, heads.num_labels:].argmax(1) == sentence).float().mean()
    return loss, right.detach()


@torch.no_grad()
def whiten_patches(target: Target, images: torch.Tensor) -> None:
    """Start the patch embedding from the principal components of real patches, near unit variance.

    A random projection of raw pixels shows little but the patch's mean brightness, and a tower
    of this size stays at the labels' base rates for thousands of steps.

    Args:
        images: (N, H, W, 3) uint8, a few hundred.
    """
    visual, config = target.visual, target.config.vision
    patches = image_patches(images, config).flatten(0, 1)               # (N * P, pixels)
    mean = patches.mean(0)
    variances, axes = torch.linalg.eigh(torch.cov((patches - mean).T))
    count = min(config.hidden_size, len(variances))
    variances, axes = variances.flip(0)[:count], axes.flip(1)[:, :count]
    floor = variances[min(24, count - 1)]
    weight = (axes / (variances + floor).sqrt()).T                      # (count, pixels)
    visual.patch_embed.proj.weight.zero_()
    visual.patch_embed.proj.bias.zero_()
    kernel = visual.patch_embed.proj.weight[:count]                     # (count, C, 2, p, p)
    still = weight.unflatten(1, (config.in_channels, 1, config.patch_size, config.patch_size))
    kernel.copy_(still.expand_as(kernel) / config.temporal_patch_size)
    visual.patch_embed.proj.bias[:count] = -(weight @ mean)
    visual.pos_embed.weight.mul_(20.0)      # 0.02 would be lost beside unit variance
