"""Doubles of cuda-python and pycuda over host memory: the machine that tests has no device.

They keep names, order of arguments and results of the calls that device_memory.py makes (as
cuda-bindings 13.5 and pycuda 2026.1 document them), that a captured call does not run, and that
pycuda's calls need a context in their thread. Work runs at once: the order of a stream is
tensorrt_double.py's business.
"""

import ctypes
import threading
from types import SimpleNamespace

import numpy as np

OK = SimpleNamespace(name="cudaSuccess")
TOO_MUCH = SimpleNamespace(name="cudaErrorMemoryAllocation")
DEVICE_BYTES = 1 << 24


class Memory:
    """Allocations of a device, with rubbish in them."""

    def __init__(self):
        self.alive = {}

    def allocate(self, size):
        raw = np.full(size + 256, 0xA5, np.uint8)
        address = raw.ctypes.data + -raw.ctypes.data % 256
        self.alive[address] = raw
        return address

    def free(self, address):
        del self.alive[int(address)]
        return (OK,)


def copy_2d(target, target_pitch, source, source_pitch, width, height):
    assert width <= min(target_pitch, source_pitch)
    for row in range(height):
        ctypes.memmove(target + row * target_pitch, source + row * source_pitch, width)


def set_2d(target, pitch, value, width, height):
    for row in range(height):
        ctypes.memset(target + row * pitch, value, width)


def cuda_runtime():
    """The module `cuda.bindings.runtime`."""
    memory, captured = Memory(), []
    capturing = []

    def queue(work):
        if capturing:
            captured.append(work)
        else:
            work()
        return (OK,)

    def begin(stream, mode):
        capturing.append(mode)
        return (OK,)

    def end(stream):
        capturing.clear()
        nodes = captured[:]
        captured.clear()
        return OK, nodes

    def launch(graph, stream):
        for node in graph:
            node()
        return (OK,)

    kinds = SimpleNamespace(cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2,
                            cudaMemcpyDeviceToDevice=3)
    return SimpleNamespace(
        memory=memory, cudaError_t=SimpleNamespace(cudaSuccess=OK), cudaMemcpyKind=kinds,
        cudaStreamCaptureMode=SimpleNamespace(cudaStreamCaptureModeThreadLocal=1),
        cudaStreamNonBlocking=1, cudaSetDevice=lambda device: (OK,),
        cudaStreamCreateWithFlags=lambda flags: (OK, 0x51),
        cudaMalloc=lambda size: ((OK, memory.allocate(size)) if size < DEVICE_BYTES
                                 else (TOO_MUCH, None)),
        cudaHostAlloc=lambda size, flags: (OK, memory.allocate(size)),
        cudaFree=memory.free, cudaFreeHost=memory.free,
        cudaMemsetAsync=lambda at, value, count, stream: queue(
            lambda: ctypes.memset(at, value, count)),
        cudaMemset2DAsync=lambda at, pitch, value, width, height, stream: queue(
            lambda: set_2d(at, pitch, value, width, height)),
        cudaMemcpyAsync=lambda to, at, count, kind, stream: queue(
            lambda: ctypes.memmove(to, at, count)),
        cudaMemcpy2DAsync=lambda to, to_pitch, at, at_pitch, width, height, kind, stream: queue(
            lambda: copy_2d(to, to_pitch, at, at_pitch, width, height)),
        cudaStreamSynchronize=lambda stream: (OK,), cudaStreamBeginCapture=begin,
        cudaStreamEndCapture=end, cudaGraphInstantiate=lambda graph, flags: (OK, graph),
        cudaGraphLaunch=launch)


def pycuda_driver():
    """The module `pycuda.driver`."""
    memory, current = Memory(), threading.local()

    def needs_context():
        assert getattr(current, "context", False), "no context in this thread"

    class Error(Exception):
        pass

    class Allocation(int):
        def __del__(self):
            memory.free(self)

    class Stream:
        handle = 0x51

        def __init__(self):
            needs_context()

        def synchronize(self):
            needs_context()

    class Memcpy2D:
        def set_src_device(self, address):
            self.source = address

        def set_dst_device(self, address):
            self.target = address

        def __call__(self, stream):
            needs_context()
            copy_2d(self.target, self.dst_pitch, self.source, self.src_pitch,
                    self.width_in_bytes, self.height)

    class Device:
        def __init__(self, number):
            pass

        def retain_primary_context(self):
            return SimpleNamespace(push=lambda: setattr(current, "context", True))

    def mem_alloc(size):
        needs_context()
        if size >= DEVICE_BYTES:
            raise Error("out of memory")
        return Allocation(memory.allocate(size))

    def moving(move):
        def call(*given):
            needs_context()
            move(*given)
        return call

    return SimpleNamespace(
        memory=memory, Error=Error, Stream=Stream, Memcpy2D=Memcpy2D, Device=Device,
        init=lambda: None, mem_alloc=mem_alloc,
        pagelocked_zeros=lambda shape, dtype: needs_context() or np.zeros(shape, dtype),
        memset_d8_async=moving(lambda at, value, count, stream: ctypes.memset(at, value, count)),
        memset_d2d8_async=moving(lambda at, pitch, value, width, height, stream: set_2d(
            at, pitch, value, width, height)),
        memcpy_htod_async=moving(lambda to, array, stream: ctypes.memmove(
            to, array.ctypes.data, array.nbytes)),
        memcpy_dtoh_async=moving(lambda array, at, stream: ctypes.memmove(
            array.ctypes.data, at, array.nbytes)))
