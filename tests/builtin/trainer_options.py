# extra: template
"""The options of other trainers, by program, for test_coming_from.py."""

# one program per entry: its options with _ for -, and a comment with the version
OPTIONS = {
    # of pytorch-image-models, commit aa4b5850 of August 2026 (1.0.29.dev0)
    "timm train.py": """
        c config data_dir dataset train_split val_split train_num_samples val_num_samples dataset_download
        class_map input_img_mode input_key target_key dataset_trust_remote_code model pretrained pretrained_path
        initial_checkpoint resume no_resume_opt num_classes gp img_size in_chans input_size crop_pct mean std
        interpolation b batch_size vb validation_batch_size channels_last fuser grad_accum_steps
        grad_checkpointing fast_norm model_kwargs head_init_scale head_init_bias torchcompile_mode torchscript
        torchcompile device amp amp_dtype model_dtype no_ddp_bb synchronize_step local_rank device_modules opt
        opt_eps opt_betas momentum weight_decay clip_grad clip_mode layer_decay layer_decay_min_scale
        layer_decay_no_opt_scale opt_kwargs sched sched_on_updates lr lr_base lr_base_size lr_base_scale
        lr_noise lr_noise_pct lr_noise_std lr_cycle_mul lr_cycle_decay lr_cycle_limit lr_k_decay warmup_lr
        min_lr epochs epoch_repeats start_epoch decay_milestones decay_epochs warmup_epochs warmup_prefix
        cooldown_epochs patience_epochs decay_rate dr no_aug train_crop_mode scale ratio hflip vflip
        color_jitter color_jitter_prob grayscale_prob gaussian_blur_prob aa aug_repeats aug_splits jsd_loss
        bce_loss bce_sum bce_target_thresh bce_pos_weight reprob remode recount resplit mixup cutmix
        cutmix_minmax mixup_prob mixup_switch_prob mixup_mode mixup_off_epoch smoothing train_interpolation drop
        drop_connect drop_path drop_block bn_momentum bn_eps sync_bn dist_bn split_bn model_ema
        model_ema_force_cpu model_ema_decay model_ema_warmup seed worker_seeding log_interval val_interval
        recovery_interval checkpoint_hist j workers save_images pin_mem no_prefetcher output experiment
        eval_metric tta use_multi_epochs_loader log_wandb wandb_project wandb_tags wandb_resume_id
        train_img_sizes train_batch_sizes train_size_probs train_size_schedule train_size_schedule_spread
        train_size_random_mix train_batches_per_epoch train_steps_per_epoch variable_batch_loss_scale
        naflex_loader naflex_train_seq_lens naflex_max_seq_len naflex_patch_sizes naflex_patch_size_probs
        naflex_loss_scale naflex_patchify_channels_first kd_model_name kd_distill_type kd_loss_type
        distill_loss_weight task_loss_weight kd_temperature kd_student_feature_dim kd_teacher_feature_dim
        kd_token_distill_type
    """,
    "timm validate.py": """
        data_dir dataset split num_samples dataset_download class_map input_key input_img_mode target_key
        dataset_trust_remote_code model m pretrained j workers b batch_size img_size in_chans input_size
        use_train_size crop_pct crop_mode crop_border_pixels mean std interpolation num_classes gp log_freq
        checkpoint num_gpu test_pool no_prefetcher pin_mem channels_last device amp amp_dtype model_dtype
        tf_preprocessing use_ema fuser fast_norm reparam model_kwargs torchcompile_mode torchscript torchcompile
        aot_autograd results_file results_format real_labels valid_labels retry seed metrics_avg naflex_loader
        naflex_max_seq_len
    """,
    # references of torchvision, read in copies of 2022 to 2025, since the newest was not at hand
    "torchvision classification": """
        data_path model device b batch_size epochs j workers opt lr momentum wd weight_decay norm_weight_decay
        bias_weight_decay transformer_embedding_decay label_smoothing mixup_alpha cutmix_alpha lr_scheduler
        lr_warmup_epochs lr_warmup_method lr_warmup_decay lr_step_size lr_gamma lr_min print_freq output_dir
        resume start_epoch cache_dataset sync_bn test_only auto_augment ra_magnitude augmix_severity
        random_erase amp world_size dist_url model_ema model_ema_steps model_ema_decay
        use_deterministic_algorithms interpolation val_resize_size val_crop_size train_crop_size clip_grad_norm
        ra_sampler ra_reps weights backend use_v2
    """,
    "torchvision detection": """
        data_path dataset model device b batch_size epochs j workers opt lr momentum wd weight_decay
        norm_weight_decay lr_scheduler lr_step_size lr_steps lr_gamma print_freq output_dir resume start_epoch
        aspect_ratio_group_factor rpn_score_thresh trainable_backbone_layers data_augmentation sync_bn test_only
        use_deterministic_algorithms world_size dist_url weights weights_backbone amp use_copypaste backend
        use_v2
    """,
    "torchvision segmentation": """
        data_path dataset model aux_loss device b batch_size epochs j workers lr momentum wd weight_decay
        lr_warmup_epochs lr_warmup_method lr_warmup_decay print_freq output_dir resume start_epoch test_only
        use_deterministic_algorithms world_size dist_url weights weights_backbone amp backend use_v2
    """,
    "torchvision video_classification": """
        data_path kinetics_version model device clip_len frame_rate clips_per_video b batch_size epochs j
        workers lr momentum wd weight_decay lr_milestones lr_gamma lr_warmup_epochs lr_warmup_method
        lr_warmup_decay print_freq output_dir resume start_epoch cache_dataset sync_bn test_only
        use_deterministic_algorithms world_size dist_url val_resize_size val_crop_size train_resize_size
        train_crop_size weights amp
    """,
    "torchvision optical_flow": """
        name output_dir resume workers train_dataset val_dataset val_freq epochs batch_size lr weight_decay
        adamw_eps freeze_batch_norm model num_flow_updates gamma dist_url dataset_root weights device
        use_deterministic_algorithms
    """,
    "torchvision stereo": """
        name resume checkpoint_dir dataset_root train_datasets dataset_steps steps_is_epochs test_datasets
        dataset_shuffle dataset_order_shuffle batch_size workers threads model recurrent_updates
        freeze_batch_norm gamma flow_loss_weight flow_loss_exclude_large consistency_weight
        consistency_resize_factor psnr_weight smoothness_weight photometric_weight
        photometric_max_displacement_ratio photometric_ssim_weight gpu_transforms eval_size resize_size
        crop_size scale_range rescale_prob scaling_type flip_prob norm_mean norm_std use_grayscale max_disparity
        interpolation_strategy spatial_shift_prob spatial_shift_max_angle spatial_shift_max_displacement
        gamma_range brightness_range contrast_range saturation_range hue_range asymmetric_jitter_prob
        occlusion_prob occlusion_px_range erase_prob erase_px_range erase_num_repeats optimizer lr weight_decay
        clip_grad_norm min_lr warmup_steps decay_after_steps lr_warmup_method lr_warmup_factor lr_decay_method
        lr_decay_gamma seed mixed_precision tensorboard_summaries tensorboard_log_frequency save_frequency
        valid_frequency metrics world_size dist_url device weights resume_path resume_schedule padder_type
    """,
    "torchvision similarity": """
        dataset_dir p labels_per_batch k samples_per_label eval_batch_size epochs j workers lr margin print_freq
        save_dir resume
    """,
    # of transformers 5.24.0
    "transformers TrainingArguments": """
        output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate lr_scheduler_type
        lr_scheduler_kwargs warmup_steps optim optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon
        optim_target_modules gradient_accumulation_steps average_tokens_across_devices max_grad_norm
        label_smoothing_factor bf16 fp16 bf16_full_eval fp16_full_eval tf32 activation_checkpointing
        activation_checkpointing_kwargs gradient_checkpointing gradient_checkpointing_kwargs torch_compile
        torch_compile_backend torch_compile_mode use_liger_kernel liger_kernel_config use_cache
        neftune_noise_alpha torch_empty_cache_steps auto_find_batch_size logging_strategy logging_steps
        logging_first_step log_on_each_node logging_nan_inf_filter include_num_input_tokens_seen log_level
        log_level_replica disable_tqdm report_to run_name project trackio_space_id trackio_bucket_id
        trackio_static_space_id eval_strategy eval_steps eval_delay per_device_eval_batch_size
        prediction_loss_only eval_on_start eval_do_concat_batches eval_use_gather_object eval_accumulation_steps
        include_for_metrics batch_eval_metrics save_only_model save_strategy save_steps save_on_each_node
        save_total_limit enable_jit_checkpoint push_to_hub hub_token hub_private_repo hub_model_id hub_strategy
        hub_always_push hub_revision load_best_model_at_end metric_for_best_model greater_is_better
        ignore_data_skip restore_callback_states_from_checkpoint full_determinism seed data_seed use_cpu
        accelerator_config parallelism_config dataloader_drop_last dataloader_num_workers dataloader_pin_memory
        dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context
        dataloader_in_order remove_unused_columns label_names train_sampling_strategy length_column_name
        ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend
        ddp_timeout fsdp fsdp_config deepspeed debug skip_memory_metrics do_train do_eval do_predict
        resume_from_checkpoint local_rank
    """,
    # of transformers 4.20 and later
    "transformers run_glue.py": """
        task_name dataset_name dataset_config_name max_seq_length overwrite_cache pad_to_max_length
        max_train_samples max_eval_samples max_predict_samples train_file validation_file test_file
        model_name_or_path config_name tokenizer_name cache_dir use_fast_tokenizer model_revision use_auth_token
        token trust_remote_code ignore_mismatched_sizes
    """,
    # of trl 1.16.0, without the fields of TrainingArguments
    "trl DPOConfig": """
        learning_rate model_init_kwargs trust_remote_code router_aux_loss_coef disable_dropout dataset_num_proc
        max_length truncation_mode padding_free pad_to_multiple_of precompute_ref_log_probs
        precompute_ref_batch_size loss_type loss_weights ld_alpha f_divergence_type f_alpha_divergence_coef
        label_smoothing beta use_weighting discopop_tau activation_offloading sync_ref_model
        ref_model_mixup_alpha ref_model_sync_steps pad_token
    """,
    "trl SFTConfig": """
        learning_rate model_init_kwargs trust_remote_code router_aux_loss_coef chat_template_path
        dataset_text_field dataset_kwargs dataset_num_proc eos_token max_length truncation_mode shuffle_dataset
        packing packing_strategy padding_free pad_to_multiple_of eval_packing completion_only_loss
        assistant_only_loss loss_type activation_offloading pad_token
    """,
    "trl ModelConfig": """
        model_name_or_path model_revision dtype attn_implementation use_peft lora_r lora_alpha lora_dropout
        lora_target_modules lora_target_parameters lora_modules_to_save lora_task_type use_rslora use_dora
        load_in_8bit load_in_4bit bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_quant_storage
    """,
    "trl ScriptArguments": """
        dataset_name dataset_config dataset_train_split dataset_test_split dataset_streaming ignore_bias_buffers
    """,
    # of ultralytics 8.4.190: the sections train, val and hyperparameters of cfg/default.yaml
    "Ultralytics": """
        model data epochs time patience batch imgsz save save_period cache device workers project name exist_ok
        pretrained cls_remap optimizer verbose seed deterministic single_cls rect cos_lr close_mosaic resume amp
        fraction profile freeze multi_scale compile channels_last overlap_mask mask_ratio dropout val split
        save_json conf iou max_det quantize dnn plots nms lr0 lrf momentum weight_decay warmup_epochs
        warmup_momentum warmup_bias_lr distill_model dis box cls cls_pw dfl pose kobj rle angle dlog dgrad dlam
        nbs hsv_h hsv_s hsv_v degrees translate scale shear perspective flipud fliplr bgr mosaic mixup cutmix
        copy_paste copy_paste_mode auto_augment erasing cfg task
    """,
    # of nanochat, commit 92d63d4e of July 2026
    "nanochat base_train.py": """
        run device_type fp8 fp8_recipe depth aspect_ratio head_dim max_seq_len window_pattern num_iterations
        target_flops target_param_data_ratio device_batch_size total_batch_size embedding_lr unembedding_lr
        weight_decay matrix_lr scalar_lr warmup_steps warmdown_ratio final_lr_frac resume_from_step eval_every
        eval_tokens core_metric_every core_metric_max_per_task sample_every save_every model_tag
    """,
    "nanochat chat_sft.py": """
        run device_type model_tag model_step load_optimizer num_iterations max_seq_len device_batch_size
        total_batch_size embedding_lr unembedding_lr matrix_lr init_lr_frac warmup_ratio warmdown_ratio
        final_lr_frac eval_every eval_tokens chatcore_every chatcore_max_cat chatcore_max_sample mmlu_epochs
        gsm8k_epochs
    """,
    "nanochat chat_rl.py": """
        run device_type model_tag model_step num_epochs device_batch_size examples_per_step num_samples
        max_new_tokens temperature top_k embedding_lr unembedding_lr matrix_lr weight_decay init_lr_frac
        eval_every eval_examples save_every
    """,
    # of nanoGPT, commit 3adf61e1 of November 2025
    "nanoGPT": """
        out_dir eval_interval log_interval eval_iters eval_only always_save_checkpoint init_from wandb_log
        wandb_project wandb_run_name dataset gradient_accumulation_steps batch_size block_size n_layer n_head
        n_embd dropout bias learning_rate max_iters weight_decay beta1 beta2 grad_clip decay_lr warmup_iters
        lr_decay_iters min_lr backend device dtype compile
    """,
    # of lightning 2.6.6
    "Lightning Trainer": """
        accelerator strategy devices num_nodes precision logger callbacks fast_dev_run max_epochs min_epochs
        max_steps min_steps max_time limit_train_batches limit_val_batches limit_test_batches
        limit_predict_batches overfit_batches val_check_interval check_val_every_n_epoch num_sanity_val_steps
        log_every_n_steps enable_checkpointing enable_progress_bar enable_model_summary accumulate_grad_batches
        gradient_clip_val gradient_clip_algorithm deterministic benchmark inference_mode use_distributed_sampler
        profiler detect_anomaly barebones plugins sync_batchnorm reload_dataloaders_every_n_epochs
        default_root_dir enable_autolog_hparams model_registry
    """,
    "Lightning ModelCheckpoint": """
        dirpath filename monitor verbose save_last save_top_k save_on_exception save_weights_only mode
        auto_insert_metric_name every_n_train_steps train_time_interval every_n_epochs save_on_train_epoch_end
        enable_version_counter
    """,
    "Lightning EarlyStopping": """
        monitor min_delta patience verbose mode strict check_finite stopping_threshold divergence_threshold
        check_on_train_epoch_end log_rank_zero_only
    """,
    "Lightning LightningCLI": """
        c config print_config seed_everything trainer model data optimizer lr_scheduler ckpt_path weights_only
        verbose
    """,
    # of lightning 1
    "Lightning, older versions": """
        track_grad_norm amp_backend amp_level
    """,
    # of diffusers
    "diffusers train_unconditional.py": """
        dataset_name dataset_config_name model_config_name_or_path train_data_dir output_dir cache_dir
        overwrite_output_dir resolution center_crop random_flip train_batch_size eval_batch_size
        dataloader_num_workers num_epochs save_images_epochs save_model_epochs gradient_accumulation_steps
        learning_rate lr_scheduler lr_warmup_steps adam_beta1 adam_beta2 adam_weight_decay adam_epsilon use_ema
        ema_inv_gamma ema_power ema_max_decay push_to_hub hub_token hub_model_id hub_private_repo logger
        logging_dir local_rank mixed_precision prediction_type ddpm_num_steps ddpm_num_inference_steps
        ddpm_beta_schedule checkpointing_steps checkpoints_total_limit resume_from_checkpoint
        enable_xformers_memory_efficient_attention preserve_input_precision
    """,
    # examples of accelerate
    "Accelerate": """
        mixed_precision cpu data_dir checkpointing_steps output_dir resume_from_checkpoint with_tracking
        project_dir num_epochs gradient_accumulation_steps use_stateful_dataloader local_sgd_steps
        model_name_or_path
    """,
    # versions 2 and 3
    "deepspeech.pytorch": """
        train_manifest val_manifest sample_rate batch_size num_workers labels_path window_size window_stride
        window hidden_size hidden_layers rnn_type epochs cuda lr max_norm learning_anneal silent checkpoint
        checkpoint_per_batch checkpoint_per_iteration visdom tensorboard log_dir log_params id save_folder
        model_path continue_from finetune speed_volume_perturb spec_augment noise_dir noise_prob noise_min
        noise_max no_shuffle no_sortaGrad no_bidirectional dist_url dist_backend world_size rank gpu_rank seed
        opt_level keep_batchnorm_fp32 loss_scale momentum weight_decay load_auto_checkpoint
        save_n_recent_checkpoints lookahead_context best_val_model_name adam eps betas
    """,
}

# the options above whose name is that of a flag here, and whose meaning is another: no answer can say so
OTHER_MEANING = {
    "timm train.py": "dataset interpolation model momentum",
    "timm validate.py": "dataset model",
    "torchvision classification": "backend momentum",
    "torchvision detection": "backend dataset momentum",
    "torchvision segmentation": "backend dataset",
    "torchvision stereo": "resize_size",
    "transformers TrainingArguments": "max_steps warmup_steps",
    "trl DPOConfig": "label_smoothing",
    "Ultralytics": "freeze model patience",
    "nanochat base_train.py": "eval_every save_every weight_decay",
    "nanochat chat_sft.py": "eval_every",
    "nanochat chat_rl.py": "eval_every save_every weight_decay",
    "nanoGPT": "dataset init_from",
    "Lightning Trainer": "max_steps max_time",
    "Lightning LightningCLI": "model optimizer",
}
