"""Play a bag through planner_node and record its plans.

ros2 launch reasoning_planner replay.launch.py bag:=PATH [records:=FILE] [ARGUMENT:=VALUE ...]

Takes the arguments of planner.launch.py as well; topics are named as recorded. Ends with the bag.
"""

from pathlib import Path

from ament_index_python.packages import get_package_share_directory
from launch import LaunchDescription
from launch.actions import (DeclareLaunchArgument, IncludeLaunchDescription, RegisterEventHandler,
                            Shutdown, TimerAction)
from launch.event_handlers import OnProcessExit
from launch.launch_description_sources import PythonLaunchDescriptionSource
from launch.substitutions import LaunchConfiguration
from launch_ros.actions import Node
from launch_ros.parameter_descriptions import ParameterValue

LAST_PLANS_S = 3.0              # for the plans of the last images, after the bag has ended
WAIT_S = 330.0                  # for the node, which waits load_timeout_s for its model


def generate_launch_description() -> LaunchDescription:
    """Player, planner and recorder; the end of the player is the end of all."""
    share = Path(get_package_share_directory("reasoning_planner"))
    arguments = [
        DeclareLaunchArgument("bag", description="path of the bag: rosbag2 or ROS 1"),
        DeclareLaunchArgument("records", default_value="plans.jsonl",
                              description="file to which plans and states are appended"),
        DeclareLaunchArgument("rate", default_value="1.0",
                              description="bag seconds per second"),
        DeclareLaunchArgument("start_offset", default_value="0.0",
                              description="seconds of the bag to skip"),
        DeclareLaunchArgument("loop", default_value="false",
                              description="true: begin again at the end, until stopped"),
        DeclareLaunchArgument("use_sim_time", default_value="true",
                              description="true: time comes from the player"),
        DeclareLaunchArgument("namespace", default_value="",
                              description="namespace of planner and recorder"),
        DeclareLaunchArgument("odometry", default_value="/localization/kinematic_state",
                              description="odometry topic, nav_msgs/Odometry"),
    ]
    planner = IncludeLaunchDescription(
        PythonLaunchDescriptionSource(str(share / "launch" / "planner.launch.py")))
    recorder = Node(
        package="reasoning_planner",
        executable="plan_recorder",
        name="plan_recorder",
        namespace=LaunchConfiguration("namespace"),
        output="screen",
        parameters=[{"records": ParameterValue(LaunchConfiguration("records"), value_type=str)}],
        remappings=[(f"~/input/{name}", f"reasoning_planner/output/{name}")
                    for name in ("trajectory", "reasoning", "status")],
    )
    player = Node(
        package="reasoning_planner",
        executable="bag_player",
        name="bag_player",
        output="screen",
        parameters=[{
            "bag": ParameterValue(LaunchConfiguration("bag"), value_type=str),
            "rate": ParameterValue(LaunchConfiguration("rate"), value_type=float),
            "start_offset_s": ParameterValue(LaunchConfiguration("start_offset"),
                                             value_type=float),
            "loop": ParameterValue(LaunchConfiguration("loop"), value_type=bool),
            # each name in a list of its own: side by side they would be joined to one text
            "wait_for_subscribers": [[LaunchConfiguration("odometry")], ["/clock"]],
            "wait_timeout_s": WAIT_S,
        }],
    )
    end = RegisterEventHandler(OnProcessExit(target_action=player, on_exit=[
        TimerAction(period=LAST_PLANS_S, actions=[Shutdown(reason="the bag has ended")])]))
    return LaunchDescription([*arguments, planner, recorder, end, player])
