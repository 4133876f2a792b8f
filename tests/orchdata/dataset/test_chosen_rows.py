"""The rows that a data set chooses, against a plain array."""

from __future__ import annotations

import numpy as np
import pytest

from orchdata.dataset.indexed import Rows


@pytest.mark.parametrize("share", [0.0, 0.02, 0.4, 0.6, 0.97, 1.0])
def test_rows_are_those_of_an_array(share: float) -> None:
    generator = np.random.default_rng(7)
    for num_rows in (0, 1, 2, 50, 333):
        lacks = generator.random(num_rows) < share
        rows, array = Rows(num_rows, np.flatnonzero(lacks)), np.flatnonzero(~lacks)
        assert len(rows) == len(array) and rows.listed().tolist() == array.tolist()
        assert [rows[number] for number in range(-len(array), len(array))] == [*array, *array]
        numbers = {int(row): number for number, row in enumerate(array)}
        assert [rows.number_of(row) for row in range(num_rows)] == [numbers.get(row) for row in range(num_rows)]
        for number in (len(array), -len(array) - 1):
            with pytest.raises(IndexError):
                rows[number]


def test_all_rows_but_a_few_take_no_memory() -> None:
    rows = Rows(10**12, np.array([3, 10**11]))
    assert (len(rows), rows[3], rows[-1], rows.number_of(3)) == (10**12 - 2, 4, 10**12 - 1, None)
