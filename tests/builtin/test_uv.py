# extra: template
"""pyproject.toml for uv: the extra cpu takes torch from PyTorch's index, gpu as PyPI has it."""

import functools
import http.server
import re
import subprocess
import sys
import threading
import zipfile

import pytest

from ranks import ROOT, lack

INDEX = "https://download.pytorch.org/whl/cpu"


def wheel(folder, name, version):
    """A package without code, on a page of an index."""
    file, about = f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    (folder / name).mkdir(parents=True)
    with zipfile.ZipFile(folder / name / file, "w") as archive:
        archive.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    (folder / name / "index.html").write_text(f'<a href="{file.replace("+", "%2B")}">{file}</a>')


@pytest.mark.slow
def test_uv_takes_torch_for_cpus_from_pytorchs_index(tmp_path):
    """The index is a copy of its layout on this machine; everything else comes from PyPI."""
    if subprocess.run([sys.executable, "-m", "uv", "--version"], capture_output=True).returncode:
        lack("uv")
    wheel(tmp_path / "index", "torch", "99.0+cpu")
    wheel(tmp_path / "index", "torchvision", "99.0+cpu")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path / "index")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    text = (ROOT / "pyproject.toml").read_text()
    assert text.count(INDEX) == 1
    (tmp_path / "fork").mkdir()
    (tmp_path / "fork/pyproject.toml").write_text(text.replace(INDEX, f"http://127.0.0.1:{server.server_port}"))
    for name in ("requirements.txt", "README.md"):
        (tmp_path / "fork" / name).write_bytes((ROOT / name).read_bytes())
    try:
        subprocess.run([sys.executable, "-m", "uv", "lock"], cwd=tmp_path / "fork", check=True, timeout=120)
    finally:
        server.shutdown()
    versions = {}
    for extra in ("cpu", "gpu"):
        words = f"uv export --frozen --no-hashes --no-emit-project --extra {extra}".split()
        ended = subprocess.run(
            [sys.executable, "-m", *words], cwd=tmp_path / "fork", check=True, timeout=120, stdout=subprocess.PIPE
        )
        versions[extra] = re.search(r"^torch==(\S+)", ended.stdout.decode(), re.MULTILINE)[1]
    assert versions["cpu"] == "99.0+cpu" and versions["gpu"].startswith("2.")
