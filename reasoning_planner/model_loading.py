"""From settings to a model that answers: the same in the node's process and in one of its own.

A model that cannot be loaded is stood in for by an `AbsentModel`, so that the node stays up and
says why in every plan. No ROS; the libraries of a model are imported only when one is asked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable

from .config import ModelSettings
from .datatypes import Deadline, Observation, Reason, Refusal
from .errors import PlannerError
from .planner import Model


class AbsentModel:
    """Stands where a model could not be loaded: every plan is kinematic and says why."""

    name = "kinematic"
    runtime_name = ""

    def __init__(self, why: str):
        self.why = why
        self._refusal = Refusal(Reason.NO_MODEL, why)

    def plan_trajectory(self, observation: Observation, deadline: Deadline) -> Refusal:
        """See planner.Model."""
        return self._refusal


def load_model(settings: ModelSettings, report: Callable[[str], Any]) -> Model | None:
    """The configured model; None without a checkpoint; an AbsentModel, reported, on a failure."""
    if not settings.checkpoint:
        return None
    try:
        from .vla import VlaConfig, VlaModel    # the kinematic planner needs none of its libraries

        asked = VlaConfig(
            prompt_version=settings.prompt_version, camera_slots=settings.camera_slots,
            max_new_tokens=settings.max_new_tokens, expert_steps=settings.expert_steps,
            noise_scale=settings.noise_scale, proposer=settings.proposer,
            num_speculative_tokens=settings.num_speculative_tokens,
            temperature=settings.temperature, top_p=settings.top_p)
        return VlaModel.load(settings.checkpoint, asked, runtime=settings.runtime,
                             threads=settings.threads, provider=settings.provider,
                             graphs=Path(settings.engines) if settings.engines else None)
    except (PlannerError, ImportError) as error:
        report(f"no model, the kinematic planner plans: {error}")
        return AbsentModel(str(error))


def describe(settings: ModelSettings) -> dict[str, str]:
    """Hashes of the weights and the decoder's engine or graph in use, as their manifest has them.

    The runtime has compared the files with it. Empty without a model or a manifest.
    """
    if not settings.checkpoint or settings.runtime == "torch":
        return {}
    from .runtimes.engine_manifest import EngineManifest, find_engines, load_built
    from .vla import checkpoint_directory

    checkpoint = checkpoint_directory(settings.checkpoint)
    try:
        folder = (Path(settings.engines) if settings.engines
                  else find_engines(checkpoint, settings.runtime) or checkpoint)
        manifest = load_built(folder)
    except PlannerError:
        return {}
    weights = {"checkpoint sha256": manifest.checkpoint.get("model.safetensors", "")}
    if not isinstance(manifest, EngineManifest):
        return {**weights, "engine sha256": manifest.graphs["decoder"].sha256}
    decoder = manifest.engines.get("decoder")
    return {**weights, "engine sha256": decoder.sha256 if decoder else "",
            "engine": f"{manifest.platform}, {manifest.precision}, {manifest.builder}"}
