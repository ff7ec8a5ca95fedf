"""Two runs beside each other: their best and final top-1, and the SHA-256 of their last weights; a picture of their
curves.

python scripts/compare.py runs/a runs/b --plot ab.svg

Exits 0 when the weights are the same to the bit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from config import UserError
from runs import show
from utils.checkpoint import format as checkpoint


def weights_digest(folder: Path) -> str:
    """SHA-256 over names and bytes of the weights of the run's newest checkpoint. Raises UserError where there is
    none."""
    path = checkpoint.best_or_newest(folder / "checkpoints", prefers_best=False)
    digest = hashlib.sha256()
    for name, tensor in sorted(checkpoint.read(path)[0]["model"].items()):
        digest.update(name.encode() + tensor.flatten().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("runs", nargs=2, type=Path)
    parser.add_argument("--plot", type=Path, metavar="FILE.svg")
    options = parser.parse_args()
    try:
        show(options.runs, options.plot, "top1")
        digests = [weights_digest(folder) for folder in options.runs]
    except UserError as refused:
        print(refused, file=sys.stderr)
        return 2
    print()
    for folder, digest in zip(options.runs, digests, strict=True):
        summary = json.loads((folder / "summary.json").read_text())
        print(f"{folder}: top-1 {summary['final_top1']:.4f}, weights {digest[:16]}, {summary['restarts']} restart(s)")
    print("the same to the bit" if digests[0] == digests[1] else "NOT the same weights")
    return int(digests[0] != digests[1])


if __name__ == "__main__":
    sys.exit(main())
