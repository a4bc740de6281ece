"""The action expert: 64 waypoint queries that read the target's keys and values.

Layer i appends its own keys and values to those the text decoder's layer i left in the cache.
It knows neither the text nor the flow integration.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from .config import ExpertConfig, FlowConfig, TextConfig
from .kv_cache import AttentionBackend
from .text import DecoderLayer, LayerShape


class Expert(nn.Module):
    """Decoder layers of the expert's width; bidirectional, since its backend masks nothing."""

    def __init__(self, config: ExpertConfig, text: TextConfig):
        super().__init__()
        shape = LayerShape(config.hidden_size, config.num_heads, text.num_kv_heads, text.head_dim,
                           config.intermediate_size, text.rms_norm_eps)
        self.layers = nn.ModuleList(DecoderLayer(shape) for _ in range(text.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=text.rms_norm_eps)

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
                mask: torch.Tensor | None, backend: AttentionBackend) -> torch.Tensor:
        """(B, waypoints, hidden) -> the same.

        Args:
            cos, sin: (B, waypoints, head_dim / 2), of arange(waypoints) + rope_delta + offset.
            mask: additive over [prompt keys, waypoints]; None when the backend's prefix ends
                with the stop token.
            backend: holds the prompt's keys and values.
        """
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, cos, sin, mask, backend, index)
        return self.norm(hidden)


class FourierFeatures(nn.Module):
    """A scalar -> sqrt(2) [sin(2 pi f x), cos(2 pi f x)] at log-spaced f."""

    def __init__(self, num_frequencies: int, max_frequency: float, in_float32: bool):
        super().__init__()
        self.num_frequencies = num_frequencies
        self.max_frequency = max_frequency
        self.in_float32 = in_float32

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(...,) -> (..., 2 * num_frequencies)."""
        dtype = torch.float32 if self.in_float32 else x.dtype
        exponents = torch.linspace(0.0, math.log10(self.max_frequency), self.num_frequencies,
                                   device=x.device)
        frequencies = (10.0 ** exponents).to(dtype)
        angles = x.to(dtype)[..., None] * frequencies * (2.0 * math.pi)
        return math.sqrt(2.0) * torch.cat((angles.sin(), angles.cos()), dim=-1)


class WaypointEncoder(nn.Module):
    """The trunk: linear, SiLU, RMSNorm, repeated, then a linear to the expert's width."""

    def __init__(self, in_size: int, config: ExpertConfig):
        super().__init__()
        width = config.projector_hidden_size
        steps: list[nn.Module] = []
        for _ in range(config.projector_layers):
            steps += [nn.Linear(in_size, width), nn.SiLU(), nn.RMSNorm(width, eps=1e-5)]
            in_size = width
        self.trunk = nn.Sequential(*steps, nn.Linear(width, config.hidden_size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., features) -> (..., hidden)."""
        return self.trunk(x)


class ActionInProjection(nn.Module):
    """Noisy actions and the flow time -> one token for each waypoint."""

    def __init__(self, config: ExpertConfig, flow: FlowConfig):
        super().__init__()
        self.features = FourierFeatures(config.num_fourier_frequencies,
                                        config.max_fourier_frequency, config.fourier_float32)
        scalars = flow.action_size + 1
        self.encoder = WaypointEncoder(2 * config.num_fourier_frequencies * scalars, config)
        self.norm = nn.LayerNorm(config.hidden_size)

    def forward(self, actions: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """(B, waypoints, 2) normalised actions and (B,) time -> (B, waypoints, hidden)."""
        dtype = self.norm.weight.dtype
        time = time[:, None, None].expand(*actions.shape[:2], 1)
        scalars = torch.cat((actions, time.to(actions.dtype)), dim=-1)  # (B, waypoints, 3)
        if not self.features.in_float32:
            scalars = scalars.to(dtype)
        features = self.features(scalars).flatten(2)                    # (B, waypoints, 60)
        return self.norm(self.encoder(features.to(dtype)))
