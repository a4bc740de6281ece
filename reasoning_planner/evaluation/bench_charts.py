"""Charts of the benchmark's page as SVG text: one line a method.

Colours come from CSS classes, as in drawing.py. Knows names and numbers, no rows of bench.json.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import Sequence

from .drawing import nice_ticks

WIDTH, LABEL_WIDTH, RIGHT = 620.0, 196.0, 64.0
ROW_HEIGHT, TOP, BOTTOM = 27.0, 8.0, 42.0


@dataclass(frozen=True)
class IntervalBar:
    """A value with its interval.

    Attributes:
        label: of its line.
        css: class of the bar.
        text: shown behind it.
    """

    label: str
    value: float
    low: float
    high: float
    css: str
    text: str


def interval_chart(bars: Sequence[IntervalBar], x_label: str, title: str,
                   mark: float | None = None) -> str:
    """Bars from 0, with whiskers over their intervals, as SVG text.

    Args:
        mark: a value with a line through all bars, such as 1 for "no faster".
    """
    limit = 1.05 * max([bar.high for bar in bars] + [mark or 0.0])
    parts = _grid(len(bars), limit, x_label)
    for i, bar in enumerate(bars):
        y, middle = TOP + i * ROW_HEIGHT, TOP + (i + 0.5) * ROW_HEIGHT
        parts.append(_label(bar.label, middle))
        width = _x(bar.value, limit) - LABEL_WIDTH
        parts.append(f'<rect class="bar {bar.css}" x="{LABEL_WIDTH}" y="{y + 5:.1f}" rx="2" '
                     f'width="{width:.1f}" height="{ROW_HEIGHT - 10}">'
                     f'<title>{escape(bar.label)}: {bar.value:.2f}, 95 % interval {bar.low:.2f} '
                     f'to {bar.high:.2f}</title></rect>')
        low, high = _x(bar.low, limit), _x(bar.high, limit)
        parts.append(f'<path class="whisker" d="M{low:.1f} {middle - 5:.1f}v10M{low:.1f} '
                     f'{middle:.1f}H{high:.1f}M{high:.1f} {middle - 5:.1f}v10"/>')
        parts.append(f'<text x="{high + 7:.1f}" y="{middle + 5:.1f}">{escape(bar.text)}</text>')
    if mark is not None:
        x = _x(mark, limit)
        parts.append(f'<line class="line one" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" '
                     f'y2="{TOP + len(bars) * ROW_HEIGHT:.1f}"/>')
    return _svg(len(bars), title, parts)


@dataclass(frozen=True)
class StackedBar:
    """Amounts side by side: (css class, name, amount)."""

    label: str
    amounts: Sequence[tuple[str, str, float]]
    text: str


def stacked_chart(bars: Sequence[StackedBar], x_label: str, title: str) -> str:
    """Amounts of each line one behind the other, as SVG text."""
    limit = 1.02 * max(sum(amount for _, _, amount in bar.amounts) for bar in bars)
    parts = _grid(len(bars), limit, x_label)
    for i, bar in enumerate(bars):
        parts.append(_label(bar.label, TOP + (i + 0.5) * ROW_HEIGHT))
        total = 0.0
        for css, name, amount in bar.amounts:
            x, end = _x(total, limit), _x(total + amount, limit)
            parts.append(f'<rect class="bar {css}" x="{x:.1f}" y="{TOP + i * ROW_HEIGHT + 5:.1f}" '
                         f'width="{max(end - x, 0.0):.1f}" height="{ROW_HEIGHT - 10}"><title>'
                         f'{escape(bar.label)}, {escape(name)}: {amount:.2f}</title></rect>')
            total += amount
        parts.append(f'<text x="{_x(total, limit) + 7:.1f}" '
                     f'y="{TOP + (i + 0.5) * ROW_HEIGHT + 5:.1f}">{escape(bar.text)}</text>')
    return _svg(len(bars), title, parts)


def _x(value: float, limit: float) -> float:
    return LABEL_WIDTH + value / limit * (WIDTH - LABEL_WIDTH - RIGHT)


def _label(text: str, middle: float) -> str:
    return (f'<text class="name" x="{LABEL_WIDTH - 8}" y="{middle + 5:.1f}" '
            f'text-anchor="end">{escape(text)}</text>')


def _grid(rows: int, limit: float, x_label: str) -> list[str]:
    bottom, parts = TOP + rows * ROW_HEIGHT, []
    for tick in nice_ticks(0.0, limit, about=6):
        x = _x(tick, limit)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" '
                     f'y2="{bottom:.1f}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 17:.1f}" text-anchor="middle">'
                     f'{tick + 0.0:g}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{bottom + 36:.1f}" text-anchor="end">'
                 f'{escape(x_label)}</text>')
    return parts


def _svg(rows: int, title: str, parts: Sequence[str]) -> str:
    height = TOP + rows * ROW_HEIGHT + BOTTOM
    return (f'<svg viewBox="0 0 {WIDTH:.0f} {height:.0f}" role="img" '
            f'aria-label="{escape(title)}">{"".join(parts)}</svg>')
