"""How the world's driver compares with a real one: speed, acceleration, curvature, jerk.

Reads the `global_pose` arrays of one comma2k19 segment (ECEF positions and velocities at 20 Hz).
The comparison is of distributions; it fits nothing.

    python -m reasoning_planner.world.calibration SEGMENT_DIR
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from ..datatypes import STEP_S
from ..errors import DataError
from .expert import drive_scene
from .scene import sample_scene

_QUANTILES = (5, 50, 95)


def real_motion(segment: Path) -> dict[str, np.ndarray]:
    """Speed, acceleration, curvature and jerk at 10 Hz of a comma2k19 segment, SI units.

    Raises:
        DataError: the arrays are missing or not of one length.
    """
    folder = Path(segment) / "global_pose"
    try:
        times, positions, velocities = (np.load(folder / name) for name in (
            "frame_times", "frame_positions", "frame_velocities"))
    except (OSError, ValueError) as error:
        raise DataError(f"{folder}: expected comma2k19 pose arrays ({error})") from error
    if not len(times) == len(positions) == len(velocities):
        raise DataError(f"{folder}: arrays of {len(times)}, {len(positions)} and "
                        f"{len(velocities)} rows, expected one length")
    up = positions[0] / np.linalg.norm(positions[0])
    east = np.cross((0.0, 0.0, 1.0), up)
    east /= np.linalg.norm(east)
    north = np.cross(up, east)
    grid = np.arange(times[0], times[-1], STEP_S)
    flat = np.stack([np.interp(grid, times, _smooth(velocities @ axis, 11))
                     for axis in (east, north)], axis=1)
    return motion_statistics(np.hypot(flat[:, 0], flat[:, 1]),
                             np.unwrap(np.arctan2(flat[:, 1], flat[:, 0])))


def _smooth(values: np.ndarray, width: int) -> np.ndarray:
    padded = np.pad(values, width // 2, mode="edge")
    return np.convolve(padded, np.full(width, 1.0 / width), mode="valid")


def motion_statistics(speed: np.ndarray, yaw: np.ndarray) -> dict[str, np.ndarray]:
    """Differences of one 10 Hz stretch: speed (N,) m/s and yaw (N,) rad to per-step series."""
    accel = np.diff(speed) / STEP_S
    arc = np.maximum(0.5 * (speed[1:] + speed[:-1]) * STEP_S, 1e-3)
    curvature = np.where(arc > 0.1, np.diff(yaw) / arc, 0.0)
    return {"speed_mps": speed, "acceleration_mps2": accel, "curvature_1pm": curvature,
            "jerk_mps3": np.diff(accel) / STEP_S,
            "lateral_acceleration_mps2": curvature * speed[1:] ** 2}


def world_motion(seeds: range, kind: str | None = None) -> dict[str, np.ndarray]:
    """The same series over many world scenes, joined."""
    series: dict[str, list[np.ndarray]] = {}
    for seed in seeds:
        drive = drive_scene(sample_scene(seed, kind))
        for name, values in motion_statistics(drive.speed_mps, drive.yaw_rad).items():
            series.setdefault(name, []).append(values)
    return {name: np.concatenate(parts) for name, parts in series.items()}


def compare(segment: Path, seeds: range = range(300)) -> dict[str, dict[str, list[float]]]:
    """5 %, 50 % and 95 % quantiles of the real segment, of all scenes, and of free roads alone."""
    sources = {"real": real_motion(segment), "world": world_motion(seeds),
               "world_free_road": world_motion(seeds, "free_road")}
    return {name: {source: [round(float(q), 5) for q in np.percentile(motion[name], _QUANTILES)]
                   for source, motion in sources.items()}
            for name in sources["real"]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("segment", type=Path, help="folder of one comma2k19 segment")
    print(json.dumps(compare(parser.parse_args().segment), indent=1))
