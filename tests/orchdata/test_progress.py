"""What long work shows on stderr: a bar in a notebook; elsewhere lines, after two seconds and every half minute."""

from __future__ import annotations

import io
import sys

import pytest

from orchdata import notices as progress
from orchdata.notices import progress_bar


def test_a_notebook_gets_a_bar_that_is_gone_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})()
    monkeypatch.setattr(sys, "stderr", stream)
    with progress_bar("indexing") as advance:
        assert stream.getvalue() == ""
        advance(0.5, 2)
        advance(1.5, 2)
    first, second, cleared = stream.getvalue().removeprefix("\r").split("\r")[:3]
    assert first == f"indexing [{'#' * 10}{' ' * 30}] 25%" and second == f"indexing [{'#' * 30}{' ' * 10}] 75%"
    assert not cleared.strip() and len(cleared) == len(second)


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
