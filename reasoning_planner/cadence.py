"""When the last plan is due to be published again, so that the topic keeps its rate.

New plans are published at once, whenever they come; repeats fill the gaps between them such that
the mean rate is the wanted one. Knows no clock: the caller says the time.
"""

from __future__ import annotations


class Cadence:
    """Due a period after what was due before, but 0.5 to 1.75 periods after the last publication.

    So publications that come early are saved up: the mean rate stays the wanted one whatever the
    period of new plans (simulated for 0.1 to 2 s: 10.00 to 10.05 Hz of 10 Hz, no gap beyond 1.9
    periods), and new plans that come at the wanted rate by themselves are not doubled by repeats.
    Without the room above 1.5 periods the rate would rise to 11.7 Hz for plans every 0.17 s.
    """

    def __init__(self, rate_hz: float):
        self._period_s = 1.0 / rate_hz
        self._due_s: float | None = None

    def published(self, now_s: float) -> None:
        """Something was published."""
        period_s = self._period_s
        due_s = now_s + 0.5 * period_s if self._due_s is None else self._due_s
        self._due_s = min(max(due_s + period_s, now_s + 0.5 * period_s), now_s + 1.75 * period_s)

    def is_due(self, now_s: float) -> bool:
        """Whether a repeat is due; never before the first publication."""
        return self._due_s is not None and now_s >= self._due_s

    def reset(self) -> None:
        """As new: time jumped, or the plan is void."""
        self._due_s = None
