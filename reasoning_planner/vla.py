"""The vision-language-action model as the planner asks it: one observation to one trajectory.

Read `VlaModel.plan_trajectory`: encode the frames that are new, read the prompt, write the
reasoning, let the action expert act on it, integrate the controls. Knows no engine (that is the
runtime's business) and no limits (the planner checks the answer).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from .actions.unicycle import controls_to_path, denormalise_controls, initial_speed
from .config import PROPOSERS
from .datatypes import (CameraFrame, Deadline, Observation, Reason, Reasoning, Refusal,
                        StageTimings, Trajectory)
from .errors import ConfigError, ModelError
from .models.config import VisionConfig
from .perception.images import resize_for_model
from .planner import ModelResult
from .runtimes.base import Runtime
from .runtimes.factory import create_runtime
from .speculative import selection
from .speculative.acceptance import AcceptanceRule, GreedyRule, SamplingConfig, SamplingRule
from .speculative.decoder import Generation, SpeculativeDecoder
from .speculative.proposer import NoProposer, PromptContext, Proposer
from .tokenization.prompt import (ALPAMAYO_15, ALPAMAYO_R1, DEFAULT_CAMERA_IDS, FRAMES_PER_CAMERA,
                                  VERSIONS, Prompt, build_prompt)
from .tokenization.text_tokenizer import TextTokenizer
from .tokenization.trajectory_tokenizer import DeltaTrajectoryTokenizer

SHIPPED = Path(__file__).resolve().parent / "checkpoints"
NO_CAMERA = -1
_TEXT_DRAWS = 1                     # sets the text's randomness apart from the noise's
KEPT_FRAMES_NS = 1_000_000_000      # features older than this against t0 are forgotten


@dataclass(frozen=True)
class VlaConfig:
    """How a model is asked."""

    prompt_version: str = ALPAMAYO_R1   # wording; a route is said to "alpamayo-1.5" alone
    # Slot of the front left, front, front right and front telephoto camera; -1: there is none.
    camera_slots: tuple[int, ...] = (0, 1, 2, 3)
    max_new_tokens: int = 64            # of reasoning; 99 % of real ones have 39 or fewer
    expert_steps: int = 0               # Euler steps; 0: as the checkpoint says
    noise_seed: int = 0                 # with t0, decides the expert's noise and a sampled text
    noise_scale: float = 1.0            # of that noise; 0: the flow starts from its mean
    proposer: str = "auto"              # one of config.PROPOSERS
    num_speculative_tokens: int = 15    # drafted for one pass of the target, at most
    temperature: float = 0.0            # of the text; 0: greedy
    top_p: float = 0.98                 # of the text, where it is sampled

    def __post_init__(self) -> None:
        problems: list[str] = []
        if self.prompt_version not in VERSIONS:
            problems.append(f"prompt_version: given {self.prompt_version!r}, "
                            f"expected one of {', '.join(VERSIONS)}")
        used = [slot for slot in self.camera_slots if slot != NO_CAMERA]
        if (len(self.camera_slots) != len(DEFAULT_CAMERA_IDS) or len(set(used)) != len(used)
                or not used or min(used) < 0):
            problems.append(f"camera_slots: given {self.camera_slots}, expected "
                            f"{len(DEFAULT_CAMERA_IDS)} different slots, -1 for a missing camera")
        for name, low, high in (("max_new_tokens", 1, 1024), ("expert_steps", 0, 100),
                                ("noise_seed", 0, 2**63), ("noise_scale", 0.0, 10.0),
                                ("num_speculative_tokens", 1, 63), ("temperature", 0.0, 10.0),
                                ("top_p", 1e-6, 1.0)):
            value = getattr(self, name)
            if not low <= value <= high:
                problems.append(f"{name}: given {value}, expected {low} <= value <= {high}")
        if 0.0 < self.temperature < 0.01:
            problems.append(f"temperature: given {self.temperature}, expected 0 (greedy) or "
                            f"0.01 <= value <= 10.0")
        if self.proposer not in PROPOSERS:
            problems.append(f"proposer: given {self.proposer!r}, expected one of "
                            f"{', '.join(PROPOSERS)}")
        if problems:
            raise ConfigError(problems)


def checkpoint_directory(name: str | Path) -> Path:
    """A folder, or the name of a checkpoint that comes with the package, such as "nano"."""
    shipped = SHIPPED / name
    return shipped if shipped.parent == SHIPPED and shipped.is_dir() else Path(name)


class FrameFeatures:
    """Visual tokens by frame, so that a cycle encodes only the frames it has not seen.

    A frame is known by slot and stamp, and believed only with the same pixels: a simulation that
    starts again has old stamps and new images.
    """

    def __init__(self, runtime: Runtime):
        self._runtime = runtime
        self._kept: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
        vision = runtime.config.vision
        size = (1, vision.image_height, vision.image_width, vision.in_channels)
        self._black, = runtime.encode_images(np.zeros(size, np.uint8))
        self.encoded = 0                # frames encoded since the start

    def of(self, frames: list[CameraFrame | None], t0_ns: int) -> np.ndarray:
        """Features of frames in the prompt's order, a black image's where there is none.

        Returns:
            (len(frames), 1 + D, T, hidden) float32.
        """
        wanted = [frame for frame in frames if frame is not None and not self._knows(frame)]
        if wanted:
            images = np.stack([_resized(frame.image, self._runtime.config.vision)
                               for frame in wanted])
            for frame, features in zip(wanted, self._runtime.encode_images(images)):
                self._kept[frame.slot, frame.stamp_ns] = (frame.image, features)
            self.encoded += len(wanted)
        found = [self._black if frame is None else self._kept[frame.slot, frame.stamp_ns][1]
                 for frame in frames]
        self._forget(t0_ns)
        return np.stack(found)

    def _knows(self, frame: CameraFrame) -> bool:
        image, _ = self._kept.get((frame.slot, frame.stamp_ns), (None, None))
        return image is not None and (image is frame.image or np.array_equal(image, frame.image))

    def _forget(self, t0_ns: int) -> None:
        """What no cycle near t0 can use; also what lies ahead, after the clock was set back."""
        self._kept = {key: entry for key, entry in self._kept.items()
                      if abs(t0_ns - key[1]) <= KEPT_FRAMES_NS}


class VlaModel:
    """A driving model on a runtime: see `planner.Model`."""

    def __init__(self, runtime: Runtime, tokenizer: TextTokenizer,
                 config: VlaConfig = VlaConfig(), proposer: Proposer | None = None):
        """
        Args:
            proposer: drafts the reasoning, which stays the target's own; None: token by token.
        Raises:
            ModelError: the tokenizer is not the model's.
        """
        _require_same_vocabulary(runtime, tokenizer)
        self.name = runtime.config.name
        self.runtime_name = runtime.name
        self.config = config
        self.features = FrameFeatures(runtime)
        self._runtime = runtime
        self._tokenizer = tokenizer
        self._history = DeltaTrajectoryTokenizer(tokenizer.special)
        self._decoder = SpeculativeDecoder(
            runtime, proposer or NoProposer(), tokenizer.special.traj_future_start,
            config.max_new_tokens)

    @classmethod
    def load(cls, checkpoint: str | Path, config: VlaConfig = VlaConfig(), *, runtime: str = "ort",
             graphs: Path | None = None, threads: int = 0, provider: str = "cpu") -> VlaModel:
        """Load a checkpoint directory, or one that comes with the package by its name.

        Args:
            runtime, graphs, threads, provider: see runtimes.factory.create_runtime.
        Raises:
            ModelError, DataError: a file is missing, damaged or foreign.
            MissingDependencyError: the runtime's engine is not installed.
        """
        checkpoint = checkpoint_directory(checkpoint)
        tokenizer = TextTokenizer.load(checkpoint / "tokenizer.json")
        selected = selection.select(config.proposer, checkpoint)
        engine = create_runtime(runtime, checkpoint, graphs=graphs, threads=threads,
                                hidden_layers=selected.hidden_layers, provider=provider)
        return cls(engine, tokenizer, config, selected.create(
            config.num_speculative_tokens, runtime, graphs, threads, provider))

    def plan_trajectory(self, observation: Observation,
                        deadline: Deadline) -> ModelResult | Refusal:
        """See planner.Model. The same observation gives the same plan."""
        stages = _Stages()
        features = self.features.of(self._frames(observation), observation.stamp_ns)
        stages.done("encode_ms")
        if deadline.passed:
            return Refusal(Reason.DEADLINE_MISSED, "no time left to read the prompt")
        rule = self._rule(observation.stamp_ns)
        input_ids = self._prompt(observation).input_ids
        prefilled = self._runtime.prefill(input_ids, features, logits=rule.needs_logits)
        stages.done("prefill_ms")
        written = self._decoder.write(PromptContext(prefilled, input_ids), rule, deadline)
        if not written.finished and deadline.passed:
            return written.refusals[-1]
        stages.done("reason_ms")
        if deadline.passed:
            return Refusal(Reason.DEADLINE_MISSED, "no time left to act")
        trajectory = self._act(observation)
        stages.done("act_ms")
        if isinstance(trajectory, Refusal):
            return trajectory
        return ModelResult(trajectory, self._reasoning(written), stages.timings,
                           written.refusals)

    def _rule(self, stamp_ns: int) -> AcceptanceRule:
        """How the text's tokens are chosen; the same seed and t0 draw the same text."""
        config = self.config
        if config.temperature == 0.0:
            return GreedyRule()
        return SamplingRule(SamplingConfig(config.temperature, config.top_p),
                            self._runtime.config.tokens.trajectory_bins,
                            np.random.default_rng((config.noise_seed, stamp_ns, _TEXT_DRAWS)))

    def _frames(self, observation: Observation) -> list[CameraFrame | None]:
        """Camera-major, oldest first, in the model's order of cameras."""
        count = len(observation.frames)
        slots = self.config.camera_slots
        if max(slots) >= count:
            raise ModelError(f"camera_slots: given {slots}, expected slots below {count}, "
                             f"the number of cameras")
        absent = (None,) * FRAMES_PER_CAMERA
        return [frame for slot in slots
                for frame in (absent if slot == NO_CAMERA else observation.frames[slot])]

    def _prompt(self, observation: Observation) -> Prompt:
        version = self.config.prompt_version
        grids = np.tile([1, *self._runtime.config.vision.grid],
                        (FRAMES_PER_CAMERA * len(self.config.camera_slots), 1))
        route_text = observation.route_text if version == ALPAMAYO_15 else ""
        return build_prompt(self._tokenizer, self._history.encode(observation.history.positions),
                            grids, version, DEFAULT_CAMERA_IDS, route_text)

    def _act(self, observation: Observation) -> Trajectory | Refusal:
        flow = self._runtime.config.flow
        generator = np.random.default_rng((self.config.noise_seed, observation.stamp_ns))
        noise = generator.standard_normal((flow.num_waypoints, flow.action_size), np.float32)
        noise *= np.float32(self.config.noise_scale)
        controls = self._runtime.act(noise, self.config.expert_steps or None)
        if not np.isfinite(controls).all():
            return Refusal(Reason.PLAN_NAN, f"{int((~np.isfinite(controls)).sum())} of "
                           f"{controls.size} controls are not finite")
        history = observation.history
        return controls_to_path(*denormalise_controls(controls),
                                initial_speed(history.positions, history.rotations))

    def _reasoning(self, written: Generation) -> Reasoning:
        token_ids = written.token_ids
        return written.reasoning(self._tokenizer.decode(token_ids).strip(),
                                 self._tokenizer.token_texts(token_ids))


class _Stages:
    """Wall time of one stage after the other."""

    def __init__(self) -> None:
        self.timings = StageTimings()
        self._since_s = time.perf_counter()

    def done(self, stage: str) -> None:
        now_s = time.perf_counter()
        self.timings = replace(self.timings, **{stage: (now_s - self._since_s) * 1e3})
        self._since_s = now_s


def _resized(image: np.ndarray, vision: VisionConfig) -> np.ndarray:
    return resize_for_model(image, vision.image_height, vision.image_width)


def _require_same_vocabulary(runtime: Runtime, tokenizer: TextTokenizer) -> None:
    tokens, special, qwen = runtime.config.tokens, tokenizer.special, tokenizer.qwen
    expected = (tokens.text_vocab_size, tokens.traj_history_start_id, tokens.cot_start_id,
                tokens.traj_future_start_id, tokens.image_pad_id, tokens.im_start_id)
    given = (special.base_size, special.traj_history_start, special.cot_start,
             special.traj_future_start, qwen.image_pad, qwen.im_start)
    if given != expected:
        raise ModelError(f"tokenizer: given ids {given} (text vocabulary, traj_history_start, "
                         f"cot_start, traj_future_start, image_pad, im_start), expected the "
                         f"model's {expected}")
