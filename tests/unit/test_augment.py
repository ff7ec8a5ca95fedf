"""Augmentation of a sample does not depend on its batch; the draws are the same on every device."""

import pytest
import torch

import plain_loop
from utils.example import augment
from utils.example.augment import augment_images, choose, crop_and_flip, crops_of, normalize
from utils.rng import derive_seed, draw_integers, sample_draws


def test_seeds_of_different_keys_differ():
    keys = [("order", seed, epoch) for seed in range(30) for epoch in range(30)] + [("step", 1, 23), ("step", 12, 3)]
    assert len({derive_seed(*key) & 0xFFFFFFFF for key in keys}) == len(keys)
    for key in [(), ("50%s", 1, 2**40, 0.5), ("sample", 3, 4, *range(2000))]:  # as in the oracle: runs resume with them
        assert derive_seed(*key) == plain_loop.number(*key)


def test_draws_equal_splitmix64_in_python_integers():
    """Integers wrap the same way on every device."""
    indices = [0, 1, 7, 2**40 + 3]
    drawn = sample_draws(5, 3, torch.tensor(indices), 4)
    for row, index in enumerate(indices):
        for k in range(4):
            x = ((index * 4 + k) * 0x9E3779B97F4A7C15 + derive_seed("sample", 5, 3)) % 2**64
            x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
            x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
            assert drawn[row, k] == (x ^ (x >> 31)) >> 32


def test_integers_are_drawn_from_the_whole_range_and_no_other():
    ends = torch.tensor([0, 2**32 - 1])
    for high in (1, 2, 3, 50_257, 2**31 - 1, 2**31):  # products of more than 63 bits would be negative
        assert draw_integers(ends, high).tolist() == [0, high - 1]
    for high in (2**31 + 1, 2**32):  # a file of nine billion tokens
        with pytest.raises(ValueError, match=f"high must be at most .*, got {high}. Draw with torch.randint"):
            draw_integers(ends, high)


def test_crop_and_flip_moves_each_image_by_its_own_draws():
    images = torch.arange(2 * 1 * 6 * 6, dtype=torch.uint8).view(2, 1, 6, 6)
    # padding 1: draws below 2^32 / 3 give offset 0 (one pixel down and right), the middle third 1 (no move)
    middle, low, flip, keep = 2**31, 0, 2**32 - 1, 0
    out = crop_and_flip(images, crops_of(torch.tensor([[middle, middle, flip], [low, middle, keep]]), 1, 6), padding=1)
    assert torch.equal(out[0], images[0].flip(2))
    assert torch.equal(out[1, :, 1:], images[1, :, :-1]) and (out[1, :, 0] == 0).all()
    assert out.dtype == torch.uint8


@pytest.mark.guarantee("samples")
def test_augmentation_of_a_sample_does_not_depend_on_its_batch():
    images = torch.randint(0, 256, (12, 3, 16, 16), dtype=torch.uint8)
    indices = torch.arange(100, 112)
    whole = augment_images(images, "crop", 16, 1, 2, indices)
    parts = torch.cat([augment_images(images[k : k + 5], "crop", 16, 1, 2, indices[k : k + 5]) for k in (0, 5, 10)])
    assert torch.equal(whole, parts)
    assert not torch.equal(whole, augment_images(images, "crop", 16, 1, 3, indices))


def test_crops_of_an_epoch_drawn_at_once_are_those_of_each_batch(monkeypatch):
    """Of two epochs in turn, as when the next is prefetched, and in every part of a table; a larger one is not made."""
    images, samples, drawn = torch.randint(0, 256, (5, 3, 16, 16), dtype=torch.uint8), 2**17 + 100, []
    batches = [torch.tensor([0, 7, 3, samples - 1, 2**17 - 1]), torch.tensor([2**17, 5, 5, 0, 99])]

    def noting(seed, epoch, indices, count):
        drawn.append(len(indices))
        return sample_draws(seed, epoch, indices, count)

    def crops(most):
        return [augment_images(images, "crop", 16, 8, epoch, b, most) for b in batches for epoch in (3, 4, 3)]

    monkeypatch.setattr(augment, "sample_draws", noting)
    expected = crops(0)
    assert drawn == [5] * 6 and not torch.equal(expected[0], expected[1])
    for most, lengths in ((6 * samples, [2**17, 100] * 2), (6 * samples - 1, [5] * 6)):
        drawn.clear()
        monkeypatch.setattr(augment, "MAX_TABLE", most)
        assert all(map(torch.equal, crops(samples), expected)) and drawn == lengths


def test_kinds_of_augmentation():
    images = torch.zeros(1, 3, 8, 8, dtype=torch.uint8)
    assert augment_images(images, "none", 8, 1, 2, torch.zeros(1)) is images
    with pytest.raises(
        ValueError, match="The kind must be none or crop, got 'resized_crop'\\. Use create_file_transform"
    ):
        augment_images(images, "resized_crop", 8, 1, 2, torch.zeros(1))
    assert [choose("auto", 64), choose("auto", 65), choose("auto", 224, in_memory=True)] == [
        "crop",
        "resized_crop",
        "crop",
    ]
    assert choose("none", 224) == "none"


def test_normalize():
    images = torch.arange(2 * 25, dtype=torch.uint8).view(1, 2, 5, 5)
    mean, std = torch.tensor([0.1, 0.2]), torch.tensor([0.5, 0.25])
    expected = (images / 255 - mean.view(2, 1, 1)) / std.view(2, 1, 1)
    torch.testing.assert_close(normalize(images, mean, std), expected)
    torch.testing.assert_close(normalize(images, mean.clone(), std), expected)
    std.mul_(2)  # what is kept on the device is of the values before
    torch.testing.assert_close(normalize(images, mean, std), expected / 2)
