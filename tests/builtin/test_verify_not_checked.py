# extra: verify and template
"""scripts/verify.py says which parts of its checks it could not make. A fork with such parts passes."""

import json
import sys

import pytest

import forks
from ranks import copy_repository, launch, slow
from test_verify_data import MODEL
from test_verify_findings import FLAGS, REGRESSION

DATA = REGRESSION.replace("20000 + 20 *", "0.0 +")
DICTS = DATA.replace("return self.x[index], self.y[index]", 'return {"x": self.x[index], "y": self.y[index]}')
OF_DICTS = MODEL.replace("x, y = batch", 'x, y = batch["x"], batch["y"]')
NO_HELD_OUT = DATA.replace('if split != "test"', 'if split == "train"')
ELSEWHERE = DATA.replace("import torch\n", "import platform\nimport torch\nassert platform.node() != 'elsewhere'\n", 1)
ORDER = """        return self.x[index], self.y[index]

    def epoch_order(self, seed, epoch, n):
        return torch.randperm(n, generator=torch.Generator().manual_seed(seed + epoch))
"""
ORDERED = ELSEWHERE.replace("        return self.x[index], self.y[index]\n", ORDER)
SCHEDULE = "\n\ndef lr_factor(config, step, total_steps, warmup_steps, progress):\n    return 1.0\n"
RARE = MODEL.replace('sum"), len(y))', 'sum"), len(y)), "rare": (torch.tensor(0.0), 0)')
GATHER = """
    if torch.distributed.is_initialized():
        parts = [torch.empty(1) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(parts, torch.ones(1))
    x, y = batch"""
COLLECTIVE = MODEL.replace("\n    x, y = batch", GATHER)


def verify(folder, data, model, packages=None):
    """The result of verify.py on a fork with this dataset.py and model.py, and how the program ended.

    packages: a folder of packages that the fork imports, in a process that is not forked from the warm server.
    """
    fork = copy_repository(folder)
    (fork / "dataset.py").write_text(data)
    (fork / "model.py").write_text(model)
    words = ["scripts/verify.py", "--json", "found.json", *FLAGS]
    if packages is None:
        ended = forks.run(fork, 0, *words)
    else:
        ended = launch([sys.executable, *words], cwd=fork, env={"PYTHONPATH": f"{fork}:{packages}"})
    return json.loads((fork / "found.json").read_text()), ended


@pytest.mark.parametrize(
    ("data", "model", "parts"),
    [
        slow(DATA, MODEL, {}),
        (DICTS, OF_DICTS, {"evaluation": "whether predict keeps the order of samples: model.py"}),
        slow(NO_HELD_OUT, MODEL, {"evaluation": "there is no held-out set"}),
        slow(ELSEWHERE, MODEL, {"content": "the data in a new process (no answer: AssertionError: )"}),
        slow(
            ORDERED,
            MODEL + SCHEDULE,
            {
                "order": "epoch_order in a new process",
                "content": "the data in a new process",
                "schedule": "lr_factor in a new process",
            },
        ),
        slow(DATA, RARE, {"evaluation": "rare, for which nothing counted"}),
        slow(DATA, COLLECTIVE, {"loss": "the loss as one of 4 ranks, where it fails ("}),
    ],
)
def test_a_part_that_was_not_checked_is_named_and_counted(tmp_path, data, model, parts):
    report, ended = verify(tmp_path, data, model)
    assert ended.code == 0 and report["result"] == "ok", ended.text
    named = {check["name"]: check["not_checked"] for check in report["checks"] if check["not_checked"]}
    assert named.keys() == parts.keys(), ended.text
    for name, texts in named.items():
        assert len(texts) == 1 and texts[0].startswith(parts[name]), texts
    assert report["not_checked"] == len(parts)
    counted = {0: "", 1: " 1 part was not checked."}.get(len(parts), f" {len(parts)} parts were not checked.")
    assert f"invariants hold.{counted} The result is in" in ended.out, ended.text


DATED = """
import datetime, os

class Stamp(datetime.datetime):
    pass

if datetime.datetime.__module__ != "datetime":
    os._exit(3)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pandas", "pendulum"])
def test_a_package_with_dates_of_its_own_does_not_end_the_new_process(tmp_path, name):
    """The import of pandas 3.1 crashes where `datetime.datetime` is replaced."""
    package = tmp_path / "site-packages" / name
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(DATED)
    report, ended = verify(tmp_path, f"import {name}\n{DATA}", MODEL, package.parent)
    assert ended.code == 0 and report["not_checked"] == 0, ended.text
