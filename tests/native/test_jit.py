"""Kernels are compiled once for each combination of types."""

from __future__ import annotations

from orchdata.native.jit import kernel


def plus(number: int, more: int) -> int:
    return number + more


def test_constants_of_a_caller_compile_nothing_anew() -> None:
    inner = kernel(plus)

    def calls(number: int) -> int:
        return inner(number, 1) + inner(number, more=2) + inner(3, number)

    assert kernel(calls)(10) == 11 + 12 + 13
    assert len(inner.signatures) == 1  # type: ignore[attr-defined]
