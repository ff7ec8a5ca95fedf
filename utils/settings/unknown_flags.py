"""The answer to a flag, or a key of a config file, that does not exist."""

from __future__ import annotations

import re
from collections.abc import Collection

from utils.settings.deleted_extras import read_deleted_extras
from utils.settings.other_trainers import find_advice
from utils.settings.removed import REMOVED_SETTINGS

TORCHRUN_FLAGS = """nproc_per_node nnodes node_rank master_addr master_port max_restarts local_rank world_size
gpus devices num_nodes"""
WITHOUT_FIELD = "if your fork has no such field"  # how a part of an answer begins that is for such a fork only
MIN_MISSPELLED_LENGTH = 5  # letters of a word that stays the same word with a wrong one: not so of speed and seed


def explain_unknown_flag(word: str, names: Collection[str]) -> tuple[str, str]:
    """One sentence that says what the word is, and ends with what to do; and the flag that was meant, or "".

    Args:
        word: as it was given: --name, --name=value, or the key of a file.
        names: of the flags that exist.
    """
    dashes = "--" if word.startswith("-") else ""
    # in LightningCLI a group comes first: --trainer.max_epochs
    name = word.split("=")[0].lstrip("-").replace("-", "_").rpartition(".")[2]
    if name in TORCHRUN_FLAGS.split():
        torchrun = "torchrun --standalone --nproc-per-node=N train.py"
        return f"{word}: is not known; start the ranks with torchrun: {torchrun}", ""
    if name in REMOVED_SETTINGS:
        return f"{word} was removed. {REMOVED_SETTINGS[name].replacement}", ""
    for extra, settings in read_deleted_extras().items():
        if name.removeprefix("no_") in settings:
            return f"{word}: this fork has no extra {extra}; see docs/extras.md", ""
    advice = find_advice(name, names)
    if advice == "":
        return f'{word}: is not a flag of this fork; add a field to the block "yours" of config.py, or leave it out', ""
    text = re.sub(r"\[(.*?)\]\((.*?)\)", r"\1 (docs/\2)", (advice or "").replace("`", ""))
    meant = find_intended_flag(name, names, advice or "")
    if meant:
        details = [part for part in text.split("; ")[1:] if not part.startswith(WITHOUT_FIELD)]
        sentence = "".join(f" {detail[0].upper()}{detail[1:]}." for detail in details)
        return f"{word}: is not known; did you mean {dashes}{meant}?{sentence}", meant
    if text:
        return f"{word}: is not a flag here; {text}", ""
    return f"{word}: is not known; see --help for all flags", ""


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
