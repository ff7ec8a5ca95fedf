# extra: template
"""One-line faults in the code. Each must make a default test of the guarantee that it breaks fail.

    scripts/test.sh --mutations            all of them
    scripts/test.sh --mutations fsync      those that contain this text

A fault is a line in a named function or class, so it stays valid when code moves between files.
"""

import argparse
import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from guarantees import collect
from ranks import ROOT, copy_repository

DEADLINE = 600.0  # seconds for the tests of one guarantee
PRODUCT = ("*.py", "utils/**/*.py", "scripts/**/*.py")


@dataclass(frozen=True)
class Mutation:
    where: str  # a function or class, "Class.method" for a method
    line: str  # a line of it, stripped, that occurs once
    becomes: str
    breaks: str  # the key of a guarantee

    @property
    def title(self) -> str:
        return f"{self.where}: {self.line} -> {self.becomes}"


# fmt: off
MUTATIONS = [
    Mutation('GlobalBatchSampler.find_smallest_micro_batch', 'return [smallest.tolist()]', 'return []', 'smallest'),
    Mutation('TrainState.allocate_metrics', 'self.step_sums.metrics.values.zero_()', 'pass', 'smallest'),
    Mutation('clean_up_on_exit', 'lock.close()', 'pass', 'living-process'),
    Mutation('clean_up_on_exit', 'drop_traceback(error)', 'pass', 'living-process'),
    Mutation('import_optional', 'except Exception as error:', 'except ImportError as error:', 'packages'),
    Mutation('TensorBoardWriter._call_writer', 'self._folder = None', 'pass', 'packages'),
    Mutation('raise_open_file_limit', 'need += shared_tensor_count', 'pass', 'open-files'),
    Mutation('send_pickling_error', 'message = explain_open_file_limit(error)', 'message = ""', 'open-files'),
    Mutation('can_train_longer', 'new_patience = values["patience"] or math.inf', 'new_patience = old_patience or math.inf', 'schedule-end'),
    Mutation('environment_without_launcher', 'return {name: value for name, value in os.environ.items() if not LAUNCHER_VARIABLES.fullmatch(name)}', 'return dict(os.environ)', 'command'),  # extra: companions
    Mutation('compare_evaluation_data', 'data_change, is_other_data = compare_data(saved, current, {}, is_same_code=is_same, split=split)', 'data_change, is_other_data = "", False', 'must-match'),
    Mutation('read_best_name', 'return path.stem if best.is_dir() else path.name', 'return ""', 'keep-last'),
    Mutation('decide_start', 'restore_existing_run(created)', 'pass', 'mirror-owner'),  # extra: companions
    Mutation('RunFolder._undo_start', 'restore_existing_run(moved)', 'pass', 'mirror-owner'),  # extra: companions
    Mutation('seed_evaluation', 'seed_device(device, "evaluation", seed, hook, split, indices[0])', 'pass', 'eval-only'),
    Mutation('Evaluation.evaluate_all_weights', 'with context, preserve_rng_state(self.ctx.device):', 'with context:', 'eval-only'),
    Mutation('Watchdog._handle_stall', 'if seconds <= HOOK_TIMEOUT_FACTOR * self._hang_timeout:', 'if False:', 'hang'),  # extra: watch
    Mutation('_wrap_method', 'setattr(debugger, name, wait_for_commands)', 'pass', 'hang'),  # extra: watch
    Mutation('_convert_to_8_bits', 'return Image.fromarray((values >> 8).astype("uint8"))', 'return file', 'image-levels'),  # extra: images
    Mutation('_convert_to_8_bits', 'file = Image.alpha_composite(Image.new("RGBA", file.size, "white"), file).convert("RGB")', 'file = file.convert("RGB")', 'image-levels'),  # extra: images
    Mutation('file_suffix', 'return HIDDEN_SUFFIX if name.startswith(".") or name in TOOL_FOLDERS else os.path.splitext(name)[1].lower()', 'return os.path.splitext(name)[1].lower()', 'splits'),  # extra: images
    Mutation('check_splits', 'if not val.exists():', 'if False:', 'splits'),  # extra: images
    Mutation('check_labels', 'shown = "".join(char for char in label if unicodedata.category(char) != "Cf")  # marks without width', 'shown = label', 'labels'),  # extra: images
    Mutation('read_config', 'problems += read.problems', 'pass', 'config'),
    Mutation('read_config', 'sources = {name: f"{file}: " for name in in_file if name not in given}', 'sources = dict[str, str]()', 'config'),
    Mutation('find_conflicts', 'config = _create_partial_config(config, missing)', 'pass', 'config'),
    Mutation('Setting.find_problem', 'return self.check(value) if self.check else ""', 'return ""', 'config'),
    Mutation('read_config', 'unreadable = names & without_value - given.keys() - in_file.keys()', 'unreadable = set[str]()', 'config'),
    Mutation('Setting.resolved_default', 'return self.convert(self.default)[0]', 'return self.default', 'config'),
    Mutation('to_json_value', 'return [to_json_value(element) for element in value]', 'return value', 'config'),
    Mutation('to_json_value', 'return str(value)', 'return value', 'config'),
    Mutation('_create_list_type', 'return collection_type(kind.read(part) for part in value)', 'return [kind.read(part) for part in value]', 'config'),
    Mutation('expand_path', 'return os.path.expanduser(os.path.expandvars(path))', 'return path', 'paths'),
    Mutation('MetricTracker.add', 'self.values[:size].add_(torch.where(is_added, other.values[:size], self._zero))', 'self.values[:size].add_(other.values[:size])', 'no-silence'),
    Mutation('LogWindow.finish_read', 'sums.sum_view("skipped_steps").add_(len(steps) - len(finite_norms))', 'pass', 'no-silence'),
    Mutation('AsyncSnapshot._compare_ranks', 'self._rank_with_other_buffers = differing[0] if differing else None', 'pass', 'other-buffers'),
    Mutation('MirroredRun.read_manifests', 'names = [*owner.get("inherits", []), *self.list_objects(f"{latest:08d}/manifests")]', 'names = [name for name in self.names() if "/manifests/" in name]', 'mirror-owner'),  # extra: companions
    Mutation('MirroredRun.fetch_checkpoint', 'if archive.verify_archive(staging / part).checksum != file["sha256"]:', 'if False:', 'mirror-resume'),  # extra: companions
    Mutation('MirroredRun.restore_rank_records', 'self._restore_file(name, path)', 'pass', 'mirror-resume'),  # extra: companions
    Mutation('MirrorUploader._is_node_behind', 'return any(node.get("step", -1) < step or (final_state and not node.get("state")) for node in statuses)', 'return False', 'mirror-resume'),  # extra: companions
    Mutation('Mirror.mark_ended', 'if status.get("state") == "failed" and self.read_json(name):  # else the earlier records count', 'if status.get("state") == "failed":', 'mirror-resume'),  # extra: companions
    Mutation('Mirror.mark_ended', 'self.write_json(f"owners/{self.generation:08d}.beat", {"state": "ended"})', 'pass', 'mirror-owner'),  # extra: companions
    Mutation('share_checkpoint', '_broadcast_file(path / name, 0 if is_whole else number, run, ctx)', '_broadcast_file(path / name, 0, run, ctx)', 'mirror-resume'),  # extra: companions
    Mutation('FolderLayout.write', 'self._run_on_all_ranks(lambda: publish() if self._is_node_leader else None, path, payload)', 'self._run_on_all_ranks(lambda: publish() if self._ctx.is_main else None, path, payload)', 'mirror-resume'),  # extra: companions and sharding
    Mutation('_broadcast_file', 'dist.broadcast(torch.frombuffer(block, dtype=torch.uint8), source, group=ctx.control_group)', 'pass', 'mirror-resume'),  # extra: companions
    Mutation('MirrorUploader._upload_checkpoint', 'self._upload_records()  # before the manifest: who resumes from the checkpoint needs them', 'pass', 'mirror-resume'),  # extra: companions
    Mutation('TrackCompanion._send_records', 'if record["step"] > sent.get(group, -1):', 'if True:', 'tracker'),  # extra: companions
    Mutation('TrackCompanion._open_tracker', 'tracker_state["sent"] = self._tracker.open(tracker_state["sent"])', 'self._tracker.open(tracker_state["sent"])', 'tracker'),  # extra: companions
    Mutation('TrackCompanion.send_new', 'self._tracker = None', 'pass', 'tracker'),  # extra: companions
    Mutation('follow_run', 'except (UserError, OSError) as error:', 'except KeyError as error:', 'mirror-fails'),  # extra: companions
    Mutation('Companion.read_final_state', 'return lock.get("ended", "") if lock.get("token") == self.plan["token"] else ""', 'return lock.get("ended", "")', 'companion'),  # extra: companions
    Mutation('Companions._keep_running', 'kill_session(process.pid)  # what it had started', 'pass', 'companion'),  # extra: companions
    Mutation('Companions._keep_running', 'self._takeover_error = f"Another job has taken over this run, as {title} shows. End this job."', 'pass', 'companion'),  # extra: companions
    Mutation('stop_with_rank', 'os._exit(0)', 'pass', 'companion'),  # extra: companions
    Mutation('link_or_copy', 'os.link(file, target)', 'target.symlink_to(file)', 'companion'),  # extra: companions
    Mutation('Storage.create_object', 'with open(path, "xb") as file:', 'with open(path, "wb") as file:', 'mirror-owner'),  # extra: companions
    Mutation('AsyncSnapshot._compare_ranks', 'fingerprint = format_fingerprint(weights_fingerprint + buffers[0] + position)', 'fingerprint = format_fingerprint(weights_fingerprint)', 'fingerprint'),
    Mutation('find_node_local_ranks', 'latest[host].append(rank)', 'nodes[-1][1].append(rank)', 'mirror-resume'),  # extra: companions
    Mutation('_sum_by_device', 'products *= _random_keys(device)[first : first + len(products)]', 'pass', 'fingerprint'),
    Mutation('_sum_by_device', 'block_key = derive_seed(name, block) | 1', 'block_key = 1', 'fingerprint'),
    Mutation('_split_pieces', 'first_row = local_row_range(parameter)[0]', 'first_row = 0', 'fingerprint'),
    Mutation('compare_fingerprints', 'if saved not in (None, fingerprint):', 'if False:', 'fingerprint'),
    Mutation('fingerprint_state', 'dist.all_reduce(total, group=group)', 'pass', 'fingerprint'),
    Mutation('find_divergence', 'if "fingerprint" in names or (names and not record_a.keys() & record_b.keys() & {"fingerprint"}):', 'if names:', 'diverge'),  # extra: replay and reports
    Mutation('compare_batches', 'positions = find_unequal(tensor_a, tensor_b)', 'positions = find_unequal(tensor_a, tensor_a)', 'diverge'),  # extra: replay and reports
    Mutation('DDPModel.accumulate', 'if not micro_batch.is_last:', 'if micro_batch.is_last:', 'gradient'),
    Mutation('TrainState.plan_schedule', 'self._backward_start.fill_(self.strategy.gradient_divisor * 2.0**-progress.loss_shift)', 'self._backward_start.fill_(2.0**-progress.loss_shift)', 'gradient'),
    Mutation('TrainState.update_if_finite', 'divisor = self.step_sums.loss_count * 2.0**-progress.loss_shift', 'divisor = torch.full_like(self.step_sums.loss_count, float(samples)) * 2.0**-progress.loss_shift', 'gradient'),
    Mutation('train_one_epoch', 'state.notify_progress(progress)  # shows it to the parts, and to functions of model.py that ask for it', 'pass', 'step-loss'),
    Mutation('Validation.validate', 'self.state.notify_progress(progress)', 'pass', 'step-loss'),
    Mutation('TrainState._set_lr', 'group["lr"] = group["base_lr"] * factor', 'group["lr"] = group["base_lr"] * self.lr_factor', 'group-factors'),
    Mutation('create_ddp_options', '"find_unused_parameters": find_unused_parameters,', '"find_unused_parameters": False,', 'unused'),
    Mutation('ExactDDPModel.__init__', 'self._has_static_gradients = has_static_gradients or self.find_unused_parameters', 'self._has_static_gradients = has_static_gradients', 'unused'),  # extra: exact
    Mutation('seed_device', 'torch.default_generator.manual_seed(seed)', 'torch.default_generator.manual_seed(seed) if device.type == "cpu" else None', 'unused'),
    Mutation('list_group_lr_factors', 'wrong = sorted(set(names) ^ factor.keys())', 'wrong = sorted(set(names) - factor.keys())', 'group-factors'),
    Mutation('AfterStep.after_update', 'self._after_step(model, self.step_view, (1 - skipped).double())', 'self._after_step(model, self.step_view, torch.ones_like(skipped).double())', 'after-step'),
    Mutation('StepView.fill', 'self.samples_seen.fill_(progress.samples_seen)', 'self.samples_seen.fill_(progress.samples_in_epoch)', 'step-loss'),
    Mutation('LossTerms._start_count_reduces', 'work = dist.all_reduce(counts, async_op=True)', 'pass', 'terms'),
    Mutation('LossTerms._start_count_reduces', 'counts[fetched_batch.number] = self.count_terms(fetched_batch.batch)', 'counts[0] += self.count_terms(fetched_batch.batch)', 'terms'),
    Mutation('LossTerms.set_divisors', 'self._divisors = torch.where(counts > 0, counts, math.inf)', 'self._divisors = counts', 'terms'),
    Mutation('LossTerms.compute_mean', 'return (sums / self._divisors).sum()', 'return sums.sum() / self._divisors.mean()', 'terms'),
    Mutation('LossTerms.after_forward', 'loss_count = self._mean_count if number == 0 else 0.0', 'loss_count = self._mean_count', 'terms'),
    Mutation('LossTerms.finish_read', 'self.check_counts(counted, actual)', 'pass', 'terms'),
    Mutation('TermMeans.__call__', 'quotients = torch.where(count == 0, total, total / count)  # a sum that is not finite stays so', 'quotients = total / count.sum()', 'terms'),
    Mutation('compute_gradient', 'state.backward(loss_sum, micro_batch.is_padding)', 'state.backward(loss_sum, False)', 'gradient'),
    Mutation('TokenBudget.cut_into_micro_batches', 'if (length if length > longest else longest) * count > self.max_tokens or count > max_samples:', 'if (length if length > longest else longest) * count >= self.max_tokens or count > max_samples:', 'lengths'),  # extra: lengths
    Mutation('TokenBudget.cut_into_micro_batches', 'if count > 1:', 'if count > 2:', 'lengths'),  # extra: lengths
    Mutation('BudgetSampler._pack_order', 'part.sort(stable=True, descending=number % 2 == 1).indices + number * window', 'part.sort(stable=True).indices + number * window', 'lengths'),  # extra: lengths
    Mutation('BudgetSampler.micro_batches', 'number = smallest_number if is_padding else own_numbers[k]', 'number = 0 if is_padding else own_numbers[k]', 'lengths'),  # extra: lengths
    Mutation('BudgetSampler.micro_batches', 'passes = math.ceil(count / self.num_replicas)', 'pass', 'lengths'),  # extra: lengths
    Mutation('assign_micro_batches', 'position = first + world_size - 1 - rank', 'pass', 'lengths'),  # extra: lengths
    Mutation('Schedule.plan', 'total = epochs * sampler.steps_per_epoch', 'total = progress.step + sampler.count_remaining_steps(progress.epoch, progress.samples_in_epoch, epochs)', 'lengths'),  # extra: lengths
    Mutation('Schedule.compute_lr_factor', 'step = min(step, length - 1)  # epochs may have a few more steps than the first one', 'pass', 'lengths'),  # extra: lengths
    Mutation('read_lengths', 'return lengths.tobytes()', 'return lengths[::-1].tobytes()', 'lengths'),  # extra: lengths
    Mutation('run_first_passes', 'on_all_ranks(train_other_batches, ctx)', 'pass', 'lengths'),  # extra: lengths
    Mutation('GlobalBatchSampler.micro_batches', 'count = math.ceil(len(global_batch) / self.batch_size)', 'count = max(1, len(global_batch) // self.batch_size)', 'order'),
    Mutation('Updater.step', 'is_finite = norm < math.inf  # NaN is not', 'is_finite = norm.cpu() < math.inf', 'no-reads'),
    Mutation('Updater.step', 'excess = (norm + 1e-6) / self._config.clip_grad_norm', 'excess = (2 * norm + 1e-6) / self._config.clip_grad_norm', 'weights'),
    Mutation('lr_factor', 'return (step + 1) / warmup_steps', 'return step / warmup_steps', 'weights'),
    Mutation('WeightAverage.update', 'self._steps_taken.add_(is_step_taken)', 'self._steps_taken.add_(1)', 'weights'),
    Mutation('Reporter.before_save', 'self.finish_log_point()', 'pass', 'files'),
    Mutation('pause_steps', 'training.reporter.finish_log_point()', 'pass', 'files'),
    Mutation('Reporter.record_step', 'if self._pending_log_point and step - self._pending_log_point.position["step"] >= STEPS_BEFORE_READ:', 'if self._pending_log_point:', 'no-reads'),
    Mutation('Checkpoints.report_if_written', 'self._link_best()', 'pass', 'keep-last'),
    Mutation('Checkpoints.save_best', 'self._link_best()', 'pass', 'keep-last'),
    Mutation('Checkpoints._agree_on_best', 'self._state.progress.reset_best()', 'pass', 'keep-last'),
    Mutation('Checkpoints.settle_best', 'if self._best_link is BestLink.PENDING:', 'if False:', 'keep-last'),
    Mutation('WeightAverage.after_load', 'steps_taken = progress.step - progress.skipped_steps - progress.overflow_steps', 'steps_taken = progress.step', 'weights'),
    Mutation('WeightAverage.update', 'rate = (9 / (9 + self._steps_taken)).clamp(min=self._min_rate)  # 1 minus the decay', 'rate = (1 / (1 + self._steps_taken)).clamp(min=self._min_rate)', 'weights'),
    Mutation('compute_gradient', 'seed_device(attempt.ctx.device, "step", attempt.config.seed, state.progress.step, micro_batch.number)', 'seed_device(attempt.ctx.device, "step", attempt.config.seed, state.progress.step, attempt.ctx.rank)', 'dropout'),
    Mutation('GlobalBatchLoader.micro_batches', 'self.sampler.set_epoch(epoch, start)', 'self.sampler.set_epoch(0, start)', 'order'),
    Mutation('GlobalBatchSampler._create_epoch_order', 'generator = torch.Generator().manual_seed(derive_seed("order", self.seed, epoch))', 'generator = torch.Generator().manual_seed(derive_seed("order", self.seed, 0))', 'order'),
    Mutation('sample_draws', 'numbers = indices.unsqueeze(1) * count + numbers_of_sample', 'numbers = torch.arange(len(indices), device=indices.device).unsqueeze(1) * count + numbers_of_sample', 'samples'),
    Mutation('GlobalBatchLoader._to_device', 'batch = self.device_transform(batch, self.sampler.seed, micro_batch.epoch, indices)', 'batch = self.device_transform(batch, self.sampler.seed, 0, indices)', 'samples'),
    Mutation('Fetcher._fetch_batch', 'seed_host("sample", self._seed, epoch, *indices)', 'pass', 'samples'),
    Mutation('create_repeated_order', 'copies = n * torch.arange(repeats).unsqueeze(1)', 'copies = 0 * torch.arange(repeats).unsqueeze(1)', 'order'),  # extra: images
    Mutation('mix_batch', 'torch.default_generator.manual_seed(seed)', 'pass', 'samples'),  # extra: images
    Mutation('run_first_passes', 'loss_weight = 2.0 if ctx.rank % 2 == 1 else 1.0', 'loss_weight = 1.0', 'unwrapped'),
    Mutation('Updater.step', 'if thawed:', 'if False:', 'thawed'),
    Mutation('compare_sample_fingerprints', 'require_equal(first if are_alike else local_fingerprints, sentence, ctx)', 'pass', 'other-samples'),  # extra: sketches
    Mutation('compare_checkpoint', 'if is_other_data:', 'if False:', 'other-samples'),  # extra: sketches
    Mutation('_is_close_fingerprint', 'if not is_close:', 'if False:', 'other-samples'),  # extra: sketches
    Mutation('RunningStats.add', 'self._sum.add_(self._buffers, alpha=samples)', 'self._sum.add_(self._buffers)', 'batchnorm'),
    Mutation('StepSums.start_reduce', 'self._work = self._rank_sum.start_all_reduce(self.metrics.values, micro_batch.micro_batches_in_step)', 'self._work = None', 'batchnorm'),
    Mutation('_is_complete_subtree', 'return left % 2**height == 0 and left >> height != next_leaf >> height', 'return left >> height != next_leaf >> height', 'exact-ranks'),  # extra: exact
    Mutation('_next_leaf', 'return stop if stop < leaf_count else AFTER_LAST_LEAF', 'return AFTER_LAST_LEAF', 'exact-ranks'),  # extra: exact
    Mutation('TreeAllReduce.start_all_gather', 'chunks, tree = self._receive_buffer.split(self._chunk_size), TreeSum()', 'chunks, tree = self._receive_buffer.split(self._chunk_size)[::-1], TreeSum()', 'exact-ranks'),  # extra: exact
    Mutation('TreeRankSum.start_all_reduce', 'return TreeAllReduce(values, parts, count)', 'return dist.get_world_size() > 1 and dist.all_reduce(values, async_op=True)', 'exact-ranks'),  # extra: exact
    Mutation('RunningStats.commit', 'torch.where(is_finite, self._work, self._committed, out=self._committed)', 'self._committed.copy_(self._work)', 'not-finite'),
    Mutation('train_twice', 'state.step_sums.running_stats.discard()', 'pass', 'weights'),
    Mutation('preserve_buffers', 'buffer.copy_(before[name])', 'pass', 'smallest'),
    Mutation('Evaluation.evaluate', 'if not micro_batch.is_padding:', 'if True:', 'evaluation-counts'),
    Mutation('Evaluation.evaluate', 'if count != dataset_size:', 'if False:', 'evaluation-counts'),
    Mutation('train_twice', 'for _ in range(2):', 'for _ in range(0):', 'resume'),
    Mutation('TrainState._load', 'self.log_window.load_state(progress.pop("interval"))', 'progress.pop("interval")', 'resume'),
    Mutation('Schedule.is_evaluation_due', 'return is_due and progress.evaluated_step != progress.step', 'return is_due', 'evaluation-by-steps'),
    Mutation('validate', 'training.model.train()', 'pass', 'evaluation-by-steps'),
    Mutation('train_one_epoch', 'if schedule.is_patience_over:', 'if False:', 'evaluation-by-steps'),
    Mutation('fill_in_unsaved', 'wrong = sorted(name for name in names if model_fingerprints.get(name) != expected[name])', 'wrong = []', 'unsaved'),
    Mutation('fill_in_unsaved', 'names = saved.keys() | (current.keys() & weights.keys())', 'names = saved.keys()', 'unsaved'),
    Mutation('find_unsaved_parameters', 'if parameter.requires_grad:', 'if False:', 'unsaved'),
    Mutation('WeightAverage.after_load', 'self.load_state_dict(payload["ema"] or payload["model"])', 'self.load_state_dict(payload["model"])', 'resume'),
    Mutation('sort_by_sample', 'order = torch.tensor(indices).argsort()', 'order = torch.arange(len(indices))', 'summary'),
    Mutation('OutputCollector.add', 'if not is_padding:', 'if True:', 'summary'),
    Mutation('OutputSummary.finish_evaluation', 'check_output_bytes(sum(bytes_by_rank))', 'pass', 'summary'),
    Mutation('OutputSummary.try_evaluation', 'check_output_bytes(count_output_bytes(outputs) / size * samples)', 'pass', 'summary'),
    Mutation('Updater.load_state_dict', 'if self.scaler.is_enabled() and payload["scaler"]:', 'if False:', 'resume'),
    Mutation('load_optimizer_state', 'restore_group_entries(optimizer, saved.get("changed_in_groups", []), names)', 'pass', 'resume'),
    Mutation('load_optimizer_state', 'state_dict["state"] = states', 'state_dict["state"] = {}', 'resume'),
    Mutation('load_optimizer_state', 'state_dict[key] = saved[key]', 'pass', 'resume'),
    Mutation('load_matching_weights', 'if is_other_model or 2 * len(fitting) < len(in_started):', 'if is_other_model:', 'plain-load'),
    Mutation('match_parameter_names', 'short = name.removeprefix(prefix)', 'short = name', 'plain-load'),
    Mutation('WeightAverage.__init__', 'average = copy_in_float32(source)', 'average = source.clone()', 'weights'),
    Mutation('resume_run', 'if not is_comparable:', 'if False:', 'changed-settings'),
    Mutation('compare_held_out', 'elif split not in new:', 'elif False:', 'changed-settings'),
    Mutation('_rewind_run', 'on_all_ranks(rewind_folder, ctx)', 'pass', 'records-once'),
    Mutation('compare_checkpoint', 'forbidden = describe_differences(rows, "must")', 'forbidden: list[str] = []', 'must-match'),
    Mutation('Updater.step', 'norm = torch.add(norm, loss, alpha=0)  # 0 times a non-finite loss is NaN', 'pass', 'not-finite'),
    Mutation('Updater.step', 'is_finite = norm < math.inf  # NaN is not', 'is_finite = norm <= math.inf', 'not-finite'),
    Mutation('WeightAverage.after_update', 'self.update(1 - skipped)', 'self.update(torch.ones_like(skipped))', 'not-finite'),
    Mutation('prepare_optimizer', 'fill_momentum_buffers(optimizer)', 'pass', 'not-finite'),
    Mutation('Consensus.vote_and_wait', 'self._start_vote(steps_between_votes=1)', 'pass', 'stop'),
    Mutation('train_one_epoch', 'training.consensus.vote_and_wait()  # a vote under way would ask for a second save', 'pass', 'stop'),
    Mutation('ignore_signals_in_worker', 'signal.signal(number, signal.SIG_IGN)', 'signal.signal(number, signal.SIG_DFL)', 'stop'),
    Mutation('StopSignals._record', 'self._received = signal.Signals(number).name', 'pass', 'stop'),
    Mutation('cleanup_distributed', 'dist.barrier()', 'pass', 'clean-exit'),
    Mutation('on_all_ranks', 'rank = first_rank_where(bool(problem), ctx)', 'rank = ctx.rank if problem else None', 'one-sentence'),
    Mutation('replace_file', 'os.fsync(file.fileno())', 'pass', 'whole-file'),
    Mutation('replace_file', 'fsync_folder(path.parent)', 'pass', 'whole-file'),
    Mutation('replace_file', 'temporary = temporary_path(path)', 'temporary = path', 'whole-file'),
    Mutation('verify_archive', 'if computes_checksum and trailer.checksum != digest:', 'if False:', 'damaged'),
    Mutation('check_step_in_name', 'if name and int(name[1]) != step:', 'if False:', 'damaged'),
    Mutation('find_latest_valid', 'if skipped:', 'if False:', 'all-damaged'),
    Mutation('load_weights_only', 'return retry(partial(torch.load, path, map_location="cpu", weights_only=True, mmap=mmap))', 'return retry(partial(torch.load, path, map_location="cpu", weights_only=False, mmap=mmap))', 'untrusted'),
    Mutation('find_superseded_steps', 'for step in list(steps)[:-keep_last]:', 'for step in list(steps)[:-1]:', 'keep-last'),
    Mutation('AsyncSnapshot._compare_ranks', 'diverged_ranks, fingerprint = broadcast_json([sorted(diverged_ranks), fingerprint], self._ctx)', 'diverged_ranks, fingerprint = [], ""', 'divergence'),
    Mutation('CheckpointWriter.poll', 'except OSError as error:', 'except BlockingIOError as error:', 'disk'),
    Mutation('Checkpoints._finish_copy_before', 'self.finish_copy()', 'pass', 'resume'),
    Mutation('train_epochs', 'checkpoints.finish_copy()  # after_epoch may change the weights', 'pass', 'resume'),
    Mutation('CheckpointWriter._check_progress', 'self._stalled_s += seconds_since_poll', 'self._stalled_s = 0.0', 'stalled-write'),
    Mutation('_HashingWriter.write', 'self._on_progress()', 'pass', 'stalled-write'),
    Mutation('CheckpointCommand.leave', 'os.killpg(command.pid, number)', 'command.send_signal(number)', 'command'),  # extra: companions
    Mutation('exit_with_torchrun', 'die_with_parent()', 'pass', 'launcher-killed'),
    Mutation('open_run', 'check_ranks_equal(config, ctx)', 'pass', 'alike'),
    Mutation('exit_with_user_error', 'exit_now(error.exit_code)', 'exit_now(1)', 'exit-codes'),
    Mutation('main', 'return EXIT_PREEMPTED', 'return 0', 'exit-codes'),
    Mutation('make_libraries_deterministic', 'os.environ.setdefault("NCCL_NVLS_ENABLE", "0")', 'pass', 'kernels'),
    Mutation('train_one_epoch', 'reporter.record_step(samples, own_indices)', 'reporter.record_step(samples + 0 * int(state.step_sums.loss.item()), own_indices)', 'no-reads'),
    Mutation('create_ddp_options', '"gradient_as_bucket_view": True,', '"gradient_as_bucket_view": False,', 'buckets'),
    Mutation('create_ddp_options', 'buffer_option: False,', 'buffer_option: True,', 'collectives'),
    Mutation('setup_distributed', 'fast_bf16=all(info["bf16"] for info in rank_infos),', 'fast_bf16=any(info["bf16"] for info in rank_infos),', 'precision'),
    Mutation('describe_hang', 'last = [rank for rank, reached in progress.items() if reached == min(progress.values())]', 'last = [rank for rank, reached in progress.items() if reached == max(progress.values())]', 'hang'),  # extra: watch
    Mutation('RunRecords.drop_later', 'if record.get("event") in START_EVENTS:', 'if False:', 'goodput'),
    Mutation('RunRecords.format_timestamp', 'return format_utc_time(self._clock_offset + time.monotonic())', 'return format_utc_time()', 'clock-jump'),
    Mutation('Ownership.check_owner', 'if token != self.token:', 'if False:', 'one-owner'),
    Mutation('RunLock._take_file_lock', 'fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)', 'pass', 'one-owner'),
    Mutation('MetricTracker.add', 'self.values[:size].add_(torch.where(is_added, other.values[:size], self._zero))', 'self.values[:size].copy_(other.values[:size])', 'weights'),
    Mutation('Updater.step', 'self.optimizer.found_inf = skipped', 'self.optimizer.found_inf = self.zero', 'not-finite'),
    Mutation('compare_data', 'if saved["identity"] != current["identity"]:', 'if False:', 'must-match'),
    Mutation('kill_workers', 'child.kill()', 'pass', 'clean-exit'),
    Mutation('compute_loss', 'return {"loss": (loss, len(labels)), "top1": (count_correct(logits, labels), len(labels))}', 'return {"loss": (loss / len(labels), len(labels)), "top1": (count_correct(logits, labels), len(labels))}', 'shipped-loss'),
    Mutation('StepSums.allocate', 'self.running_stats.use_accumulator(self.metrics.values[begin:])', 'pass', 'batchnorm'),
    Mutation('train_one_epoch', 'stream = training.loader.micro_batches(progress.epoch, progress.samples_in_epoch)', 'stream = training.loader.micro_batches(progress.epoch, 0)', 'kills'),
    Mutation('Consensus._finish_vote', 'if stop:', 'if False:', 'stop'),
    Mutation('count_gpus', 'if not shutil.which(command[0]) and any(path.exists() for path in GPU_DRIVERS):  # importing torch takes seconds', 'if False:', 'devices'),  # extra: launcher
    Mutation('determine_exit_code', 'if state == "preempted":', 'if state == "stopped":', 'exit-codes'),  # extra: launcher
    Mutation('check_interfaces', 'if variable.startswith("GLOO") and given.startswith(("^", "=")):', 'if False:', 'misconfigured'),  # extra: launcher
    Mutation('launch', 'create_folders(config, has_run=is_training and plan.nodes.max_nodes > 1)', 'create_folders(config)', 'nodes'),  # extra: launcher
    Mutation('read_nodes', 'if rank >= most:', 'if rank > most:', 'misconfigured'),  # extra: launcher
    Mutation('main', 'is_failed = any(finding.level == diagnosis.FAILURE for finding in steps.findings)', 'is_failed = False', 'preflight'),  # extra: preflight
    Mutation('main', 'return 0 if is_passed else 1', 'return 0', 'verify'),  # extra: verify
    Mutation('read_export', 'kind = choose_weights(payload, use_ema, source)', 'kind = "model"', 'export'),
    Mutation('merge_rank_files', 'if part.fullmatch(file.name):', 'if file.name.startswith(f"{out.name}.rank"):', 'predict'),
    Mutation('RankSupervisor.report_to_ranks', 'cause = self._watchdog.find_lost_rank() or error', 'pass', 'rank-killed'),  # extra: watch
    Mutation('_create_shared_rows', 'memory = torch.frombuffer(mmap.mmap(file.fileno(), sum(sizes)), dtype=torch.uint8)', 'memory = torch.frombuffer(mmap.mmap(file.fileno(), sum(sizes), mmap.MAP_PRIVATE), dtype=torch.uint8)', 'cache'),  # extra: cache
    Mutation('_create_shared_rows', 'os.unlink(path)', 'pass', 'cache'),  # extra: cache
    Mutation('GlobalBatchLoader._start_transfer', 'if isinstance(batch_or_error, (UserError, TrainingError)):', 'if False:', 'bad-sample'),
    Mutation('build_sharded_model', 'group.set_gradient_divide_factor(1.0)', 'pass', 'sharding'),  # extra: sharding
    Mutation('combine_norms', 'return torch.linalg.vector_norm(norms)', 'return norm', 'sharding'),  # extra: sharding
    Mutation('build_sharded_model', 'group.reshard()', 'pass', 'sharding'),  # extra: sharding
    Mutation('GlobalBatchSampler.micro_batches', 'passes = math.ceil(count / self.num_replicas)', 'pass', 'sharding'),  # extra: sharding
    Mutation('collect_optimizer_state', 'states[number][key] = create_dtensor(value, parameters_by_tensor[tensor])', 'pass', 'sharded-resume'),  # extra: sharding
    Mutation('FolderLayout.write', 'self._run_on_all_ranks(lambda: self._prepare_folder(path, folder, payload), path, payload)', 'self._prepare_folder(path, folder, payload)', 'sharded-save'),  # extra: sharding
    Mutation('FolderFormat.verify', 'if trailer != (step, files[name]):', 'if trailer.step != step:', 'sharded-damage'),  # extra: sharding
]
# fmt: on


def find(mutation: Mutation, root: Path = ROOT) -> tuple[Path, int]:
    """The file and the line number, from 0. Raises LookupError unless there is exactly one."""
    places = set()
    for path in sorted(path for pattern in PRODUCT for path in root.glob(pattern)):
        text = path.read_text(encoding="utf-8")
        if mutation.line not in text:
            continue
        lines = text.splitlines()
        for name, node in definitions(ast.parse(text)):
            if name == mutation.where:
                places |= {
                    (path, k) for k in range(node.lineno - 1, node.end_lineno) if lines[k].strip() == mutation.line
                }
    if len(places) != 1:
        raise LookupError(f"{mutation.where}: {mutation.line!r} is in {len(places)} places; choose a unique line")
    return places.pop()


def definitions(tree: ast.AST, prefix: str = ""):
    """(qualified name, node) of each function and class."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield f"{prefix}{node.name}", node
            yield from definitions(node, f"{prefix}{node.name}.")
        elif not isinstance(node, ast.expr):
            yield from definitions(node, prefix)


def mutated(mutation: Mutation, root: Path = ROOT) -> tuple[Path, str]:
    """The file, and its text with the fault."""
    path, number = find(mutation, root)
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    lines[number] = lines[number].replace(mutation.line, mutation.becomes)
    return path, "".join(lines)


def run_tests(copy: Path, tests: list[str], *options: str) -> tuple[int, str]:
    """Run pytest in a copy of the repository; returns its exit code and output, 124 after a timeout."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    temporary = ["-p", "no:cacheprovider", "--basetemp", f"{copy}.tmp"]
    command = [sys.executable, "-m", "pytest", "-x", "-q", *temporary, *options, *tests]
    try:
        ended = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True, timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        return 124, f"no end within {DEADLINE:.0f} s"
    return ended.returncode, ended.stdout + ended.stderr


def is_caught(mutation: Mutation, origin: Path, tests: list[str]) -> bool:
    """Whether one of the tests fails with the fault in a copy of `origin`; prints its name."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        copy = Path(folder, "copy")
        shutil.copytree(origin, copy)
        path, text = mutated(mutation, copy)
        path.write_text(text, encoding="utf-8")
        began = time.monotonic()
        code, output = run_tests(copy, tests)
        seconds = time.monotonic() - began
    failed = re.search(r"^FAILED (\S+)", output, re.M) if code == 1 else None
    how = f"caught    {failed[1]}" if failed else f"SURVIVED  exit code {code}\n{output[-2000:]}"
    print(f"[{mutation.breaks}] {mutation.title}\n    {how} ({seconds:.0f} s)", flush=True)
    return failed is not None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", nargs="*", help="only faults that contain one of these texts")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="faults tried at once")
    options = parser.parse_args()
    chosen = [
        mutation
        for mutation in MUTATIONS
        if any(text in mutation.title + mutation.breaks for text in options.text or [""])
    ]
    keys = {mutation.breaks for mutation in chosen}
    pairs = [(key, test) for key, kind, test in collect() if key in keys and kind == "default"]
    tests = sorted({test for _, test in pairs})
    has_xdist = importlib.util.find_spec("xdist") is not None
    parallel = ["-n", str(options.jobs + 1), "--dist", "loadfile"] if has_xdist else []
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder, ThreadPoolExecutor(options.jobs) as threads:
        origin = copy_repository(Path(folder, "origin"))
        for command in ("init -q", "add -A"):  # tests need a git repository, as in a clone
            subprocess.run(["git", *command.split()], cwd=origin, check=True)
        print(f"{len(tests)} tests of {len(keys)} guarantees, without a fault ...", flush=True)
        code, output = run_tests(origin, tests, *parallel)
        if code:
            print(f"the tests fail without a fault; fix them first\n{output[-3000:]}")
            return 1
        # tests/unit first
        own = [[test for key, test in reversed(pairs) if key == mutation.breaks] for mutation in chosen]
        caught = [*threads.map(is_caught, chosen, [origin] * len(chosen), own)]
    print(f"{sum(caught)} of {len(chosen)} faults were caught")
    return 0 if chosen and all(caught) else 1


if __name__ == "__main__":
    sys.exit(main())
