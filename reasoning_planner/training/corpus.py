"""Write the corpus that the corpus proposer drafts from: what the world says of training scenes.

python -m reasoning_planner.training.corpus --checkpoint DIR --scenes 4000
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from ..errors import PlannerError
from ..runtimes.manifest import load_config
from ..speculative.corpus_proposer import save_corpus
from ..speculative.selection import CORPUS_NAME
from ..tokenization.text_tokenizer import TextTokenizer
from ..vla import checkpoint_directory
from ..world.language import sample_sentence
from ..world.scene import sample_scene
from .dataset import PromptLayout, check_seeds


def write_corpus(checkpoint: Path, scenes: int) -> Path:
    """The texts of scenes 0 .. scenes - 1 as the checkpoint's tokens, beside its weights.

    Raises:
        DataError, ModelError: no such checkpoint; a seed among the held-out ones.
    """
    check_seeds((0, scenes - 1), held_out=False)
    layout = PromptLayout(TextTokenizer.load(checkpoint / "tokenizer.json"),
                          load_config(checkpoint))
    path = checkpoint / CORPUS_NAME
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    save_corpus(partial, [layout.answer(sample_sentence(sample_scene(seed)))
                          for seed in range(scenes)])
    os.replace(partial, path)
    return path


def main(argv: list[str] | None = None) -> int:
    """Entry of the command."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", default="nano", help="folder, or a shipped one's name")
    parser.add_argument("--scenes", type=int, default=4000, help="training scenes")
    args = parser.parse_args(argv)
    try:
        print(write_corpus(checkpoint_directory(args.checkpoint), args.scenes))
    except PlannerError as error:
        print(f"corpus: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
