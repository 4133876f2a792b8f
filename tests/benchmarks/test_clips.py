"""All decoders that are measured return the same pictures; other pictures are an error."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import clips
from benchmarks.clips import ClipBench

pytest.importorskip("av")


@pytest.mark.slow
def test_a_run_has_a_row_for_each_clip(monkeypatch: pytest.MonkeyPatch) -> None:
    small = ClipBench(seconds=1, fps=10, width=64, height=48, pictures=4, repeats=1)
    (table,) = clips.run(small)
    assert [row[0] for row in table.rows][:3] == ["mp4", "webm", "gif"] and len(table.rows) == 5
    assert all(row[number] > 0 for row in table.rows for number in range(1, 7))
    monkeypatch.setattr("benchmarks.clips._all", lambda *_: np.zeros((4, 48, 64, 3), np.uint8))
    with pytest.raises(ValueError, match="all shows other pictures"):
        clips.run(small)
