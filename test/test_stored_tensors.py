"""Safetensors as arrays, and the hash that binds a draft to the part of a target it depends on."""

import numpy as np
import pytest

pytest.importorskip("safetensors", reason="writes the files")
from safetensors.numpy import load_file, save_file

from reasoning_planner.errors import ModelError
from reasoning_planner.runtimes.draft_base import target_sha256
from reasoning_planner.runtimes.stored_tensors import stored_arrays, tensors_sha256

TENSORS = {"vlm.a": np.arange(6, dtype=np.float16).reshape(2, 3),
           "vlm.b": np.arange(3, dtype=np.float32), "expert.c": np.ones(4, np.float32)}


def written(folder, tensors, name="model.safetensors"):
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / name)
    return folder


def test_arrays_are_what_was_saved(tmp_path):
    path = written(tmp_path / "a", TENSORS) / "model.safetensors"
    found = stored_arrays(path)
    assert found.keys() == TENSORS.keys()
    assert all(np.array_equal(found[name], TENSORS[name]) for name in TENSORS)
    assert list(stored_arrays(path, ["vlm.b"])) == ["vlm.b"]
    with pytest.raises(ModelError, match="KeyError 'none'"):
        stored_arrays(path, ["none"])
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(ModelError, match="expected safetensors"):
        stored_arrays(path)


def test_another_expert_is_the_same_target(tmp_path):
    first = target_sha256(written(tmp_path / "a", TENSORS))
    assert len(first) == 64
    longer = {**TENSORS, "expert.c": np.zeros(9, np.float32), "action_out_proj.weight":
              np.ones(2, np.float32)}
    assert target_sha256(written(tmp_path / "b", longer)) == first


@pytest.mark.parametrize("name,changed", [
    ("vlm.a", TENSORS["vlm.a"] + 1), ("vlm.a", TENSORS["vlm.a"].reshape(3, 2)),
    ("vlm.a", TENSORS["vlm.a"].astype(np.float32)), ("vlm.d", np.ones(1, np.float32))],
    ids=["value", "shape", "dtype", "one more"])
def test_another_text_model_is_another_target(tmp_path, name, changed):
    first = target_sha256(written(tmp_path / "a", TENSORS))
    assert target_sha256(written(tmp_path / "b", {**TENSORS, name: changed})) != first


def test_in_how_many_files_does_not_matter(tmp_path):
    whole = tensors_sha256(written(tmp_path / "a", TENSORS), "vlm.")
    for name, tensor in TENSORS.items():
        written(tmp_path / "b", {name: tensor}, f"part-{name}.safetensors")
    assert tensors_sha256(tmp_path / "b", "vlm.") == whole
    assert load_file(tmp_path / "b" / "part-vlm.a.safetensors").keys() == {"vlm.a"}


def test_what_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(ModelError, match="given no tensor vlm"):
        target_sha256(tmp_path)
    folder = written(tmp_path / "a", TENSORS)
    (folder / "model.safetensors").write_bytes(b"nothing at all")
    with pytest.raises(ModelError, match="expected safetensors"):
        target_sha256(folder)
    content = written(folder, {"vlm.a": np.ones(99, np.float32)})
    path = content / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(ModelError, match="ends 7 bytes early"):
        target_sha256(folder)
