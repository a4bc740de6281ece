"""Image messages to (H, W, 3) uint8 RGB arrays, and the resize in front of the vision encoder.

Knows the fields of sensor_msgs Image and CompressedImage, not their Python classes, so it runs
without ROS. What cannot be decoded raises `InputError` naming the topic, what was given and what
was expected; nothing is repaired in silence. Colour correction and undistortion are not done.
"""

from __future__ import annotations

import functools
import struct
import zlib
from dataclasses import dataclass
from typing import Any, NoReturn

import cv2
import numpy as np

from ..errors import InputError

MAX_PIXELS = 64_000_000

_BLOCK = 8                   # output rows resized by one small matrix product
_PRODUCT = 250_000           # multiplications in it: below this OpenBLAS starts no threads


@dataclass(frozen=True)
class _Packed:
    """An encoding whose rows hold whole pixels, one after another.

    Attributes:
        channels: values a pixel.
        code: OpenCV conversion to RGB; None where the bytes are RGB already.
        depth: bytes a value.
        even_width, even_height: whether pixels come in pairs.
    """

    channels: int
    code: int | None
    depth: int = 1
    even_width: bool = False
    even_height: bool = False


def _packed_encodings() -> dict[str, _Packed]:
    """ROS encoding name, lower case -> layout. Untyped 3 and 4 channels are OpenCV's BGR(A)."""
    colours = {"rgb": (3, None), "bgr": (3, cv2.COLOR_BGR2RGB), "rgba": (4, cv2.COLOR_RGBA2RGB),
               "bgra": (4, cv2.COLOR_BGRA2RGB), "mono": (1, cv2.COLOR_GRAY2RGB)}
    table = {f"{name}{8 * depth}": _Packed(channels, code, depth)
             for name, (channels, code) in colours.items() for depth in (1, 2)}
    for name, twin in (("uc1", "mono"), ("uc3", "bgr"), ("uc4", "bgra")):
        table[f"8{name}"], table[f"16{name}"] = table[f"{twin}8"], table[f"{twin}16"]
    # ROS names a mosaic by its first 2 x 2 pixels from the corner, OpenCV by the 2 x 2 pixels one
    # to the right and one down: rggb is BayerBG.
    for name, code in (("rggb", cv2.COLOR_BayerBG2RGB), ("bggr", cv2.COLOR_BayerRG2RGB),
                       ("gbrg", cv2.COLOR_BayerGR2RGB), ("grbg", cv2.COLOR_BayerGB2RGB)):
        for depth in (1, 2):
            table[f"bayer_{name}{8 * depth}"] = _Packed(1, code, depth, True, True)
    uyvy = _Packed(2, cv2.COLOR_YUV2RGB_UYVY, even_width=True)
    yuyv = _Packed(2, cv2.COLOR_YUV2RGB_YUY2, even_width=True)
    table.update(yuv422=uyvy, uyvy=uyvy, yuv422_yuy2=yuyv, yuyv=yuyv)
    return table


_PACKED = _packed_encodings()
_SEMI_PLANAR = {"nv12": cv2.COLOR_YUV2RGB_NV12, "nv21": cv2.COLOR_YUV2RGB_NV21, "nv24": None}
ENCODINGS = (*_PACKED, *_SEMI_PLANAR)

# BT.601 with luma 16..235, the conversion OpenCV applies to yuv422 and nv12: rows R, G, B.
_RGB_FROM_YUV = np.array([
    [1.164, 0.0, 1.596, -1.164 * 16.0 - 1.596 * 128.0],
    [1.164, -0.391, -0.813, -1.164 * 16.0 + (0.391 + 0.813) * 128.0],
    [1.164, 2.018, 0.0, -1.164 * 16.0 - 2.018 * 128.0]])


@dataclass(frozen=True)
class RawImage:
    """The fields of a sensor_msgs Image, undecoded; `data` is any contiguous buffer."""

    encoding: str
    height: int
    width: int
    step: int
    is_bigendian: bool
    data: Any

    def decode(self, topic: str = "") -> np.ndarray:
        """(H, W, 3) uint8 RGB; see `decode_image`."""
        return decode_image(self.encoding, self.height, self.width, self.step,
                            self.is_bigendian, self.data, topic)


@dataclass(frozen=True)
class RawCompressed:
    """The fields of a sensor_msgs CompressedImage, undecoded; `data` is any contiguous buffer."""

    format: str
    data: Any

    def decode(self, topic: str = "") -> np.ndarray:
        """(H, W, 3) uint8 RGB; see `decode_compressed`."""
        return decode_compressed(self.format, self.data, topic)


def decode_image(encoding: str, height: int, width: int, step: int, is_bigendian: bool,
                 data: Any, topic: str = "") -> np.ndarray:
    """Decode the fields of a sensor_msgs Image.

    Args:
        encoding: one of `ENCODINGS`, in any case. 8UC3 and 8UC4 are taken as bgr8 and bgra8,
            8UC1 and 16UC1 as mono. 16-bit values keep their upper 8 bits. YUV is BT.601, luma
            16..235. For nv12, nv21 and nv24 `step` is that of the luma plane.
        height, width: pixels.
        step: bytes from one row to the next, padding included.
        is_bigendian: byte order of 16-bit values.
        data: contiguous buffer of at least step * height bytes (nv12, nv21: half as much again;
            nv24: three times).
        topic: named in errors.
    Returns:
        (height, width, 3) uint8 RGB. For rgb8 a view of `data`, which may be read-only and, with
        padding, not contiguous; otherwise a new array.
    Raises:
        InputError: the fields contradict each other, or the encoding is not known.
    """
    _check_size(height, width, topic)
    buffer = _bytes_of(data, topic)
    name = str(encoding).lower()
    if name in _PACKED:
        return _decode_packed(name, height, width, step, bool(is_bigendian), buffer, topic)
    if name in _SEMI_PLANAR:
        return _decode_semi_planar(name, height, width, step, buffer, topic)
    _refuse(topic, f"encoding {encoding!r}, expected one of {', '.join(ENCODINGS)}")


def decode_compressed(format: str, data: Any, topic: str = "") -> np.ndarray:
    """Decode the fields of a sensor_msgs CompressedImage: whole JPEG or PNG files.

    Args:
        format: as image_transport writes it, "bgr8; jpeg compressed bgr8"; may be empty. The data
            decide what the file is. Only two parts of the text count: "compressed rgb" says that
            the file's red and blue are exchanged, and a leading bayer encoding that a one-channel
            file is a mosaic.
        data: contiguous buffer with the file.
        topic: named in errors.
    Returns:
        (H, W, 3) uint8 RGB; transparency is dropped, 16 bits a channel become 8.
    Raises:
        InputError: neither JPEG nor PNG, cut short, damaged, or over `MAX_PIXELS`.
    """
    content = _bytes_of(data, topic)
    header = content[:8].tobytes()
    if header.startswith(b"\xff\xd8"):
        size = _jpeg_size(content.tobytes(), topic)
    elif header == b"\x89PNG\r\n\x1a\n":
        size = _png_size(content.tobytes(), topic)
    else:
        _refuse(topic, f"{len(content)} bytes of format {format!r} starting with {header.hex()!r},"
                       " expected a JPEG (ffd8) or PNG (89504e47) file")
    try:
        image = cv2.imdecode(content, cv2.IMREAD_UNCHANGED)
    except cv2.error as error:
        _refuse(topic, f"damaged image of format {format!r}: {' '.join(str(error).split())}")
    if image is None or image.shape[:2] != size:
        _refuse(topic, f"damaged image of format {format!r}, {len(content)} bytes, "
                       f"expected {size[0]} x {size[1]} pixels")
    return _rgb_from_file(image, str(format).lower())


def resize_for_model(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resize as the target's processor does: bicubic, widened to antialias when shrinking.

    The kernel is Keys' cubic with a = -0.5, stretched by the reduction, as in Pillow and in
    torchvision with antialias. Measured against Pillow, 1080 x 1920 -> 320 x 576, textured image
    with hard lines: mean difference 0.2 of 255, at most 6 (Pillow narrows the width first and
    clips between), in 10 ms against Pillow's 20. OpenCV's INTER_AREA takes 9 ms and is 0.8 off,
    its INTER_CUBIC does not antialias and is 3.9 off.

    Args:
        image: (H, W, 3) uint8.
        height, width: wanted pixels.
    Returns:
        (height, width, 3) uint8; `image` itself when it has that size already.
    Source: Keys 1981, "Cubic convolution interpolation for digital image processing".
    """
    assert image.ndim == 3 and image.shape[2] == 3 and image.dtype == np.uint8, image.shape
    if image.shape[:2] == (height, width):
        return image
    columns = _resize_rows(image, height)                          # (height, W, 3)
    rows = _resize_rows(cv2.transpose(columns), width)             # (width, height, 3)
    return cv2.transpose(rows)


def _refuse(topic: str, text: str) -> NoReturn:
    raise InputError(f"{topic or 'image'}: {text}")


def _check_size(height: int, width: int, topic: str) -> None:
    if height <= 0 or width <= 0 or height * width > MAX_PIXELS:
        _refuse(topic, f"{height} x {width} pixels, expected 1 to {MAX_PIXELS} in all")


def _bytes_of(data: Any, topic: str) -> np.ndarray:
    """(N,) uint8 view of any contiguous buffer."""
    try:
        return np.frombuffer(data, dtype=np.uint8)
    except (TypeError, ValueError, BufferError) as error:
        if hasattr(data, "__len__") and len(data) == 0:
            return np.empty(0, dtype=np.uint8)
        _refuse(topic, f"data is {type(data).__name__}, expected a contiguous buffer ({error})")


def _check_rows(buffer: np.ndarray, rows: int, row_bytes: int, step: int, topic: str) -> None:
    if step < row_bytes:
        _refuse(topic, f"step {step}, expected at least {row_bytes} bytes a row")
    if buffer.size < step * rows:
        _refuse(topic, f"data has {buffer.size} bytes, expected at least {step * rows} "
                       f"(step {step} x {rows} rows)")


def _decode_packed(name: str, height: int, width: int, step: int, is_bigendian: bool,
                   buffer: np.ndarray, topic: str) -> np.ndarray:
    layout = _PACKED[name]
    if (layout.even_width and width % 2) or (layout.even_height and height % 2):
        _refuse(topic, f"{name} of {height} x {width} pixels, expected even sizes")
    row_bytes = width * layout.channels * layout.depth
    _check_rows(buffer, height, row_bytes, step, topic)
    rows = buffer[:step * height].reshape(height, step)[:, :row_bytes]
    if layout.depth == 2:                                          # keep the upper bytes
        rows = rows[:, (0 if is_bigendian else 1)::2]
    pixels = rows.reshape(height, width, layout.channels)
    if layout.code is None:
        return pixels if layout.depth == 1 else np.ascontiguousarray(pixels)
    if name.startswith("bayer_"):
        return _demosaic(pixels[:, :, 0], layout.code)
    return cv2.cvtColor(np.ascontiguousarray(pixels), layout.code)


def _demosaic(mosaic: np.ndarray, code: int) -> np.ndarray:
    """(H, W) uint8 -> (H, W, 3) uint8 RGB, bilinear; two mirrored pixels keep the border right."""
    padded = cv2.copyMakeBorder(np.ascontiguousarray(mosaic), 2, 2, 2, 2, cv2.BORDER_REFLECT_101)
    return np.ascontiguousarray(cv2.cvtColor(padded, code)[2:-2, 2:-2])


def _decode_semi_planar(name: str, height: int, width: int, step: int, buffer: np.ndarray,
                        topic: str) -> np.ndarray:
    """A luma plane, then one of interleaved chroma: at half size, or for nv24 at full size."""
    full = name == "nv24"
    if not full and (width % 2 or height % 2):
        _refuse(topic, f"{name} of {height} x {width} pixels, expected even sizes")
    rows = 3 * height if full else height + height // 2            # of luma's step
    if step in (width * 3 // 2, 2 * width) and buffer.size == rows * width:
        step = width             # drivers that state bytes / height, or 2 channels, yet pack
    _check_rows(buffer, rows, width, step, topic)
    planes = buffer[:step * rows].reshape(rows, step)
    if not full:
        return cv2.cvtColor(np.ascontiguousarray(planes[:, :width]), _SEMI_PLANAR[name])
    luma = planes[:height, :width, None]
    chroma = planes[height:].reshape(height, 2 * step)[:, :2 * width].reshape(height, width, 2)
    return cv2.transform(np.concatenate([luma, chroma], axis=2), _RGB_FROM_YUV)


def _jpeg_size(content: bytes, topic: str) -> tuple[int, int]:
    """Height and width out of the frame header; refuses a file without an end-of-image marker.

    Decoders fill what is missing with grey and say nothing, so the end is looked for here: inside
    the scan a data byte ff is always followed by 00, so ffd9 behind it can only be the marker.
    """
    size, position = None, 2
    while position + 4 <= len(content) and content[position] == 0xFF:
        marker = content[position + 1]
        if marker == 0xFF or marker == 0x01 or 0xD0 <= marker <= 0xD7:
            position += 1 if marker == 0xFF else 2
            continue
        length = struct.unpack_from(">H", content, position + 2)[0]
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC) and length >= 7:
            if position + 9 > len(content):
                break
            size = struct.unpack_from(">HH", content, position + 5)
            _check_size(*size, topic)
        if marker == 0xDA and size is not None:
            if content.find(b"\xff\xd9", position) < 0:
                break
            return size
        position += 2 + max(length, 2)
    _refuse(topic, f"truncated or damaged JPEG of {len(content)} bytes, "
                   "expected headers, a scan and the end marker ffd9")


def _png_size(content: bytes, topic: str) -> tuple[int, int]:
    """Height and width out of IHDR; refuses a file with a broken checksum or without IEND."""
    size, position = None, 8
    while position + 12 <= len(content):
        length, kind = struct.unpack_from(">I4s", content, position)
        end = position + 12 + length
        if end > len(content):
            break
        if kind == b"IHDR" and length >= 8:
            width, height = struct.unpack_from(">II", content, position + 8)
            _check_size(height, width, topic)
            size = (height, width)
        checksum = struct.unpack_from(">I", content, end - 4)[0]
        if zlib.crc32(memoryview(content)[position + 4:end - 4]) != checksum:
            _refuse(topic, f"damaged PNG: chunk {kind!r} has a wrong checksum")
        if kind == b"IEND" and size is not None:
            return size
        position = end
    _refuse(topic, f"truncated or damaged PNG of {len(content)} bytes, "
                   "expected chunks from IHDR to IEND")


def _rgb_from_file(image: np.ndarray, format: str) -> np.ndarray:
    """What imdecode gave, (H, W) or (H, W, 1, 3 or 4), 8 or 16 bits -> (H, W, 3) uint8 RGB."""
    if image.dtype == np.uint16:
        image = (image >> 8).astype(np.uint8)
    if image.ndim == 3 and image.shape[2] == 1:
        image = image[:, :, 0]
    if image.ndim == 2:
        layout = _PACKED.get(format.split(";")[0].strip())
        mosaic = format.startswith("bayer_") and layout is not None
        return (_demosaic(image, layout.code) if mosaic
                else cv2.cvtColor(image, cv2.COLOR_GRAY2RGB))
    if "compressed rgb" in format:
        return np.ascontiguousarray(image[:, :, :3])
    return cv2.cvtColor(image, cv2.COLOR_BGR2RGB if image.shape[2] == 3 else cv2.COLOR_BGRA2RGB)


def _resize_rows(image: np.ndarray, n_out: int) -> np.ndarray:
    """(H, W, 3) uint8 -> (n_out, W, 3) uint8, in matrix products too small for BLAS threads.

    Measured with threads, in a container that is lent 2 cores: 40 ms and 0.8 s of processor time,
    spent spinning, instead of 10 ms.
    """
    flat = np.ascontiguousarray(image).reshape(image.shape[0], -1)
    out = np.empty((n_out, flat.shape[1]), dtype=np.uint8)
    for start, first, weights in _row_blocks(image.shape[0], n_out):
        source = flat[first:first + weights.shape[1]].astype(np.float32)
        rows = np.empty((weights.shape[0], flat.shape[1]), dtype=np.float32)
        width = max(_PRODUCT // weights.size, 1)
        for left in range(0, flat.shape[1], width):
            np.matmul(weights, source[:, left:left + width], out=rows[:, left:left + width])
        rows += 0.5                                                # then the cast rounds
        np.clip(rows, 0.0, 255.0, out=rows)
        out[start:start + weights.shape[0]] = rows
    return out.reshape(n_out, *image.shape[1:])


@functools.lru_cache(maxsize=32)
def _row_blocks(n_in: int, n_out: int) -> tuple[tuple[int, int, np.ndarray], ...]:
    """For every block of output rows: its first row, its first input row, and the weights.

    Weights are (rows of the block, input rows) float32, each row summing to 1; a tap outside the
    image is left out and the rest scaled up.
    """
    stretch = max(n_in / n_out, 1.0)
    centres = (np.arange(n_out) + 0.5) * (n_in / n_out) - 0.5
    blocks = []
    for start in range(0, n_out, _BLOCK):
        block = centres[start:start + _BLOCK]
        first = max(int(np.floor(block[0] - 2.0 * stretch)), 0)
        stop = min(int(np.ceil(block[-1] + 2.0 * stretch)) + 1, n_in)
        weights = _cubic((np.arange(first, stop)[None, :] - block[:, None]) / stretch)
        weights /= weights.sum(axis=1, keepdims=True)
        blocks.append((start, first, weights.astype(np.float32)))
    return tuple(blocks)


def _cubic(x: np.ndarray) -> np.ndarray:
    """Keys' kernel with a = -0.5; zero beyond 2."""
    x = np.abs(x)
    near = (1.5 * x - 2.5) * x * x + 1.0
    far = ((-0.5 * x + 2.5) * x - 4.0) * x + 2.0
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))
