# extra: template
"""Which code is a run's, and what is archived of it."""

import os
import zipfile

from utils.run import provenance


def test_only_code_imported_from_the_repository_counts():
    digests = provenance.compute_code_checksums()
    assert "utils/run/provenance.py" in digests
    assert not [name for name in digests if name.startswith(("tests/", "scripts/", ".venv"))]


def test_the_code_is_archived_with_any_date_and_without_secrets(tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "PROJECT_ROOT", tmp_path)
    for name in ("model.py", "secrets.py"):
        (tmp_path / name).write_text("x = 1\n")
        os.utime(tmp_path / name, (0, 0))  # 1970, as SOURCE_DATE_EPOCH=0 sets it
    provenance.write_code_zip(tmp_path / "code.zip")
    assert zipfile.ZipFile(tmp_path / "code.zip").namelist() == ["model.py"]
