"""Mixup, CutMix, repeated augmentation and torchvision's recipe as a whole: the same on any ranks, and as theirs."""

import math

import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from config import TrainingConfig
from dataset import create_dataset
from model import MiniResNet, compute_loss, create_model, param_groups
from ranks import ROOT, torchrun
from test_kernel import TO_END, check_against_the_kernel  # extra: template
from test_oracle import SGD, check_against_the_oracle
from utils.data.sampler import Assignment, GlobalBatchSampler
from utils.data.sets import SampleSubset, take_subset
from utils.data.worker import Fetcher
from utils.extras.images.mixing import Mixing, create_repeated_order, mix_batch
from utils.settings.errors import UserError

RECIPE = ROOT / "docs/recipes/imagenet.toml"
# a small run of the same kind
SMALL = f"--config {RECIPE} --model mini_resnet --epochs 2 --image_size 32 --train_size 28 --resize_size 36 --lr 0.05"
SMALL += " --batch_size 4 --global_batch_size 16 --warmup_epochs 1 --augment_repeats 2 --no-use_amp --save_every 0"


def save_jpegs(root, counts, size=40):
    """<root>/<split>/<class>/<n>.jpg, as CIFAR-10 exported by its class names."""
    generator = torch.Generator().manual_seed(0)
    for split, count in counts.items():
        for label, name in enumerate(("airplane", "bird", "cat")):
            (root / split / name).mkdir(parents=True, exist_ok=True)
            for k in range(count):
                image = torch.randint(0, 100, (size, size, 3), generator=generator, dtype=torch.uint8)
                image[..., label] += 120
                Image.fromarray(image.numpy()).save(root / split / name / f"{k:03d}.jpg")


@pytest.mark.guarantee("samples")
@pytest.mark.parametrize(("mixup", "cutmix"), [(0.2, 0.0), (0.0, 1.0), (0.2, 1.0)])
def test_batches_are_mixed_as_by_torchvision_and_the_default_generator_does_not_advance(mixup, cutmix):
    images, labels = torch.rand(6, 3, 8, 8), torch.arange(6) % 4
    chosen = [(v2.MixUp, mixup), (v2.CutMix, cutmix)]
    kinds = [kind(alpha=alpha, num_classes=4) for kind, alpha in chosen if alpha]
    mixed = []
    for seed in range(20):
        torch.manual_seed(seed)
        expected = v2.RandomChoice(kinds)(images, labels)
        torch.manual_seed(99)
        mixed.append(mix_batch(images, labels, mixup, cutmix, 4, seed))
        assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(99)))
        assert all(map(torch.equal, mixed[-1], expected))
        torch.testing.assert_close(mixed[-1][1].sum(1), torch.ones(6))
    assert len({shares[0, 0].item() for _, shares in mixed}) > 5


def test_the_loss_of_mixed_labels_is_the_weighted_sum_of_both_also_smoothed():
    model, images = MiniResNet(3, 4), torch.randn(2, 3, 8, 8)
    config = TrainingConfig(label_smoothing=0.1)
    first, second = torch.tensor([0, 1]), torch.tensor([2, 3])
    shares = 0.7 * torch.nn.functional.one_hot(first, 4) + 0.3 * torch.nn.functional.one_hot(second, 4)
    mixed = compute_loss(model.eval(), (images, shares), config)
    unmixed = [compute_loss(model, (images, labels), config) for labels in (first, second)]
    torch.testing.assert_close(mixed["loss"][0], 0.7 * unmixed[0]["loss"][0] + 0.3 * unmixed[1]["loss"][0])
    assert mixed["loss"][1] == 2 and mixed["top1"][0] == unmixed[0]["top1"][0]


@pytest.mark.guarantee("weights")
def test_mini_resnet_and_mixed_batches_equal_the_plain_loop_on_two_ranks(runs):
    """In float64; the third global batch of an epoch is short and leaves a rank idle."""
    flags = (*SGD, *"--mixup_alpha 0.4 --cutmix_alpha 1 --label_smoothing 0.1 --max_steps 3".split())
    check_against_the_oracle(runs, 2, 2, torch.float64, flags, 1e-12, task="")


def test_only_training_batches_are_mixed():
    config = TrainingConfig(mixup_alpha=0.2, dataset_size=20, image_size=8)
    assert [create_dataset(config, split).mixing for split in ("train", "val")] == [Mixing(0.2, 0.0, "auto"), None]
    assert create_dataset(TrainingConfig(num_classes=10), "train").mixing is None


@pytest.mark.guarantee("order")
@pytest.mark.parametrize(("n", "repeats", "group"), [(24, 4, 2), (25, 4, 3), (7, 3, 8), (64, 2, 5), (1, 3, 2)])
def test_over_repeats_epochs_each_copy_of_each_image_comes_once(n, repeats, group):
    for cycle in (0, 3):
        epochs = [create_repeated_order(repeats, group, 5, cycle * repeats + part, n) for part in range(repeats)]
        assert all(len(indices) == n for indices in epochs)
        assert torch.cat(epochs).sort().values.tolist() == list(range(n * repeats))
        for indices in epochs:
            images = indices % n
            assert len(set(images.tolist())) <= math.ceil(n / repeats) + 2 * group
            if n >= group:  # images of a micro-batch differ, so that mixup does not mix an image with its copy
                assert all(len(set(chosen.tolist())) == len(chosen) for chosen in images.split(group))
    assert n < 3 or not torch.equal(
        create_repeated_order(repeats, group, 5, 0, n), create_repeated_order(repeats, group, 6, 0, n)
    )


def test_with_whole_groups_all_copies_are_in_one_global_batch_and_epochs_are_as_long_as_torchvisions():
    config = TrainingConfig(augment_repeats=4, batch_size=2, dataset_size=64, image_size=8, augment="none")
    data = create_dataset(config, "train")
    sampler = GlobalBatchSampler(data, batch_size=2, micro_batches_per_step=4, assignment=Assignment(0, 1), seed=1)
    assert sampler.samples_per_epoch == 64 and sampler.steps_per_epoch == 8
    for window in sampler.epoch_order(3).split(8):
        assert (window % 64).unique(return_counts=True)[1].tolist() == [4, 4] and len(window.unique()) == 8
    assert len((sampler.epoch_order(3) % 64).unique()) == 16


def test_copies_have_other_pixels_and_a_subset_of_the_data_has_them_too(tmp_path):
    save_jpegs(tmp_path, {"train": 4})
    config = TrainingConfig(
        **{"dataset": "imagefolder", "data_dir": str(tmp_path), "image_size": 16, "augment": "resized_crop"},
        **{"augment_repeats": 3, "batch_size": 2},
    )
    data = create_dataset(config, "train")
    with pytest.raises(UserError, match=r"--dataset_size 5 .* epoch_order that repeats .* \(with_replacement\)\. Give"):
        take_subset(data, 5, config.seed)
    subset = SampleSubset(data, torch.tensor([0, 2, 3, 4, 7]))
    assert subset.copies == 3
    fetcher = Fetcher(subset, False, 1)
    copies = [fetcher._fetch_sample(0, 2 + 5 * k) for k in range(3)]
    assert len({label for _, label in copies}) == 1 and len({image.sum().item() for image, _ in copies}) == 3
    subset.dataset.augment, images = "crop", torch.stack([copies[0][0]] * 3)  # on the device, too
    moved, _ = subset.device_transform((images, torch.zeros(3)), 1, 0, torch.tensor([2, 7, 12]))
    whole, _ = subset.dataset.device_transform(
        (images, torch.zeros(3)), 1, 0, torch.tensor([subset.indices[2] + 12 * k for k in range(3)])
    )
    assert torch.equal(moved, whole) and len({image.sum().item() for image in moved}) == 3


def test_norm_weight_decay_is_that_of_all_parameters_of_normalization_layers():
    for name in ("mini_resnet", "convnext_tiny"):
        sizes = {"model": name, "image_size": 32, "weight_decay": 0.5}
        model = create_model(TrainingConfig(**sizes), torch.device("cpu"))
        plain = param_groups(model, TrainingConfig(**sizes))
        groups = param_groups(model, TrainingConfig(**sizes, norm_weight_decay=0.25))
        decays = {p: group["weight_decay"] for group in groups for p in group["params"]}
        assert [group["weight_decay"] for group in plain] == [0.5, 0.0] and len(decays) == len([*model.parameters()])
        for module in model.modules():
            is_norm = isinstance(module, torch.nn.BatchNorm2d | torch.nn.LayerNorm)
            for p in module.parameters(recurse=False):
                assert decays[p] == (0.25 if is_norm else 0.5 if p.ndim > 1 else 0.0)


def test_the_recipe_is_torchvisions():
    config = TrainingConfig.from_args(["--config", str(RECIPE)])
    # the decay of 32 steps, as references/classification scales it
    decay = 1 - (1 - 0.99998) * 8 * 128 * 32 / config.epochs
    assert config.ema_decay == pytest.approx(decay ** (1 / 32), abs=1e-6)
    assert config.micro_batches_per_step(8) == 8 and config.micro_batches_per_step(4) == 8


@pytest.mark.guarantee("samples")  # extra: template
@pytest.mark.slow
@pytest.mark.parametrize("attempts", [[(1, TO_END)], [(2, 2), (2, TO_END)]])
def test_the_recipe_on_jpegs_equals_the_kernel_on_one_and_two_ranks_and_after_a_restart(runs, attempts):
    """Two copies of each image in two epochs."""
    save_jpegs(runs.root / "data", {"train": 6, "val": 2})
    check_against_the_kernel(runs, attempts, "", [*SMALL.split(), "--num_classes", 3])


@pytest.mark.slow  # extra: verify
def test_verify_holds_for_the_recipe(tmp_path):
    save_jpegs(tmp_path, {"train": 14, "val": 4})
    flags = [*SMALL.split(), "--data_dir", tmp_path, "--backend", "gloo", "--num_workers", "0"]
    ended = torchrun(2, *flags, script="scripts/verify.py", deadline=500)
    assert ended.code == 0 and "11 of 11 invariants hold" in ended.out, ended.text
