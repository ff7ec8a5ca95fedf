"""What the options of other trainers are called here, or what to do in place of them.

`train.py` answers an unknown flag with these texts, and docs/coming-from.md is made from them.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Trainer(NamedTuple):
    """A program, or a group of programs, whose options are answered.

    Args:
        title: heading on the page.
        introduction: Markdown below the heading of the page, in whole sentences.
        answers: the answer for each group of options, whose names are separated by spaces. An answer is Markdown of at
            most 200 characters. If its first part is a flag alone, the option has another name here. Parts are
            separated by "; ". A part that names a flag or a script which the fork has deleted is left out.
    """

    title: str
    introduction: str
    answers: dict[str, str]


ANY_TRAINER = {
    "learning_rate": "`--lr`",
    "wd": "`--weight_decay`",
    "j workers dataloader_num_workers": "`--num_workers`",
    "b device-batch-size per_device_train_batch_size train_batch_size": "`--batch_size`",
    "max_train_steps max_iters num-iterations": "`--max_steps`",
    "num_train_epochs num_epochs max_epochs": "`--epochs`",
    "output_dir out_dir output save-dir default_root_dir project_dir": "`--run_dir`",
    "experiment name run_name logging_dir": "the run folder has the name of the run, so give `--run_dir`",
    "resume resume_from_checkpoint ckpt_path continue_from load_auto_checkpoint": "`--resume_from`",
    "start_epoch": "a resume continues at the step of the checkpoint, so give `--resume_from auto`",
    "data": "give the folder as `--data_dir`; choose the data set in `create_dataset` in `dataset.py`",
    "data-path dataset-root dataset-dir": "`--data_dir`; for folders of images see `--dataset`",
    "eval-metric monitor": "`--best_metric`",
    "max_norm max_grad_norm clip-grad grad_clip gradient_clipping gradient_clip_val": "`--clip_grad_norm`",
    "clip-mode gradient_clip_algorithm": (
        "for the norm leave it out; for another clipping write a `create_optimizer` in `model.py` whose optimizer"
        " clips in its `step`"
    ),
    "amp": "`--use_amp`",
    "mixed_precision precision bf16 fp16 amp_backend amp_level opt_level": (
        "give `--amp_dtype bf16` or `--amp_dtype fp16`; for float32 give `--no-use_amp`"
    ),
    "bf16_full_eval fp16_full_eval": "evaluations use the mixed precision of training, so give `--amp_dtype`",
    "dtype model-dtype": (
        "give `--amp_dtype`; for float32 give `--no-use_amp`; set the dtype of the weights in `create_model` in"
        " `model.py`"
    ),
    "tf32 allow_tf32": "TF32 is used on CUDA, so leave it out",
    "device device-type accelerator use_cpu cpu cuda no_cuda": (
        "GPUs are used if there are any; set `CUDA_VISIBLE_DEVICES=` for the CPU"
    ),
    "num_processes num-gpu tpu_cores ipus hpus auto_select_gpus": (
        "start the ranks with torchrun; set `CUDA_VISIBLE_DEVICES` to choose GPUs"
    ),
    "rank gpu_rank": "start the ranks with torchrun",
    "dist_url": "start the ranks with torchrun, or give `--init_method`",
    "dist_backend distributed_backend ddp_backend": "`--backend`",
    "opt optim": "`--optimizer`; for others than sgd and adamw write `create_optimizer` in `model.py`",
    "opt-eps adam_epsilon adamw-eps eps opt-kwargs optim_args optim_target_modules use_8bit_adam": (
        "write `create_optimizer` in `model.py`"
    ),
    "opt-betas betas": "give `--momentum` and `--beta2`",
    "beta1 adam_beta1": "`--momentum`",
    "adam_beta2": "`--beta2`",
    "sched lr_scheduler lr_scheduler_type lr-decay-method": "`--schedule`",
    "warmup_iters num_warmup_steps lr_warmup_steps": "`--warmup_steps`",
    "lr-warmup-epochs": "`--warmup_epochs`",
    "warmup-ratio": (
        "with `--epochs` give `--warmup_epochs`, which is the ratio x the epochs; with `--max_steps` give"
        " `--warmup_steps`, which is the ratio x the steps"
    ),
    "lr-warmup-method lr-warmup-decay lr-warmup-factor warmup-lr": (
        "the warm-up is linear from 1 / steps; write `lr_factor` in `model.py` for another"
    ),
    "scale_lr lr-base lr-base-size lr-base-scale": "`--lr` is never scaled, so compute the learning rate and give it",
    "model-ema use_ema": "`--ema_decay`; for example, `--ema_decay 0.999` averages about 1,000 steps",
    "model-ema-decay ema_max_decay": "`--ema_decay`",
    "model-ema-warmup ema_inv_gamma ema_power": "the average warms up by the number of updates, so leave it out",
    "weights pretrained pretrained-path initial-checkpoint no-resume-opt finetune": (
        "`--init_from`; its help says which weights it takes"
    ),
    "torch_compile torchcompile torchcompile-mode torch_compile_mode": "`--compile`",
    "torch_compile_backend fuser torchscript aot-autograd": (
        "`--compile` uses torch's default backend; for a backend of your own call `model.compile` in `create_model` in"
        " `model.py`"
    ),
    "grad-checkpointing gradient_checkpointing fsdp_activation_checkpointing": "`--activation_checkpointing`",
    "gradient_checkpointing_kwargs activation_checkpointing_kwargs": (
        "`--activation_checkpointing` recomputes the modules that `blocks` in `model.py` returns, so write that"
    ),
    "gradient_accumulation_steps": (
        "give `--grad_accum_steps` per rank, which in nanoGPT is the number divided by the ranks"
    ),
    "accumulate_grad_batches update-freq accum-grad": "`--grad_accum_steps`",
    "use-deterministic-algorithms full_determinism": "`--deterministic`",
    "print-freq log-freq logging_steps log_every_n_steps tensorboard-log-frequency": "`--log_interval`",
    "c cfg": "`--config`",
    "test-only": "`--eval_only`",
    "do_eval": "evaluations are part of a run, so leave it out; to only evaluate, give `--eval_only`",
    "do_train": "a run trains unless `--eval_only` is given, so leave it out",
    "do_predict": "use `scripts/predict.py` after the run",
    "data_seed seed_everything": "`--seed`",
    "log-wandb wandb_log wandb_project wandb_run_name wandb-tags wandb-resume-id report_to with_tracking visdom run": (
        "use [`--track`](recipes/trackers.md)"
    ),
    "tensorboard tensorboard-summaries log_params": "TensorBoard files are always written, so leave it out",
    "project trackio_space_id trackio_bucket_id trackio_static_space_id": (
        "give results a `--run_dir`; a tracker's project is set by `WANDB_PROJECT` or `TRACKIO_PROJECT`, its"
        " Space by `TRACKIO_SPACE_ID`"
    ),
    "push_to_hub hub_model_id hub_token hub_private_repo hub_strategy hub_always_push hub_revision model_registry": (
        "upload the file that `scripts/export.py` writes"
    ),
    "save_weights_only save_only_model": "use `scripts/export.py` after the run",
    "eval_iters eval-tokens eval-examples limit_val_batches limit_test_batches limit_predict_batches max_eval_samples"
    " max_predict_samples n_val": (
        "each evaluation visits the whole held-out set; return a smaller one from `create_dataset` in `dataset.py`"
    ),
    "max_train_samples n_train": "`--dataset_size`",
    "eval_steps eval_interval validation_steps valid-frequency": "`--eval_every_steps`",
    "val-interval val-freq validation_epochs check_val_every_n_epoch": "`--eval_every`",
    "save_steps checkpointing_steps save-frequency recovery-interval every_n_train_steps checkpoint_per_batch"
    " checkpoint_per_iteration": "`--save_every_steps`",
    "save_period save_model_epochs every_n_epochs": "`--save_every`",
    "save_total_limit checkpoints_total_limit save_n_recent_checkpoints": "`--keep_last`",
    "checkpoint-hist save_top_k": (
        "the best checkpoint is always kept, so give the number of the latest ones as `--keep_last`"
    ),
    "label_smoothing_factor smoothing": "`--label_smoothing`",
    "norm-mean norm-std mean std": "set the attributes `mean` and `std` of the data set in `dataset.py`",
    "drop drop-path drop-connect drop-block gp head-init-scale head-init-bias model-kwargs rpn-score-thresh"
    " trainable-backbone-layers dropout recurrent-updates": "build the model with it in `create_model` in `model.py`",
    "n_layer n_head n_embd bias depth aspect-ratio head-dim window-pattern hidden_size hidden_layers rnn_type"
    " bidirectional no_bidirectional lookahead_context model_config_name_or_path": (
        'add the field to the block "yours" of `config.py`, and read it in `create_model` in `model.py`'
    ),
    "max_seq_length max-seq-len max_length block_size truncation_mode pad_to_max_length pad_to_multiple_of"
    " padding_free": "cut the sequences in `__getitem__` and pad them in `collate` in `dataset.py`",
    "hflip vflip flip-prob color-jitter color-jitter-prob grayscale-prob gaussian-blur-prob center_crop random_flip"
    " data-augmentation crop-size eval-size scale-range rescale-prob scaling-type gamma-range brightness-range"
    " contrast-range saturation-range hue-range asymmetric-jitter-prob occlusion-prob occlusion-px-range erase-prob"
    " erase-px-range erase-num-repeats spatial-shift-prob spatial-shift-max-angle spatial-shift-max-displacement"
    " interpolation-strategy use-grayscale hsv_h hsv_s hsv_v degrees translate shear perspective flipud fliplr bgr"
    " crop-mode crop-border-pixels tf-preprocessing train-resize-size": (
        "write the transform into `__getitem__` in `dataset.py`, which is seeded per sample"
    ),
    "scale": "for timm's area of a crop give `--crop_scale`; write another scaling into `__getitem__` in `dataset.py`",
    "mixup": "give alpha as `--mixup_alpha`; write mixing with a probability into `device_transform` in `dataset.py`",
    "cutmix": "give alpha as `--cutmix_alpha`; write mixing with a probability into `device_transform` in `dataset.py`",
    "mixup-prob mixup-switch-prob mixup-mode mixup-off-epoch cutmix-minmax close_mosaic train-img-sizes"
    " train-size-probs train-size-schedule train-size-schedule-spread train-size-random-mix multi_scale"
    " gpu-transforms": ("mix or resize batches in `device_transform` in `dataset.py`, which gets the epoch"),
    "use-copypaste mosaic copy_paste copy_paste_mode": (
        "combine samples in `collate` in `dataset.py`, which gets the whole micro-batch and may draw random numbers"
    ),
    "ra-magnitude augmix-severity remode recount": (
        "write torchvision's transform with it into `__getitem__` in `dataset.py`"
    ),
    "pin-mem dataloader_pin_memory": "batches for a GPU are always pinned, so leave it out",
    "use-multi-epochs-loader dataloader_persistent_workers": "workers stay from epoch to epoch, so leave it out",
    "dataloader_prefetch_factor no-prefetcher": "each worker prefetches two batches, so leave it out",
    "dataloader_in_order ignore_data_skip accelerator_config use_stateful_dataloader": (
        "the order of samples is exact on any number of ranks and after a resume, so leave it out"
    ),
    "kd-model-name kd-distill-type kd-loss-type kd-temperature kd-student-feature-dim kd-teacher-feature-dim"
    " kd-token-distill-type distill-loss-weight task-loss-weight distill_model dis": (
        "make a frozen teacher part of the model in `create_model`, and compare with it in `compute_loss` in `model.py`"
    ),
    "verbose log_level log_level_replica log_on_each_node logging_strategy silent": (
        "rank 0 logs to the terminal and every rank to a file of the run folder; `--log_interval` sets how often"
    ),
    "disable_tqdm enable_progress_bar": "a terminal gets a progress bar and a file does not, so leave it out",
}

TORCHVISION = {
    "p k": "it is short for another option there, so give that in full",
    "lr-min": "`--min_lr`",
    "val-crop-size": "`--image_size`",
    "train-crop-size": "`--train_size`",
    "val-resize-size": "`--resize_size`",
    "ra-sampler ra-reps": "`--augment_repeats`",
    "bias-weight-decay transformer-embedding-decay": "set the decay of each group in `param_groups` in `model.py`",
    "lr-step-size lr-gamma lr-steps lr-milestones lr-decay-gamma decay-after-steps": (
        "`--schedule step` divides by 10 after 50 and 75 %; write `lr_factor` in `model.py` for another"
    ),
    "cache-dataset": (
        "folders are listed once per file system, so leave it out; `--cache ram` keeps decoded images, too"
    ),
    "model-ema-steps": "the average is updated after each step, so give `--ema_decay` the n-th root of the decay",
    "use-v2": "the transforms of torchvision here are those of v2, so leave it out",
    "weights-backbone": (
        "load the weights of a part of the model in `initial_weights` in `model.py`, which gets `--init_from`"
    ),
    "aspect-ratio-group-factor labels-per-batch samples-per-label": (
        "write `epoch_order` in `dataset.py`, in which a micro-batch is `batch_size` consecutive entries"
    ),
    "aux-loss gamma flow-loss-weight flow-loss-exclude-large consistency-weight consistency-resize-factor psnr-weight"
    " smoothness-weight photometric-weight photometric-max-displacement-ratio photometric-ssim-weight max-disparity"
    " margin": "write it into `compute_loss` in `model.py`, which may ask for `config`",
    "num_flow_updates": "pass it to the model in `compute_loss` in `model.py`",
    "freeze-batch-norm": (
        "call `freeze_batchnorm(model)` of `utils/example/freezing.py` in `create_model` in `model.py`"
    ),
    "kinetics-version clip-len frame-rate clips-per-video train-dataset train-datasets val-dataset dataset-steps"
    " steps-is-epochs": "make the data set in `create_dataset` in `dataset.py`",
    "test-datasets": "use the recipe [several validation sets](recipes/several_validation_sets.md)",
    "dataset-shuffle dataset-order-shuffle": (
        "each epoch has another order, so leave it out, or write `epoch_order` in `dataset.py`"
    ),
    "threads": "set `OMP_NUM_THREADS` in the environment",
    "metrics": "return each metric from `compute_loss` in `model.py`",
    "resume-path resume-schedule": (
        "`--resume_from` restores the optimizer and the schedule, too; for weights alone give `--init_from`"
    ),
    "padder-type": "pad the images in `collate` in `dataset.py`",
}

TIMM = {
    "img-size input-size imgsz": "`--image_size`",
    "in-chans": "`--in_channels`",
    "vb validation-batch-size": "`--eval_batch_size`",
    "train-interpolation": "`--interpolation`",
    "no-aug": "give `--augment none`",
    "ratio": "`--crop_ratio`",
    "aa": "`--auto_augment`",
    "aug-repeats": "`--augment_repeats`",
    "reprob": "`--random_erase`",
    "crop-pct": "give `--resize_size`, which is image_size / crop_pct",
    "train-split val-split split": (
        'load the split in `create_dataset` in `dataset.py`, which is asked for "train", "val" and "test"'
    ),
    "input-key target-key input-img-mode dataset-trust-remote-code class-map real-labels valid-labels": (
        "choose images and labels in `create_dataset` in `dataset.py`"
    ),
    "train-num-samples val-num-samples": "a data set here has a length, so leave it out",
    "num-samples": (
        "a data set here has a length, so leave it out; samples of a model are drawn in `compute_loss` in `model.py`"
    ),
    "use-train-size": "give `--image_size` and `--resize_size`",
    "dataset-download": "missing data is downloaded by `prepare_data` in `dataset.py`, so write that",
    "fast-norm": "call timm's `set_fast_norm` in `create_model` in `model.py`",
    "bn-momentum bn-eps": "set `momentum` and `eps` of the BatchNorm layers in `create_model` in `model.py`",
    "split-bn aug-splits jsd-loss resplit": (
        "return several views of an image from `__getitem__` in `dataset.py`, and compare them in `compute_loss` in"
        " `model.py`"
    ),
    "dist-bn": "running statistics are those of the global batch on all ranks, so leave it out",
    "no-ddp-bb ddp_broadcast_buffers ignore_bias_buffers": "DDP sends no buffers in a step here, so leave it out",
    "synchronize-step": "a step does not wait for the device, so leave it out",
    "device-modules": "ranks use CUDA or the CPU, so leave it out",
    "layer-decay layer-decay-min-scale layer-decay-no-opt-scale": (
        "give each group its own `lr` in `param_groups` in `model.py`"
    ),
    "sched-on-updates": "the schedule is a function of the step, so leave it out",
    "warmup-prefix": "the schedule always begins after the warm-up, so leave it out",
    "decay-epochs decay-rate dr decay-milestones cooldown-epochs patience-epochs lr-noise lr-noise-pct lr-noise-std"
    " lr-cycle-mul lr-cycle-decay lr-cycle-limit lr-k-decay": "write `lr_factor` in `model.py`",
    "epoch-repeats": "multiply `--epochs`, `--eval_every` and `--save_every` by it",
    "train-batches-per-epoch train-steps-per-epoch": (
        "an epoch is a pass over the data; count with `--max_steps`, `--eval_every_steps` and `--save_every_steps`"
    ),
    "train-crop-mode": "for the rrc of timm see `--augment`; write another crop into `__getitem__` in `dataset.py`",
    "bce-loss bce-sum bce-target-thresh bce-pos-weight": "write the loss into `compute_loss` in `model.py`",
    "train-batch-sizes": "the micro-batch has one size for the life of a run, so give `--batch_size`",
    "variable-batch-loss-scale naflex-loss-scale": "each sample of a global batch has the same weight, so leave it out",
    "naflex-loader naflex-train-seq-lens naflex-max-seq-len naflex-patch-sizes naflex-patch-size-probs"
    " naflex-patchify-channels-first": (
        "cut the patches in `__getitem__` in `dataset.py`; for a budget of patches give `--batch_tokens`"
    ),
    "model-ema-force-cpu": "the average is kept on the device, so leave it out",
    "worker-seeding": "each sample has its own seed, so leave it out",
    "save-images save_images_epochs plots": (
        "return images from `log_images` in `model.py`, which each evaluation calls"
    ),
    "tta": (
        "average the outputs of several views in `compute_loss` in `model.py` where `torch.is_grad_enabled()` is False"
    ),
    "m": "`--model`",
    "checkpoint": "checkpoints are always written; to evaluate one, give `--eval_only` and `--resume_from`",
    "test-pool reparam": (
        "change the model in `create_model` in `model.py`, or evaluate an export with a script of your own"
    ),
    "results-file results-format": "`--eval_only` writes a JSON file into the run folder, so leave it out",
    "retry auto_scale_batch_size auto_find_batch_size": (
        "give the largest `--batch_size` that fits; `scripts/benchmark.py --find-batch` finds it"
    ),
    "metrics-avg": "return the metrics of your task from `compute_loss` in `model.py`",
}

HUGGING_FACE = {
    "overwrite_output_dir exist_ok": "`--overwrite`",
    "per_device_eval_batch_size": "`--eval_batch_size`",
    "eval_strategy evaluation_strategy": "give `--eval_every` in epochs, or `--eval_every_steps`",
    "save_strategy": "give `--save_every` in epochs, or `--save_every_steps`; a new best is saved at its evaluation",
    "metric_for_best_model greater_is_better mode": "give `--best_metric` as min:NAME or max:NAME",
    "early_stopping_patience": "`--patience`",
    "ddp_find_unused_parameters": "`--find_unused_parameters`",
    "ddp_bucket_cap_mb": "`--bucket_cap_mb`",
    "ddp_comm_hook": "`--comm_hook`",
    "ddp_timeout": "`--timeout`",
    "dataloader_drop_last": "`--drop_last`",
    "fsdp deepspeed fsdp_config deepspeed_config deepspeed_config_file": "`--sharding`",
    "parallelism_config": (
        "`--sharding` divides the model; for layers split over ranks use the recipe [tensor"
        " parallel](recipes/tensor_parallel.md)"
    ),
    "ddp_static_graph": "no step relies on a static graph, so leave it out",
    "lr_scheduler_kwargs": (
        "give `--min_lr` or `--schedule_steps`; write `lr_factor` in `model.py` for another schedule"
    ),
    "average_tokens_across_devices": (
        "the loss is divided by the count of the global batch on all ranks, so leave it out"
    ),
    "use_liger_kernel liger_kernel_config attn_implementation model_init_kwargs trust_remote_code model_revision"
    " token use_auth_token use_fast_tokenizer": (
        "pass it to `from_pretrained`, or change the model, in `create_model` in `model.py`"
    ),
    "use_cache": "pass `use_cache=False` to the model in `compute_loss` in `model.py`",
    "neftune_noise_alpha": "add the noise to the embeddings in the model of `create_model` in `model.py`",
    "torch_empty_cache_steps": "the next step uses the cached memory again, so leave it out",
    "logging_first_step": "the first record comes after `--log_interval` steps, so give a smaller number",
    "logging_nan_inf_filter debug detect_anomaly terminate_on_nan": (
        "a step that is not finite is skipped, and its samples are listed; `--max_skipped_steps` ends the run"
    ),
    "include_num_input_tokens_seen": (
        "return the tokens as a metric from `compute_loss` in `model.py`; with `--batch_tokens` records have"
        " `tokens_per_s`"
    ),
    "eval_delay": "evaluations are due at the multiples of `--eval_every` or `--eval_every_steps`, so leave it out",
    "eval_on_start num_sanity_val_steps": (
        "a batch of each held-out set is evaluated before the first step, so leave it out"
    ),
    "prediction_loss_only include_for_metrics label_names": (
        "`compute_loss` in `model.py` gets the whole batch, so return from it what you want to see"
    ),
    "eval_do_concat_batches eval_use_gather_object eval_accumulation_steps batch_eval_metrics": (
        "an evaluation adds up sums and counts on each rank, so leave it out"
    ),
    "save_on_each_node": (
        "rank 0 writes a checkpoint, so give a `--run_dir` that all nodes share; for disks of the nodes give `--mirror`"
    ),
    "save_safetensors": "use `scripts/export.py --format safetensors` after the run",
    "enable_jit_checkpoint": "a run saves and stops after SIGTERM, so leave it out",
    "load_best_model_at_end": "the test set is evaluated with best.pt, so leave it out",
    "restore_callback_states_from_checkpoint": "keep what has to survive a resume in buffers of the model",
    "dataloader_multiprocessing_context": "workers start in Python's default way, so leave it out",
    "remove_unused_columns": "return what the model needs from `__getitem__` in `dataset.py`",
    "train_sampling_strategy group_by_length length_column_name": (
        "give the data set `lengths`, and `--batch_tokens`; write `epoch_order` in `dataset.py` for another order"
    ),
    "skip_memory_metrics performance enable_memory_tracking": (
        "train records have `step_s`, `peak_memory_bytes` and, on a known GPU, `mfu`, so leave it out"
    ),
    "task_name train_file validation_file test_file dataset_name dataset_config dataset_config_name"
    " dataset_train_split dataset_test_split dataset_streaming dataset_text_field": (
        "load the data in `create_dataset` in `dataset.py`, as the recipe [Hugging Face data"
        " sets](recipes/hugging_face.md) does"
    ),
    "overwrite_cache": (
        "`prepare_data` in `dataset.py` runs if `is_prepared` returns False, so delete the prepared files"
    ),
    "cache_dir": "other data is below `--data_dir`; for files of the hub set `HF_HOME`",
    "model_name_or_path tokenizer_name config_name": (
        'add the field to the block "yours" of `config.py`, and read it in `create_model`; the recipe'
        " [classification](recipes/text_classification.md) has it"
    ),
    "ignore_mismatched_sizes cls_remap": (
        "`--init_from` leaves out weights of another shape; map others in `initial_weights` in `model.py`"
    ),
}

TRL = {
    "beta": 'add the field to the block "yours" of `config.py`, and read it in `create_model` in `model.py`',
    "loss_type loss_weights ld_alpha f_divergence_type f_alpha_divergence_coef use_weighting discopop_tau"
    " router_aux_loss_coef": ("write the loss into `compute_loss` in `model.py`, which may ask for `config`"),
    "completion_only_loss assistant_only_loss": (
        "leave the other tokens out of the sum and the count in `compute_loss` in `model.py`"
    ),
    "disable_dropout": "set the dropout of the model to 0 in `create_model` in `model.py`",
    "precompute_ref_log_probs precompute_ref_batch_size": (
        "the reference is computed with each batch; to store its values write `prepare_data` in `dataset.py`"
    ),
    "sync_ref_model ref_model_mixup_alpha ref_model_sync_steps": (
        "the reference of the recipe [DPO](recipes/dpo.md) stays as it is; to move it after each step, see the teacher"
        " of [self-distillation](recipes/self_distillation.md)"
    ),
    "activation_offloading": "run the model under `torch.autograd.graph.save_on_cpu` in `compute_loss` in `model.py`",
    "dataset_num_proc": "tokenize in `__getitem__` in `dataset.py`, which runs in `--num_workers` processes",
    "dataset_kwargs chat_template_path eos_token pad_token": "prepare the text in `create_dataset` in `dataset.py`",
    "packing packing_strategy eval_packing": (
        "pack the documents in `collate` in `dataset.py`; for a budget of tokens give `--batch_tokens`"
    ),
    "shuffle_dataset no_shuffle": (
        "each epoch is shuffled by the seed; write `epoch_order` in `dataset.py` for another order"
    ),
    "use_peft lora_r lora_alpha lora_dropout lora_target_modules lora_target_parameters lora_modules_to_save"
    " lora_task_type use_rslora use_dora": "wrap the model with peft in `create_model` in `model.py`",
    "load_in_8bit load_in_4bit bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_quant_storage quantize fp8"
    " fp8-recipe": "low-precision weights were not tried here; convert the model in `create_model` in `model.py`",
}

ACCELERATE = {
    "local_sgd_steps": "ranks average gradients in each step; `--grad_accum_steps` makes steps rarer, so give that",
    "zero_stage": "give `--sharding zero2` or `--sharding zero3`",
    "offload": "`--cpu_offload`",
}

DIFFUSERS = {
    "adam_weight_decay": "`--weight_decay`",
    "train_data_dir": "`--data_dir`; for folders of images see `--dataset`",
    "resolution": "`--image_size`; if your fork has no such field, choose the size in `create_dataset` in `dataset.py`",
    "prediction_type ddpm_num_steps ddpm_num_inference_steps ddpm_beta_schedule": (
        'add the field to the block "yours" of `config.py`, and read it in `create_model` in `model.py`'
    ),
    "enable_xformers_memory_efficient_attention": (
        "`F.scaled_dot_product_attention` of torch chooses its kernel, so leave it out"
    ),
    "preserve_input_precision": "return the images as they are from `__getitem__` in `dataset.py`",
    "noise_offset input_perturbation snr_gamma": (
        "write it into `compute_loss` in `model.py`, which may draw random numbers"
    ),
}

NANOGPT = {
    "decay_lr": "give `--schedule cosine`, or `--schedule constant` for none",
    "lr_decay_iters": "`--schedule_steps`",
    "always_save_checkpoint": "the best and the latest checkpoints are kept, so leave it out",
}

NANOCHAT = {
    "total-batch-size": "give `--global_batch_size` in samples, which is the number of tokens / max_seq_len",
    "target-flops target-param-data-ratio": "compute the number of steps, and give `--max_steps`",
    "embedding-lr unembedding-lr matrix-lr scalar-lr": "give each group its own `lr` in `param_groups` in `model.py`",
    "warmdown-ratio": "`--schedule wsd` decays over the last 20 %; write `lr_factor` in `model.py` for another part",
    "final-lr-frac": "give `--min_lr`, which is the fraction x lr",
    "init-lr-frac": "multiply `--lr` by it",
    "resume-from-step": "give `--resume_from` the path of the checkpoint of that step",
    "model-step": "give `--init_from` the path of the checkpoint of that step",
    "model-tag": "name the run with `--run_dir`; load weights with `--init_from`",
    "load-optimizer": "`--resume_from` restores the optimizer; `--init_from` does not, so leave it out",
    "core-metric-every core-metric-max-per-task chatcore-every chatcore-max-cat chatcore-max-sample sample-every": (
        "evaluate the file that `scripts/export.py` writes with a script of your own"
    ),
    "mmlu-epochs gsm8k-epochs": "mix the data sets in `create_dataset` in `dataset.py`",
    "examples-per-step max-new-tokens temperature top-k": (
        "reinforcement learning was not tried here; draw the samples in `compute_loss` in `model.py`, or use trl"
    ),
}

ULTRALYTICS = {
    "lr0": "`--lr`",
    "erasing": "`--random_erase`",
    "batch": "it is divided by the ranks there, so give `--batch_size`, which is batch / ranks",
    "nbs": "`--global_batch_size`",
    "lrf": "give `--min_lr`, which is lr0 x lrf",
    "cos_lr": "give `--schedule cosine`, or `--schedule linear` for the default there",
    "time": "give `--max_time`, which is in minutes",
    "fraction": "give `--dataset_size`, which is the fraction x the samples",
    "val": "give `--eval_every 0` to evaluate only at the end",
    "save enable_checkpointing checkpoint_callback": "checkpoints are always written; `--keep_last` says how many stay",
    "task single_cls overlap_mask mask_ratio": "make the targets in `create_dataset` and `__getitem__` in `dataset.py`",
    "rect": "write `epoch_order` for images of similar shape, and pad them in `collate` in `dataset.py`",
    "profile dnn": ("export the model with `scripts/export.py --format onnx`, and run it with a script of your own"),
    "conf iou max_det nms save_json": (
        "filter and convert the boxes in `predict` in `model.py`, which `scripts/predict.py` writes to a file"
    ),
    "warmup_momentum": "write a `create_optimizer` in `model.py` whose optimizer sets `momentum` in its `step`",
    "warmup_bias_lr": (
        "name the group of biases in `param_groups`, and give it a factor of its own in `lr_factor` in `model.py`"
    ),
    "box cls cls_pw dfl pose kobj rle angle dlog dgrad dlam": (
        "weight the terms of the loss in `compute_loss` in `model.py`"
    ),
}

LIGHTNING = {
    "sync_batchnorm": (
        "`--sync_bn`; if your fork has no such field, call `nn.SyncBatchNorm.convert_sync_batchnorm` in"
        " `create_model` in `model.py`"
    ),
    "dirpath weights_save_path save_folder": "`--checkpoint_dir`",
    "train_time_interval": "give `--save_every_minutes`",
    "val_check_interval": "give `--eval_every_steps`, which counts steps and not parts of an epoch",
    "strategy": "DDP is used, so leave it out; for FSDP or DeepSpeed give `--sharding`",
    "fast_dev_run": "give `--max_steps`, for example 1",
    "limit_train_batches": "give `--dataset_size`, which counts samples and not batches",
    "overfit_batches": (
        'give `--dataset_size`, which counts samples; to evaluate the same ones, return them as "val" from'
        " `create_dataset` in `dataset.py`"
    ),
    "logger": "TensorBoard files are always written; for a tracker give [`--track`](recipes/trackers.md)",
    "profiler": "`--enable_profiling`",
    "callbacks plugins": "write them into the functions of `model.py`, which the [reference](reference.md) lists",
    "trainer": "give the settings of the trainer as flags of their own",
    "min_epochs min_steps": "only `--patience` ends a run early, so give a larger one; else leave it out",
    "track_grad_norm": "each train record has `grad_norm`, so leave it out",
    "enable_model_summary weights_summary": "the banner has the model's parameters, so leave it out",
    "enable_autolog_hparams": "`config.json` in the run folder has all settings, so leave it out",
    "benchmark": "the fastest kernels of cuDNN are chosen unless `--deterministic` is given, so leave it out",
    "inference_mode": "evaluations run in `torch.no_grad()`, so leave it out",
    "use_distributed_sampler replace_sampler_ddp": (
        "each epoch uses each sample once on any number of ranks; for another order write `epoch_order` in `dataset.py`"
    ),
    "reload_dataloaders_every_n_epochs reload_dataloaders_every_epoch": (
        "`epoch_order` in `dataset.py` gets the epoch, so write that"
    ),
    "barebones": "logging and checkpoints do not wait for the device, so leave it out",
    "save_last": "the latest checkpoints are always kept, so leave it out",
    "save_on_exception": "a restart continues at the latest checkpoint, so give a smaller `--save_every_steps`",
    "save_on_train_epoch_end check_on_train_epoch_end": (
        "an epoch is saved and then evaluated, and a new best is saved again, so leave it out"
    ),
    "filename auto_insert_metric_name enable_version_counter": "checkpoints have fixed names, so leave it out",
    "weights_only": "checkpoints are read with `weights_only=True`, so leave it out",
    "min_delta stopping_threshold divergence_threshold": (
        "`--patience` counts evaluations without a better value, so give a number of these"
    ),
    "strict": "an unknown name in `--best_metric` ends the run before the first step, so leave it out",
    "check_finite": "a value that is not finite never counts as better, so leave it out",
    "log_rank_zero_only": "rank 0 logs to the terminal, so leave it out",
    "auto_lr_find": "use the recipe [sweeps](recipes/sweeps.md)",
    "stochastic_weight_avg swa_lrs": "`--ema_decay` averages the weights in each step, so give that",
    "truncated_bptt_steps": "cut the sequences in `__getitem__` in `dataset.py`",
    "flush_logs_every_n_steps progress_bar_refresh_rate process_position log_gpu_memory move_metrics_to_cpu": (
        "nothing is read from the device between two log points; `--log_interval` sets these"
    ),
    "prepare_data_per_node": "`prepare_data` in `dataset.py` runs once per file system, so leave it out",
    "multiple_trainloader_mode": "return one data set from `create_dataset` in `dataset.py`",
}

TOKEN_BUDGETS = {
    "max-tokens batch-bins batch-duration": "give `--batch_tokens`, in the units of the data set's `lengths`",
    "max-sentences": "`--batch_size`",
    "skip-invalid-size-inputs-valid-test": "no sample is dropped, so give `--too_long alone`",
    "num-buckets bucket-duration-bins num-batch-buckets": (
        "samples are sorted by length within windows of `--bucket_window` micro-batches, so give that"
    ),
}

DEEPSPEECH = {
    "l2": "`--weight_decay`",
    "train-manifest val-manifest test-manifest train_path val_path manifest-dir": (
        "give `--data_dir`, below which `create_dataset` in `dataset.py` reads the files"
    ),
    "labels_path sample_rate window_size window_stride window": (
        'set it in `dataset.py`, or add a field to the block "yours" of `config.py`'
    ),
    "learning_anneal": "write `lr_factor` in `model.py`, which gets `progress.epoch`",
    "adam": "give `--optimizer adamw`",
    "log_dir id model_path best_val_model_name": "`--run_dir`",
    "augment_audio speed_volume_perturb spec_augment noise_dir noise_prob noise_min noise_max": (
        "write the transform into `__getitem__` in `dataset.py`, which is seeded per sample"
    ),
    "no_sorta_grad sortagrad": "write `epoch_order` in `dataset.py`, which gets the epoch",
    "keep_batchnorm_fp32": "autocast keeps BatchNorm in float32, so leave it out",
    "loss_scale": "float16 has a scale that is searched, so leave it out",
}

TRAINERS = [
    Trainer("Any trainer", "Several trainers have these names.", ANY_TRAINER),
    Trainer(
        "torchvision's references",
        "These are the options of `train.py` of classification, detection, segmentation, video_classification,"
        " optical_flow, stereo and similarity. For ResNet-50 there is a [file of settings](recipes/imagenet.toml).",
        TORCHVISION,
    ),
    Trainer(
        "timm",
        "These are the options of `train.py` and `validate.py`. The recipe [timm](recipes/timm.md) trains its models.",
        TIMM,
    ),
    Trainer(
        "Hugging Face's Trainer",
        "These are the options of `TrainingArguments` and `run_glue.py`. Two recipes have complete forks for models of"
        " the hub: [classification](recipes/text_classification.md) with dynamic padding and F1, and a"
        " [causal language model](recipes/causal_lm.md).",
        HUGGING_FACE,
    ),
    Trainer(
        "trl",
        "These are the options of `dpo.py` and `sft.py`. The answers for Hugging Face's Trainer hold, too. The recipes"
        " [DPO](recipes/dpo.md) and [LoRA](recipes/lora.md) are complete forks.",
        TRL,
    ),
    Trainer(
        "Accelerate's examples",
        "These are the options of `nlp_example.py`, `cv_example.py`, `complete_*.py` and the examples by feature. The"
        " answers for Hugging Face's Trainer hold, too.",
        ACCELERATE,
    ),
    Trainer(
        "diffusers",
        "These are the options of `train_unconditional.py`. The recipe [diffusion](recipes/diffusion.md) is a complete"
        " fork.",
        DIFFUSERS,
    ),
    Trainer("nanoGPT", "The recipe [gpt](recipes/gpt.md) is a complete fork.", NANOGPT),
    Trainer("nanochat", "These are the options of `base_train.py`, `chat_sft.py` and `chat_rl.py`.", NANOCHAT),
    Trainer("Ultralytics", "These are the keys of `default.yaml` that training and validation read.", ULTRALYTICS),
    Trainer(
        "Lightning",
        "These are the options of `Trainer`, `ModelCheckpoint`, `EarlyStopping` and `LightningCLI`. A group before the"
        " name does not matter: `--trainer.max_epochs` is answered as `--max_epochs`.",
        LIGHTNING,
    ),
    Trainer("Budgets of tokens: fairseq, ESPnet, Lhotse", "", TOKEN_BUDGETS),
    Trainer(
        "deepspeech.pytorch",
        "The recipe [speech](recipes/speech.md) is a complete fork. Settings of version 3 have the names below or those"
        " of Lightning, with their group before them (`data.train_path`, `trainer.max_epochs`).",
        DEEPSPEECH,
    ),
]


def normalize_name(name: str) -> str:
    """The name in lower case and without separators: options are compared by these."""
    return re.sub(r"[_-]", "", name).lower()


def find_flags(text: str) -> set[str]:
    """The names of the flags of `train.py` in an answer."""
    return {*re.findall(r"`--(?:no-)?(\w+)", text)}


def is_possible(part: str, fields: Collection[str]) -> bool:
    """Whether a part of an answer names only flags and scripts that this fork has."""
    scripts = re.findall(r"`(scripts/[\w.]+)", part)
    return find_flags(part) <= {*fields} and all((ROOT / script).exists() for script in scripts)


def find_advice(name: str, fields: Collection[str]) -> str | None:
    """The answer for an option of another trainer, in Markdown, or None if no trainer has it.

    Args:
        name: of the option.
        fields: the names of the flags here. A part of the answer that names another flag, or a script that does not
            exist, is left out, since a fork may have deleted it. Nothing may be left.
    """
    wanted = normalize_name(name)
    for trainer in TRAINERS:
        for names, answer in trainer.answers.items():
            if wanted not in [normalize_name(option) for option in names.split()]:
                continue
            parts = [part for part in answer.split("; ") if is_possible(part, fields)]
            return "; ".join(parts)
    return None
