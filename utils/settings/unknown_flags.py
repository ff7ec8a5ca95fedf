"""The answer to a flag, or a key of a config file, that does not exist."""

from __future__ import annotations

import re
from collections.abc import Collection

from utils.settings.deleted_extras import read_deleted_extras
from utils.settings.other_trainers import find_advice
from utils.settings.removed import REMOVED_SETTINGS

TORCHRUN_FLAGS = """nproc_per_node nnodes node_rank master_addr master_port max_restarts local_rank world_size
gpus devices num_nodes"""
WITHOUT_FIELD = "If your fork has no such field"  # how a part of an answer begins that is for such a fork only
MIN_MISSPELLED_LENGTH = 5  # letters of a word that stays the same word with a wrong one: not so of speed and seed


def explain_unknown_flag(word: str, names: Collection[str]) -> tuple[str, str]:
    """Return what the word is and what to do, in whole sentences; and the flag that was meant, or "".

    Args:
        word: as it was given: --name, --name=value, or the key of a file.
        names: of the flags that exist.
    """
    given_name = word.split("=")[0]
    # in LightningCLI a group comes first: --trainer.max_epochs
    name = given_name.lstrip("-").replace("-", "_").rpartition(".")[2]
    dashes = ""
    is_unknown = f"{given_name} is not a setting."
    if word.startswith("-"):
        dashes = "--"
        is_unknown = f"{given_name} is not a flag here."
    if name in TORCHRUN_FLAGS.split():
        return f"{is_unknown} Start the ranks with torchrun --standalone --nproc-per-node=N train.py.", ""
    if name in REMOVED_SETTINGS:
        return f"{given_name} was removed. {REMOVED_SETTINGS[name].replacement}", ""
    for extra, settings in read_deleted_extras().items():
        if name.removeprefix("no_") in settings:
            return f"{given_name} needs the extra {extra}, which this fork has deleted. See docs/extras.md.", ""
    advice = find_advice(name, names)
    if advice == "":
        return f"{is_unknown} {explain_missing_field(name)}", ""
    parts = [format_advice(part) for part in (advice or "").split("; ") if part]
    meant = find_intended_flag(name, names, advice or "")
    if meant:
        details = [part for part in parts[1:] if not part.startswith(WITHOUT_FIELD)]
        return " ".join([f"{is_unknown} Did you mean {dashes}{meant}?", *details]), meant
    if parts:
        return " ".join([is_unknown, *parts]), ""
    return f"{is_unknown} See --help all for all flags.", ""


def explain_missing_field(name: str) -> str:
    """Return what to do about the option of another trainer that is a flag which this fork does not have."""
    for extra, settings in read_deleted_extras().items():
        for setting in settings:
            if find_advice(name, [setting]):
                return f"--{setting} needs the extra {extra}, which this fork has deleted. See docs/extras.md."
    return 'Add a field to the block "yours" of config.py, or leave it out.'


def format_advice(part: str) -> str:
    """Return a part of an answer as a sentence without Markdown."""
    first_letter = part[0].upper()  # of code it is a backtick
    text = re.sub(r"\[(.*?)\]\((.*?)\)", r"\1 (docs/\2)", first_letter + part[1:])
    return text.replace("`", "") + "."


def find_intended_flag(name: str, names: Collection[str], advice: str) -> str:
    """The flag that another trainer or a typing error calls by this name, or "" if none has its meaning.

    Args:
        advice: about the option of another trainer. It begins with a flag alone if that has the same meaning.
    """
    other_name = re.match(r"`--(\w+)`(; |$)", advice)
    if other_name:
        return other_name[1]
    if advice:
        return ""
    for known_name in names:
        if is_misspelled(name, known_name):
            return known_name
    return ""


def is_misspelled(name: str, known_name: str) -> bool:
    """Whether a name is a flag's with other separators, or with at most one wrong letter in each word.

    Digits are never wrong: beta1 and beta2 are two settings.
    """
    if re.findall(r"\d+", name) != re.findall(r"\d+", known_name):
        return False
    if name.replace("_", "") == known_name.replace("_", ""):
        return True
    words = name.split("_")
    known_words = known_name.split("_")
    if len(words) != len(known_words):
        return False
    errors = 0
    for word, known_word in zip(words, known_words, strict=True):
        if word == known_word:
            continue
        errors += 1
        if not is_one_edit_apart(word, known_word, min_length=3 if len(words) > 1 else MIN_MISSPELLED_LENGTH):
            return False
    return errors == 1 or len(known_name) >= 2 * MIN_MISSPELLED_LENGTH


def is_one_edit_apart(word: str, known_word: str, min_length: int) -> bool:
    """Whether two letters side by side were exchanged, or one was left out, added or replaced.

    Args:
        min_length: the letters of the shortest word in which one may be left out or added. An "s" at the end always
            may, and in a word that is not long no letter may be replaced.
    """
    if word.removesuffix("s") == known_word.removesuffix("s"):
        return True
    if len(word) == len(known_word):
        wrong = [index for index, letter in enumerate(known_word) if word[index] != letter]
        if len(wrong) == 1:
            return len(word) >= MIN_MISSPELLED_LENGTH
        first = wrong[0]
        return len(wrong) == 2 and word[first : first + 2] == known_word[first : first + 2][::-1]
    shorter, longer = sorted([word, known_word], key=len)
    is_one_more = any(longer[:index] + longer[index + 1 :] == shorter for index in range(len(longer)))
    return is_one_more and len(shorter) >= min_length
