# extra: template
"""The output of a run: streams that are closed or full, and names that are not UTF-8 on them and in files."""

import errno
import io
import itertools
import json
import os
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from config import TrainingConfig
from ranks import ROOT, launch
from test_checkpoint import payload
from utils.checkpoint import archive
from utils.checkpoint import format as checkpoint
from utils.files import AppendOnlyFile, read_json, replace_json
from utils.logger import setup_logger, show_progress_bar
from utils.report.tensorboard import TensorBoardWriter
from utils.rng import derive_seed

SPEAK = """
import contextlib, os, sys
from utils.run.command_line import repair_standard_streams
repair_standard_streams()
with open('{file}', 'w') as file:  # it must not get the number of a closed stream
    print('printed', ascii('n\\udce9'), 'n\\udce9', 'na\\u00efve', '\\U0001f600')
    print('warned n\\udce9', file=sys.stderr)
    for number in (1, 2):
        with contextlib.suppress(OSError):
            os.write(number, b'raw\\n')
    found = [os.readlink(f'/proc/self/fd/{{number}}') for number in (0, 1, 2)]
    child = os.popen('readlink /proc/self/fd/1 1>&2; echo child').read()
    file.write(f'{{found}} {{file.fileno() > 2}} {{child.strip()}}')
sys.stdout.flush()
"""
CHANNELS = ["", "<&-", ">&-", "2>&-", ">/dev/full", "2>/dev/full", "| true", ">&1 | true", "2>&1 | true"]
PAIRS = [f"{a} {b}" for a, b in itertools.combinations(CHANNELS[1:6], 2) if a[0] != b[0]]
LOCALES = [  # variables of an environment
    {},
    {"LC_ALL": "C.UTF-8"},
    {"LC_ALL": "C"},
    {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
    {"PYTHONIOENCODING": "ascii"},
    {"PYTHONIOENCODING": "latin-1:strict"},
]


@pytest.mark.parametrize("channels", [*CHANNELS, *PAIRS, "<&- >&- 2>&-"])
def test_a_process_prints_whatever_its_streams_are_and_no_file_gets_their_numbers(tmp_path, channels):
    (tmp_path / "speak.py").write_text(SPEAK.format(file=tmp_path / "found"))
    command = f"set -o pipefail; exec </dev/zero; {sys.executable} {tmp_path}/speak.py {channels}"
    ended = launch(["bash", "-c", command], env={"PYTHONPATH": str(ROOT)})
    assert ended.code == 0 and "Traceback" not in ended.text, ended.text
    output = (tmp_path / "found").read_text()
    assert output.endswith("True child") and "raw" not in output, output
    assert [f"'{os.devnull}'" in output, "printed" in ended.out] == ["&-" in channels, ended.out != ""], output


@pytest.mark.parametrize("env", LOCALES, ids=str)
def test_every_name_is_printed_as_utf_8_in_every_locale(tmp_path, env):
    (tmp_path / "speak.py").write_text(SPEAK.format(file=tmp_path / "found"))
    ended = launch([sys.executable, tmp_path / "speak.py"], env={"PYTHONPATH": str(ROOT), **env})
    assert ended.code == 0, ended.text
    assert ended.out.startswith("printed 'n\\udce9' n\\udce9 naïve \U0001f600\n"), ended.out
    assert ended.err.startswith("warned n\\udce9\n")


NAMES = ["plain", "naïve", "\U0001f600", "n\udce9", "\udcff\udc80", "na\u00efve n\udce9"]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_every_file_takes_every_name_is_utf_8_and_gives_the_name_back(tmp_path, name):
    folder = tmp_path / name
    folder.mkdir()
    replace_json(folder / "a.json", {"path": str(folder)})
    assert (
        read_json(folder / "a.json") == json.loads((folder / "a.json").read_bytes().decode()) == {"path": str(folder)}
    )
    AppendOnlyFile(folder / "a.log").append(f"cannot read {name}")
    shown = name.encode(errors="backslashreplace").decode()
    assert (folder / "a.log").read_bytes().decode() == f"cannot read {shown}\n"
    assert derive_seed("naïve") == 8950882608271409733 and derive_seed(name) >= 0  # the first as ever
    archive.write_archive(folder / "step_00000010.pt", payload(10))
    assert checkpoint.find_latest_valid(folder) == (folder / "step_00000010.pt", [])
    board = TensorBoardWriter(folder / "tensorboard", 0)
    board.write_texts(config={"path": str(folder)})
    board.close()
    assert any((folder / "tensorboard").glob("events*"))
    file = tmp_path / "a.toml"
    for config in (TrainingConfig(data_dir=str(folder)), TrainingConfig(data_dir=rf"\u{name}\udce9")):
        file.write_bytes(config.to_toml().encode(errors="backslashreplace"))  # as it is printed
        assert TrainingConfig.from_args(["--config", str(file)]) == config


@pytest.mark.parametrize(
    ("shape", "rows", "columns", "channels"),
    [((1, 3), 1, 1, 3), ((5, 3), 1, 5, 3), ((70, 1), 8, 8, 1), ((9, 2), 2, 8, 1), ((9, 4), 2, 8, 3), ((0, 3), 0, 0, 3)],
)
def test_at_most_64_images_are_a_grid_on_tensorboard(tmp_path, shape, rows, columns, channels):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    images = torch.arange(1, shape[0] * shape[1] * 6 + 1).remainder(251).byte().view(*shape, 2, 3)
    board = TensorBoardWriter(tmp_path, 0)
    board.write_texts(config={})
    board.write_images("val", {"few": images}, 3)
    board.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    if not rows:
        assert not events.Tags()["images"]
        return
    [event] = events.Images("val/few")
    grid = np.array(Image.open(io.BytesIO(event.encoded_image_string)))
    assert event.step == 3 and grid.shape == (2 * rows, 3 * columns, 3)
    for place in range(rows * columns):
        row, column = 2 * (place // columns), 3 * (place % columns)
        expected = images[place, :channels] if place < shape[0] else torch.zeros(channels, 2, 3, dtype=torch.uint8)
        assert np.array_equal(grid[row : row + 2, column : column + 3], expected.expand(3, 2, 3).permute(1, 2, 0))


class Full(io.StringIO):
    """A stream of another program that calls train()."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def isatty(self):
        return True

    def write(self, text):
        raise self.error


ERRORS = [OSError(errno.ENOSPC, "full"), OSError(errno.EBADF, "closed"), BrokenPipeError(), ValueError("closed file")]


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_no_stream_of_a_program_that_calls_train_ends_the_run(monkeypatch, error):
    monkeypatch.setattr(sys, "stdout", Full(error))
    logger = setup_logger(0)
    logger.info("hello")
    show_progress_bar(logger, 1, 2, "step")
