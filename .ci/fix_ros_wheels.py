"""Point the CMake files of the ROS wheels at this machine's Python and numpy.

The wheels carry the paths of the machine that built them. Safe to run again. Usage: run it with
the virtual environment's own Python after the wheels are installed.
"""

import re
import sys
import sysconfig
from pathlib import Path

import numpy

BUILD_PYTHON = re.compile(
    r"/opt/python/cp3\d+-cp3\d+/include/python3\.\d+(?:/numpy)?(?![\w/])")
BUILD_NUMPY = re.compile(
    r"/opt/python/cp3\d+-cp3\d+/lib/python3\.\d+/site-packages/numpy/_?core/include")


def main() -> int:
    """Rewrite every CMake file below <prefix>/share that names a build machine's Python."""
    changed = 0
    for path in sorted(Path(sys.prefix, "share").rglob("*.cmake")):
        text = path.read_text(encoding="utf-8")
        fixed = BUILD_NUMPY.sub(lambda _: numpy.get_include(), text)
        fixed = BUILD_PYTHON.sub(lambda _: sysconfig.get_path("include"), fixed)
        if fixed != text:
            path.write_text(fixed, encoding="utf-8")
            changed += 1
    print(f"{changed} CMake files now name {sys.prefix}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
