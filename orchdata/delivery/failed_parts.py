"""Failed parts: a part failed on one rank -> its sample's labels are masked on another, before the batch is delivered.

    every step:            the number of failed parts, and whether a rank gave up --all_reduce--> usually none
    if a part failed:      flags of all parts --gather--> those that arrive here --> labels masked
    if a sample failed:    a flag of each shared sample --all_reduce--> blank on every member --> counted once
    if anything failed:    flags and failures of all peers --gather--> labels masked, failures of the rank counted

Only with on_error="skip", and only with assignment="per_phase"; the third line in steps that share samples, the last
one where peers share parts (`DataParallel.encoder_dims`), in place of the second.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from orchdata.batch.batch import Batch
from orchdata.batch.tensors import IGNORE, counted_labels
from orchdata.building.step import BuiltStep
from orchdata.loaders.errors import DataError
from orchdata.ranks.gathering import gather, small_device


class FailedParts:
    """Masks labels for failed parts, and of shared samples, among the data-parallel ranks and their peers. All of them
    mask the same steps in the same sequence, from the thread that iterates.

    Args:
        groups: process groups, one after another, that together reach these ranks and no others; none for one rank.
        rank, peer: of this process.
    """

    def __init__(self, groups: Sequence[Any], rank: int = 0, peer: int = 0) -> None:
        self._groups, self._rank, self._peer = groups, rank, peer

    def mask_labels(self, step: int, batches: Sequence[Batch]) -> list[Batch]:
        """Return a step's microbatches, without loss for samples that have failed parts.

        Raises RuntimeError if a rank gave up, with its error, or is lost.
        """
        if not self._report(step, _num_failed(batches)):
            return list(batches)
        return _masked(batches, list(gather([_flags(batch) for batch in batches], self._groups).values()))

    def count_once(self, built: BuiltStep, count: Callable[[BuiltStep], None]) -> BuiltStep:
        """Return a step that shares samples, or parts among peers, with what failed elsewhere masked, and with the
        failures that `count` counts here: each on one member, or those of a rank on each of its peers.

        Raises as `mask_labels`, and as `count`.
        """
        step = built.plan.step
        if not self._report(step, len(built.failures) + _num_failed(built.batches)):
            count(built)
            return built
        built = self._of_members(built) if built.plan.teams is not None else self._of_peers(built)
        try:
            count(built)
        except Exception as error:
            self.give_up(step, error)
            raise
        self._report(step, 0)
        return built

    def _of_peers(self, built: BuiltStep) -> BuiltStep:
        """Return a step with the failures of all peers of the rank, and the labels of failed parts masked."""
        own = [self._peer, self._rank, [_flags(batch) for batch in built.batches], [f.args for f in built.failures]]
        everywhere = sorted(gather(own, self._groups).values(), key=lambda each: (each[0], each[1]))
        # A text is read by all peers of its rank, and fails on all of them.
        failures = {failure.args: failure for failure in built.failures}
        for _, rank, _, of_peer in everywhere:
            for args in of_peer if rank == self._rank else ():
                failures.setdefault(tuple(args), DataError(*args))
        batches = _masked(built.batches, [flags for _, _, flags, _ in everywhere])
        return replace(built, batches=batches, failures=list(failures.values()))

    def _of_members(self, built: BuiltStep) -> BuiltStep:
        """Return a step with shared samples blank that failed on any member, and without the failures that a lower
        member counts.
        """
        plan, step, rank = built.plan, built.plan.step, self._rank

        # The lowest member on which each shared sample failed.
        places = [torch.from_numpy(plan.places(rank, batch.microbatch)) for batch in built.batches]
        failed_here = [
            (batch.sample_ids[number], int(at[number]))
            for batch, at in zip(built.batches, places, strict=True)
            for team in batch.teams
            for number in (team.samples.start + (~team.valid).nonzero()[:, 0]).tolist()
        ]
        lowest = torch.full((len(plan.row),), plan.num_ranks)
        lowest[[at for _, at in failed_here]] = rank
        shared = torch.from_numpy(plan.team_size > 1)
        lowest[shared] = self._reduce(step, lowest[shared], dist.ReduceOp.MIN)

        # All members have it blank, and that one counts it. Pieces of one sample have one name.
        elsewhere, failures = Counter(name for name, at in failed_here if lowest[at] < rank), []
        for failure in built.failures:
            elsewhere[name := (failure.shard, failure.key)] -= 1
            if elsewhere[name] < 0:
                failures.append(failure)
        numbers = [(lowest[at] < plan.num_ranks).nonzero()[:, 0].tolist() for at in places]
        batches = list(map(_blanked, built.batches, numbers))
        if plan.parts:
            batches = _masked(batches, list(gather([_flags(batch) for batch in batches], self._groups).values()))
        return replace(built, batches=batches, failures=failures)

    def give_up(self, step: int, error: Exception) -> None:
        """Let the other ranks raise too, so that they do not wait for this one."""
        with contextlib.suppress(RuntimeError):  # of lost ranks: this rank raises `error`
            self._reduce(step, torch.tensor([0, 1]))
            gather(f"{type(error).__name__}: {error}", self._groups)

    def _report(self, step: int, failed: int) -> int:
        """Return how much failed on all ranks. Raises RuntimeError, with its error, if a rank gave up."""
        failed, given_up = self._reduce(step, torch.tensor([failed, 0])).tolist()
        if given_up:
            errors = "; ".join(f"rank {rank}: {text}" for rank, text in gather("", self._groups).items() if text)
            raise RuntimeError(f"other ranks gave up at step {step}: {errors}")
        return failed

    def _reduce(self, step: int, values: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        try:
            for group in self._groups:
                values = values.to(small_device(group))
                dist.all_reduce(values, op, group=group)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {dist.get_rank()} lost others at step {step}, when ranks report what failed: {error}"
            ) from error
        return values.cpu()


def _blanked(batch: Batch, failed: Collection[int]) -> Batch:
    """Return a microbatch with these shared samples blank, as those are that failed here."""
    llm, text, valid = batch.llm, batch.text, torch.ones(len(batch.sample_ids), dtype=torch.bool)
    labels, media = llm.any_labels, torch.zeros_like(llm.input_ids, dtype=torch.bool)
    for positions in llm.media_positions.values():
        media[positions] = True  # Their features arrive, and models look for as many tokens.
    for number in failed:
        rows = slice(*llm.cu_seqlens[number : number + 2].tolist())
        llm.input_ids[rows] *= media[rows]
        labels[rows], valid[number] = IGNORE, False
        text.input_ids[slice(*text.cu_seqlens[number : number + 2].tolist())] = 0
    fields = {
        name: [None if number in failed else value for number, value in enumerate(values)]
        for name, values in batch.fields.items()
    }
    teams = tuple(replace(team, valid=valid[team.samples]) for team in batch.teams)
    return replace(batch, fields=fields, teams=teams, loss_tokens=counted_labels(llm, teams))


Flags = dict[str, list[list[Any]]]


def _flags(batch: Batch) -> Flags:
    """Return modality -> which parts are valid, grouped by the rank that needs them, and how many go to each."""
    flags = {}
    for name, route in batch.routes.items():
        valid, order = _valid(batch, name), route.parts.send_order
        flags[name] = [(valid if order is None else valid[order]).tolist(), route.parts.send_rows.tolist()]
    return flags


def _num_failed(batches: Sequence[Batch]) -> int:
    return sum(int((~_valid(batch, name)).sum()) for batch in batches for name in batch.routes)


def _masked(batches: Sequence[Batch], by_rank: Sequence[Sequence[Flags]]) -> list[Batch]:
    """Return microbatches with the labels of failed parts masked; flags as `_arriving` takes them."""
    return [
        batch.masked({name: _arriving(name, number, route.rank, by_rank) for name, route in batch.routes.items()})
        for number, batch in enumerate(batches)
    ]


def _arriving(name: str, number: int, rank: int, by_rank: Sequence[Sequence[Flags]]) -> torch.Tensor:
    """Return which parts of `rank`'s samples are valid, in the order in which they arrive: bool (num_parts,).

    Args:
        number: of the microbatch.
        by_rank: for each rank, the flags of its microbatches; where peers share parts, of peer 0 of all ranks, then
            those of the next peer.
    """
    flags: list[bool] = []
    for sent in by_rank:
        valid, counts = sent[number][name]
        start = sum(counts[:rank])
        flags += valid[start : start + counts[rank]]
    return torch.tensor(flags, dtype=torch.bool)


def _valid(batch: Batch, name: str) -> torch.Tensor:
    valid = batch.media[name].valid
    assert valid is not None  # a batch with routes has flags
    return valid
