"""--config FILE.yaml: values are text, as in flags."""

import sys

import pytest

from test_config import of, rejection


@pytest.mark.guarantee("config")
def test_a_yaml_file_is_read_like_flags(tmp_path, capsys):
    """Its values are text, so that 1e-3, which YAML takes for text, and yes, which it takes for true, mean the same."""
    pytest.importorskip("yaml")
    file = tmp_path / "run.yaml"
    file.write_text(
        "# a run\nlr: 1e-3\nuse-amp: no\nnum_workers: auto\ndata_dir: 'x # 1'\nmomentum: .9\nresume_from: ''\n"
    )
    config = of(f"--config {file} --epochs 4")
    assert (config.lr, config.use_amp, config.num_workers, config.epochs) == (1e-3, False, "auto", 4)
    assert (config.data_dir, config.momentum) == ("x # 1", 0.9)
    for text, expected in {
        "lr: 0.1\nlr: 0.2": "lr has no value, or more than one; leave it out, or give one",
        "lr:": "lr has no value",
        "data_dir: null": "data_dir has no value",
        "lr: [0.1, 0.2]": "lr has no value, or more than one",
        "train:\n  lr: 0.1": "train has no value, or more than one",
        "epcohs: 3": "did you mean epochs?",
        "lr: fast": "lr=fast: is not a number",
        "- lr: 0.1": "run.yaml: cannot be read (it is not a table of names and values)",
        "lr = 0.1": "it is not a table of names and values",
        "[lr, seed]: 1": "has no value, or more than one",
        "lr: 0.1\n---\nlr: 0.2": "cannot be read (expected a single document",
        "lr: [": "cannot be read (while parsing",
        "lr: !!python/object/apply:os.system ['true']": "lr has no value, or more than one",
    }.items():
        file.write_text(text)
        assert expected in rejection(capsys, "--config", str(file)), text


def test_a_yaml_file_without_pyyaml_is_refused_with_the_package(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    (tmp_path / "run.yml").write_text("lr: 0.1")
    assert "pip install pyyaml, or give a TOML file" in rejection(capsys, "--config", str(tmp_path / "run.yml"))
