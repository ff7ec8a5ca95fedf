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
        "lr: 0.1\nlr: 0.2": "lr has no value, or more than one. Give one value, or leave lr out.",
        "lr:": "lr has no value",
        "data_dir: null": "data_dir has no value",
        "lr: [0.1, 0.2]": "lr has no value, or more than one",
        "train:\n  lr: 0.1": "train is not a setting. See --help all for all flags.",
        "epcohs: 3": "Did you mean epochs?",
        "lr: fast": '--lr must be a number or "auto", got "fast"',
        "- lr: 0.1": "run.yaml cannot be read (it is not a table of names and values)",
        "lr = 0.1": "it is not a table of names and values",
        "[lr, seed]: 1": "is not a setting. See --help all for all flags.",
        "lr: 0.1\n---\nlr: 0.2": "cannot be read (expected a single document",
        "lr: [": "cannot be read (while parsing",
        "lr: !!python/object/apply:os.system ['true']": "lr has no value, or more than one",
    }.items():
        file.write_text(text)
        assert expected in rejection(capsys, "--config", str(file)), text


@pytest.mark.guarantee("config")
@pytest.mark.parametrize("suffix", ["yaml", "toml", "json"])
def test_all_unknown_keys_of_a_file_are_named_at_once(tmp_path, capsys, suffix):
    pytest.importorskip("yaml")
    text = {
        "yaml": "epcohs: 3\noptim:\n  name: sgd\n  lr: 1\nlr:\nseed: [1, 2]\nunknown_x: null\nbatch_size: 4\n",
        "toml": "epcohs = 3\nunknown_x = 0\nbatch_size = 4\n[optim]\nname = 'sgd'\n",
        "json": '{"epcohs": 3, "optim": {"name": "sgd"}, "lr": null, "unknown_x": null, "batch_size": 4}',
    }[suffix]
    file = tmp_path / f"run.{suffix}"
    file.write_text(text)
    output = rejection(capsys, "--config", str(file))
    named = [line.removeprefix(f"{file}: ").split()[0] for line in output.strip().splitlines()]
    expected = {
        "yaml": "epcohs optim unknown_x lr seed",
        "toml": "epcohs unknown_x optim",
        "json": "epcohs optim unknown_x lr",
    }
    assert named == expected[suffix].split(), output


@pytest.mark.guarantee("config")
@pytest.mark.parametrize(
    ("name", "text"),
    [("a.YAML", "epochs: 4"), ("a.Yml", "epochs: 4"), ("a.TOML", "epochs = 4"), ("a.JSON", '{"epochs": 4}')],
)
def test_a_suffix_in_capitals_is_that_of_the_same_format(tmp_path, name, text):
    pytest.importorskip("yaml")
    (tmp_path / name).write_text(text)
    assert of(f"--config {tmp_path / name}").epochs == 4


def test_a_yaml_file_without_pyyaml_is_refused_with_the_package(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    (tmp_path / "run.yml").write_text("lr: 0.1")
    output = rejection(capsys, "--config", str(tmp_path / "run.yml"))
    assert output.strip().endswith("Run pip install pyyaml, or give a TOML file.")
