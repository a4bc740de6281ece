"""The corpus of a checkpoint: what the world says of training scenes, and nothing held out."""

import shutil

import pytest

pytest.importorskip("onnxruntime", reason="imports the model's loader")

from reasoning_planner.speculative.corpus_proposer import load_corpus
from reasoning_planner.tokenization.text_tokenizer import TextTokenizer
from reasoning_planner.training import corpus
from reasoning_planner.training.dataset import FIRST_HELD_OUT_SEED
from reasoning_planner.vla import checkpoint_directory
from reasoning_planner.world.language import sample_sentence
from reasoning_planner.world.scene import sample_scene


@pytest.fixture
def checkpoint(tmp_path):
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(checkpoint_directory("nano") / name, tmp_path / name)
    return tmp_path


def test_it_holds_the_sentences_of_the_scenes_with_their_stop_tokens(checkpoint, capsys):
    assert corpus.main(["--checkpoint", str(checkpoint), "--scenes", "30"]) == 0
    assert capsys.readouterr().out.strip() == str(checkpoint / "corpus.npz")
    assert sorted(file.name for file in checkpoint.iterdir()) == [
        "config.json", "corpus.npz", "tokenizer.json"]
    tokenizer = TextTokenizer.load(checkpoint / "tokenizer.json")
    texts = load_corpus(checkpoint / "corpus.npz")
    wanted = [sample_sentence(sample_scene(seed)) for seed in range(30)]
    assert sorted(tokenizer.decode(list(ids)) for ids in texts) == sorted(wanted)
    special = tokenizer.special
    assert {ids[-2:] for ids in texts} == {(special.cot_end, special.traj_future_start)}


def test_held_out_scenes_are_refused(checkpoint, capsys):
    assert corpus.main(["--checkpoint", str(checkpoint),
                        "--scenes", str(FIRST_HELD_OUT_SEED + 1)]) == 1
    assert capsys.readouterr().err.startswith("corpus: ")
    assert not (checkpoint / "corpus.npz").exists()
