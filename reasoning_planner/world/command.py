"""The synthetic driving world on disk: labelled scenes, or a four-camera rosbag2 of one drive.

scenes: DIR/scenes_00000.npz ... with up to 64 scenes each, and DIR/manifest.json, one entry a
scene. With --bag: DIR/bag, and DIR/bag_truth.json with the sentence and plan of every frame.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path

import cv2
import numpy as np

from ..errors import DataError
from .drive import WorldDrive, make_drive
from .rosbag import START_NS, write_bag
from .samples import LABEL_NAMES, WorldSample, make_sample
from .scene import KINDS

_SHARD = 64
_ARRAYS = ("images", "history_positions", "history_rotations", "v0_mps", "future_positions",
           "future_yaw", "controls", "labels")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `reasoning-planner world`."""
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write")
    parser.add_argument("--scenes", type=_count, default=64, metavar="N",
                        help="how many scenes (default 64)")
    parser.add_argument("--seed", type=_count, default=0, metavar="S",
                        help="of the first scene, the next has S + 1 (default 0)")
    parser.add_argument("--kind", choices=KINDS, help="scenes of this kind only")
    parser.add_argument("--size", type=_count, nargs=2, default=(64, 128), metavar=("H", "W"),
                        help="of the images, multiples of 32 (default 64 128)")
    parser.add_argument("--preview", action="store_true",
                        help="also write preview.png, the newest front images of 32 scenes")
    parser.add_argument("--bag", action="store_true", help="write one drive as a rosbag2 instead")
    parser.add_argument("--duration", type=float, default=60.0, metavar="SECONDS",
                        help="of the drive (default 60)")
    parser.add_argument("--compressed", action="store_true", help="JPEG images in the bag")
    parser.add_argument("--json", action="store_true", help="say what was written as JSON")


def run(args: argparse.Namespace) -> int:
    """Write what was asked for; 0 when done."""
    size = tuple(args.size)
    if size[0] % 32 or size[1] % 32 or min(size) < 32:
        raise DataError(f"--size: given {size[0]} {size[1]}, expected multiples of 32")
    if args.bag and args.duration < 2.0:
        raise DataError(f"--duration: given {args.duration}, expected at least 2")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        written = _write_drive(args, size) if args.bag else _write_scenes(args, size)
    except OSError as error:
        raise DataError(f"{args.out}: {error}") from error
    print(json.dumps(written) if args.json else
          ", ".join(f"{name} {value}" for name, value in written.items()))
    return 0


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"given {value}, expected 0 or more")
    return value


def _progress(items: Iterable, total: int, what: str) -> Iterable:
    """The items, behind a progress bar when somebody watches."""
    if not sys.stderr.isatty():
        return items
    from tqdm import tqdm
    return tqdm(items, total=total, unit=what)


def _write_scenes(args: argparse.Namespace, size: tuple[int, int]) -> dict:
    shard: list[WorldSample] = []
    entries, front = [], []
    seeds = range(args.seed, args.seed + args.scenes)
    for seed in _progress(seeds, len(seeds), "scene"):
        sample = make_sample(seed, args.kind, size)
        name = f"scenes_{len(entries) // _SHARD:05d}.npz"
        entries.append({"file": name, "row": len(shard), "seed": seed, "kind": sample.kind,
                        "category": sample.category, "manoeuvre": sample.manoeuvre,
                        "weather": sample.weather, "coc": sample.coc,
                        "valid_cocs": list(sample.valid_cocs)})
        shard.append(sample)
        if len(front) < 32:
            front.append(np.concatenate((sample.images[1, -1], sample.images[3, -1]), axis=1))
        if len(shard) == _SHARD or seed == seeds[-1]:
            _write_shard(args.out / name, shard)
            shard = []
    _write_json(args.out / "manifest.json",
                {"size": list(size), "cameras": [0, 1, 2, 6], "label_names": list(LABEL_NAMES),
                 "arrays": list(_ARRAYS), "scenes": entries})
    written = {"scenes": len(entries), "manifest": str(args.out / "manifest.json")}
    if args.preview and front:
        cv2.imwrite(str(args.out / "preview.png"), contact_sheet(front)[..., ::-1])
        written["preview"] = str(args.out / "preview.png")
    return written


def _write_shard(path: Path, samples: list[WorldSample]) -> None:
    partial = path.with_name(f".{path.name}.partial.npz")
    np.savez_compressed(partial, **{name: np.stack([np.asarray(getattr(sample, name))
                                                    for sample in samples]) for name in _ARRAYS})
    partial.replace(path)


def _write_json(path: Path, value: dict) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(value, indent=1) + "\n")
    partial.replace(path)


def contact_sheet(images: list[np.ndarray], columns: int = 4) -> np.ndarray:
    """Images of one size side by side, row by row, black where none is left."""
    blank = np.zeros_like(images[0])
    rows = [images[i:i + columns] for i in range(0, len(images), columns)]
    return np.concatenate([np.concatenate(row + [blank] * (columns - len(row)), axis=1)
                           for row in rows])


def _write_drive(args: argparse.Namespace, size: tuple[int, int]) -> dict:
    drive = make_drive(args.seed, args.duration)
    total = int(round(args.duration * 10)) + 1
    path = write_bag(drive, args.out / "bag", size, args.compressed,
                     lambda frames: _progress(frames, total, "frame"))
    _write_json(args.out / "bag_truth.json", drive_truth(drive))
    return {"frames": total, "bag": str(path), "truth": str(args.out / "bag_truth.json")}


def drive_truth(drive: WorldDrive) -> dict:
    """Per frame: stamp, kind, manoeuvre, sentences and the expert's controls of 6.4 s."""
    frames = []
    for moment in drive.moments():
        controls = drive.drive.controls[moment.anchor:moment.anchor + 64]
        frames.append({
            "stamp_ns": START_NS + int(round(moment.time_s * 1000.0)) * 1_000_000,
            "kind": moment.kind, "manoeuvre": moment.manoeuvre, "coc": moment.coc,
            "valid_cocs": list(moment.valid_cocs),
            "v0_mps": float(drive.drive.speed_mps[moment.anchor]),
            "controls": np.round(controls, 6).tolist()})
    return {"seed": drive.seed, "weather": drive.scene.weather, "frames": frames}
