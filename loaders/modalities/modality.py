"""A modality as a value: how its parts are found, counted, decoded and placed.

    bytes --probe--> header --count_header--> PartSize --decode_into--> arrays of the batch
          ----------count--------------------^

Everything outside of this room is written against `Modality`, and names none. A user's own is a frozen dataclass with
three methods: `arrays` (what a part becomes), `count` (how much of it, from the bytes) and `decode`.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import Field, is_dataclass
from dataclasses import fields as dataclass_fields
from math import isfinite
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.errors import DecodeError
from orchdata.loaders.limits import Limits
from orchdata.native.scan.status import UNUSUAL

Header = tuple[int, ...]


class ArraySpec(NamedTuple):
    """One array that parts of a modality fill.

    Attributes:
        row_shape: shape of a row; () for one number a row.
        dtype: of the tensor in the batch: "bfloat16", or a name of NumPy's.
        per: "row", as many rows as `PartSize.rows`; "part", one for each part.
    """

    row_shape: tuple[int, ...]
    dtype: str = "float32"
    per: Literal["row", "part"] = "row"


class PartSize(NamedTuple):
    """How much one part is; the index keeps it.

    Attributes:
        positions: what enters the encoder: costs count these.
        tokens: places of the merged LLM sequence that its features fill.
        rows: of its arrays; -1 for as many as `positions`.
        extent: more numbers that decoding or positions need, as many for every part of the modality.
    """

    positions: int
    tokens: int
    rows: int = -1
    extent: tuple[int, ...] = ()

    @property
    def num_rows(self) -> int:
        return self.positions if self.rows < 0 else self.rows


class Slot(NamedTuple):
    """What stands in text for a part.

    Attributes:
        mark: text that marks where a part goes; "" finds none, None is "<name>".
        token_id: stands in `input_ids` where features go.
        start_id, end_id: put before and after; None for nothing.
    """

    mark: str | None = None
    token_id: int = 0
    start_id: int | None = None
    end_id: int | None = None


class Heads(NamedTuple):
    """The first bytes of n members, and what is found there.

    Attributes:
        buffer: uint8, read-only.
        starts, available, sizes: int64 (n,), where each member begins in the buffer, how many of its bytes are there,
            and how many it has.
        status: uint8 (n,), to be written: FOUND, MORE or UNUSUAL, as `native.scan.status` says.
        facts: int64 (n, num_facts), to be written where FOUND.
    """

    buffer: NDArray[np.uint8]
    starts: NDArray[np.int64]
    available: NDArray[np.int64]
    sizes: NDArray[np.int64]
    status: NDArray[np.uint8]
    facts: NDArray[np.int64]


class Modality:
    """One modality of a recipe. Subclass it as a frozen dataclass; its fields are its parameters.

    It pickles (so it is defined in a module, not in a function), and its class, fields and `version` are part of the
    recipe's fingerprint. Its name is the keyword under which a `Recipe` holds it: `Recipe(points=MyPoints())` gives
    `batch.media["points"]`, the phase `points` of a cost model and `batch.merge(embeds, {"points": ...})`.

    A subclass defines `arrays` and `decode`, and either `count`, from the bytes, or `probe` and `count_header`: then a
    part's bytes are read once, whatever the parameters are later, and its header is kept with the shard's facts.

    Attributes:
        fields: names of the members it is read from: suffixes ("npy", "depth.png") or whole names; the modality's name
            is one of them.
        words: types of items in chats that stand for a part; its name is one of them.
        slot: what stands in text for a part.
        version: raise it when the same bytes give other counts or values.
        plural: what several parts are called in errors.
        column_words: words in the name of a Parquet column that is read as it.
        hf_feature: what Hugging Face's `datasets` calls such a column.
        placeholder: what a chat template writes for a part, where that is not its slot's mark.
        num_facts: numbers in a header.
        num_extents: numbers in `PartSize.extent`.
        places: whether its parts have tokens in the merged sequence; False where a model takes them beside it, as an
            encoder-decoder does: then `PartSize.tokens` is 0, and the text has no mark for them.
        inside: names of members of other modalities whose bytes may hold a part of this one too, as clips hold sound; a
            header of zeros says that one does not.
        listed: the modality of the files that a record may list in place of one of its own, as the frames of a video;
            "" for none.
        free: parameters in which sources of a mixture may differ: shapes of tensors and their scale stay.
    """

    fields: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    slot: Slot = Slot()
    version: int = 1
    plural: str = ""
    column_words: frozenset[str] = frozenset()
    hf_feature: str = ""
    placeholder: str = ""
    num_facts: int = 0
    num_extents: int = 0
    places: bool = True
    inside: tuple[str, ...] = ()
    listed: str = ""
    free: frozenset[str] = frozenset()

    def required_modules(self) -> tuple[str, ...]:
        """Modules that counting and decoding import, as ("soundfile",): they are imported in each process before its
        first sample, and one that is missing or broken is a PackageError that names it. Override it where your methods
        import something late.
        """
        return ()

    def set_up_process(self) -> None:
        """Make what counting and decoding keep in a process, as tables or a model. Called after the import of
        `required_modules`, before the first sample and possibly again; what it raises ends the run.
        """

    def arrays(self) -> Mapping[str, ArraySpec]:
        """Name -> what every part fills."""
        raise NotImplementedError(f"{type(self).__qualname__} must define arrays()")

    def count(self, data: bytes | memoryview, limits: Limits) -> PartSize:
        """The size of a part, from its bytes. Raises DecodeError."""
        return self.count_header(self.probe(bytes(data), limits), limits)

    def decode(self, data: bytes | memoryview, limits: Limits) -> Mapping[str, Any]:
        """The arrays of a part, by name: as `arrays` says, with as many rows as `count` said; one that has a row a part
        may be that row. Raises DecodeError.
        """
        raise NotImplementedError(f"{type(self).__qualname__} must define decode()")

    @classmethod
    def probe(cls, data: bytes, limits: Limits) -> Header:
        """The header of a whole member, `num_facts` numbers, free of parameters. Raises DecodeError."""
        raise NotImplementedError(f"{cls.__qualname__} must define count(), or probe() and count_header()")

    @staticmethod
    def scan(heads: Heads) -> None:
        """Headers of many members from their first bytes: override it to spare `probe` the whole of plain ones."""
        heads.status[:] = UNUSUAL

    def count_header(self, header: Header, limits: Limits) -> PartSize:
        """The size of a part, from its header. Raises DecodeError."""
        raise NotImplementedError(f"{type(self).__qualname__} must define count(), or probe() and count_header()")

    @classmethod
    def knows(cls, head: bytes) -> bool:
        """Whether the first 16 bytes of a member without a telling name are those of such a part."""
        return False

    @staticmethod
    def joined(files: Sequence[bytes], told: Mapping[str, Any]) -> bytes:
        """Files that a record lists, as one file of this modality.

        Args:
            told: what the record says beside them, by its own keys, as JSON.
        """
        raise NotImplementedError

    def decode_into(
        self, data: bytes | memoryview, size: PartSize, out: Mapping[str, NDArray[Any]], limits: Limits
    ) -> None:
        """Decode a part into the batch's own memory: override it to spare a copy.

        Args:
            size: as the index has it.
            out: name -> (rows, *row_shape) of each array, C-contiguous, undefined; bfloat16 as uint16 bits. Every value
                has to be written.

        Raises:
            DecodeError: not what the index was made of, damaged, or above a limit.
        """
        found = self.decode(data, limits)
        if missing := out.keys() ^ found.keys():
            raise DecodeError(f"decode() and arrays() differ in {', '.join(sorted(missing))}")
        for name, target in out.items():
            spec = self.arrays()[name]
            values = stored(found[name], spec.dtype)
            if spec.per == "part" and values.shape == spec.row_shape:
                values = values[None]
            if values.shape != target.shape:
                raise DecodeError(
                    f"decoded to {name} of shape {values.shape}, the index says {target.shape}: index again"
                )
            target[...] = values

    def extras(self, sizes: Sequence[PartSize]) -> Mapping[str, NDArray[Any]]:
        """More arrays of a batch, from the sizes of its parts alone: a row, or several, for each."""
        return {}

    def part_axes(self, sizes: Sequence[PartSize]) -> Mapping[str, tuple[int, tuple[int, ...]]]:
        """Arrays and extras of which models take one tensor a part, padded to the longest: name -> the axis of a tensor
        of all parts, (num_parts, ...), that the rows of a part lie along, and how many rows each part has.
        """
        return {}

    def among(self, size: PartSize, count: int) -> PartSize:
        """The size of a part in a sample that has so many of the modality, two or more, where that makes another."""
        return size

    def expand(self, size: PartSize) -> tuple[str | int, ...] | None:
        """What stands in the text for a part: strings are text without loss, a number is so many of its tokens, and the
        numbers add up to `size.tokens`. None: its tokens, between `slot.start_id` and `slot.end_id`.
        """
        return None

    def rope(self, size: PartSize) -> NDArray[np.int64] | None:
        """Positions in time, height and width of a part's tokens, from 0: (3, tokens); None counts on in all three.

        What follows goes on behind the largest, or as `rope_span` says.
        """
        return None

    def rope_span(self, size: PartSize) -> int | None:
        """Positions from a part's first to what follows it, where that does not go on behind the largest of `rope`."""
        return None

    def dummy(self) -> PartSize:
        """The smallest part, for a rank that has none: its rows are zeros and its tokens go nowhere."""
        return PartSize(1, 1, 1, (0,) * self.num_extents)

    def fill_dummy(self, size: PartSize, out: Mapping[str, NDArray[Any]]) -> None:
        """Write the arrays of the dummy, as `decode_into` does those of a part: zeros, but for models that read from
        them how much of a part is there.
        """
        for array in out.values():
            array[:] = 0

    def padding(self, positions: int) -> PartSize | None:
        """What stands behind the parts of an encoder whose input has a fixed length: a part of so many positions, a
        multiple of the dummy's, of zeros; None where there is no such part.
        """
        return None

    def decoding_bytes(self, parts: Sequence[tuple[Header, PartSize]]) -> int:
        """Memory that decoding all parts of one sample takes beside its arrays."""
        return 0

    def to_file(
        self, data: bytes | memoryview, size: PartSize, arrays: Mapping[str, NDArray[Any]], limits: Limits
    ) -> tuple[str, bytes]:
        """A part for people to look at or listen to, as near to what the model gets as can be: the ending of a file's
        name, and its content. Default: the arrays, as NumPy's `npz`, which has float32 for bfloat16.

        Args:
            data: of the member.
            arrays: what it was decoded to, as of `decode_into`.
        """
        file, dtypes = io.BytesIO(), {name: spec.dtype for name, spec in self.arrays().items()}
        plain = {
            name: as_tensor(values, "bfloat16").float().numpy() if dtypes.get(name) == "bfloat16" else values
            for name, values in arrays.items()
        }
        np.savez(file, **plain)  # type: ignore[arg-type]
        return "npz", file.getvalue()

    def describe(self) -> dict[str, Any]:
        """All that counts and values depend on, JSON-safe."""
        return {
            "class": qualified(type(self)),
            "version": self.version,
            "fields": list(self.fields),
            "words": list(self.words),
            "slot": list(self.slot),
            **({} if self.places else {"places": False}),
            **self.parameters(),
        }

    def parameters(self) -> dict[str, Any]:
        """Its dataclass fields, JSON-safe. Raises TypeError for one that has no JSON form."""
        own: tuple[Field[Any], ...] = dataclass_fields(self) if is_dataclass(self) else ()
        kind = type(self)
        hidden = [name for name in vars(self) if name not in {each.name for each in own} and not hasattr(kind, name)]
        if hidden:
            raise TypeError(
                f"{kind.__qualname__} is no dataclass, so that the recipe's fingerprint would not see its "
                f"{', '.join(hidden)}: make it a frozen dataclass, or override parameters()"
            )
        return {each.name: plain(getattr(self, each.name), f"{type(self).__qualname__}.{each.name}") for each in own}

    def row_bytes(self) -> int:
        """Memory of one row of all its arrays."""
        return sum(
            int(np.prod(spec.row_shape, dtype=np.int64)) * stored_dtype(spec.dtype).itemsize
            for spec in self.arrays().values()
            if spec.per == "row"
        )


def inner_field(field: str, modality: str) -> str:
    """What a part inside of a member is called."""
    return f"{field} ({modality})"


def outer_of(field: str) -> tuple[str, str]:
    """The member that holds a part, and its modality; the field itself and "" where it is no part of another."""
    if field[-1:] != ")":
        return field, ""
    outer, _, inner = field[:-1].rpartition(" (")
    return (outer, inner) if outer else (field, "")


def counts_from_header(modality: Modality) -> bool:
    """Whether a part's size follows from its header, so that its bytes need not be read again."""
    return type(modality).count is Modality.count


def keeps_headers_of(modality: type[Modality], other: type[Modality]) -> bool:
    """Whether a subclass finds the headers that the other class finds."""
    same = (modality.probe.__func__, modality.scan) == (other.probe.__func__, other.scan)  # type: ignore[attr-defined]
    return same and modality.num_facts == other.num_facts


def probe_id(modality: Modality) -> str:
    """Names the headers that its class finds, whatever its parameters: a probe may read attributes of the class."""
    return f"{qualified(type(modality))} {modality.version}"


def qualified(kind: type[Any]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def plain(value: Any, name: str) -> Any:
    """A value as JSON has it, the same in every process. Raises TypeError, naming the field that holds it."""
    if isinstance(value, float) and not isfinite(value):
        return str(value)  # NaN equals nothing, itself among it
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return [plain(item, name) for item in value]
    if isinstance(value, Mapping):
        return {str(key): plain(item, name) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        found = {each.name: plain(getattr(value, each.name), f"{name}.{each.name}") for each in dataclass_fields(value)}
        return {"class": qualified(type(value)), **found}
    raise TypeError(
        f"{name} is a {type(value).__name__}, which the recipe's fingerprint cannot hold: use numbers, strings, tuples "
        "and frozen dataclasses, or override parameters()"
    )


# NumPy has no bfloat16: its bits are kept as uint16.
_BITS: Final = {"bfloat16": np.dtype(np.uint16)}


def stored_dtype(dtype: str) -> np.dtype[Any]:
    """How values of an `ArraySpec.dtype` are kept in NumPy."""
    return _BITS.get(dtype) or np.dtype(dtype)


def stored(values: Any, dtype: str) -> NDArray[Any]:
    """Decoded values, a NumPy array or CPU tensor, as they are kept. Raises DecodeError for another dtype."""
    if hasattr(values, "detach"):
        import torch

        tensor = values.detach().contiguous()
        is_bfloat16 = tensor.dtype == torch.bfloat16
        if is_bfloat16 and dtype != "bfloat16":
            raise DecodeError(f"decoded to bfloat16, arrays() says {dtype}")
        values = (tensor.view(torch.uint16) if is_bfloat16 else tensor).numpy()
    array: NDArray[Any] = np.asarray(values)
    if array.dtype != stored_dtype(dtype):
        raise DecodeError(f"decoded to {array.dtype}, arrays() says {dtype}")
    return array


def as_tensor(array: NDArray[Any], dtype: str) -> Any:
    """The array, kept as `stored_dtype` says, as a tensor of `dtype`; shares memory."""
    import torch

    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor
