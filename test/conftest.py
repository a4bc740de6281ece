"""Fixtures that several test modules share."""

import pytest


@pytest.fixture(scope="module")
def single_thread():
    """PyTorch on one thread: the models are too small for more, and the sums stay the same."""
    torch = pytest.importorskip("torch", reason="the models are written in it")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def exported_checkpoint(tmp_path_factory):
    """A small checkpoint of random weights with its graphs."""
    from reasoning_planner.export.to_onnx import export
    from tiny_checkpoint import tiny_config, write_checkpoint

    folder = write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny", tiny_config())
    export(folder)
    return folder
