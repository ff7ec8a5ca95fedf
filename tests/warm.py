"""Imports of the server from which test processes are forked, and features that those processes leave out."""

import gc

import PIL.Image  # noqa: F401 - the first picture of a run imports it
import torch
import torch._dynamo

import training  # noqa: F401 - imports everything that ranks need
import utils.report.reporter
import utils.report.tensorboard
from utils.run import provenance
from utils.training import fingerprint

fingerprint._random_keys(torch.device("cpu"))  # cached: megabytes that each rank would compute again
provenance.collect_package_versions()  # caches the packages' metadata
gc.collect()
gc.freeze()  # a garbage collection in a forked process would copy every page of these imports


def be_quick():
    """Turn off features that cost more than a tiny run and that no test checks in these processes."""
    provenance._read_git_commit = lambda: ("", False)
    utils.report.reporter.write_code_zip = lambda path: None
    utils.report.reporter.TensorBoardWriter = lambda folder, start_step: utils.report.tensorboard.TensorBoardWriter(
        None, start_step
    )
