"""Plans of programs beside a run that trains, as its first attempt."""

from pathlib import Path
from types import SimpleNamespace

from config import TrainingConfig
from test_checkpoint import payload
from utils.checkpoint import archive
from utils.checkpoint import format as checkpoint
from utils.extras.companions.programs import create_companion_plan
from utils.files import replace_json

CTX = SimpleNamespace(is_main=True, rank=0, host="here")


def plan_for(tmp_path, **flags):
    config = TrainingConfig(run_dir=str(tmp_path / "run"), **flags)
    config.checkpoint_folder.mkdir(parents=True, exist_ok=True)
    replace_json(config.run_folder / "lock.json", {"token": "t", "has_trained": True})
    return create_companion_plan(config, 0, "here", "t", "", resume_from="", decision={}, apart=[])


def save(plan, step):
    path = checkpoint.step_checkpoint_path(Path(plan["checkpoints"]), step)
    archive.write_archive(path, payload(step))
    return path
