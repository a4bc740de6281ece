"""Pictures of plans: paths drawn into camera images, and charts as SVG text.

Images are (H, W, 3) uint8 RGB and rectified. SVG takes its colours from CSS classes (`plan`,
`truth`, `baseline`, ...), so that one chart serves light and dark pages. Knows no records and no
bags.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from html import escape
from typing import Iterable, Optional, Sequence

import cv2
import numpy as np

from ..perception import frames
from .metrics import axes_of

NEAR_M = 1.0                     # what is closer to the image plane is cut off
RIBBON_OPACITY = 0.55
SPEED_STOPS = ((91, 61, 245), (42, 143, 232), (23, 195, 178), (155, 225, 93), (253, 231, 37))
SUBPIXEL_BITS = 4


@dataclass(frozen=True)
class Camera:
    """A rectified pinhole camera on the vehicle.

    Attributes:
        k: (3, 3) float64, pixels.
        base_from_camera: (4, 4) float64; camera axes x right, y down, z forward.
        size: image width and height, pixels.
    """

    k: np.ndarray
    base_from_camera: np.ndarray
    size: tuple[int, int]

    def scaled_to(self, image: np.ndarray) -> Camera:
        """The same camera for an (H, W, 3) image of another resolution than calibrated."""
        width, height = image.shape[1], image.shape[0]
        scale = np.array([width / self.size[0], height / self.size[1], 1.0])
        return Camera(self.k * scale[:, None], self.base_from_camera, (width, height))

    def from_fixed(self, map_from_base: np.ndarray, points: np.ndarray) -> np.ndarray:
        """(N, 3) points of the fixed frame, seen from a base pose -> (N, 3) camera frame."""
        map_from_camera = frames.compose(map_from_base, self.base_from_camera)
        return frames.transform_points(frames.inverse(map_from_camera), points)

    def project(self, points_camera: np.ndarray) -> np.ndarray:
        """(N, 3) camera frame -> (N, 2) pixels; NaN for points nearer than `NEAR_M`."""
        depth = points_camera[:, 2:3]
        visible = depth >= NEAR_M * (1.0 - 1e-9)        # clipping may round a hair below
        homogeneous = points_camera @ self.k.T
        return np.where(visible, homogeneous[:, :2] / np.where(visible, depth, 1.0), np.nan)


def clip_near(polygon: np.ndarray, closed: bool = True) -> np.ndarray:
    """Cut the part of a polygon or line in the camera frame that is nearer than `NEAR_M`.

    Args:
        polygon: (N, 3) corners in order.
        closed: whether the last corner is joined to the first.
    Returns:
        (M, 3), M = 0 when nothing is left. A line must be cut at most once (one segment).
    Source: Sutherland and Hodgman 1974, one plane.
    """
    kept: list[np.ndarray] = []
    for i, corner in enumerate(polygon):
        previous = polygon[i - 1]
        if (i > 0 or closed) and (previous[2] >= NEAR_M) != (corner[2] >= NEAR_M):
            share = (NEAR_M - previous[2]) / (corner[2] - previous[2])
            kept.append(previous + share * (corner - previous))
        if corner[2] >= NEAR_M:
            kept.append(corner)
    return np.array(kept).reshape(-1, 3)


def speed_colours(speed_mps: np.ndarray, low_mps: float, high_mps: float) -> np.ndarray:
    """(N,) -> (N, 3) uint8 RGB, from `SPEED_STOPS`; outside low..high the end colours."""
    share = (np.asarray(speed_mps) - low_mps) / max(high_mps - low_mps, 1e-9)
    stops = np.linspace(0.0, 1.0, len(SPEED_STOPS))
    channels = [np.interp(share, stops, channel) for channel in zip(*SPEED_STOPS)]
    return np.rint(np.stack(channels, axis=1)).astype(np.uint8)


def ribbon_edges(positions: np.ndarray, quaternions_xyzw: np.ndarray,
                 width_m: float) -> tuple[np.ndarray, np.ndarray]:
    """Left and right edge, (N, 3) each, of the ground a vehicle of this width covers."""
    left = axes_of(quaternions_xyzw)[:, :, 1] * (width_m / 2.0)
    return positions + left, positions - left


def draw_ribbon(image: np.ndarray, camera: Camera, left: np.ndarray, right: np.ndarray,
                colours: np.ndarray) -> np.ndarray:
    """A translucent ribbon on the ground.

    Args:
        image: (H, W, 3) uint8.
        left, right: (N, 3) edges in the camera frame.
        colours: (N, 3) uint8, of the stretch that begins at each point.
    Returns:
        (H, W, 3) uint8, a new image.
    """
    paint, mask = image.copy(), np.zeros(image.shape[:2], dtype=np.uint8)
    for i in reversed(range(len(left) - 1)):                    # far to near
        quad = clip_near(np.stack([left[i], left[i + 1], right[i + 1], right[i]]))
        if len(quad) == 0:
            continue
        corners, colour = _fixed_point(camera.project(quad)), colours[i].tolist()
        cv2.fillPoly(paint, [corners], colour, cv2.LINE_8, SUBPIXEL_BITS)
        cv2.polylines(paint, [corners], True, colour, 2, cv2.LINE_8, SUBPIXEL_BITS)
        cv2.fillPoly(mask, [corners], 255, cv2.LINE_AA, SUBPIXEL_BITS)
    opacity = mask[..., None] * (RIBBON_OPACITY / 255.0)
    blended = np.rint(image * (1.0 - opacity) + paint * opacity).astype(np.uint8)
    for edge in (left, right):
        draw_line(blended, camera, edge, colours, 1)
    return blended


def draw_line(image: np.ndarray, camera: Camera, points: np.ndarray, colours: np.ndarray,
              thickness: int) -> None:
    """A line through (N, 3) points of the camera frame, into the image; NaN points are gaps."""
    for i in range(len(points) - 1):
        segment = points[i:i + 2]
        if np.isfinite(segment).all():
            segment = clip_near(segment, closed=False)
            if len(segment) == 2:
                cv2.polylines(image, [_fixed_point(camera.project(segment))], False,
                              colours[i].tolist(), thickness, cv2.LINE_AA, SUBPIXEL_BITS)


def _fixed_point(pixels: np.ndarray) -> np.ndarray:
    """(N, 2) pixels -> int32 with `SUBPIXEL_BITS` fractional bits, as cv2 wants them."""
    scaled = np.clip(pixels, -2.0e4, 2.0e4) * (1 << SUBPIXEL_BITS)
    return np.rint(scaled).astype(np.int32)


def draw_seconds(image: np.ndarray, camera: Camera, left: np.ndarray, right: np.ndarray,
                 time_ns: np.ndarray) -> None:
    """A cross-bar with its label at each whole second of a ribbon, where it is in the image."""
    last_row = np.inf
    for i in np.flatnonzero((time_ns > 0) & (time_ns % 1_000_000_000 == 0)):
        ends = camera.project(np.stack([left[i], right[i]]))
        inside = np.isfinite(ends).all() and _in_image(ends, image.shape)
        if not inside or last_row - ends[1, 1] < 12.0:
            continue
        last_row = ends[1, 1]
        cv2.line(image, *map(tuple, _fixed_point(ends).tolist()), (255, 255, 255), 1, cv2.LINE_AA,
                 SUBPIXEL_BITS)
        label = f"{time_ns[i] // 1_000_000_000} s"
        at = tuple(np.rint(ends[1] + (5, 4)).astype(int).tolist())
        for colour, thickness in (((20, 20, 20), 3), ((255, 255, 255), 1)):
            cv2.putText(image, label, at, cv2.FONT_HERSHEY_SIMPLEX, 0.42, colour,
                        thickness, cv2.LINE_AA)


def _in_image(pixels: np.ndarray, shape: tuple[int, ...]) -> bool:
    return bool(np.all((pixels >= 0.0) & (pixels < (shape[1], shape[0]))))


def draw_plan(image: np.ndarray, camera: Camera, map_from_base: np.ndarray,
              positions: np.ndarray, quaternions_xyzw: np.ndarray, speed_mps: np.ndarray,
              time_ns: np.ndarray, truth: np.ndarray, width_m: float,
              speed_range_mps: tuple[float, float]) -> np.ndarray:
    """The planned path as a ribbon coloured by speed, the driven path as a thin white line.

    Args:
        image: (H, W, 3) uint8 RGB, taken at the pose `map_from_base`.
        positions, quaternions_xyzw, speed_mps, time_ns: (N, 3), (N, 4), (N,), (N,) of the plan.
        truth: (T, 3) driven positions in the same fixed frame; NaN where not known.
        width_m: of the vehicle.
        speed_range_mps: speeds of the first and the last colour.
    Returns:
        (H, W, 3) uint8, a new image.
    """
    left, right = (camera.from_fixed(map_from_base, edge) for edge in
                   ribbon_edges(positions, quaternions_xyzw, width_m))
    colours = speed_colours(speed_mps, *speed_range_mps)
    drawn = draw_ribbon(image, camera, left, right, colours)
    driven = camera.from_fixed(map_from_base, truth)
    for colour, thickness in ((25, 4), (255, 2)):
        draw_line(drawn, camera, driven, np.full((len(driven), 3), colour), thickness)
    draw_seconds(drawn, camera, left, right, time_ns)
    return drawn


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
