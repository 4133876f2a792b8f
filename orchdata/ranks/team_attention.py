"""Attention over teams: a member has a slice of the tokens of all heads, and attends to all tokens with some heads.

    query, key, value of a slice --all-to-all--> some heads of the whole --kernel--> output --all-to-all--> of the slice

This is Ulysses (Jacobs et al. 2023, arXiv:2309.14509), for teams of several sizes in one microbatch. All ranks exchange
in one sequence: in each call the largest size first, in and then out, and the other way round in backward. So no two
ranks ever wait for each other in different groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, Final, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils.weak import WeakIdKeyDictionary

from orchdata.ranks.agreement import gather
from orchdata.ranks.exchange import kept_from_compilers
from orchdata.ranks.parallel import Rank, group_timeout

Kernel = Callable[..., Tensor]
Swap = Callable[[Tensor, int], Tensor]
"""(size, ...) whose entry i is for member i, and the size -> (size, ...) whose entry i is from member i."""


class Team(Protocol):
    """What is read of an `od.Team`."""

    @property
    def size(self) -> int: ...
    @property
    def rows(self) -> slice: ...
    @property
    def cu_seqlens(self) -> Tensor: ...


_PIPELINES: Final = ("pp", "pipe", "pipeline", "pipeline_parallel")
_PADDED_HEADS: Final = 0.25
_made: WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = WeakKeyDictionary()
_borders: Any = WeakIdKeyDictionary()


def sdpa_by_sequence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    *_: Any,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, 0),
) -> Tensor:
    """Causal attention in each sequence by torch's sdpa; the signature is that of `torch.nn.attention.varlen`.

    Args:
        query, key, value: (T, heads, head_dim), (T, kv_heads, head_dim) and (T, kv_heads, value_dim).
        cu_seq_q: int32 (num_sequences + 1,): the start of each; those of keys are the same, and are not read.
        scale: default head_dim**-0.5.
        window_size: tokens before its own that a token sees; -1 for all. The second number must be 0.

    Returns: (T, heads, value_dim).
    """
    query, key, value = (each.transpose(0, 1)[None] for each in (query, key, value))
    options: dict[str, Any] = {"scale": scale, "enable_gqa": query.shape[1] != key.shape[1]}
    seen, outputs = window_size[0], []
    attention: Callable[..., Tensor] = scaled_dot_product_attention
    for start, stop in pairwise(_borders_of(cu_seq_q)):
        if seen < 0 or stop - start <= seen + 1:
            own = (query[:, :, start:stop], key[:, :, start:stop], value[:, :, start:stop])
            outputs.append(attention(*own, is_causal=True, **options))
            continue
        # By blocks as long as the window, each of which sees itself and the block before: memory stays linear in T.
        for first in range(start, stop, seen + 1):
            last, begin = min(first + seen + 1, stop), max(start, first - seen)
            places = torch.arange(begin, last, device=query.device)
            back = places[first - begin :, None] - places
            own = (query[:, :, first:last], key[:, :, begin:last], value[:, :, begin:last])
            outputs.append(attention(*own, attn_mask=(back >= 0) & (back <= seen), **options))
    return torch.cat(outputs, 2)[0].transpose(0, 1)


class TeamAttention:
    """Attention in the blocks of a model whose loader shares long sequences: `attend(query, key, value, batch.teams)`.

    Made by all ranks of a loader together: it makes this rank's process groups, which all loaders of a job use. Inside
    checkpointed regions it works. Every rank must call it equally often, in forward and in backward.

    Args:
        loader: a DataLoader with `od.Balance(teams=...)` over a process group or mesh.
        kernel: attention of the signature of torch's `varlen_attn` or of `flash_attn_varlen_func`, causal:
            `kernel(query, key, value, cu_seqlens, cu_seqlens, longest, longest, **options)`. Options of a call are
            passed to it. It may get fewer heads of keys than of queries.

    Raises:
        ValueError: a loader without teams, one with dp=(rank, size), a mesh with a pipeline, or ranks that have
            different numbers of process groups.
    """

    def __init__(self, loader: Any, kernel: Kernel = sdpa_by_sequence) -> None:
        runtime = loader._runtime
        teams = runtime.prepared.spec.plan.balance.teams
        if teams is None:
            raise ValueError("od.TeamAttention is for a loader that shares sequences: od.Balance(teams=od.Teams(...))")
        self.kernel = kernel
        self._sizes: list[int] = teams.sizes(runtime.rank.size).tolist()
        self._groups = _groups(runtime.rank, self._sizes[1:])
        self._use = runtime.context.delivery.team_use

    def __deepcopy__(self, _: Any) -> TeamAttention:
        """Of a copy of a model, as for an average of its weights: process groups cannot be copied."""
        return self

    @kept_from_compilers
    def __call__(self, query: Tensor, key: Tensor, value: Tensor, teams: Sequence[Team], **options: Any) -> Tensor:
        """Attend to the whole sequences of the microbatch's teams, and to this rank's own.

        Args:
            query, key, value: (T, heads, head_dim), (T, kv_heads, head_dim) and (T, kv_heads, value_dim) of this rank's
                tokens, on a device that the groups' backend serves. `kv_heads` divides `heads`.
            teams: `batch.teams`.
            options: for the kernel.

        Returns:
            (T, heads, value_dim).

        Raises:
            ValueError: no teams; or heads that teams of the largest size cannot share: on every rank in its first call.
        """
        if not teams:
            raise ValueError("there are no teams in this batch, which is not of a loader with od.Teams(cut='loader')")
        check_heads(query.shape[1], self._sizes)
        (getattr(teams[0], "use", None) or self._use).mark()  # of a loader for evaluation, maybe
        return attend_over(teams, query, key, value, self.kernel, self._swap, **options)

    def group(self, size: int) -> Any:
        """Return the process group of this rank's teams of a size, for an attention of your own, such as a ring.

        A slice is contiguous: a ring that balances causal attention needs an order of tokens of its own.
        """
        if size not in self._groups:
            raise ValueError(f"this rank is in teams of the sizes {sorted(self._groups)}, not of {size}")
        self._use.mark()
        return self._groups[size]

    def _swap(self, pieces: Tensor, size: int) -> Tensor:
        received = torch.empty_like(pieces)
        dist.all_to_all_single(received, pieces, group=self.group(size))
        return received


def check_heads(heads: int, sizes: Sequence[int]) -> None:
    """Raise ValueError, naming the largest size that works, if a size is not among those that can share the heads."""
    fitting = [size for size in sizes if -heads % size <= _PADDED_HEADS * heads]
    if fitting != list(sizes):
        largest = fitting[-1]
        raise ValueError(
            f"a team of {sizes[-1]} ranks cannot share {heads} query heads: padding them to {-(-heads // sizes[-1])} a "
            f"rank adds more than {_PADDED_HEADS:.0%}. "
            + (f"The largest team that works is od.Teams(largest={largest})" if largest > 1 else "No team works")
        )


def attend_over(
    teams: Sequence[Team], query: Tensor, key: Tensor, value: Tensor, kernel: Kernel, swap: Swap, **options: Any
) -> Tensor:
    """Return the attention of this rank's tokens, as `TeamAttention.__call__` does, by any way to exchange."""
    heads, shared = query.shape[1], [team for team in teams if team.size > 1]
    sizes = [team.size for team in shared]
    packed = [_some_heads_each([each[team.rows] for each in (query, key, value)], team.size) for team in shared]
    arrived = iter(_swapped(swap, sizes, [pieces for pieces, _ in packed]))
    outputs: list[Tensor] = []
    for team in teams:
        own = [each[team.rows] for each in (query, key, value)]
        if team.size > 1:
            _, widths = packed[len(outputs)]
            parts = next(arrived).flatten(0, 1).split([count * width for count, width in widths], -1)
            own = [part.unflatten(-1, shape) for part, shape in zip(parts, widths, strict=True)]
        borders = _borders_of(team.cu_seqlens)
        longest = max(stop - start for start, stop in pairwise(borders))
        outputs.append(kernel(*own, team.cu_seqlens, team.cu_seqlens, longest, longest, **options))
    # The teams of several ranks come first. Its own sequences are not sent.
    sent = [output.unflatten(0, (size, -1)).flatten(2) for output, size in zip(outputs, sizes, strict=False)]
    width = value.shape[2]
    back = [each.transpose(0, 1).unflatten(-1, (-1, width)).flatten(1, 2) for each in _swapped(swap, sizes, sent)]
    return torch.cat([*(each[:, :heads] for each in back), *outputs[len(back) :]])


def _some_heads_each(given: Sequence[Tensor], size: int) -> tuple[Tensor, list[tuple[int, int]]]:
    """Return (size, T, width), for each member its heads of query, key and value; and their heads and width in each."""
    query, key, value = given
    heads, num_tokens = query.shape[1], len(query)
    query = pad(query, (0, 0, 0, -heads % size))
    needed = key_heads(heads, key.shape[1], size)
    if needed != [*range(key.shape[1])]:
        key, value = (each.index_select(1, torch.tensor(needed, device=each.device)) for each in (key, value))
    parts = [each.reshape(num_tokens, size, -1).transpose(0, 1) for each in (query, key, value)]
    widths = [(each.shape[1] // size, each.shape[2]) for each in (query, key, value)]
    return torch.cat(parts, -1), widths


@cache
def key_heads(heads: int, kv_heads: int, size: int) -> list[int]:
    """Return the heads of keys that each member needs, equally many in turn: the fewest that its query heads share out
    evenly.

    With 28 query heads over 4 of keys, 2 members need [0, 1] and [2, 3]. Of 8 members, each with 4 of 32 heads after
    padding, the fourth needs [1, 1, 2, 2], so each needs one for each of its heads.
    """
    own = -(-heads // size)
    of_query = [min(head, heads - 1) * kv_heads // heads for head in range(own * size)]
    for run in (each for each in range(own, 0, -1) if own % each == 0):
        runs = [of_query[first : first + run] for first in range(0, own * size, run)]
        if all(len(set(each)) == 1 for each in runs):
            break
    return [each[0] for each in runs]


class _Swapped(torch.autograd.Function):
    """Exchanges of several sizes, in one node: so backward runs them in the opposite sequence, on every rank."""

    @staticmethod
    def forward(ctx: Any, swap: Swap, sizes: Sequence[int], *pieces: Tensor) -> tuple[Tensor, ...]:
        ctx.swap, ctx.sizes = swap, sizes
        return tuple(swap(each.contiguous(), size) for each, size in zip(pieces, sizes, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        both = reversed(list(zip(gradients, ctx.sizes, strict=True)))
        return None, None, *reversed([ctx.swap(each.contiguous(), size) for each, size in both])


def _swapped(swap: Swap, sizes: Sequence[int], pieces: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return _Swapped.apply(swap, sizes, *pieces) if sizes else ()  # type: ignore[no-untyped-call]


def _borders_of(cu_seqlens: Tensor) -> list[int]:
    """Return them as numbers. A GPU is waited for once, not in every layer."""
    if cu_seqlens not in _borders:
        _borders[cu_seqlens] = cu_seqlens.tolist()
    found: list[int] = _borders[cu_seqlens]
    return found


def _groups(rank: Rank, sizes: Sequence[int]) -> dict[int, Any]:
    """Return the groups of this rank's teams, by size: aligned runs of the ranks at its place in the mesh.

    They are the same for all loaders, and stay: torch names a group after its ranks and the number of groups there are,
    so a group that is made again where one ended would find the old one's addresses in the store.

    Raises ValueError if there are no process groups, or the ranks have different numbers of them.
    """
    if not sizes:
        return {}
    if not rank.dp_groups:
        raise ValueError("teams need a process group: give the loader dp=mesh or a group, not dp=(rank, size)")
    if pipeline := sorted(set(_PIPELINES) & set(rank.peer_dims)):
        raise ValueError(f"od.TeamAttention does not know the schedule of a pipeline, the mesh's dim {pipeline[0]}")
    if list(rank.column) != sorted(rank.column):
        raise ValueError(
            f"torch sorts the ranks of a group, and the mesh has {rank.column}, in which members would swap"
        )
    made = _made.setdefault(dist.group.WORLD, {})
    runs = {size: rank.column[rank.rank // size * size :][:size] for size in sizes}
    runs = {size: ranks for size, ranks in runs.items() if len(ranks) == size}
    counts = gather(len(dist.distributed_c10d._world.pg_names), rank.dp_groups)
    missing = [ranks for ranks in runs.values() if ranks not in made]
    if missing and len({counts[each] for each in missing[-1]}) > 1:
        raise ValueError(
            f"the ranks have different numbers of process groups, {counts} by rank, and their teams' groups would wait "
            "for each other for ever: call od.TeamAttention before dist.new_group for some of the ranks"
        )
    # From the smallest up on every rank: members of a group have then made equally many before.
    for ranks in missing:
        made[ranks] = dist.new_group(
            list(ranks), timeout=group_timeout(rank.dp_groups[0]), use_local_synchronization=True
        )
    return {size: made[ranks] for size, ranks in runs.items()}
