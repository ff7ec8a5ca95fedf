# extra: template
"""No process that is forked asks for CUDA: once a parent has initialized the driver, its children cannot use it.

Ranks of tests are forked from a server, loader workers from a rank. On a machine without a GPU nothing else shows it.
"""

import json
import sys

import pytest
import torch

from ranks import ROOT, launch

pytestmark = pytest.mark.skipif(torch.version.cuda is None, reason="this torch is built without CUDA")
SERVER = """
import os, sys
sys.path[:0] = ["tests", "."]
import warm
if not os.fork():
    import torch
    print("cannot use CUDA" if torch.cuda._is_in_bad_fork() else "can use CUDA")
    sys.stdout.flush()
    os._exit(0)
os.wait()
"""
# every fork of the program gets traps in the two functions through which torch initializes CUDA
PROGRAM = """
import os, runpy, sys, traceback, torch

def trap(*_):
    with open(sys.argv[1] + f".{os.getpid()}", "w") as file:
        traceback.print_stack(file=file)
    raise RuntimeError("a forked process asks for CUDA")

def set_traps():
    forks.write("x")
    forks.flush()
    torch._C._cuda_getDeviceCount = torch.cuda._lazy_init = trap

forks = open(sys.argv[1], "a")
os.register_at_fork(after_in_child=set_traps)
found, script, sys.argv = sys.argv[1], sys.argv[2], [sys.argv[1], *sys.argv[3:]]
sys.path[0] = os.path.dirname(script)
runpy.run_path(script, run_name="__main__")
"""


def test_ranks_forked_from_the_test_server_can_use_cuda():
    ended = launch([sys.executable, "-c", SERVER], cwd=ROOT)
    assert ended.out.strip() == "can use CUDA", ended.text


@pytest.mark.parametrize("script", ["train.py", pytest.param("scripts/verify.py", marks=pytest.mark.slow)])
def test_loader_workers_do_not_ask_for_cuda(tmp_path, script):
    flags = "--num_workers 2 --dataset_size 64 --batch_size 16 --epochs 1 --image_size 8 --backend gloo".split()
    forks = tmp_path / "forks"
    words = [sys.executable, "-c", PROGRAM, forks, ROOT / script, *flags, "--run_dir", tmp_path / "run"]
    ended = launch(words, cwd=tmp_path)
    cuda_queries = {file.name: file.read_text() for file in tmp_path.glob("forks.*")}
    assert ended.code == 0 and not cuda_queries, json.dumps(cuda_queries, indent=1) + ended.text
    assert len(forks.read_text()) >= 2
