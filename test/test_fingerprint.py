"""What an evaluation's results depend on: another file anywhere in a checkpoint is seen."""

from reasoning_planner.evaluation.fingerprint import fingerprint_of


def test_a_checkpoints_draft_is_seen(tmp_path):
    (tmp_path / "draft").mkdir()
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "draft" / "draft.safetensors").write_bytes(b"one")
    first = fingerprint_of({"bag": "a"}, str(tmp_path))
    assert fingerprint_of({"bag": "a"}, str(tmp_path)) == first
    (tmp_path / "draft" / "draft.safetensors").write_bytes(b"two")
    assert fingerprint_of({"bag": "a"}, str(tmp_path)) != first
