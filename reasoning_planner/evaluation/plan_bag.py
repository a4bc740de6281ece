"""The plans of one bag as a rosbag2 of their own, to be opened beside it, in Foxglove for example.

Standard messages, so that no package is needed to look at them; times are the bag's own:
    /reasoning_planner/plan        nav_msgs/Path, the stamps of its poses are the planned times
    /reasoning_planner/driven      nav_msgs/Path, what was driven over the same 6.4 s
    /reasoning_planner/kinematic   nav_msgs/Path, the kinematic planner's plan beside a model's
    /reasoning_planner/pose        geometry_msgs/PoseStamped, at t0
    /reasoning_planner/caption     visualization_msgs/Marker, the text above the vehicle
    /reasoning_planner/text        std_msgs/String
    /reasoning_planner/scores      reasoning_planner_evaluation/PlanScores, defined in the file
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Mapping, Optional

import numpy as np
from rosbags.rosbag2 import CompressionFormat, CompressionMode, StoragePlugin, Writer
from rosbags.typesys import Stores, get_types_from_msg, get_typestore

from ..conversions import stamp_fields
from .records import PlanRecord
from .summary import ScoredPlan

PREFIX = "/reasoning_planner"
SCORES = "reasoning_planner_evaluation/msg/PlanScores"
# Field of the scores -> column of the table.
SCORE_COLUMNS = {
    "ade_1s_m": "ade_m@1", "ade_3s_m": "ade_m@3", "ade_6s_m": "ade_m@6.4", "fde_1s_m": "fde_m@1",
    "fde_3s_m": "fde_m@3", "fde_6s_m": "fde_m@6.4", "longitudinal_3s_m": "longitudinal_bias_m@3",
    "lateral_3s_m": "lateral_bias_m@3", "constant_velocity_ade_3s_m": "cv_ade_m@3",
    "kinematic_ade_3s_m": "kinematic_ade_m@3", "plan_gap_3s_m": "plan_gap_m@3",
    "comfort_score": "comfort_score", "target_passes": "rounds", "total_ms": "total_ms",
}
_DEFINITION = ("# What a plan scored; NaN where it is not known.\nstd_msgs/Header header\n"
               "string status\n"
               + "".join(f"float64 {field}\n" for field in SCORE_COLUMNS))
_PATH, _POSE, _TEXT, _MARKER = ("nav_msgs/msg/Path", "geometry_msgs/msg/PoseStamped",
                                "std_msgs/msg/String", "visualization_msgs/msg/Marker")
_TOPICS = {"plan": _PATH, "driven": _PATH, "kinematic": _PATH, "pose": _POSE, "caption": _MARKER,
           "text": _TEXT, "scores": SCORES}
_TEXT_VIEW_FACING = 9


class PlanBag:
    """Writes plans as they come."""

    def __init__(self, path: Path):
        """
        Args:
            path: new folder of the rosbag2; the file in it is called PATH/PATH.mcap.
        """
        self._store = get_typestore(Stores.ROS2_HUMBLE)
        self._store.register(get_types_from_msg(_DEFINITION, SCORES))
        self._writer = Writer(path, version=9, storage_plugin=StoragePlugin.MCAP)
        self._writer.set_compression(CompressionMode.STORAGE, CompressionFormat.ZSTD)
        self._writer.open()
        self._topics = {name: self._writer.add_connection(f"{PREFIX}/{name}", kind,
                                                          typestore=self._store)
                        for name, kind in _TOPICS.items()}

    def add(self, log_time_ns: int, plan: PlanRecord, kinematic: PlanRecord,
            scored: Optional[ScoredPlan], row: Mapping[str, Any]) -> None:
        """Write what belongs to one plan.

        Args:
            log_time_ns: of the anchor image, in the bag.
        """
        header = self._header(plan.stamp_ns, plan.frame_id)
        messages = {
            "plan": self._path_of(plan, plan.positions, plan.quaternions_xyzw),
            "pose": self._pose_stamped(header, plan.positions[0], plan.quaternions_xyzw[0]),
            "text": self._new(_TEXT, data=plan.text),
            "caption": self._caption(header, plan),
            "scores": self._new(SCORES, header=header, status=plan.status, **{
                field: float(row[column]) for field, column in SCORE_COLUMNS.items()}),
        }
        if plan.planner != kinematic.planner:
            messages["kinematic"] = self._path_of(kinematic, kinematic.positions,
                                                  kinematic.quaternions_xyzw)
        if scored is not None:
            known = np.isfinite(scored.truth[:, 0])
            messages["driven"] = self._path_of(plan, scored.truth, plan.quaternions_xyzw, known)
        for name, message in messages.items():
            data = self._store.serialize_cdr(message, _TOPICS[name])
            self._writer.write(self._topics[name], log_time_ns, data)

    def close(self) -> None:
        """Finish the file: only now it has an index."""
        self._writer.close()

    def _new(self, kind: str, **fields: Any) -> Any:
        return self._store.types[kind](**fields)

    def _header(self, stamp_ns: int, frame_id: str) -> Any:
        stamp = self._new("builtin_interfaces/msg/Time", **stamp_fields(stamp_ns))
        return self._new("std_msgs/msg/Header", stamp=stamp, frame_id=frame_id)

    def _pose(self, position: np.ndarray, quaternion_xyzw: np.ndarray) -> Any:
        x, y, z, w = map(float, quaternion_xyzw)
        return self._new("geometry_msgs/msg/Pose", position=self._point(position),
                         orientation=self._new("geometry_msgs/msg/Quaternion", x=x, y=y, z=z, w=w))

    def _point(self, position: np.ndarray) -> Any:
        x, y, z = map(float, position)
        return self._new("geometry_msgs/msg/Point", x=x, y=y, z=z)

    def _pose_stamped(self, header: Any, position: np.ndarray,
                      quaternion_xyzw: np.ndarray) -> Any:
        return self._new(_POSE, header=header, pose=self._pose(position, quaternion_xyzw))

    def _path_of(self, plan: PlanRecord, positions: np.ndarray, quaternions_xyzw: np.ndarray,
                 known: Optional[np.ndarray] = None) -> Any:
        rows = np.arange(len(positions)) if known is None else np.flatnonzero(known)
        poses = [self._pose_stamped(
            self._header(plan.stamp_ns + int(plan.time_from_start_ns[i]), plan.frame_id),
            positions[i], quaternions_xyzw[i]) for i in rows]
        return self._new(_PATH, header=self._header(plan.stamp_ns, plan.frame_id), poses=poses)

    def _caption(self, header: Any, plan: PlanRecord) -> Any:
        """The text two metres above the vehicle; a refreshed marker replaces the one before."""
        lifted = plan.positions[0] + (0.0, 0.0, 2.0)
        new, zero = self._new, np.zeros(3)
        white = new("std_msgs/msg/ColorRGBA", r=1.0, g=1.0, b=1.0, a=1.0)
        no_time = new("builtin_interfaces/msg/Duration", sec=0, nanosec=0)
        return new(_MARKER, header=header, ns="reasoning", id=0, type=_TEXT_VIEW_FACING, action=0,
                   pose=self._pose(lifted, np.array([0.0, 0.0, 0.0, 1.0])),
                   scale=new("geometry_msgs/msg/Vector3", x=0.6, y=0.6, z=0.6), color=white,
                   lifetime=no_time, frame_locked=False, points=[], colors=[],
                   texture_resource="", texture=self._no_image(), uv_coordinates=[],
                   text=plan.text or plan.status, mesh_resource="",
                   mesh_file=new("visualization_msgs/msg/MeshFile", filename="",
                                 data=zero[:0].astype(np.uint8)),
                   mesh_use_embedded_materials=False)

    def _no_image(self) -> Any:
        return self._new("sensor_msgs/msg/CompressedImage", header=self._header(0, ""), format="",
                         data=np.zeros(0, np.uint8))
