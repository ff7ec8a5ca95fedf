"""What the server that test processes are forked from imports, once; and what each of them leaves out."""

import gc

import torch._dynamo  # noqa: F401 - torch.optim imports it, in seconds, with the first optimizer

import training  # noqa: F401 - all that ranks need
import utils.report.reporter
import utils.report.tensorboard
from utils.run import provenance

gc.collect()
gc.freeze()  # a collection in a forked process would copy every page of what is imported here


def be_quick():
    """Without what costs more than a tiny run and no test looks at in these processes; builtin/test_whole_run.py has
    it."""
    provenance._commit = lambda: ("", False)
    utils.report.reporter.zip_code = lambda path: None
    utils.report.reporter.Board = lambda folder, start_step: utils.report.tensorboard.Board(None, start_step)
