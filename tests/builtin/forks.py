# extra: template
"""Run the scripts of a fork, a changed copy of this repository, in ranks that are forked from the warm server.

Each rank runs `forks.py FOLDER SCRIPT WORDS`, which drops this repository's modules and imports those of the
fork.
"""

import os
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def run(fork, ranks, script, *words, deadline=120.0):
    """Run `torchrun --nproc-per-node=RANKS SCRIPT WORDS` in the fork, or with 0 ranks `python SCRIPT WORDS`; how it
    ended."""
    from ranks import WarmLaunch, finish

    return finish(WarmLaunch(ranks, Path(__file__), [fork, script, *words]), deadline)


def is_ours(module):
    named = vars(module)  # not getattr: torch.classes returns an attribute for any name
    places = [named.get("__file__"), *named.get("__path__", [])]
    return any(str(place).startswith(f"{ROOT}{os.sep}") and "site-packages" not in str(place) for place in places)


def main(folder, script, *words):
    os.chdir(folder)
    for name in [name for name, module in [*sys.modules.items()] if name != "__main__" and is_ours(module)]:
        del sys.modules[name]
    sys.path[:] = [
        folder,
        *(place for place in sys.path if "site-packages" in place or not place.startswith(str(ROOT))),
    ]
    os.environ["PYTHONPATH"] = folder
    sys.argv[:] = [script, *words]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
