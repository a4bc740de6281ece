"""How much memory a large bag takes to evaluate: a drive of raw images is written and evaluated.

The evaluation runs in a process of its own, whose largest resident set the system keeps. Linux.

    python -m reasoning_planner.evaluation.memory_bench --gigabytes 1.1 --limit-gigabytes 1.5
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..errors import DataError, PlannerError
from ..world.drive import make_drive
from ..world.render import RIG
from ..world.rosbag import write_bag

FRAMES_PER_S = 10
GIGABYTE = 1e9
SHORTEST_S = 3.0            # 1.6 s of history first


def write_large_bag(folder: Path, gigabytes: float, size: tuple[int, int], seed: int = 0) -> Path:
    """A drive of the world, long enough that its raw images have this size.

    Args:
        size: (H, W) of each of the four cameras' images.
    """
    frames = math.ceil(gigabytes * GIGABYTE / (len(RIG) * size[0] * size[1] * 3))
    drive = make_drive(seed, max(frames / FRAMES_PER_S, SHORTEST_S))
    return write_bag(drive, folder / "large", size, progress=lambda items: tqdm(
        items, "write", total=frames, unit="frame", disable=not sys.stderr.isatty()))


def measure(bag: Path, out: Path, options: list[str]) -> dict[str, Any]:
    """Evaluate a bag in a process of its own.

    Returns:
        bag_gigabytes and resident_gigabytes, the most that process held at once.
    Raises:
        DataError: the evaluation failed.
    """
    command = [sys.executable, "-m", "reasoning_planner.cli", "evaluate", str(bag),
               "--out", str(out), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise DataError(f"evaluate {bag}: {done.stderr.strip()}")
    largest_kib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    stored = sum(file.stat().st_size for file in bag.rglob("*") if file.is_file())
    return {"bag_gigabytes": round(stored / GIGABYTE, 3), "options": options,
            "resident_gigabytes": round(largest_kib * 1024 / GIGABYTE, 3)}


def main(argv: list[str] | None = None) -> int:
    """Print the figures as JSON; exit 1 when they are over the limit or a run failed."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.1, help="(default %(default)s)")
    parser.add_argument("--width", type=int, default=960, help="of the images")
    parser.add_argument("--height", type=int, default=480)
    parser.add_argument("--limit-gigabytes", type=float, default=1.5,
                        help="the most it may hold (default %(default)s)")
    parser.add_argument("options", nargs="*", metavar="OPTION",
                        help="of evaluate, after --: -- --checkpoint nano --jobs 2")
    args = parser.parse_args(argv)
    try:
        with tempfile.TemporaryDirectory() as folder:
            bag = write_large_bag(Path(folder), args.gigabytes, (args.height, args.width))
            figures = measure(bag, Path(folder) / "out", args.options)
    except PlannerError as error:
        print(f"memory_bench: {error}", file=sys.stderr)
        return 1
    print(json.dumps(figures, indent=2))
    return int(figures["resident_gigabytes"] > args.limit_gigabytes)


if __name__ == "__main__":
    sys.exit(main())
