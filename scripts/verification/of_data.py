"""Invariants of the data: the order of an epoch, and what a sample holds."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

import train
from ddp_utils import DistributedContext
from utils.distributed.collectives import all_gather_json
from verification.fork import Broken, Few, Fork, digest, leaves, scramble


def order(fork: Fork) -> str:
    """Of all ranks together, each epoch has each sample once, in an order that all ranks share and that differs by
    epoch."""
    ctx, n = fork.ctx, len(fork.train_set)
    may_repeat = getattr(fork.train_set, "with_replacement", False)

    def look() -> tuple[list[Tensor], int, list[str], bool]:
        """How often this rank visits each sample, samples dropped, the order as every rank has to see it, whether it
        never changes."""
        scramble(ctx.rank + 1)
        _, sampler = train.create_distributed_dataloader(fork.train_set, fork.config, ctx)
        counts = []
        for epoch in (0, 1):
            sampler.set_epoch(epoch)
            mine = [
                k
                for global_batch in sampler.global_batches(epoch)
                for m in global_batch.micro_batches
                if not m.is_padding
                for k in m.indices
            ]
            counts.append(torch.bincount(torch.tensor(mine, dtype=torch.int64), minlength=n))
        whole = replace(fork.config, drop_last=False, global_batch_size=0, grad_accum_steps=1)
        _, single = train.create_distributed_dataloader(fork.train_set, whole, fork.alone)
        orders = [digest(single.order(epoch)) for epoch in (0, 1, 0)]
        # by chance if n is 2
        is_fixed = orders[0] == orders[1] and all(digest(single.order(epoch)) == orders[0] for epoch in range(2, 22))
        return counts, n - sampler.samples_per_epoch, orders, is_fixed

    counts, dropped, orders, is_fixed = fork.on_all(look)
    for epoch, count in enumerate(counts):
        dist.all_reduce(count, group=ctx.control)
        never, often = (count == 0).nonzero().flatten().tolist(), (count > 1).nonzero().flatten().tolist()
        if (len(never) > dropped or often) and not may_repeat:
            which = f"sample {often[0]} is visited {count[often[0]]} times" if often else f"sample {never[0]} never"
            raise Broken(
                f"epoch {epoch}: {len(never) - dropped} samples are never visited and {len(often)} more than once"
                f" ({which}): a sampler or an epoch_order of its own; give each index once, or declare with_replacement"
                " = True in the data set"
            )
    ranks = all_gather_json(orders, ctx)
    for rank, (first, second, again) in enumerate(ranks):
        if first != again or [first, second] != ranks[0][:2]:
            other = "when it is asked for again" if first != again else f"on rank {rank} than on rank 0"
            raise Broken(
                f"the order of an epoch is another {other}: it draws from something else than (seed, epoch); "
                "shuffle with torch.Generator().manual_seed(derive_seed('order', seed, epoch))"
            )
        if first == second and n > 1 and is_fixed:
            raise Broken(
                "epochs 0 and 1 have the same order: a sampler of its own without set_epoch, or an epoch_order that"
                " ignores the epoch; make the order a function of (seed, epoch)"
            )
    if may_repeat:
        return f"{n:,} draws an epoch over {ctx.world_size} rank(s), repeats declared, another order in each"
    left_out = f", {dropped:,} dropped in each" if dropped else ""
    return f"{n - dropped:,} samples once an epoch over {ctx.world_size} rank(s), another order in each{left_out}"


def content(fork: Fork) -> str:
    """A sample is the same whoever loads it: on any rank, with workers or without, in any order, dealt or alone."""
    few, ctx, size = fork.few(), fork.ctx, fork.small.batch_size
    plan = [indices.tolist() for indices in fork.on_all(lambda: fork.loader(few).sampler.order(1).split(size))]

    def fetch(noise: int, is_first: bool) -> list[list[str]]:
        """The samples of each micro-batch before collate and device_transform, in this process, the last micro-batch
        first."""
        scramble(noise)
        loader, found, collated, alone = fork.loader(few, num_workers=0), {}, {}, {}
        for indices in () if is_first else plan:
            loader.fetch(indices, epoch=noise)  # where data is changed in place, or kept, it shows
        for number, indices in reversed(list(enumerate(plan))):
            samples, batch, _ = loader.fetch(indices, epoch=1)
            is_list = isinstance(samples, list) and len(samples) == len(indices)
            found[number] = [digest(sample) for sample in samples] if is_list else [digest(samples)]
            collated[number] = tensors(batch)
        if not is_first:
            alone = {index: tensors(loader.fetch([index], epoch=1)[1]) for index in range(len(few))}
            check_rows(few, plan, collated, alone)
        return [found[number] for number in range(len(plan))]

    def load(noise: int, workers: int, as_rank: DistributedContext) -> dict[str, str]:
        """The micro-batches of epoch 1 as the loop gets them, after those of epoch 0, by their place."""
        scramble(noise)
        config = replace(fork.small, grad_accum_steps=1, num_workers=workers)
        loader, _ = train.create_distributed_dataloader(few, config, as_rank)
        for epoch in (0, 1):
            dealt = [
                (w, m)
                for w, global_batch in enumerate(loader.global_batches(epoch))
                for m in global_batch
                if not m.is_padding
            ]
        return {str(w * as_rank.world_size + m.number): digest(m.batch) for w, m in dealt}

    # workers first: they are forked before this process has touched a sample
    noise = 6 * ctx.rank
    by_workers = fork.on_all(lambda: load(noise + 2, 2, fork.alone))
    samples = fork.on_all(lambda: [fetch(noise + 3, True), fetch(noise + 4, False)])
    mine = {
        "samples": samples,
        "batches": fork.on_all(lambda: [load(noise + 5, 0, fork.alone), by_workers, load(noise + 6, 1, ctx)]),
    }
    ranks = all_gather_json(mine, ctx)
    for rank, each in enumerate(ranks):
        for found in each["samples"]:
            check_samples(few, plan, rank, found, ranks[0]["samples"][0])
        for found, how in zip(each["batches"], ("alone", "with two workers", "its share"), strict=True):
            if wrong := [place for place, batch in found.items() if batch != ranks[0]["batches"][0][place]]:
                raise Broken(
                    f"micro-batch {wrong[0]} is another when rank {rank} loads it ({how}): collate or device_transform"
                    " draws outside the streams or keeps what it saw, or the data set does; take draws from"
                    " utils.rng.sample_draws(seed, epoch, indices, count)"
                )
    return f"{len(few)} samples the same bytes on {ctx.world_size} rank(s), with 0, 1 and 2 workers, in any order"


def tensors(batch: object) -> list[Tensor]:
    return [leaf for leaf in leaves(batch).values() if isinstance(leaf, Tensor) and leaf.ndim]


def check_rows(
    few: Few, plan: list[list[int]], collated: dict[int, list[Tensor]], alone: dict[int, list[Tensor]]
) -> None:
    """Raises Broken where a row of a collated batch is not the row of that sample alone, or is missing. Padding is not
    compared.

    Batches that are packed otherwise than in one row a sample are passed over.
    """
    wanted = [len(indices) for indices in plan]
    for place in range(len(alone[0])):
        lengths = [len(collated[number][place]) for number in range(len(plan))]
        if any(map(int.__eq__, lengths, wanted)) and all(map(int.__le__, lengths, wanted)) and lengths != wanted:
            number = next(number for number, length in enumerate(lengths) if length < wanted[number])
            raise Broken(
                f"a batch of {wanted[number]} samples has {lengths[number]} rows: collate or __getitems__ loses"
                " samples; keep all of them"
            )
        if lengths != wanted or any(len(found[place]) != 1 for found in alone.values()):
            return
    for number, indices in enumerate(plan):
        for row, index in enumerate(indices):
            for many, one in zip(collated[number], alone[index], strict=True):
                common = tuple(slice(min(sizes)) for sizes in zip(one[0].shape, many[row].shape, strict=True))
                if digest(one[0][common]) != digest(many[row][common]):
                    raise Broken(
                        f"dataset[{few.chosen[index]}] is another in a batch with others than alone: __getitems__ gives"
                        " another order than it was asked for, or collate draws at random, replaces, changes or mixes"
                        " samples; give one row a sample, in the order asked for (mix in device_transform)"
                    )


def check_samples(
    few: Few, plan: list[list[int]], rank: int, found: list[list[str]], expected: list[list[str]]
) -> None:
    """Raises Broken at the first sample that is not as expected."""
    for indices, mine, theirs in zip(plan, found, expected, strict=True):
        for index, sample, other in zip(indices, mine, theirs, strict=False):
            if sample != other:
                raise Broken(
                    f"dataset[{few.chosen[index]}] is not the same when rank {rank} fetches it (again): a random"
                    " transform outside the streams, data that is changed in place, or a data set that looks at the"
                    " rank; in __getitem__ draw from the global generators of torch, random or numpy (they are seeded"
                    " for each sample), in __getitems__ by utils.rng.sample_draws"
                )
