"""train.py in float64, so that runs can be compared to the last bits: a stand-in for train.py under torchrun."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import torch

from train import main

if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    sys.exit(main())
