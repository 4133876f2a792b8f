"""Communication between the ranks of post_balance: all-to-alls on a separate gloo group.

Gloo reports a lost rank only to some of the others; the rest would wait for the timeout. So a rank that cannot continue
leaves its reason in the group's store and closes its connections, which wakes the others.
"""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from orchdata.loaders.errors import StepError
from orchdata.planning.route import Route
from orchdata.ranks.parallel import group_timeout

Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]

POLL_SECONDS = 1.0  # Ranks that wait for their trainer look for lost ones this often.
# Values of a rank that all others get at once. A constant, so that even ranks with different settings can report that.
_FIRST_VALUES = 200

# Connections of the parent of this forked process. Closing them would wait for threads that do not exist here.
_of_parents: list[Any] = []


class LostRanksError(Exception):
    """A collective failed: some rank is gone, or late."""


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
        if os is not None:  # the interpreter may be ending
            self._disconnect()

    @property
    def connected(self) -> bool:
        """Whether collectives are possible."""
        return self.size == 1 or self._gloo is not None

    def gather(self, values: Ints, text: str = "") -> list[tuple[Ints, str]]:
        """Return the int64 (num_values,) and the text of every rank, of any lengths."""
        if self.size == 1:
            return [(values, text)]
        letters = np.frombuffer(text.encode(errors="replace"), np.uint8)
        own = np.concatenate([[len(values), len(letters)], values, letters]).astype(np.int64)
        own.resize(max(_FIRST_VALUES, len(own)), refcheck=False)
        gathered = self._gather(own[:_FIRST_VALUES])
        if (longest := 2 + int(gathered[:, :2].sum(axis=1).max())) > _FIRST_VALUES:
            own.resize(longest, refcheck=False)
            gathered = np.concatenate([gathered, self._gather(own[_FIRST_VALUES:])], axis=1)
        ends = np.cumsum(gathered[:, :2], axis=1) + 2
        return [
            (row[2:middle], row[middle:end].astype(np.uint8).tobytes().decode())
            for row, (middle, end) in zip(gathered, ends.tolist(), strict=True)
        ]

    def _gather(self, values: Ints) -> Ints:
        """Stack int64 (num_values,), the same number from each rank: (num_ranks, num_values)."""
        # One all-to-all: gloo's all-gather passes everything around a ring, one rank after another.
        num_bytes = np.full(self.size, values.nbytes)
        route = Route(rank=self.rank, num_ranks=self.size, send_rows=num_bytes, receive_rows=num_bytes)
        return self.exchange(np.tile(values, self.size).view(np.uint8), route).view(np.int64).reshape(self.size, -1)

    def exchange(self, outgoing: Bytes, route: Route) -> Bytes:
        """Do one ragged all-to-all along a route of bytes, grouped by rank on both sides: the bytes for each rank in
        turn -> the bytes from each, in new writable memory.

        `od.exchange` does not take these connections, which torch.distributed does not know.
        """
        if self._gloo is None:
            raise LostRanksError("its connections are closed")
        incoming = torch.empty(int(route.receive_rows.sum()), dtype=torch.uint8)
        splits = route.receive_rows.tolist(), route.send_rows.tolist()
        try:
            self._gloo.alltoall_base(incoming, torch.from_numpy(outgoing), *splits).wait()
            received: Bytes = incoming.numpy()
            return received
        except RuntimeError as error:
            # Without gloo's own source lines and advice.
            reason = str(error).partition("] ")[2].partition(". This is")[0] or str(error)
        # Not raised from that error: its traceback refers to the connections, which could then not be closed.
        raise LostRanksError(reason)

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
