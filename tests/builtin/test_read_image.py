"""read_image: torchvision decodes what it can, PIL decodes the rest, with the same result."""

import errno
import random
from collections import Counter

import pytest
import torch

from config import UserError
from utils.data import images
from utils.data.images import read_image

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

    found = []
    for function in (decode, lambda *_: None):
        monkeypatch.setattr(images, "_decode_jpeg", function)
        try:
            found.append(read_image(path, channels))
        except UserError as error:
            found.append(str(error))
    monkeypatch.setattr(images, "_decode_jpeg", plain)
    return *found, any(image is not None for image in given)


TURNED = b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"
KINDS = {  # mode, suffix, options of PIL's save, whether torchvision decodes it
    "jpeg": ("RGB", "jpg", {"quality": 90}, True),
    "without chroma": ("RGB", "jpg", {"subsampling": 2, "progressive": True}, True),
    "grey": ("L", "jpg", {}, True),
    "cmyk": ("CMYK", "jpg", {}, False),
    "turned": ("RGB", "jpg", {"exif": TURNED}, True),
    "palette": ("P", "png", {}, False),
    "with alpha": ("RGBA", "png", {}, False),
    "16 bit": ("I;16", "png", {}, False),
    "bits": ("1", "png", {}, False),
    "webp": ("RGB", "webp", {}, False),
    "a png named jpg": ("RGB", "jpg", {"format": "PNG"}, False),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("channels", [3, 1])
def test_every_kind_of_file_is_read_as_pil_reads_it(tmp_path, monkeypatch, kind, channels):
    mode, suffix, options, is_fast = KINDS[kind]
    image, path = picture("RGB" if mode == "I;16" else mode), tmp_path / f"a.{suffix}"
    if mode == "I;16":
        image = PIL.fromarray(torch.arange(44 * 60, dtype=torch.int32).view(44, 60).numpy().astype("uint16"))
    image.save(path, **options)
    found, by_pil, is_by_torchvision = by_both(path, channels, monkeypatch)
    assert found.shape == (channels, 44, 60) and found.dtype == torch.uint8
    assert torch.equal(found, by_pil)
    assert is_by_torchvision == (is_fast and (channels == 3 or mode == "L"))


def damaged(data, draw):
    """Change or drop some bytes, most of them in the header; truncate a third of the files as well."""
    data = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(min(len(data), draw.choice((64, 4096))))
        data[at : at + 2] = draw.choice((b"", draw.randbytes(2)))
    return data[: draw.choice((len(data), len(data), draw.randrange(len(data))))]


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
        found, by_pil, _ = by_both(path, 3, monkeypatch)
        outcomes[type(found)] += 1
        if isinstance(found, str):
            assert found == by_pil and found.startswith(f"{path}: cannot be read as an image (class {tmp_path.name}; ")
        else:
            assert torch.equal(found, by_pil)
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
