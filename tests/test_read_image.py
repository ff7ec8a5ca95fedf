"""read_image: torchvision decodes what it can, PIL all else, and nobody sees which of them it was but for the time."""

import io
import random

import pytest
import torch

import dataset
from config import UnreadableSample
from dataset import read_image

PIL = pytest.importorskip("PIL.Image")
pytest.importorskip("torchvision")


def picture(mode="RGB", size=(60, 44)):
    """Smooth, so that a coder of images is at home."""
    across, down = torch.linspace(0, 255, size[0]), torch.linspace(255, 0, size[1])[:, None]
    channels = torch.stack([across + 0 * down, down + 0 * across, (across + down) / 2], -1)
    return PIL.fromarray(channels.to(torch.uint8).numpy()).convert(mode)


def by_both(path, channels, size, monkeypatch):
    """The image or the sentence, as it is read, and by PIL alone; and whether torchvision gave it."""
    given, plain = [], dataset._decode_jpeg

    def decode(*args):
        given.append(plain(*args))
        return given[-1]

    found = []
    for function in (decode, lambda *_: None):
        monkeypatch.setattr(dataset, "_decode_jpeg", function)
        try:
            found.append(read_image(path, channels, size))
        except UnreadableSample as unreadable:
            found.append(str(unreadable))
    monkeypatch.setattr(dataset, "_decode_jpeg", plain)
    return *found, any(image is not None for image in given)


KINDS = {
    "jpeg": ("RGB", "jpg", {"quality": 90}, True),
    "without chroma": ("RGB", "jpg", {"subsampling": 2, "progressive": True}, True),
    "grey": ("L", "jpg", {}, True),
    "cmyk": ("CMYK", "jpg", {}, False),
    "turned": ("RGB", "jpg", {"exif": b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"}, True),
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


@pytest.mark.parametrize("seed", range(4))
def test_what_is_cut_short_or_damaged_is_refused_or_read_as_by_pil(tmp_path, monkeypatch, seed):
    draw, path, outcomes = random.Random(seed), tmp_path / "a.jpg", {True: 0, False: 0}
    buffer = io.BytesIO()
    picture().save(buffer, "JPEG", progressive=seed % 2 > 0)
    for _ in range(60):
        data = bytearray(buffer.getvalue())
        if draw.random() < 0.5:
            data = data[: draw.randrange(4, len(data))]
        else:
            at = draw.randrange(len(data) - 2)
            data[at : at + 2] = draw.randbytes(2)
        path.write_bytes(data)
        found, by_pil, _ = by_both(path, 3, 0, monkeypatch)
        outcomes[isinstance(found, str)] += 1
        assert found == by_pil if isinstance(found, str) else torch.equal(found, by_pil)
    assert min(outcomes.values()) > 5


def test_a_torchvision_without_jpeg_leaves_it_to_pil(tmp_path, monkeypatch):
    import torchvision.io

    def missing(*_):
        raise RuntimeError("decode_jpeg: torchvision not compiled with libjpeg support")

    picture().save(tmp_path / "a.jpg")
    expected = read_image(tmp_path / "a.jpg", 3)
    monkeypatch.setattr(torchvision.io, "decode_jpeg", missing)
    assert torch.equal(read_image(tmp_path / "a.jpg", 3), expected)
    monkeypatch.delattr(torchvision.io, "decode_jpeg")
    assert torch.equal(read_image(tmp_path / "a.jpg", 3), expected)
