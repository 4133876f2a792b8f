"""What a piece costs is measured where all are tokenized alone."""

from __future__ import annotations

import pytest

from benchmarks.pieces import PiecesBench, run


def test_pieces_are_measured_alone() -> None:
    pytest.importorskip("tokenizers")
    undivided, indexed, piece, _ = run(PiecesBench(documents=2, tokens=3000, max_tokens=500, repeats=1))
    assert "3,000 tokens" in undivided.note
    assert indexed.note == "12 of 12 alone"
    assert len(piece.values) == 1
