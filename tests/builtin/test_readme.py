"""The README's commands, as they stand there."""

import json
import re
import shlex

import pytest

from config import TrainingConfig
from ranks import PATH, ROOT, copy_repository, launch
from scripts.lib.config_table import BEGIN, END, table
from scripts.lib.network import addresses

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```bash\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
COMMANDS = "".join(BLOCKS).replace("\\\n", " ").splitlines()
LINES = [line.split(" #")[0].strip() for line in COMMANDS if line.strip()]
ENV = {"PATH": PATH}
TINY = "--image_size 8 --batch_size 8 --dataset_size 32 --backend gloo"
# that is learnt within seconds
TASK = "--dataset_size 300 --epochs 3 --image_size 16 --augment none --batch_size 8 --lr 0.03"


def own_address() -> str:
    """Of this machine in a network, as other nodes would be given it."""
    found = [address.split("/")[0] for name, address in addresses().items() if name != "lo"]
    return found[0] if found else pytest.skip("this machine has no address beside its loopback's")


def test_every_command_of_ours_has_flags_that_exist():
    """Those of train.py are parsed by the config, those of launch.sh by its dry run."""
    seen = 0
    for line in (line for line in LINES if "train.py" in line or "scripts/" in line):
        if "launch.sh" in line:
            here = line.replace("MASTER_ADDR=node0", f"MASTER_ADDR={own_address()}")
            ended = launch(["bash", "-c", f"{here} --dry-run"], env={**ENV, "NPROC_PER_NODE": "8"})
            assert ended.code == 0 and "torchrun --nproc-per-node=8 --nnodes=2" in ended.out, line
        elif "slurm.sbatch" in line:
            TrainingConfig.from_args(shlex.split(line.split("slurm.sbatch", 1)[1]))
        elif "kubectl" in line or "docker" in line:
            for file in re.findall(r"-f (\S+)", line):
                assert (ROOT / file).exists(), line
        elif "train.py" in line:
            words = shlex.split(line.split("train.py", 1)[1])
            if "--config" not in words:
                TrainingConfig.from_args(words)
        seen += 1
    assert seen >= 12


@pytest.mark.slow
def test_a_first_hour_with_the_readme(tmp_path):
    """Train by one process, then the block on what a run leaves, word for word, in a clone of its own."""
    copy_repository(tmp_path)
    ended = launch(["bash", "-c", f"python train.py --epochs 1 {TINY}"], env=ENV, cwd=tmp_path)
    assert ended.code == 0, ended.text
    block = next(block for block in BLOCKS if "runs.py" in block)
    for line in block.splitlines():
        if "tensorboard" in line:
            continue  # a server
        ended = launch(["bash", "-c", line + (" --backend gloo" if "train.py" in line else "")], env=ENV, cwd=tmp_path)
        assert ended.code == 0, ended.text
    assert (tmp_path / "curves.svg").exists() and (tmp_path / "model.pt").exists()
    assert json.loads((tmp_path / "runs/default/eval-best.json").read_text())["records"]


def quickstart(folder, *flags):
    ended = launch([copy_repository(folder) / "scripts" / "quickstart.sh", *flags], env=ENV, cwd=folder, deadline=900)
    return ended, json.loads((folder / "runs" / "quickstart-1" / "summary.json").read_text())["best"]["top1"]


@pytest.mark.parametrize("flags", [TASK, pytest.param("", marks=pytest.mark.slow)], ids=["tiny", "as-typed"])
def test_the_quickstart_trains_two_ranks_to_over_90_percent(tmp_path, flags):
    ended, top1 = quickstart(tmp_path, *flags.split())
    assert ended.code == 0 and top1 >= 0.9, ended.text
    assert re.search(r"two ranks reached \d+(\.\d)?.* top-1", ended.out)
    assert "Next:" in ended.out and "2 on 1 node" in ended.out


@pytest.mark.slow
def test_the_quickstart_fails_below_90_percent(tmp_path):
    ended, top1 = quickstart(tmp_path, *TINY.split(), "--epochs", "1")
    assert ended.code != 0 and top1 < 0.9 and "is below 90 %" in ended.err


def test_the_readmes_config_table_is_that_of_the_dataclass():
    assert README.split(BEGIN)[1].split(END)[0].strip() == table(), "run python scripts/lib/config_table.py"


def test_the_readme_is_short_and_names_files_and_functions_that_exist():
    assert len(README.splitlines()) <= 585
    for path in re.findall(r"`((?:scripts|utils|tests)/[\w./]+\.(?:py|sh))`", README):
        assert (ROOT / path).exists(), path
    for file, function in re.findall(r"`(\w+\.py)`: `(\w+)", README):
        assert re.search(rf"(def|class) {function}\b", (ROOT / file).read_text()), (file, function)
