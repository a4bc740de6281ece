"""Flow matching over normalised actions: training pairs, Euler integration, the action scale.

It knows nothing of the network that predicts the velocity, nor of the unicycle model.
"""

from __future__ import annotations

from typing import Callable

import torch

from .config import FlowConfig

# Published constants (alpamayo 4.4). Code, not buffers: a cast of the model cannot round them.
ACCELERATION_MEAN_MPS2 = 0.02902694707164455
ACCELERATION_STD_MPS2 = 0.6810426736454882
CURVATURE_MEAN_1PM = 0.0002692167976330542
CURVATURE_STD_1PM = 0.026148280660833106

Velocity = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _scale(like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and deviation in float64 for float64 actions, else float32."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    mean = torch.tensor((ACCELERATION_MEAN_MPS2, CURVATURE_MEAN_1PM), dtype=dtype)
    std = torch.tensor((ACCELERATION_STD_MPS2, CURVATURE_STD_1PM), dtype=dtype)
    return mean.to(like.device), std.to(like.device)


def normalise_actions(actions: torch.Tensor) -> torch.Tensor:
    """(..., 2) acceleration in m/s^2 and curvature in 1/m -> zero mean, unit deviation."""
    mean, std = _scale(actions)
    return (actions.to(mean.dtype) - mean) / std


def denormalise_actions(actions: torch.Tensor) -> torch.Tensor:
    """Inverse of `normalise_actions`; not clipped, as the target does not."""
    mean, std = _scale(actions)
    return actions.to(mean.dtype) * std + mean


def sample_time(batch: int, config: FlowConfig, generator: torch.Generator | None = None
                ) -> torch.Tensor:
    """Training times, (B,) float32 in [0, time_scale): t = time_scale * (1 - Beta(beta, 1)).

    Beta(beta, 1) has the distribution function b^beta, so u^(1 / beta) draws it.
    """
    uniform = torch.rand(batch, generator=generator)
    return config.time_scale * (1.0 - uniform ** (1.0 / config.time_beta))


def training_pair(actions: torch.Tensor, noise: torch.Tensor, time: torch.Tensor
                  ) -> tuple[torch.Tensor, torch.Tensor]:
    """A point on the straight line from noise (t = 0) to the actions (t = 1), and its velocity.

    Args:
        actions, noise: (B, waypoints, 2), normalised.
        time: (B,).
    Returns:
        noisy actions and the velocity to be predicted, both (B, waypoints, 2).
    """
    t = time[:, None, None].to(actions.dtype)
    return t * actions + (1.0 - t) * noise, actions - noise


def integrate(velocity: Velocity, noise: torch.Tensor, num_steps: int) -> torch.Tensor:
    """Euler steps from noise to actions on an even grid of times.

    Args:
        velocity: (x (B, waypoints, 2), time (B,)) -> dx/dt.
        noise: (B, waypoints, 2).
        num_steps: evaluations of `velocity`.
    Returns:
        (B, waypoints, 2), normalised actions.
    """
    assert num_steps >= 1, num_steps
    times = torch.linspace(0.0, 1.0, num_steps + 1, device=noise.device)
    x = noise
    for start, stop in zip(times[:-1], times[1:]):
        x = x + (stop - start).to(x.dtype) * velocity(x, start.expand(x.shape[0]))
    return x
