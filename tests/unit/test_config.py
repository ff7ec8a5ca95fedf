"""Config: defaults, then the file, then flags; all problems listed together, one sentence each with the fix."""

import dataclasses
import json
import math
import re
import tomllib

import pytest

import config as config_module
from config import SETTINGS, TrainingConfig, can_train_longer, yours
from utils.settings.deleted_extras import read_deleted_extras
from utils.settings.errors import UserError
from utils.settings.value_types import to_text

PUBLISHED = [
    *(
        "batch_size num_workers epochs lr momentum weight_decay backend use_amp"
        " grad_accum_steps checkpoint_dir save_every resume_from log_interval seed"
    ).split(),
    "enable_profiling",
]


def of(flags):
    return TrainingConfig.from_args(flags.split())


def rejection(capsys, *flags):
    with pytest.raises(SystemExit) as ended:
        TrainingConfig.from_args(flags)
    assert ended.value.code == 2
    return capsys.readouterr().err.strip()


def test_published_names_exist_no_field_is_none_and_all_have_help():
    assert set(PUBLISHED) <= {setting.name for setting in SETTINGS}
    assert all(setting.default is not None and setting.help for setting in SETTINGS)


def test_what_forks_import_from_config_is_there():
    names = "TrainingConfig UserError UnreadableSample StartError TrainingError unless_auto yours setting at_least"
    names += " above between one_of refuse local_path path_or_url probability range_up_to"
    for name in names.split():
        assert hasattr(config_module, name), name
    assert config_module.UserError is UserError and issubclass(config_module.UnreadableSample, UserError)


def test_flags_with_underscores_dashes_and_negations():
    config = of("--batch-size 8 --grad_accum_steps=3 --lr 1e-3 --no-use_amp --no_nesterov --drop-last")
    assert (config.batch_size, config.grad_accum_steps, config.lr) == (8, 3, 0.001)
    assert (config.use_amp, config.nesterov, config.drop_last) == (False, False, True)
    for spelling in ("--no-use-amp", "--no_use_amp", "--no_use-amp", "--use_amp False", "--use_amp=no"):
        assert of(spelling).use_amp is False


@pytest.mark.guarantee("config")
@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--epochs x", '--epochs must be an integer or "auto", got "x".'),
        ("--num_workers many", '--num_workers must be an integer or "auto", got "many".'),
        ("--optimizer adam", '--optimizer must be sgd or adamw, got "adam". Did you mean adamw?'),
        ("--batch_size 0", "--batch_size must be at least 1, got 0."),
        ("--momentum 1", "--momentum must be at least 0 and below 1, got 1.0."),
        (
            "--init_method host:29500",
            '--init_method must be env://, tcp://HOST:PORT or file:///SHARED/PATH, got "host:29500".',
        ),
        (
            "--run_dir s3://bucket/run",
            "--run_dir must be a local folder",
        ),
        (
            "--run_dir runs/{modle}",
            "--run_dir runs/{modle} contains {modle}, which is not a setting. Use names of settings",
        ),
        ("--run_dir=", '--run_dir must be a folder such as runs/NAME, got "".'),
        ("--best_metric largest:top1", "--best_metric must be auto, NAME, min:NAME or max:NAME, got"),
        (
            "--global_batch_size 100 --batch_size 64",
            "--global_batch_size must be a multiple of --batch_size 64, got 100. Give 64 or 128.",
        ),
        (
            "--global_batch_size 128 --grad_accum_steps 2",
            "--grad_accum_steps 2 cannot be set, since it follows from --global_batch_size. Give only",
        ),
        (
            "--overwrite --resume_from auto",
            "--overwrite would move the run that --resume_from continues. Give only one of the two.",
        ),
        (
            "--amp_dtype fp16 --no-use_amp",
            "--amp_dtype fp16 needs mixed precision, which --no-use_amp turns off. Leave out one",
        ),
        (
            "--reduction exact --comm_hook bf16",
            "--comm_hook bf16 rounds gradients before they are summed, so it contradicts --reduction exact. Give",
        ),
        ("--sharding zero3 --reduction exact", "--reduction exact does not work with --sharding zero3. Give only one"),
        (
            "--sharding zero3 --find_unused_parameters",
            "--find_unused_parameters does not work with --sharding zero3. Give only one",
        ),
        (
            "--find_unused_parameters --compile reduce-overhead",
            "--compile reduce-overhead needs all gradients, and --find_unused_parameters leaves some out. Use",
        ),  # extra: compile
        ("--sharding zero2 --comm_hook bf16", "--comm_hook bf16 does not work with --sharding zero2. Give only one"),
        (
            "--sharding hybrid --compile default",
            "--compile default does not work with --sharding hybrid. Give only one",
        ),  # extra: compile and sharding
        (
            "--init_from a --resume_from b",
            "--init_from a has no effect, since a resumed run takes its weights from --resume_from. Give only one",
        ),
        ("--cpu_offload", "--cpu_offload needs sharding. Add --sharding zero3, or leave this flag out."),
        (
            "--amp_dtype bf16_params",
            "--amp_dtype bf16_params needs sharding. Add --sharding zero3, or leave this flag out.",
        ),  # extra: sharding
        ("--btach_size 3", "--btach_size is not a flag here. Did you mean --batch_size?"),
        ("--nonsense", "--nonsense is not a flag here. See --help"),
        ("--learning_rate 1", "--learning_rate is not a flag here. Did you mean --lr?"),
        ("--data-path 1", "--data-path is not a flag here. Did you mean --data_dir?"),
        ("-b 1", "-b is not a flag here. Did you mean --batch_size?"),
        ("--beta1 1", "--beta1 is not a flag here. Did you mean --momentum?"),
        ("--model-ema", "--model-ema is not a flag here. Did you mean --ema_decay?"),
        ("--resume_from_checkpoint x", "--resume_from_checkpoint is not a flag here. Did you mean --resume_from?"),
        ("--device cpu", "--device is not a flag here. GPUs are used if there are any. Set CUDA_VISIBLE_DEVICES= for"),
        (
            "--warmup_steps 5 --warmup_epochs 1",
            "--warmup_steps 5 contradicts --warmup_epochs 1.0. Give only one of the two.",
        ),
        ("--min_lr 0.1", "--min_lr must be below --lr 0.1, got 0.1."),
        ("--print-confg", "--print-confg is not a flag here. Did you mean --print_config?"),
        ("--nproc-per-node 2", "--nproc-per-node is not a flag here. Start the ranks with torchrun --standalone"),
        ("--overwrite maybe", '--overwrite must be true or false, got "maybe".'),
        ("stray", '"stray" is not a flag. Write --NAME VALUE.'),
        ("--lr", "--lr has no value. Write --lr VALUE."),
        ("--config nowhere.toml", "--config nowhere.toml cannot be read"),
    ],
)
def test_each_problem_is_one_line_of_whole_sentences(capsys, flags, expected):
    text = rejection(capsys, *flags.split()).strip()
    assert text.startswith(expected) and len(text.splitlines()) == 1
    assert text.endswith((".", "?")) and "; " not in text


@pytest.mark.parametrize(
    ("run_dir", "expected"),
    [
        ("{0}", "contains {0}, which is not a setting"),
        ("{}", "contains {}, which is not a setting"),
        ("{lr.x}", "contains {lr.x}, which is not a setting"),
        ("{lr[0]}", "contains {lr[0]}, which is not a setting"),
        ("{model_{seed}}", "cannot be filled in"),
        ("{lr:d}", "cannot be filled in (Unknown format code 'd'"),
        ("{run_dir:.2f}", "cannot be filled in (Unknown format code 'f'"),
        ("{lr:{optimizer}}", "cannot be filled in (Invalid format specifier"),
        ("{lr:{sed}}", "cannot be filled in ('sed')"),
        ("{lr:{}}", "cannot be filled in"),
        ("{lr:{0}}", "cannot be filled in"),
        ("{lr:{seed.x}}", "cannot be filled in"),
        ("{seed:{seed[0]}}", "cannot be filled in"),
        ("{seed:,d,}", "cannot be filled in"),
        ("{lr:99999999999999999999}", "cannot be filled in"),
        ("{optimizer!q}", "cannot be filled in (Unknown conversion specifier"),
        ("{optimizer!}", "cannot be filled in"),
        ("{lr:.2e", "cannot be filled in"),
        ("{", "cannot be filled in (Single '{' encountered"),
        ("a}b", "cannot be filled in (Single '}' encountered"),
    ],
)
def test_a_run_dir_that_cannot_be_filled_in_is_rejected_in_one_sentence(capsys, run_dir, expected):
    text = rejection(capsys, "--seed", str(2**40), "--run_dir", f"runs/{run_dir}").strip()
    assert text.startswith(f"--run_dir runs/{run_dir} {expected}"), text
    assert text.endswith(". Use names of settings, such as {model} or {lr}."), text
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize(
    ("run_dir", "expected"),
    [
        ("{lr:.0e}-{seed:04d}", "1e-01-0042"),
        ("{optimizer!r:>7}", "  'sgd'"),
        ("{lr:{seed}}", f"{0.1:42}"),
        ("{{{nesterov}}}", "{True}"),
        ("{drop_last:d}{min_lr:%}", "00.000000%"),
    ],
)
def test_a_run_dir_takes_every_format_of_python(run_dir, expected):
    assert of(f"--run_dir=runs/{run_dir}").run_folder.name == expected


CONFLICTS = [(setting.name, conflict) for setting in SETTINGS for conflict in setting.conflicts]


@pytest.mark.parametrize(("declared_with", "conflict"), CONFLICTS)
def test_a_conflict_names_settings_and_ends_with_a_fix(declared_with, conflict):
    names = {setting.name for setting in SETTINGS}
    names |= {name for settings in read_deleted_extras().values() for name in settings}
    assert (conflict.subject or declared_with) in names
    assert callable(conflict.other) or conflict.other in names
    problem = conflict.problem.format_map(vars(TrainingConfig()) | {"found": "must be X"})
    assert problem.startswith("must ") or problem.partition(". ")[2].endswith("."), problem


@pytest.mark.parametrize(
    "flags",
    [
        "--init_from a --resume_from auto",
        "--sharding zero3 --cpu_offload --amp_dtype bf16_params",
        "--find_unused_parameters --compile default",  # extra: compile
        "--sharding none --reduction exact",
        "--global_batch_size 128 --grad_accum_steps 1",
        "--warmup_steps 5 --warmup_epochs 0.5",
        "--lr 0.01 --min_lr 0.009",
    ],
)
def test_values_beside_a_conflict_are_accepted(flags):
    assert of(flags)


def test_conflicts_are_listed_together(capsys):
    lines = rejection(
        capsys, *"--cpu_offload --amp_dtype bf16_params --overwrite --resume_from auto".split()
    ).splitlines()
    assert [line.split()[0] for line in lines] == ["--overwrite", "--amp_dtype", "--cpu_offload"], lines


@pytest.mark.guarantee("config")
def test_all_problems_are_listed_together(capsys):
    lines = rejection(capsys, *"--epochs 0 --lr x --nonsense --seed -1".split()).splitlines()
    assert [line.split()[0] for line in lines] == ["--nonsense", "--seed", "--epochs", "--lr"], lines


@pytest.mark.guarantee("config")
@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--epochs 0 --overwrite --resume_from auto", ["--epochs must", "--overwrite would"]),
        ("--nonsense --min_lr 1", ["--nonsense", "--min_lr must"]),
        ("--batch_size x --global_batch_size 100", ["--batch_size must"]),
        ("--lr x --min_lr 0.1", ["--lr must"]),
        ("--optimizer x --min_lr 0.1", ["--optimizer must"]),
        ("--resume_from C:\\a --init_from b", ["--resume_from must"]),
        ("--lr x --run_dir runs/{lr}", ["--lr must"]),
        ("--lr x --run_dir runs/{modle}", ["--lr must", "--run_dir runs/{modle} contains"]),
        ("--use_amp perhaps --amp_dtype fp16 --epochs 0", ["--epochs must", "--use_amp must"]),
        (
            "--lr 0 --patience -1 --grad_accum_steps 2 --global_batch_size 128",
            ["--lr must", "--patience must", "--grad_accum_"],
        ),
    ],
)
def test_values_and_combinations_are_listed_together_but_for_what_depends_on_a_wrong_value(capsys, flags, expected):
    lines = rejection(capsys, *flags.split()).splitlines()
    assert len(lines) == len(expected) and all(map(str.startswith, lines, expected)), lines


@pytest.mark.guarantee("config")
def test_problems_of_a_file_are_listed_with_the_others_and_name_the_file(tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text("epcohs = 1\nepochs = 0\nlr = 'x'\nmin_lr = 1\nseed = -1\nbatch_size = [4]\nkeep_last = 1\n")
    lines = rejection(capsys, "--config", str(file), *"--lr 0.1 --seed -2 --x".split()).splitlines()
    expected = [
        "--x is not a flag here",
        f"{file}: epcohs is not a setting",
        f"{file}: batch_size has no value, or more than one",
        "--seed must be at least 0",
        f"{file}: --epochs must be at least 1, got 0.",
        f"{file}: --keep_last must be at least 2, got 1.",
        f"{file}: --min_lr must be below --lr 0.1, got 1.0.",
    ]
    assert len(lines) == len(expected) and all(map(str.startswith, lines, expected)), lines


@pytest.mark.guarantee("config")
@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--config missing.toml --too_long alone", ""),
        ("--batch_tokens --too_long alone", ""),
        ("--batch_tokns 100 --too_long alone", ""),
        ("--shardin zero3 --cpu_offload", ""),
        ("--too_long alone", "batch_tokens =\n"),
        ("--too_long alone", "batch_tokns = 4\n"),
        ("--too_long alone", "batch_tokens = [4]\n"),
        ("--lr 0.01", "min_lrr = 0.1\nlrr = 0.5\n"),
    ],
)
def test_no_problem_is_a_consequence_of_what_could_not_be_read(tmp_path, capsys, flags, text):
    (tmp_path / "run.toml").write_text(text)
    words = flags.split() + (["--config", str(tmp_path / "run.toml")] if text else [])
    output = rejection(capsys, *words)
    assert not re.search("needs --batch_tokens|needs sharding|must be below", output), output


def test_a_secret_that_a_run_did_not_store_is_refused_in_what_is_given_and_not_in_what_is_saved(tmp_path, capsys):
    saved = {"on_checkpoint": "cmd [redacted]"}
    assert TrainingConfig.from_args([], saved)
    file = tmp_path / "run.toml"
    file.write_text('on_checkpoint = "cmd [redacted]"')
    output = rejection(capsys, "--config", str(file))
    expected = "contains [redacted], which stands for a secret that a run did not store. Give the command again"
    assert output.startswith(f"{file}: --on_checkpoint {expected}")


def test_defaults_of_deleted_extras_in_a_file_are_left_out(tmp_path, monkeypatch):
    pytest.importorskip("yaml")
    gone = {"mine": {"a": 0.0, "b": False, "c": "0.08,1", "d": 1, "lr": 0.5}}  # the fork has an lr of its own
    monkeypatch.setattr("utils.settings.files.read_deleted_extras", lambda: gone)
    (tmp_path / "a.yaml").write_text("a: 0\nb: no\nc: '0.08,1'\nd: 1\nlr: 0.5\n")
    (tmp_path / "a.toml").write_text("a = 0\nb = false\nc = '0.08,1'\nd = 1\nlr = 0.5\n")
    for name in ("a.yaml", "a.toml"):
        assert of(f"--config {tmp_path / name}").lr == 0.5


def test_a_file_that_is_nested_too_deeply_is_refused(tmp_path, capsys):
    (tmp_path / "a.json").write_text('{"lr": ' + "[" * 100_000 + "]" * 100_000 + "}")
    assert "cannot be read (" in rejection(capsys, "--config", str(tmp_path / "a.json"))


def test_the_constructor_checks_values_like_the_flags():
    with pytest.raises(UserError) as error:
        TrainingConfig(epochs=2.5, use_amp="maybe", num_workers=True, batch_size="4")
    names = [line.split()[0] for line in str(error.value).splitlines()]
    assert names == ["--num_workers", "--epochs", "--use_amp"]
    assert TrainingConfig(batch_size="4").batch_size == 4


NUMBER = "must be a number"
WHOLE = "must be an integer"
TEXT = "must be text"


@pytest.mark.parametrize(
    ("name", "value", "wrong"),
    [
        *(("beta2", value, NUMBER) for value in (True, math.inf, -math.inf, math.nan, "inf", "1e400", None, [0.5], "")),
        *(("batch_size", value, WHOLE) for value in (True, 2.0, "2.0", math.inf, None, [2], {}, "9" * 5000)),
        *(("data_dir", value, TEXT) for value in (3, True, None, ["a"], {"a": 1}, b"a")),
        *(("use_amp", value, "must be true or false") for value in (2, 1.0, None, [True], "")),
    ],
)
def test_a_value_of_another_type_is_rejected(name, value, wrong):
    with pytest.raises(UserError) as error:
        TrainingConfig(**{name: value})
    shown = value if isinstance(value, (int, float)) else f'"{to_text(value)}"'
    assert str(error.value) == f"--{name} {wrong}, got {shown}."


@pytest.mark.guarantee("config")
def test_defaults_then_file_then_flags(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('epochs = 3\nbatch-size = 16\nuse_amp = false\nnum_workers = "auto"\nlr = 1\n')
    config = of(f"--config {file} --epochs 4")
    values = (config.epochs, config.batch_size, config.use_amp, config.num_workers, config.lr, type(config.lr))
    assert values == (4, 16, False, "auto", 1.0, float)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("epcohs = 3", "Did you mean epochs?"), ("epochs = ", "cannot be read"), ('lr = "fast"', "--lr must be")],
)
def test_a_file_is_checked_like_flags(tmp_path, capsys, text, expected):
    (tmp_path / "run.toml").write_text(text)
    assert expected in rejection(capsys, "--config", str(tmp_path / "run.toml"))


@pytest.mark.guarantee("config")
def test_the_output_of_print_config_can_be_read_back(tmp_path, capsys):
    def printed(*words):
        with pytest.raises(SystemExit) as ended:
            TrainingConfig.from_args([*words, "--print-config"])
        assert ended.value.code == 0
        return capsys.readouterr().out

    flags = "--lr 3e-4 --run_dir runs/{optimizer}-lr{lr}-s{seed} --use_amp --num_workers 12 --data_dir".split()
    text = printed(*flags, 'a "b" \\ ü')
    values = tomllib.loads(text)
    assert values["run_dir"] == "runs/sgd-lr0.0003-s42"
    assert values["checkpoint_dir"] == "runs/sgd-lr0.0003-s42/checkpoints"
    assert values["data_dir"] == 'a "b" \\ ü'
    file = tmp_path / "again.toml"
    file.write_text(text)
    assert printed("--config", str(file)) == text


def test_config_json_of_a_run_restores_its_settings_but_not_its_folders_or_start_flags(tmp_path):
    """Nor its command: a config.json may be from somebody else."""
    started = TrainingConfig(run_dir="runs/a", overwrite=True, eval_only=True, seed=5, on_checkpoint="rm a").to_dict()
    file = tmp_path / "config.json"
    file.write_text(json.dumps(started | {"resume_from": "runs/a/step_00000001.pt"}))
    config = of(f"--config {file} --run_dir runs/b")
    assert (config.overwrite, config.eval_only, config.resume_from, config.seed) == (False, False, "", 5)
    assert (config.on_checkpoint, str(config.checkpoint_folder)) == ("", "runs/b/checkpoints")


@pytest.mark.parametrize(("flags", "kept"), [("", "w.pt"), ("--eval_only no", "w.pt"), ("--eval_only", "")])
def test_an_evaluation_of_a_run_leaves_out_the_weights_that_it_started_from(tmp_path, flags, kept):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(TrainingConfig(init_from="w.pt").to_dict()))
    assert of(f"--config {file} {flags}").init_from == kept


def help_text(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        TrainingConfig.from_args(words)
    assert ended.value.code == 0
    return capsys.readouterr().out


def flags_of(text):
    return [entry.split()[0] for entry in re.split(r"\n  --(?:\[no-])?", text)[1:]]


def test_help_all_shows_each_flag_once_with_its_default_in_lines_of_120_columns(capsys):
    text = help_text(capsys, "--help", "all")
    assert max(map(len, text.splitlines())) <= 120
    entries = re.split(r"\n  --(?:\[no-])?", text)[1:]
    assert flags_of(text) == ["help", "config", "print_config", *(setting.name for setting in SETTINGS)]
    for entry, setting in zip(entries[3:], SETTINGS, strict=True):
        default = {True: "on", False: "off"}[setting.default] if setting.value_type.is_bool else setting.default
        assert default == "" or f"[{default}]" in entry
    assert "{sgd,adamw} [sgd]" in text
    examples = re.findall(r"train.py (--.*)", text.split("examples:")[1])
    assert len(examples) == 3
    for words in examples[:2]:  # the third reads the config of a run
        TrainingConfig.from_args(words.split())


def test_help_shows_the_common_flags_and_how_many_are_left(capsys):
    common = [setting.name for setting in SETTINGS if not setting.is_rare]
    text = help_text(capsys, "--help")
    assert flags_of(text) == ["help", "config", "print_config", *common] and {*PUBLISHED} <= {*common}
    assert text.splitlines()[-1] == f"--help all shows the other {len(SETTINGS) - len(common)} flags."
    assert "all shows" not in help_text(capsys, "--help", "all")


@pytest.mark.parametrize(
    "words", ["-h", "--epochs x --help", "--help --lr 0.1", "--nonsense 3 -h", "stray --help", "--lr -h"]
)
def test_help_is_shown_wherever_it_is_asked_for(capsys, words):
    assert help_text(capsys, *words.split()) == help_text(capsys, "--help")


@pytest.mark.parametrize("words", ["-h all", "--help=all", "--lr 0 --help all"])
def test_all_flags_are_shown_by_each_spelling(capsys, words):
    assert help_text(capsys, *words.split()) == help_text(capsys, "--help", "all")


@pytest.mark.parametrize("words", ["--help nonsense", "-h nonsense", "--help=nonsense"])
def test_another_word_after_help_is_refused(capsys, words):
    assert rejection(capsys, *words.split()) == '--help must have no value or all, got "nonsense".'


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--lr --epochs 0", ["--lr has no value.", "--epochs must be at least 1"]),
        ("--data-dir", ["--data-dir has no value."]),
        ("a b --lr 1 c d --nonsense 3 -x 4", ['"a" is not a', '"c" is not a', "--nonsense is not a flag", "-x is not"]),
        ("--use_amp no off", ['"off" is not a flag. Write --NAME VALUE.']),
        ("--no-use_amp=off", ['"off" is not a flag. Write --NAME VALUE.']),
        ("--no-lr 1", ["--no-lr is not a flag here."]),
        ("--no_print_config", ["--no_print_config is not a flag here."]),
        ("--print_config off", ['"off" is not a flag. Write --NAME VALUE.']),
        (
            "--epoch 3 --batch 4",
            ["--epoch is not a flag here. Did you mean --epochs?", "--batch is not a flag here. It is divided"],
        ),
    ],
)
def test_words_that_are_no_flags_or_values_are_listed(capsys, words, expected):
    lines = rejection(capsys, *words.split()).splitlines()
    assert len(lines) == len(expected) and all(map(str.startswith, lines, expected)), lines


@pytest.mark.parametrize("value", ["-1", "-0.5", "-1e-3", "-.5"])
def test_a_negative_number_is_the_value_of_the_flag_before_it(capsys, value):
    assert rejection(capsys, "--min_lr", value) == f"--min_lr must be at least 0, got {float(value)}."


@pytest.mark.parametrize(
    ("flags", "lr", "weight_decay", "epochs", "limits"),
    [
        ("", 0.1, 5e-4, 10, (10, math.inf)),
        ("--optimizer adamw", 1e-3, 0.01, 10, (10, math.inf)),
        ("--optimizer adamw --lr 0.1 --weight_decay 0", 0.1, 0.0, 10, (10, math.inf)),
        ("--max_steps 7", 0.1, 5e-4, "auto", (math.inf, 7)),
        ("--max_steps 7 --epochs 2", 0.1, 5e-4, 2, (2, 7)),
    ],
)
def test_defaults_follow_the_optimizer_and_max_steps(flags, lr, weight_decay, epochs, limits):
    config = of(flags)
    assert (config.lr, config.weight_decay, config.epochs, config.limits) == (lr, weight_decay, epochs, limits)
    again = TrainingConfig(**json.loads(json.dumps(config.to_dict())))
    assert dataclasses.replace(again, checkpoint_dir="") == config


def test_a_completed_run_continues_if_it_is_asked_for_more():
    done = of("--max_steps 7").to_dict()
    for flags, expected in {"--max_steps 7": False, "--max_steps 8": True, "--epochs 1": True}.items():
        assert can_train_longer(vars(of(flags)), done) == expected
    assert not can_train_longer(vars(of("--epochs 99")), {})


def test_a_field_of_a_fork_must_match_on_resume_unless_it_says_otherwise():
    assert yours(1, "fold").metadata["resume"] == "must"
