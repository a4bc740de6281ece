"""TensorRT as the runtimes use it: engines with tensors by name, passes with everything bound.

Works with 10.3 to 11.x: what came or went between them is asked for with `hasattr`. A pass has one
execution context whose shapes and addresses never change, so that a CUDA graph captured from it
stays true; all contexts share one scratch memory, since passes follow each other on one stream.
Knows no models.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Mapping, Sequence

import numpy as np

from .device_memory import ALIGNMENT, Buffer, DeviceMemory, aligned
from ..errors import MissingDependencyError, ModelError


@dataclass(frozen=True)
class Tensor:
    """An input or output of an engine; -1 is a dimension that varies."""

    dtype: np.dtype
    shape: tuple[int, ...]


def load_tensorrt() -> ModuleType:
    """
    Raises:
        MissingDependencyError: TensorRT is not installed.
    """
    try:
        import tensorrt
    except ImportError as error:
        raise MissingDependencyError(
            f"runtime trt: {error.name or error} is not installed: it comes with JetPack; on "
            f"x86: pip install tensorrt") from error
    return tensorrt


class EngineLoader:
    """Deserialises engines for one device and lends them their scratch memory."""

    def __init__(self, trt: ModuleType, memory: DeviceMemory):
        self.memory = memory
        self._trt = trt
        self._logger = trt.Logger(trt.Logger.WARNING)
        self._runtime = trt.Runtime(self._logger)
        self._scratch: Buffer | None = None
        self._scratch_bytes = ALIGNMENT

    def load(self, content: bytes, path: Path) -> Engine:
        """
        Raises:
            ModelError: TensorRT cannot read it: built by another version or for another device.
        """
        assert self._scratch is None, "engines are loaded before the first pass is made"
        found = self._runtime.deserialize_cuda_engine(content)
        if found is None:
            raise ModelError(f"{path}: refused by TensorRT {self._trt.__version__}, expected an "
                             f"engine built by it on this device; run `reasoning-planner "
                             f"build-engines` here")
        engine = Engine(self._trt, found, path, self)
        self._scratch_bytes = max(self._scratch_bytes, engine.scratch_bytes)
        return engine

    @property
    def scratch(self) -> Buffer:
        """Memory for the activations of one pass at a time, large enough for every engine."""
        if self._scratch is None:
            self._scratch = self.memory.allocate(aligned(self._scratch_bytes))
        return self._scratch


class Engine:
    """One engine.

    Attributes:
        path: of its file, for messages.
        inputs, outputs: name -> Tensor.
        aliases: output -> the input whose memory it is.
        knows_aliases: whether this TensorRT says so; where it does not, `aliases` is empty.
        scratch_bytes: what a context needs besides the tensors.
    """

    def __init__(self, trt: ModuleType, engine: Any, path: Path, loader: EngineLoader):
        self.path = path
        self._trt, self._engine, self._loader = trt, engine, loader
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        for index in range(engine.num_io_tensors):
            name = engine.get_tensor_name(index)
            side = (self.inputs if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT
                    else self.outputs)
            side[name] = Tensor(self._dtype(name), tuple(engine.get_tensor_shape(name)))
            if engine.get_tensor_location(name) != trt.TensorLocation.DEVICE:
                raise ModelError(f"{path}: tensor {name} lies in host memory, expected a graph of "
                                 f"this package, whose shapes depend on shapes alone")
        self.knows_aliases = hasattr(engine, "get_aliased_input_tensor")     # from 10.15 on
        self.aliases = self._aliased()
        self.scratch_bytes = int(engine.device_memory_size_v2
                                 if hasattr(engine, "device_memory_size_v2")
                                 else engine.device_memory_size)

    def _dtype(self, name: str) -> np.dtype:
        given = self._engine.get_tensor_dtype(name)
        try:
            return np.dtype(self._trt.nptype(given))
        except TypeError as error:
            raise ModelError(f"{self.path}: tensor {name} is {given}, expected a type that numpy "
                             f"has") from error

    def _aliased(self) -> dict[str, str]:
        if not self.knows_aliases:
            return {}
        found = {name: self._engine.get_aliased_input_tensor(name) for name in self.outputs}
        return {name: source for name, source in found.items() if source}

    def profile_shape(self, name: str, profile: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Smallest and largest shape of an input under an optimisation profile."""
        smallest, _, largest = self._engine.get_tensor_profile_shape(name, profile)
        return tuple(smallest), tuple(largest)

    @property
    def num_profiles(self) -> int:
        """Optimisation profiles."""
        return self._engine.num_optimization_profiles

    def bind(self, profile: int, shapes: Mapping[str, Sequence[int]],
             addresses: Mapping[str, int]) -> Pass:
        """A pass over inputs of given shapes at given addresses.

        Args:
            shapes: of every input.
            addresses: of every input and output; an aliased output has its input's.
        Raises:
            ModelError: a shape is outside the profile, or there is no memory for a context.
        """
        for output, source in self.aliases.items():
            assert addresses[output] == addresses[source], f"{output} is not at {source}"
        context = self._context(profile)
        for name in self.inputs:
            if not context.set_input_shape(name, tuple(shapes[name])):
                low, high = self.profile_shape(name, profile)
                raise ModelError(f"{self.path}: {name}: given {tuple(shapes[name])}, expected "
                                 f"{low} .. {high} (profile {profile})")
        for name in (*self.inputs, *self.outputs):
            if not context.set_tensor_address(name, addresses[name]):
                raise ModelError(f"{self.path}: {name}: TensorRT refuses its address")
        unknown = context.infer_shapes()
        assert not unknown, f"{self.path}: no shape of {unknown}"
        return Pass(self, context)

    def _context(self, profile: int) -> Any:
        trt, memory, scratch = self._trt, self._loader.memory, self._loader.scratch
        context = self._engine.create_execution_context(
            trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if context is None:
            raise ModelError(f"{self.path}: TensorRT makes no execution context: out of memory?")
        if hasattr(context, "set_device_memory"):
            context.set_device_memory(scratch.address, scratch.num_bytes)
        else:
            context.device_memory = scratch.address
        if not context.set_optimization_profile_async(profile, memory.stream):
            raise ModelError(f"{self.path}: profile {profile} of {self.num_profiles} is refused")
        return context

    def queue(self, context: Any) -> None:
        """
        Raises:
            ModelError: TensorRT does not take the pass.
        """
        if not context.execute_async_v3(self._loader.memory.stream):
            raise ModelError(f"{self.path}: TensorRT could not queue a pass, see its log")


class Pass:
    """A context with shapes and addresses bound for good."""

    def __init__(self, engine: Engine, context: Any):
        self._engine, self._context = engine, context

    def queue(self) -> None:
        """Put the pass on the stream."""
        self._engine.queue(self._context)

    def output_shape(self, name: str) -> tuple[int, ...]:
        """Of an output under the bound input shapes."""
        return tuple(self._context.get_tensor_shape(name))
