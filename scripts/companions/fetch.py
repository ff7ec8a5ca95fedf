# extra: companions
"""Copy a checkpoint or a file at a URL to this machine, and answer with its path."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from scripts.companions.follow import answer_rank
from scripts.lib.mirrored_run import local_checkpoint

if __name__ == "__main__":
    answer_rank(lambda plan: {"path": str(local_checkpoint(plan["source"]))})
