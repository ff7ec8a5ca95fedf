# extra: lengths and template
"""Real frames or tokens per second of the recipes for speech and text, with and without --batch_tokens.

python tests/comparison/lengths.py [--rounds 3]

Each way trains one epoch of the same samples on two ranks, in turns. The largest micro-batch is as large in each, so
that they need as much memory.
Lengths are made: like LibriSpeech's utterances, at a quarter of their length, and log-normal lines with a sigma of 1.1.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/builtin")]

import torch

from recipe_forks import Fork

# what the recipes did before: batches of a fixed number, sorted within 16 of them
SORTED = """
    def epoch_order(self, seed, epoch, n):
        order = torch.randperm(n, generator=torch.Generator().manual_seed(seed + epoch))
        lengths = torch.tensor(self.lengths)
        return torch.cat([some[lengths[some].argsort()] for some in order.split(16 * SIZE)])

    def collate"""


def speech(folder):
    """480 utterances, most of 3 to 4 s. Returns their frames."""
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    seconds = [rng.gauss(3.5, 0.5) if rng.random() < 0.84 else rng.uniform(0.3, 3) for _ in range(480)]
    waveforms = [torch.randn(int(16_000 * min(6, max(0.3, duration))), generator=generator) for duration in seconds]
    torch.save({"waveforms": waveforms, "texts": ["a rank" for _ in waveforms]}, folder / "train.pt")
    return [1 + len(waveform) // 160 for waveform in waveforms]


def text(folder):
    """4,000 lines of 2 to 512 bytes. Returns their lengths."""
    rng = random.Random(0)
    lengths = [min(512, max(2, int(rng.lognormvariate(4, 1.1)))) for _ in range(4000)]
    (folder / "train.txt").write_text("\n".join("".join(rng.choices("abcdefgh", k=length)) for length in lengths))
    return lengths


def samples_per_s(folder, *flags):
    """Of one epoch on two ranks, data waits included."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py"]
    command += "--data_dir FOLDER --optimizer adamw --epochs 1 --no-use_amp --num_workers 0 --backend gloo".split()
    subprocess.run([*command, "--overwrite", *flags], cwd=folder, check=True, capture_output=True, timeout=900)
    return json.loads((folder / "runs/default/summary.json").read_text())["samples_per_s"]


def compare(name, make, size, rounds):
    with tempfile.TemporaryDirectory() as root:
        forks = {way: Fork(Path(root) / way, name).folder for way in ("uniform", "sorted", "budget")}
        for folder in forks.values():
            lengths = make(folder / "FOLDER")
        code = (forks["sorted"] / "dataset.py").read_text()
        code = code.replace("\n    def collate", SORTED.replace("SIZE", str(size)), 1)
        (forks["sorted"] / "dataset.py").write_text(code)
        mean = sum(lengths) / len(lengths)
        budget = size * max(lengths)
        flags = {way: ["--batch_size", str(size)] for way in forks} | {"budget": ["--batch_tokens", str(budget)]}
        rates = {way: [] for way in forks}
        for turn in range(rounds):
            for way in list(forks) if turn % 2 else reversed(forks):
                rates[way].append(mean * samples_per_s(forks[way], *flags[way]))
    print(f"{name}: {size} samples of {mean:.0f} on average, N = {budget}, n = {rounds}")
    for way, speeds in rates.items():
        ratio = statistics.median(a / b for a, b in zip(speeds, rates["sorted"], strict=True))
        print(f"  {way:8} {statistics.median(speeds):10,.0f} per second, {ratio:.2f} of sorted", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    compare("speech", speech, 8, rounds)
    compare("text", text, 16, rounds)
