# extra: template
"""Lists, tuples and paths as settings of a fork: in a run, in its files, between ranks, and on a resume."""

import json

import pytest

import forks
from ranks import copy_repository

SETTINGS = """\
    widths: list[int] = yours([64, 128], "widths of the layers", at_least(8))
    betas: tuple[float, ...] = yours((0.9, 0.99), "betas", between(0, 1), "may")
    vocabulary: Path = yours("words.txt", "a file of words", resume="free")
    sizes: tuple[int, ...] | str = yours("auto", "sizes (auto: from the data)")
    # ---- end of yours"""
RUN = "--image_size 8 --batch_size 4 --dataset_size 32 --num_workers 0 --backend gloo --log_interval 1".split()


@pytest.fixture(scope="module")
def fork(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fork")
    copy_repository(folder)
    config = (folder / "config.py").read_text()
    (folder / "config.py").write_text(config.replace("    # ---- end of yours", SETTINGS))
    data = (folder / "dataset.py").read_text()
    line = "class SyntheticImageDataset(InMemoryImages):\n"
    assert line in data
    (folder / "dataset.py").write_text(data.replace(line, f"{line}    sizes = [3, 5]\n\n"))
    return folder


@pytest.mark.slow
@pytest.mark.guarantee("must-match")
def test_lists_and_paths_are_stored_as_json_and_compared_with_the_checkpoint(fork, runs):
    folder = runs.folder("run")
    first = forks.run(fork, 2, "train.py", *RUN, "--run_dir", folder, "--max_steps", 2, "--vocabulary", "~/a")
    assert first.code == 0, first.text
    stored = json.loads((runs.root / "run/config.json").read_text())
    assert (stored["widths"], stored["betas"], stored["sizes"]) == ([64, 128], [0.9, 0.99], [3, 5])
    assert stored["vocabulary"].endswith("/a") and "~" not in stored["vocabulary"]
    again = [*RUN, "--run_dir", folder, "--max_steps", 4, "--schedule_steps", 4, "--resume_from", "auto"]
    refused = forks.run(fork, 2, "train.py", *again, "--widths", "64,256")
    assert refused.code == 1 and "--widths is 64,256, but the checkpoint has --widths 64,128." in refused.text, (
        refused.text
    )
    continued = forks.run(fork, 2, "train.py", *again, "--betas", "0.9,0.5", "--vocabulary", "b")
    assert continued.code == 0, continued.text
    assert "--betas is 0.9,0.5, but the checkpoint has --betas 0.9,0.99." in continued.text
    assert not [name for name in ("widths", "sizes", "vocabulary") if f"{name}=" in continued.text]
