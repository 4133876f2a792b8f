"""Notes in the store of a group: each is about one call, and without a store there are none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - it adds the backend

from orchdata.ranks import store as stores
from orchdata.ranks.store import Notes, Reason, name_call, name_missing


@pytest.fixture
def rank_0_of_3(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A group in which no rank waits for others."""
    monkeypatch.setattr(stores, "_WAIT_SECONDS", 0.0)
    dist.init_process_group("fake", rank=0, world_size=3, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def of_rank(rank: int, about: str) -> Notes:
    """Return the notes as that rank would have them in its process."""
    theirs = Notes(dist.group.WORLD, about)
    theirs._rank = rank
    return theirs


@pytest.mark.usefixtures("rank_0_of_3")
def test_each_call_has_its_own_notes() -> None:
    first, second = (name_call("exchange") for _ in range(2))
    of_rank(1, first).leave()
    assert name_missing(None, first) == "; no word from rank 2, which died or hangs"
    of_rank(2, second).leave()
    assert name_missing(None, second) == "; no word from rank 1, which died or hangs"
    assert name_missing(None, name_call("exchange")) == "; no word from ranks 1, 2, which died or hang"


@pytest.mark.usefixtures("rank_0_of_3")
def test_a_later_group_of_the_same_name_has_its_own_notes() -> None:
    store = dist.HashStore()
    calls = []
    for _ in range(2):
        dist.destroy_process_group()
        dist.init_process_group("fake", rank=0, world_size=3, store=store)
        calls.append(name_call("exchange"))
    assert calls[0] != calls[1]


@pytest.mark.usefixtures("rank_0_of_3")
def test_the_first_note_of_a_rank_and_the_first_reason_of_all_stay() -> None:
    ours, theirs = of_rank(0, "step"), of_rank(1, "step")
    assert ours.reason() is None
    ours.leave()
    ours.leave("came too late")
    theirs.leave("no room in caf\udce9")
    of_rank(2, "step").leave("another reason")
    assert ours.reason() == Reason(1, "no room in caf?")
    assert ours.missing() == []
    assert not theirs.closed()
    ours.close()
    assert theirs.closed()


class Gone:
    """A group whose store ended with the process that served it."""

    def get_group_store(self) -> Any:
        return self

    def check(self, keys: list[str]) -> bool:
        raise dist.DistNetworkError("Connection reset by peer")


@pytest.mark.usefixtures("rank_0_of_3")
def test_without_a_store_no_rank_is_named() -> None:
    ours = Notes(None, "step")
    assert not ours.readable
    ours = of_rank(0, "step")
    ours._store = Gone()
    ours.leave("no room")
    assert not ours.readable
    assert (ours.missing(), ours.reason(), ours.closed()) == ([], None, False)
