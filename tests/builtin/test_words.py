# extra: template
"""Text that people read is plain, idiomatic technical English: some words and phrases must not occur."""

import re
import subprocess

from ranks import ROOT

AVOIDED = (
    r"mend(s|ed|ing)?|strangers?|stranger's|torment(s|ed)?|meetings?|anew|whoever|undisturbed|ledger|strikes|seals?",
    r"gone? on with|goes on with|going on with|lives on when|takes orders|no hand on|what comes first|does both",
    r"(is|are|was|were) said|said so|who is missing|nodes meet|in a sentence|a kill costs|micro-batch x|on 1 ranks",
    r"st(and|ands|ood|anding) still|(is|are) made again|newest whole|whole checkpoint|epoch\(s\)|rank\(s\)",
    r"what .{3,20} is said",
)
PATTERN = re.compile(rf"\b({'|'.join(AVOIDED)})", re.IGNORECASE)
NAMES = re.compile(r"`[^`]*`|\w+_\w+|https?://\S+")  # code in text, identifiers, addresses
BINARY = (".png", ".svg")


def test_plain_words_everywhere():
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    wrong = []
    for name in names:
        path = ROOT / name
        if path.suffix in BINARY or path.name in ("test_words.py", "LICENSE", "constraints.txt"):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if match := PATTERN.search(NAMES.sub("", line)):
                wrong.append(f"{name}:{number}: {match[0]}: {line.strip()[:100]}")
    assert not wrong, "\n".join(wrong)


def test_the_glossary_is_short_and_each_word_stands_in_its_file():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    glossary = page.partition("## Glossary")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|`]+) \| ([^|`]+) \| `([^|]+)` \|$", glossary, re.MULTILINE)
    assert 20 < len(rows) <= 45
    assert not [meaning for _, meaning, _ in rows if len(meaning.split()) > 8]
    for word, _, file in rows:
        text = (ROOT / file).read_text(encoding="utf-8")
        spelled = re.compile(re.sub(r"[ -]", "[ _-]?", word), re.IGNORECASE)
        assert spelled.search(text), f"{word} is not in {file}"
