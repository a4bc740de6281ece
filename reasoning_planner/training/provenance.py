"""Which source a checkpoint or report was made with. Knows git alone, and needs nothing else."""

from __future__ import annotations

import subprocess
from pathlib import Path


def git_commit() -> str:
    """The commit of the source tree, "+" behind it when the tree has changes; "" outside git."""
    root = Path(__file__).resolve().parent
    try:
        commit = subprocess.run(("git", "rev-parse", "HEAD"), cwd=root, check=True,
                                capture_output=True, text=True).stdout.strip()
        changed = subprocess.run(("git", "status", "--porcelain", "--untracked-files=no"),
                                 cwd=root, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""
    return commit + ("+" if changed.strip() else "")
