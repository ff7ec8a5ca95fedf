"""Settings of the version before: what a flag and a file with one of them get. test_checkpoint.py has checkpoints."""

import json

import pytest

from config import TrainingConfig
from utils.settings.removed import REMOVED_SETTINGS

OTHER = {"check_every": 3, "minutes": 5.0}  # values that are not the default


def rejection(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        TrainingConfig.from_args(words)
    assert ended.value.code == 2
    return capsys.readouterr().err.strip()


def test_each_removed_setting_has_a_default_and_is_none_of_the_fields():
    assert (
        OTHER.keys() == REMOVED_SETTINGS.keys()
        and not REMOVED_SETTINGS.keys() & TrainingConfig.__dataclass_fields__.keys()
    )


@pytest.mark.guarantee("config")
@pytest.mark.parametrize("name", REMOVED_SETTINGS)
@pytest.mark.parametrize("text", ["--{} 5", "--{}=5", "--{}"])
def test_a_flag_is_refused_with_what_to_use_instead(capsys, name, text):
    assert (
        rejection(capsys, *text.format(name).split()) == f"--{name} was removed. {REMOVED_SETTINGS[name].replacement}"
    )


@pytest.mark.guarantee("config")
@pytest.mark.parametrize("kind", ["json", "toml", "yaml"])
@pytest.mark.parametrize("name", REMOVED_SETTINGS)
def test_a_file_with_the_default_is_read_and_with_another_value_the_user_is_told(tmp_path, capsys, name, kind):
    if kind == "yaml":
        pytest.importorskip("yaml")
    removed, needed = REMOVED_SETTINGS[name], REMOVED_SETTINGS[name].required_setting
    file = tmp_path / f"config.{kind}"

    def write(value, **more):
        values = {name: value, "lr": 0.5} | more
        lines = [f"{key}: {content}" if kind == "yaml" else f"{key} = {content}" for key, content in values.items()]
        file.write_text(json.dumps(values) if kind == "json" else "\n".join(lines))

    notes = []
    for value in (removed.default, int(removed.default)):
        write(value)
        assert TrainingConfig.from_args(["--config", str(file)], notes=notes).lr == 0.5
    assert notes == []
    write(OTHER[name], **({needed: 9} if needed else {}))
    TrainingConfig.from_args(["--config", str(file)], notes=notes)
    answer = f"{needed} is used." if needed else removed.replacement
    assert notes == [f"{file}: {name}={OTHER[name]} is ignored, since {name} was removed. {answer}"]
    for more in ({}, {needed: 0}) if needed else ():  # --print_config writes each setting, also at its default
        write(OTHER[name], **more)
        assert rejection(capsys, "--config", str(file)) == f"{file}: {name} was removed. {removed.replacement}"
        assert TrainingConfig.from_args(["--config", str(file), f"--{needed}", "9"]).lr == 0.5
