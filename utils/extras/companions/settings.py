"""`--mirror`, `--track`, `--on_checkpoint`: programs beside training (docs/companions.md, scripts/companions).

They cost a process each, and no step waits for them. Who keeps runs in object storage, sends them to a tracker, or has
a command for each checkpoint needs them.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from utils.settings.checks import EMPTY, KEY_IN_URL, one_of, path_or_url, refuse
from utils.settings.fields import Settings, setting

mirror_url = refuse(
    (r"^(?!\w+://[^/]|file:///[^/]|$)", "must be a URL such as s3://BUCKET/NAME. Give a path with --run_dir instead."),
    KEY_IN_URL,
)
run_path_or_mirror = refuse(("://", "must be a local folder. Give the URL with --mirror."), EMPTY)
weights_path = path_or_url


def shell_command(value: str) -> str:
    try:
        shlex.split(value)
    except ValueError as error:
        return f"must be a valid shell command ({error}). Fix its quotes."
    return ""


@dataclass(frozen=True, kw_only=True)
class CompanionSettings(Settings):
    mirror: str = setting(
        "run",
        "",
        "URL such as s3://BUCKET/NAME, to which the run is copied to resume from it (empty: none)",
        mirror_url,
    )
    track: str = setting(
        "run",
        "none",
        "experiment tracker",
        one_of("none", "wandb", "mlflow", "trackio"),
    )
    on_checkpoint: str = setting(
        "checkpoints and evaluation",
        "",
        "shell command after each checkpoint, with {} for its path (empty: none)",
        shell_command,
        rare=True,
        is_copied=False,  # the config.json of a run may be from somebody else
    )
