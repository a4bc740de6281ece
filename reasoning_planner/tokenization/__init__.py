"""Prompts, text and trajectory tokens. Knows no model."""
