"""An independent, slow definition of the plan of --batch_tokens, in Python's integers."""

import torch

from plain_loop import number


def micro_batches(lengths, budget, *, seed, epoch, samples=0, window=100, order=None, is_drawn=True):
    """The sample indices of each micro-batch of an epoch, in order. order: that of the epoch, by default torch's."""
    n = len(lengths)
    if order is None:
        generator = torch.Generator().manual_seed(number("order", seed, epoch))
        order = torch.randperm(n, generator=generator).tolist() if is_drawn else [*range(n)]
    length = [lengths[k % n] for k in order]
    together = window * max(1, min(budget * n // sum(length), samples or n)) if is_drawn else n
    groups = []
    for turn, first in enumerate(range(0, n, together)):
        places = range(first, min(n, first + together))
        places = sorted(places, key=lambda place: -length[place] if turn % 2 else length[place])
        for place in places:
            more = [*groups[-1], place] if groups else []
            fits = more and max(length[k] for k in more) * len(more) <= budget and len(more) <= (samples or n)
            groups = [*groups[:-1], more] if fits else [*groups, [place]]
    if is_drawn:
        generator = torch.Generator().manual_seed(number("micro-batches", seed, epoch))
        groups = [groups[k] for k in torch.randperm(len(groups), generator=generator).tolist()]
    return [[order[place] for place in group] for group in groups]
