# extra: verify and template
"""scripts/verify.py finds packed documents that see each other, if model.py says which token is of which document."""

import pytest
import torch

import forks
from lib.verify.segments_check import exchange_tokens, find_interior
from recipe_data import token_files
from recipe_forks import Fork

MASK = "(document[:, :, None] == document[:, None, :]).tril()[:, None]"
EMBEDDED = "        x = self.tokens(ids) + "


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "is_found"),
    [
        (MASK, "(place[:, None] >= place)[None, None]", True),
        (EMBEDDED, "        x = self.tokens(ids).mean(1, True) + self.tokens(ids) + ", True),
        (MASK, "(document[:, :, None] - document[:, None, :] <= 1).tril()[:, None]", True),
        (EMBEDDED, EMBEDDED, False),
    ],
)
def test_a_document_that_sees_another_is_found(tmp_path, old, new, is_found):
    fork = Fork(tmp_path, "memory_mapped_tokens")
    token_files(fork.folder / "FOLDER")
    path = fork.folder / "model.py"
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    ended = forks.run(fork.folder, 0, "scripts/verify.py", *fork.words, "--backend", "gloo", "--num_workers", "0")
    assert ("Tokens of one document attend to another. Let the attention mask" in ended.out) == is_found, ended.text
    assert is_found or " No document of 8 packed rows has an effect on the loss of another." in ended.out, ended.text


def test_inputs_and_targets_of_tokens_move_together_and_all_else_stays():
    """At the ends of a document are separators, and targets that are tokens of another one."""
    ids = torch.tensor([[0, 0, 0, 0, 1, 1, 1, -1], [4, 4, 4, 4, 4, 9, 9, 9]])
    tokens = torch.arange(10, 26).view(2, 8) ** 2
    place = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0], [0, 1, 2, 3, 4, 0, 1, 2]])
    inside = find_interior(ids)
    assert inside.int().tolist() == [[0, 1, 1, 0, 0, 1, 0, 0], [0, 1, 1, 1, 0, 0, 1, 0]]
    batch = {
        "tokens": tokens,
        "targets": tokens + 1,
        "vectors": tokens[..., None] / 2,
        "ids": ids.clone(),
        "place": place,
    }
    batch |= {"mask": torch.ones(2, 8, 8), "label": torch.tensor([1, 2])}
    changed = exchange_tokens(batch, ids, inside, inside & (ids == 4))
    is_other = changed["tokens"] != tokens
    assert torch.equal(is_other, inside & (ids == 4)) and torch.isin(changed["tokens"], tokens[inside])[is_other].all()
    assert torch.equal(changed["targets"], changed["tokens"] + 1)
    assert torch.equal(changed["vectors"], changed["tokens"][..., None] / 2)
    assert all(changed[name] is batch[name] for name in ("ids", "place", "mask", "label"))
