# extra: template
"""README.md and docs/*.md: commands, links and tables. test_recipes.py tests docs/recipes."""

import ast
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import forks
import reading_path
from config import TrainingConfig
from config_table import BEGIN, END, table
from images import save_images
from lib.remove_extras import read_deleted
from ranks import PATH, ROOT, copy_repository, lack, launch
from scripts.lib.network import list_addresses

NAMES = ("README.md", "AGENTS.md", "CONTRIBUTING.md", "docs/**/*.md", "tests/faults/README.md")
PAGES = {path: path.read_text() for name in NAMES for path in ROOT.glob(name)}
README = PAGES[ROOT / "README.md"]
PROSE = {path: re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE) for path, text in PAGES.items()}
BLOCKS = {
    path: re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    for path, text in PAGES.items()
    if path.parent.name != "recipes"
}
COMMANDS = "".join(block for blocks in BLOCKS.values() for block in blocks).replace("\\\n", " ").splitlines()
LINES = list(dict.fromkeys(" ".join(line.split(" #")[0].split()) for line in COMMANDS if line.strip()))
ENV = {"PATH": PATH}
TINY = "--image_size 8 --batch_size 8 --dataset_size 32 --backend gloo"
# can be learned within seconds
TASK = "--dataset_size 100 --epochs 2 --image_size 8 --num_classes 2 --augment none --batch_size 8 --lr 0.03"
DELETED = read_deleted((ROOT / "pyproject.toml").read_text())
IS_CUT = bool(DELETED)  # text may name what is deleted
FIELDS = {f"--{name}" for name in TrainingConfig.__dataclass_fields__} | {"--config", "--print-config"}


def own_address() -> str:
    """An address of this machine that other nodes could reach."""
    candidates = [address.split("/")[0] for name, address in list_addresses().items() if name != "lo"]
    return candidates[0] if candidates else pytest.skip("this machine has no address besides the loopback address")


def test_every_documented_command_has_valid_flags():
    """Flags of train.py are parsed by the config, those of launch.sh by its dry run; others must be in the script."""
    seen = 0
    for line in (line for line in LINES if re.search("train.py|scripts/|tests/comparison/", line)):
        if "launch.sh" in line:
            command = line.replace("MASTER_ADDR=node0", f"MASTER_ADDR={own_address()}")
            ended = launch(["bash", "-c", f"{command} --dry-run"], env={**ENV, "NPROC_PER_NODE": "8"})
            expected = "--node-rank=1" if "--hosts" in line else "torchrun --nproc-per-node=8 --nnodes=2"
            assert ended.code == 0 and expected in ended.out, line
        elif "slurm.sbatch" in line:
            flags = line.split("slurm.sbatch", 1)[1].removesuffix("'").replace("$SLURM_ARRAY_TASK_ID", "0")
            TrainingConfig.from_args(shlex.split(flags))
        elif "kubectl" in line or "docker" in line:
            for file in re.findall(r"-f (\S+)", line):
                assert (ROOT / file).exists(), line
        elif "train.py" in line:
            words = shlex.split(line.split("train.py", 1)[1].split(" > ")[0])
            if not {"--config", "--print-config", "--help"} & {*words}:
                TrainingConfig.from_args(words)
        else:
            script, *words = shlex.split(line[re.search("scripts/|tests/", line).start() :])
            text = (ROOT / script).read_text()
            for nested in (word for word in words if word.startswith("--") and " " in word):  # --against FLAGS
                TrainingConfig.from_args(shlex.split(nested))
                words.remove(nested)
            unknown = [word for word in words if word.startswith("--") and word != "--" and word not in FIELDS]
            assert not [word for word in unknown if word not in text and word[2:] not in text], line
        seen += 1
    assert seen >= 40 or IS_CUT


# flags appended to the README's commands, by the first of these parts that a command contains
QUICK = {
    "quickstart.sh": TASK,
    "launch.sh": "--dry-run",
    "--eval_only": "--backend gloo",
    "verify.py --data_dir": "--backend gloo --num_workers 0",
    "train.py --data_dir": "--backend gloo --num_workers 0",
    "train.py": TINY,
}
# left out by default; test_whole_run.py and test_changed_data.py train likewise
SLOW = ("--plot", "--html", "cifar10", "scripts/verify.py", "--dataset imagefolder", "--dataset csv")


def write_fork(folder):
    """The README's model.py and dataset.py, and the FOLDER of its commands: an image folder, and regression data."""
    import torch

    for name, code in re.findall(r"^# ((?:model|dataset)\.py)\n(.*?)(?=^# dataset\.py|^```)", README, re.DOTALL | re.M):
        (folder / name).write_text(code)
    (folder / "FOLDER").mkdir()
    for split, count in (("train", 200), ("val", 40)):
        save_images(folder / "FOLDER" / split, {"cat": 20, "dog": 20})
        images = sorted((folder / "FOLDER" / split).glob("*/*"))
        rows = "".join(f"{image.relative_to(folder / 'FOLDER')},{image.parent.name}\n" for image in images)
        (folder / "FOLDER" / f"{split}.csv").write_text(f"path,label\n{rows}")
        features = torch.randn(count, 8, generator=torch.Generator().manual_seed(count))
        torch.save((features, features.sum(1)), folder / "FOLDER" / f"{split}.pt")


def pasted(repository, after_clone, left_out):
    """A shell script of the README's blocks, in order: Python blocks become files, commands get the flags above."""
    script = ["set -ex"]
    for language, text in re.findall(r"^```(bash|python)\n(.*?)^```", README, re.DOTALL | re.MULTILINE):
        if language == "python":
            script.append("cp ../fork/*.py .")
            continue
        for line in (line.split(" #")[0] for line in text.replace("\\\n", " ").splitlines()):
            # by default one rank: the quick start trains two
            line = re.sub(r"--nproc-per-node=\d", f"--nproc-per-node={1 if left_out else 2}", line)
            line = line.replace("YOUR_URL", str(repository))
            line = line.replace("MASTER_ADDR=node0", f"MASTER_ADDR={own_address()}")
            flags = next((flags for part, flags in QUICK.items() if part in line), "")
            if "git clone" in line:
                script += [line, "cp -r ../fork/FOLDER .", *after_clone]
            elif re.search("cifar10|from torchvision", line) and not left_out:  # without a network, it says what to do
                script.append(f"{line} {flags} 2> download.txt || grep 'cannot be downloaded' download.txt")
            elif not any(part in line for part in left_out):
                script.append(f"{line} {flags}")
    return "\n".join(script)


def repository_in(folder):
    """A git repository with the files of this one."""
    copy_repository(folder)
    for words in ("init", "add .", "-c user.name=a -c user.email=a@b.c commit --message x"):
        subprocess.run(["git", *words.split()], cwd=folder, check=True, capture_output=True)
    return folder


def run_pasted(folder, path, after_clone, left_out, deadline):
    repository = repository_in(folder / "repository")
    (folder / "fork").mkdir()
    write_fork(folder / "fork")
    env = ["env", "-i", f"PATH={path}", f"HOME={folder}", "OMP_NUM_THREADS=1"]
    script = pasted(repository, after_clone, left_out)
    ended = launch([*env, "bash", "-c", script], cwd=folder, deadline=deadline)
    assert ended.code == 0, ended.text[-8000:]
    return ended, folder / "exact-ddp"


@pytest.mark.guarantee("quickstart")
@pytest.mark.skipif(IS_CUT, reason="the README is the fork's own")
def test_the_readmes_commands_work_in_order_from_an_empty_folder(tmp_path):
    """Every block of the README but what is slow, pasted into one shell. The present environment is linked in."""
    is_venv = (Path(sys.prefix) / "bin/activate").exists()
    after_clone = [f"ln -s {sys.prefix} .venv"] if is_venv else []
    ended, clone = run_pasted(tmp_path, "/usr/bin:/bin" if is_venv else PATH, after_clone, SLOW, 280)
    assert re.search(r"two ranks reached \d+(\.\d)?.* top-1", ended.out)
    assert "Next:" in ended.out and "2 ranks on 1 node" in ended.out
    assert (clone / "model.pt").exists()
    runs = [json.loads(file.read_text()) for file in sorted(clone.glob("runs/*/summary.json"))]
    assert len(runs) >= 3 and {run["state"] for run in runs} == {"completed"}
    fork = json.loads((clone / "runs/default/summary.json").read_text())
    assert fork["best_metric"] == "mae" and fork["best"]["mae"] < 0.5


@pytest.mark.guarantee("quickstart")
@pytest.mark.slow
@pytest.mark.alone
def test_the_readmes_commands_work_in_order_in_an_empty_environment(tmp_path):
    """All of them, with a Python that has no packages: the quick start installs them, which takes minutes."""
    path = f"{sys.base_prefix}/bin:/usr/bin:/bin"
    if launch(["env", "-i", f"PATH={path}", "python3", "-c", "import torch"]).code == 0:
        lack("the interpreter outside of this environment has torch")
    ended, clone = run_pasted(tmp_path, path, [], (), 1700)
    install_at, made = ended.out.index("Installing torch, torchvision"), ended.out.index(f"environment: {clone}/.venv")
    assert install_at < made
    assert "11 of 11 invariants hold" in ended.out  # extra: verify


@pytest.mark.slow  # extra: verify
def test_verify_holds_for_the_readmes_example_of_a_fork(tmp_path):
    fork = copy_repository(tmp_path)
    write_fork(fork)
    words = re.search(r"scripts/verify.py (--data_dir FOLDER[^#\n]*)", README)[1].split()
    ended = forks.run(fork, 2, "scripts/verify.py", *words, "--backend", "gloo", "--num_workers", "0", deadline=300)
    assert ended.code == 0, ended.text


def quickstart(folder, *flags):
    ended = launch([copy_repository(folder) / "scripts" / "quickstart.sh", *flags], env=ENV, cwd=folder, deadline=900)
    return ended, json.loads((folder / "runs" / "quickstart-1" / "summary.json").read_text())["best"]["top1"]


@pytest.mark.guarantee("quickstart")
@pytest.mark.slow
def test_the_quickstart_as_typed_trains_two_ranks_to_over_90_percent(tmp_path):
    ended, top1 = quickstart(tmp_path)
    assert ended.code == 0 and top1 >= 0.9, ended.text


@pytest.mark.slow  # extra: chaos and reports
def test_the_quickstart_that_is_killed_has_equal_bits(tmp_path):
    folder = copy_repository(tmp_path)
    ended = launch([folder / "scripts" / "quickstart.sh", "--kill", "--image_size", "8"], env=ENV, deadline=900)
    assert ended.code == 0 and "bitwise equal" in ended.out, ended.text


@pytest.mark.slow
def test_the_quickstart_fails_below_90_percent(tmp_path):
    ended, top1 = quickstart(tmp_path, *TINY.split(), "--epochs", "1")
    assert ended.code != 0 and top1 < 0.9 and "is below 90 %" in ended.err


def test_the_table_of_docs_configuration_matches_the_dataclass():
    page = PAGES[ROOT / "docs" / "configuration.md"]
    rows = [page.split(BEGIN)[1].split(END)[0].strip(), table()]
    if IS_CUT:  # which deletes rows, and not what others say about them
        rows = [re.findall(r"^(?:#.*|\| `--\w+`)", text, re.MULTILINE) for text in rows]
    assert rows[0] == rows[1], "run python tests/builtin/config_table.py"


@pytest.mark.skipif(IS_CUT, reason="marked lines are gone, so the files are shorter than the page says")
def test_the_reading_path_has_the_sizes_of_its_files():
    page = PAGES[ROOT / "docs" / "architecture.md"]
    assert reading_path.BEGIN in page
    assert reading_path.update_sizes(page) == page, "run python tests/builtin/reading_path.py"


def test_no_page_is_wider_than_120_columns():
    for path, text in PAGES.items():
        is_free = "|" if path.name != "README.md" or path.parent != ROOT else "\n"  # rows of tables cannot be wrapped
        assert not [line for line in text.splitlines() if len(line) > 120 and not line.startswith(is_free)], path


def anchors(text):
    """The anchors that GitHub makes for the headings."""
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_flags_of_other_trainers_are_answered_with_flags_that_exist():
    page = (ROOT / "docs/coming-from.md").read_text()
    suggested = {match for line in page.splitlines() for match in re.findall(r"^\| .* \| `(--\w+)", line)}
    assert len(suggested) > 50 or IS_CUT
    assert suggested - {f"--{name}" for fields in DELETED.values() for name in fields} <= FIELDS


def test_every_link_leads_to_a_file_or_a_heading_and_every_page_is_linked():
    linked = {ROOT / "README.md"}
    for path, text in PROSE.items():
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            if form := re.match(r"\.\./\.\./issues/new\?template=(\S+)", link):
                assert (ROOT / ".github/ISSUE_TEMPLATE" / form[1]).is_file()
            if link.startswith(("https://", "../../actions/", "../../issues/")):  # the latter are pages of GitHub
                continue
            name, _, anchor = link.partition("#")
            target = (path.parent / name).resolve() if name else path
            assert target.is_file(), f"{path}: {link}"
            assert not anchor or anchor in anchors(PROSE[target]), f"{path}: {link}"
            linked.add(target)
    assert IS_CUT or not PAGES.keys() - linked


def test_the_pages_name_files_and_functions_that_exist():
    for path, text in PAGES.items():
        for name in re.findall(r"`((?:scripts|utils|tests)/[\w./]+\.(?:py|sh|sbatch))`", text):
            assert (ROOT / name).exists() or IS_CUT, (path, name)
        for file, function in re.findall(r"`(\w+\.py)`: `(\w+)", text):
            assert re.search(rf"(def|class) {function}\b", (ROOT / file).read_text()), (path, file, function)


def messages(path):
    """The strings of a file, with "..." for the values in f-strings."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "..." for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


MESSAGES_OF_TORCH = (
    "Expected to have finished reduction",
    "does not have a deterministic implementation",
    "CUDA error: device-side assert triggered",
)


def test_messages_in_docs_troubleshooting_exist_in_the_code():
    page = PAGES[ROOT / "docs" / "troubleshooting.md"]
    section = page.split("<!-- messages of")[1].split("<!-- end of messages")[0]
    headings = re.findall(r"^### `([^`]+)`$", section, re.MULTILINE)
    files = [path for pattern in ("*.py", "utils/**/*.py") for path in ROOT.glob(pattern)]
    texts = {text for path in files for text in messages(path)}
    assert len(headings) > 50 or IS_CUT
    missing = []
    for heading in headings:
        pattern = re.compile(".*".join(map(re.escape, heading.split("..."))), re.DOTALL)
        is_found = any(map(pattern.search, texts))
        if not is_found and heading not in MESSAGES_OF_TORCH:
            missing.append(heading)
    assert not missing
