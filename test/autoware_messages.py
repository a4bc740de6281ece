"""Autoware's message packages, and tf2's, generated from their fields: the same on the wire.

Built by colcon once for each set of definitions, below the repository's .ros.
"""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# What Python over Fast DDS needs: a third of all that rosidl can generate.
GENERATORS = "\n".join(f"find_package({name} REQUIRED)" for name in (
    "rosidl_cmake", "rosidl_generator_c", "rosidl_generator_type_description",
    "rosidl_typesupport_c", "rosidl_typesupport_fastrtps_c", "rosidl_generator_py"))
# package -> (packages it needs, message -> fields). Names and types as Autoware publishes them.
PACKAGES = {
    "tf2_msgs": (("geometry_msgs",), {
        "TFMessage": ("geometry_msgs/TransformStamped[] transforms",)}),
    "autoware_planning_msgs": (("builtin_interfaces", "geometry_msgs", "std_msgs",
                                "unique_identifier_msgs"), {
        "TrajectoryPoint": (
            "builtin_interfaces/Duration time_from_start", "geometry_msgs/Pose pose",
            "float32 longitudinal_velocity_mps", "float32 lateral_velocity_mps",
            "float32 acceleration_mps2", "float32 heading_rate_rps",
            "float32 front_wheel_angle_rad", "float32 rear_wheel_angle_rad"),
        "Trajectory": ("std_msgs/Header header",
                       "autoware_planning_msgs/TrajectoryPoint[] points"),
        "LaneletPrimitive": ("int64 id", "string primitive_type"),
        "LaneletSegment": ("autoware_planning_msgs/LaneletPrimitive preferred_primitive",
                           "autoware_planning_msgs/LaneletPrimitive[] primitives"),
        "LaneletRoute": (
            "std_msgs/Header header", "geometry_msgs/Pose start_pose",
            "geometry_msgs/Pose goal_pose", "autoware_planning_msgs/LaneletSegment[] segments",
            "unique_identifier_msgs/UUID uuid", "bool allow_modification"),
    }),
    "autoware_internal_planning_msgs": (("autoware_planning_msgs", "std_msgs",
                                         "unique_identifier_msgs"), {
        "GeneratorInfo": ("unique_identifier_msgs/UUID generator_id",
                          "std_msgs/String generator_name"),
        "CandidateTrajectory": (
            "std_msgs/Header header", "unique_identifier_msgs/UUID generator_id",
            "autoware_planning_msgs/TrajectoryPoint[] points"),
        "CandidateTrajectories": (
            "autoware_internal_planning_msgs/CandidateTrajectory[] candidate_trajectories",
            "autoware_internal_planning_msgs/GeneratorInfo[] generator_info"),
    }),
}


def build():
    """Install prefix that holds the packages."""
    text = json.dumps(PACKAGES, sort_keys=True) + GENERATORS + sys.version
    home = ROOT / ".ros" / f"autoware_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    prefix = home / "install"
    if not (home / "built").exists():
        for name, (needed, messages) in PACKAGES.items():
            _write(home / "src" / name, name, needed, messages)
        venv = os.environ.get("VIRTUAL_ENV") or sys.prefix
        env = {**os.environ,
               "AMENT_PREFIX_PATH": os.pathsep.join([os.environ.get("AMENT_PREFIX_PATH", ""),
                                                     venv]).strip(os.pathsep),
               "CMAKE_PREFIX_PATH": os.pathsep.join([os.environ.get("CMAKE_PREFIX_PATH", ""),
                                                     venv]).strip(os.pathsep)}
        done = subprocess.run(
            ["colcon", "--log-base", str(home / "log"), "build", "--base-paths",
             str(home / "src"), "--build-base", str(home / "build"), "--install-base",
             str(prefix), "--merge-install", "--cmake-args", "-DBUILD_TESTING=OFF",
             f"-DPython3_EXECUTABLE={sys.executable}"],
            env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        (home / "built").touch()
    return prefix


def environment(prefix):
    """What a process needs in its environment to import them."""
    site = next(prefix.glob("lib/python*/site-packages"))
    return {"PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]),
            "LD_LIBRARY_PATH": os.pathsep.join([str(prefix / "lib"),
                                                os.environ.get("LD_LIBRARY_PATH", "")]),
            "AMENT_PREFIX_PATH": os.pathsep.join([str(prefix),
                                                  os.environ.get("AMENT_PREFIX_PATH", "")])}


def type_hash(prefix, package, message):
    """RIHS01 of a generated type."""
    described = json.loads((prefix / "share" / package / "msg" / f"{message}.json").read_text())
    return next(item["hash_string"] for item in described["type_hashes"]
                if item["type_name"] == f"{package}/msg/{message}")


def _write(folder, name, needed, messages):
    (folder / "msg").mkdir(parents=True, exist_ok=True)
    for message, fields in messages.items():
        lines = [field.replace(f"{name}/", "", 1) for field in fields]
        (folder / "msg" / f"{message}.msg").write_text("\n".join(lines) + "\n")
    needs = "".join(f"  <depend>{package}</depend>\n" for package in needed)
    (folder / "package.xml").write_text(
        f'<?xml version="1.0"?>\n<package format="3">\n  <name>{name}</name>\n'
        f"  <version>0.0.0</version>\n  <description>messages</description>\n"
        f'  <maintainer email="tests@reasoning-planner.invalid">tests</maintainer>\n'
        f"  <license>Apache-2.0</license>\n"
        f"  <buildtool_depend>ament_cmake</buildtool_depend>\n"
        f"  <buildtool_depend>rosidl_default_generators</buildtool_depend>\n{needs}"
        f"  <member_of_group>rosidl_interface_packages</member_of_group>\n"
        f"  <export><build_type>ament_cmake</build_type></export>\n</package>\n")
    found = "\n".join(f"find_package({package} REQUIRED)" for package in needed)
    files = "\n  ".join(f"msg/{message}.msg" for message in messages)
    (folder / "CMakeLists.txt").write_text(
        f"cmake_minimum_required(VERSION 3.16)\nproject({name})\n"
        f"find_package(ament_cmake REQUIRED)\n{GENERATORS}\n"
        f"{found}\nrosidl_generate_interfaces(${{PROJECT_NAME}}\n  {files}\n"
        f"  DEPENDENCIES {' '.join(needed)})\nament_package()\n")
