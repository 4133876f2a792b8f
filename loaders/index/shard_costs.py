"""Costs of one shard under a recipe: facts + text bytes -> a table of the index, stored in the cache.

    facts --group by sample--> members --read text only--> measure() --> columns, or the error of that sample

Facts are converted to lists once, and texts are read ahead in large sequential reads, so that most of the time is spent
in the tokenizer.

Which kept counts of texts a recipe can use, sample by sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import groupby, islice, repeat
from typing import TYPE_CHECKING, Any, NamedTuple

from orchdata.loaders.errors import FieldError, StaleIndexError, StorageError
from orchdata.loaders.failures import as_field_error
from orchdata.loaders.index.kept_counts import KeptCounts, NewCounts
from orchdata.loaders.index.kept_texts import Kept, KeptTexts, layout_digest
from orchdata.loaders.index.measuring import Chunk, CostRows, Progress, Result, ShardSample, measure_chunk, read_chunks
from orchdata.loaders.index.probed import Probes, with_inner
from orchdata.loaders.index.table import Columns, TableSize, body_bytes, pack
from orchdata.loaders.index.totals import Totals, summarize
from orchdata.loaders.limits import OF_MEDIA, scan_limits
from orchdata.loaders.modalities.builtin import OTHER, TEXT
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.records import LEFT_OUT
from orchdata.loaders.samples.agreement import LAST_DOT, SEVERAL_TEXTS
from orchdata.loaders.samples.measure import Outline, part_sizes, parts_to_read, shape_of, texts_to_read, writes_between
from orchdata.loaders.samples.members import Member
from orchdata.loaders.shards.fields import RAW, SPARSE, split_at_last_dot
from orchdata.loaders.shards.shard import Facts, FactsMeta, FactsTable, ShardInfo
from orchdata.loaders.spread import Spread
from orchdata.loaders.storage.atomic import Buffer, write_whole
from orchdata.loaders.storage.sealed import Damaged, head_for, read_sealed
from orchdata.loaders.text.conversation import WORDS_SUFFIX
from orchdata.loaders.unread_names import name_of_member
from orchdata.loaders.versions import COSTS_FORMAT
from orchdata.loaders.watch import here

if TYPE_CHECKING:
    from orchdata.loaders.shards.shard import Shard


KIND = b"cost"
_NOTHING = KeptCounts()
_NOT_BYTES = (
    "the recipe requests this column, but it has neither bytes nor text, and is not read: write its values as bytes or "
    "strings, or do not request it"
)


@dataclass(frozen=True, slots=True)
class CostTable:
    """The costs of one shard, in a file of the cache, verified when it was opened.

    Attributes:
        path: the file.
        meta: of the facts that they were measured from.
        url: of the shard.
        media_root: folder of the files that its records name; empty for shards that contain their media.
        size, fields, totals: as in the index.
        digest: of the whole content.
        kinds: modalities of the recipe by their codes, text first.
        packed: its columns; if None, `body` reads and verifies them again.
        columns: (old name, new name) of each renamed field.
        container, reach: as in ShardInfo.
    """

    path: str
    url: str
    meta: FactsMeta
    size: TableSize
    fields: Sequence[str]
    totals: Totals
    digest: str
    kinds: Sequence[str]
    packed: Buffer | None = field(repr=False, compare=False)
    media_root: str = ""
    columns: tuple[tuple[str, str], ...] = ()
    container: str = ""
    key: str = ""
    reach: int = 0

    @classmethod
    def open(cls, path: str, url: str, kinds: Sequence[str], media_root: str = "") -> CostTable:
        """Read and verify the file, with its columns. Raises OSError, or ValueError if it has changed.

        The values in its columns are checked when an index is made of all tables.

        Args:
            kinds: modalities of the recipe by their codes, text first.
        """
        head, body = read_sealed(path, KIND, COSTS_FORMAT)
        if (head.values["url"], head.values["media_root"]) != (url, media_root):
            raise Damaged(f"it belongs to {head.values['url']}")
        return cls.of(path, head.values, head.digest, body, kinds)

    @classmethod
    def of(
        cls,
        path: str,
        values: dict[str, Any],
        digest: str,
        body: Buffer,
        kinds: Sequence[str],
    ) -> CostTable:
        size, meta = TableSize(**values["size"]), FactsMeta(**values["meta"])
        if memoryview(body).nbytes != body_bytes(size):
            raise Damaged(f"a table of {size} has {body_bytes(size)} bytes, there are {memoryview(body).nbytes}")
        fields, totals, root = tuple(values["fields"]), values["totals"], values["media_root"]
        return cls(path, values["url"], meta, size, fields, totals, digest, kinds, body, media_root=root)

    @property
    def shard(self) -> ShardInfo:
        meta = self.meta
        lost = meta.lost_samples, meta.lost_bytes
        how = {name: getattr(self, name) for name in ("media_root", "columns", "container", "key", "reach")}
        how["packed"] = meta.packed
        return ShardInfo(self.url, meta.size, meta.checksum, meta.version, *lost, **how)

    def without_body(self) -> CostTable:
        """Return the same table without its columns in memory."""
        return replace(self, packed=None)

    def body(self) -> Buffer:
        """Return its packed columns.

        Raises StorageError if the file was removed, StaleIndexError if it was replaced.
        """
        if self.packed is not None:
            return self.packed
        try:
            table = CostTable.open(self.path, self.url, self.kinds, self.media_root)
        except (OSError, ValueError) as error:
            code = getattr(error, "errno", None)
            raise StorageError(str(self.path), f"was removed or damaged during the build: {error}", code) from error
        if table.digest != self.digest:
            raise StaleIndexError(self.url, "was changed, and measured by another build, during this one: build again")
        return table.body()


class ShardCosts(NamedTuple):
    """The costs of one shard in memory.

    Attributes:
        fields: names for `member_field`.
        kinds: modalities by code.
    """

    columns: Columns
    fields: list[str]
    totals: Totals
    kinds: Sequence[str]

    def values(self, url: str, meta: FactsMeta, media_root: str | None) -> dict[str, Any]:
        """Return the head of a table, JSON-safe: all but its columns."""
        return {
            "url": url,
            "meta": meta.as_dict(),
            "size": self.columns.size.as_dict(),
            "fields": self.fields,
            "totals": self.totals,
            "media_root": media_root or "",
        }

    def write(self, path: str, url: str, meta: FactsMeta, media_root: str | None = None) -> CostTable:
        """Write them to a file for `CostTable.open`, which appears when it is complete. Raises StorageError."""
        values, body = self.values(url, meta, media_root), pack(self.columns)
        head, digest = head_for(KIND, COSTS_FORMAT, values, body)
        write_whole(path, body, head=head)
        return CostTable.of(path, values, digest, body, self.kinds)


def cost_shard(
    facts: Facts,
    shard: Callable[[], Shard],
    recipe: Recipe,
    probes: Probes,
    spread: Spread | None = None,
    kept: KeptCounts = _NOTHING,
    new: NewCounts | None = None,
) -> ShardCosts:
    """Measure every sample of a shard.

    A sample that cannot be used becomes a row with an error, without an exception. A split sample becomes several rows.

    Args:
        facts: of the shard.
        shard: returns the open shard; called if there is something to read.
        recipe: defines the costs.
        probes: headers of the recipe's own modalities.
        spread: idle threads that may help. The result is the same.
        kept: what is kept of the shard's counts.
        new: gets the counts to keep.

    Raises:
        ShardError: the shard can no longer be opened.
        StorageError, StaleIndexError, MemoryError: for reasons outside of the samples.
    """
    scanned, facts = facts, with_inner(facts, recipe)
    rows = CostRows(facts.table, recipe)
    progress = Progress(here(), len(facts.table))
    way_out: str | None = None

    def measured(chunk: Chunk) -> tuple[Chunk, list[Result]]:
        results = measure_chunk(chunk, recipe, facts.meta.url, progress)
        return replace(chunk, texts={}), results

    chunks = read_chunks(_samples(facts, shard, recipe, probes, kept), facts.table, shard, recipe.limits)
    alone = (measured(chunk) for chunk in chunks)
    with closing(alone if spread is None else spread.in_order(measured, chunks)) as results:
        for chunk, outcomes in results:
            for sample, (outcome, text, sizes) in zip(chunk.samples, outcomes, strict=True):
                if isinstance(outcome, tuple) and outcome[1].endswith(SEVERAL_TEXTS):
                    way_out = _way_out_of_dots(scanned.table) if way_out is None else way_out
                    outcome = outcome[0], outcome[1] + way_out
                rows.put(sample, outcome, text)
                if new is not None:
                    new.put(sample, text, sizes)
    columns = rows.columns()
    fields = list(rows.field_numbers)
    unscanned = _unscanned(facts)
    for name, count in unscanned.items():
        if count and name != LEFT_OUT:
            rows.unread.add((name_of_member(name),), count=count)
    totals = summarize(columns, recipe.kinds, {**unscanned, **rows.ignored}, rows.unread.totals())
    return ShardCosts(columns, fields, totals, recipe.kinds)


def _way_out_of_dots(table: FactsTable) -> str:
    """Return LAST_DOT if keys of a tar that end at the last dot make more samples, all with the same fields."""
    fields: dict[str, set[str]] = {}
    for name in map(".".join, zip(table.key, table.field, strict=True)):
        key, field = split_at_last_dot(name) or ("", "")
        fields.setdefault(key, set()).add(field)
    is_more = max(table.encoding) <= SPARSE and len(fields) > len({*table.key})
    return LAST_DOT if is_more and len({*map(frozenset, fields.values())}) == 1 else ""


def _unscanned(facts: Facts) -> dict[str, int]:
    """Return the Parquet columns without rows in the facts, with the number of values of each."""
    ignored = facts.meta.ignored
    return {name: ignored[name] for name in ignored.keys() - set(facts.table.field)} if ignored else {}


def _samples(
    facts: Facts, shard: Callable[[], Shard], recipe: Recipe, probes: Probes, kept: KeptCounts
) -> Iterator[ShardSample]:
    table = facts.table
    ordinals, errors = table.sample, table.errors
    fields, keys = table.field, table.key
    columns = probes.under_recipe(facts, fields, shard)
    kinds, errors = columns.kinds, columns.errors
    row_errors = repeat(None) if not errors else map(errors.get, range(len(ordinals)))
    members = map(Member, fields, kinds, columns.headers, table.size, row_errors)
    unscanned = sorted(name.removesuffix(WORDS_SUFFIX) for name in _unscanned(facts))
    lost = next((name for name in unscanned if recipe.asks_for(name)), None)
    # Most samples have the same layout: members with text, parts to count from bytes, and digests.
    known: dict[tuple[Any, ...], tuple[list[int], list[tuple[str, int]], str, str]] = {}
    usable = None if kept.texts is None else UsableTexts(kept.texts, facts.table, recipe)
    start = 0
    for number, (_, ordinal) in enumerate(groupby(ordinals)):
        mine = list(islice(members, sum(1 for _ in ordinal)))
        first, start = start, start + len(mine)
        error = _shard_error(mine) if errors else None
        if lost is not None:
            error = FieldError(lost, _NOT_BYTES)
        if error is not None:
            yield ShardSample(keys[first], first, mine, error=error)
            continue
        layout = (*fields[first:start], *kinds[first:start])
        if layout not in known:
            try:
                digests = layout_digest(layout), layout_digest(fields[first:start])
                known[layout] = (texts_to_read(mine, recipe), parts_to_read(mine, recipe), *digests)
            except Exception as problem:  # noqa: BLE001 - an exception while measuring a sample fails that sample
                yield ShardSample(keys[first], first, mine, error=as_field_error(problem, "measured"))
                continue
        wanted, parts, digest, names = known[layout]
        sizes = kept.sizes_of(number, names) if parts and kept.sizes else {}
        if parts:
            wanted = sorted({*wanted, *(member for name, member in parts if (name, member) not in sizes)})
        sample = ShardSample(keys[first], first, mine, wanted, digest, names, sizes=sizes)
        yield sample if usable is None else usable.used(sample, number)


def _shard_error(members: Sequence[Member]) -> FieldError | None:
    """Return the error of a whole sample; the error of one field only matters if the field is used."""
    for member in members:
        if member.error is not None and member.kind == OTHER:
            return FieldError(member.field, member.error)
    return None


class UsableTexts:
    """The kept texts of a shard, for one recipe.

    Args:
        table: the facts of the shard.
    """

    def __init__(self, texts: KeptTexts, table: FactsTable, recipe: Recipe) -> None:
        self._texts = texts
        self._table = table
        self._recipe = recipe
        self._limit = recipe.limits.text_bytes
        now = scan_limits(recipe.limits)
        self._is_lower = any(now[name] < limit for name, limit in texts.limits.items() if name in now.keys() - OF_MEDIA)
        self._read = {code for code, name in enumerate(recipe.kinds) if code != TEXT and not self._has_header(name)}

    def _has_header(self, name: str) -> bool:
        return name not in self._recipe.counted_from_bytes

    def used(self, sample: ShardSample, number: int) -> ShardSample:
        """Return the `number`-th sample of the shard, with its kept text if the recipe can use that: then only media
        with a size that no header contains are read.
        """
        kept = self._texts.of(number, sample.layout)
        if kept is None or not self._is_within(sample) or not self._has_shape(sample, kept):
            return sample
        return replace(sample, wanted=[at for at in sample.wanted if sample.members[at].kind in self._read], kept=kept)

    def _is_within(self, sample: ShardSample) -> bool:
        """Whether the texts can be read under the recipe's limits: if one is lower than before, only sizes that facts
        contain are known to be below it.
        """
        num_bytes = 0
        for at in sample.wanted:
            member = sample.members[at]
            if member.kind in self._read:
                continue
            if member.error is not None:
                return False
            if self._is_lower:
                num_bytes += member.size
                if self._table.encoding[sample.start + at] != RAW:
                    return False
        return num_bytes <= self._limit

    def _has_shape(self, sample: ShardSample, kept: Kept) -> bool:
        """Whether the text was tokenized with what the recipe's modalities put into it, and has the recipe's pieces."""
        outline, recipe = kept.counted, self._recipe
        if not isinstance(outline, Outline):
            return True
        if not outline.is_of_pieces(recipe):
            return False
        names = {name for name, _ in outline.parts}
        if not any(writes_between(recipe.modalities[name]) for name in names):
            return kept.shape == 0
        if any(part not in sample.sizes and not self._has_header(part[0]) for part in outline.parts):
            return False
        try:
            sizes = part_sizes(outline.parts, sample.members, {}, recipe, sample.sizes)
            return shape_of(outline.parts, sizes, recipe) == kept.shape
        except FieldError:
            return True  # the same error is raised when it is counted
