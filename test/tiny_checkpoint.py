"""Checkpoint directories with small models of random weights, for tests of runtimes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from reasoning_planner.models.config import ModelConfig, TokenConfig, preset
from reasoning_planner.models.target import Target
from reasoning_planner.tokenization.prompt import FIXED_TEXTS
from reasoning_planner.tokenization.text_tokenizer import TextTokenizer, train_text_tokenizer

WORDS = ("Keep distance to the lead vehicle.", "Slow down for the pedestrian.",
         "Stop at the red light.", "Nudge left around the parked car.")


def tiny_tokenizer() -> TextTokenizer:
    return train_text_tokenizer([*FIXED_TEXTS, *WORDS], 400)


def sized_for(config: ModelConfig, tokenizer: TextTokenizer) -> ModelConfig:
    """The configuration with the tokenizer's vocabulary."""
    tokens = TokenConfig.extending(tokenizer.special.base_size)
    text = dataclasses.replace(config.text, vocab_size=tokens.vocab_size)
    return dataclasses.replace(config, tokens=tokens, text=text)


def tiny_config() -> ModelConfig:
    """Heads grouped in threes, four layers, three of them with DeepStack, 16 tokens an image."""
    nano = preset("nano")
    text = dataclasses.replace(nano.text, hidden_size=48, num_layers=4, num_heads=6,
                               num_kv_heads=2, head_dim=16, intermediate_size=96,
                               mrope_section=(4, 2, 2))
    vision = dataclasses.replace(nano.vision, depth=4, hidden_size=32, num_heads=2,
                                 intermediate_size=64, out_hidden_size=48,
                                 num_position_embeddings=36, deepstack_indexes=(0, 1, 2),
                                 image_height=64, image_width=128)
    expert = dataclasses.replace(nano.expert, hidden_size=40, intermediate_size=64, num_heads=4,
                                 projector_hidden_size=24)
    return dataclasses.replace(nano, name="tiny", text=text, vision=vision, expert=expert)


def write_checkpoint(folder: Path, config: ModelConfig, seed: int = 0) -> Path:
    """config.json, tokenizer.json and float16 weights; returns the folder.

    The expert's highest Fourier frequencies are silenced: with random weights they make the flow
    chaotic (a change of 1e-7 in the noise grows to 0.6 in 10 steps, in PyTorch alone).
    """
    tokenizer = tiny_tokenizer()
    config = sized_for(config, tokenizer)
    target = Target(config)
    target.initialise(seed)
    with torch.no_grad():
        frequencies = config.expert.num_fourier_frequencies
        waves = target.action_in_proj.encoder.trunk[0].weight
        waves.view(len(waves), -1, frequencies)[:, :, 2:] = 0.0
        target.action_out_proj.weight.mul_(0.3)
        for weight in (p for p in target.parameters() if p.dim() == 1):
            weight.add_(0.1 * torch.randn(weight.shape,
                                          generator=torch.Generator().manual_seed(seed)))
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.half().contiguous() for name, tensor in target.state_dict().items()},
              folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config.to_dict()), encoding="utf-8")
    tokenizer.save(folder / "tokenizer.json")
    return folder
