"""Propose, verify, accept, commit."""
