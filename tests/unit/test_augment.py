"""Augmentation of a sample does not depend on its batch; the draws are the same on every device."""

import torch
from torch.utils.flop_counter import FlopCounterMode

from utils.data.augment import augment_images, center_crop, crop_and_flip, normalize, resized_crop_and_flip
from utils.rng import derive_seed, sample_draws


def test_seeds_of_different_keys_differ():
    keys = [("order", seed, epoch) for seed in range(30) for epoch in range(30)] + [("step", 1, 23), ("step", 12, 3)]
    assert len({derive_seed(*key) & 0xFFFFFFFF for key in keys}) == len(keys)


def test_draws_equal_splitmix64_in_python_integers():
    """Integers wrap the same way on every device (test_cuda.py compares with a GPU)."""
    indices = [0, 1, 7, 2**40 + 3]
    drawn = sample_draws(5, 3, torch.tensor(indices), 4)
    for row, index in enumerate(indices):
        for k in range(4):
            x = ((index * 4 + k) * 0x9E3779B97F4A7C15 + derive_seed("sample", 5, 3)) % 2**64
            x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
            x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
            assert drawn[row, k] == (x ^ (x >> 31)) >> 32


def test_crop_and_flip_moves_each_image_by_its_own_draws():
    images = torch.arange(2 * 1 * 6 * 6, dtype=torch.uint8).view(2, 1, 6, 6)
    # padding 1: draws below 2^32 / 3 give offset 0 (one pixel down and right), the middle third 1 (no move)
    middle, low, flip, keep = 2**31, 0, 2**32 - 1, 0
    out = crop_and_flip(images, torch.tensor([[middle, middle, flip], [low, middle, keep]]), padding=1)
    assert torch.equal(out[0], images[0].flip(2))
    assert torch.equal(out[1, :, 1:], images[1, :, :-1]) and (out[1, :, 0] == 0).all()
    assert out.dtype == torch.uint8


def test_augmentation_of_a_sample_does_not_depend_on_its_batch():
    images = torch.randint(0, 256, (12, 3, 16, 16), dtype=torch.uint8)
    indices = torch.arange(100, 112)
    for kind, rtol in (("crop", 0), ("resized_crop", 1e-5)):
        whole = augment_images(images, kind, 16, 1, 2, indices)
        parts = torch.cat([augment_images(images[k : k + 5], kind, 16, 1, 2, indices[k : k + 5]) for k in (0, 5, 10)])
        torch.testing.assert_close(whole, parts, rtol=rtol, atol=0)
        assert not torch.equal(whole, augment_images(images, kind, 16, 1, 3, indices))


def test_resized_crop_of_the_whole_image_is_the_image():
    images = torch.randint(0, 256, (1, 3, 10, 10), dtype=torch.uint8)
    # whole area, ratio 1, centred, not mirrored
    whole = torch.tensor([[2**32 - 1, 2**31, 2**31, 2**31, 2**32 - 1]])
    torch.testing.assert_close(resized_crop_and_flip(images, whole, 10), images.float(), atol=1e-3, rtol=0)
    assert resized_crop_and_flip(images, whole, 7).shape == (1, 3, 7, 7)


def test_pixels_do_not_depend_on_the_default_dtype():
    """verify computes in float64."""
    images, indices = torch.randint(0, 256, (4, 3, 20, 20), dtype=torch.uint8), torch.arange(4)
    expected = augment_images(images, "resized_crop", 16, 1, 2, indices)
    torch.set_default_dtype(torch.float64)
    assert torch.equal(augment_images(images, "resized_crop", 16, 1, 2, indices), expected)


def test_a_resized_crop_has_no_matrix_product():
    """TF32 would round the coordinates: verify would pass, and a run shift pixels."""
    with FlopCounterMode(display=False) as counter:
        augment_images(torch.zeros(4, 3, 20, 20, dtype=torch.uint8), "resized_crop", 16, 1, 2, torch.arange(4))
    assert counter.get_total_flops() == 0


def test_center_crop_and_normalize():
    images = torch.arange(2 * 25, dtype=torch.uint8).view(1, 2, 5, 5)
    assert torch.equal(center_crop(images, 3), images[:, :, 1:4, 1:4])
    mean, std = torch.tensor([0.1, 0.2]), torch.tensor([0.5, 0.25])
    expected = (images / 255 - mean.view(2, 1, 1)) / std.view(2, 1, 1)
    torch.testing.assert_close(normalize(images, mean, std), expected)
