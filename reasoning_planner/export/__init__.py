"""Graphs and engines out of checkpoints."""
