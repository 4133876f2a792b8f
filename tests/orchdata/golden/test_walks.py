"""Random walks of operations come by the same batches, states and random numbers as before the loop was rewritten."""

from __future__ import annotations

import json
import warnings

import pytest
from walks import KINDS, NUM_WALKS, PATH, digest

GOLDEN = json.loads(PATH.read_text())


@pytest.mark.parametrize("kind", KINDS)
def test_walks_are_what_they_were(kind: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert [digest(kind, seed) for seed in range(NUM_WALKS)] == GOLDEN[kind]


def test_another_walk_differs() -> None:
    assert digest("shuffled", NUM_WALKS) not in GOLDEN["shuffled"]
