"""Training commands. Nothing of the planner imports it."""
