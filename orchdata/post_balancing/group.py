"""Communication between the ranks of post_balance: gathers and one ragged all-to-all, on a separate gloo group.

Gloo reports a lost rank only to some of the others; the rest would wait for the timeout. So a rank that cannot continue
leaves its reason in the group's store and closes its connections, which wakes the others.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from orchdata.loaders.errors import StepError
from orchdata.ranks.parallel import group_timeout

Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]

POLL_SECONDS = 1.0  # Ranks that wait for their trainer look for lost ones this often.

# Connections of the parent of this forked process. Closing them would wait for threads that do not exist here.
_of_parents: list[Any] = []


class LostRanksError(Exception):
    """A collective failed: some rank is gone, or late."""


def unpadded(rows: Ints, counts: Ints) -> Ints:
    """Remove padding: (num_ranks, most, num_columns) with counts[rank] rows used -> (counts.sum(), num_columns)."""
    return rows[np.arange(rows.shape[1]) < counts[:, None]]


class RankGroup:
    """The connections of this rank to the others.

    Args:
        group: the ranks; None for a single one. They connect here, in a collective of only these ranks.
        timeout: seconds that a rank waits for the others in one collective; None for the timeout of `group`.
    """

    def __init__(self, group: Any, timeout: float | None) -> None:
        self._gloo: Any = None
        self._process = os.getpid()
        self._store: Any = None
        self.rank, self.size = 0, 1
        if group is None or dist.get_world_size(group) == 1:
            return
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        # Not `dist.new_group`: in torch 2.15 only the ranks of a partial group count it, and the next group of all
        # ranks then waits for ever.
        store = dist.distributed_c10d._get_process_group_store(group)
        number = store.add(f"orchdata/post_balance/{self.rank}", 1)  # all ranks create their groups in one sequence
        patience = group_timeout(group) if timeout is None else timedelta(seconds=timeout)
        self._store = dist.distributed_c10d.PrefixStore(f"orchdata/post_balance/{number}", store)
        try:
            self._gloo = dist.ProcessGroupGloo(self._store, self.rank, self.size, patience)
        except RuntimeError as error:
            raise LostRanksError(str(error)) from None

    def __del__(self) -> None:
        self._disconnect()

    @property
    def connected(self) -> bool:
        """Whether collectives are possible."""
        return self.size == 1 or self._gloo is not None

    def gather(self, values: Ints) -> Ints:
        """Stack int64 arrays of one shape from all ranks: (num_ranks, *shape)."""
        if self.size == 1:
            return values[None]
        # One all-to-all: gloo's all-gather passes everything around a ring, one rank after another.
        outgoing = np.repeat(values[None], self.size, axis=0)
        gathered = np.empty_like(outgoing)
        self._all_to_all(torch.from_numpy(gathered).view(-1), torch.from_numpy(outgoing).view(-1))
        return gathered

    def gather_rows(self, rows: Ints, counts: Ints) -> Ints:
        """Concatenate int64 (counts[rank], num_columns) from all ranks."""
        if not counts.any():
            return rows
        padded = np.zeros((int(counts.max()), rows.shape[1]), np.int64)
        padded[: len(rows)] = rows
        return unpadded(self.gather(padded), counts)

    def gather_texts(self, text: str) -> list[str]:
        """Return the text of every rank."""
        own = np.frombuffer(text.encode(), np.uint8)
        counts = self.gather(np.array([len(own)]))[:, 0]
        letters = self.gather_rows(own.astype(np.int64)[:, None], counts)[:, 0].astype(np.uint8)
        return [part.tobytes().decode() for part in np.split(letters, np.cumsum(counts)[:-1])]

    def exchange(self, outgoing: Bytes, to_each: Sequence[int], from_each: Sequence[int]) -> Bytes:
        """Do one ragged all-to-all: bytes for each rank in turn -> the bytes from each, in new writable memory."""
        incoming = torch.empty(sum(from_each), dtype=torch.uint8)
        self._all_to_all(incoming, torch.from_numpy(outgoing), list(from_each), list(to_each))
        received: Bytes = incoming.numpy()
        return received

    def check_others(self) -> None:
        """Raise LostRanksError if some rank has given up."""
        with contextlib.suppress(RuntimeError):  # of a store that ended: the next collective tells
            if self._store is not None and self._store.check(["closed"]):
                raise LostRanksError("another rank gave up")

    def leave(self, reason: str) -> None:
        """Leave the reason why this rank cannot continue. Only the first one in the group counts."""
        with contextlib.suppress(RuntimeError):
            if self._store is not None:
                self._store.compare_set("reason", "", f"{self.rank} {reason}".encode(errors="replace").decode())

    def give_up(self, reason: str = "") -> None:
        """Leave the reason, if it is this rank's, and close the connections: no further collective is possible."""
        if reason:
            self.leave(reason)
        with contextlib.suppress(RuntimeError):
            if self._store is not None:
                self._store.set("closed", "1")
        self._disconnect()

    def _disconnect(self) -> None:
        gloo, self._gloo = self._gloo, None
        if gloo is not None and os.getpid() != self._process:
            _of_parents.append(gloo)

    def explain_loss(self, step: int, error: LostRanksError) -> StepError:
        """Give up, and return an error with the first reason that a rank left."""
        self.give_up()
        lost = f"post_balance lost other ranks at step {step}"
        with contextlib.suppress(RuntimeError):
            if self._store is not None and self._store.check(["reason"]):
                rank, _, reason = self._store.get("reason").decode().partition(" ")
                return StepError(f"{lost}: rank {rank} {reason}", step, int(rank))
        return StepError(f"{lost}: {error}", step, None)

    def _all_to_all(
        self, incoming: torch.Tensor, outgoing: torch.Tensor, from_each: Sequence[int] = (), to_each: Sequence[int] = ()
    ) -> None:
        """Exchange rows, the same number with each rank if no numbers are given."""
        if self._gloo is None:
            raise LostRanksError("its connections are closed")
        try:
            self._gloo.alltoall_base(incoming, outgoing, list(from_each), list(to_each)).wait()
            return
        except RuntimeError as error:
            # Without gloo's own source lines and advice.
            reason = str(error).partition("] ")[2].partition(". This is")[0] or str(error)
        # Not raised from that error: its traceback refers to the connections, which could then not be closed.
        raise LostRanksError(reason)
