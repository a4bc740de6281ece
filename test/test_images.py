"""Image decoding: every encoding against a known picture, and every malformed message refused."""

import array
import struct
import zlib

import cv2
import numpy as np
import pytest

from reasoning_planner.errors import InputError
from reasoning_planner.perception import images

TOPIC = "/camera/front/image_raw"
HEIGHT, WIDTH = 12, 16
RED, GREEN, BLUE, GREY = (200, 30, 20), (25, 180, 40), (30, 50, 210), (90, 90, 90)


def picture():
    """(12, 16, 3) uint8 RGB: four flat quarters; chroma and mosaics lose nothing inside them."""
    image = np.empty((HEIGHT, WIDTH, 3), np.uint8)
    image[:6, :8], image[:6, 8:], image[6:, :8], image[6:, 8:] = RED, GREEN, BLUE, GREY
    return image


def noise(height=HEIGHT, width=WIDTH, channels=3):
    return np.random.default_rng(1).integers(0, 256, (height, width, channels), dtype=np.uint8)


def padded(rows, padding):
    """(H, row bytes) uint8 -> the message's step and data."""
    rows = rows.reshape(rows.shape[0], -1)
    filled = np.pad(rows, ((0, 0), (0, padding)), constant_values=0xAB)
    return filled.shape[1], filled.tobytes()


def decode(encoding, rows, padding=0, big=False, height=HEIGHT, width=WIDTH, wrap=bytes):
    step, data = padded(np.ascontiguousarray(rows).view(np.uint8), padding)
    return images.decode_image(encoding, height, width, step, big, wrap(data), TOPIC)


def away_from_edges(image):
    """The insides of the four quarters: a mosaic or half-size chroma blends across their edges."""
    return np.stack([image[r:r + 2, c:c + 4] for r in (2, 8) for c in (2, 10)])


padding = pytest.mark.parametrize("padding", [0, 7, 64])


@padding
@pytest.mark.parametrize("encoding, channels", [
    ("rgb8", [0, 1, 2]), ("bgr8", [2, 1, 0]), ("rgba8", [0, 1, 2, 3]), ("bgra8", [2, 1, 0, 3]),
    ("8UC3", [2, 1, 0]), ("8UC4", [2, 1, 0, 3]), ("RGB8", [0, 1, 2])])
def test_eight_bit_colour_is_exact(encoding, channels, padding):
    image = noise(channels=4)
    decoded = decode(encoding, image[:, :, channels], padding)
    assert decoded.dtype == np.uint8
    np.testing.assert_array_equal(decoded, image[:, :, :3])


@padding
@pytest.mark.parametrize("big", [False, True])
@pytest.mark.parametrize("encoding, channels", [
    ("rgb16", [0, 1, 2]), ("bgr16", [2, 1, 0]), ("16UC3", [2, 1, 0]), ("bgra16", [2, 1, 0, 3])])
def test_sixteen_bit_colour_keeps_the_upper_byte(encoding, channels, big, padding):
    image = noise(channels=4)
    wide = (image.astype(np.uint16) << 8 | 0x7F).astype(">u2" if big else "<u2")
    decoded = decode(encoding, wide[:, :, channels], padding, big)
    np.testing.assert_array_equal(decoded, image[:, :, :3])


@padding
@pytest.mark.parametrize("encoding", ["mono8", "8UC1"])
def test_mono8(encoding, padding):
    grey = noise(channels=1)
    np.testing.assert_array_equal(decode(encoding, grey, padding), np.repeat(grey, 3, axis=2))


@padding
@pytest.mark.parametrize("big", [False, True])
@pytest.mark.parametrize("encoding", ["mono16", "16UC1"])
def test_mono16_in_both_byte_orders(encoding, big, padding):
    grey = noise(channels=1)
    wide = (grey.astype(np.uint16) << 8 | 0xF0).astype(">u2" if big else "<u2")
    np.testing.assert_array_equal(decode(encoding, wide, padding, big),
                                  np.repeat(grey, 3, axis=2))


@padding
@pytest.mark.parametrize("depth", [8, 16])
@pytest.mark.parametrize("order", ["rggb", "bggr", "gbrg", "grbg"])
def test_bayer_order_is_that_of_the_top_left_corner(order, depth, padding):
    image = picture()
    mosaic = np.empty((HEIGHT, WIDTH), np.uint8)
    for place, colour in enumerate(order):
        row, column = divmod(place, 2)
        mosaic[row::2, column::2] = image[row::2, column::2, "rgb".index(colour)]
    rows = mosaic if depth == 8 else mosaic.astype("<u2") << 8
    decoded = decode(f"bayer_{order}{depth}", rows, padding)
    np.testing.assert_array_equal(away_from_edges(decoded), away_from_edges(image))
    np.testing.assert_array_equal(decoded[0, 0], RED)          # no dark border
    np.testing.assert_array_equal(decoded[-1, -1], GREY)


def test_the_smallest_mosaic_is_not_black():
    mosaic = np.array([[RED[0], RED[1]], [RED[1], RED[2]]], np.uint8)
    decoded = decode("bayer_rggb8", mosaic, height=2, width=2)
    np.testing.assert_array_equal(decoded, np.broadcast_to(np.uint8(RED), (2, 2, 3)))


def luma_chroma(image):
    """BT.601, luma 16..235, by the standard's own coefficients: (H, W) y, u, v as uint8."""
    red, green, blue = np.moveaxis(image.astype(float), -1, 0)
    y = 16.0 + (65.481 * red + 128.553 * green + 24.966 * blue) / 255.0
    u = 128.0 + (-37.797 * red - 74.203 * green + 112.0 * blue) / 255.0
    v = 128.0 + (112.0 * red - 93.786 * green - 18.214 * blue) / 255.0
    return [np.rint(plane).astype(np.uint8) for plane in (y, u, v)]


def assert_near(decoded, image):
    assert decoded.shape == image.shape and decoded.dtype == np.uint8
    difference = away_from_edges(decoded).astype(int) - away_from_edges(image)
    assert np.abs(difference).max() <= 3


@padding
@pytest.mark.parametrize("encoding", ["yuv422", "uyvy", "yuv422_yuy2", "yuyv"])
def test_packed_yuv(encoding, padding):
    y, u, v = luma_chroma(picture())
    chroma = np.where(np.arange(WIDTH) % 2 == 0, u, v)
    pair = (chroma, y) if encoding in ("yuv422", "uyvy") else (y, chroma)
    assert_near(decode(encoding, np.stack(pair, axis=2), padding), picture())


@padding
@pytest.mark.parametrize("encoding", ["nv12", "nv21", "nv24"])
def test_semi_planar_yuv(encoding, padding):
    y, u, v = luma_chroma(picture())
    pair = np.stack((v, u) if encoding == "nv21" else (u, v), axis=2)
    if encoding == "nv24":
        step, luma = padded(y, padding)
        chroma = padded(pair, 2 * padding)[1]
    else:
        step, luma = padded(y, padding)
        chroma = padded(pair[::2, ::2], padding)[1]
    decoded = images.decode_image(encoding, HEIGHT, WIDTH, step, False, luma + chroma, TOPIC)
    assert_near(decoded, picture())


@pytest.mark.parametrize("step", [WIDTH, WIDTH * 3 // 2, WIDTH * 2])
def test_drivers_that_misstate_the_step_of_nv12(step):
    y, u, v = luma_chroma(picture())
    data = y.tobytes() + np.stack((u, v), axis=2)[::2, ::2].tobytes()
    assert_near(images.decode_image("nv12", HEIGHT, WIDTH, step, False, data, TOPIC), picture())


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview,
                                  lambda data: array.array("B", data),
                                  lambda data: np.frombuffer(data, np.uint8)])
def test_any_buffer_will_do_and_rgb8_is_not_copied(wrap):
    step, data = padded(noise(), 8)
    data = wrap(data)
    decoded = images.decode_image("rgb8", HEIGHT, WIDTH, step, False, data, TOPIC)
    np.testing.assert_array_equal(decoded, noise())
    assert np.shares_memory(decoded, np.frombuffer(data, np.uint8))


@pytest.mark.parametrize("encoding, height, width, step, size, words", [
    ("bgr8", 12, 16, 48, 575, ["575 bytes", "576", "step 48"]),
    ("bgr8", 12, 16, 48, 0, ["0 bytes"]),
    ("bgr8", 12, 16, 47, 576, ["step 47", "48"]),
    ("bgr8", 12, 16, 0, 576, ["step 0"]),
    ("mono16", 12, 16, 16, 576, ["step 16", "32"]),
    ("nv12", 12, 16, 16, 287, ["287 bytes", "288"]),
    ("nv24", 12, 16, 16, 575, ["575 bytes", "576"]),
    ("nv12", 12, 15, 16, 999, ["even"]),
    ("yuyv", 12, 15, 30, 999, ["even"]),
    ("bayer_rggb8", 11, 16, 16, 999, ["even"]),
    ("bgr8", 0, 16, 48, 576, ["0 x 16"]),
    ("bgr8", 12, -1, 48, 576, ["12 x -1"]),
    ("bgr8", 100_000, 100_000, 300_000, 576, ["100000 x 100000", "64000000"]),
    ("32FC1", 12, 16, 64, 999, ["'32FC1'", "rgb8", "yuv422_yuy2"]),
    ("", 12, 16, 64, 999, ["''", "expected one of"]),
])
def test_malformed_images_are_refused_by_topic(encoding, height, width, step, size, words):
    with pytest.raises(InputError) as caught:
        images.decode_image(encoding, height, width, step, False, bytes(size), TOPIC)
    for word in [TOPIC, *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize("data", [[1, 2, 3], None, "text", np.zeros((4, 4), np.uint8)[:, ::2]])
def test_what_is_no_buffer_is_refused(data):
    with pytest.raises(InputError, match=TOPIC):
        images.decode_image("mono8", 1, 2, 2, False, data, TOPIC)
    with pytest.raises(InputError, match=TOPIC):
        images.decode_compressed("jpeg", data, TOPIC)


def smooth(height=48, width=64):
    """(48, 64, 3) uint8 RGB with gentle gradients: JPEG keeps it within a few levels."""
    y, x = np.mgrid[:height, :width]
    planes = [255 * x / (width - 1), 255 * y / (height - 1), 127 + 0 * x]
    return np.stack(planes, axis=2).astype(np.uint8)


def encoded(extension, image, *options):
    ok, data = cv2.imencode(extension, image, list(options))
    assert ok
    return data.tobytes()


def jpeg(image=None):
    return encoded(".jpg", cv2.cvtColor(smooth() if image is None else image, cv2.COLOR_RGB2BGR))


@pytest.mark.parametrize("format", ["jpeg", "", "bgr8; jpeg compressed bgr8",
                                    "rgb8; jpeg compressed bgr8", "png"])
def test_jpeg_whatever_the_format_says(format):
    decoded = images.decode_compressed(format, array.array("B", jpeg()), TOPIC)
    assert np.abs(decoded.astype(int) - smooth()).max() <= 12


def test_progressive_jpeg_and_trailing_padding():
    data = encoded(".jpg", smooth()[:, :, ::-1], cv2.IMWRITE_JPEG_PROGRESSIVE, 1)
    decoded = images.decode_compressed("jpeg", data + bytes(100), TOPIC)
    assert np.abs(decoded.astype(int) - smooth()).max() <= 12


def test_a_format_that_says_red_and_blue_are_exchanged():
    data = encoded(".png", noise())
    decoded = images.decode_compressed("rgb8; png compressed rgb8", data, TOPIC)
    np.testing.assert_array_equal(decoded, noise())


def test_grey_jpeg():
    grey = smooth()[:, :, 0]
    decoded = images.decode_compressed("mono8; jpeg compressed mono8", encoded(".jpg", grey))
    assert np.abs(decoded.astype(int) - grey[:, :, None]).max() <= 12


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("depth", [8, 16])
def test_png_of_any_depth_and_channels(channels, depth):
    image = noise(channels=channels)
    file = image[:, :, [[0], [2, 1, 0], [2, 1, 0, 3]][[1, 3, 4].index(channels)]]
    if depth == 16:
        file = file.astype(np.uint16) << 8 | 0x55
    decoded = images.decode_compressed("", encoded(".png", file), TOPIC)
    expected = np.repeat(image, 3, axis=2) if channels == 1 else image[:, :, :3]
    np.testing.assert_array_equal(decoded, expected)


def test_a_mosaic_in_a_png():
    mosaic = np.full((8, 8), GREEN[1], np.uint8)
    mosaic[::2, ::2], mosaic[1::2, 1::2] = GREEN[0], GREEN[2]
    decoded = images.decode_compressed("bayer_rggb8; png compressed ", encoded(".png", mosaic))
    assert (decoded == GREEN).all()


def huge_jpeg():
    """The real file, its frame header changed to 60000 x 60000."""
    data = bytearray(jpeg())
    place = data.index(b"\xff\xc0")
    data[place + 5:place + 9] = struct.pack(">HH", 60000, 60000)
    return bytes(data)


def chunk(kind, body):
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def huge_png():
    header = struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IEND", b"")


def flipped(data, place):
    return data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1:]


PNG = encoded(".png", noise(48, 64))
MALFORMED = {
    "empty": (b"", "0 bytes"),
    "text": (b"not an image", "expected a JPEG"),
    "jpeg start only": (b"\xff\xd8", "truncated"),
    "jpeg headers only": (jpeg()[:jpeg().index(b"\xff\xda")], "truncated"),
    "jpeg without its end": (jpeg()[:-2], "ffd9"),
    "jpeg cut at half": (jpeg()[:len(jpeg()) // 2], "truncated"),
    "jpeg padded after the cut": (jpeg()[:len(jpeg()) // 2] + bytes(500), "truncated"),
    "jpeg of 60000 x 60000": (huge_jpeg(), "60000 x 60000"),
    "png cut at half": (PNG[:len(PNG) // 2], "truncated"),
    "png without its end": (PNG[:-12], "IEND"),
    "png with a flipped byte": (flipped(PNG, len(PNG) // 2), "checksum"),
    "png of 100000 x 100000": (huge_png(), "100000 x 100000"),
    "png without pixels": (huge_png().replace(*[
        chunk(b"IHDR", struct.pack(">IIBBBBB", n, n, 8, 2, 0, 0, 0)) for n in (100_000, 4)]),
        "damaged"),
    "png behind a depth header": (bytes(12) + PNG, "expected a JPEG"),
}


@pytest.mark.parametrize("data, word", MALFORMED.values(), ids=MALFORMED.keys())
def test_damaged_files_are_refused_by_topic(data, word):
    with pytest.raises(InputError) as caught:
        images.decode_compressed("jpeg", data, TOPIC)
    assert TOPIC in str(caught.value) and word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_cut_of_a_jpeg_and_a_png_is_refused():
    for whole in (jpeg(), PNG):
        for end in range(0, len(whole) - 1, max(len(whole) // 150, 1)):
            with pytest.raises(InputError):
                images.decode_compressed("", whole[:end], TOPIC)


def test_holders_decode_lazily_and_name_the_topic():
    step, data = padded(noise(), 4)
    raw = images.RawImage("rgb8", HEIGHT, WIDTH, step, False, data)
    np.testing.assert_array_equal(raw.decode(TOPIC), noise())
    assert images.RawCompressed("jpeg", jpeg()).decode(TOPIC).shape == (48, 64, 3)
    with pytest.raises(InputError, match=TOPIC):
        images.RawCompressed("jpeg", b"").decode(TOPIC)


@pytest.mark.parametrize("height, width", [(20, 36), (7, 11), (200, 300), (96, 20), (1, 1)])
def test_resize_agrees_with_pillow(height, width):
    image_module = pytest.importorskip("PIL.Image")
    image = cv2.GaussianBlur(noise(97, 131), (5, 5), 1.0)
    reference = np.asarray(image_module.fromarray(image).resize(
        (width, height), image_module.BICUBIC))
    resized = images.resize_for_model(image, height, width)
    assert resized.shape == (height, width, 3) and resized.dtype == np.uint8
    difference = np.abs(resized.astype(int) - reference)
    assert difference.max() <= 2 and difference.mean() < 0.3


def test_resize_does_not_alias_or_shift():
    stripes = np.zeros((240, 240, 3), np.uint8)
    stripes[:, ::2] = 254                                      # finer than the result can show
    inner = images.resize_for_model(stripes, 50, 50)[:, 2:-2]
    assert np.abs(inner.astype(int) - 127).max() <= 4
    ramp = np.broadcast_to(np.arange(240, dtype=np.uint8)[None, :, None], (240, 240, 3))
    centre = images.resize_for_model(ramp, 60, 60)[30, :, 0].astype(float)
    np.testing.assert_allclose(centre[3:-3], np.arange(60)[3:-3] * 4 + 1.5, atol=0.51)


def test_resize_keeps_an_image_of_the_right_size_and_flat_colours():
    image = noise()
    assert images.resize_for_model(image, HEIGHT, WIDTH) is image
    flat = np.full((108, 192, 3), RED, np.uint8)
    assert (images.resize_for_model(flat, 32, 58) == RED).all()
