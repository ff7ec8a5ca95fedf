# extra: verify
"""Checks of the data: the order of an epoch, and what a sample holds."""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Subset as PlainSubset

import dataset as your_data
from ddp_utils import DistributedContext
from lib.values import (
    flatten_nested,
    format_plural,
    hash_nested,
    is_dense,
    join_first_three,
    pad_rows,
    scramble_global_rngs,
    spread_rows,
)
from lib.verify.data_notes import hash_epochs, inspect_data
from lib.verify.fork import BrokenInvariant, Fork, Subset, allow_failure, default_dtype, pretend_rank
from lib.verify.new_process import (
    CHANGED_ENVIRONMENT,
    RESTART_VARIABLES,
    are_summaries_equal,
    hash_order,
    summarize_dataset,
)
from lib.verify.result import NOT_CHECKED, PLEASE_CHECK, join_parts
from utils.checkpoint.format import list_step_checkpoints
from utils.data.sets import load_data
from utils.distributed.collectives import all_gather_json

Rows = dict[int, list[Tensor]]  # the tensors of a batch, by its number or by its only sample
SampleHashes = list[tuple[int, dict[str | None, int]]]  # each row with the digests of its leaves by name
LAST_EPOCH = 3  # the epoch, from 0, whose samples are compared
MAX_SAMPLES, MAX_READ_SECONDS = 2000, 1.5  # samples of a set that are compared with those of another
MIN_ORDERS, MAX_ORDERS = 4, 22  # epochs whose orders are compared, as many as MAX_READ_SECONDS allow
CHANCE_SAMPLES = 7  # samples, which may have the same order in two epochs by chance
AUGMENTATION_SEEDS = 4  # seeds with which augmented samples are drawn
FEW_SAMPLES = 4  # samples of a set that are compared with those of a run that is continued
NOT_KEYED = (
    "The order depends on more than (seed, epoch). Shuffle with torch.Generator().manual_seed(derive_seed('order',"
    " seed, epoch))."
)
MAX_SHARED_FRACTION = 1 / 3  # sharing more of the held-out samples is a finding, and sharing less is a note


@default_dtype()
def order(fork: Fork) -> str:
    """Check that all ranks together visit each sample once per epoch, in one order that changes by epoch."""
    ctx, n = fork.ctx, len(fork.train_set)
    may_repeat = getattr(fork.train_set, "with_replacement", False)

    def count_visits() -> tuple[list[tuple[Tensor, int]], list[str], str]:
        """Count the visits of this rank to each sample.

        Returns:
            The visits and the number of dropped samples for two epochs, the digests of the orders of some epochs, and
            the digest of the first epoch's order, drawn once more.
        """
        scramble_global_rngs(ctx.rank + 1)
        sampler = fork.create_loader(fork.train_set, fork.config, ctx).sampler
        visits = []
        for epoch in (0, 1):
            sampler.set_epoch(epoch)
            visited = torch.bincount(torch.tensor([*sampler], dtype=torch.int64) % n, minlength=n)
            visits.append((visited, n - len(sampler.epoch_order(epoch))))
        whole = replace(fork.config, drop_last=False, global_batch_size=0, grad_accum_steps=1)
        single = fork.create_loader(fork.train_set, whole).sampler
        orders: list[str] = []
        end = time.monotonic() + MAX_READ_SECONDS
        while len(orders) < MIN_ORDERS or (len(orders) < MAX_ORDERS and time.monotonic() < end):
            orders.append(hash_nested(single.epoch_order(len(orders))))
        return visits, orders, hash_nested(single.epoch_order(0))

    visits, orders, repeated_order = fork.run_on_all_ranks(count_visits)
    for epoch, (count, dropped) in enumerate(visits):
        dist.all_reduce(count, group=ctx.control_group)
        never, often = (count == 0).nonzero().flatten().tolist(), (count > 1).nonzero().flatten().tolist()
        if (len(never) > dropped or often) and not may_repeat:
            raise BrokenInvariant(
                f"In epoch {epoch + 1} {len(never) - dropped} samples are never visited and {len(often)} more than once"
                f" (such as sample {[*often, *never][0]}). A custom sampler is the likely cause. Visit each sample"
                " once, or set with_replacement = True on the data set."
            )
    ranks = all_gather_json((orders, repeated_order), ctx)
    for rank, (rank_orders, repeated) in enumerate(ranks):
        if rank_orders[0] != repeated or rank_orders[:MIN_ORDERS] != ranks[0][0][:MIN_ORDERS]:
            between = "between two calls" if rank_orders[0] != repeated else f"between rank {rank} and rank 0"
            raise BrokenInvariant(f"The order of an epoch differs {between}. {NOT_KEYED}")
    orders = ranks[0][0]
    if n > 1 and len({*orders}) == 1:
        raise BrokenInvariant(
            "All epochs have the same order, since epoch_order ignores its epoch. Derive the order from (seed, epoch)."
        )
    order_text, note = "Each epoch has a new order.", ""
    if n > CHANCE_SAMPLES and len({*orders}) < len(orders):
        same = next(epoch for epoch in range(len(orders)) if orders[epoch] in orders[:epoch])
        order_text = f"{len(orders)} epochs have only {len({*orders})} orders."
        note = (
            f"{PLEASE_CHECK}Epochs {orders.index(orders[same]) + 1} and {same + 1} have the same order. Derive"
            " epoch_order from (seed, epoch), unless that is meant."
        )
    process_note = ""
    if hasattr(fork.train_set, "epoch_order"):
        process_note = fork.divide_among_ranks([partial(check_new_process_order, fork)])[0]
    visits_text = f"Each epoch visits {format_plural(n - dropped, 'sample')} once over"
    if may_repeat:
        visits_text = f"Each epoch draws {format_plural(n, 'sample')} with replacement over"
    visits_text += f" {format_plural(ctx.world_size, 'rank')}"
    if dropped:
        visits_text += f" and drops {format_plural(dropped, 'sample')}"
    return join_parts(f"{visits_text}.", order_text, note, process_note)


def check_new_process_order(fork: Fork) -> str:
    new_order, problem = fork.new_process.answer("order")
    if problem:
        return f"{NOT_CHECKED}epoch_order in a new process ({problem})."
    if new_order != hash_order(fork.train_set, fork.config.seed):
        raise BrokenInvariant(f"The order of an epoch differs in a new process with {CHANGED_ENVIRONMENT}. {NOT_KEYED}")
    return ""


@default_dtype()
def content(fork: Fork) -> str:
    """Check that a sample is the same on any rank, with or without workers, in any order, alone or in a batch."""
    subset, ctx, single = fork.small_train_set(), fork.ctx, fork.single_process_ctx
    # train.py's own complaints about the batches come first
    fork.run_on_all_ranks(lambda: fork.create_loader(fork.train_set).fetch_example_batches())
    order = fork.run_on_all_ranks(lambda: fork.create_loader(subset).sampler.epoch_order(LAST_EPOCH))
    plan = [indices.tolist() for indices in order.split(fork.small_config.batch_size)]
    unseen: set[str] = set()

    def fetch(noise: int, is_first: bool) -> dict[str, str]:
        """Return digests of the micro-batches before collate, fetched in this process from last to first."""
        scramble_global_rngs(noise)
        loader, digests, collated = fork.create_loader(subset, replace(fork.small_config, num_workers=0)), {}, {}
        for indices in () if is_first else plan:
            loader.fetch_samples(indices, epoch=noise)  # reveals data that is changed in place or remembered
        for number, indices in reversed(list(enumerate(plan))):
            samples, batch, _ = loader.fetch_samples(indices, epoch=LAST_EPOCH)
            digests[str(number)], collated[number] = hash_nested(samples, unseen), find_row_tensors(batch)
        if not is_first:
            alone = {
                index: find_row_tensors(loader.fetch_samples([index], epoch=LAST_EPOCH)[1])
                for index in range(len(subset))
            }
            check_rows(subset, plan, collated, alone)
        return digests

    def load(noise: int, workers: int, rank_ctx: DistributedContext, first: int = 0) -> dict[str, str]:
        """Return digests of the last epoch's micro-batches, as a run gets them that starts in the epoch `first`."""
        fork.initial_hidden_state.restore()  # a new process would begin with this state
        scramble_global_rngs(noise)
        loader = fork.create_loader(
            subset, replace(fork.small_config, grad_accum_steps=1, num_workers=workers), rank_ctx
        )
        for epoch in range(first, LAST_EPOCH + 1):
            loader.sampler.epoch_order(epoch)  # the data's own may set what a sample depends on
            if epoch not in (first, LAST_EPOCH):
                continue
            digests = {
                str(step * rank_ctx.world_size + micro_batch.number): hash_nested(micro_batch.batch)
                for step, micro_batch in enumerate(loader.micro_batches(epoch))  # each step has one
                if not micro_batch.is_padding
            }
        return digests

    noise = 6 * ctx.rank
    by_workers = fork.run_on_all_ranks(lambda: load(noise + 2, 2, single))  # forked before this process fetches
    local_digests = {
        "fetches them": fork.run_on_all_ranks(lambda: fetch(noise + 3, True)),
        "fetches them again": fork.run_on_all_ranks(lambda: fetch(noise + 4, False)),
        "loads them": fork.run_on_all_ranks(lambda: load(noise + 5, 0, single)),
        "loads them with two workers": by_workers,
        f"starts in epoch {LAST_EPOCH + 1}": fork.run_on_all_ranks(lambda: load(noise + 1, 0, single, LAST_EPOCH)),
        "loads its part": fork.run_on_all_ranks(lambda: load(noise + 6, 1, ctx)),
    }
    ranks = all_gather_json(local_digests, ctx)
    for rank, rank_digests in enumerate(ranks):
        for how, results in rank_digests.items():
            expected = ranks[0]["fetches them" if "fetch" in how else "loads them"]
            if wrong := [key for key in results if results[key] != expected[key]]:
                samples = ", ".join(f"dataset[{subset.indices[index]}]" for index in plan[int(wrong[0])])
                before = "epoch_order, " if hasattr(subset, "epoch_order") else ""
                stage = "__getitem__" if "fetch" in how else f"{before}collate or device_transform"
                cause = "depends on the rank or draws" if rank else "changes data in place, keeps state or draws"
                raise BrokenInvariant(
                    f"The values of {samples} differ when rank {rank} {how}. {stage} {cause} unkeyed random numbers."
                    " Draw from the global generators (seeded for each sample) in __getitem__ and with"
                    " utils.rng.sample_draws elsewhere, and let device_transform do what depends on the epoch."
                )
    results = fork.divide_among_ranks(
        [partial(check, fork) for check in (check_new_process_samples, check_overlap, check_transforms, inspect_data)]
    )
    if unseen:
        results.append(f"{NOT_CHECKED}parts of samples that cannot be pickled ({join_first_three(sorted(unseen))}).")
    ranks = format_plural(ctx.world_size, "rank")
    seen = f"{len(subset)} samples are identical on {ranks}, with 0, 1 and 2 workers, in any order."
    return join_parts(seen, *results)


def find_row_tensors(batch: object) -> list[Tensor]:
    """Return the tensors that may have a row per sample. Sparse tensors can be large and are compared as a whole."""
    given = [leaf for leaf in flatten_nested(batch).values() if isinstance(leaf, Tensor)]
    rows = [pad_rows(leaf) if leaf.is_nested else leaf for leaf in given]
    return [leaf for leaf in rows if is_dense(leaf) and leaf.ndim]


def crop_to_common(row_a: Tensor, row_b: Tensor) -> tuple[Tensor, Tensor]:
    """Crop two rows whose padding differs to the part that both have."""
    slices = tuple(map(slice, map(min, row_a.shape, row_b.shape)))
    return row_a[slices], row_b[slices]


def check_rows(subset: Subset, plan: list[list[int]], collated: Rows, alone: Rows) -> None:
    """Raise BrokenInvariant if a row of a collated batch is missing, or differs from the sample collated alone.

    Padding, positions in the batch, and batches that do not have one row per sample are ignored.
    """
    wanted = [len(indices) for indices in plan]
    tensor_indices = range(len(alone[0]))
    lengths = [[len(collated[number][tensor_index]) for number in range(len(plan))] for tensor_index in tensor_indices]
    for rows in lengths if wanted not in lengths else ():  # otherwise this tensor counts something else
        if any(map(int.__eq__, rows, wanted)) and all(map(int.__le__, rows, wanted)):
            raise BrokenInvariant(
                f"Batches of {wanted} samples have {rows} rows, so collate drops samples. Keep all of them."
            )
    if any(rows != wanted for rows in lengths) or any(
        len(rows) != 1 for sample_tensors in alone.values() for rows in sample_tensors
    ):
        return
    positions = [tensor_index for tensor_index in tensor_indices if are_positions(tensor_index, plan, collated, alone)]
    for number, indices in enumerate(plan):
        for row, index in enumerate(indices):
            for tensor_index, (batched, single) in enumerate(zip(collated[number], alone[index], strict=True)):
                if tensor_index in positions:
                    continue
                if len({*map(hash_nested, crop_to_common(single[0], batched[row]))}) > 1:
                    raise BrokenInvariant(
                        f"dataset[{subset.indices[index]}] differs between a batch and alone. The likely cause is that"
                        " __getitems__ reorders samples or draws random numbers, or that collate draws, replaces or"
                        " mixes samples. Return one row per sample, in order, and mix samples (MixUp, CutMix) in"
                        " device_transform, as docs/configuration.md shows."
                    )


def are_positions(tensor_index: int, plan: list[list[int]], collated: Rows, alone: Rows) -> bool:
    """Return whether this tensor says where each sample begins or ends in its batch, or the order of the samples."""
    for number, indices in enumerate(plan):
        rows = collated[number][tensor_index]
        if rows.ndim != 1 or rows.is_floating_point():
            return False
        singles = torch.cat([alone[index][tensor_index] for index in indices])
        is_rising = (rows.diff() >= 0).all()
        is_order = (rows.sort().values.diff() == 1).all()
        is_sum = torch.equal(singles.cumsum(0), rows)
        if not is_sum and (singles.any() or not (is_rising or is_order)):
            return False
    return True


def check_new_process_samples(fork: Fork) -> str:
    """Raise BrokenInvariant if a new process has other samples. Return a note if the new process fails."""
    summaries, problem = fork.new_process.answer("samples")
    if problem:
        return f"{NOT_CHECKED}the data in a new process ({problem})."
    fork.initial_hidden_state.restore()
    pairs = zip(("training", "held-out"), (fork.train_set, fork.held_out), summaries, strict=True)
    differing = [
        name
        for name, dataset, summary in pairs
        if not are_summaries_equal(summarize_dataset(dataset, fork.config.seed), summary)
    ]
    if differing:
        names = " and ".join(differing).capitalize()
        raise BrokenInvariant(
            f"{names} samples differ in a new process with {CHANGED_ENVIRONMENT}. create_dataset or __getitem__ depends"
            " on one of these. Sort the names of files and what is made from a Python set, and take the rest from"
            " config."
        )
    return ""


@allow_failure("the data of a run that is continued")
@default_dtype()
def check_continued_data(fork: Fork) -> str:
    """Raise BrokenInvariant if a second attempt of the run "whole" would create other data."""

    def summarize_sets(*sets: Any) -> list[Any]:
        """Return the size of each set, its order, and digests of a few samples on the device in three epochs."""
        summary = []
        for dataset in (candidate for candidate in sets if candidate is not None):
            subset = Subset(dataset, spread_rows(FEW_SAMPLES, len(dataset)), fork.dtype)
            summary += [len(dataset), hash_order(dataset, fork.config.seed), hash_epochs(fork, subset)]
        return summary

    def summarize_attempt(attempt: str, **changes: str) -> list[Any]:
        config = replace(fork.given_config, **changes)  # type: ignore[arg-type]
        fork.initial_hidden_state.restore()
        with pretend_rank(), mock.patch.dict(os.environ, dict.fromkeys(RESTART_VARIABLES, attempt)):
            sets = load_data(your_data, config, DistributedContext(0, 0, 1, fork.ctx.device))
            return summarize_sets(sets.train, *[*sets.held_out.values()][:1])

    run = fork.folder / "whole"
    later = run / "checkpoints/step_00012347.pt"  # a longer run would have such a checkpoint
    try:
        later.symlink_to(list_step_checkpoints(run / "checkpoints")[-1])
        before = summarize_sets(fork.train_set, fork.held_out)
        is_same = before == summarize_attempt("1", run_dir=str(run), resume_from="auto")
        is_stable = is_same or before == summarize_attempt("0", run_dir=str(fork.folder / "other"))
    finally:
        later.unlink(missing_ok=True)
        fork.initial_hidden_state.restore()
    if not is_stable:
        return f"{NOT_CHECKED}the data of a run that is continued, since those of two new runs differ, too."
    if not is_same:
        raise BrokenInvariant(
            "Samples or their order differ in a run that is continued, with its checkpoints in --run_dir,"
            f" --resume_from auto and {'=1, '.join(RESTART_VARIABLES)}=1. dataset.py reads one of these, but a run must"
            " see the same samples after a crash. Let samples depend only on the data, config.seed, the epoch and the"
            " index."
        )
    return ""


def check_transforms(fork: Fork) -> str:
    """Check that a sample does not depend on its micro-batch after device_transform.

    For training samples the result is a note, since mixup is such a transform. Held-out samples raise BrokenInvariant.
    """

    def is_mixed(subset: Subset) -> bool:
        loader, count = fork.create_loader(subset), min(4, len(subset))
        batch = find_row_tensors(loader.fetch_samples([*range(count)], epoch=1)[2])
        for row, single in enumerate(find_row_tensors(loader.fetch_samples([row], epoch=1)[2]) for row in range(count)):
            for many, alone in zip(batch, single, strict=False):
                if len(many) == count and len(alone) == 1 and (many.ndim > 1 or many.is_floating_point()):
                    both = crop_to_common(alone[0], many[row])
                    if ((both[0].double() - both[1].double()).abs() > 1e-3 * many.double().abs().mean()).any():
                        return True
        return False

    if not hasattr(fork.train_set, "device_transform"):
        return ""
    if fork.held_out is not None and is_mixed(fork.held_out_subset(4)):
        raise BrokenInvariant(
            "device_transform gives a held-out sample other values beside other samples, so an evaluation depends on"
            " the batch size. device_transform mixes samples, or uses statistics of the micro-batch. Leave that out in"
            " evaluation."
        )
    if not is_mixed(fork.small_train_set()):
        return ""
    return (
        f"{PLEASE_CHECK}device_transform lets a training sample depend on its micro-batch or on its place there, as"
        " mixup does."
    )


def check_overlap(fork: Fork) -> str:
    """Look for held-out samples in the training set.

    If both sets choose from one data set, their rows are compared, and otherwise their samples.
    """
    if fork.held_out is None:
        return ""
    sets = fork.train_set, fork.held_out
    (source, trained), (held_out_source, held_out) = map(find_source_rows, sets)
    if type(source) is type(held_out_source) and len(source) == len(held_out_source):
        train_totals, held_out_totals = (
            sum_hashes(hash_samples(dataset, torch.linspace(0, len(dataset) - 1, 8).long()))
            for dataset in (source, held_out_source)
        )
        if source is held_out_source or (
            train_totals == held_out_totals and len({total for _, total in train_totals}) > 1
        ):
            if common := held_out[torch.isin(held_out, trained)].tolist():
                raise create_overlap_error(common, len(held_out))
            return f"None of {format_plural(len(held_out), 'held-out row')} is trained on."
    rows = [torch.randperm(len(dataset), generator=torch.Generator().manual_seed(0))[:MAX_SAMPLES] for dataset in sets]
    is_augmented = sum_hashes(hash_samples(sets[0], rows[0][:FEW_SAMPLES], seed=0)) != sum_hashes(
        hash_samples(sets[0], rows[0][:FEW_SAMPLES], seed=1)
    )
    # some seeds may leave a sample as it is, for example if they do not flip an image
    train_hashes = [
        part
        for seed in range(AUGMENTATION_SEEDS if is_augmented else 1)
        for part in hash_samples(sets[0], rows[0], seed)
    ]
    held_out_parts = hash_samples(sets[1], rows[1])
    common, is_more = find_shared_rows(train_hashes, held_out_parts)
    compared = len({row for row, _ in train_hashes})
    if is_more and len(common) / len(held_out_parts) * len(sets[0]) / compared > MAX_SHARED_FRACTION:
        raise create_overlap_error(common, len(held_out_parts))
    held_out_samples = format_plural(len(held_out_parts), "held-out sample")
    finding = f"{len(common)} of {held_out_samples} equal one of {compared:,} training samples"
    if common:
        finding = f"{PLEASE_CHECK}{finding} (rows {join_first_three([*map(str, common)])})."
    elif is_augmented:
        finding = f"{NOT_CHECKED}whether held-out samples are training samples, which are augmented."
    else:
        finding += "."
    for name in train_hashes[0][1]:
        also, is_more = find_shared_rows(train_hashes, held_out_parts, name)
        if is_more and (also := [row for row in also if row not in common]):
            listed = join_first_three([*map(str, also)])
            return (
                f"{finding} {PLEASE_CHECK}{len(also)} held-out samples (rows {listed}) equal training samples in all"
                f" values but {name!r}. Leave them out of one set, unless samples may differ by {name!r} alone."
            )
    return finding


def find_shared_rows(
    train_hashes: SampleHashes, held_out_parts: SampleHashes, left_out: str | None = None
) -> tuple[list[int], bool]:
    """Return the held-out rows that equal a training sample apart from the leaf `left_out`.

    The second value says whether they are more than the samples that repeat within a set by nature, as short texts do.
    """
    sets = [sum_hashes(set_parts, left_out) for set_parts in (train_hashes, held_out_parts)]
    counts = [Counter(total for _, total in set_totals) for set_totals in sets]
    common = [row for row, total in sorted(sets[1]) if total in counts[0]]
    repeated = max(sum(k for k in counter.values() if k > 1) / counter.total() for counter in counts)
    return common, len(common) > 2 and len(common) / len(held_out_parts) > 2 * repeated


def create_overlap_error(rows: list[int], compared: int) -> BrokenInvariant:
    return BrokenInvariant(
        f"Held-out rows {join_first_three([*map(str, rows)])} ({len(rows):,} of {compared:,} compared) are trained on."
        " create_dataset draws another split at each call, returns the training data, or finds the same files or rows"
        " for both sets. Take these rows out of one set, and split alike in all calls, with random_split(...,"
        " generator=torch.Generator().manual_seed(config.seed))."
    )


def find_source_rows(dataset: Any) -> tuple[Any, Tensor]:
    """Return the data set from which (nested) subsets choose, and the rows that they choose."""
    rows = torch.arange(len(dataset))
    while isinstance(dataset, PlainSubset):
        dataset, rows = dataset.dataset, torch.as_tensor([*dataset.indices])[rows]
    return dataset, rows


def hash_samples(dataset: Any, rows: Tensor, seed: int = 0) -> SampleHashes:
    """Return digests of the leaves of these samples, all drawn with one seed.

    It stops after MAX_READ_SECONDS, so that the last samples may be missing.
    """
    digests, end = [], time.monotonic() + MAX_READ_SECONDS
    for row in rows.tolist():
        scramble_global_rngs(seed)
        sample = dataset[row]
        if [*flatten_nested(sample)] == [""]:
            sample = getattr(sample, "__dict__", None) or sample  # it may be an object with attributes
        digests.append((row, {name: int(hash_nested(leaf), 16) for name, leaf in flatten_nested(sample).items()}))
        if time.monotonic() > end:
            break
    return digests


def sum_hashes(samples: SampleHashes, left_out: str | None = None) -> set[tuple[int, int]]:
    """Return each row with one digest of its sample, apart from the leaf `left_out`."""
    return {(row, sum(digests.values()) - digests.get(left_out, 0)) for row, digests in samples}
