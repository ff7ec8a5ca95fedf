# extra: template
"""Which code is a run's, and what is archived of it."""

import os
import subprocess
import zipfile

import pytest

from utils.run import provenance


def test_only_code_imported_from_the_repository_counts():
    found = provenance.code_digests()
    assert "utils/run/provenance.py" in found
    assert not [name for name in found if name.startswith(("tests/", "scripts/", ".venv"))]


@pytest.mark.guarantee("own-code")
def test_template_files_that_differ_from_the_tag_are_listed(tmp_path, monkeypatch):
    """The block "yours" of config.py and the fork's own files do not count."""
    block = "a = 1\n# ---- yours: fields ----\n{}# ---- end of yours ----\n"
    (tmp_path / "utils").mkdir()
    for name, text in (("config.py", block.format("")), ("utils/x.py", "1\n"), ("model.py", "1\n")):
        (tmp_path / name).write_text(text)
    git = ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *words], check=True)
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    assert provenance.changed_files() == []  # no tag
    subprocess.run([*git, "tag", "template-1.0"], check=True)
    (tmp_path / "config.py").write_text(block.format("b = 2\n"))
    (tmp_path / "model.py").write_text("2\n")
    assert provenance.changed_files() == []
    (tmp_path / "config.py").write_text(block.format("").replace("a = 1", "a = 2"))
    (tmp_path / "utils" / "x.py").write_text("2\n")
    assert provenance.changed_files() == ["config.py", "utils/x.py"]


def test_the_code_is_archived_with_any_date_and_without_secrets(tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    for name in ("model.py", "secrets.py"):
        (tmp_path / name).write_text("x = 1\n")
        os.utime(tmp_path / name, (0, 0))  # 1970, as SOURCE_DATE_EPOCH=0 sets it
    provenance.zip_code(tmp_path / "code.zip")
    assert zipfile.ZipFile(tmp_path / "code.zip").namelist() == ["model.py"]
