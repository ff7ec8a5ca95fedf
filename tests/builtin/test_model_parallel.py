# extra: template
"""The recipes for a model that is split over ranks: four ranks in float64 against the plain loop in one process."""

import random
import shutil

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import forks
from recipe_forks import Fork

SCRIPTS = {"tensor_parallel": ["gpt", "tensor_parallel"], "pipeline": ["gpt", "tensor_parallel", "pipeline"]}
FLAGS = "--data_dir FOLDER --batch_size 6 --epochs 2 --context 16 --width 32 --depth 4 --backend gloo --no_use_amp"
FLAGS += " --optimizer adamw --lr 3e-3 --weight_decay 0.1 --clip_grad_norm 0.5 --save_every_steps 3"
IN_FLOAT64 = "import torch\ntorch.set_default_dtype(torch.float64)\n"
SCRIPT = IN_FLOAT64 + "import runpy, sys\nrunpy.run_path(sys.argv.pop(1), run_name='__main__')\n"
ORACLE = f"""{IN_FLOAT64}
import sys
sys.path.append("tests")
from config import TrainingConfig
from plain_loop import plain_loop

for model, _, _, _ in plain_loop(TrainingConfig.from_args(), 4):
    pass
torch.save(model.state_dict(), "oracle.pt")
"""
DATA_AND_MODEL = "--model_ranks 2 --grad_accum_steps 2"
MODEL = "--model_ranks 4 --grad_accum_steps 4"


class SplitFork(Fork):
    """A fork whose epochs have 5 full global batches, and a short one, which has no micro-batch for a data rank."""

    def __init__(self, folder, recipe):
        super().__init__(folder, *SCRIPTS[recipe])
        self.script = f"{recipe}.py"
        for split, samples in (("train", 5 * 24 + 4), ("val", 40)):
            text = "".join(random.Random(samples).choices("abcdefghijklmno ", k=16 * samples + 1))
            (folder / "FOLDER" / f"{split}.txt").write_text(text)
        (folder / "float64.py").write_text(SCRIPT)
        (folder / "oracle.py").write_text(ORACLE)

    def oracle(self):
        ended = forks.run(self.folder, 0, "oracle.py", *FLAGS.split())
        assert ended.code == 0, ended.text
        return torch.load(self.folder / "oracle.pt")

    def split(self, flags, name, ranks=4):
        """Train in float64; returns the weights and the output."""
        ended = forks.run(
            self.folder, ranks, "float64.py", self.script, *FLAGS.split(), *flags.split(), "--run_dir", name
        )
        assert ended.code == 0, ended.text
        dcp_to_torch_save(self.checkpoints(name)[-1], self.folder / "whole.pt")
        saved = torch.load(self.folder / "whole.pt", weights_only=True)
        assert saved["progress"] == {"step": 12, "epoch": 2, "samples_in_epoch": 0}
        return saved["model"], ended.text

    def checkpoints(self, name):
        return sorted((self.folder / name / "checkpoints").iterdir())

    def copy_up_to_step_6(self, name, copy):
        shutil.copytree(self.folder / name, self.folder / copy)
        for path in self.checkpoints(copy):
            if path.name > "step_00000006":
                shutil.rmtree(path)


def assert_close(weights, oracle):
    assert weights.keys() == oracle.keys()
    for name, expected in oracle.items():
        torch.testing.assert_close(weights[name], expected, rtol=1e-12, atol=1e-12 * float(expected.abs().max()))
    assert torch.equal(weights["tokens.weight"], weights["head.weight"])


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["tensor_parallel", "pipeline"])
def test_two_data_and_two_model_ranks_equal_one_process_and_continue_as_four_model_ranks(tmp_path, recipe):
    fork = SplitFork(tmp_path, recipe)
    oracle = fork.oracle()
    assert_close(fork.split(DATA_AND_MODEL, "a")[0], oracle)
    fork.copy_up_to_step_6("a", "b")
    weights, text = fork.split(MODEL, "b")
    assert "resumed from b/checkpoints/step_00000006" in text
    assert_close(weights, oracle)


@pytest.mark.parametrize("recipe", [pytest.param("tensor_parallel", marks=pytest.mark.slow), "pipeline"])
def test_a_resumed_split_model_equals_the_uninterrupted_one_bit_for_bit(tmp_path, recipe):
    fork = SplitFork(tmp_path, recipe)
    whole, _ = fork.split(DATA_AND_MODEL, "a")
    fork.copy_up_to_step_6("a", "b")
    resumed, _ = fork.split(DATA_AND_MODEL, "b")
    assert all(torch.equal(weight, resumed[name]) for name, weight in whole.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        f"{MODEL} --pipeline GPipe",
        f"{MODEL} --pipeline 1F1B",
        f"{DATA_AND_MODEL} --pipeline Interleaved1F1B --stages_per_rank 2",
        f"{DATA_AND_MODEL} --pipeline InterleavedZeroBubble --stages_per_rank 2",
    ],
)
def test_every_schedule_gives_the_weights_of_one_process(tmp_path, flags):
    fork = SplitFork(tmp_path, "pipeline")
    assert_close(fork.split(flags, "a")[0], fork.oracle())
