"""What the template promises, and which test checks each promise.

`python tests/guarantees.py` writes the tables of README.md and docs/ from this file. A row without a default test, a test that does not
exist and a test that the default run leaves out make tests/builtin/test_guarantees.py fail.
"""

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SECTIONS = {
    "exact": "Bit for bit",
    "rounding": "Up to rounding",
    "changes": "What ends or changes a guarantee",
    "faults": "What a run survives",
    "runs": "Starting, records, ending",
    "speed": "Cost",
    "launching": "Launching",
    "forks": "Your own model and data",
}


@dataclass(frozen=True)
class Guarantee:
    key: str
    section: str
    subject: str  # what it is about; in "faults", what happens
    promise: str
    tests: list[str]  # node ids, of the default run
    slow: list[str]  # that --all adds


def row(
    key: str,
    section: str,
    subject: str,
    promise: str,
    tests: str = "",
    faults: str = "",
    slow: str = "",
    slow_faults: str = "",
) -> Guarantee:
    """tests, slow: node ids below tests/, by white space. faults, slow_faults: kinds of the table of faults, by semicolons."""
    ids = [[f"tests/{test}" for test in some.split()] for some in (tests, slow)]
    for found, kinds in zip(ids, (faults, slow_faults), strict=True):
        found += [
            f"tests/faults/test_faults.py::test_fault[{kind.strip().replace(' ', '-')}]"
            for kind in kinds.split(";")
            if kind
        ]
    return Guarantee(key, section, subject, promise, *ids)


# fmt: off
GUARANTEES = [
    # ---- exact ----
    row("order", "exact", "order of an epoch",
        "Each epoch visits every sample once, in an order that is a function of `(seed, epoch)`, on any number of ranks and workers and over any restarts.", tests="""
        unit/test_loader.py::test_ranks_decide_only_who_computes_a_micro_batch
        unit/test_loader.py::test_the_order_is_a_function_of_seed_and_epoch_alone
        distributed/test_exact_samples.py::test_order_content_and_streams_are_the_same_however_a_run_is_split
        """, slow="""
        distributed/test_kills.py::test_twenty_one_kills_at_random_moments
        """),
    row("samples", "exact", "content of a sample",
        "Augmentation is a function of `(seed, epoch, sample)`: the same pixels on any number of ranks and workers.", tests="""
        unit/test_augment.py::test_augmentation_of_a_sample_does_not_depend_on_its_batch
        unit/test_loader.py::test_a_samples_content_does_not_depend_on_ranks_or_workers
        distributed/test_exact_samples.py::test_order_content_and_streams_are_the_same_however_a_run_is_split
        distributed/test_oracle.py::test_twenty_float64_steps_equal_the_plain_loop
        builtin/test_shipped_models.py::test_images_decoded_in_workers_and_cut_at_random_are_the_same_on_any_number_of_ranks
        """),
    row("dropout", "exact", "dropout",
        "Its draws are a function of `(seed, optimizer step, micro-batch)`, whichever rank computes the micro-batch.", tests="""
        distributed/test_exact_samples.py::test_order_content_and_streams_are_the_same_however_a_run_is_split
        distributed/test_oracle.py::test_one_float32_step_equals_the_plain_loop
        """, slow="""
        builtin/test_shipped_models.py::test_dropout_of_a_torchvision_model_draws_by_step_and_micro_batch_not_by_rank
        """),
    row("ranks-alike", "exact", "ranks of a run",
        "After each step all ranks hold the same gradients, weights, BatchNorm statistics and optimizer state.", tests="""
        distributed/test_exact_gradients.py::test_every_tail_from_one_sample_to_a_global_batch
        builtin/test_verify.py::test_the_template_holds_and_a_run_says_so_until_a_file_changes
        """, faults="bit of a weight flips"),
    row("resume", "exact", "resumed run",
        "A run resumed at any step, any number of times, on the same number of ranks equals the uninterrupted run in state, records and best value; "
        "a save on the way changes nothing (CPU; CUDA with `--deterministic`).", tests="""
        distributed/test_exact_resume.py::test_stops_and_resumes_within_an_epoch_cannot_be_seen
        distributed/test_exact_resume.py::test_a_resume_from_each_step_in_turn_gives_the_next_checkpoint
        distributed/test_resume.py::test_a_run_that_is_resumed_in_another_folder_has_a_checkpoint_and_its_best_there_from_the_start
        """),
    row("stop", "exact", "request to stop",
        "After SIGTERM, SIGINT, SIGUSR1 or `--max_time` all ranks stop after the same optimizer step and save; no step is lost.", tests="""
        distributed/test_resume.py::test_a_request_stops_the_run_one_step_later_and_in_the_last_step_of_an_epoch_there
        distributed/test_resume.py::test_all_ranks_stop_after_the_same_step_when_the_time_of_one_is_up
        distributed/test_resume.py::test_a_request_from_before_a_save_does_not_cause_another_one
        unit/test_signals.py::test_a_signal_sets_a_flag_and_the_handlers_come_back
        """, faults="SIGTERM; SIGTERM in an evaluation; SIGINT, SIGUSR1 and SIGHUP; time is up", slow_faults="SIGTERM at any moment; SIGTERM in a save; SIGTERM at the start; SIGINT twice; signals to torchrun; terminal closed"),
    row("kills", "exact", "killed runs",
        "After SIGKILLs in any phase, resumed on 1, 2 or 4 ranks, the committed steps used the samples of the undisturbed run.", tests="""
        distributed/test_kills.py::test_one_kill_in_each_phase_with_one_two_or_four_ranks
        """, slow="""
        distributed/test_kills.py::test_twenty_one_kills_at_random_moments
        distributed/test_every_system_call.py::test_the_writer_and_rank_0_killed_at_every_system_call_of_a_save
        """),
    row("evaluation-counts", "exact", "evaluation",
        "Counts and logits are the same on any number of ranks, each sample counted once; a wrong count is an error.", tests="""
        distributed/test_exact_evaluation.py::test_counts_and_logits_are_the_same_on_one_to_four_ranks
        distributed/test_exact_evaluation.py::test_a_count_that_is_not_the_sets_is_an_error
        """),
    # ---- rounding ----
    row("gradient", "rounding", "gradient of a step",
        "It equals the plain loop's for every accumulation and every length of the last global batch: 1e-12 in float64.", tests="""
        distributed/test_exact_gradients.py::test_every_tail_from_one_sample_to_a_global_batch
        distributed/test_exact_gradients.py::test_float16_is_scaled_and_unscaled
        unit/test_loader.py::test_a_global_batch_has_as_many_steps_on_each_rank_and_its_true_weight
        """),
    row("weights", "rounding", "whole run",
        "Weights and their average equal those of the plain loop (`tests/plain_loop.py`) on any number of ranks: 1e-12 in float64 after 20 steps.", tests="""
        unit/test_state.py::test_the_passes_before_the_first_step_leave_nothing
        unit/test_state.py::test_the_learning_rate_is_a_function_of_the_step_and_a_skip_does_not_stop_it
        unit/test_state.py::test_clipping_bounds_the_norm_and_the_record_has_the_norm_before_it
        distributed/test_oracle.py::test_one_float32_step_equals_the_plain_loop
        distributed/test_oracle.py::test_twenty_float64_steps_equal_the_plain_loop
        builtin/test_shipped_models.py::test_mini_resnet_equals_the_plain_loop
        """),
    row("batchnorm", "rounding", "BatchNorm",
        "Its running statistics move once per optimizer step, by the sample-weighted mean over the global batch, alike on all ranks.", tests="""
        unit/test_batchnorm.py::test_a_global_batch_moves_them_once_by_the_mean_over_its_samples
        distributed/test_oracle.py::test_twenty_float64_steps_equal_the_plain_loop
        """, faults="NaN loss"),
    row("elastic", "rounding", "other numbers of ranks",
        "With the same `--global_batch_size` a run resumed on another number of ranks uses the same global batches: 1e-12 in float64 after 24 steps, "
        "1e-5 in float32 after one. A long float32 run drifts further, since rounding flips ReLUs.", tests="""
        distributed/test_exact_ranks.py::test_four_two_one_three_and_four_ranks_within_one_epoch
        """),
    row("evaluation-means", "rounding", "means of an evaluation",
        "They differ between numbers of ranks by the order of float64 sums alone.", tests="""
        distributed/test_exact_evaluation.py::test_counts_and_logits_are_the_same_on_one_to_four_ranks
        """),
    # ---- changes ----
    row("changed-settings", "changes", "changed learning rate, decay, epochs, clipping, EMA or augmentation on resume",
        "Allowed and logged; the guarantees start anew there.", tests="""
        unit/test_checkpoint.py::test_what_may_change_is_listed_and_what_is_free_is_not
        unit/test_state.py::test_a_resume_takes_learning_rate_and_decay_from_the_config
        """),
    row("must-match", "changes", "another seed, micro-batch, data set, model or optimizer on resume",
        "Rejected with the field, before a tensor is copied.", tests="""
        unit/test_checkpoint.py::test_what_must_match_is_rejected_in_one_error_that_lists_all
        """, faults="other config than the checkpoint's", slow_faults="data changed between attempts"),
    row("global-batch", "changes", "other ranks without `--global_batch_size`",
        "Another global batch: logged as a warning; each sample of the epoch is still visited once.", tests="""
        distributed/test_exact_ranks.py::test_without_global_batch_size_a_changed_global_batch_is_a_warning
        """),
    row("build", "changes", "another build of torch, CPU or GPU, `OMP_NUM_THREADS`, `--backend`, `--bucket_cap_mb`; CUDA without `--deterministic`",
        "Sums in another order: the last bits differ. What a flag changes is logged.", tests="""
        distributed/test_resume.py::test_a_changed_setting_that_changes_bits_is_recorded
        """),
    row("other-buffers", "changes", "layers other than BatchNorm whose buffers move in the forward pass; draws from numpy or `random`",
        "They follow each rank's own micro-batches. `scripts/verify.py` names them.", tests="""
        builtin/test_verify.py::test_a_fault_in_a_fork_is_named_with_its_remedy
        """),
    # ---- faults ----
    row("rank-killed", "faults", "a rank is killed, a node is lost",
        "The launch ends and names rank, host, phase and step; `--resume_from auto` repeats at most the work since the last checkpoint.", faults="rank killed", slow="""
        builtin/test_two_nodes.py::test_a_lost_node_comes_back_and_the_run_continues_bit_for_bit
        """, slow_faults="rank killed under default settings; rank killed under torchrun; rank killed under torchrun's restarts; rank 0 killed "
        "in a save; rank killed at the start"),
    row("launcher-killed", "faults", "torchrun is killed", "No process of the run is left after ten seconds.", faults="launcher killed", slow_faults="launcher killed at the start"),
    row("same-step", "faults", "the same step fails three times",
        "The fourth start says so, with the step and its samples, and does not train.", tests="""
        unit/test_lock.py::test_failures_at_the_same_step_in_a_row_are_counted
        """, faults="fails at the same step each time", slow_faults="killed at the same step under torchrun's restarts"),
    row("hang", "faults", "a rank hangs or is stopped",
        "One report names it, with stacks, after 5 s or 5 slow steps; after `--hang_timeout` the run ends, to be restarted.", tests="""
        unit/test_watchdog.py::test_the_rank_that_holds_up_the_others_is_named
        unit/test_watchdog.py::test_a_rank_that_hangs_ends_with_its_stacks_and_only_then_are_they_looked_at
        unit/test_watchdog.py::test_others_see_phase_and_step_at_once_and_a_beat_that_moves
        """, faults="rank stopped; rank hangs", slow_faults="rank stopped, data; rank stopped, forward; rank stopped, update; rank stopped, evaluation; "
        "rank hangs and is restarted; long evaluation; read stall; slow save; recompile"),
    row("straggler", "faults", "a rank is 1.5 times slower than the median", "It is named, with the cause: its data or its compute.", faults="straggler by its compute", slow_faults="straggler by its data"),
    row("disk", "faults", "disk full, read-only, gone, I/O errors",
        "The previous checkpoint stays valid; training continues and tries again when the next one is due; after ten minutes of failures it ends.", tests="""
        unit/test_writer.py::test_records_that_do_not_fit_on_a_full_disk_are_written_later_whole_and_once
        """, faults="disk full at a save; disk full for good; EIO at the fsync of a checkpoint", slow_faults="records on a full disk; run folder turns read-only; run folder vanishes; run folder unmounted; EIO at the fsync of the "
        "folder; final save, disk full; final save finds no room"),
    row("whole-file", "faults", "killed while a checkpoint is written",
        "A checkpoint appears under its name only when it is complete and on the disk.", tests="""
        unit/test_checkpoint.py::test_the_file_is_flushed_before_it_gets_its_name_and_then_the_folder
        unit/test_checkpoint.py::test_a_write_that_fails_leaves_what_was_there_and_no_partial_file
        distributed/test_every_system_call.py::test_a_checkpoint_is_on_the_disk_before_it_has_its_name_and_its_name_before_it_counts
        """, faults="partial file left over", slow="""
        distributed/test_every_system_call.py::test_the_writer_and_rank_0_killed_at_every_system_call_of_a_save
        """),
    row("writer", "faults", "the process that writes checkpoints is killed", "It is replaced and the checkpoint written; training does not end.", tests="""
        unit/test_writer.py::test_a_writer_that_dies_is_replaced_and_the_memory_still_holds_the_state
        unit/test_writer.py::test_stop_signals_do_not_end_it_even_right_after_the_fork
        distributed/test_kills.py::test_the_writer_ends_when_the_training_process_was_killed_though_a_worker_lives_on
        distributed/test_every_system_call.py::test_the_writer_killed_at_a_system_call_of_a_save
        """, slow_faults="writer killed"),
    row("damaged", "faults", "a damaged checkpoint", "It is skipped, with a line that says why, for the latest valid one.", tests="""
        unit/test_corruptions.py::test_no_corrupt_checkpoint_is_loaded_and_the_one_before_it_is_found
        """, faults="newest checkpoints damaged", slow_faults="newest checkpoint unreadable"),
    row("all-damaged", "faults", "all checkpoints are damaged", "An error that names each; never a fresh start.", tests="""
        unit/test_checkpoint.py::test_checkpoints_of_which_none_is_valid_are_an_error_and_an_empty_folder_is_not
        """, faults="all checkpoints damaged"),
    row("untrusted", "faults", "an untrusted file among the checkpoints", "It is skipped; no code in it runs.", tests="""
        unit/test_corruptions.py::test_no_malicious_file_runs_code_or_is_loaded
        """, faults="malicious file in the folder", slow_faults="checkpoint of another run in the folder"),
    row("not-finite", "faults", "a loss or gradient that is not finite, on any rank",
        "All ranks skip the step, on the device; its samples are recorded; `--max_skipped_steps` in a row end the run.", tests="""
        unit/test_state.py::test_a_gradient_that_is_not_finite_changes_nothing
        unit/test_state.py::test_the_average_begins_with_the_first_step_that_is_taken
        unit/test_batchnorm.py::test_a_skipped_step_leaves_them_to_the_bit_even_after_nan
        distributed/test_skipping.py::test_a_resume_between_the_skip_and_its_log_point_records_it_once
        """, faults="NaN loss; infinite loss; NaN for good", slow_faults="infinite gradient; NaN loss in float16; float16 searches its scale"),
    row("divergence", "faults", "a rank's weights differ by a bit", "The rank is named before a checkpoint is committed.", tests="""
        unit/test_writer.py::test_the_digest_changes_with_any_bit_of_any_weight
        unit/test_writer.py::test_the_ranks_whose_weights_differ_from_most_are_named
        """, faults="bit of a weight flips"),
    row("bad-sample", "faults", "a sample that cannot be read", "The run ends with path, class and rank.", tests="""
        builtin/test_read_image.py::test_a_damaged_file_is_a_user_error_or_read_as_by_pil
        builtin/test_refused_data.py::test_a_corrupt_image_ends_the_run_with_its_path_class_and_rank
        """, faults="corrupt sample"),
    row("worker-killed", "faults", "a loader worker is killed or hangs", "The run ends with a sentence that names rank and worker.", tests="""
        distributed/test_failing_data.py::test_a_worker_that_hangs_ends_the_run_with_its_rank_and_samples
        """, faults="loader worker killed", slow_faults="loader worker hangs; small shared memory"),
    row("one-owner", "faults", "a second job on the folder", "Rejected with the owner's host, pid and age; a dead owner does not block.", tests="""
        unit/test_lock.py::test_a_folder_in_use_is_rejected_with_its_owner_and_a_dead_owner_does_not_block
        unit/test_lock.py::test_a_former_owner_writes_nothing_after_another_job_has_taken_over
        unit/test_writer.py::test_nothing_is_committed_to_a_run_that_another_job_has_taken_over
        """, faults="second job on the folder", slow_faults="second job from another host; owner on another host is dead; former owner wakes up"),
    # ---- runs ----
    row("config", "runs", "configuration", "Defaults, then a TOML file, then flags; all problems are listed together, each with its fix, before any process group is made (exit code 2). "
        "`--print-config` feeds back.", tests="""
        unit/test_config.py::test_each_problem_is_one_sentence_that_ends_with_the_fix
        unit/test_config.py::test_all_problems_are_listed_together
        unit/test_config.py::test_defaults_then_file_then_flags
        unit/test_config.py::test_print_config_feeds_back
        """),
    row("one-sentence", "runs", "bad input", "It ends every rank within seconds in one sentence with the fix; what was saved stays as it was.", tests="""
        distributed/test_refusals.py::test_an_error_of_one_rank_is_raised_on_all_with_its_name
        distributed/test_refusals.py::test_half_of_torchruns_variables
        distributed/test_refusals.py::test_a_rank_that_fails_ends_the_others_and_all_workers_and_is_named
        builtin/test_refused_data.py::test_data_that_cannot_be_used_is_rejected_by_all_ranks_with_the_fix
        """),
    row("published-flags", "runs", "published flags", "The published pipeline's command line works unchanged.", tests="""
        builtin/test_command_line.py::test_the_published_flags_work_unchanged
        """),
    row("files", "runs", "files of a run", "Every file of the run folder has the keys and values that the contract names; each record stands there once per step.", tests="""
        builtin/test_whole_run.py::test_records_have_the_promised_keys_once_a_step
        builtin/test_whole_run.py::test_status_and_summary_have_the_result
        builtin/test_whole_run.py::test_config_provenance_and_code_are_those_that_ran
        builtin/test_whole_run.py::test_each_rank_has_a_log_of_its_own
        builtin/test_whole_run.py::test_each_sample_is_recorded_once_an_epoch
        builtin/test_whole_run.py::test_tensorboard_has_scalars_by_step_a_layout_texts_and_images
        """),
    row("records-once", "runs", "records after a resume", "Records that the resumed run writes again do not stand there twice.", tests="""
        distributed/test_kills.py::test_one_kill_in_each_phase_with_one_two_or_four_ranks
        unit/test_run_folder.py::test_rewinding_drops_later_samples_and_an_incomplete_last_line
        distributed/test_exact_resume.py::test_stops_and_resumes_within_an_epoch_cannot_be_seen
        unit/test_run_folder.py::test_records_of_an_evaluation_are_dropped_where_it_is_made_again
        """),
    row("plain-load", "runs", "checkpoints elsewhere", "`torch.load(path, weights_only=True)` opens a checkpoint; `--init_from` takes its weights.", tests="""
        builtin/test_whole_run.py::test_the_last_checkpoints_are_kept_and_open_with_plain_torch_load
        unit/test_checkpoint.py::test_weights_come_from_a_checkpoint_or_a_bare_state_dict
        builtin/test_model.py::test_init_from_takes_what_fits_and_logs_what_was_not_loaded
        """),
    row("keep-last", "runs", "old checkpoints", "The newest `--keep_last` and `best.pt` stay.", tests="""
        unit/test_checkpoint.py::test_the_latest_are_kept_by_step_not_by_name
        builtin/test_whole_run.py::test_the_last_checkpoints_are_kept_and_open_with_plain_torch_load
        """),
    row("nothing-lost", "runs", "a folder that holds a run", "A fresh start never overwrites it: `runs/default` moves aside, a named folder is rejected, `--overwrite` replaces it only after the new start was found valid.", tests="""
        unit/test_run_folder.py::test_a_start_in_a_folder_that_it_may_not_take_is_rejected_and_changes_nothing
        unit/test_run_folder.py::test_the_default_folder_moves_aside
        unit/test_run_folder.py::test_a_run_is_replaced_only_when_nothing_more_can_be_rejected
        distributed/test_ranks_agree.py::test_overwrite_with_a_bad_flag_leaves_the_run_as_it_was
        """),
    row("completed", "runs", "completed run", "`--resume_from auto` leaves it as it is.", tests="""
        distributed/test_resume.py::test_a_completed_run_is_left_as_it_is
        """),
    row("eval-only", "runs", "`--eval_only`", "It changes nothing of the run and gives the recorded values.", tests="""
        builtin/test_command_line.py::test_one_process_needs_no_launcher_and_the_default_folder_moves_aside
        builtin/test_command_line.py::test_a_separate_test_set_is_evaluated_once_with_the_best_weights
        """),
    row("exit-codes", "runs", "exit codes", "0 completed, 2 rejected, 75 preempted and saved, else 1; `status.json` says the same.", tests="""
        unit/test_launching.py::test_the_exit_code_of_an_attempt_follows_from_what_the_run_wrote
        builtin/test_command_line.py::test_bad_data_ends_one_process_with_exit_code_2_and_one_sentence
        builtin/test_launch.py::test_sigterm_to_the_script_saves_and_exits_75
        """, faults="SIGINT, SIGUSR1 and SIGHUP"),
    row("clean-exit", "runs", "end of a process", "No rank leaves the group before all have finished, and no process of the run stays behind.", tests="""
        distributed/test_refusals.py::test_no_rank_leaves_the_group_before_all_have_finished
        distributed/test_refusals.py::test_a_rank_that_fails_ends_the_others_and_all_workers_and_is_named
        distributed/test_refusals.py::test_workers_that_ignore_sigterm_do_not_keep_the_process_from_its_end
        """),
    row("one-process", "runs", "one process", "`python train.py` needs no launcher, port or variables; `train(config)` runs twice in one process.", tests="""
        builtin/test_command_line.py::test_one_process_needs_no_launcher_and_the_default_folder_moves_aside
        distributed/test_ranks_agree.py::test_two_runs_in_the_same_processes_are_the_same_run
        """),
    row("no-torchvision", "runs", "without torchvision", "The synthetic run works where torchvision cannot be imported.", tests="""
        builtin/test_command_line.py::test_it_runs_where_torchvision_cannot_be_imported
        """),
    row("alike", "runs", "ranks that do not run the same thing", "Different code, settings, versions or data are rejected with a table before anything is written.", tests="""
        distributed/test_start.py::test_every_rank_raises_what_differs
        distributed/test_ranks_agree.py::test_ranks_that_see_different_data_are_an_error
        """),
    row("data-once", "runs", "preparing data", "Data is prepared once per file system; an interrupted preparation is redone.", tests="""
        distributed/test_refusals.py::test_data_is_prepared_once_on_each_file_system
        """),
    row("schedule-end", "runs", "`--max_steps`, `--patience`", "They end a run as completed, evaluated and saved.", tests="""
        distributed/test_resume.py::test_max_steps_ends_a_run_as_completed_and_more_steps_continue_it
        distributed/test_resume.py::test_patience_ends_a_run_as_completed_and_saves_it
        """),
    row("test-split", "runs", "test set", "`val` chooses the best checkpoint; `test` is evaluated once, at the end, with its weights.", tests="""
        builtin/test_command_line.py::test_a_separate_test_set_is_evaluated_once_with_the_best_weights
        """),
    row("precision", "runs", "mixed precision", "bf16 where the hardware of every rank multiplies it fast, else float16 on CUDA and float32 on CPUs.", tests="""
        unit/test_state.py::test_the_precision_is_that_of_the_hardware_unless_named
        distributed/test_refusals.py::test_the_weakest_rank_decides_over_bf16
        """),
    # ---- speed ----
    row("no-reads", "speed", "hot loop", "Nothing is read from the device between two log points.", tests="""
        distributed/test_hot_loop.py::test_three_steps_read_nothing_and_an_item_put_in_is_seen
        """),
    row("collectives", "speed", "collectives of a step", "As many as there are gradient buckets, and one for BatchNorm; none on one rank.", tests="""
        distributed/test_comm_hooks.py::test_a_step_sends_its_gradient_once_in_the_hooks_width_and_the_statistics
        distributed/test_comm_hooks.py::test_one_rank_has_no_collective
        """),
    row("buckets", "speed", "gradient memory", "Gradients lie in several DDP buckets and nowhere else.", tests="""
        distributed/test_comm_hooks.py::test_by_default_the_gradients_lie_in_several_buckets_and_nowhere_else
        """),
    row("comm-hook", "speed", "`--comm_hook`", "It halves the bytes of a step; overflow skips on all ranks; resume stays exact.", tests="""
        distributed/test_comm_hooks.py::test_a_step_sends_its_gradient_once_in_the_hooks_width_and_the_statistics
        """, slow="""
        distributed/test_comm_hooks.py::test_a_gradient_that_overflows_on_the_way_is_skipped_by_all_ranks
        distributed/test_comm_hooks.py::test_stops_and_resumes_with_a_hook_cannot_be_seen
        distributed/test_comm_hooks.py::test_a_build_or_backend_that_cannot_is_rejected_by_all_ranks
        """),
    row("compile", "speed", "`--compile`", "A compiled run equals the eager one and compiles nothing after the first step.", tests="""
        distributed/test_compile.py::test_a_compiled_run_is_the_eager_one_and_compiles_nothing_after_the_first_step
        """, slow="""
        distributed/test_compile.py::test_a_compiled_run_resumes_an_eager_ones_checkpoint_and_the_other_way_round
        distributed/test_compile.py::test_with_cuda_graphs_gradients_keep_their_memory_and_the_run_its_bits
        distributed/test_compile.py::test_a_later_compilation_is_logged_once
        """),
    row("activation", "speed", "`--activation_checkpointing`", "The same bits; of a block only its input is kept.", tests="""
        distributed/test_activation.py::test_losses_weights_and_statistics_are_the_same_to_the_bit
        distributed/test_activation.py::test_of_a_block_only_its_input_is_kept
        """),
    row("cache", "speed", "`--cache`", "The same batches with and without it; the ranks of a node share one copy.", tests="""
        builtin/test_cached_runs.py::test_the_ranks_of_a_node_map_one_file_each_set_once
        builtin/test_cached_runs.py::test_the_batches_are_the_same_with_and_without_a_cache
        unit/test_cache.py::test_a_set_that_cannot_be_cached_is_rejected
        unit/test_cache.py::test_a_set_that_does_not_fit_is_rejected
        """),
    row("memory", "speed", "out of memory", "It ends in one sentence with the flags that help.", tests="""
        distributed/test_refusals.py::test_a_rank_without_memory_is_named_with_the_flags_that_help
        unit/test_memory.py::test_an_allocation_that_failed_is_told_from_other_errors
        unit/test_memory.py::test_the_error_names_the_rank_the_device_and_the_flags_that_help
        """),
    # ---- launching ----
    row("torchrun", "launching", "torchrun", "One node: `torchrun --standalone --nproc-per-node=N train.py`.", tests="""
        builtin/test_whole_run.py::test_rank_0_prints_what_was_decided_and_the_progress
        """),
    row("launch", "launching", "`launch.sh`", "It exits with the contract's codes, saves on SIGTERM, and with `--retries` resumes after a killed rank.", tests="""
        builtin/test_launch.py::test_sigterm_to_the_script_saves_and_exits_75
        builtin/test_launch.py::test_detached_with_a_retry_it_outlives_its_terminal_and_a_killed_rank
        unit/test_launching.py::test_one_node
        """),
    row("nodes", "launching", "several nodes", "Two nodes train as one; missing nodes are listed.", tests="""
        builtin/test_two_nodes.py::test_two_nodes_train_what_one_does
        unit/test_launching.py::test_several_nodes_by_variables_and_by_flags
        """, slow="""
        builtin/test_two_nodes.py::test_a_lost_node_comes_back_and_the_run_continues_bit_for_bit
        builtin/test_two_nodes.py::test_a_node_comes_and_another_leaves_while_the_global_batch_stays
        """),
    row("misconfigured", "launching", "misconfigured nodes", "Wrong addresses, ports, numbers of nodes, interfaces, code or data are rejected within 30 s with the fix.", tests="""
        builtin/test_misconfigurations.py::test_it_is_found_in_time_with_the_node_and_a_fix
        unit/test_launching.py::test_invalid_variables_are_rejected
        """, slow="""
        builtin/test_misconfigurations.py::test_preflight_finds_nothing_on_correct_nodes
        """),
    row("preflight", "launching", "`--preflight`", "It checks nodes, links, storage and loader, and prints a fix for each problem.", tests="""
        distributed/test_preflight.py::test_healthy_ranks_pass_and_the_run_folder_is_left_unchanged
        distributed/test_preflight.py::test_different_flags_and_code_are_listed_and_two_nodes_are_measured
        unit/test_preflight_verdict.py::test_a_slow_link_and_a_slow_node_are_told_apart
        """),
    row("slurm", "launching", "Slurm", "A job saves ahead of its limit, requeues itself until it is completed, and `scancel` ends it for good; `srun` works without torchrun.", tests="""
        unit/test_context.py::test_a_task_of_a_step_is_a_rank
        """, slow="""
        builtin/test_slurm.py::test_a_job_saves_ahead_of_its_limit_and_requeues_itself_until_it_is_completed
        builtin/test_slurm.py::test_scancel_saves_and_ends_a_job_for_good
        builtin/test_slurm.py::test_tasks_of_srun_are_ranks_without_torchrun
        """),
    row("kubernetes", "launching", "Kubernetes", "The manifests fit the published schemas; a drained pod saves and is replaced.", tests="""
        unit/test_kubernetes.py::test_every_manifest_and_the_job_of_a_trainjob_are_what_the_published_schemas_say
        unit/test_kubernetes.py::test_each_pod_starts_its_node_of_the_job
        """, slow="""
        builtin/test_pods.py::test_a_pod_that_is_drained_saves_and_the_next_one_completes_the_run
        """),
    row("image", "launching", "container image", "Small, not root, holds what a run needs.", tests="""
        unit/test_dockerfile.py::test_the_image_is_small_and_does_not_run_as_root
        unit/test_dockerfile.py::test_what_is_copied_exists_is_tracked_and_is_sent_to_the_builder
        """),
    # ---- forks ----
    row("shipped-loss", "forks", "shipped `compute_loss`", "It returns the loss as a sum over the micro-batch, and metrics as sums and counts.", tests="""
        builtin/test_model.py::test_the_loss_is_a_sum_and_metrics_are_sums_and_counts
        """),
    row("recipes", "forks", "recipes", "Each recipe of the README trains on two ranks.", tests="""
        builtin/test_recipes.py::test_text_of_unequal_lengths_is_learnt_with_a_loss_and_perplexity_per_token
        """, slow="""
        builtin/test_recipes.py::test_a_small_vision_transformer_learns_an_image_folder
        builtin/test_recipes.py::test_fine_tuning_trains_a_new_head_and_leaves_the_frozen_trunk_as_it_was
        """),
    row("verify", "forks", "`scripts/verify.py`", "It passes the template and names the broken invariant of a faulty fork.", tests="""
        builtin/test_verify.py::test_the_template_holds_and_a_run_says_so_until_a_file_changes
        builtin/test_verify.py::test_a_fault_in_a_fork_is_named_with_its_remedy
        """, slow="""
        builtin/test_verify.py::test_a_sound_configuration_raises_no_false_alarm
        builtin/test_verify.py::test_the_template_holds_on_four_ranks_as_the_readme_launches_them
        """),
    row("export", "forks", "`scripts/export.py`", "The printed snippet classifies as the evaluation did.", tests="""
        builtin/test_scripts.py::test_the_printed_snippet_classifies_as_the_evaluation_did
        """),
    row("fork-tests", "forks", "`scripts/test.sh --fork`", "The tests of the machinery pass in a fork with another model and data set.", tests="""
        builtin/test_fork_suite.py::test_the_suite_of_forks_is_collected_in_a_fork
        """, slow="""
        builtin/test_fork_suite.py::test_the_machinerys_tests_pass_in_a_fork
        """),
    row("quickstart", "forks", "quick start", "`scripts/quickstart.sh` trains two ranks and judges the result.", tests="""
        builtin/test_readme.py::test_the_quickstart_trains_two_ranks_to_over_90_percent
        """, slow="""
        builtin/test_readme.py::test_a_first_hour_with_the_readme
        """),
    row("own-code", "forks", "your code", "Files of ours that a fork changed, and whether verify passed with this code, are in the run's provenance.", tests="""
        unit/test_provenance.py::test_a_changed_file_or_version_is_named
        builtin/test_verify.py::test_the_template_holds_and_a_run_says_so_until_a_file_changes
        """),
]
# fmt: on


def tables() -> dict[str, str]:
    """What stands between the marks of README.md and docs/, by the name in the mark."""
    happens = [f"| {each.subject} | {each.promise} |" for each in GUARANTEES if each.section == "faults"]
    found = {"what a run survives": "\n".join(["| what happens | what follows |", "|---|---|", *happens])}
    promised = ["| | what | promise |", "|---|---|---|"]
    for section in ("exact", "rounding", "changes"):
        for number, each in enumerate(row for row in GUARANTEES if row.section == section):
            promised.append(f"| {'' if number else f'**{SECTIONS[section]}**'} | {each.subject} | {each.promise} |")
    found["guarantees"] = "\n".join(promised)
    checked = []
    for section, title in SECTIONS.items():
        checked += [f"## {title}", "", "| what | promise | default tests | `--all` adds |", "|---|---|---|---|"]
        for each in GUARANTEES:
            if each.section == section:
                tests, slow = (
                    "<br>".join(f"`{test.removeprefix('tests/')}`" for test in some) for some in (each.tests, each.slow)
                )
                checked.append(f"| {each.subject} | {each.promise} | {tests} | {slow} |")
        checked.append("")
    found["guarantees and their tests"] = "\n".join(checked).rstrip()
    return found


def written(text: str) -> str:
    """A file's text with each table renewed between its two marks."""
    for name, table in tables().items():
        begin, end = f"<!-- {name}: made by tests/guarantees.py -->", f"<!-- end of {name} -->"
        before, mark, rest = text.partition(begin)
        if mark:
            text = f"{before}{begin}\n\n{table}\n\n{end}{rest.partition(end)[2]}"
    return text


def documents() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


if __name__ == "__main__":
    import conftest  # noqa: F401 - the paths

    for path in documents():
        path.write_text(written(path.read_text(encoding="utf-8")), encoding="utf-8")
