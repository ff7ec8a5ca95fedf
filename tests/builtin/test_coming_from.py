# extra: template
"""docs/coming-from.md: every flag of the programs that it names is answered, with flags that this fork has."""

import dataclasses
import functools
import re

import pytest

import config
from config import TrainingConfig, fields_of_yours
from ranks import ROOT
from test_reference import entries

PAGE = (ROOT / "docs/coming-from.md").read_text()
FIELDS = {field.name for field in dataclasses.fields(TrainingConfig)}
FIELDS |= {name for fields in config.deleted_extras().values() for name in fields}  # the page is that of the template
YOURS = {field.name for field in fields_of_yours()}
ROWS = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| `-")]
WHICH = {  # the flags of each program
    "diffusers": """dataset_name dataset_config_name model_config_name_or_path train_data_dir output_dir cache_dir
        overwrite_output_dir resolution center_crop random_flip train_batch_size eval_batch_size dataloader_num_workers
        num_epochs save_images_epochs save_model_epochs gradient_accumulation_steps learning_rate lr_scheduler
        lr_warmup_steps adam_beta1 adam_beta2 adam_weight_decay adam_epsilon use_ema ema_inv_gamma ema_power
        ema_max_decay push_to_hub hub_token hub_model_id hub_private_repo logger logging_dir local_rank mixed_precision
        prediction_type ddpm_num_steps ddpm_num_inference_steps ddpm_beta_schedule checkpointing_steps
        checkpoints_total_limit resume_from_checkpoint enable_xformers_memory_efficient_attention
        preserve_input_precision""",
    "lightning": """accelerator strategy devices num_nodes precision logger callbacks fast_dev_run max_epochs min_epochs
        max_steps min_steps max_time limit_train_batches limit_val_batches limit_test_batches limit_predict_batches
        overfit_batches val_check_interval check_val_every_n_epoch num_sanity_val_steps log_every_n_steps
        enable_checkpointing enable_progress_bar enable_model_summary accumulate_grad_batches gradient_clip_val
        gradient_clip_algorithm deterministic benchmark inference_mode use_distributed_sampler profiler detect_anomaly
        barebones plugins sync_batchnorm reload_dataloaders_every_n_epochs default_root_dir enable_autolog_hparams
        model_registry track_grad_norm amp_backend amp_level monitor mode save_top_k save_last save_weights_only
        every_n_epochs every_n_train_steps train_time_interval min_delta patience ckpt_path""",
    "deepspeech": """train_manifest val_manifest sample_rate batch_size num_workers labels_path window_size
        window_stride window hidden_size hidden_layers rnn_type epochs cuda lr max_norm learning_anneal silent
        checkpoint checkpoint_per_batch checkpoint_per_iteration visdom tensorboard log_dir log_params id save_folder
        model_path
        continue_from finetune speed_volume_perturb spec_augment noise_dir noise_prob noise_min noise_max no_shuffle
        no_sortaGrad no_bidirectional dist_url dist_backend world_size rank gpu_rank seed opt_level
        keep_batchnorm_fp32 loss_scale momentum weight_decay load_auto_checkpoint save_n_recent_checkpoints
        lookahead_context best_val_model_name adam eps betas""",
    "accelerate": """mixed_precision cpu data_dir checkpointing_steps output_dir resume_from_checkpoint with_tracking
        project_dir num_epochs gradient_accumulation_steps use_stateful_dataloader local_sgd_steps
        model_name_or_path""",
}


@functools.cache
def fork_with(fields):
    return dataclasses.make_dataclass("Fork", sorted(fields))


def answer(flag, fields=FIELDS):
    """What train.py says about a flag in a fork with these fields."""
    return config._unknown(f"--{flag}", fork_with(frozenset(fields)))


def flags_in(text):
    return {*re.findall(r"--(?:no-)?(\w+)", text)}


@pytest.mark.parametrize(("program", "flag"), [(name, flag) for name, flags in WHICH.items() for flag in flags.split()])
def test_each_flag_of_other_programs_is_a_flag_here_or_is_answered(program, flag):
    is_answered = config._of_another_trainer(flag, FIELDS) or "torchrun" in answer(flag)
    assert flag in FIELDS or is_answered


def test_the_rows_name_flags_and_functions_that_exist():
    known = FIELDS.union({"config", "print_config"}, *config.deleted_extras().values())
    functions = {name for title in ("model", "dataset") for name in entries(f"Functions of {title}.py")}
    functions |= entries("Methods of a data set").keys()
    assert len(ROWS) > 250
    for there, here in ROWS:
        assert {*re.findall(r"`--(?:no-)?(\w+)", here)} <= known, here
        for name in re.findall(r"`(\w+)` in `(?:model|dataset)\.py`", here):
            assert name in functions, (there, here)


def test_no_row_is_about_a_flag_that_exists_and_none_is_answered_twice():
    answers = {}
    for there, here in ROWS:
        for name in re.findall(r"`-+([\w-]+)`", there):
            assert answers.setdefault(name.replace("-", "_"), here) == here, name
    assert not answers.keys() & FIELDS


@pytest.mark.parametrize("deleted", [YOURS, {"dataset"}, {"image_size", "sync_bn"}, {"patience", "keep_last"}])
def test_no_answer_names_a_flag_that_the_fork_has_deleted(deleted):
    """What is left of an answer is one that helps: another part of it, or how to add the field."""
    left = FIELDS - deleted
    for there, here in ROWS:
        for flag in re.findall(r"`-+([\w-]+)`", there):
            found = answer(flag, left)
            said = found.removeprefix(f"--{flag}: ")
            own = {*re.findall(r"`--(?:no-)?(\w+)", here)}
            assert not flags_in(said) & deleted, found
            assert "see --help" not in said and ("yours" in said) <= bool(own & deleted or "yours" in here), found
            meant = re.match(r"`--(\w+)", here)
            if meant and meant[1] in left and not own & deleted:
                assert said == f"is not known; did you mean --{meant[1]}?"


@pytest.mark.parametrize(
    ("flag", "deleted", "expected"),
    [
        ("data-path", {"dataset"}, "--data-path: is not known; did you mean --data_dir?"),
        ("resolution", set(), "--resolution: is not known; did you mean --image_size?"),
        (
            "resolution",
            YOURS,
            "--resolution: is not a flag here; if your fork has no such field, choose the size in create_dataset in"
            " dataset.py",
        ),
        (
            "mixup",
            YOURS,
            '--mixup: is not a flag of this fork; add a field to the block "yours" of config.py, or leave it out',
        ),
    ],
)
def test_answers_of_a_fork(flag, deleted, expected):
    assert answer(flag, FIELDS - deleted) == expected
