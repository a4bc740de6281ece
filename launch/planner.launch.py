"""Start planner_node: ros2 launch reasoning_planner planner.launch.py [ARGUMENT:=VALUE ...]."""

from pathlib import Path

from ament_index_python.packages import get_package_share_directory
from launch import LaunchContext, LaunchDescription
from launch.actions import DeclareLaunchArgument, OpaqueFunction
from launch.substitutions import LaunchConfiguration
from launch_ros.actions import Node
from launch_ros.parameter_descriptions import ParameterFile, ParameterValue

CAMERA_SLOTS = ("front_left", "front", "front_right", "front_telephoto")
RESPAWN_DELAY_S = 2.0
# Argument -> parameter it sets, type, description; left empty, the parameter file decides.
OVERRIDES = {
    "compressed": ("cameras.compressed", bool, "true: the image topics are CompressedImage"),
    "checkpoint": ("model.checkpoint", str, "folder of a checkpoint with its graphs, or nano"),
    "engines": ("model.engines", str, "folder that build-engines wrote"),
    "runtime": ("model.runtime", str, "ort, torch or trt"),
    "output_format": ("output_format", str, "native or autoware"),
    "route_source": ("route_source", str, "parameter, text or lanelet_route"),
}


def generate_launch_description() -> LaunchDescription:
    """One argument for each thing that differs between vehicles."""
    share = Path(get_package_share_directory("reasoning_planner"))
    cameras = [
        DeclareLaunchArgument(f"image{slot}",
                              default_value=f"/sensing/camera/camera{slot}/image_raw",
                              description=f"image topic of slot {slot}, the {name} camera")
        for slot, name in enumerate(CAMERA_SLOTS)]
    cameras += [
        DeclareLaunchArgument(f"camera_info{slot}",
                              default_value=f"/sensing/camera/camera{slot}/camera_info",
                              description=f"calibration topic of slot {slot}")
        for slot in range(len(CAMERA_SLOTS))]
    arguments = [
        DeclareLaunchArgument("param_file",
                              default_value=str(share / "config" / "planner.param.yaml"),
                              description="parameter file"),
        DeclareLaunchArgument("namespace", default_value="", description="namespace of the node"),
        DeclareLaunchArgument("use_sim_time", default_value="false",
                              description="true: time comes from /clock (a bag is played)"),
        DeclareLaunchArgument("respawn", default_value="false",
                              description="true: start the node again whenever it ends"),
        DeclareLaunchArgument("odometry", default_value="/localization/kinematic_state",
                              description="odometry topic, nav_msgs/Odometry"),
        *cameras,
        *(DeclareLaunchArgument(name, default_value="",
                                description=f"{description}; empty: as the parameter file says")
          for name, (_, _, description) in OVERRIDES.items()),
    ]
    return LaunchDescription([*arguments, OpaqueFunction(function=_planner)])


def _planner(context: LaunchContext) -> list[Node]:
    """The node, once the arguments are known."""
    given = {name: (parameter, kind) for name, (parameter, kind, _) in OVERRIDES.items()
             if LaunchConfiguration(name).perform(context)}
    overrides = {parameter: ParameterValue(LaunchConfiguration(name), value_type=kind)
                 for name, (parameter, kind) in given.items()}
    return [Node(
        package="reasoning_planner",
        executable="planner_node",
        name="reasoning_planner",
        namespace=LaunchConfiguration("namespace"),
        output="screen",
        respawn=LaunchConfiguration("respawn").perform(context).lower() == "true",
        respawn_delay=RESPAWN_DELAY_S,
        parameters=[
            ParameterFile(LaunchConfiguration("param_file"), allow_substs=True),
            {"use_sim_time": ParameterValue(LaunchConfiguration("use_sim_time"),
                                            value_type=bool)},
            *([overrides] if overrides else []),
        ],
        remappings=[("~/input/odometry", LaunchConfiguration("odometry"))]
        + [(f"~/input/{name}{slot}", LaunchConfiguration(f"{name}{slot}"))
           for name in ("image", "camera_info") for slot in range(len(CAMERA_SLOTS))],
    )]
