# extra: template
"""docs/coming-from.md and its tables: every option of the programs is answered, with flags that this fork has."""

import re

import pytest

from coming_from_page import BEGIN, END, MAX_CELL_WORDS, PAGE, ROOT, option, tables
from config import SETTINGS, list_fork_settings
from lib.fork_files import read_files
from lib.remove_extras import delete_from_files, read_extras
from test_reference import entries
from trainer_options import OPTIONS, OTHER_MEANING
from utils.settings.deleted_extras import read_deleted_extras
from utils.settings.other_trainers import TRAINERS, find_advice, find_flags, normalize_name
from utils.settings.unknown_flags import TORCHRUN_FLAGS, explain_unknown_flag

FIELDS = {setting.name for setting in SETTINGS}
FIELDS |= {name for fields in read_deleted_extras().values() for name in fields}  # the page is that of the template
FLAGS = FIELDS | {"config", "print_config"}
YOURS = {field.name for field in list_fork_settings()}
ROWS = [row for trainer in TRAINERS for row in trainer.answers.items()]
IS_CUT = bool(read_deleted_extras())  # which deletes rows
TEXT = PAGE.read_text(encoding="utf-8")
FILES = {name: text for name, text in read_files(ROOT).items() if not name.startswith("tests/")}


def answer(flag, fields=FIELDS):
    """What train.py says about a flag in a fork with these fields."""
    return explain_unknown_flag(f"--{flag}", {*fields, "config", "print_config"})[0]


def test_the_tables_of_the_page_are_those_of_the_program():
    assert IS_CUT or TEXT.split(BEGIN)[1].split(END)[0].strip() == tables(), "run tests/builtin/coming_from_page.py"


@pytest.mark.parametrize("program", OPTIONS)
def test_each_option_of_a_program_is_a_flag_here_or_is_answered(program):
    options = OPTIONS[program].split()
    others = [name for name in options if name not in FLAGS and name not in TORCHRUN_FLAGS.split()]
    assert IS_CUT or not [name for name in others if not find_advice(name, FLAGS)]
    assert IS_CUT or not [name for name in others if "See --help" in answer(name)]


def test_the_page_lists_all_options_that_mean_something_else_by_a_flag_here():
    section = TEXT.split("## Flags of the same name and another meaning")[1].split("\n## ")[0]
    listed = re.findall(r"^\| `--(\w+)` \|", section, re.MULTILINE)
    meant = {name for names in OTHER_MEANING.values() for name in names.split()}
    assert meant <= FIELDS and listed == sorted(listed)
    assert IS_CUT or {*listed} == meant
    for program, names in OTHER_MEANING.items():
        assert {*names.split()} <= {*OPTIONS[program].split()}, program


def test_cells_are_short_and_longer_answers_are_sentences_in_a_list():
    text = TEXT.split(BEGIN)[1].split(END)[0]
    text = re.sub(r"<!-- .*? -->", "", text)
    cells = re.findall(r"^\| `.* \| (.*) \|$", text, re.MULTILINE)
    assert IS_CUT or len(cells) > 100
    assert not [cell for cell in cells if len(cell.split()) > MAX_CELL_WORDS]
    items = re.findall(r"^- `-.*(?:\n  .*)*", text, re.MULTILINE)
    assert IS_CUT or len(items) > 150
    assert not [item for item in items if not re.fullmatch(r"- (`-[\w-]+`,?\s+)*`-[\w-]+`:\n  [A-Z`](.|\n)*\.", item)]
    assert ";" not in text


@pytest.mark.parametrize("extra", sorted(read_extras(FILES)))
def test_without_an_extra_the_page_names_nothing_of_it_and_all_else(extra):
    """A part of an answer goes with the flag, the file or the page that it needs."""
    left, fields = delete_from_files(FILES, {extra})
    text = left["docs/coming-from.md"]
    code = re.findall(r"`--(?:no-)?([\w-]+)", text)
    assert not fields[extra].keys() & {*code}
    gone = [name for name in FILES if name not in left]
    assert not [name for name in gone if re.search(rf"[`/(]{re.escape(name.removeprefix('docs/'))}\b", text)]
    if IS_CUT:
        return
    for names, answer_text in ROWS:
        parts = [part for part in answer_text.split("; ") if not find_flags(part) & fields[extra].keys()]
        if extra == "benchmark":
            parts = [part for part in parts if "scripts/benchmark.py" not in part]
        listed = [name for name in names.split() if option(name) in text]
        assert listed == (names.split() if parts else []), names


def test_the_answers_name_flags_and_functions_that_exist():
    functions = {name for title in ("model", "dataset") for name in entries(f"Functions of {title}.py")}
    functions |= entries("Methods of a data set").keys()
    assert IS_CUT or len(ROWS) > 250
    for names, text in ROWS:
        assert find_flags(text) <= FLAGS, (names, text)
        for function in re.findall(r"`(\w+)` in `(?:model|dataset)\.py`", text):
            assert function in functions, (names, text)


def test_an_answer_is_short_and_no_option_has_two():
    answers = {}
    for names, text in ROWS:
        assert len(text) <= 200, names
        for name in names.split():
            assert answers.setdefault(normalize_name(name), text) == text, name
            assert not [part for part in text.split("; ") if not part or part.endswith((".", ","))], text
    assert not answers.keys() & {normalize_name(field) for field in FIELDS}


@pytest.mark.parametrize("deleted", [YOURS, {"dataset"}, {"image_size", "sync_bn"}, {"patience", "keep_last"}])
def test_no_answer_names_a_flag_that_the_fork_has_deleted(deleted):
    """What is left of an answer is one that helps: another part of it, or how to add the field."""
    left = FIELDS - deleted
    for names, text in ROWS:
        for name in names.split():
            reply = answer(name, left)
            message = reply.removeprefix(f"--{name} ")
            named = {*re.findall(r"--(?:no-)?(\w+)", re.sub(r"\w+\.py --\S+", "", message))}
            is_about_deleted = bool(find_flags(text) & deleted)
            assert not named & deleted, reply
            assert "See --help" not in message and ("yours" in message) <= (is_about_deleted or "yours" in text), reply
            meant = re.fullmatch(r"`--(\w+)`", text.split("; ")[0])
            if meant and not is_about_deleted:
                assert message.startswith(f"is not a flag here. Did you mean --{meant[1]}?")


@pytest.mark.parametrize(
    ("flag", "deleted", "expected"),
    [
        (
            "data-path",
            {"dataset"},
            "--data-path is not a flag here. Did you mean --data_dir?",
        ),
        (
            "data-path",
            set(),
            "--data-path is not a flag here. Did you mean --data_dir? For folders of images see --dataset.",
        ),
        ("resolution", set(), "--resolution is not a flag here. Did you mean --image_size?"),
        (
            "resolution",
            YOURS,
            "--resolution is not a flag here. If your fork has no such field, choose the size in create_dataset in"
            " dataset.py.",
        ),
        (
            "reprob",
            {"random_erase"},
            '--reprob is not a flag here. Add a field to the block "yours" of config.py, or leave it out.',
        ),
        (
            "warmup_ratio",
            set(),
            "--warmup_ratio is not a flag here. With --epochs give --warmup_epochs, which is the ratio x the epochs."
            " With --max_steps give --warmup_steps, which is the ratio x the steps.",
        ),
        (
            "auto_lr_find",
            set(),
            "--auto_lr_find is not a flag here. Use the recipe sweeps (docs/recipes/sweeps.md).",
        ),
        ("trainer.max_epochs", set(), "--trainer.max_epochs is not a flag here. Did you mean --epochs?"),
        ("learningrate", set(), "--learningrate is not a flag here. Did you mean --lr?"),
        (
            "no_sortaGrad",
            set(),
            "--no_sortaGrad is not a flag here. Write epoch_order in dataset.py, which gets the epoch.",
        ),
    ],
)
def test_answers_of_a_fork(flag, deleted, expected):
    assert answer(flag, FIELDS - deleted) == expected


# Options of the programs for which the flag with the most similar name was suggested. It means something else.
MISLEADING = """bn-momentum train-split beta train-img-sizes train-batch-sizes train-size-probs use-train-size
train-resize-size val-dataset dataset-steps eval-size activation_checkpointing_kwargs overwrite_cache train_file conf
lrf total-batch-size resume-from-step sample-every load-optimizer mmlu-epochs"""
# The same of options that no table has: of accelerate's launcher, and of callbacks and strategies of Lightning and trl.
UNANSWERED = """activation_checkpointing_policy batch_size_fn checkpoint_io classes fp8_backend fp8_interval
fsdp_activation_checkpointing_offload interval log_momentum log_weight_decay on_load_checkpoint on_save_checkpoint
predictions remove_checkpoint_dir run_id scheduling tracker update_every_n_steps use_alpha logging_interval"""


@pytest.mark.parametrize("word", f"{MISLEADING} {UNANSWERED}".split())
def test_a_similar_name_with_another_meaning_gets_no_flag(word):
    assert "Did you mean" not in answer(word)


@pytest.mark.parametrize("word", MISLEADING.split())
def test_an_option_that_was_answered_with_a_wrong_flag_has_an_answer(word):
    assert answer(word).startswith(f"--{word} is not a flag here. ")
