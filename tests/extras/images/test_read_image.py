"""read_image: torchvision decodes what it can, Pillow the rest, with the same result; levels and figures are kept."""

import errno
import logging
import random
from collections import Counter

import numpy
import pytest
import torch

from config import TrainingConfig
from dataset import create_dataset
from utils.extras.images import files as images
from utils.extras.images.files import log_file_listing, read_image
from utils.settings.errors import UserError

PIL = pytest.importorskip("PIL.Image")
pytest.importorskip("torchvision")


def picture(mode="RGB", size=(60, 44)):
    """A smooth image, as codecs expect."""
    across, down = torch.linspace(0, 255, size[0]), torch.linspace(255, 0, size[1])[:, None]
    channels = torch.stack([across + 0 * down, down + 0 * across, (across + down) / 2], -1)
    return PIL.fromarray(channels.to(torch.uint8).numpy()).convert(mode)


def by_both(path, channels, monkeypatch):
    """The image or the error from read_image and from PIL alone, and whether torchvision decoded it."""
    given, plain = [], images._decode_jpeg

    def decode(*args):
        given.append(plain(*args))
        return given[-1]

    results = []
    for function in (decode, lambda *_: None):
        monkeypatch.setattr(images, "_decode_jpeg", function)
        try:
            results.append(read_image(path, channels))
        except UserError as error:
            results.append(str(error))
    monkeypatch.setattr(images, "_decode_jpeg", plain)
    return *results, any(image is not None for image in given)


TURNED = b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"
KINDS = {  # mode, suffix, options of PIL's save, whether torchvision decodes it
    "jpeg": ("RGB", "jpg", {"quality": 90}, True),
    "without chroma": ("RGB", "jpg", {"subsampling": 2, "progressive": True}, True),
    "grey": ("L", "jpg", {}, True),
    "cmyk": ("CMYK", "jpg", {}, False),
    "turned": ("RGB", "jpg", {"exif": TURNED}, True),
    "palette": ("P", "png", {}, False),
    "full alpha": ("RGBA", "png", {}, False),
    "bits": ("1", "png", {}, False),
    "webp": ("RGB", "webp", {}, False),
    "a png named jpg": ("RGB", "jpg", {"format": "PNG"}, False),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("channels", [3, 1])
def test_every_kind_of_file_is_read_as_pil_reads_it(tmp_path, monkeypatch, kind, channels):
    mode, suffix, options, is_fast = KINDS[kind]
    path = tmp_path / f"a.{suffix}"
    picture(mode).save(path, **options)
    image, by_pil, is_by_torchvision = by_both(path, channels, monkeypatch)
    assert image.shape == (channels, 44, 60) and image.dtype == torch.uint8
    assert torch.equal(image, by_pil)
    plain = numpy.array(PIL.open(path).convert("L" if channels == 1 else "RGB"))
    assert numpy.array_equal(by_pil.permute(1, 2, 0).numpy().reshape(plain.shape), plain)
    assert is_by_torchvision == (is_fast and (channels == 3 or mode == "L"))


# ---- modes of Pillow: what `convert` alone would clip or blacken ----

GRAY = numpy.arange(64 * 64).reshape(64, 64).astype("uint16") * 16  # all of 16 bits
COLOR = numpy.stack([GRAY >> 8, (GRAY >> 4) & 255, GRAY & 255], -1).astype("uint8")
LUMA = COLOR[..., :1]  # of gray images
IS_OPAQUE = (GRAY // 16 + GRAY // 1024) % 3 > 0
ALPHA = (IS_OPAQUE * 255).astype("uint8")[..., None]
ON_WHITE, LUMA_ON_WHITE = (numpy.where(IS_OPAQUE[..., None], pixels, 255) for pixels in (COLOR, LUMA))


def with_alpha(colors):
    """Transparent pixels are black, as many programs write them."""
    return PIL.fromarray(numpy.concatenate([colors * (ALPHA > 0), ALPHA], -1).astype("uint8"))


def palette(transparency=None, alpha=None):
    image = PIL.fromarray(LUMA[..., 0]).convert("P")
    if transparency is not None:
        image.info["transparency"] = transparency
    if alpha is not None:
        image.putalpha(PIL.fromarray(alpha[..., 0]))
    return image


def associated(image, path):
    """A TIFF whose colours are multiplied by alpha: mode La."""
    image.save(path)
    data, extra = path.read_bytes(), bytes.fromhex("5201 0300 01000000")
    assert data.count(extra + b"\2") == 1
    path.write_bytes(data.replace(extra + b"\2", extra + b"\1"))


LOWEST_IS_CLEAR = numpy.where(LUMA == 0, 255, LUMA)
MODES = {  # the image or how it is written, suffix, the mode that Pillow opens, pixels [H, W, 1 or 3] (None: as Pillow)
    "16-bit png": (PIL.fromarray(GRAY), "png", "I;16", LUMA),
    "16-bit png, a transparent value": (PIL.fromarray(GRAY), "png", "I;16", numpy.where(GRAY == 16, 65535, GRAY) >> 8),
    "16-bit tiff": (PIL.fromarray(GRAY), "tif", "I;16", LUMA),
    "16-bit tiff, big-endian": (PIL.fromarray(GRAY.astype(">u2")), "tif", "I;16B", LUMA),
    "16-bit pgm": (PIL.fromarray(GRAY), "pgm", "I", LUMA),
    "text pgm of 12 bits": (lambda path: path.write_text("P2 2 1 4095 0 4095"), "pgm", "I", numpy.array([[0, 255]])),
    "32-bit tiff": (PIL.fromarray(GRAY.astype("int32")), "tif", "I", "mode I has no known range: save the image with"),
    "float tiff": (PIL.fromarray(GRAY.astype("float32")), "tif", "F", "mode F has no known range"),
    "float pfm": (
        lambda path: PIL.fromarray(GRAY.astype("float32")).save(path, "PPM"),
        "pgm",
        "F",
        "mode F has no known ran",
    ),
    "gray": (PIL.fromarray(LUMA[..., 0]), "png", "L", LUMA),
    "bits": (PIL.fromarray(IS_OPAQUE), "png", "1", IS_OPAQUE * 255),
    "color": (PIL.fromarray(COLOR), "tif", "RGB", COLOR),
    "palette": (palette(), "png", "P", LUMA),
    "palette, a transparent index": (palette(0), "png", "P", LOWEST_IS_CLEAR),
    "palette, alpha of each index": (palette(bytes([0] + [255] * 255)), "png", "P", LOWEST_IS_CLEAR),
    "palette and alpha": (palette(alpha=ALPHA), "tif", "PA", LUMA_ON_WHITE),
    "gray and alpha": (with_alpha(LUMA), "png", "LA", LUMA_ON_WHITE),
    "gray and alpha, multiplied": (lambda path: associated(with_alpha(LUMA), path), "tif", "La", LUMA_ON_WHITE),
    "color and alpha": (with_alpha(COLOR), "png", "RGBA", ON_WHITE),
    "color and alpha, tiff": (with_alpha(COLOR), "tif", "RGBA", ON_WHITE),
    "color and alpha, multiplied": (lambda path: associated(with_alpha(COLOR), path), "tif", "RGBA", ON_WHITE),
    "color and alpha, webp": (lambda path: with_alpha(COLOR).save(path, lossless=True), "webp", "RGBA", ON_WHITE),
    "color and full alpha": (PIL.fromarray(COLOR).convert("RGBA"), "png", "RGBA", COLOR),
    "color, a transparent one": (
        PIL.fromarray(COLOR),
        "png",
        "RGB",
        numpy.where(COLOR.max(-1, keepdims=1), COLOR, 255),
    ),
    "CMYK": (PIL.fromarray(COLOR).convert("CMYK"), "tif", "CMYK", COLOR),
    "YCbCr": (PIL.fromarray(COLOR).convert("YCbCr"), "tif", "YCbCr", None),
    "LAB": (PIL.new("LAB", (64, 64), (0, 128, 128)), "tif", "LAB", None),
}
TRANSPARENT = {"16-bit png, a transparent value": 16, "color, a transparent one": (0, 0, 0)}


@pytest.mark.guarantee("image-levels")
@pytest.mark.parametrize("name", MODES)
def test_every_mode_that_pillow_opens_keeps_its_levels_and_its_figure(tmp_path, name):
    image, suffix, mode, expected = MODES[name]
    path = tmp_path / f"a.{suffix}"
    if callable(image):
        image(path)
    else:
        image.save(path, **({"transparency": TRANSPARENT[name]} if name in TRANSPARENT else {}))
    with PIL.open(path) as opened:
        assert opened.mode == mode
        by_pil = numpy.array(opened.convert("RGB")) if expected is None else None
    if isinstance(expected, str):
        with pytest.raises(UserError, match=rf"{path} \(class .*\) cannot be read as an image \(.*{expected}"):
            read_image(path, 3)
        return
    expected = by_pil if expected is None else expected.reshape(*expected.shape[:2], -1)
    pixels = read_image(path, 3).permute(1, 2, 0).numpy()
    assert numpy.array_equal(pixels, numpy.broadcast_to(expected, pixels.shape))
    luma = numpy.array(PIL.fromarray(pixels).convert("L"))
    assert mode in ("YCbCr", "LAB") or numpy.array_equal(read_image(path, 1)[0].numpy(), luma)


@pytest.mark.guarantee("image-levels")
def test_the_table_has_every_mode_of_the_formats_that_are_read():
    from PIL import PngImagePlugin, TiffImagePlugin

    modes = {mode for mode, _ in [*TiffImagePlugin.OPEN_INFO.values(), *PngImagePlugin._MODES.values()]}
    assert modes <= {mode for _, _, mode, _ in MODES.values()}


def test_half_transparent_pixels_are_mixed_with_white(tmp_path):
    PIL.new("RGBA", (4, 4), (200, 100, 0, 128)).save(tmp_path / "a.png")
    pixels = read_image(tmp_path / "a.png", 3)[:, 0, 0].tolist()
    exact = [value * 128 / 255 + 255 * 127 / 255 for value in (200, 100, 0)]
    assert all(abs(a - b) <= 1 for a, b in zip(pixels, exact, strict=True)), (pixels, exact)  # whole numbers


class Lines(logging.Handler):
    """The lines that are logged, each with its level."""

    def __init__(self, is_main=True):
        super().__init__(logging.INFO if is_main else logging.WARNING)  # as setup_logger
        self.found = []

    def emit(self, record):
        self.found.append((record.levelname, record.getMessage()))


@pytest.fixture
def logged(monkeypatch):
    logger = logging.getLogger("ddp")
    monkeypatch.setattr(logger, "handlers", [Lines()])
    monkeypatch.setattr(images, "_seen_in_images", {})
    logger.setLevel(logging.DEBUG)
    return logger.handlers[0].found


def folder_with(root, values):
    """A data set of one image for each array."""
    for k, pixels in enumerate(values):
        (root / "train" / "ab"[k % 2]).mkdir(parents=True, exist_ok=True)
        PIL.fromarray(pixels).save(root / "train" / "ab"[k % 2] / f"{k}.png")
    return create_dataset(TrainingConfig(dataset="imagefolder", data_dir=str(root), image_size=8), "train")


DARK_GRAY, BRIGHT_GRAY = (numpy.full((8, 8), value, "uint16") for value in (4095, 4096))


@pytest.mark.guarantee("image-levels")
@pytest.mark.parametrize(
    ("values", "peak"),
    [([DARK_GRAY] * 70, 4095), ([DARK_GRAY] * 3 + [BRIGHT_GRAY], None), ([COLOR[:8, :8]] * 2, None)],
)
def test_sixteen_bits_of_which_little_is_left_are_a_warning(tmp_path, logged, values, peak):
    log_file_listing([folder_with(tmp_path, values)])
    text = (
        f"The 16-bit images have values up to {peak} of 65535, of which reading keeps 16 levels. Scale the values up."
    )
    assert logged == ([("WARNING", text)] if peak else [])


@pytest.mark.guarantee("image-levels")
def test_transparent_images_are_a_warning_at_the_first_one_and_where_nothing_is_left(tmp_path, logged):
    clear = numpy.array(with_alpha(COLOR))
    white = clear.copy()
    white[..., :3] = 255
    data = folder_with(tmp_path, [COLOR, clear, clear, white, white])
    log_file_listing([data])
    for k in range(len(data)):
        data[k]
    first = f"{data.path(1)} has transparent pixels. Transparent pixels become white, here and in all other images."
    lost = f"{data.path(2)} has one colour on white. If the image shows more, put it on another background."
    assert logged == [("WARNING", first), ("WARNING", lost)]


def damaged(data, draw):
    """Change or drop some bytes, most of them in the header; truncate a third of the files as well."""
    data = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(min(len(data), draw.choice((64, 4096))))
        data[at : at + 2] = draw.choice((b"", draw.randbytes(2)))
    return data[: draw.choice((len(data), len(data), draw.randrange(len(data))))]


@pytest.mark.guarantee("bad-sample")
@pytest.mark.parametrize(
    "kind", [("png", {}), ("bmp", {}), ("webp", {}), ("jpg", {}), ("jpg", {"progressive": True})], ids=str
)
def test_a_damaged_file_is_a_user_error_or_read_as_by_pil(tmp_path, monkeypatch, kind):
    draw, outcomes, (suffix, options) = random.Random(0), Counter(), kind
    path = tmp_path / f"a.{suffix}"
    PIL.frombytes("RGB", (24, 24), draw.randbytes(24 * 24 * 3)).save(path, **options)
    whole = path.read_bytes()
    for _ in range(200):
        path.write_bytes(damaged(whole, draw))
        actual, by_pil, _ = by_both(path, 3, monkeypatch)
        outcomes[type(actual)] += 1
        if isinstance(actual, str):
            assert actual == by_pil and actual.startswith(
                f"{path} (class {tmp_path.name}) cannot be read as an image ("
            )
        else:
            assert torch.equal(actual, by_pil)
    assert outcomes[str] > 20 and (outcomes[torch.Tensor] > 5 or suffix == "png"), outcomes  # a PNG has checksums


def test_pil_decodes_where_torchvision_has_no_jpeg(tmp_path, monkeypatch):
    import torchvision.io

    def missing(*_):
        raise RuntimeError("decode_jpeg: torchvision not compiled with libjpeg support")

    picture().save(tmp_path / "a.jpg")
    expected = read_image(tmp_path / "a.jpg", 3)
    monkeypatch.setattr(torchvision.io, "decode_jpeg", missing)
    assert torch.equal(read_image(tmp_path / "a.jpg", 3), expected)
    monkeypatch.delattr(torchvision.io, "decode_jpeg")
    assert torch.equal(read_image(tmp_path / "a.jpg", 3), expected)


def test_too_many_open_files_are_not_a_corrupt_image(tmp_path, monkeypatch):
    def no_more_files(path):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(PIL, "open", no_more_files)
    with pytest.raises(OSError, match="Too many open files"):
        read_image(tmp_path / "a.png", 3)
