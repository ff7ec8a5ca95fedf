"""Export a checkpoint for inference: python scripts/export.py CKPT OUT [--ema]

OUT is one file with the weights, mean and std of the training images, the class names and the config. The script prints
the code that uses it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from config import UserError
from utils.checkpoint import format as checkpoint
from utils.files import replace_file

SNIPPET = """\
import torch; from config import TrainingConfig; from model import create_model
saved = torch.load("{file}", weights_only=True)
model = create_model(TrainingConfig(**saved["config"]), torch.device("cpu")).eval()
model.load_state_dict(saved["model"])
mean, std = (torch.tensor(saved[name]).view(-1, 1, 1) for name in ("mean", "std"))
predict = lambda images: [saved["classes"][k] for k in model((images / 255 - mean) / std).argmax(1)]  # [B, C, H, W]
"""


def export(source: Path, target: Path, use_ema: bool) -> None:
    """Raises UserError if the checkpoint cannot be read, or has no averaged weights and `use_ema` asks for them."""
    payload, _ = checkpoint.read(source)
    if use_ema and not payload["ema"]:
        raise UserError(f"{source}: has no averaged weights; leave out --ema, or train with --ema_decay 0.999")
    if target.exists() and target.samefile(source):
        raise UserError(f"{target}: is the checkpoint itself; give another name for the export")
    saved = {"model": payload["ema" if use_ema else "model"]}
    # without settings that name files which may not exist where the export is used
    saved["config"] = payload["config"] | {"init_from": "", "resume_from": "", "sync_bn": False}
    saved |= {name: payload["provenance"][name] for name in ("classes", "mean", "std")}
    target.parent.mkdir(parents=True, exist_ok=True)
    replace_file(target, lambda file: torch.save(saved, file))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--ema", action="store_true", help="export the averaged weights")
    options = parser.parse_args()
    try:
        export(options.checkpoint, options.out, options.ema)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    size = options.out.stat().st_size / 1e6
    print(f"wrote {options.out} ({size:.1f} MB); to use it:\n\n{SNIPPET.format(file=options.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
