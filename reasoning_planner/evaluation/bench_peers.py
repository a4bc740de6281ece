"""Hugging Face transformers with the same weights: `generate`, and its assisted generation.

The target becomes a Qwen3-VL of that library: float32, PyTorch eager on the CPU, its own attention
kernel. Its loop drafts by prompt lookup, or is given one of our proposers as candidate generator:
the same draft in the other loop. The clock starts behind a prompt read up to its last token; the
pass over that token stands against the closing pass of our loop.
"""

from __future__ import annotations

import copy
import time
from dataclasses import replace
from pathlib import Path
from typing import Sequence

import numpy as np
import torch
import transformers
from safetensors.torch import load_file
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.generation.streamers import BaseStreamer
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLForConditionalGeneration

from ..datatypes import TokenOrigin
from ..errors import MissingDependencyError
from ..models.config import ModelConfig
from ..models.vision import image_patches
from ..runtimes.base import Step
from ..runtimes.draft_base import load_draft_config
from ..runtimes.manifest import load_config
from ..speculative.acceptance import SamplingConfig
from ..speculative.proposer import Commit, DraftContext, PromptContext, Proposer
from ..speculative.stats import SpeculationStats
from .bench_methods import PEERS, Parts, Peer
from .bench_runs import TimedText
from .bench_scenes import BenchScene

OLDEST = (5, 24)        # of transformers: `cache` as generate's argument


def qwen3_vl_config(ours: ModelConfig) -> Qwen3VLConfig:
    """The same shapes as the library states them."""
    text, vision, tokens = ours.text, ours.vision, ours.tokens
    rope = {"rope_type": "default", "rope_theta": text.rope_theta, "mrope_interleaved": True,
            "mrope_section": list(text.mrope_section)}
    return Qwen3VLConfig(
        image_token_id=tokens.image_pad_id, video_token_id=tokens.video_pad_id,
        vision_start_token_id=tokens.vision_start_id, vision_end_token_id=tokens.vision_end_id,
        tie_word_embeddings=False,
        text_config={
            "vocab_size": text.vocab_size, "hidden_size": text.hidden_size,
            "num_hidden_layers": text.num_layers, "num_attention_heads": text.num_heads,
            "num_key_value_heads": text.num_kv_heads, "head_dim": text.head_dim,
            "intermediate_size": text.intermediate_size, "rms_norm_eps": text.rms_norm_eps,
            "max_position_embeddings": text.max_positions, "rope_parameters": rope,
            "eos_token_id": None, "bos_token_id": None, "pad_token_id": None},
        vision_config={
            "depth": vision.depth, "hidden_size": vision.hidden_size,
            "num_heads": vision.num_heads, "intermediate_size": vision.intermediate_size,
            "out_hidden_size": vision.out_hidden_size, "patch_size": vision.patch_size,
            "temporal_patch_size": vision.temporal_patch_size,
            "spatial_merge_size": vision.spatial_merge_size,
            "num_position_embeddings": vision.num_position_embeddings,
            "deepstack_visual_indexes": list(vision.deepstack_indexes)})


class PeerTarget(Qwen3VLForConditionalGeneration):
    """The library's model, whose assisted generation may be given other candidates."""

    candidates: CandidateGenerator | None = None

    def __init__(self, config: Qwen3VLConfig):
        super().__init__(config)
        self.drafts: list[list[int]] = []       # of each pass of the text at hand
        self.draft_s = 0.0

    def prepare_inputs_for_generation(self, input_ids, next_sequence_length=None, cache=None,
                                      is_first_iteration=False, **kwargs):
        """As the library's; its assisted loop reads the whole prompt again otherwise."""
        cached = cache.get_seq_length() if cache is not None else 0
        if is_first_iteration and next_sequence_length is None and cached:
            next_sequence_length = input_ids.shape[1] - cached
        return super().prepare_inputs_for_generation(
            input_ids, next_sequence_length=next_sequence_length, cache=cache,
            is_first_iteration=is_first_iteration, **kwargs)

    def _get_candidate_generator(self, *args, **kwargs):
        inner = self.candidates or super()._get_candidate_generator(*args, **kwargs)
        return WatchedCandidates(inner, self)


class WatchedCandidates(CandidateGenerator):
    """A candidate generator whose drafts and time are kept."""

    def __init__(self, inner: CandidateGenerator, target: PeerTarget):
        self._inner, self._target = inner, target

    def get_candidates(self, input_ids, **kwargs):
        """See CandidateGenerator."""
        started_s = time.perf_counter()
        found = self._inner.get_candidates(input_ids, **kwargs)
        self._target.draft_s += time.perf_counter() - started_s
        self._target.drafts.append(found[0][0, input_ids.shape[1]:].tolist())
        return found

    def update_candidate_strategy(self, input_ids, scores, num_matches):
        """See CandidateGenerator."""
        self._inner.update_candidate_strategy(input_ids, scores, num_matches)


class LayerTap:
    """Outputs of some decoder layers, of the latest pass: what the next layer is given."""

    def __init__(self, target: PeerTarget, layers: Sequence[int]):
        decoder = target.model.language_model
        readers = [*decoder.layers[1:], decoder.norm]
        self._latest: dict[int, torch.Tensor] = {}
        self._layers = tuple(layers)
        for layer in self._layers:
            readers[layer].register_forward_pre_hook(
                lambda module, given, layer=layer: self._keep(layer, given[0]))

    def _keep(self, layer: int, hidden: torch.Tensor) -> None:
        self._latest[layer] = hidden

    def states(self, rows: int | None = None) -> tuple[np.ndarray, ...]:
        """For each layer, (rows, hidden) float32, the first of the latest pass."""
        return tuple(self._latest[layer][0, :rows].numpy() for layer in self._layers)


class ProposerCandidates(CandidateGenerator):
    """One of our proposers behind the library's protocol; it must draft chains."""

    def __init__(self, proposer: Proposer, tap: LayerTap, scene: BenchScene,
                 prompt_states: tuple[np.ndarray, ...], max_new_tokens: int):
        """
        Args:
            prompt_states: of the prompt but its last token.
        """
        self._proposer, self._tap, self._scene = proposer, tap, scene
        self._prompt_states, self._max_new_tokens = prompt_states, max_new_tokens
        self._seen = 0

    def get_candidates(self, input_ids, **kwargs):
        """See CandidateGenerator. Nothing is drafted before the first token."""
        text = input_ids[0, len(self._scene.input_ids):].tolist()
        if not text:
            return input_ids, None
        self._observe(text)
        room = self._max_new_tokens - len(text) - 1
        tree = self._proposer.propose(DraftContext(tuple(text), room, room))
        assert tree.is_chain, "the library verifies chains"
        drafted = torch.tensor([tree.token_ids[:max(room, 0)]], dtype=input_ids.dtype)
        return torch.cat((input_ids, drafted), dim=1), None

    def _observe(self, text: list[int]) -> None:
        """What the latest pass committed."""
        new = tuple(text[self._seen:])
        if self._seen:
            self._proposer.observe(Commit(new, self._tap.states(len(new)), len(new) - 1))
        else:
            states = tuple(np.concatenate(pair)
                           for pair in zip(self._prompt_states, self._tap.states()))
            step = Step(np.array(new), np.zeros((1, 0), np.int64), np.zeros((1, 0), np.float32),
                        states)
            self._proposer.reset(PromptContext(step, self._scene.input_ids, self._scene.features))
            self._proposer.observe(Commit(new))
        self._seen = len(text)


class NoBins(LogitsProcessor):
    """Trajectory bins are never written."""

    def __init__(self, bins: range):
        self._bins = slice(bins.start, bins.stop)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, self._bins] = -torch.inf
        return scores


class Passes(BaseStreamer):
    """What each pass committed, and how long the passes took."""

    def __init__(self, target: PeerTarget):
        self.committed: list[list[int]] = []
        self.verify_s = self._started_s = 0.0
        target.register_forward_pre_hook(self._begin)
        target.register_forward_hook(self._end)

    def clear(self) -> None:
        """A new text begins."""
        self.committed, self.verify_s = [], 0.0

    def _begin(self, module, args) -> None:
        self._started_s = time.perf_counter()

    def _end(self, module, args, output) -> None:
        self.verify_s += time.perf_counter() - self._started_s

    def put(self, value: torch.Tensor) -> None:
        """See BaseStreamer. First the prompt, then what a pass committed."""
        self.committed.append(value.flatten().tolist())

    def end(self) -> None:
        """See BaseStreamer."""


class PeerModel:
    """The target in the other library, and the prompt it has read last."""

    def __init__(self, checkpoint: Path, threads: int, hidden_layers: Sequence[int] = ()):
        """
        Args:
            checkpoint: folder in this package's layout.
            threads: of PyTorch, in this whole process.
            hidden_layers: whose outputs a draft reads.
        Raises:
            MissingDependencyError: the library is too old.
        """
        require_transformers()
        transformers.logging.set_verbosity_error()
        torch.set_num_threads(threads)
        self.config = load_config(checkpoint)
        self.target = PeerTarget(qwen3_vl_config(self.config)).eval()
        weights = {name.removeprefix("vlm."): tensor.float()
                   for path in sorted(checkpoint.glob("*.safetensors"))
                   for name, tensor in load_file(path).items() if name.startswith("vlm.")}
        self.target.load_state_dict(weights)
        self.name = f"transformers {transformers.__version__}, torch {torch.__version__}"
        self.tap = LayerTap(self.target, hidden_layers)
        self.passes = Passes(self.target)
        self.prompt_states: tuple[np.ndarray, ...] = ()
        self._scene: BenchScene | None = None
        self._cache = DynamicCache(config=self.target.config.get_text_config())

    @torch.no_grad()
    def read(self, scene: BenchScene) -> DynamicCache:
        """A cache that holds the prompt but its last token; read once a scene."""
        if scene is not self._scene:
            ids = torch.from_numpy(scene.input_ids)[None, :-1]
            self._cache = DynamicCache(config=self.target.config.get_text_config())
            self.target(input_ids=ids, attention_mask=torch.ones_like(ids), cache=self._cache,
                        mm_token_type_ids=(ids == self.config.tokens.image_pad_id).int(),
                        logits_to_keep=1, **self._pixels(scene.images))
            self.prompt_states = self.tap.states()
            self._scene = scene
        return copy.deepcopy(self._cache)

    def _pixels(self, images: np.ndarray) -> dict[str, torch.Tensor]:
        """(N, H, W, 3) uint8 as the library takes them: one row a patch, stills twice in time."""
        vision = self.config.vision
        patches = image_patches(torch.from_numpy(images), vision).flatten(0, 1)     # (P, C p p)
        stills = patches.unflatten(-1, (vision.in_channels, 1, -1))
        stills = stills.expand(-1, -1, vision.temporal_patch_size, -1)
        return {"pixel_values": stills.flatten(1),
                "image_grid_thw": torch.tensor([[1, *vision.grid]] * len(images))}


def require_transformers() -> None:
    """
    Raises:
        MissingDependencyError: the library is too old.
    """
    found = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if found < OLDEST:
        raise MissingDependencyError(
            f"transformers: given {transformers.__version__}, expected "
            f"{'.'.join(map(str, OLDEST))} or later: pip install 'reasoning_planner[bench]'")


class PeerContender:
    """One way to generate with the other library; see bench_runs.Contender."""

    def __init__(self, peer: Peer, model: PeerModel, proposer: Proposer | None,
                 temperature: float, stop_id: int, max_new_tokens: int):
        self.name = peer.name
        self._model, self._proposer = model, proposer
        self._origin = TokenOrigin.ROUTINE if proposer is None else proposer.origin
        self._max_new_tokens = max_new_tokens
        sampling = {"do_sample": False} if temperature == 0.0 else {
            "do_sample": True, "temperature": temperature, "top_k": 0,
            "top_p": SamplingConfig(temperature).top_p}
        tokens = model.config.tokens
        self._options = {
            **sampling, **peer.options, "max_new_tokens": max_new_tokens,
            "eos_token_id": stop_id, "pad_token_id": tokens.endoftext_id,
            "logits_processor": LogitsProcessorList([NoBins(tokens.trajectory_bins)])}

    def write(self, scene: BenchScene, prompt: PromptContext, seed: int) -> TimedText:
        """See Contender. The other library reads the prompt too; what it accepts is host time."""
        model, target = self._model, self._model.target
        cache, ids = model.read(scene), torch.from_numpy(scene.input_ids)[None]
        target.candidates = None if self._proposer is None else ProposerCandidates(
            self._proposer, model.tap, scene, model.prompt_states, self._max_new_tokens)
        torch.manual_seed(seed)
        model.passes.clear()
        target.drafts, target.draft_s = [], 0.0
        started_s = time.perf_counter()
        written = target.generate(input_ids=ids, attention_mask=torch.ones_like(ids), cache=cache,
                                  streamer=model.passes, **self._options)
        total_s = time.perf_counter() - started_s
        token_ids = tuple(written[0, ids.shape[1]:].tolist())
        stats, origins = counts_of(target.drafts, model.passes.committed[1:], self._origin)
        return TimedText(token_ids, origins, stats, 1e3 * total_s, 1e3 * target.draft_s,
                         1e3 * model.passes.verify_s, accept_ms=0.0)


def counts_of(drafts: Sequence[Sequence[int]], committed: Sequence[Sequence[int]],
              drafted: TokenOrigin) -> tuple[SpeculationStats, tuple[TokenOrigin, ...]]:
    """Counts and origins of a text as our loop keeps them.

    Args:
        drafts: tokens put to each pass; empty where the library drafts nothing at all.
        committed: tokens of each pass: accepted ones, then its own, which a stop token spares.
        drafted: origin of the draft's tokens.
    """
    drafts = drafts or [()] * len(committed)
    assert len(drafts) == len(committed), f"{len(drafts)} drafts, {len(committed)} passes"
    stats = SpeculationStats(texts=1, committed=sum(map(len, committed)))
    origins: list[TokenOrigin] = []
    for draft, taken in zip(drafts, committed):
        accepted = _common_prefix(draft, taken)
        rejected = accepted < min(len(draft), len(taken))
        stats.passes += 1
        stats.drafts += len(draft) > 0
        stats.proposed += len(draft)
        stats.accepted += accepted
        stats.accepted_at_depth.update(range(accepted))
        stats.offered_at_depth.update(range(accepted + rejected))
        own = TokenOrigin.RECOVERED if rejected else TokenOrigin.BONUS
        origins += [drafted] * accepted
        origins += [own if draft else TokenOrigin.DELIBERATIVE] * (len(taken) - accepted)
    stats.origins.update(origins)
    stats.passes_of_texts[stats.passes] = 1
    return stats, tuple(origins)


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(left, right)) if a != b),
                min(len(left), len(right)))


def make_contenders(names: Sequence[str], parts: Parts, threads: int, stop_id: int,
                    max_new_tokens: int) -> list[PeerContender]:
    """One contender a name of PEERS, none of which has an obstacle; they share the model.

    Raises:
        MissingDependencyError: the library is too old.
    """
    layers = load_draft_config(parts.draft).feature_layers if parts.draft else ()
    model = PeerModel(parts.checkpoint, threads, layers)
    parts = replace(parts, draft_runtime="torch")
    return [PeerContender(PEERS[name], model, PEERS[name].proposer(parts), parts.temperature,
                          stop_id, max_new_tokens) for name in names]
