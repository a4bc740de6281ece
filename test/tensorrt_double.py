"""A double of TensorRT's Python API and of a CUDA device: the machine that tests has neither.

What stands for what: an "engine" is a program, an ONNX graph run by ONNX Runtime or a module of
the PyTorch oracle (double_programs.py); device memory is host memory that only the double
touches. What is kept: names and results of the API (data/tensorrt_api.json, recorded from real
bindings, holds the double to them), the order of a stream, since everything queued runs at
`synchronise` and not before, and the rules that TensorRT states and cannot check: addresses
alive, large enough and multiples of 256, aliased tensors at one address, nothing changed in a
context since its graph was captured. What is not: speed, precision on a GPU, and what TensorRT
itself makes of a graph.
"""

from __future__ import annotations

import bisect
import enum
import pickle
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime as ort

STREAM = 0x51
SCRATCH_BYTES = 4096
ALIGNMENT = 256


class DeviceFault(AssertionError):
    """What would be undefined behaviour on a device."""


class DoubleMemory:
    """See runtimes.device_memory.DeviceMemory.

    Attributes:
        log: what was queued, in order: "upload", "pass", "download", "copy", "clear", "graph".
        uploaded_bytes, downloaded_bytes: that crossed between host and device so far.
    """

    name = "double"
    stream = STREAM

    def __init__(self, has_graphs=True):
        self.has_graphs = has_graphs
        self.log = []
        self.uploaded_bytes = self.downloaded_bytes = 0
        self._queue = []
        self._captured = None
        self._starts, self._owners = [], {}

    def allocate(self, num_bytes):
        from reasoning_planner.runtimes.device_memory import Buffer

        if self._captured is not None:
            raise DeviceFault("memory allocated while a graph is captured")
        raw = np.zeros(num_bytes + ALIGNMENT, np.uint8)
        offset = -raw.ctypes.data % ALIGNMENT
        owner = raw[offset:offset + num_bytes]
        address = owner.ctypes.data
        if address in self._owners:
            self._starts.remove(address)
        bisect.insort(self._starts, address)
        self._owners[address] = weakref.ref(owner)
        return Buffer(address, num_bytes, owner)

    def pinned(self, shape, dtype):
        return np.zeros(shape, dtype)

    def upload(self, target, source):
        assert source.flags.c_contiguous and source.nbytes <= target.num_bytes
        place = target.owner[:source.nbytes]

        def copy():
            self.uploaded_bytes += source.nbytes
            place[:] = source.reshape(-1).view(np.uint8)

        self._put("upload", copy)

    def download(self, target, source):
        assert target.flags.c_contiguous and target.nbytes <= source.num_bytes
        place = source.owner[:target.nbytes]

        def copy():
            self.downloaded_bytes += target.nbytes
            target.reshape(-1).view(np.uint8)[:] = place

        self._put("download", copy)

    def copy_rows(self, target, source):
        assert (target.width, target.height) == (source.width, source.height)
        given, place = _rows(source), _rows(target)
        if np.shares_memory(given, place):
            raise DeviceFault(f"rows overlap: {source} and {target}")
        self._put("copy", lambda: np.copyto(place, given))

    def clear_rows(self, rows):
        place = _rows(rows)
        self._put("clear", lambda: place.fill(0))

    def synchronise(self):
        if self._captured is not None:
            raise DeviceFault("waited while a graph is captured")
        queue, self._queue = self._queue, []
        for work in queue:
            work()

    def capture(self, work):
        if not self.has_graphs:
            return None
        self._captured = []
        work()
        nodes, self._captured = self._captured, None
        return lambda: self._put("graph", lambda: [node() for node in nodes])

    @property
    def is_capturing(self):
        return self._captured is not None

    def queue_pass(self, work):
        self._put("pass", work)

    def at(self, address, num_bytes):
        """The memory at an address, which must lie in one living allocation."""
        index = bisect.bisect_right(self._starts, address) - 1
        owner = self._owners[self._starts[index]]() if index >= 0 else None
        offset = address - self._starts[max(index, 0)] if owner is not None else 0
        if owner is None or offset + num_bytes > owner.nbytes:
            raise DeviceFault(f"{num_bytes} bytes at {address:#x} are not allocated")
        return owner[offset:offset + num_bytes]

    def _put(self, kind, work):
        if self._captured is not None:
            self._captured.append(work)
        else:
            self.log.append(kind)
            self._queue.append(work)


def _rows(rows):
    owner = rows.buffer.owner
    return np.lib.stride_tricks.as_strided(owner[rows.offset:], (rows.height, rows.width),
                                           (rows.pitch, 1))


class TensorIOMode(enum.Enum):
    NONE, INPUT, OUTPUT = range(3)


class TensorLocation(enum.Enum):
    DEVICE, HOST = range(2)


class ExecutionContextAllocationStrategy(enum.Enum):
    STATIC, ON_PROFILE_CHANGE, USER_MANAGED = range(3)


class NetworkDefinitionCreationFlag(enum.IntEnum):
    STRONGLY_TYPED = 0


class MemoryPoolType(enum.Enum):
    WORKSPACE = 0


class ILogger:
    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)

    def log(self, severity, message):
        raise NotImplementedError


class Logger(ILogger):
    def __init__(self, min_severity=ILogger.WARNING):
        self.min_severity = min_severity

    def log(self, severity, message):
        pass


class IHostMemory(bytes):
    @property
    def nbytes(self):
        return len(self)


# Building

class INetworkDefinition:
    def __init__(self, flags):
        if flags != 1 << NetworkDefinitionCreationFlag.STRONGLY_TYPED:
            raise DeviceFault(f"network flags {flags:#x}, only strongly typed ones are everywhere")
        self._content, self._folder = b"", ""

    @property
    def num_layers(self):
        return len(onnx.load_from_string(self._content).graph.node)


class ParserError:
    def __init__(self, text):
        self._text = text

    def desc(self):
        return self._text


class OnnxParser:
    def __init__(self, network, logger):
        self._network, self._errors = network, []

    @property
    def num_errors(self):
        return len(self._errors)

    def get_error(self, index):
        return self._errors[index]

    def parse(self, model, path=None):
        try:
            onnx.load_from_string(bytes(model))
        except Exception as error:      # protobuf's own
            self._errors.append(ParserError(f"not an ONNX model: {error}"))
            return False
        self._network._content, self._network._folder = bytes(model), str(Path(path).parent)
        return True


class IOptimizationProfile:
    def __init__(self):
        self._shapes = {}

    def set_shape(self, input, min, opt, max):
        self._shapes[input] = tuple(tuple(shape) for shape in (min, opt, max))

    def get_shape(self, input):
        return list(self._shapes[input])


class ITimingCache:
    def __init__(self, content):
        self._content = bytes(content)

    def serialize(self):
        return IHostMemory(self._content)


class IBuilderConfig:
    def __init__(self):
        self._profiles, self._cache, self._limits = [], None, {}

    def add_optimization_profile(self, profile):
        self._profiles.append(profile)
        return len(self._profiles) - 1

    def set_memory_pool_limit(self, pool, pool_size):
        self._limits[pool] = pool_size

    def create_timing_cache(self, serialized_timing_cache):
        return ITimingCache(serialized_timing_cache)

    def set_timing_cache(self, cache, ignore_mismatch):
        self._cache = cache
        return not cache._content.startswith(b"other")

    def get_timing_cache(self):
        return self._cache


class Builder:
    def __init__(self, logger):
        self.logger = logger

    def create_network(self, flags=0):
        return INetworkDefinition(flags)

    def create_builder_config(self):
        return IBuilderConfig()

    def create_optimization_profile(self):
        return IOptimizationProfile()

    def build_serialized_network(self, network, config):
        graph = onnx.load_from_string(network._content).graph
        for profile in config._profiles:
            for value in graph.input:
                if not _fits(_dims(value), profile._shapes.get(value.name, (_dims(value),) * 3)):
                    self.logger.log(ILogger.ERROR, f"{value.name}: no range for {_dims(value)}")
                    return None
        if config._cache is not None:
            config._cache = ITimingCache(b"timed" + config._cache._content)
        return IHostMemory(pickle.dumps({
            "content": network._content, "folder": network._folder,
            "profiles": [profile._shapes for profile in config._profiles]}))


def _dims(value):
    return tuple(dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim)


def _fits(dims, shapes):
    """A range for every size that varies, and the stated size elsewhere."""
    for shape in shapes:
        if len(shape) != len(dims) or any(isinstance(size, str) for size in shape):
            return False
        if any(a != b for a, b in zip(dims, shape) if not isinstance(a, str)):
            return False
    return all(a <= b <= c for a, b, c in zip(*shapes))


# Running

class OnnxProgram:
    """An ONNX graph, run by ONNX Runtime in the memory that is bound."""

    def __init__(self, content, folder):
        graph = onnx.load_from_string(content).graph
        self.inputs, self.outputs = ({value.name: (np.dtype(onnx.helper.tensor_dtype_to_np_dtype(
            value.type.tensor_type.elem_type)), _dims(value)) for value in values}
            for values in (graph.input, graph.output))
        self.aliases = {node.output[0]: node.input[0] for node in graph.node
                        if node.op_type == "TensorScatter" and node.output[0] in self.outputs}
        self._session = _session(content, folder)

    def run(self, arrays):
        binding = self._session.io_binding()
        for name, array in arrays.items():
            bind = binding.bind_input if name in self.inputs else binding.bind_output
            bind(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        self._session.run_with_iobinding(binding)


class ICudaEngine:
    def __init__(self, memory, parts):
        self._memory, self._profiles = memory, parts["profiles"]
        self._program = parts.get("program") or OnnxProgram(parts["content"], parts["folder"])
        described = {**self._program.inputs, **self._program.outputs}
        self._dims = {name: dims for name, (_, dims) in described.items()}
        self._types = {name: np.dtype(dtype) for name, (dtype, _) in described.items()}
        self._inputs = list(self._program.inputs)
        self._aliases = self._program.aliases

    @property
    def num_io_tensors(self):
        return len(self._dims)

    @property
    def num_optimization_profiles(self):
        return max(1, len(self._profiles))

    @property
    def device_memory_size_v2(self):
        return SCRATCH_BYTES

    def get_tensor_name(self, index):
        return list(self._dims)[index]

    def get_tensor_mode(self, name):
        return TensorIOMode.INPUT if name in self._inputs else TensorIOMode.OUTPUT

    def get_tensor_location(self, name):
        return TensorLocation.DEVICE

    def get_tensor_dtype(self, name):
        return self._types[name]

    def get_tensor_shape(self, name):
        return tuple(-1 if isinstance(dim, str) else dim for dim in self._dims[name])

    def get_tensor_profile_shape(self, name, profile_index):
        shapes = self._profiles[profile_index] if self._profiles else {}
        return list(shapes.get(name, (self._dims[name],) * 3))

    def get_aliased_input_tensor(self, name):
        return self._aliases.get(name)

    def create_execution_context(self, strategy=ExecutionContextAllocationStrategy.STATIC):
        return IExecutionContext(self, strategy)


class IExecutionContext:
    def __init__(self, engine, strategy):
        self.engine = engine
        self._is_lent = strategy == ExecutionContextAllocationStrategy.USER_MANAGED
        self._profile, self._shapes, self._addresses = None, {}, {}
        self._changes = self._runs = 0

    def set_device_memory(self, memory, size):
        self.engine._memory.at(memory, SCRATCH_BYTES)
        assert size >= self.engine.device_memory_size_v2 and memory % ALIGNMENT == 0
        self._is_lent = False
        self._changes += 1

    def set_optimization_profile_async(self, profile_index, stream_handle):
        assert stream_handle == STREAM, stream_handle
        self._changes += 1
        self._shapes = {}
        self._profile = profile_index
        return 0 <= profile_index < self.engine.num_optimization_profiles

    def set_input_shape(self, name, shape):
        low, _, high = self.engine.get_tensor_profile_shape(name, self._profile)
        if len(shape) != len(low) or not all(a <= b <= c for a, b, c in zip(low, shape, high)):
            return False
        self._changes += 1
        self._shapes[name] = tuple(shape)
        return True

    def infer_shapes(self):
        return [name for name in self.engine._inputs if name not in self._shapes]

    def get_tensor_shape(self, name):
        sizes = {}
        for given in self.engine._inputs:
            for dim, size in zip(self.engine._dims[given], self._shapes[given]):
                if isinstance(dim, str) and sizes.setdefault(dim, size) != size:
                    raise DeviceFault(f"{dim} is {sizes[dim]} and, of {given}, {size}")
        return tuple(sizes[dim] if isinstance(dim, str) else dim
                     for dim in self.engine._dims[name])

    def set_tensor_address(self, name, memory):
        if name not in self.engine._dims or memory % ALIGNMENT:
            return False
        self._changes += 1
        self._addresses[name] = memory
        return True

    def get_tensor_address(self, name):
        return self._addresses[name]

    def execute_async_v3(self, stream_handle):
        memory = self.engine._memory
        assert stream_handle == STREAM and not self._is_lent and not self.infer_shapes()
        for output, source in self.engine._aliases.items():
            if self._addresses[output] != self._addresses[source]:
                raise DeviceFault(f"{output} is not at the address of {source}")
        if memory.is_capturing and not self._runs:
            raise DeviceFault("captured before its first run")
        addresses, changes = dict(self._addresses), self._changes
        shapes = {name: self.get_tensor_shape(name) for name in self.engine._dims}

        def run():
            if changes != self._changes:
                raise DeviceFault("the context was changed after the pass was queued or captured")
            self._runs += 1
            self._run(shapes, addresses)

        memory.queue_pass(run)
        return True

    def _run(self, shapes, addresses):
        engine, arrays = self.engine, {}
        for name, shape in shapes.items():
            dtype = engine._types[name]
            place = engine._memory.at(addresses[name], int(np.prod(shape)) * dtype.itemsize)
            arrays[name] = place.view(dtype).reshape(shape)
        engine._program.run(arrays)


class Runtime:
    def __init__(self, logger, memory):
        self.logger, self._memory = logger, memory

    def deserialize_cuda_engine(self, serialized_engine):
        try:
            return ICudaEngine(self._memory, pickle.loads(serialized_engine))
        except (pickle.UnpicklingError, EOFError):
            return None


def _session(content, folder):
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.model_external_initializers_file_folder_path",
                                     folder)
    return ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])


DOUBLED = (Builder, ExecutionContextAllocationStrategy, IBuilderConfig, ICudaEngine,
           IExecutionContext, IHostMemory, ILogger, INetworkDefinition, IOptimizationProfile,
           ITimingCache, Logger, MemoryPoolType, NetworkDefinitionCreationFlag, OnnxParser,
           ParserError, Runtime, TensorIOMode, TensorLocation)


def tensorrt_double(memory, version="10.16.1.11"):
    """What `import tensorrt` gives, for engines that run on `memory`."""
    kinds = {kind.__name__: kind for kind in DOUBLED}
    kinds["Runtime"] = lambda logger: Runtime(logger, memory)
    return SimpleNamespace(**kinds, __version__=version, nptype=np.dtype)
