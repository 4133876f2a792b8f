"""What is kept of one shard in the cache folder, each kind in a sealed file, and whether it still holds.

    facts     named by the shard; for its size, its time or etag, and the rules of this release (`facts.load_facts`)
    headers   of a user's modality, named by shard and probe, bound to the facts (`facts.Probes`)
    counts    of texts, and sizes of parts that no header contains: named by the shard and the fingerprint of what they
              depend on, bound to the facts (`KeptCounts`)
    costs     under a recipe: a table of the index (`costs.CostTable`)

A text is tokenized once for all recipes that read it alike, for all sizes of media and all limits. Only what was
counted is kept: a sample that fails before is measured again with each new recipe.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, islice
from operator import sub
from typing import Any, Final

import pyarrow as pa

from orchdata.loaders.errors import FieldError
from orchdata.loaders.index.index import SOURCE, check_function_of
from orchdata.loaders.limits import OF_MEDIA, scan_limits
from orchdata.loaders.modalities.modality import PartSize
from orchdata.loaders.recipe import Recipe, plain_fields, versions
from orchdata.loaders.records import LeftOut
from orchdata.loaders.samples.measure import Outline, Sizes, part_sizes, shape_of, writes_between
from orchdata.loaders.samples.members import Member
from orchdata.loaders.samples.spans import TextRun
from orchdata.loaders.shards.fields import RAW
from orchdata.loaders.shards.shard import Facts
from orchdata.loaders.storage.local import Buffer, write_whole
from orchdata.loaders.storage.sealed import read_sealed, seal
from orchdata.loaders.unread_names import UnreadNames

_COMPRESSED_BYTES: Final = 64 << 10
KEPT_FORMAT: Final = 2
"""Layout of what is kept of one shard: facts, counts and costs. After an increase, it is made again."""


def keep(path: str, kind: bytes, values: Mapping[str, Any], *bodies: Buffer | pa.Buffer) -> None:
    """Store values and a body, given in pieces, compressed if it is large. Raises StorageError."""
    pieces = [memoryview(body).cast("B") for body in bodies]
    size = sum(piece.nbytes for piece in pieces)
    if size > _COMPRESSED_BYTES:
        packed = pa.BufferOutputStream()
        with pa.CompressedOutputStream(packed, "zstd") as stream:
            for piece in pieces:
                stream.write(piece)
        values, pieces = {**values, "uncompressed_bytes": size}, [memoryview(packed.getvalue())]
    write_whole(path, seal(kind, KEPT_FORMAT, values, pieces)[0])


def kept(path: str, kind: bytes) -> tuple[dict[str, Any], Buffer | pa.Buffer] | None:
    """Return what `keep` stored; None if it is absent, damaged or of another version."""
    try:
        head, body = read_sealed(path, kind, KEPT_FORMAT)
        if (size := head.values.get("uncompressed_bytes")) is not None:
            return head.values, pa.decompress(pa.py_buffer(body), size, codec="zstd")
        return head.values, body
    except (OSError, ValueError, pa.ArrowException):
        return None


Text = Outline | FieldError | LeftOut
"""What is kept of a sample's text: its outline, the error of its tokenizer, or that the recipe's function leaves the
sample out."""


@dataclass(slots=True)
class ShardSample:
    """One sample of the facts: its members are the rows from `start` on, those in `wanted` are read."""

    key: str
    start: int
    members: Sequence[Member]
    wanted: Sequence[int] = ()
    layout: str = ""  # digest of the names and kinds of its members: the text of another layout is another text
    names: str = ""  # digest of their names alone
    error: FieldError | None = None  # of the whole sample
    kept: Text | None = None  # of its text, if that can be used
    sizes: Sizes = field(default_factory=dict)  # that are kept of its parts


class SampleLists:
    """Integers for each sample of a shard, bound to a layout of the sample, without an object for each sample."""

    def __init__(self, layouts: Iterable[str] = (), num_samples: int = 0, body: Buffer | pa.Buffer = b"") -> None:
        self._layouts = {layout: number for number, layout in enumerate(layouts)}
        self._numbers, lengths = array("q"), array("q")
        lengths.frombytes(memoryview(body)[: 8 * num_samples])
        self._numbers.frombytes(memoryview(body)[8 * num_samples :])
        self._ends = array("q", accumulate(lengths))

    def put(self, layout: str, numbers: Iterable[int]) -> None:
        """Add the next sample."""
        self._numbers.append(self._layouts.setdefault(layout, len(self._layouts)))
        self._numbers.extend(numbers)
        self._ends.append(len(self._numbers))

    def get(self, number: int, layout: str) -> list[int]:
        """Return the integers of a sample; none if it had another layout."""
        if number >= len(self._ends):
            return []
        its_layout, *numbers = self._numbers[self._ends[number - 1] if number else 0 : self._ends[number]]
        return numbers if its_layout == self._layouts.get(layout) else []

    def stored(self) -> tuple[dict[str, Any], list[memoryview]]:
        """Return the first arguments by name, JSON-safe, and the body in pieces: numbers of integers, and these."""
        lengths = array("q", map(sub, self._ends, chain([0], self._ends)))  # running sums compress badly
        return {"layouts": [*self._layouts], "num_samples": len(self._ends)}, [
            memoryview(lengths),
            memoryview(self._numbers),
        ]


_KIND: Final = b"cnts"
_TEXT, _CHAT, _LEFT_OUT, _FAILED = range(4)
_TEXTS: Final = ""
"""Among the names of modalities that count from bytes: the texts."""
MOST: Final = 2**63 - 1


class KeptCounts:
    """The counts of a shard under one recipe: those that are kept, and those to keep, sample by sample.

    `paths` are the files, by `_TEXTS` and the names of modalities that count from bytes; with `force`, they are not
    read. Raises FunctionError if texts were counted with another function of the user's.
    """

    def __init__(self, recipe: Recipe, facts: Facts, paths: Mapping[str, str], *, force: bool = False) -> None:
        self._recipe = recipe
        self._encodings = facts.table.encoding
        self._of = facts.identity()
        self._paths = paths
        limits_now = {name: float(most) for name, most in plain_fields(recipe.limits).items()}  # inf was a string
        self._now = {_TEXTS: scan_limits(recipe.limits), **dict.fromkeys(recipe.counted_from_bytes, limits_now)}
        self._values: dict[str, Any] = {}  # of the texts
        self._lists: dict[str, SampleLists] = {}
        for name in () if force else paths:
            self._read(name)
        # A text is used under lower limits only if the facts contain its size.
        limits, now = self._values.get("limits", {}), self._now[_TEXTS]
        self._is_lower = any(now[name] < limit for name, limit in limits.items() if name in now.keys() - OF_MEDIA)
        # Counts hold under other verdicts, refusals do not.
        judged, counted = (a == b for a, b in zip(self._values.get("rules", (0, 0)), versions(), strict=True))
        self._valid = {_TEXT: counted, _CHAT: counted, _LEFT_OUT: judged and counted, _FAILED: judged and counted}
        self._new = {name: SampleLists() for name in paths}
        self._codes = {name: code for code, name in enumerate(recipe.kinds)}
        self._read_kinds = {self._codes[name] for name in recipe.counted_from_bytes}
        self._names = UnreadNames()
        self._failed: list[tuple[int, str, str]] = []
        self._num_new = 0
        self._has_texts = self._has_sizes = False

    def _read(self, name: str) -> None:
        found = kept(self._paths[name], _KIND)
        if found is None or found[0]["of"] != self._of:
            return
        values, limits, now = found[0], found[0]["limits"], self._now[name]
        if name == _TEXTS:
            check_function_of({SOURCE: values["source"]}, self._recipe)
            self._values = values
            values["failed"] = {number: FieldError(*error) for number, *error in values["failed"]}
            values["names"] = {number: unread for unread, number in values["names"].items()}
        elif limits.keys() != now.keys() or any(now[each] < limits[each] for each in limits):
            return
        self._lists[name] = SampleLists(values["layouts"], values["num_samples"], found[1])

    def sizes_of(self, number: int, names: str) -> Sizes:
        """Return the sizes that are kept of the parts of the `number`-th sample, by a digest of its members' names."""
        sizes: Sizes = {}
        for name, lists in self._lists.items():
            left = iter(lists.get(number, names) if name != _TEXTS else ())
            for member in left:
                positions, tokens, rows, length = islice(left, 4)
                sizes[name, member] = PartSize(positions, tokens, rows, tuple(islice(left, length)))
        return sizes

    def used(self, sample: ShardSample, number: int) -> ShardSample:
        """Return the `number`-th sample of the shard, with its kept text if the recipe can use that: then only media
        with a size that no header contains are read.
        """
        text = self._text_of(number, sample.layout)
        if text is None or not self._is_within(sample) or not self._has_shape(sample, text):
            return sample
        return replace(sample, wanted=[at for at in sample.wanted if self._is_counted(sample, at)], kept=text)

    def put(self, sample: ShardSample, text: Text | None, sizes: Sizes) -> None:
        """Add what is known of the next sample of the shard."""
        numbers: list[int] = []
        if isinstance(text, Outline):
            numbers = _encoded(text, self._codes, self._names.add(text.unread) if text.unread else [])
        elif isinstance(text, FieldError):
            self._failed.append((self._num_new, text.field, text.reason))
            numbers = [_FAILED]
        elif text is not None:
            numbers = [_LEFT_OUT]
        for name, lists in self._new.items():
            if name == _TEXTS:
                lists.put(sample.layout, numbers)
                continue
            mine = [(at, each) for (its, at), each in sizes.items() if its == name and max(*each[:3], *each[3]) <= MOST]
            lists.put(sample.names, (n for at, each in mine for n in (at, *each[:3], len(each[3]), *each[3])))
        self._num_new += 1
        self._has_texts = self._has_texts or text is not sample.kept
        self._has_sizes = self._has_sizes or len(sizes) > len(sample.sizes)

    def write(self) -> None:
        """Keep what is new. Raises StorageError."""
        for name, lists in self._new.items():
            if not (self._has_texts if name == _TEXTS else self._has_sizes):
                continue
            values, bodies = lists.stored()
            values |= {"of": self._of, "limits": self._now[name]}
            if name == _TEXTS:
                record, before = self._recipe.record, self._values.get("limits", {})
                values |= {
                    "limits": {each: max(most, before.get(each, most)) for each, most in self._now[name].items()},
                    "source": record.digest if record is not None and record.digest else "",
                    "rules": versions(),
                    "modalities": [*self._codes],
                    "names": self._names.numbers(),
                    "failed": self._failed,
                }
            keep(self._paths[name], _KIND, values, *bodies)

    def _text_of(self, number: int, layout: str) -> Text | None:
        numbers = self._lists[_TEXTS].get(number, layout) if _TEXTS in self._lists else []
        if not numbers or not self._valid[numbers[0]]:
            return None
        if numbers[0] == _LEFT_OUT:
            return LeftOut()
        if numbers[0] == _FAILED:
            error: FieldError = self._values["failed"][number]
            return error
        return _decoded(numbers, self._values["modalities"], self._values["names"])

    def _is_counted(self, sample: ShardSample, at: int) -> bool:
        return sample.members[at].kind in self._read_kinds

    def _is_within(self, sample: ShardSample) -> bool:
        """Whether the texts can be read under the recipe's limits."""
        texts = [at for at in sample.wanted if not self._is_counted(sample, at)]
        if any(sample.members[at].error is not None for at in texts):
            return False
        if not self._is_lower:
            return True
        num_bytes = sum(sample.members[at].size for at in texts)
        is_raw = all(self._encodings[sample.start + at] == RAW for at in texts)
        return is_raw and num_bytes <= self._recipe.limits.text_bytes

    def _has_shape(self, sample: ShardSample, text: Text) -> bool:
        """Whether the text was tokenized with what the recipe's modalities put into it, and has the recipe's pieces."""
        recipe = self._recipe
        if not isinstance(text, Outline):
            return True
        if not text.is_of_pieces(recipe):
            return False
        if not any(writes_between(recipe.modalities[name]) for name, _ in text.parts):
            return text.shape == 0
        if any(part not in sample.sizes and part[0] in recipe.counted_from_bytes for part in text.parts):
            return False
        try:
            sizes = part_sizes(text.parts, sample.members, {}, recipe, sample.sizes)
            return shape_of(text.parts, sizes, recipe) == text.shape
        except FieldError:
            return True  # the same error is raised when it is counted


def _encoded(text: Outline, codes: Mapping[str, int], names: Sequence[int]) -> list[int]:
    """Return an outline as integers, with the codes of modalities and the numbers of its unread names."""
    parts = [number for name, member in text.parts for number in (codes[name], member)]
    spans: list[int] = []
    for span in text.spans:
        if isinstance(span, TextRun):
            spans += (-1 - span.loss - 2 * span.leads, span.num_tokens, span.first_id)
        else:
            spans += (span, 0, 0)
    lists: list[Sequence[int]] = [text.texts, parts, text.starts, names, spans]
    listed = chain.from_iterable((len(each), *each) for each in lists)
    return [_CHAT if text.is_chat else _TEXT, text.shape, text.cut_at, text.others, *listed]


def _decoded(numbers: list[int], modalities: Sequence[str], names: Mapping[int, str]) -> Outline:
    """Return the outline of `_encoded`. Of unread names the frequent ones are known."""
    state, shape, cut_at, others = numbers[:4]
    left = iter(numbers[4:])
    texts, parts, starts, unread, spans = [[*islice(left, next(left))] for _ in range(5)]
    runs: list[TextRun | int] = []
    for kind, tokens, first_id in zip(spans[::3], spans[1::3], spans[2::3], strict=True):
        leads, loss = divmod(-1 - kind, 2)
        runs.append(kind if kind >= 0 else TextRun(tokens, bool(loss), bool(leads), first_id))
    known = tuple(names[number] for number in unread if number in names)
    return Outline(
        tuple((modalities[code], member) for code, member in zip(parts[::2], parts[1::2], strict=True)),
        tuple(texts),
        state == _CHAT,
        tuple(runs),
        tuple(starts),
        cut_at,
        shape,
        known,
        others + len(unread) - len(known),
    )
