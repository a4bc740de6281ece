"""`reasoning-planner build-engines`: a checkpoint to the engines of a platform.

Exports the graphs that the platform runs, or takes those that lie whole in the checkpoint; builds
them (nothing is built for ONNX Runtime, whose engines are the graphs); measures what passes cost;
and writes engine.json last: a folder has a manifest when everything in it is whole. What is up to
date is left as it is.
"""

from __future__ import annotations

import argparse
import json
import platform as machine
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Callable, Mapping

import numpy as np
from tqdm import tqdm

from .build_trt import BuildOptions, Range, build_engine
from .to_onnx import export
from ..errors import MissingDependencyError, ModelError
from ..models.config import ModelConfig
from ..runtimes.base import Runtime
from ..runtimes.engine_manifest import (ENGINES_FOLDER, FORMAT, BuiltEngine, EngineManifest,
                                        source_hash)
from ..runtimes.factory import create_runtime
from ..runtimes.manifest import Graph, Manifest, load_config, replace_file, sha256_of
from ..runtimes.platforms import HISTORY_TOKENS, NUM_IMAGES, Platform, choose_platform
from ..speculative.cost_curve import measure_cost_curve, save_cost_curve
from ..vla import checkpoint_directory

COST_SIZES = (1, 2, 4, 8, 16)
TIMING_CACHE = "timing.cache"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `reasoning-planner build-engines`."""
    parser.add_argument("--platform", default="cpu", metavar="NAME",
                        help="cpu, x86, orin, thor, a name in engines/, or the path of a manifest "
                             "of one's own (default: %(default)s)")
    parser.add_argument("--checkpoint", default="nano", metavar="DIR",
                        help="directory, or the name of a shipped one (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="DIR",
                        help="where the engines go (default: engines/<platform> in the "
                             "checkpoint, where the runtimes find them)")
    parser.add_argument("--rebuild", action="store_true",
                        help="build also what is up to date")
    parser.add_argument("--no-measure", action="store_true",
                        help="leave out the cost curve T(k)")
    parser.add_argument("--threads", type=int, default=1,
                        help="of the measured runtime on a processor, 0: one a core")
    parser.add_argument("--json", action="store_true", help="print the manifest as JSON")


def run(args: argparse.Namespace) -> int:
    """Build; prints one line an engine."""
    checkpoint = checkpoint_directory(args.checkpoint)
    platform = choose_platform(args.platform, installed_tensorrt())
    out = args.out or checkpoint / ENGINES_FOLDER / platform.name
    manifest = build_engines(platform, checkpoint, out, measure=not args.no_measure,
                             threads=args.threads, rebuild=args.rebuild)
    if args.json:
        print(json.dumps({**_summary(manifest), "folder": str(out)}, indent=1))
        return 0
    for name, engine in manifest.engines.items():
        size = (out / engine.file).stat().st_size
        print(f"{out / engine.file}: {name}, {size / 1e6:.2f} MB, sha256 {engine.sha256[:16]}..")
    costs = manifest.costs
    if costs is not None:
        told = ", ".join(f"T({size}) {ms:.2f} ms"
                         for size, ms in zip(costs["sizes"], costs["cost_ms"]))
        print(f"{manifest.platform}: {manifest.builder}, {told}")
    print(f"checkpoint sha256 {manifest.source_sha256}")
    return 0


def installed_tensorrt() -> str | None:
    """Version of the TensorRT that is installed; None: there is none."""
    try:
        import tensorrt
    except ImportError:
        return None
    return tensorrt.__version__


def build_engines(platform: Platform, checkpoint: Path, out: Path, *, measure: bool = True,
                  threads: int = 1, rebuild: bool = False, tools: Tools | None = None
                  ) -> EngineManifest:
    """Export, build and describe; nothing of it where an earlier build is up to date.

    Args:
        platform: for which.
        checkpoint: directory of config.json, tokenizer.json and *.safetensors.
        out: directory to write to.
        measure: time passes of the built decoder, unless they have been.
        rebuild: build also what is up to date.
        tools: TensorRT and the runtime that measures; None: the installed ones.
    Raises:
        ModelError: the checkpoint is not whole or does not fit the platform, or TensorRT fails.
        MissingDependencyError: onnx or tensorrt is not installed.
    """
    checkpoint, out = Path(checkpoint), Path(out)
    config = load_config(checkpoint)
    require_fit(platform, config)
    tools = tools or Tools()
    builder = tools.builder(platform)
    manifest = None if rebuild else _up_to_date(platform, checkpoint, out, builder)
    if manifest is None:
        manifest = _built(platform, config, checkpoint, out, builder, tools)
        manifest.save(out)
    if measure and manifest.costs is None:
        _measure(tools, platform, checkpoint, out, threads)
        manifest = EngineManifest.load(out)
    return manifest


def _up_to_date(platform: Platform, checkpoint: Path, out: Path, builder: str
                ) -> EngineManifest | None:
    """What an earlier build left; None: nothing whole, or something was different then."""
    try:
        manifest = EngineManifest.load(out)
        manifest.require_runtime(out, platform.runtime, builder)
        manifest.require_checkpoint(out, checkpoint)
        for name in manifest.engines:
            manifest.engine_content(out, name).close()
        if platform.runtime == "ort":
            Manifest.load(out)
    except ModelError:
        return None
    built_from = {name: engine.graph_sha256 for name, engine in manifest.engines.items()}
    graphs = _whole_graphs(platform, checkpoint)
    same_graphs = graphs is None or built_from == {
        name: graph.sha256 for name, graph in graphs.graphs.items()}
    same_weights = {path.name for path in checkpoint.glob("*.safetensors")} <= set(
        manifest.checkpoint)
    same_platform = manifest.platform_sha256 == platform.digest()
    return manifest if same_graphs and same_weights and same_platform else None


def _built(platform: Platform, config: ModelConfig, checkpoint: Path, out: Path, builder: str,
           tools: Tools) -> EngineManifest:
    """Export and build."""
    graphs = _export(platform, checkpoint, out)
    source = source_hash(graphs.checkpoint)
    if platform.source_sha256 not in ("", source):
        raise ModelError(f"{checkpoint}: given a checkpoint of sha256 {source}, expected "
                         f"{platform.source_sha256}, which the platform {platform.name} asks for")
    if platform.runtime == "ort":
        engines = {name: _graph_as_engine(graph) for name, graph in graphs.graphs.items()}
    else:
        engines = _build_all(platform, config, graphs, checkpoint, out, tools)
    return EngineManifest(
        FORMAT, platform.name, platform.digest(), platform.runtime, platform.graphs,
        platform.precision, config.name, builder, f"{machine.system()} {machine.machine()}",
        platform.capacity_of(config), platform.slots_of(config), graphs.top_k,
        _hidden_layers(graphs),
        {name: [size.minimum, size.usual, size.maximum]
         for name, size in platform.sizes_of(config).items()},
        graphs.checkpoint, source, engines)


def require_fit(platform: Platform, config: ModelConfig) -> None:
    """
    Raises:
        ModelError: a prompt of the model's images has no room on the platform.
    """
    needed = NUM_IMAGES * config.vision.tokens_per_image + HISTORY_TOKENS
    for what, given in (("capacity", platform.capacity_of(config)),
                        ("profiles.prefill.maximum", platform.sizes_of(config)["prefill"]
                         .maximum)):
        if given <= needed:
            raise ModelError(f"platform {platform.name}: {what}: given {given} tokens, expected "
                             f"more than {needed}, the images and history in a prompt of "
                             f"{config.name}")


@dataclass(frozen=True)
class Tools:
    """What builds and runs engines; a test gives its own.

    Attributes:
        trt: the module `tensorrt`; None: imported when it is needed.
        load: (platform, checkpoint, engines, threads) -> the runtime that is measured.
        configure: last changes to TensorRT's configuration.
    """

    trt: ModuleType | Any = None
    load: Callable[[Platform, Path, Path, int], Runtime] | None = None
    configure: Callable[[Any], None] | None = None

    def tensorrt(self) -> ModuleType:
        """
        Raises:
            MissingDependencyError: it is not installed.
        """
        if self.trt is not None:
            return self.trt
        try:
            import tensorrt
        except ImportError as error:
            raise MissingDependencyError(
                f"build-engines: {error.name or error} is not installed: it comes with JetPack; "
                f"on x86: pip install tensorrt") from error
        return tensorrt

    def builder(self, platform: Platform) -> str:
        """Name and version of what builds for a platform."""
        if platform.runtime == "trt":
            return f"tensorrt {self.tensorrt().__version__}"
        from ..runtimes.ort_runtime import ort

        return f"onnxruntime {ort.__version__}"

    def runtime(self, platform: Platform, checkpoint: Path, engines: Path, threads: int
                ) -> Runtime:
        """The built engines, loaded."""
        if self.load is not None:
            return self.load(platform, checkpoint, engines, threads)
        return create_runtime(platform.runtime, checkpoint, graphs=engines, threads=threads)


def _export(platform: Platform, checkpoint: Path, out: Path) -> Manifest:
    """Graphs in `out`: those of the checkpoint where it has them, else exported.

    Raises:
        ModelError: this version exports no graphs of the platform's kind, or `out` cannot be made.
    """
    if platform.graphs != "ort":
        raise ModelError(f"platform {platform.name}: given graphs of the kind {platform.graphs}, "
                         f"expected ort: this version exports no others")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(f"{out}: cannot be made ({error.strerror}), expected a folder for "
                         f"engines") from error
    graphs = _whole_graphs(platform, checkpoint)
    if graphs is None:
        return export(checkpoint, out)
    for name, graph in graphs.graphs.items():
        replace_file(out / graph.file, graphs.graph_bytes(checkpoint, name))
    graphs = replace(graphs, costs=None)        # measured somewhere else
    graphs.save(out)
    return graphs


def _whole_graphs(platform: Platform, checkpoint: Path) -> Manifest | None:
    """Graphs of the platform's kind in the checkpoint and of it; None: to be exported."""
    try:
        graphs = Manifest.load(checkpoint)
        if graphs.kind != platform.graphs:
            return None
        graphs.require_checkpoint(checkpoint)
        for name in graphs.graphs:
            graphs.graph_bytes(checkpoint, name)
    except ModelError:
        return None
    return graphs


def _hidden_layers(graphs: Manifest) -> list[int] | None:
    given = getattr(graphs, "hidden_layers", None)
    return None if given is None else list(given)


def _graph_as_engine(graph: Graph) -> BuiltEngine:
    return BuiltEngine(graph.file, graph.sha256, graph.sha256, graph.inputs, graph.outputs)


def _build_all(platform: Platform, config: ModelConfig, graphs: Manifest, checkpoint: Path,
               out: Path, tools: Tools) -> dict[str, BuiltEngine]:
    """Build what the runtime drives; a file appears whole or not at all."""
    from ..runtimes.trt_runtime import ENGINES

    options = BuildOptions(out / TIMING_CACHE, platform.workspace_mib,
                           decomposable=platform.precision == "float32",
                           configure=tools.configure)
    built = {}
    for name in tqdm(ENGINES, "build", unit="engine", disable=not sys.stderr.isatty()):
        graph, profiles = graphs.graphs[name], engine_profiles(name, platform, config)
        content = graphs.graph_bytes(out, name)
        try:
            engine = build_engine(tools.tensorrt(), content, checkpoint, graph.inputs,
                                  list(profiles.values()), options)
        except ModelError as error:
            raise ModelError(f"{out / graph.file}: {error}") from error
        path = out / f"{name}.engine"
        replace_file(path, memoryview(engine))
        built[name] = BuiltEngine(
            path.name, sha256_of(path), graph.sha256, graph.inputs, graph.outputs,
            _aliases(platform, graph),
            {profile: {size: list(span) for size, span in ranges.items()}
             for profile, ranges in profiles.items()})
    return built


def engine_profiles(name: str, platform: Platform, config: ModelConfig
                    ) -> dict[str, Mapping[str, Range]]:
    """Profile -> size that varies -> its range, of one of the graphs.

    Sizes: n tokens, m of them asked for the next, V visual rows, P slots of a read-only past,
    N images.
    """
    slots = platform.slots_of(config)
    if name == "vision":
        return {"image": {"N": (1, 1, 1)}}
    if name != "decoder":
        return {"step": {"P": (slots, slots, slots)}}
    visual = NUM_IMAGES * config.vision.tokens_per_image
    one, past = (1, 1, 1), (slots, slots, slots)
    spans = {profile: (size.minimum, size.usual, size.maximum)
             for profile, size in platform.sizes_of(config).items()}
    most = spans["prefill"][2]
    return {"prefill": {"n": spans["prefill"], "m": one, "V": (1, min(visual, most), most),
                        "P": one},
            **{profile: {"n": spans[profile], "m": spans[profile], "V": one, "P": past}
               for profile in ("decode", "verify")}}


def _aliases(platform: Platform, graph: Graph) -> dict[str, str]:
    """Of the kind `trt`: a cache given out is the cache taken in."""
    outputs = [tensor["name"] for tensor in graph.outputs]
    return {name: name.replace("present_", "past_") for name in outputs
            if name.startswith("present_")} if platform.graphs == "trt" else {}


def _measure(tools: Tools, platform: Platform, checkpoint: Path, out: Path, threads: int) -> None:
    """Write T(k) behind a prompt of the usual length into the manifest of the engines."""
    runtime = tools.runtime(platform, checkpoint, out, threads)
    sizes = platform.sizes_of(runtime.config)
    largest = min(COST_SIZES[-1], sizes["verify"].maximum)
    usual = min(sizes["prefill"].usual, runtime.capacity - largest)
    while runtime.length < usual:
        runtime.extend(np.zeros(min(sizes["verify"].maximum, usual - runtime.length), np.int64))
    curve = measure_cost_curve(runtime, [size for size in COST_SIZES if size <= largest])
    save_cost_curve(curve, out, {"runtime": runtime.name, "threads": threads, "context": usual})


def _summary(manifest: EngineManifest) -> dict[str, Any]:
    return {"platform": manifest.platform, "runtime": manifest.runtime,
            "graphs": manifest.graphs, "precision": manifest.precision,
            "model": manifest.model, "builder": manifest.builder, "capacity": manifest.capacity,
            "source_sha256": manifest.source_sha256, "costs": manifest.costs,
            "engines": {name: {"file": engine.file, "sha256": engine.sha256}
                        for name, engine in manifest.engines.items()}}
