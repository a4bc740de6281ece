"""The exceptions raised at the planner's boundaries: messages, files, configuration, models.

A fault that a running vehicle must survive (a late camera, a NaN, a missed deadline) is not an
exception but a typed result: see `Refusal` in `datatypes.py`.
"""

from __future__ import annotations


class PlannerError(Exception):
    """Base of every error this package raises on purpose; its text is one line for the user."""


class ConfigError(PlannerError):
    """A parameter is unknown, of the wrong type or out of range.

    `problems` holds one line for each wrong parameter, so that all are seen at once.
    """

    def __init__(self, problems: list[str]):
        self.problems = list(problems)
        super().__init__("; ".join(self.problems))


class InputError(PlannerError):
    """One message or array from outside cannot be used; the text names it and says why."""


class DataError(PlannerError):
    """A file (bag, checkpoint, manifest, calibration) is missing, damaged or not as claimed."""


class ModelError(PlannerError):
    """A model, engine or graph cannot be loaded or does not fit the checkpoint at hand."""


class MissingDependencyError(PlannerError):
    """An optional part is not installed; the text says which and how to get it."""
