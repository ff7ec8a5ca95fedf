"""read_image: torchvision decodes what it can, PIL everything else, with the same pixels and the same errors."""

import errno
import random
import struct
import zlib
from collections import Counter

import pytest
import torch

from config import UserError
from images import folder_of_images
from utils.data import images as image_files
from utils.data.images import read_image

PIL = pytest.importorskip("PIL.Image")
pytest.importorskip("torchvision")


def picture(mode="RGB", size=(60, 44)):
    """Smooth, so that a coder of images is at home."""
    across, down = torch.linspace(0, 255, size[0]), torch.linspace(255, 0, size[1])[:, None]
    channels = torch.stack([across + 0 * down, down + 0 * across, (across + down) / 2], -1)
    return PIL.fromarray(channels.to(torch.uint8).numpy()).convert(mode)


def by_both(path, channels, size, monkeypatch):
    """The image or the error, as it is read, and by PIL alone; and whether torchvision gave it."""
    given, plain = [], image_files._decode_jpeg

    def decode(*args):
        given.append(plain(*args))
        return given[-1]

    def read():
        try:
            return read_image(path, channels, size)
        except UserError as unreadable:
            return str(unreadable)

    found = []
    for function in (decode, lambda *_: None):
        with monkeypatch.context() as patch:
            patch.setattr(image_files, "_decode_jpeg", function)
            found.append(read())
    return *found, any(image is not None for image in given)


TURNED = b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"
KINDS = {
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
    "a jpeg by another name": ("RGB", "jpg", {"format": "PNG"}, False),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("channels", [3, 1])
def test_every_kind_of_file_is_read_as_pil_reads_it(tmp_path, monkeypatch, kind, channels):
    mode, suffix, options, is_fast = KINDS[kind]
    path = tmp_path / f"a.{suffix}"
    image = picture("RGB" if mode == "I;16" else mode)
    if mode == "I;16":
        image = PIL.fromarray(torch.arange(44 * 60, dtype=torch.int32).view(44, 60).numpy().astype("uint16"))
    image.save(path, **options)
    for size in (0, 30):
        found, by_pil, is_by_torchvision = by_both(path, channels, size, monkeypatch)
        assert found.shape == ((channels, size, size) if size else (channels, 44, 60)) and found.dtype == torch.uint8
        assert torch.equal(found, by_pil)
        assert is_by_torchvision == (is_fast and (channels == 3 or mode == "L"))


def damaged(data, draw):
    """Some bytes changed or lost, most of them in the header; a third is cut short as well."""
    data = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(min(len(data), draw.choice((64, 4096))))
        data[at : at + 2] = draw.choice((b"", draw.randbytes(2)))
    return data[: draw.choice((len(data), len(data), draw.randrange(len(data))))]


@pytest.mark.parametrize("suffix", ["png", "gif", "webp", "jpg"])
def test_a_damaged_file_is_an_unreadable_sample_or_read_as_by_pil(tmp_path, monkeypatch, suffix):
    """It never raises another exception."""
    draw, outcomes, path = random.Random(0), Counter(), tmp_path / f"a.{suffix}"
    PIL.frombytes("RGB", (24, 24), draw.randbytes(24 * 24 * 3)).save(path)
    whole = path.read_bytes()
    for _ in range(200):
        path.write_bytes(damaged(whole, draw))
        found, by_pil, _ = by_both(path, 3, 0, monkeypatch)
        outcomes[type(found)] += 1
        if isinstance(found, str):
            assert found == by_pil and found.startswith(f"{path}: cannot be read as an image (class {tmp_path.name}; ")
        else:
            assert torch.equal(found, by_pil)
    assert outcomes[str] > 20 and (outcomes[torch.Tensor] > 5 or suffix == "png"), outcomes  # a PNG has checksums


def test_a_torchvision_without_decode_jpeg_leaves_it_to_pil(tmp_path, monkeypatch):
    import torchvision.io

    picture().save(tmp_path / "a.jpg")
    expected = read_image(tmp_path / "a.jpg", 3)
    monkeypatch.delattr(torchvision.io, "decode_jpeg")
    assert torch.equal(read_image(tmp_path / "a.jpg", 3), expected)


def test_a_file_for_which_pil_raises_a_value_error_is_an_unreadable_sample(tmp_path):
    """A chunk too short for its length, under a right checksum: ValueError, and no OSError as for most others."""
    path = tmp_path / "a.png"
    PIL.new("RGB", (8, 8)).save(path)
    chunk, whole = b"pHYs\0\0\0", path.read_bytes()
    path.write_bytes(whole[:33] + struct.pack(">I", 3) + chunk + struct.pack(">I", zlib.crc32(chunk)) + whole[33:])
    with pytest.raises(UserError, match="Truncated pHYs chunk"):
        read_image(path, 3)


def test_a_machine_that_is_short_of_files_is_no_corrupt_image(tmp_path, monkeypatch):
    folder_of_images(tmp_path)

    def no_more_files(path):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(PIL, "open", no_more_files)
    with pytest.raises(OSError, match="Too many open files"):
        read_image(tmp_path / "train/cat/000.png", 3)
