"""Metrics, replay evaluation and reports. Nothing of the planner imports it."""
