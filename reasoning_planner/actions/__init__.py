"""Controls, paths, limits and the kinematic planner."""
