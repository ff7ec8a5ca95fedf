# extra: template
"""The exit code of a run that was preempted."""

import pytest

import train


@pytest.mark.guarantee("exit-codes")
@pytest.mark.parametrize(("launch_id", "code"), [(None, 75), ("none", 0)])
def test_a_preempted_process_exits_with_75_and_under_torchrun_which_would_restart_it_with_0(
    monkeypatch, launch_id, code
):
    monkeypatch.setattr(train, "train", lambda config: {"state": "preempted"})
    if launch_id:
        variables = {
            "TORCHELASTIC_RUN_ID": launch_id,
            "RANK": 0,
            "WORLD_SIZE": 1,
            "LOCAL_RANK": 0,
            "LOCAL_WORLD_SIZE": 1,
        }
        for name, value in {**variables, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}.items():
            monkeypatch.setenv(name, str(value))
    assert train.main([]) == code
