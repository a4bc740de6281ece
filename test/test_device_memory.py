"""Device memory behind its one interface: the same work through each library.

Without a device cuda-python and pycuda are doubles (cuda_doubles.py); tests marked `gpu` do the
same work with the real ones and with torch.
"""

import gc
import subprocess
import sys
import threading
import types

import numpy as np
import pytest

import cuda_doubles
from reasoning_planner.errors import MissingDependencyError, ModelError
from reasoning_planner.runtimes.device_memory import (ALIGNMENT, Arena, Replayed,
                                                      Rows, create_device_memory)


@pytest.fixture(params=["cuda-python", "pycuda"])
def double(request, monkeypatch):
    """(memory, the double behind it)."""
    if request.param == "pycuda":
        module, name = cuda_doubles.pycuda_driver(), "pycuda.driver"
    else:
        module, name = cuda_doubles.cuda_runtime(), "cuda.bindings.runtime"
    parents = name.split(".")[:-1]
    for depth in range(1, len(parents) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parents[:depth]),
                            types.SimpleNamespace(__path__=[]))
    monkeypatch.setitem(sys.modules, name, module)
    setattr(sys.modules[".".join(parents)], name.split(".")[-1], module)
    return create_device_memory(request.param), module


def downloaded(memory, buffer, count):
    array = memory.pinned((count,), np.dtype(np.uint8))
    memory.download(array, buffer)
    memory.synchronise()
    return array.copy()


def exercise(memory):
    """Zeroed memory, copies up, down, by rows, zeroing of rows, a graph where there are some."""
    first, second = memory.allocate(1024), memory.allocate(1024)
    assert first.address % ALIGNMENT == second.address % ALIGNMENT == 0 and memory.stream
    assert not downloaded(memory, first, 1024).any()
    given = memory.pinned((4, 8), np.dtype(np.int64))
    assert not given.any()
    given[...] = np.arange(32).reshape(4, 8)
    memory.upload(first, given)
    memory.synchronise()
    assert np.array_equal(downloaded(memory, first, 256).view(np.int64), np.arange(32))
    # row 1 .. 3 of 64 bytes each to places 100 bytes apart
    memory.copy_rows(Rows(second, 10, 100, 64, 3), Rows(first, 64, 64, 64, 3))
    found = downloaded(memory, second, 1024)
    expected = np.zeros(1024, np.uint8)
    rows = np.arange(32).reshape(4, 8).view(np.uint8)
    for row in range(3):
        expected[10 + 100 * row:][:64] = rows[1 + row]
    assert np.array_equal(found, expected)
    memory.clear_rows(Rows(second, 10, 100, 32, 2))
    expected[10:42] = expected[110:142] = 0
    assert np.array_equal(downloaded(memory, second, 1024), expected)
    launch = memory.capture(lambda: memory.clear_rows(Rows(second, 0, 1024, 1024, 1)))
    if launch is not None:
        assert np.array_equal(downloaded(memory, second, 1024), expected)     # recorded, not run
        launch()
        assert not downloaded(memory, second, 1024).any()


def test_each_library_does_the_same(double):
    memory, module = double
    exercise(memory)
    gc.collect()
    before = len(module.memory.alive)
    kept = memory.allocate(512)
    assert len(module.memory.alive) == before + 1
    del kept
    assert len(module.memory.alive) == before       # freed with its last reference


def test_a_model_may_run_in_another_thread_than_it_was_loaded_in(double):
    errors = []

    def work():
        try:
            exercise(double[0])
        except BaseException as error:      # told where pytest sees it
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(30.0)
    assert not thread.is_alive() and not errors, errors


def test_more_than_the_device_has_is_one_line(double):
    with pytest.raises(ModelError) as refused:
        double[0].allocate(1 << 40)
    assert "\n" not in str(refused.value)


def test_an_arena_goes_up_and_down_in_one_copy(double):
    memory, _ = double
    arena = Arena(memory, {"ids": ((3,), np.int64), "bias": ((2, 2), np.float16)})
    assert arena.addresses["bias"] - arena.addresses["ids"] == ALIGNMENT
    arena.arrays["ids"][:], arena.arrays["bias"][:] = (1, 2, 3), -3e4
    arena.upload()
    memory.synchronise()
    arena.arrays["ids"][:], arena.arrays["bias"][:] = 0, 0
    arena.download()
    memory.synchronise()
    assert list(arena.arrays["ids"]) == [1, 2, 3] and (arena.arrays["bias"] == -3e4).all()


def test_work_is_a_graph_from_its_second_time_on(double):
    memory, module = double
    runs = []
    work = Replayed(memory, lambda: runs.append(1))
    for _ in range(4):
        work()
    assert len(runs) == (4 if memory.name == "pycuda" else 2)   # first run, and one capture


def test_an_unknown_library():
    with pytest.raises(ModelError, match="given 'opencl', expected auto or one of torch, cuda-py"):
        create_device_memory("opencl")


def test_nothing_is_imported_before_it_is_asked_for():
    code = ("import sys, reasoning_planner.runtimes.trt_runtime, "
            "reasoning_planner.runtimes.factory; "
            "print(sorted({'torch', 'pycuda', 'cuda', 'tensorrt', 'onnxruntime'} "
            "& set(sys.modules)))")
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                         timeout=120, check=False)
    assert ran.stdout.strip() == "[]", ran.stdout + ran.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["torch", "cuda-python", "pycuda"])
def test_real_libraries_do_the_same(name):
    try:
        memory = create_device_memory(name)
    except MissingDependencyError as missing:
        pytest.skip(str(missing))
    exercise(memory)
