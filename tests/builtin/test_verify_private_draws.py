# extra: verify and template
"""scripts/verify.py notes training samples that a private generator augments alike in all epochs, and finds other data
that are seldom meant; it is silent on data that resemble them."""

import pytest

from test_verify_data import REGRESSION, broken, line_of, verified

SAMPLE = "        return self.x[index], self.y[index]\n"
IMPORTS = "import hashlib, os, random\nimport numpy\nimport torch\nfrom utils.rng import derive_seed, sample_draws\n"
DATA = REGRESSION.replace("import torch\n", IMPORTS, 1).replace(
    "        self.x =",
    "        self.is_training, self.first = count > 100, 1000 * (count > 100)\n"
    "        self.generator, self.random = torch.Generator(), random.Random()\n"
    "        self.old = numpy.random.RandomState(0)\n"
    "        self.x =",
)
DRAWN = SAMPLE.replace("self.x[index]", "self.x[index] + self.noise(index)") + (
    "\n    def noise(self, index):\n        if not (CONDITION):\n            return 0.0\n        return NOISE\n"
)
ON_DEVICE = SAMPLE + (
    "\n    def device_transform(self, batch, seed, epoch, indices):\n        if not self.is_training:\n"
    "            return batch\n        return batch[0] + NOISE, batch[1]\n"
)
OF_TRANSFORM = """

class Jitter:
    def __init__(self):
        self.old = numpy.random.RandomState(0)

    def __call__(self, x, key):
        self.old.seed(key)
        return x + self.old.rand()

"""
SEEDED = "torch.rand(8, generator=torch.Generator().manual_seed({}))".format
NOTE = "Please check: Training samples, and not held-out ones, depend on a generator that is seeded alike in all epochs"


def data_with(noise, sample=DRAWN, condition="self.is_training"):
    return DATA.replace(SAMPLE, sample.replace("CONDITION", condition).replace("NOISE", noise))


ALIKE = {
    "Generator": data_with(SEEDED("index")),
    "a hash of the index": data_with(SEEDED("int(hashlib.md5(str(index).encode()).hexdigest()[:8], 16)")),
    "derive_seed": data_with(SEEDED("derive_seed('noise', index)")),
    "a kept Generator": data_with("torch.rand(8, generator=self.generator.manual_seed(index))"),
    "default_rng": data_with("numpy.random.default_rng(index).random()"),
    "RandomState": data_with("numpy.random.RandomState(index).rand()"),
    "a kept RandomState": data_with("(self.old.seed(index), self.old.rand())[1]"),
    "Random": data_with("random.Random(index).random()"),
    "a kept Random": data_with("(self.random.seed(index), self.random.random())[1]"),
    "a transform that keeps its generator": data_with("self.transforms[0](0.0, index)")
    .replace("class Rows(", f"{OF_TRANSFORM}class Rows(")
    .replace("        self.x =", "        self.transforms = [Jitter()]\n        self.x ="),
    "on the device": data_with(SEEDED("int(indices[0])"), ON_DEVICE),
    "sample_draws": data_with("sample_draws(seed, 0, indices, 8) / 2**32", ON_DEVICE),
}
SOUND = {
    "no noise": DATA,
    "global": data_with("torch.rand(8)"),
    "seeded by a draw": data_with(SEEDED("int(torch.randint(2**40, ()))")),
    "by the epoch": data_with("sample_draws(seed, epoch, indices, 8) / 2**32", ON_DEVICE),
    "each sample from its index": data_with(SEEDED("self.first + index"), condition="True"),
    "a lookup": data_with("self.x[(index * 7) % 50]"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ALIKE)
def test_samples_that_are_augmented_alike_in_all_epochs_are_noted(tmp_path, kind):
    ended = verified(tmp_path, ALIKE[kind])
    assert not broken(ended) and NOTE in line_of(ended, "content"), ended.text


@pytest.mark.slow
@pytest.mark.parametrize("kind", SOUND)
def test_samples_that_may_be_drawn_so_are_not_noted(tmp_path, kind):
    ended = verified(tmp_path, SOUND[kind])
    # samples with random noise cannot be found among the held-out ones, which is another question
    line = line_of(ended, "content").replace("Not checked: whether held-out samples are training samples", "")
    assert not broken(ended) and "Please check" not in line and "Not checked" not in line, ended.text


SCALED = """
    rows.y = (rows.y - rows.y.min()) / (rows.y.max() - rows.y.min())
    rows.x[: len(rows.x) // 2, 0] += len(config.resume_from)
    rows.sampler = torch.utils.data.WeightedRandomSampler(torch.ones(len(rows)), len(rows))
    return rows
"""


def test_several_faults_of_one_fork_are_named(tmp_path):
    create = (
        "    if split == 'test':\n        return None\n    rows = Rows(500 if split == 'train' else 100, len(split))"
    )
    ended = verified(tmp_path, ALIKE["default_rng"].rpartition("    return Rows(")[0] + create + SCALED)
    content, resume = line_of(ended, "content"), line_of(ended, "resume")
    assert broken(ended) == ["resume"] and "Samples or their order differ in a run that is continued" in resume
    for text in ("Held-out columns have a maximum of exactly 1", "No code of the fork reads sampler,"):
        assert NOTE in content and f"Please check: {text}" in content, content
