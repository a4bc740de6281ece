"""A ROS 2 planner that reasons: see planner.py for the cycle."""
