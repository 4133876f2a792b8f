"""What long work shows on stderr: lines where it is no terminal, after two seconds and every half minute."""

from __future__ import annotations

import pytest

from orchdata import notices as progress
from orchdata.notices import progress_bar


def test_without_a_terminal_a_line_is_written_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with progress_bar("indexing") as advance:
        for now[0] in (101.0, 110.0, 131.0, 140.0, 162.0):
            advance(now[0] / 100, 4)
    assert capsys.readouterr().err.splitlines() == [
        "indexing: 1.1 of 4 (28%)",
        "indexing: 1.4 of 4 (35%)",
    ]
