"""Memory of a CUDA device, copies and one stream: one small interface over three libraries.

torch (its CUDA build), cuda-python and pycuda each give all of it, but pycuda captures no graphs.
None is imported before it is asked for. Knows no models and no engines.
"""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass
from typing import Any, Callable, Mapping, Protocol, Sequence

import numpy as np

from ..errors import MissingDependencyError, ModelError

Launch = Callable[[], None]
ALIGNMENT = 256         # of every tensor's address, as TensorRT asks


@dataclass(frozen=True)
class Buffer:
    """Device memory; freed with the last reference to `owner`.

    Attributes:
        address: of its first byte, a multiple of 256.
        num_bytes: its size.
        owner: what the library that allocated it calls it.
    """

    address: int
    num_bytes: int
    owner: Any


@dataclass(frozen=True)
class Rows:
    """`height` pieces of a buffer, each `width` bytes, `pitch` bytes apart, from `offset` on."""

    buffer: Buffer
    offset: int
    pitch: int
    width: int
    height: int

    def __post_init__(self) -> None:
        end = self.offset + self.pitch * (self.height - 1) + self.width
        assert 0 <= self.offset and self.width <= self.pitch and end <= self.buffer.num_bytes, self


class DeviceMemory(Protocol):
    """One device and one stream; everything but `synchronise` only queues work on it.

    Attributes:
        name: of the library.
        stream: handle of the stream, as TensorRT takes it.
    """

    name: str
    stream: int

    def allocate(self, num_bytes: int) -> Buffer:
        """Zeroed memory.

        Raises:
            ModelError: the device has not so much.
        """

    def pinned(self, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
        """Zeroed host memory that the device copies from and to by itself."""

    def upload(self, target: Buffer, source: np.ndarray) -> None:
        """Copy a pinned array to a buffer's beginning; it may change after `synchronise`."""

    def download(self, target: np.ndarray, source: Buffer) -> None:
        """Copy a buffer's beginning to a pinned array; it is filled after `synchronise`."""

    def copy_rows(self, target: Rows, source: Rows) -> None:
        """Copy piece by piece on the device; the pieces are of one size and do not overlap."""

    def clear_rows(self, rows: Rows) -> None:
        """Fill with zeros."""

    def synchronise(self) -> None:
        """Wait for all that was queued."""

    def capture(self, work: Launch) -> Launch | None:
        """Record what `work` queues, without running it, as one CUDA graph.

        Returns:
            What queues the whole graph at once; None where the library has no graphs.
        """


class Arena:
    """Tensors side by side in one piece of device memory, with a pinned twin: one copy moves all.

    Attributes:
        arrays: name -> the tensor's pinned array.
        addresses: name -> the tensor's address on the device.
    """

    def __init__(self, memory: DeviceMemory, tensors: Mapping[str, tuple[Sequence[int], Any]]):
        """
        Args:
            tensors: name -> (shape, numpy dtype).
        """
        offsets, size = {}, 0
        for name, (shape, dtype) in tensors.items():
            offsets[name] = size
            size += aligned(int(np.prod(shape)) * np.dtype(dtype).itemsize)
        self._memory = memory
        self._buffer = memory.allocate(max(size, ALIGNMENT))
        self._host = memory.pinned((max(size, ALIGNMENT),), np.dtype(np.uint8))
        self.addresses = {name: self._buffer.address + offset for name, offset in offsets.items()}
        self.arrays = {}
        for name, (shape, dtype) in tensors.items():
            num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
            piece = self._host[offsets[name]:offsets[name] + num_bytes]
            self.arrays[name] = piece.view(dtype).reshape(shape)

    def upload(self) -> None:
        """Queue the copy of all arrays to the device."""
        self._memory.upload(self._buffer, self._host)

    def download(self) -> None:
        """Queue the copy of all tensors to their arrays."""
        self._memory.download(self._host, self._buffer)


class Replayed:
    """Work that is queued again and again: from its second time on as one CUDA graph.

    The first time is for what an engine sets up when it first runs, which no graph may hold.
    """

    def __init__(self, memory: DeviceMemory, work: Launch, with_graph: bool = True):
        self._memory, self._work, self._with_graph = memory, work, with_graph
        self._ran = False

    def __call__(self) -> None:
        if self._ran and self._with_graph:
            self._with_graph = False
            self._work = self._memory.capture(self._work) or self._work
        self._work()
        self._ran = True


def aligned(num_bytes: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def create_device_memory(name: str = "auto", device: int = 0) -> DeviceMemory:
    """The first library that is installed and finds a device, or the one named.

    Args:
        name: "torch", "cuda-python", "pycuda" or "auto".
        device: number of the CUDA device.
    Raises:
        MissingDependencyError: it is not installed or sees no device; one reason for each tried.
    """
    kinds = {"torch": TorchMemory, "cuda-python": CudaPythonMemory, "pycuda": PycudaMemory}
    if name not in ("auto", *kinds):
        raise ModelError(f"device memory: given {name!r}, expected auto or one of "
                         f"{', '.join(kinds)}")
    reasons = []
    for kind in kinds if name == "auto" else (name,):
        try:
            return kinds[kind](device)
        except ImportError as error:
            reasons.append(f"{kind}: {error.name or error} is not installed")
        except (RuntimeError, ModelError) as error:
            reasons.append(f"{kind}: {' '.join(str(error).split())}")
    raise MissingDependencyError(
        f"device memory: {'; '.join(reasons)}; expected an NVIDIA driver and one of torch with "
        f"CUDA, cuda-python or pycuda")


class TorchMemory:
    """See DeviceMemory: torch's CUDA tensors and graphs."""

    name = "torch"

    def __init__(self, device: int = 0):
        """
        Raises:
            ImportError: torch is not installed.
            ModelError: it is built without CUDA or sees no device.
        """
        import torch

        if not torch.cuda.is_available():
            raise ModelError(f"torch {torch.__version__} sees no CUDA device")
        self._torch = torch
        self._device = torch.device("cuda", device)
        self._stream = torch.cuda.Stream(self._device)
        self.stream = self._stream.cuda_stream

    def allocate(self, num_bytes: int) -> Buffer:
        """See DeviceMemory."""
        try:
            with self._torch.cuda.stream(self._stream):
                owner = self._torch.zeros(num_bytes, dtype=self._torch.uint8, device=self._device)
        except self._torch.cuda.OutOfMemoryError as error:
            raise ModelError(f"device memory: {num_bytes} bytes: {error}") from error
        return Buffer(owner.data_ptr(), num_bytes, owner)

    def pinned(self, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
        """See DeviceMemory."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        memory = self._torch.zeros(size, dtype=self._torch.uint8, pin_memory=True)
        return memory.numpy().view(dtype).reshape(shape)

    def upload(self, target: Buffer, source: np.ndarray) -> None:
        """See DeviceMemory."""
        with self._torch.cuda.stream(self._stream):
            target.owner[:source.nbytes].copy_(self._bytes(source), non_blocking=True)

    def download(self, target: np.ndarray, source: Buffer) -> None:
        """See DeviceMemory."""
        with self._torch.cuda.stream(self._stream):
            self._bytes(target).copy_(source.owner[:target.nbytes], non_blocking=True)

    def copy_rows(self, target: Rows, source: Rows) -> None:
        """See DeviceMemory."""
        with self._torch.cuda.stream(self._stream):
            self._view(target).copy_(self._view(source))

    def clear_rows(self, rows: Rows) -> None:
        """See DeviceMemory."""
        with self._torch.cuda.stream(self._stream):
            self._view(rows).zero_()

    def synchronise(self) -> None:
        """See DeviceMemory."""
        self._stream.synchronize()

    def capture(self, work: Launch) -> Launch:
        """See DeviceMemory."""
        torch = self._torch
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            work()

        def launch() -> None:
            with torch.cuda.stream(self._stream):
                graph.replay()

        return launch

    def _bytes(self, array: np.ndarray) -> Any:
        return self._torch.from_numpy(array.reshape(-1).view(np.uint8))

    @staticmethod
    def _view(rows: Rows) -> Any:
        return rows.buffer.owner.as_strided((rows.height, rows.width), (rows.pitch, 1),
                                            rows.offset)


class CudaPythonMemory:
    """See DeviceMemory: the CUDA runtime as cuda-python binds it, 12 and 13."""

    name = "cuda-python"

    def __init__(self, device: int = 0):
        """
        Raises:
            ImportError: cuda-python is not installed.
            ModelError: there is no driver or no such device.
        """
        try:
            from cuda.bindings import runtime
        except ImportError:
            from cuda import cudart as runtime      # before 12.6.1
        self._cuda = runtime
        self._call("cudaSetDevice", device)
        self._stream = self._call("cudaStreamCreateWithFlags", runtime.cudaStreamNonBlocking)
        self.stream = int(self._stream)

    def allocate(self, num_bytes: int) -> Buffer:
        """See DeviceMemory."""
        address = int(self._call("cudaMalloc", num_bytes))
        self._call("cudaMemsetAsync", address, 0, num_bytes, self._stream)
        return Buffer(address, num_bytes, _Freed(self._cuda.cudaFree, address))

    def pinned(self, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
        """See DeviceMemory."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        address = int(self._call("cudaHostAlloc", max(size, 1), 0))
        memory = (ctypes.c_uint8 * size).from_address(address)
        memory.owner = _Freed(self._cuda.cudaFreeHost, address)     # lives as long as the array
        array = np.frombuffer(memory, np.uint8).view(dtype).reshape(shape)
        array[...] = 0
        return array

    def upload(self, target: Buffer, source: np.ndarray) -> None:
        """See DeviceMemory."""
        self._copy(target.address, source.ctypes.data, source.nbytes, "HostToDevice")

    def download(self, target: np.ndarray, source: Buffer) -> None:
        """See DeviceMemory."""
        self._copy(target.ctypes.data, source.address, target.nbytes, "DeviceToHost")

    def copy_rows(self, target: Rows, source: Rows) -> None:
        """See DeviceMemory."""
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        self._call("cudaMemcpy2DAsync", target.buffer.address + target.offset, target.pitch,
                   source.buffer.address + source.offset, source.pitch, source.width,
                   source.height, kind, self._stream)

    def clear_rows(self, rows: Rows) -> None:
        """See DeviceMemory."""
        self._call("cudaMemset2DAsync", rows.buffer.address + rows.offset, rows.pitch, 0,
                   rows.width, rows.height, self._stream)

    def synchronise(self) -> None:
        """See DeviceMemory."""
        self._call("cudaStreamSynchronize", self._stream)

    def capture(self, work: Launch) -> Launch:
        """See DeviceMemory."""
        mode = self._cuda.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self._call("cudaStreamBeginCapture", self._stream, mode)
        try:
            work()
        finally:
            graph = self._call("cudaStreamEndCapture", self._stream)
        executable = self._call("cudaGraphInstantiate", graph, 0)
        return lambda: self._call("cudaGraphLaunch", executable, self._stream)

    def _copy(self, target: int, source: int, num_bytes: int, way: str) -> None:
        kind = getattr(self._cuda.cudaMemcpyKind, f"cudaMemcpy{way}")
        self._call("cudaMemcpyAsync", target, source, num_bytes, kind, self._stream)

    def _call(self, function: str, *arguments: Any) -> Any:
        """Call a function of the runtime; its first result is the error."""
        error, *results = getattr(self._cuda, function)(*arguments)
        if error != self._cuda.cudaError_t.cudaSuccess:
            raise ModelError(f"{function}: {error.name}")
        return results[0] if results else None


class PycudaMemory:
    """See DeviceMemory: the driver as pycuda binds it, in the device's primary context."""

    name = "pycuda"

    def __init__(self, device: int = 0):
        """
        Raises:
            ImportError: pycuda is not installed, or libcuda is missing.
            ModelError: there is no such device.
        """
        import pycuda.driver as driver

        self._pycuda = driver
        try:
            driver.init()
            self._context = driver.Device(device).retain_primary_context()
        except driver.Error as error:
            raise ModelError(str(error)) from error
        self._threads: set[int] = set()     # in which the context is the current one
        self._stream = self._driver.Stream()
        self.stream = self._stream.handle

    @property
    def _driver(self) -> Any:
        """The driver, with the context made this thread's: a model may be loaded in another."""
        thread = threading.get_ident()
        if thread not in self._threads:
            self._context.push()
            self._threads.add(thread)
        return self._pycuda

    def allocate(self, num_bytes: int) -> Buffer:
        """See DeviceMemory."""
        try:
            owner = self._driver.mem_alloc(num_bytes)
        except self._driver.Error as error:
            raise ModelError(f"device memory: {num_bytes} bytes: {error}") from error
        self._driver.memset_d8_async(int(owner), 0, num_bytes, self._stream)
        return Buffer(int(owner), num_bytes, owner)

    def pinned(self, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
        """See DeviceMemory."""
        return self._driver.pagelocked_zeros(tuple(shape), dtype)

    def upload(self, target: Buffer, source: np.ndarray) -> None:
        """See DeviceMemory."""
        self._driver.memcpy_htod_async(target.address, source, self._stream)

    def download(self, target: np.ndarray, source: Buffer) -> None:
        """See DeviceMemory."""
        self._driver.memcpy_dtoh_async(target, source.address, self._stream)

    def copy_rows(self, target: Rows, source: Rows) -> None:
        """See DeviceMemory."""
        copy = self._driver.Memcpy2D()
        copy.set_src_device(source.buffer.address + source.offset)
        copy.set_dst_device(target.buffer.address + target.offset)
        copy.src_pitch, copy.dst_pitch = source.pitch, target.pitch
        copy.width_in_bytes, copy.height = source.width, source.height
        copy(self._stream)

    def clear_rows(self, rows: Rows) -> None:
        """See DeviceMemory."""
        self._driver.memset_d2d8_async(rows.buffer.address + rows.offset, rows.pitch, 0,
                                       rows.width, rows.height, self._stream)

    def synchronise(self) -> None:
        """See DeviceMemory."""
        self._stream.synchronize()

    def capture(self, work: Launch) -> None:
        """See DeviceMemory: pycuda has no graphs."""
        return None


class _Freed:
    """Gives an address back when nothing refers to this any more."""

    def __init__(self, free: Callable[[int], Any], address: int):
        self._free, self._address = free, address

    def __del__(self) -> None:
        self._free(self._address)
