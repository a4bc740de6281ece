"""Pictures for pages: images as data URIs, and charts as SVG text.

SVG takes its colours from CSS classes (`plan`, `truth`, `baseline`, ...), so that one chart serves
light and dark pages. Knows no records and no bags.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from html import escape
from typing import Iterable, Optional, Sequence

import cv2
import numpy as np


def jpeg_uri(image: np.ndarray, max_width: int = 1100, quality: int = 80) -> str:
    """(H, W, 3) uint8 RGB -> a data URI for an <img>, scaled down to `max_width`."""
    if image.shape[1] > max_width:
        height = round(image.shape[0] * max_width / image.shape[1])
        image = cv2.resize(image, (max_width, height), interpolation=cv2.INTER_AREA)
    done, data = cv2.imencode(".jpg", cv2.cvtColor(image, cv2.COLOR_RGB2BGR),
                              [cv2.IMWRITE_JPEG_QUALITY, quality])
    assert done, f"JPEG encoder refused an image of shape {image.shape}"
    return "data:image/jpeg;base64," + base64.b64encode(data.tobytes()).decode("ascii")


# Charts. Sizes are SVG units; pages scale the whole chart to the column's width.

MARGIN_LEFT, MARGIN_RIGHT, MARGIN_TOP, MARGIN_BOTTOM = 52.0, 14.0, 30.0, 50.0


@dataclass(frozen=True)
class Series:
    """One line (or row of dots) of a chart: (N,) values, NaN leaves a gap."""

    x: np.ndarray
    y: np.ndarray
    css: str
    dots: bool = False


@dataclass(frozen=True)
class Plot:
    """The rectangle a chart is drawn in: data ranges and how they fall on SVG units."""

    x_range: tuple[float, float]
    y_range: tuple[float, float]
    width: float
    height: float

    def x(self, value: np.ndarray) -> np.ndarray:
        """Data to SVG units, to the right."""
        return MARGIN_LEFT + (value - self.x_range[0]) / (self.x_range[1] - self.x_range[0]) * (
            self.width - MARGIN_LEFT - MARGIN_RIGHT)

    def y(self, value: np.ndarray) -> np.ndarray:
        """Data to SVG units, upwards."""
        return self.height - MARGIN_BOTTOM - (value - self.y_range[0]) / (
            self.y_range[1] - self.y_range[0]) * (self.height - MARGIN_TOP - MARGIN_BOTTOM)


def nice_ticks(low: float, high: float, about: int = 5) -> np.ndarray:
    """Multiples of 1, 2 or 5 times a power of ten inside low..high."""
    raw = max(high - low, 1e-9) / max(about, 1)
    power = 10.0 ** np.floor(np.log10(raw))
    step = next(s * power for s in (1.0, 2.0, 5.0, 10.0) if s * power >= raw * 0.999)
    ticks = np.arange(np.ceil(low / step - 1e-9), np.floor(high / step + 1e-9) + 1) * step
    return np.round(ticks, 10)


def padded(values: Iterable[np.ndarray], include: Sequence[float] = (),
           least: float = 1.0) -> tuple[float, float]:
    """A range around all finite values, 5 % wider, at least `least` wide."""
    flat = np.concatenate([np.ravel(v) for v in values] + [np.asarray(include, dtype=float)])
    flat = flat[np.isfinite(flat)]
    low, high = (flat.min(), flat.max()) if flat.size else (0.0, least)
    spare = max(0.05 * (high - low), (least - (high - low)) / 2.0)
    return float(low - spare), float(high + spare)


def line_chart(series: Sequence[Series], x_label: str, y_label: str, title: str,
               x_range: Optional[tuple[float, float]] = None,
               y_range: Optional[tuple[float, float]] = None,
               size: tuple[float, float] = (560.0, 320.0)) -> str:
    """Lines over two axes, as SVG text; what lies outside of the given ranges is left out."""
    plot = Plot(x_range or padded([s.x for s in series]), y_range or padded([s.y for s in series]),
                *size)
    return _svg(plot, title, _axes(plot, x_label, y_label) + [_line(plot, s) for s in series])


def map_chart(series: Sequence[Series], x_label: str, y_label: str, title: str,
              marks: Sequence[tuple[float, float, str]] = (), width: float = 560.0,
              height_range: tuple[float, float] = (240.0, 560.0),
              framed: Optional[Series] = None) -> str:
    """Lines over two axes of equal scale, with labelled marks (x, y, text), as SVG text.

    The map shows all series, or the surroundings of `framed`.
    """
    shown = series if framed is None else [framed]
    x_range, y_range = (padded([getattr(s, axis) for s in shown], least=12.0) for axis in "xy")
    inner = width - MARGIN_LEFT - MARGIN_RIGHT
    ideal = inner * (y_range[1] - y_range[0]) / (x_range[1] - x_range[0])
    height = float(np.clip(ideal + MARGIN_TOP + MARGIN_BOTTOM, *height_range))
    scale = max((x_range[1] - x_range[0]) / inner,
                (y_range[1] - y_range[0]) / (height - MARGIN_TOP - MARGIN_BOTTOM))
    plot = Plot(_widened(x_range, scale * inner),
                _widened(y_range, scale * (height - MARGIN_TOP - MARGIN_BOTTOM)), width, height)
    parts = _axes(plot, x_label, y_label) + [_line(plot, s) for s in series]
    for x, y, text in marks:
        parts.append(f'<g class="mark"><circle cx="{plot.x(x):.1f}" cy="{plot.y(y):.1f}" r="10"/>'
                     f'<text x="{plot.x(x):.1f}" y="{plot.y(y) + 4.5:.1f}">{escape(text)}</text>'
                     '</g>')
    return _svg(plot, title, parts)


def _widened(limits: tuple[float, float], length: float) -> tuple[float, float]:
    middle = (limits[0] + limits[1]) / 2.0
    return middle - length / 2.0, middle + length / 2.0


def histogram(values: np.ndarray, x_label: str, title: str, css: str, bins: int = 24,
              height: float = 240.0) -> str:
    """Counts of (N,) values, N > 0, as SVG text."""
    counts, edges = np.histogram(values, bins=bins, range=padded([values], [0.0], least=1e-3))
    plot = Plot((float(max(edges[0], 0.0)), float(edges[-1])), (0.0, counts.max() * 1.08),
                560.0, height)
    bars = []
    for count, low, high in zip(counts, edges, edges[1:]):
        if count:
            x, top = plot.x(max(low, 0.0)), plot.y(count)
            bars.append(f'<rect class="bar {css}" x="{x + 0.5:.1f}" y="{top:.1f}" '
                        f'width="{plot.x(high) - x - 1:.1f}" height="{plot.y(0) - top:.1f}">'
                        f'<title>{low:.2f} to {high:.2f}: {count}</title></rect>')
    return _svg(plot, title, _axes(plot, x_label, "count", y_ticks=3) + bars)


def time_strip(rows: Sequence[tuple[str, Sequence[tuple[float, float, str, str]]]],
               x_range: tuple[float, float], x_label: str, title: str) -> str:
    """Rows of cells over time, as SVG text.

    Args:
        rows: (name, cells); a cell is (start, end, css class, text shown on hovering).
    """
    row_height, width, label_height = 22.0, 1160.0, 18.0
    height = 12.0 + len(rows) * (row_height + label_height + 8.0) + MARGIN_BOTTOM
    plot = Plot(x_range, (0.0, 1.0), width, height)
    ticks = nice_ticks(*x_range, about=8)
    parts = [_tick_label(plot.x(t), height - 26.0, t, ticks, "middle") for t in ticks]
    parts.append(f'<text class="axis" x="{width - MARGIN_RIGHT}" y="{height - 6}" '
                 f'text-anchor="end">{escape(x_label)}</text>')
    for i, (name, cells) in enumerate(rows):
        top = 6.0 + i * (row_height + label_height + 8.0)
        parts.append(f'<text class="axis" x="{MARGIN_LEFT}" y="{top + 12}">{escape(name)}</text>')
        for start, end, css, text in cells:
            x = plot.x(start)
            parts.append(
                f'<rect class="{css}" x="{x:.1f}" y="{top + label_height:.1f}" '
                f'width="{max(plot.x(end) - x - 1.0, 1.5):.1f}" height="{row_height}" rx="2">'
                f'<title>{escape(text)}</title></rect>')
    return _svg(plot, title, parts)


def _svg(plot: Plot, title: str, parts: Sequence[str]) -> str:
    return (f'<svg viewBox="0 0 {plot.width:.0f} {plot.height:.0f}" role="img" '
            f'aria-label="{escape(title)}">' + "".join(parts) + "</svg>")


def _axes(plot: Plot, x_label: str, y_label: str, y_ticks: int = 5) -> list[str]:
    parts = []
    left, right = MARGIN_LEFT, plot.width - MARGIN_RIGHT
    bottom = plot.height - MARGIN_BOTTOM
    ys = nice_ticks(*plot.y_range, about=min(y_ticks, int(plot.height / 45)))
    for value in ys:
        y = plot.y(value)
        parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_tick_label(left - 8, y + 5, value, ys, "end"))
    xs = nice_ticks(*plot.x_range, about=min(7, int(plot.width / 65)))
    for value in xs:
        x = plot.x(value)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{MARGIN_TOP}" '
                     f'y2="{bottom}"/>')
        parts.append(_tick_label(x, bottom + 19, value, xs, "middle"))
    parts.append(f'<text class="axis" x="{right}" y="{plot.height - 6}" text-anchor="end">'
                 f'{escape(x_label)}</text>')
    parts.append(f'<text class="axis" x="4" y="16">{escape(y_label)}</text>')
    return parts


def _tick_label(x: float, y: float, value: float, ticks: np.ndarray, anchor: str) -> str:
    step = ticks[1] - ticks[0] if len(ticks) > 1 else abs(value) or 1.0
    decimals = max(0, int(-np.floor(np.log10(step) + 1e-9)))
    return (f'<text class="tick" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">'
            f'{value + 0.0:.{decimals}f}</text>')


def _line(plot: Plot, series: Series) -> str:
    x, y = plot.x(np.asarray(series.x, float)), plot.y(np.asarray(series.y, float))
    known = np.isfinite(x) & np.isfinite(y) & (x >= MARGIN_LEFT - 0.5) & (
        x <= plot.width - MARGIN_RIGHT + 0.5) & (y >= MARGIN_TOP - 0.5) & (
        y <= plot.height - MARGIN_BOTTOM + 0.5)
    if series.dots:
        return "".join(f'<circle class="{series.css}" cx="{a:.1f}" cy="{b:.1f}" r="4"/>'
                       for a, b in zip(x[known], y[known]))
    begins = known & ~np.concatenate([[False], known[:-1]])
    path = "".join(f'{"M" if begin else "L"}{a:.1f} {b:.1f}'
                   for a, b, begin in zip(x[known], y[known], begins[known]))
    return f'<path class="line {series.css}" d="{path}"/>'
