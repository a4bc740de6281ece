"""Start planner_node: ros2 launch reasoning_planner planner.launch.py [ARGUMENT:=VALUE ...]."""

from pathlib import Path

from ament_index_python.packages import get_package_share_directory
from launch import LaunchDescription
from launch.actions import DeclareLaunchArgument
from launch.substitutions import LaunchConfiguration
from launch_ros.actions import Node
from launch_ros.parameter_descriptions import ParameterFile, ParameterValue

CAMERA_SLOTS = ("front_left", "front", "front_right", "front_telephoto")


def generate_launch_description() -> LaunchDescription:
    """One argument for each thing that differs between vehicles."""
    share = Path(get_package_share_directory("reasoning_planner"))
    cameras = [
        DeclareLaunchArgument(f"image{slot}",
                              default_value=f"/sensing/camera/camera{slot}/image_raw",
                              description=f"image topic of slot {slot}, the {name} camera")
        for slot, name in enumerate(CAMERA_SLOTS)]
    arguments = [
        DeclareLaunchArgument("param_file",
                              default_value=str(share / "config" / "planner.param.yaml"),
                              description="parameter file"),
        DeclareLaunchArgument("namespace", default_value="", description="namespace of the node"),
        DeclareLaunchArgument("use_sim_time", default_value="false",
                              description="true: time comes from /clock (a bag is played)"),
        DeclareLaunchArgument("compressed", default_value="false",
                              description="true: the image topics are CompressedImage"),
        DeclareLaunchArgument("odometry", default_value="/localization/kinematic_state",
                              description="odometry topic, nav_msgs/Odometry"),
        *cameras,
    ]
    planner = Node(
        package="reasoning_planner",
        executable="planner_node",
        name="reasoning_planner",
        namespace=LaunchConfiguration("namespace"),
        output="screen",
        parameters=[
            ParameterFile(LaunchConfiguration("param_file"), allow_substs=True),
            {"use_sim_time": ParameterValue(LaunchConfiguration("use_sim_time"), value_type=bool),
             "cameras.compressed": ParameterValue(LaunchConfiguration("compressed"),
                                                  value_type=bool)},
        ],
        remappings=[("~/input/odometry", LaunchConfiguration("odometry"))]
        + [(f"~/input/image{slot}", LaunchConfiguration(f"image{slot}"))
           for slot in range(len(CAMERA_SLOTS))],
    )
    return LaunchDescription([*arguments, planner])
