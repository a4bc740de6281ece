"""One ONNX graph to one TensorRT engine: strongly typed, profiles by name, timings kept.

The API of 10.3 to 11.x: no precision flags, no implicit batch, what came later behind `hasattr`.
TensorRT is handed in, so that TensorRT-RTX, whose builder runs without a GPU, builds the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Callable, Mapping, Sequence

from ..errors import ModelError
from ..runtimes.manifest import replace_file

Range = tuple[int, int, int]        # smallest, usual, largest
_LOGS: list[tuple[ModuleType, Any]] = []        # one a TensorRT module


@dataclass(frozen=True)
class BuildOptions:
    """How an engine is built.

    Attributes:
        timing_cache: file that keeps the measured times of kernels; None: they are not kept.
        workspace_mib: scratch memory a build may use; 0: no limit.
        decomposable: attention that no fused kernel takes (float32) may be split.
        configure: last changes to the builder's configuration.
    """

    timing_cache: Path | None = None
    workspace_mib: int = 0
    decomposable: bool = False
    configure: Callable[[Any], None] | None = None


def build_engine(trt: ModuleType, graph: bytes, weights: Path, inputs: Sequence[Mapping[str, Any]],
                 profiles: Sequence[Mapping[str, Range]], options: BuildOptions) -> Any:
    """Parse and build.

    Args:
        trt: the module `tensorrt`.
        graph: an ONNX model.
        weights: directory its external data lies in.
        inputs: the graph's, {"name", "shape"}; a string in a shape is a size that varies.
        profiles: for each, size that varies -> its range.
    Returns:
        The engine's bytes, in TensorRT's own memory.
    Raises:
        ModelError: TensorRT cannot parse or build it, or there is no device to build for.
    """
    log = _error_log(trt)
    builder = _builder(trt, log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    if not parser.parse(graph, str(weights / "graph.onnx")):
        told = [parser.get_error(i).desc() for i in range(parser.num_errors)]
        raise ModelError(f"TensorRT {trt.__version__} cannot parse the graph: {_one_line(told)}")
    if options.decomposable:
        _allow_decomposition(trt, network)
    config = builder.create_builder_config()
    if options.workspace_mib:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace_mib << 20)
    _add_profiles(builder, config, inputs, profiles)
    _load_timings(config, options.timing_cache)
    if options.configure is not None:
        options.configure(config)
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        raise ModelError(f"TensorRT {trt.__version__} cannot build the engine: "
                         f"{_one_line(log.errors)}")
    if log.unused:
        raise ModelError(f"TensorRT {trt.__version__} left inputs of the graph out and would "
                         f"compute something else: {_one_line(log.unused)}")
    _save_timings(config, options.timing_cache)
    return engine


def profile_shapes(inputs: Sequence[Mapping[str, Any]], ranges: Mapping[str, Range]
                   ) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Input -> its smallest, usual and largest shape, for those that have a size that varies."""
    shapes = {}
    for tensor in inputs:
        if any(isinstance(size, str) for size in tensor["shape"]):
            shapes[tensor["name"]] = tuple(
                tuple(ranges[size][i] if isinstance(size, str) else size
                      for size in tensor["shape"])
                for i in range(3))
    return shapes


def _error_log(trt: ModuleType) -> Any:
    """The logger of this TensorRT, emptied: it keeps the first of a process and ignores others."""
    log = next((known for module, known in _LOGS if module is trt), None)
    if log is None:
        log = _new_log(trt)
        _LOGS.append((trt, log))
    log.errors.clear()
    log.unused.clear()
    return log


def _new_log(trt: ModuleType) -> Any:
    """Keeps TensorRT's errors, and the inputs it says it does not use."""

    class ErrorLog(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []
            self.unused: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                self.errors.append(message)
            elif severity == trt.ILogger.WARNING and "Unused Input" in message:
                self.unused.append(message)

    return ErrorLog()


def _builder(trt: ModuleType, log: Any) -> Any:
    try:
        return trt.Builder(log)
    except Exception as error:      # pybind's own kinds, where CUDA finds no device
        raise ModelError(f"TensorRT {trt.__version__} makes no builder, expected an NVIDIA "
                         f"device and driver: {_one_line([str(error), *log.errors])}") from error


def _add_profiles(builder: Any, config: Any, inputs: Sequence[Mapping[str, Any]],
                  profiles: Sequence[Mapping[str, Range]]) -> None:
    for ranges in profiles:
        profile = builder.create_optimization_profile()
        for name, shapes in profile_shapes(inputs, ranges).items():
            profile.set_shape(name, *shapes)
        if config.add_optimization_profile(profile) < 0:
            raise ModelError(f"TensorRT refuses the profile {dict(ranges)}")


def _allow_decomposition(trt: ModuleType, network: Any) -> None:
    """Let attention fall apart where no fused kernel takes it: there is none in float32."""
    kind = getattr(trt.LayerType, "ATTENTION_INPUT", None)
    for index in range(network.num_layers if kind is not None else 0):
        layer = network.get_layer(index)
        if layer.type == kind:
            layer.__class__ = trt.IAttentionInputLayer
            layer.attention.decomposable = True


def _load_timings(config: Any, path: Path | None) -> None:
    """Kernel times of earlier builds; those of another device or version are set aside."""
    if path is None:
        return
    known = path.read_bytes() if path.is_file() else b""
    if not config.set_timing_cache(config.create_timing_cache(known), False):
        config.set_timing_cache(config.create_timing_cache(b""), False)


def _save_timings(config: Any, path: Path | None) -> None:
    cache = config.get_timing_cache() if path is not None else None
    if cache is not None:
        replace_file(path, bytes(cache.serialize()))


def _one_line(told: Sequence[str]) -> str:
    return "; ".join(" ".join(text.split()) for text in told if text) or "see TensorRT's log"
