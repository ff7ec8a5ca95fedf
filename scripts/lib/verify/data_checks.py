"""Checks of the data: the order of an epoch, and what a sample holds."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_utils import DistributedContext
from lib.verify.fork import Broken, Fork, Subset
from lib.verify.values import digest, leaves, plural, scramble_global_rngs
from utils.distributed.collectives import all_gather_json

Rows = dict[int, list[Tensor]]  # the tensors of some batches


def order(fork: Fork) -> str:
    """All ranks together visit each sample once per epoch, in one order that changes by epoch."""
    ctx, n = fork.ctx, len(fork.train_set)
    may_repeat = getattr(fork.train_set, "with_replacement", False)

    def visit() -> tuple[list[Tensor], int, list[str], bool]:
        """Visits of this rank to each sample by epoch, samples dropped, digests of orders, whether all are equal."""
        scramble_global_rngs(ctx.rank + 1)
        sampler = fork.loader(fork.train_set, fork.config, ctx).sampler
        visits = []
        for epoch in (0, 1):
            sampler.set_epoch(epoch)
            visits.append(torch.bincount(torch.tensor([*sampler], dtype=torch.int64) % n, minlength=n))
        whole = replace(fork.config, drop_last=False, global_batch_size=0, grad_accum_steps=1)
        single = fork.loader(fork.train_set, whole).sampler
        orders = [digest(single.order(epoch)) for epoch in (0, 1, 0)]
        # two samples may have the same order in two epochs by chance
        is_fixed = all(digest(single.order(epoch)) == orders[0] for epoch in range(1, 22))
        return visits, n - sampler.samples_per_epoch, orders, is_fixed

    visits, dropped, orders, is_fixed = fork.on_all(visit)
    for epoch, count in enumerate(visits):
        dist.all_reduce(count, group=ctx.control)
        never, often = (count == 0).nonzero().flatten().tolist(), (count > 1).nonzero().flatten().tolist()
        if (len(never) > dropped or often) and not may_repeat:
            raise Broken(
                f"epoch {epoch + 1}: {len(never) - dropped} samples are never visited and {len(often)} more than once"
                f" (sample {[*often, *never][0]}): a custom sampler; visit each sample once, or set with_replacement ="
                " True on the data"
            )
    ranks = all_gather_json(orders, ctx)
    for rank, (first, second, again) in enumerate(ranks):
        if first != again or [first, second] != ranks[0][:2]:
            where = "between two calls" if first != again else f"between rank {rank} and rank 0"
            raise Broken(
                f"the order of an epoch differs {where}: it depends on more than (seed, epoch); shuffle with"
                " torch.Generator().manual_seed(derive_seed('order', seed, epoch))"
            )
        if n > 1 and is_fixed:
            raise Broken("all epochs have the same order: epoch_order ignores its epoch; derive it from (seed, epoch)")
    drawn = f"{n:,} draws with replacement" if may_repeat else f"{n - dropped:,} samples once"
    left_out = f", {dropped:,} dropped" if dropped else ""
    return f"{drawn} per epoch over {plural(ctx.world_size, 'rank')}, in a new order each epoch{left_out}"


def content(fork: Fork) -> str:
    """A sample is the same on any rank, with or without workers, in any order, alone or in a batch."""
    subset, ctx, single = fork.small_train_set(), fork.ctx, fork.single_process
    order = fork.on_all(lambda: fork.loader(subset).sampler.order(1))
    plan = [indices.tolist() for indices in order.split(fork.small_config.batch_size)]

    def fetch(noise: int, is_first: bool) -> dict[str, str]:
        """Digests of the micro-batches before collate, fetched in this process from last to first."""
        scramble_global_rngs(noise)
        loader, found, collated = fork.loader(subset, replace(fork.small_config, num_workers=0)), {}, {}
        for indices in () if is_first else plan:
            loader.fetch(indices, epoch=noise)  # reveals data that is changed in place or remembered
        for number, indices in reversed(list(enumerate(plan))):
            samples, batch, _ = loader.fetch(indices, epoch=1)
            found[str(number)], collated[number] = digest(samples), tensors(batch)
        if not is_first:
            alone = {index: tensors(loader.fetch([index], epoch=1)[1]) for index in range(len(subset))}
            check_rows(subset, plan, collated, alone)
        return found

    def load(noise: int, workers: int, as_rank: DistributedContext) -> dict[str, str]:
        """Digests of the micro-batches of epoch 1 as the training loop gets them, loaded after those of epoch 0."""
        scramble_global_rngs(noise)
        loader = fork.loader(subset, replace(fork.small_config, grad_accum_steps=1, num_workers=workers), as_rank)
        for epoch in (0, 1):
            found = {
                str(step * as_rank.world_size + micro_batch.number): digest(micro_batch.batch)
                for step, global_batch in enumerate(loader.global_batches(epoch))
                for micro_batch in global_batch
                if not micro_batch.is_padding
            }
        return found

    noise = 6 * ctx.rank
    by_workers = fork.on_all(lambda: load(noise + 2, 2, single))  # forked before this process fetches
    mine = {
        "fetches it": fork.on_all(lambda: fetch(noise + 3, True)),
        "fetches it again": fork.on_all(lambda: fetch(noise + 4, False)),
        "loads it": fork.on_all(lambda: load(noise + 5, 0, single)),
        "loads it with two workers": by_workers,
        "loads its part": fork.on_all(lambda: load(noise + 6, 1, ctx)),
    }
    ranks = all_gather_json(mine, ctx)
    for rank, each in enumerate(ranks):
        for how, found in each.items():
            expected = ranks[0]["fetches it" if "fetch" in how else "loads it"]
            if wrong := [place for place in found if found[place] != expected[place]]:
                samples = ", ".join(f"dataset[{subset.indices[index]}]" for index in plan[int(wrong[0])])
                where = "__getitem__" if "fetch" in how else "collate or device_transform"
                cause = "depends on the rank or draws" if rank else "changes data in place, keeps state or draws"
                raise Broken(
                    f"{samples}: different values when rank {rank} {how}: {where} {cause} unkeyed random numbers; in"
                    " __getitem__ draw from the global generators (seeded for each sample), elsewhere with"
                    " utils.rng.sample_draws"
                )
    return f"{len(subset)} samples identical on {plural(ctx.world_size, 'rank')}, with 0, 1 and 2 workers, in any order"


def tensors(batch: object) -> list[Tensor]:
    return [leaf for leaf in leaves(batch).values() if isinstance(leaf, Tensor) and leaf.ndim]


def check_rows(subset: Subset, plan: list[list[int]], collated: Rows, alone: Rows) -> None:
    """Raises Broken if a row of a collated batch is missing, or differs from the sample collated alone. Ignores
    padding, and batches that do not have one row per sample."""
    wanted = [len(indices) for indices in plan]
    for place in range(len(alone[0])):
        rows = [len(collated[number][place]) for number in range(len(plan))]
        if rows != wanted and any(map(int.__eq__, rows, wanted)) and all(map(int.__le__, rows, wanted)):
            raise Broken(f"batches of {wanted} samples have {rows} rows: collate drops samples; keep all of them")
        if rows != wanted or any(len(found[place]) != 1 for found in alone.values()):
            return
    for number, indices in enumerate(plan):
        for row, index in enumerate(indices):
            for many, one in zip(collated[number], alone[index], strict=True):
                common = tuple(slice(min(sizes)) for sizes in zip(one[0].shape, many[row].shape, strict=True))
                if digest(one[0][common]) != digest(many[row][common]):
                    raise Broken(
                        f"dataset[{subset.indices[index]}] differs between a batch and alone: __getitems__ reorders or"
                        " draws, or collate draws, replaces or mixes samples; return one row per sample, in order"
                    )
