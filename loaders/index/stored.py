"""A stored sample: one row of the index, with access to its bytes.

A piece of a split sample is tokenized alone if the index allows it. Otherwise the whole text is tokenized, and cached
with the open shards, so that later pieces need not read and tokenize it again.

What the samples of a step need of objects of storage is asked for before any of them is decoded: `read_ahead`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.errors import BLANK, DataError, DecodeError, FieldError, ShardError, StaleIndexError
from orchdata.loaders.field_names import VALUE, bare_name, is_kept_as
from orchdata.loaders.generators import Pass, ShardIdentity
from orchdata.loaders.index.index import Index
from orchdata.loaders.memory import room
from orchdata.loaders.modalities.modality import PartSize, counts_from_header, read_header
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.records import ADDED_FIELDS, RECORD_FIELD
from orchdata.loaders.samples.compose import Composition, composition_of, text_members
from orchdata.loaders.samples.members import (
    Fields,
    KeptValue,
    has_keys,
    is_cell_without_content,
    is_made,
    json_value,
    kept_values,
    key_of,
    plain_value,
    uses_of,
)
from orchdata.loaders.samples.record import MadeSample, made_sample
from orchdata.loaders.samples.sample import Sample, TextPart, decode_sample
from orchdata.loaders.samples.spans import (
    SizeOf,
    SizesInTurn,
    Span,
    TextSpan,
    Window,
    divided,
    num_tokens,
    unpacked,
)
from orchdata.loaders.shards.container import Container
from orchdata.loaders.shards.fields import NAMED
from orchdata.loaders.shards.open import NO_CONTAINERS, OpenShards
from orchdata.loaders.shards.shard import ShardInfo
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.files import PLAIN_FILES, Files
from orchdata.loaders.storage.remote import requests
from orchdata.loaders.storage.remote.urls import is_remote
from orchdata.loaders.storage.storage import basename
from orchdata.loaders.text.preprocessor import WHY_COUNTS_DIFFER

Spec = tuple[int, int, int, str]
"""Where a member is, as `Index.read_spec` says."""
_SPAN_BYTES: Final = 256
"""Memory of a span without its token ids."""
_LOOKED_AT: Final = 32
"""Records of a data set that are read to see their keys."""


class StoredSample:
    """One row of the index, with access to its bytes; with `whole`, the sample whose first piece it is."""

    _made_sample: MadeSample | None = None

    def __init__(self, index: Index, shards: OpenShards, row: int, *, whole: bool = False) -> None:
        self.row = row
        self._rows = index.rows_of_sample(row)
        self._whole = whole
        self._info = index.shard_of(row)
        self.shard = self._info.url
        self.members = index.members(row)
        self.parts = index.part_range(row)
        self._index = index
        self._shards = shards
        self._name = (index.fingerprint, index.build_id, self._rows.start)
        self._is_undivided = whole or len(self._rows) == 1
        needs_whole_text = not self._is_undivided and self._window is None
        self._cached: list[list[Span]] | None = shards.texts.get(self._name) if needs_whole_text else None

    @cached_property
    def _window(self) -> Window | None:
        """The range of a piece's text; None if it cannot be tokenized alone."""
        row, begins = self.row, self._index.text_start
        if begins[row] < 0:
            return None
        start, skipped = unpacked(int(begins[row]))
        stop = None if row + 1 == self._rows.stop else unpacked(int(begins[row + 1]))[0]
        return Window(start, stop, skipped, int(self._index.llm_tokens[row]))

    @property
    def piece(self) -> int:
        """The number of the piece in its sample, from 0."""
        return self.row - self._rows.start

    @cached_property
    def key(self) -> str:
        return self._index.key(self.row)

    def member_of(self, part: int) -> int:
        """Return the index of a part's member in the sample."""
        return self._index.member_of(part, len(self.members))

    def read(
        self, recipe: Recipe, *, text: bool = True, parts: Iterable[int] | None = None, kept: bool = False
    ) -> dict[int, bytes | memoryview]:
        """Read the members that the recipe uses. Return payloads by member. Raises DataError.

        Args:
            text: whether to read those of its text, for `spans`; cached texts are not read.
            parts: the parts to read; default: all.
            kept: whether to read the fields that the recipe keeps. A record that a function of the user's made is then
                read as it was before, too, under `~member`.
        """
        if self.row in self._shards.blank:
            raise DataError(self.shard, self.key, "*", BLANK)
        specs = self._places(recipe, text=text, parts=parts, kept=kept)
        self._index.check_unchanged()
        if not specs:
            return {}
        distinct = list(dict.fromkeys(specs.values()))  # some members share their bytes
        try:
            contents = self._shards.get(self.shard, self._info, recipe.record).read_many(distinct)
        except FieldError as error:
            self.refuse_moved(error)
            raise error.at(self.shard, self.key) from error.__cause__
        used = dict.fromkeys(spec for member, spec in specs.items() if member >= 0)
        self._shards.reads.used.add(sum(size for _, size, _, _ in used))
        by_spec = dict(zip(distinct, contents, strict=True))
        payloads = {member: by_spec[spec] for member, spec in specs.items()}
        if self._info.moved_media:
            self._check_headers(recipe, specs, payloads)
        return payloads

    def _check_headers(
        self, recipe: Recipe, specs: Mapping[int, Spec], payloads: Mapping[int, bytes | memoryview]
    ) -> None:
        """Raise StaleIndexError if a file that the record names has another header than in the place where it was
        indexed: nothing else is known of it but its size, which was compared.
        """
        for part in self.parts:
            member = self.member_of(part)
            if member not in specs or specs[member][2] != NAMED:
                continue
            modality, data = recipe.modalities[self._index.modality_of(part)], payloads[member]
            if not counts_from_header(modality):
                continue
            field, then = self.members[member].field, self.members[member].header
            try:
                now = read_header(type(modality), len(data), lambda size: bytes(data[:size]), recipe.limits)  # noqa: B023
            except DecodeError as error:
                raise self._other_file(field, error.reason) from None
            if tuple(map(int, now)) != then[: len(now)]:
                raise self._other_file(field, f"its header says {now}, {then[: len(now)]} when it was indexed")

    def _other_file(self, field: str, reason: str) -> StaleIndexError:
        return StaleIndexError(
            self.shard,
            f"sample {self.key!r}, field {field!r}: the file is not the one that was indexed in another place under "
            f"this name ({reason}): run `orchdata index` for this place",
        )

    def ranges(
        self, recipe: Recipe, *, text: bool = True, parts: Iterable[int] | None = None, kept: bool = False
    ) -> list[Spec]:
        """Return what `read` with the same arguments reads of the shard, for `Shard.expect`."""
        return list(dict.fromkeys(self._places(recipe, text=text, parts=parts, kept=kept).values()))

    def refuse_moved(self, error: FieldError) -> None:
        """Raise StaleIndexError for a failure where files that records name are in another place: they may be others,
        and no sample is to blame.
        """
        if self._info.moved_media:
            raise StaleIndexError(
                self.shard,
                f"sample {self.key!r} cannot be read as it was indexed in another place under this name (field "
                f"{error.field!r}: {error.reason}): run `orchdata index` for this place",
            ) from None

    def _places(self, recipe: Recipe, *, text: bool, parts: Iterable[int] | None, kept: bool) -> dict[int, Spec]:
        """Return where the members to read are."""
        before: tuple[int, ...] = ()
        wanted = {self.member_of(part) for part in (self.parts if parts is None else parts)}
        if kept:
            uses = uses_of(self.members, recipe)
            wanted.update(uses.kept, uses.records, uses.made)
            if recipe.record is not None:
                before = tuple(at for at in uses.records if self.members[at].field == RECORD_FIELD)
        needed = sorted(wanted.union(text_members(self.members, recipe) if text and self._cached is None else ()))
        all_specs = self._index.read_spec(self.row)
        specs = {member: all_specs[member] for member in needed}
        return specs | {~at: (*all_specs[at][:3], all_specs[at][3] + VALUE) for at in before}

    def spans(self, recipe: Recipe, payloads: Mapping[int, bytes | memoryview], size_of: SizeOf) -> list[Span]:
        """Return the spans of the row's sequence, from what `read` returned. Raises FieldError as `composition_of` and
        `divided`, and for all pieces of a sample if the counts of any piece differ from the index.
        """
        if self._is_undivided:
            spans = composition_of(self.members, payloads, recipe, self._made(recipe, payloads)).spans(recipe, size_of)
            return spans if len(self._rows) > 1 else divided(spans, recipe)[0]
        if self._window is not None:
            made = self._made(recipe, payloads)
            return composition_of(self.members, payloads, recipe, made).whole(recipe, size_of).window(self._window)
        pieces = self._cached
        if pieces is None:
            pieces = self._shards.texts.made(self._name, partial(self._pieces, recipe, payloads, size_of))
        return pieces[self.piece]

    def composition(self, recipe: Recipe) -> Composition:
        """Return the sample's text and media in order. Raises DataError or FieldError."""
        payloads = self.read(recipe, parts=())
        return composition_of(self.members, payloads, recipe, self._made(recipe, payloads))

    def look(self, recipe: Recipe) -> tuple[list[Span], dict[int, PartSize]]:
        """Return the spans of the row, and the size of each part by its member, without reading media. Raises DataError
        or FieldError if decoding would raise it for the text.
        """
        sizes = SizesInTurn(self._index.sizes(self.parts, recipe))
        spans = self.spans(recipe, self.read(recipe, parts=()), sizes)
        sizes.check_none_left()
        self._check_counts([span.loss_mask() for span in spans if isinstance(span, TextSpan)], recipe)
        return spans, sizes.by_member

    def token_ids(self, recipe: Recipe, payloads: Mapping[int, bytes | memoryview]) -> NDArray[np.int32]:
        """Return the token ids of a row of text alone, (llm_tokens,). Raises FieldError as `spans`, and if the counts
        differ from the index.
        """
        sizes = SizesInTurn(self._index.sizes(self.parts, recipe))
        spans = [span for span in self.spans(recipe, payloads, sizes) if isinstance(span, TextSpan)]
        self._check_counts([span.loss_mask() for span in spans], recipe)
        return np.concatenate([np.zeros(0, np.int32), *(span.token_ids for span in spans)])

    def _pieces(
        self, recipe: Recipe, payloads: Mapping[int, bytes | memoryview], size_of: SizeOf
    ) -> tuple[list[list[Span]], int]:
        """Return the spans of all pieces, and the bytes that they take."""
        spans = composition_of(self.members, payloads, recipe, self._made(recipe, payloads)).spans(recipe, size_of)
        pieces = divided(spans, recipe)
        texts = [[span for span in piece if isinstance(span, TextSpan)] for piece in pieces]
        mine = slice(self._rows.start, self._rows.stop)
        self._expect("pieces", len(pieces), len(self._rows), recipe)
        tokens = [num_tokens(piece) for piece in texts]
        self._expect("tokens", sum(tokens), int(self._index.llm_tokens[mine].sum()), recipe)
        for counted, indexed in zip(texts, self._index.loss_tokens[mine].tolist(), strict=True):
            self._expect("loss tokens in a piece", sum(span.num_loss_tokens for span in counted), indexed, recipe)
        return pieces, sum(span.token_ids.nbytes + _SPAN_BYTES for piece in texts for span in piece)

    def text_field(self, recipe: Recipe) -> str:
        """Return the field that errors of its text name."""
        texts = text_members(self.members, recipe)
        return self.members[texts[0]].field if texts else "*"

    def generator(self, of: Pass, number: int) -> np.random.Generator:
        """Return a new generator of the sample's part with this number, from 0, in a pass."""
        return of.generator(ShardIdentity(basename(self.shard), self._info.size), self.key, number)

    def decode(self, recipe: Recipe, of: Pass = Pass()) -> Sample:  # noqa: B008 - a frozen value
        """Decode the sample, or the piece, with all its parts, as in a pass. Raises DataError, or FieldError."""
        payloads = self.read(recipe, kept=True)
        sizes = self._index.sizes(self.parts, recipe)
        spans_of = partial(self.spans, recipe, payloads)
        parts = decode_sample(self.members, payloads, sizes, recipe, spans_of, partial(self.generator, of))
        self._check_counts([part.loss for part in parts if isinstance(part, TextPart)], recipe)
        if not self._is_undivided:  # copy the ids that are cached for other pieces
            parts = tuple(
                replace(part, token_ids=part.token_ids.copy()) for part in parts if isinstance(part, TextPart)
            )
        return Sample(self.shard, self.key, parts, self._kept_fields(recipe, payloads), self.piece)

    def _kept_fields(self, recipe: Recipe, payloads: Mapping[int, bytes | memoryview]) -> dict[str, KeptValue]:
        """Return the fields that the recipe keeps: bytes as stored; values of keys and of other columns."""
        if not recipe.keep:
            return {}
        kept = self._kept_members(recipe, payloads, decoded=False)
        fields = {
            field if isinstance(value, bytes) else bare_name(field): plain_value(value, field)
            for field, value in kept.items()
        }
        if uses_of(self.members, recipe).records:
            names = [name for name in recipe.keep if not any(is_kept_as(field, name) for field in fields)]
            values = kept_values(names, {}, list(self.records(recipe, payloads)))
            fields |= {name: plain_value(value, name) for name, value in values.items() if value is not None}
        return fields | self._made_values(recipe, payloads)

    def kept_values(self, recipe: Recipe, payloads: Mapping[int, bytes | memoryview]) -> dict[str, KeptValue]:
        """Return the values of the fields that the recipe keeps, by its names, of what `read` with `kept` returned."""
        values = self._kept_members(recipe, payloads, decoded=True)
        records = list(self.records(recipe, payloads)) if uses_of(self.members, recipe).records else ()
        plain = {name: plain_value(value, name) for name, value in kept_values(recipe.keep, values, records).items()}
        return plain | self._made_values(recipe, payloads)

    def made_fields(self, recipe: Recipe, payloads: Mapping[int, bytes | memoryview]) -> Mapping[str, Any]:
        """Return the fields that the user's function adds, of what `read` with `kept` returned. Raises FieldError."""
        uses = uses_of(self.members, recipe)
        if not uses.made:
            return {}
        made = self._made(recipe, payloads)
        record: Any = json_value(RECORD_FIELD, payloads[uses.made[0]]) if made is None else made.record
        fields = record.get(ADDED_FIELDS) if isinstance(record, dict) else None
        return fields if isinstance(fields, dict) else {}

    def _made(self, recipe: Recipe, payloads: Mapping[int, bytes | memoryview]) -> MadeSample | None:
        """Return what the user's function makes of the members; it is called once. None: it has no part in them."""
        if self._made_sample is None and is_made(self.members, recipe):
            self._made_sample = made_sample(Fields(self.members, payloads, recipe, uses_of(self.members, recipe)))
        return self._made_sample

    def _made_values(self, recipe: Recipe, payloads: Mapping[int, bytes | memoryview]) -> dict[str, KeptValue]:
        """Return those of `Recipe.keep` among the fields that the user's function adds."""
        made = self.made_fields(recipe, payloads)
        keys = {name: key for name in recipe.keep if (key := key_of(name, made)) is not None}
        return {name: plain_value(made[key], name) for name, key in keys.items()}

    def _kept_members(
        self, recipe: Recipe, payloads: Mapping[int, bytes | memoryview], *, decoded: bool
    ) -> dict[str, KeptValue]:
        """Return the value of each member that the recipe keeps: of JSON, else its bytes; `decoded` if it is text."""
        specs, shard = self._index.read_spec(self.row), self._shards.get(self.shard, self._info, recipe.record)
        values: dict[str, KeptValue] = {}
        for at in uses_of(self.members, recipe).kept:
            field, data, name = self.members[at].field, bytes(payloads[at]), specs[at][3]
            if is_cell_without_content(field, len(data)) or shard.is_json(name):
                values[field] = json_value(field, data)
                continue
            values[field] = data
            if decoded and shard.is_text(name):
                try:
                    values[field] = data.decode()
                except UnicodeDecodeError as error:
                    raise FieldError(field, f"a column of text that is not UTF-8: {error}") from error
        return values

    def records(self, recipe: Recipe, payloads: Mapping[int, bytes | memoryview]) -> Iterator[dict[str, Any]]:
        """Yield the JSON objects whose keys are kept, before a function of the user's. Raises FieldError."""
        for at in uses_of(self.members, recipe).records:
            record = json_value(self.members[at].field, payloads.get(~at, payloads[at]))
            if isinstance(record, dict):
                yield record

    def _check_counts(self, losses: Sequence[NDArray[np.bool_]], recipe: Recipe) -> None:
        """Raise FieldError if the text, with these loss masks, yields other counts than the index, by which steps are
        planned.
        """
        rows = self._rows if self._whole else range(self.row, self.row + 1)
        llm_tokens, indexed_loss = (
            column[rows.start : rows.stop].astype(np.int64)
            for column in (self._index.llm_tokens, self._index.loss_tokens)
        )
        media_tokens = int(self._index.part_tokens[self.parts.start : self.parts.stop].sum())
        loss = np.concatenate([np.zeros(0, np.bool_), *losses])
        self._expect("tokens", len(loss) + media_tokens, int(llm_tokens.sum()), recipe)
        if len(rows) > 1:  # the first token of a piece carries no loss
            loss[np.cumsum(llm_tokens)[:-1]] = False
        self._expect("loss tokens", int(loss.sum()), int(indexed_loss.sum()), recipe)

    def _expect(self, name: str, counted: int, indexed: int, recipe: Recipe) -> None:
        if counted != indexed:
            reason = f"the index says {indexed} {name}, the text yields {counted}: {WHY_COUNTS_DIFFER}"
            raise FieldError(self.text_field(recipe), reason)


def _check_room(num_bytes: int) -> None:
    """Raise MemoryError if a step's bytes, and those that are on their way, take more memory than is left."""
    left = room()
    if left is None or num_bytes + (under_way := requests.HERE.bytes_in_flight) <= left.left_bytes:
        return
    raise MemoryError(
        f"not enough memory to read a step: its samples have {num_bytes} bytes in object storage, {under_way} bytes "
        f"of other steps are on their way, and {left.left_bytes} are left under {left.limit}. Lower batch_size or "
        "prefetch_factor, or raise the limit"
    )


def read_ahead(
    index: Index, shards: OpenShards, recipe_of: Callable[[int], Recipe], wanted: Iterable[Wanted]
) -> list[object]:
    """Begin to read what is wanted of objects of storage. Keep the result until it was read.

    What fails here fails again when the sample is read. Raises MemoryError, before anything is read, if less memory is
    left than its bytes take: clients of object storage end the process for lack of memory.
    """
    if not shards.any_remote:
        return []
    by_shard: dict[tuple[str, str], tuple[ShardInfo, Recipe, list[Spec]]] = {}
    for row, text, parts, kept, sample in wanted:
        info = index.shard_of(row)
        # A compressed shard is fetched whole when it is opened.
        if row in shards.blank or info.packed or not (is_remote(info.url) or is_remote(info.media_root)):
            continue
        recipe = recipe_of(row)
        key = info.url, "" if recipe.record is None else recipe.record.id
        stored = sample or StoredSample(index, shards, row)
        ranges = stored.ranges(recipe, text=text, parts=parts, kept=kept)
        by_shard.setdefault(key, (info, recipe, []))[2].extend(ranges)
    _check_room(sum(size for _, _, ranges in by_shard.values() for _, size, _, _ in ranges))
    reading: list[object] = []
    for info, recipe, ranges in by_shard.values():
        with suppress(ShardError):
            reading.append(shards.get(info.url, info, recipe.record).expect(ranges))
    return reading


class Wanted(NamedTuple):
    """What a step reads of a row, as the arguments of `StoredSample.read`; `sample` reads it, if it was made
    already.
    """

    row: int
    text: bool = True
    parts: Sequence[int] | None = None
    kept: bool = False
    sample: StoredSample | None = None


class Missing(NamedTuple):
    """Names that no sample has, the names that there are, and the number of records that were read for it."""

    names: tuple[str, ...]
    others: tuple[str, ...]
    num_records: int


def missing_names(
    index: Index,
    recipe: Recipe,
    containers: Mapping[str, Container] = NO_CONTAINERS,
    files: Files = PLAIN_FILES,
) -> Missing:
    """Return the names of `recipe.keep` that are no field of the index, and no key of some records spread over it."""
    others = dict.fromkeys(map(bare_name, (*index.fields, *index.totals["ignored_fields"])))
    others.pop(RECORD_FIELD, None)
    missing = [name for name in recipe.keep if not any(is_kept_as(field, name) for field in index.fields)]
    count = 0
    if missing and (recipe.record is not None or any(map(has_keys, index.fields))):
        for record in _some_records(index, recipe, containers, files):
            count += 1
            others |= dict.fromkeys(record)
            missing = [name for name in missing if key_of(name, record) is None]
            if not missing:
                break
    return Missing(tuple(missing), tuple(others), count)


def _some_records(
    index: Index, recipe: Recipe, containers: Mapping[str, Container], files: Files
) -> Iterator[dict[str, Any]]:
    rows = np.unique(np.linspace(0, index.num_rows - 1, min(_LOOKED_AT, index.num_rows)).astype(np.int64))
    how: dict[str, Any] = {"limits": recipe.limits, "cache": CacheFolder(), "containers": containers, "files": files}
    with closing(OpenShards(**how)) as shards:
        for row in rows[~np.isin(rows, index.bad_rows())].tolist():
            sample = StoredSample(index, shards, row)
            with suppress(DataError, FieldError, ShardError):  # the loader reports it
                payloads = sample.read(recipe, text=False, parts=(), kept=True)
                records = [*sample.records(recipe, payloads), sample.made_fields(recipe, payloads)]
                yield {key: value for record in records for key, value in record.items()}
