"""Start planner_node as a trajectory generator of Autoware.

ros2 launch reasoning_planner autoware.launch.py [ARGUMENT:=VALUE ...]

Takes the arguments of planner.launch.py as well. Its candidates are where the generators' are,
/planning/generator/NAME/candidate_trajectories, for the trajectory selection and processing.
"""

from pathlib import Path

from ament_index_python.packages import get_package_share_directory
from launch import LaunchDescription
from launch.actions import DeclareLaunchArgument, GroupAction, IncludeLaunchDescription
from launch.launch_description_sources import PythonLaunchDescriptionSource
from launch.substitutions import LaunchConfiguration
from launch_ros.actions import SetRemap

ROUTE = "/planning/mission_planning/route"
OUTPUTS = ("~/output/trajectory", "~/output/candidate_trajectories")


def generate_launch_description() -> LaunchDescription:
    """planner.launch.py with Autoware's messages and names."""
    share = Path(get_package_share_directory("reasoning_planner"))
    base = ["/planning/generator/", LaunchConfiguration("generator")]
    remaps = [SetRemap(src=topic, dst=[*base, topic.removeprefix("~/output")])
              for topic in OUTPUTS]
    planner = IncludeLaunchDescription(
        PythonLaunchDescriptionSource(str(share / "launch" / "planner.launch.py")),
        launch_arguments={"output_format": "autoware",
                          "route_source": LaunchConfiguration("route_source")}.items())
    return LaunchDescription([
        DeclareLaunchArgument("generator", default_value="reasoning_planner",
                              description="name of the generator in topics"),
        DeclareLaunchArgument("route", default_value=ROUTE,
                              description="route topic, autoware_planning_msgs/LaneletRoute"),
        DeclareLaunchArgument("route_source", default_value="parameter",
                              description="lanelet_route: read the route topic, for a checkpoint "
                                          "whose prompt has a place for it"),
        GroupAction([*remaps, SetRemap(src="~/input/route", dst=LaunchConfiguration("route")),
                     planner]),
    ])
