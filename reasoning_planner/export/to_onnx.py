"""`reasoning-planner export`: a checkpoint to the graphs that ONNX Runtime runs.

Writes vision.onnx, decoder.onnx, expert.onnx and ort_manifest.json. The weights stay where they
are: the graphs read them out of the checkpoint's safetensors files by position. The same
checkpoint gives the same bytes; a file appears whole or not at all. With --draft, the graph of a
trained draft alone: draft.onnx and draft_ort.json beside its weights.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path

from ..errors import MissingDependencyError, ModelError
from ..models.checkpoint_keys import expected_tensors
from ..models.config import ModelConfig
from ..runtimes.manifest import FORMAT, Graph, Manifest, load_config, replace_file, sha256_of

DEFAULT_TOP_K = 8
MAX_GRAPH_BYTES = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `reasoning-planner export`."""
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="DIR",
                        help="directory of config.json, tokenizer.json and *.safetensors")
    parser.add_argument("--out", type=Path, metavar="DIR",
                        help="where the graphs go (default: into the checkpoint's directory)")
    parser.add_argument("--top-k", type=int, default=DEFAULT_TOP_K, metavar="K",
                        help="likeliest tokens the decoder names (default: %(default)s)")
    parser.add_argument("--draft", type=Path, metavar="DIR",
                        help="release of train-draft for this checkpoint: its graph alone is "
                        "written, into DIR")


def run(args: argparse.Namespace) -> int:
    """Export; prints one line a graph."""
    if args.draft is not None:
        return _run_draft(args)
    manifest = export(args.checkpoint, args.out, top_k=args.top_k)
    out = args.out or args.checkpoint
    for name, graph in manifest.graphs.items():
        size = (out / graph.file).stat().st_size
        print(f"{out / graph.file}: {name}, {size / 1e3:.0f} kB, sha256 {graph.sha256[:16]}..",
              file=sys.stderr)
    return 0


def _run_draft(args: argparse.Namespace) -> int:
    if args.out is not None:
        raise ModelError(f"--out: given {args.out} with --draft, expected none: a draft's graph "
                         f"stays beside its weights")
    try:
        from .draft_graph import export_draft
    except ModuleNotFoundError as error:
        raise MissingDependencyError(f"export: {error.name} is not installed: "
                                     f"pip install onnx") from error
    path = export_draft(args.draft, args.checkpoint)
    print(f"{path}: draft, {path.stat().st_size / 1e3:.0f} kB, sha256 "
          f"{sha256_of(path)[:16]}..", file=sys.stderr)
    return 0


def export(checkpoint: Path, out: Path | None = None, *, top_k: int = DEFAULT_TOP_K) -> Manifest:
    """Write the graphs of a checkpoint and their manifest.

    Args:
        checkpoint: directory of config.json, tokenizer.json and *.safetensors.
        out: directory to write to; None: the checkpoint's.
        top_k: likeliest tokens the decoder names.
    Raises:
        ModelError: the checkpoint is not whole, or not of its own configuration.
        MissingDependencyError: onnx is not installed.
    """
    try:
        from .decoder_graph import decoder_graph
        from .expert_graph import expert_graph
        from .graph_builder import StoredWeights
        from .vision_graph import vision_graph
    except ModuleNotFoundError as error:
        raise MissingDependencyError(f"export: {error.name} is not installed: "
                                     f"pip install onnx") from error
    checkpoint, out = Path(checkpoint), Path(out or checkpoint)
    config = load_config(checkpoint)
    _require_exportable(config, top_k)
    weights = StoredWeights(checkpoint)
    weights.require(expected_tensors(config))
    graphs = {"vision": vision_graph(config, weights),
              "decoder": decoder_graph(config, weights, top_k),
              "expert": expert_graph(config, weights)}
    out.mkdir(parents=True, exist_ok=True)
    described = {}
    for name, graph in graphs.items():
        content = graph.serialised()
        assert len(content) < MAX_GRAPH_BYTES, f"{name}: {len(content)} bytes hold weights"
        replace_file(out / f"{name}.onnx", content)
        described[name] = Graph(f"{name}.onnx", hashlib.sha256(content).hexdigest(),
                                *graph.signature())
    files = ["config.json", "tokenizer.json", *(path.name for path in weights.files)]
    manifest = Manifest(FORMAT, "ort", config.name, top_k,
                        {name: sha256_of(checkpoint / name) for name in files}, described)
    manifest.save(out)
    return manifest


def _require_exportable(config: ModelConfig, top_k: int) -> None:
    if not 1 <= top_k <= config.tokens.text_vocab_size:
        raise ModelError(f"top_k: given {top_k}, expected 1 .. {config.tokens.text_vocab_size}")
