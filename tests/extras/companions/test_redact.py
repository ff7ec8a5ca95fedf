"""Secrets in the command of `--on_checkpoint`: what is replaced, and what stays."""

import shlex
import sys
from unittest import mock

import pytest

from config import TrainingConfig
from utils.redact import redact_config, redact_secrets
from utils.run.provenance import collect_provenance
from utils.settings.problems import REDACTED

# each with its secret
SECRETS = {
    """curl -H "Authorization: Bearer abc" -T {} https://host/a""": "abc",
    """curl -H 'authorization: Basic dXNlcjpw' -T {} https://host/a""": "dXNlcjpw",
    r"""curl -H Authorization:\ Bearer\ abc -T {}""": "abc",
    """curl -H "X-Api-Key: abc" -T {}""": "abc",
    """curl -u me:abc -T {} https://host""": "abc",
    """curl --user=me:abc https://host""": "abc",
    """curl -T {} https://me:abc@host/a""": "abc",
    """curl -T {} 's3://bucket/a?X-Amz-Credential=abc&X-Amz-Signature=abc'""": "abc",
    """curl -d text=saved https://hooks.slack.com/services/T00/B00/abc""": "abc",
    """sh -c 'AWS_SECRET_ACCESS_KEY=abc aws s3 cp {} s3://bucket'""": "abc",
    """upload --token abc {}""": "abc",
    """upload --password="a b c" {}""": "a b c",
    """upload --hf hf_abcdefGHIJKLmnop {}""": "hf_abcdefGHIJKLmnop",
    """upload ghp_0123456789abcdefABCDEF {}""": "ghp_0123456789abcdefABCDEF",
    """upload wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY {}""": "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY",
}
PLAIN = [
    "rsync -a {} host:dir/",
    "rclone copyto {} remote:bucket/runs/resnet50-imagenet-2026-11-25/{}",
    "bash upload.sh --tokenizer gpt2 --max_tokens 100 --key_frames 3 {}",
    "aws s3 cp {} s3://bucket/Run_2026/model-A100-seed42.pt",
    "sh -c 'cp {} /mnt/user@host/keys/secrets/ && echo https://host:8080/path'",
]


@pytest.mark.parametrize("command", SECRETS)
def test_a_stored_command_has_no_secret(command):
    config, secret = TrainingConfig(on_checkpoint=command), SECRETS[command]
    assert (
        secret in config.on_checkpoint
        and secret not in str(redact_config(config))
        and REDACTED in str(redact_config(config))
    )
    TrainingConfig(**redact_config(config))  # quotes still match
    with mock.patch.object(sys, "argv", ["train.py", "--on_checkpoint", command, "--lr", "0.1"]):
        words = collect_provenance(("a",), ("cpu",), "")["command"]
    assert secret not in str(words) and words[1:3] == ["train.py", "--on_checkpoint"] and words[-2:] == ["--lr", "0.1"]
    with mock.patch.object(sys, "argv", ["train.py", *shlex.split(command)]):
        assert secret not in str(collect_provenance(("a",), ("cpu",), "")["command"])


@pytest.mark.parametrize("command", PLAIN)
def test_other_commands_are_stored_as_they_are(command):
    assert redact_secrets(command) == command


@pytest.mark.parametrize("place", ["flag", "TOML"])
def test_a_redacted_command_is_rejected(place, tmp_path, capsys):
    file = tmp_path / "a.toml"
    file.write_text(f"on_checkpoint = 'upload --token {REDACTED}'\n" if place == "TOML" else "")
    words = ["--config", str(file)] if place == "TOML" else ["--on_checkpoint", f"upload --token {REDACTED}"]
    with pytest.raises(SystemExit):
        TrainingConfig.from_args(words)
    source = f"{file}: " if place == "TOML" else ""
    assert capsys.readouterr().err == (
        f"{source}--on_checkpoint contains [redacted], which stands for a secret that a run did not store."
        " Give the command again, or better a script that holds the secret.\n"
    )
    assert TrainingConfig.from_args([*words, "--on_checkpoint", "true {}"]).on_checkpoint == "true {}"
