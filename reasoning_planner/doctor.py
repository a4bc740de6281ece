"""What this machine has for the planner, what is missing and how to get it.

For every platform that engines are built for it says what keeps this machine from building them.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Mapping, Sequence

from .errors import PlannerError

_SHIPPED = Path(__file__).resolve().parent / "checkpoints" / "nano"
NVIDIA_DEVICES = ("/dev/nvidia0", "/dev/nvhost-gpu", "/dev/nvgpu")       # PCs, and Jetsons
OK, WARNING, MISSING, OPTIONAL = "ok", "warning", "missing", "optional"
PYTHONS = ((3, 10), (3, 13))
KERNEL_LIMITS = Path("/proc/sys/net")
# What camera images need to arrive whole over UDP, and what to set: Autoware's documentation.
RECEIVE_BUFFER = ("core/rmem_max", 10_000_000, 2**31 - 1)
FRAGMENT_MEMORY = ("ipv4/ipfrag_high_thresh", 2**27, 2**27)


@dataclass(frozen=True)
class Finding:
    """One thing looked for.

    Attributes:
        state: ok, warning (works, but not well), missing (needed) or optional (absent, not
            needed).
    """

    name: str
    state: str
    found: str
    remedy: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `reasoning-planner doctor`."""
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--checkpoint", type=Path, metavar="DIR",
                        help="also check this one's engines against it")


def run(args: argparse.Namespace) -> int:
    """Print the findings; exit 1 when something needed is missing."""
    findings = examine() + engine_findings(args.checkpoint)
    if args.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            print(_line(finding))
    return 1 if any(finding.state == MISSING for finding in findings) else 0


def _line(finding: Finding) -> str:
    mark = {OK: "ok      ", WARNING: "warning ", MISSING: "MISSING ",
            OPTIONAL: "absent  "}[finding.state]
    remedy = f"  -> {finding.remedy}" if finding.remedy else ""
    return f"{mark}{finding.name:<18}{finding.found}{remedy}"


def examine() -> list[Finding]:
    """Look at everything, in the order a newcomer needs it."""
    return [
        _python(), _machine(),
        *(_module(name, f"pip install {pip}") for name, pip in (
            ("numpy", "numpy"), ("cv2", "opencv-python-headless"), ("yaml", "pyyaml"),
            ("transforms3d", "transforms3d"), ("rosbags", "rosbags"),
            ("jsonschema", "jsonschema"), ("onnxruntime", "onnxruntime"),
            ("tokenizers", "tokenizers"))),
        *(_module(name, remedy, needed=False) for name, remedy in (
            ("jinja2", "pip install 'reasoning_planner[report]'"),
            ("torch", "pip install 'reasoning_planner[train]'"))),
        _ros(), _messages(), _rmw(), _kernel_limit("socket buffers", *RECEIVE_BUFFER),
        _kernel_limit("IP fragments", *FRAGMENT_MEMORY), _transport(),
        _gpu(), _tensorrt(), _checkpoint(),
    ]


def engine_findings(checkpoint: Path | None) -> list[Finding]:
    """One for each platform, and one for each folder of engines beside a checkpoint."""
    try:
        from .runtimes.platforms import load_platforms
    except ImportError as error:
        return [Finding("engines", OPTIONAL, f"not looked at: {error.name} is not installed")]
    try:
        platforms = load_platforms()
    except PlannerError as error:
        return [Finding("engines", OPTIONAL, str(error), "install the package whole")]
    wanting = _wanting_for_tensorrt()
    return [*(_platform(platform, wanting) for platform in platforms.values()),
            *(_engines(folder.parent, checkpoint) for folder in
              sorted((checkpoint or _SHIPPED).glob("engines/*/engine.json")))]


def _wanting_for_tensorrt() -> list[str]:
    """What every engine of TensorRT needs and this machine has not, TensorRT itself aside."""
    from .runtimes.device_memory import create_device_memory

    wanting = [] if importlib.util.find_spec("onnx") else ["onnx is not installed"]
    if not any(map(os.path.exists, NVIDIA_DEVICES)):
        return [*wanting, "no NVIDIA device"]
    try:
        create_device_memory()
    except PlannerError as error:
        wanting.append(str(error).partition("; expected ")[0])
    return wanting


def _platform(platform: Any, wanting: list[str]) -> Finding:
    name = f"for {platform.name}"
    if platform.runtime == "ort":
        return Finding(name, OK, "ONNX Runtime",
                       f"reasoning-planner build-engines --platform {platform.name}")
    version = _tensorrt_version()
    missing = list(wanting)
    if version is None:
        missing.insert(0, "TensorRT is not installed")
    elif not platform.tensorrt.include(version):
        missing.insert(0, f"TensorRT {version} is another")
    if not missing:
        return Finding(name, OK, f"TensorRT {version}",
                       f"reasoning-planner build-engines --platform {platform.name}")
    source = ("pip install tensorrt" if "x86" in platform.families
              else "TensorRT comes with JetPack: sudo apt install nvidia-jetpack")
    return Finding(name, OPTIONAL, "; ".join(missing),
                   f"TensorRT {platform.tensorrt}, and one of torch with CUDA, cuda-python and "
                   f"pycuda: {source}")


def _tensorrt_version() -> str | None:
    try:
        import tensorrt
    except ImportError:
        return None
    return tensorrt.__version__


def _engines(folder: Path, checkpoint: Path | None) -> Finding:
    """Whether engines are those of the checkpoint beside which they lie."""
    from .runtimes.engine_manifest import EngineManifest

    name = f"engines {folder.name}"
    try:
        manifest = EngineManifest.load(folder)
        manifest.require_checkpoint(folder, checkpoint or _SHIPPED)
        for engine in manifest.engines:
            manifest.engine_content(folder, engine).close()
    except PlannerError as error:
        return Finding(name, MISSING if checkpoint else OPTIONAL, str(error))
    return Finding(name, OK, f"{manifest.model}, built by {manifest.builder}")


def _python() -> Finding:
    low, high = (".".join(map(str, version)) for version in PYTHONS)
    supported = PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]
    return Finding("Python", OK if supported else MISSING, platform.python_version(),
                   "" if supported else f"expected {low} to {high}")


def _machine() -> Finding:
    return Finding("machine", OK, f"{platform.system()} {platform.machine()}, "
                   f"{os.cpu_count()} processors")


def _module(name: str, remedy: str, needed: bool = True) -> Finding:
    if importlib.util.find_spec(name) is None:
        return Finding(name, MISSING if needed else OPTIONAL, "not installed", remedy)
    return Finding(name, OK, _distribution_version(name))


def _distribution_version(module: str) -> str:
    names = _distributions().get(module, [])
    return importlib.metadata.version(names[0]) if names else "version unknown"


@functools.cache
def _distributions() -> Mapping[str, Sequence[str]]:
    """Module -> the packages it comes from; reads every installed package, so it is kept."""
    return importlib.metadata.packages_distributions()


def _ros() -> Finding:
    if importlib.util.find_spec("rclpy") is None:
        return Finding("ROS 2", OPTIONAL, "rclpy not found",
                       "source a ROS 2 distribution (Humble to Kilted), or run: make ros")
    return Finding("ROS 2", OK, os.environ.get("ROS_DISTRO", "rclpy from wheels"))


def _messages() -> Finding:
    if importlib.util.find_spec("reasoning_planner.msg") is None:
        return Finding("our messages", OPTIONAL, "not built or not sourced",
                       "colcon build (or make ros), then source install/setup.bash")
    return Finding("our messages", OK, "built and sourced")


def _rmw() -> Finding:
    if importlib.util.find_spec("rclpy") is None:
        return Finding("RMW", OPTIONAL, "no ROS 2")
    from rclpy.utilities import get_rmw_implementation_identifier

    return Finding("RMW", OK, get_rmw_implementation_identifier())


def _kernel_limit(name: str, setting: str, least: int, advised: int) -> Finding:
    dotted = "net." + setting.replace("/", ".")
    try:
        size = int((KERNEL_LIMITS / setting).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return Finding(name, OPTIONAL, f"{dotted} unknown on this system")
    if size >= least:
        return Finding(name, OK, f"{dotted} = {size}")
    return Finding(name, WARNING, f"{dotted} = {size}, expected {least} or more: large images "
                   f"get lost on their way from another computer",
                   f"sudo sysctl -w {dotted}={advised}")


def _transport() -> Finding:
    """Fast DDS sends an image that is no whole datagram in pieces, of which none may be lost."""
    chosen = os.environ.get("FASTDDS_BUILTIN_TRANSPORTS", "")
    if importlib.util.find_spec("rclpy") is None or "fastrtps" not in _rmw().found:
        return Finding("large images", OPTIONAL, "not Fast DDS: no transport to choose")
    if chosen.startswith("LARGE_DATA"):
        return Finding("large images", OK, f"FASTDDS_BUILTIN_TRANSPORTS={chosen}")
    return Finding("large images", WARNING, "Fast DDS with its usual transports: of raw images "
                   "published best effort most get lost",
                   "export FASTDDS_BUILTIN_TRANSPORTS=LARGE_DATA for camera drivers and planner")


def _gpu() -> Finding:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return Finding("GPU", OPTIONAL, "no NVIDIA driver found", "not needed: CPU runs the same")
    answer = subprocess.run([tool, "--query-gpu=name,driver_version", "--format=csv,noheader"],
                            capture_output=True, text=True, timeout=30, check=False)
    if answer.returncode != 0 or not answer.stdout.strip():
        return Finding("GPU", OPTIONAL, "nvidia-smi finds no device")
    return Finding("GPU", OK, answer.stdout.strip().replace("\n", "; "))


def _tensorrt() -> Finding:
    return _module("tensorrt", "comes with JetPack; on x86: pip install tensorrt", needed=False)


def _checkpoint() -> Finding:
    remedy = "for a real target: reasoning-planner import-checkpoint DIR"
    if not (_SHIPPED / "ort_manifest.json").is_file():
        return Finding("checkpoint", OPTIONAL, "none: the kinematic planner plans", remedy)
    return Finding("checkpoint", OK, "nano, a stand-in; used where model.checkpoint says so",
                   remedy)
