"""Fingerprints of samples: other content is noticed, and nothing else."""

import itertools

import numpy
import pytest
import torch
from torch.utils.data import Dataset

from utils.data.changes import are_fingerprints_alike
from utils.distributed.context import DistributedContext
from utils.extras import sketches as module
from utils.extras.sketches import compare_sample_fingerprints, fingerprint_of_sample, sample_fingerprints


class Samples(Dataset):
    """Samples of a label, floats with noise, and a text."""

    def __init__(self, get=None, size=200):
        self.get, self.size = get or self.sample, size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return self.get(index)

    def sample(self, index):
        noise = torch.rand(3, 9, generator=torch.Generator().manual_seed(index)) + 0.1 * torch.rand(3, 9)
        return {"x": noise, "label": index % 10, "name": f"sample {index}", "other": object()}


def changed(**others):
    def get(index):
        sample = Samples().sample(index)
        return sample | {name: change(index, sample) for name, change in others.items()}

    return Samples(get)


@pytest.mark.guarantee("other-samples")
def test_other_content_is_noticed():
    reference = sample_fingerprints(Samples(), 0)
    assert len(reference) == 64 and None not in reference and reference == sample_fingerprints(Samples(), 0)
    for other in (
        changed(label=lambda index, _: (index + 1) % 10),
        changed(name=lambda index, _: f"sample {index + 1}"),
        changed(x=lambda _, sample: sample["x"].flip(0)),
        changed(x=lambda _, sample: sample["x"].double()),
        changed(x=lambda _, sample: sample["x"] * 1.01),
        changed(more=lambda *_: 1),
    ):
        assert not are_fingerprints_alike(reference, sample_fingerprints(other, 0))


@pytest.mark.guarantee("other-samples")
def test_what_equal_data_sets_may_differ_in_is_ignored(tmp_path, monkeypatch):
    reference, counter = sample_fingerprints(Samples(), 0), itertools.count()
    (tmp_path / "sample 5").touch()
    assert fingerprint_of_sample(str(tmp_path / "sample 5")) == fingerprint_of_sample("sample 5")  # mounted elsewhere
    assert are_fingerprints_alike(
        reference, sample_fingerprints(changed(x=lambda _, sample: sample["x"] * (1 + 1e-6)), 0)
    )
    unsteady = sample_fingerprints(changed(label=lambda *_: next(counter)), 0)
    assert unsteady == [None] * 64 and are_fingerprints_alike(reference, unsteady)
    assert sample_fingerprints(changed(x=lambda *_: 1 / 0), 0) == [None] * 64
    monkeypatch.setattr(module, "MAX_SECONDS", 0)  # one rank has time for one sample
    assert sample_fingerprints(Samples(), 0) == reference[:1] and are_fingerprints_alike(reference, reference[:1])


def test_training_files_of_known_sizes_are_not_read_and_held_out_ones_are():
    train = Samples(lambda index: pytest.fail("read"))
    held_out = Samples()
    train.has_sizes = held_out.has_sizes = True
    ctx = DistributedContext(0, 0, 1, torch.device("cpu"))
    train_fingerprints, seen = compare_sample_fingerprints({"train": train, "val": held_out}, 0, "", ctx)
    assert train_fingerprints == [] and len(seen) == 64 and None not in seen


def test_arrays_of_numpy_and_lists_are_compared():
    one, two = numpy.arange(6, dtype=numpy.uint8), numpy.arange(6, dtype=numpy.uint8)[::-1]
    assert are_fingerprints_alike([fingerprint_of_sample([one])], [fingerprint_of_sample([one.copy()])])
    assert not are_fingerprints_alike([fingerprint_of_sample([one])], [fingerprint_of_sample([two])])
    assert not are_fingerprints_alike([fingerprint_of_sample(([1.0], "a"))], [fingerprint_of_sample(([2.0], "a"))])
