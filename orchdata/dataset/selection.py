"""Selections of samples: by columns of the index, or by a hash of their keys.

    "image_tokens < 4096 and not bad" --parsed--> pyarrow expression --over columns of the index--> rows
    split("train", 0.99)              --hash of the key < 0.99--> rows
    dataset[:1000]                    --numbers of samples that are left--> rows

All are values and pure functions of the index: the same rows on every rank, in any order.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import operator
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.index.index import Index
from orchdata.loaders.storage.storage import basename
from orchdata.native.permutation import hash_keys

if TYPE_CHECKING:
    import pyarrow.compute as pc

Rows = NDArray[np.int64]
_CHUNK_ROWS: Final = 1 << 20
_TIMED_ROWS: Final = 1 << 16  # some milliseconds
_EXPRESSION_CHARACTERS: Final = 10_000
_ROW: Final = " row"  # no name that a filter can have
_HASH_BITS: Final = 53
_PARTS: Final = ("train", "test")
_WORD: Final = re.compile(r"[^\W\d]\w*")
_COUNTS: Final = ("tokens", "loss_tokens", "text_tokens", "bytes", "bad", "key", "shard")


Column = Callable[[int, int], Any]
"""A function of (start, stop) that returns the values of these rows."""

OwnColumns = Mapping[str, Column]
NO_COLUMNS: Final[OwnColumns] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Filter:
    """The rows for which an expression over columns of the index is true.

    The text of a pyarrow expression leaves out the middle of long lists, so it has a digest too.
    """

    text: str
    digest: str = field(kw_only=True, default="")
    expression: pc.Expression = field(repr=False, compare=False)

    @classmethod
    def of(cls, given: str | pc.Expression) -> Filter:
        """Build it from text or a pyarrow expression. Raises ValueError, naming the wrong part, for invalid text."""
        import pyarrow.compute as pc

        if isinstance(given, pc.Expression):
            return cls(str(given), given, digest=_digest(given))
        if not isinstance(given, str):
            raise TypeError(f"a filter is a string or a pyarrow.compute.Expression, got {type(given).__name__}")
        return cls(given, _Parser(given).expression())

    def describe(self) -> dict[str, Any]:
        """Return a JSON-safe description, equal for equal selections."""
        return {"filter": self.text} | ({"digest": self.digest} if self.digest else {})

    def keeps(self, index: Index, start: int, stop: int, own: OwnColumns = NO_COLUMNS) -> NDArray[np.bool_]:
        """Return which of the rows [start, stop), of whole samples, are chosen: bool (stop - start,), equal for all
        pieces of a sample; `own` are the user's own columns.
        """
        import pyarrow as pa

        makers = {**columns_of(index), **own}
        words = set(_WORD.findall(self.text))  # names of columns, and more
        names = [name for name in makers if name in words]
        columns = {name: makers[name](start, stop) for name in names}
        table = pa.table({**columns, _ROW: np.arange(stop - start)})
        try:
            kept = table.filter(self.expression).column(_ROW).to_numpy()
        except (pa.ArrowException, TypeError) as error:
            raise ValueError(f"filter {self.text!r}: {_why(error)}; the columns are {', '.join(makers)}") from None
        mask = np.zeros(stop - start, bool)
        mask[kept] = True
        return mask


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """The rows with a hash of the key below `fraction` ("train") or not ("test"): the same samples in any shards, on
    any machine. Another seed splits the same data differently.
    """

    part: Literal["train", "test"]
    fraction: float
    seed: int = 0

    def __post_init__(self) -> None:
        if self.part not in _PARTS:
            raise ValueError(f"split: the parts are {' and '.join(map(repr, _PARTS))}, got {self.part!r}")
        if not isinstance(self.fraction, Real) or not 0 < self.fraction < 1:
            raise ValueError(f"split: fraction is that of 'train' and between 0 and 1, got {self.fraction!r}")
        if not hasattr(self.seed, "__index__"):
            raise TypeError(f"split: seed must be an integer, got {self.seed!r}")
        if not 0 <= operator.index(self.seed) < 1 << 63:
            raise ValueError(f"split: seed must be between 0 and 2**63 - 1, got {self.seed!r}")
        object.__setattr__(self, "fraction", float(self.fraction))
        object.__setattr__(self, "seed", operator.index(self.seed))

    def describe(self) -> dict[str, Any]:
        return {"split": self.part, "fraction": self.fraction, "seed": self.seed}

    def keeps(self, index: Index, start: int, stop: int, own: OwnColumns = NO_COLUMNS) -> NDArray[np.bool_]:
        offsets, data = index.keys(start, stop)
        hashes = np.empty(stop - start, np.uint64)
        hash_keys(np.ascontiguousarray(offsets), np.array(data), np.uint64(self.seed), hashes)
        bound = np.uint64(round(self.fraction * (1 << _HASH_BITS)))
        is_train = (hashes >> np.uint64(64 - _HASH_BITS)) < bound
        is_mine: NDArray[np.bool_] = is_train if self.part == "train" else ~is_train
        is_mine |= np.diff(offsets) == 0  # a shard that cannot be read has a row without a key: it is in both parts
        return is_mine


Selection = Filter | Split
"""A choice of rows by what the index has of each."""


@dataclass(frozen=True, slots=True)
class Taken:
    """The rows of samples by number, as `dataset[number]` counts the good samples that earlier selections leave."""

    numbers: range | bytes  # bytes are of ascending int64 numbers
    among_all: int | None = None  # number of the samples that a mask chose from; None: it was no mask

    @classmethod
    def of(cls, numbers: Any, num_samples: int) -> Taken:
        """Check numbers of samples. Raises TypeError, IndexError and ValueError."""
        if isinstance(numbers, range):
            array = np.array([*numbers[:1], *numbers[-1:]], np.int64)
            ascending = numbers.step > 0
        else:
            array = np.asarray(numbers)
            if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
                mask = "; of a mask, numpy.flatnonzero(mask)" if array.dtype == np.bool_ else ""
                raise TypeError(f"select takes a range, or a list or array of integers{mask}, got {numbers!r:.80}")
            array = array.astype(np.int64)
            ascending = bool((np.diff(array) > 0).all())
        wrong = array[(array < 0) | (array >= num_samples)]
        if wrong.size:
            raise IndexError(f"sample {wrong[0]} of {num_samples} samples does not exist")
        if not ascending:
            raise ValueError(
                "select takes ascending numbers, each once, because samples stay in the order of the shards: sort them "
                "(sorted(set(numbers))), and pass shuffle=rows to the DataLoader for an order of your own"
            )
        return cls(numbers if isinstance(numbers, range) else array.tobytes())

    @classmethod
    def of_mask(cls, mask: Any, num_samples: int) -> Taken:
        """Check a mask. Raises ValueError."""
        array = np.asarray(mask)
        if array.dtype != np.bool_ or array.shape != (num_samples,):
            raise ValueError(
                f"where takes one boolean for each of the {num_samples} samples, in the order of dataset.keys(), got "
                f"{array.dtype} of shape {array.shape}"
            )
        return cls(np.flatnonzero(array).astype(np.int64).tobytes(), num_samples)

    def describe(self) -> dict[str, Any]:
        if isinstance(self.numbers, range):
            return {"samples": [self.numbers.start, self.numbers.stop, self.numbers.step]}
        digest = hashlib.blake2b(self.numbers, digest_size=8).hexdigest()
        of = {} if self.among_all is None else {"of": self.among_all}
        return {"samples": digest, "count": len(self.numbers) // 8} | of

    def among(self, numbers: Rows, is_good: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return which rows are chosen, bool (num_rows,). A bad row is chosen between two samples of a range without
        steps, so that it is reported.

        Args:
            numbers: number of each row's sample; of a bad one, that of the next good sample.
        """
        if not isinstance(self.numbers, range):
            return is_good & np.isin(numbers, np.frombuffer(self.numbers, np.int64))
        start, stop, step = self.numbers.start, self.numbers.stop, self.numbers.step
        inside: NDArray[np.bool_] = (numbers >= start) & (numbers < stop)
        return inside if step == 1 else inside & is_good & ((numbers - start) % step == 0)


def first_numbers(numbers: slice) -> range | None:
    """Return the samples of a slice that do not depend on how many there are; None for another slice."""
    start, stop, step = 0 if numbers.start is None else numbers.start, numbers.stop, numbers.step or 1
    if not all(hasattr(each, "__index__") for each in (start, stop, step)):
        return None
    start, stop, step = start.__index__(), stop.__index__(), step.__index__()
    return range(start, stop, step) if 0 <= start < stop and step > 0 else None


def left_out(
    index: Index,
    selections: Sequence[Selection | Taken],
    own: OwnColumns = NO_COLUMNS,
    *,
    until: float | None = None,
) -> Rows:
    """Return the rows that not all selections choose, ascending, int64. Raises ValueError as they do; `own` are the
    user's own columns, `until` is as for `stretches`.
    """
    if not selections:
        return np.zeros(0, np.int64)
    rows: list[Rows] = []
    counted = [0] * len(selections)  # good samples before the stretch
    for start, stop in stretches(index, until=until):
        kept = np.ones(stop - start, bool)
        for at, selection in enumerate(selections):
            if not isinstance(selection, Taken):
                kept &= selection.keeps(index, start, stop, own)
                continue
            is_good = kept & ~_is_bad(index, start, stop)
            ends = counted[at] + np.cumsum(is_good & (index.piece[start:stop] == 0))
            kept &= selection.among(ends - is_good, is_good)
            counted[at] = int(ends[-1]) if ends.size else counted[at]
        rows.append(start + np.flatnonzero(~kept))
    for selection, count in zip(selections, counted, strict=True):
        if isinstance(selection, Taken) and selection.among_all not in (None, count):
            raise ValueError(
                f"the mask of where() is of {selection.among_all} samples, and there are {count} now: make it again "
                "from dataset.keys()"
            )
    return np.concatenate(rows).astype(np.int64)


def _is_bad(index: Index, start: int, stop: int) -> NDArray[np.bool_]:
    bad = index.bad_rows()
    return np.isin(np.arange(start, stop), bad[np.searchsorted(bad, start) : np.searchsorted(bad, stop)])


def stretches(index: Index, *, until: float | None = None) -> Iterator[tuple[int, int]]:
    """Yield stretches of rows [start, stop) of whole samples: short ones with `until`, a time of `time.monotonic()`
    after which TimeoutError is raised.
    """
    most = _CHUNK_ROWS if until is None else _TIMED_ROWS
    start, stop = 0, 0
    while stop < index.num_rows:
        if until is not None and time.monotonic() > until:
            raise TimeoutError(f"{stop:,} of {index.num_rows:,} rows were looked at in time")
        start, stop = stop, index.rows_of_sample(min(stop + most, index.num_rows) - 1).stop
        yield start, stop
    if not stop:
        yield 0, 0  # a selection is also checked if there are no rows


def names_of_counts(modalities: Iterable[str]) -> list[str]:
    """Return the names of the columns that every index under modalities has."""
    return [*_COUNTS, *(f"{name}_{what}" for name in modalities for what in ("tokens", "positions", "parts"))]


def _why(error: Exception) -> str:
    """Return why a filter fails; for an unknown column, how to have it."""
    reason = " ".join(str(error).split())[:200]
    unknown = re.match(r"No match for FieldRef\.Name\((.*?)\) in", reason)
    if unknown is None:
        return reason
    return (
        f"there is no column {unknown[1]!r}; if it is a field of your samples, index_fields=({unknown[1]!r},) of the "
        "ShardDataset (on the command line --index-field) has the index keep it"
    )


def columns_of(index: Index) -> dict[str, Column]:
    """Return the columns for filters: name -> a function of (start, stop) that computes the column of these rows, which
    are of whole samples. Each row has the value of its sample: the sum over its pieces.

    `tokens` of the LLM, `loss_tokens`, `text_tokens`, `bytes` of its members, `bad`, `key`, `shard` (its last
    component); for each modality `<name>_tokens`, `<name>_positions` and `<name>_parts`.
    """

    def summed(offsets: NDArray[np.int64], values: Callable[[slice], NDArray[Any]]) -> Column:
        def sums(start: int, stop: int) -> NDArray[np.int64]:
            bounds = offsets[start : stop + 1]
            running = np.cumsum(values(slice(int(bounds[0]), int(bounds[-1]))), dtype=np.int64)
            result: NDArray[np.int64] = np.diff(np.append(0, running)[bounds - bounds[0]])
            return result

        return sums

    def of_modality(code: int, column: NDArray[Any] | None = None) -> Column:
        def values(parts: slice) -> NDArray[Any]:
            is_its = index.part_modality[parts] == code
            return is_its if column is None else np.where(is_its, column[parts], 0)

        return summed(index.part_offsets, values)

    def over_pieces(column: NDArray[Any]) -> Column:
        def sums(start: int, stop: int) -> NDArray[Any]:
            values: NDArray[Any] = column[start:stop]
            if not index.is_split:
                return values.astype(np.int64)
            first = np.flatnonzero(index.piece[start:stop] == 0)
            return np.repeat(np.add.reduceat(values, first, dtype=np.int64), np.diff(first, append=stop - start))

        return sums

    def keys(start: int, stop: int) -> Any:
        import pyarrow as pa

        offsets, data = index.keys(start, stop)
        buffers = [None, pa.py_buffer(np.ascontiguousarray(offsets)), pa.py_buffer(np.ascontiguousarray(data))]
        return pa.Array.from_buffers(pa.large_string(), stop - start, buffers)

    def shards(start: int, stop: int) -> Any:
        import pyarrow as pa

        return pa.array([basename(shard.url) for shard in index.shards]).take(pa.array(index.shard[start:stop]))

    media_tokens = summed(index.part_offsets, lambda parts: index.part_tokens[parts])
    tokens = over_pieces(index.llm_tokens)
    columns: dict[str, Column] = {
        "tokens": tokens,
        "loss_tokens": over_pieces(index.loss_tokens),
        "text_tokens": lambda start, stop: tokens(start, stop) - media_tokens(start, stop),
    }
    for code, name in enumerate(index.modalities[1:], 1):
        columns[f"{name}_tokens"] = of_modality(code, index.part_tokens)
        columns[f"{name}_positions"] = of_modality(code, index.part_positions)
        columns[f"{name}_parts"] = of_modality(code)
    return columns | {
        "bytes": summed(index.member_offsets, lambda members: index.member_size[members]),
        "bad": lambda start, stop: _is_bad(index, start, stop),
        "key": keys,
        "shard": shards,
    }


def _digest(expression: pc.Expression) -> str:
    content = expression.__reduce__()[1][0]  # the bytes that pyarrow pickles
    return hashlib.blake2b(memoryview(content), digest_size=8).hexdigest()


class _Parser:
    """Converts Python syntax to an expression: columns, numbers, strings, comparisons, arithmetic, and, or, not, in."""

    def __init__(self, text: str) -> None:
        self._text = text

    def expression(self) -> pc.Expression:
        if len(self._text) > _EXPRESSION_CHARACTERS:
            raise ValueError(f"the filter has {len(self._text)} characters, above {_EXPRESSION_CHARACTERS}")
        try:
            return self._of(ast.parse(self._text.strip(), mode="eval").body)
        except (SyntaxError, RecursionError, MemoryError) as error:
            raise ValueError(f"filter {self._text!r}: not an expression: {error}") from None
        except UnicodeEncodeError as error:
            raise ValueError(f"filter {self._text!r}: a string is not valid Unicode: {error.reason}") from None

    def _of(self, node: ast.expr) -> Any:
        import pyarrow.compute as pc

        if (value := _constant(node)) is not None:
            return pc.scalar(value) if isinstance(value, bool | str) else self._number(value)
        match node:
            case ast.BoolOp(op=op, values=values):
                join = operator.and_ if isinstance(op, ast.And) else operator.or_
                return functools.reduce(join, map(self._of, values))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return ~self._of(operand)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return self._number(0) - self._of(operand)
            case ast.Compare(left=left, ops=ops, comparators=comparators):
                sides = [left, *comparators]
                links = [self._compared(sides[i], op, sides[i + 1], node) for i, op in enumerate(ops)]
                return functools.reduce(operator.and_, links)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                return _ARITHMETIC[type(op)](self._of(left), self._of(right))
            case ast.Name(id=name):
                return pc.field(name)
        raise self._not_understood(node)

    def _compared(self, left: ast.expr, op: ast.cmpop, right: ast.expr, node: ast.expr) -> Any:
        import pyarrow.compute as pc

        if isinstance(op, ast.In | ast.NotIn):
            if not isinstance(right, ast.List | ast.Tuple | ast.Set):
                raise self._not_understood(node)
            values = [_constant(item) for item in right.elts]
            kinds = {str if isinstance(value, str) else float for value in values}
            if len(kinds) != 1 or not all(isinstance(value, str | int | float) for value in values):
                raise self._not_understood(node)
            for value in values:
                self._of(ast.Constant(value))
            column = self._of(left)
            is_in = pc.if_else(column.is_valid(), column.isin(values), pc.scalar(None).cast("bool"))
            return ~is_in if isinstance(op, ast.NotIn) else is_in
        if isinstance(op, ast.Is | ast.IsNot) and isinstance(right, ast.Constant) and right.value is None:
            column = self._of(left)
            return column.is_null() if isinstance(op, ast.Is) else column.is_valid()
        one, other = self._of(left), self._of(right)
        if type(op) not in _COMPARISONS:
            raise self._not_understood(node)
        return _COMPARISONS[type(op)](one, other)

    def _number(self, value: float) -> Any:
        import pyarrow.compute as pc

        if isinstance(value, float):
            # Without the cast pyarrow compares and computes with 32 bits where they hold the value, as those of 2.5.
            return pc.scalar(value).cast("float64")
        if not -(1 << 63) <= value < 1 << 63:
            raise ValueError(f"filter {self._text!r}: {value} does not fit the 64-bit integers of columns")
        # Without the cast pyarrow gives it as few bits as it needs: 1024 * 1024 overflows.
        return pc.scalar(value).cast("int64")

    def _not_understood(self, node: ast.expr) -> ValueError:
        return ValueError(
            f"filter {self._text!r}: {ast.unparse(node)[:60]!r} is not understood; known are columns, numbers, "
            "strings, comparisons, + - * /, and, or, not, in (...), is None, is not None"
        )


def _constant(node: ast.expr) -> bool | int | float | str | None:
    """Return the value of a constant, or of a number with a sign; None for anything else."""
    match node:
        case ast.Constant(value=bool() | int() | float() | str() as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
    return None


_ARITHMETIC: Final[dict[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda left, right: left.cast("float64") / right.cast("float64"),
}
_COMPARISONS: Final[dict[type[ast.cmpop], Callable[[Any, Any], Any]]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
