"""A modality as a value: how its parts are recognized, counted, decoded and put into the sequence.

    bytes --probe--> header --count_header--> PartSize --decode_into--> arrays of the batch
          ----------count--------------------^

Code outside this folder uses only `Modality` and names no modality. A user's own modality is a frozen dataclass with
three methods: `arrays` (what a part becomes), `count` (its size, from the bytes) and `decode`.
"""

from __future__ import annotations

import inspect
import io
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import Field, is_dataclass
from dataclasses import fields as dataclass_fields
from functools import lru_cache
from math import inf, isfinite, prod
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.errors import DecodeError, FieldError, as_field_error
from orchdata.loaders.limits import Limits
from orchdata.loaders.memory import DECODER_BYTES, pass_shortage, room
from orchdata.native.scan import FOUND, MORE, UNUSUAL

Header = tuple[int, ...]
NOT_DESCRIBED: Final = "not described"
"""Key in the metadata of dataclass fields that `Modality.parameters` leaves out: functions, which have ids."""


class ArraySpec(NamedTuple):
    """One array that parts of a modality fill.

    Attributes:
        row_shape: shape of a row; () for one number per row.
        dtype: dtype of the tensor in the batch: "bfloat16", or a name of NumPy's.
        per: "row" for `PartSize.rows` rows per part; "part" for one row per part.
    """

    row_shape: tuple[int, ...]
    dtype: str = "float32"
    per: Literal["row", "part"] = "row"


class PartSize(NamedTuple):
    """The size of one part; stored in the index.

    Attributes:
        positions: length of the encoder's input: costs are computed from these.
        tokens: number of tokens in the merged LLM sequence that its features fill.
        rows: number of rows of its arrays; -1 for `positions`.
        extent: further numbers for decoding or positions, the same count for every part of the modality.
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
        mark: text that marks where a part goes; "" for no such text, None for "<name>".
        token_id: id in `input_ids` where features go.
        start_id, end_id: ids before and after; None for none.
    """

    mark: str | None = None
    token_id: int = 0
    start_id: int | None = None
    end_id: int | None = None


class Heads(NamedTuple):
    """The first bytes of n members, and the results of scanning them."""

    buffer: NDArray[np.uint8]  # read-only
    starts: NDArray[np.int64]  # (n,), of each member in the buffer
    available: NDArray[np.int64]  # (n,), number of its bytes there
    sizes: NDArray[np.int64]  # (n,), its full size
    status: NDArray[np.uint8]  # (n,), to be written: FOUND, MORE or UNUSUAL, see `native.scan`
    facts: NDArray[np.int64]  # (n, num_facts), to be written where status is FOUND


class Modality:
    """One modality of a recipe. Subclass it as a frozen dataclass; its fields are its parameters.

    It must pickle (so define it in a module, not in a function). Its class, fields and `version` are part of the
    recipe's fingerprint. Its name is its keyword in a `Recipe`: `Recipe(points=MyPoints())` gives
    `batch.media["points"]`, the phase `points` of a cost model and `batch.merge(embeds, {"points": ...})`.

    A subclass defines `arrays` and `decode`, and either `count`, from the bytes, or `probe` and `count_header`: then a
    part's bytes are read once for any later parameters, and its header is stored with the shard's facts.

    Attributes:
        fields: names of the members it is read from: suffixes ("npy", "depth.png") or whole names; the modality's name
            is one of them.
        words: types of items in chats that stand for a part; its name is one of them.
        slot: what stands in text for a part.
        version: raise it when the same bytes give other counts or values.
        plural: name of several parts in errors.
        column_words: words in the name of a Parquet column that is read as this modality.
        hf_feature: name of such a column's type in Hugging Face's `datasets`.
        placeholder: what a chat template writes for a part, if that is not its slot's mark.
        num_facts: length of a header.
        num_extents: length of `PartSize.extent`.
        places: whether its parts have tokens in the merged sequence. False if a model takes them separately, as an
            encoder-decoder does: then `PartSize.tokens` is 0, and the text has no mark for them.
        embedded_in: names of members of other modalities that may also contain a part of this one, as clips contain
            sound; a header of zeros says that a member contains none.
        listed: modality of the files that a record may list instead of one file of this modality, such as the frames of
            a video; "" for none.
        may_differ_in_mixture: parameters in which sources of a mixture may differ: those that keep the shapes of
            tensors and their scale.
        no_counts: parameters that change values and no count, such as a mean to subtract: a change of these needs no
            new index.
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
    embedded_in: tuple[str, ...] = ()
    listed: str = ""
    may_differ_in_mixture: frozenset[str] = frozenset()
    no_counts: frozenset[str] = frozenset()

    def required_modules(self) -> tuple[str, ...]:
        """Modules that counting and decoding import, for example ("soundfile",). Each process imports them before its
        first sample; a missing or broken one is a PackageError that names it. Override this if your methods import
        something late.
        """
        return ()

    def set_up_process(self) -> None:
        """Create what counting and decoding keep in a process, such as tables or a model. Called after the import of
        `required_modules`, before the first sample and possibly again; an exception ends the run.
        """

    def _set_up_counting(self) -> None:
        """`set_up_process`, in a process that may decode nothing: without what only decoding needs and takes long."""
        self.set_up_process()

    def arrays(self) -> Mapping[str, ArraySpec]:
        """Return name -> array that every part fills."""
        raise NotImplementedError(f"{type(self).__qualname__} must define arrays()")

    def count(self, data: bytes | memoryview, limits: Limits) -> PartSize:
        """Return the size of a part, from its bytes. Raises DecodeError."""
        return self.count_header(self.probe(bytes(data), limits), limits)

    def decode(self, data: bytes | memoryview, limits: Limits) -> Mapping[str, Any]:
        """Return the arrays of a part by name, as `arrays` defines them, with the number of rows from `count`; an array
        with one row per part may be that row. Raises DecodeError.

        If it draws random numbers, give it a fourth parameter `rng`: it then gets a `numpy.random.Generator` that
        depends on the loader's seed, the source, the pass, the shard, the key and the part, and on nothing else.
        """
        raise NotImplementedError(f"{type(self).__qualname__} must define decode()")

    def draws(self) -> bool:
        """Return whether decoding gets a generator: whether `decode` or `decode_into` has a parameter `rng`."""
        return any(takes_rng(type(self)))

    @classmethod
    def probe(cls, data: bytes, limits: Limits) -> Header:
        """Return the header of a whole member, `num_facts` numbers that depend on no parameter. Raises DecodeError."""
        raise NotImplementedError(f"{cls.__qualname__} must define count(), or probe() and count_header()")

    @staticmethod
    def scan(heads: Heads) -> None:
        """Scan headers of many members in their first bytes: override it so that plain members need no `probe`."""
        heads.status[:] = UNUSUAL

    def count_header(self, header: Header, limits: Limits) -> PartSize:
        """Return the size of a part, from its header. Raises DecodeError."""
        raise NotImplementedError(f"{type(self).__qualname__} must define count(), or probe() and count_header()")

    @staticmethod
    def seconds(header: Header) -> float:
        """Return the length of a clip in seconds; infinite for what has no length."""
        return inf

    @classmethod
    def matches_magic(cls, head: bytes) -> bool:
        """Whether a part begins with these 16 bytes, for a member with a name that does not say it."""
        return False

    @staticmethod
    def from_frames(files: Sequence[bytes], metadata: Mapping[str, Any]) -> bytes:
        """Combine files that a record lists into one file of this modality.

        Args:
            metadata: further values of the record, by its own keys, as JSON.
        """
        raise NotImplementedError

    def decode_into(
        self, data: bytes | memoryview, size: PartSize, out: Mapping[str, NDArray[Any]], limits: Limits
    ) -> None:
        """Decode a part into the batch's memory: override it to save a copy.

        Args:
            size: its size in the index.
            out: name -> `(rows, *row_shape)` of each array, C-contiguous, uninitialized; bfloat16 as uint16 bits. Every
                value must be written.

        With a fifth parameter `rng` it gets a generator, as `decode`.

        Raises:
            DecodeError: not the indexed part, damaged, or above a limit.
        """
        copy_into(self, self.decode(data, limits), out)

    def extras(self, sizes: Sequence[PartSize]) -> Mapping[str, NDArray[Any]]:
        """Return further arrays of a batch that follow from the sizes of its parts: one or several rows per part."""
        return {}

    def part_axes(self, sizes: Sequence[PartSize]) -> Mapping[str, tuple[int, tuple[int, ...]]]:
        """Return how arrays and extras become one padded tensor of all parts, (num_parts, ...), for some models.

        Returns:
            name -> (axis of a part's rows in that tensor, number of rows of each part).
        """
        return {}

    def among(self, size: PartSize, count: int) -> PartSize:
        """Return the size of a part in a sample with `count` parts of the modality, two or more, if that changes it."""
        return size

    def expand(self, size: PartSize) -> tuple[str | int, ...] | None:
        """Return what stands in the text for a part: strings are text without loss, a number n stands for n of its
        tokens, and the numbers add up to `size.tokens`. None: its tokens, between `slot.start_id` and `slot.end_id`.
        """
        return None

    def rope(self, size: PartSize) -> NDArray[np.int64] | None:
        """Return positions in time, height and width of a part's tokens, from 0: (3, tokens); None counts up in all
        three.

        The next token continues after the largest position, or as `rope_span` says.
        """
        return None

    def rope_span(self, size: PartSize) -> int | None:
        """Return the distance from a part's first position to the next token's, if not after the largest of `rope`."""
        return None

    def dummy(self) -> PartSize:
        """The smallest part, for a rank without parts: its rows are zeros and its tokens go nowhere."""
        return PartSize(1, 1, 1, (0,) * self.num_extents)

    def fill_dummy(self, size: PartSize, out: Mapping[str, NDArray[Any]]) -> None:
        """Write the arrays of the dummy, like `decode_into`: zeros, except for models that read the size of a part from
        them.
        """
        for array in out.values():
            array[:] = 0

    def padding(self, positions: int) -> PartSize | None:
        """Return a part of zeros with this number of positions (a multiple of the dummy's), to fill the input of an
        encoder with a fixed length; None if there is no such part.
        """
        return None

    def decoding_bytes(self, parts: Sequence[tuple[Header, PartSize]]) -> int:
        """Memory for decoding all parts of one sample, in addition to their arrays."""
        return 0

    def to_file(
        self, data: bytes | memoryview, size: PartSize, arrays: Mapping[str, NDArray[Any]], limits: Limits
    ) -> tuple[str, bytes]:
        """Return a part for people to look at or listen to, as close to the model's input as possible: (suffix of a
        file name, content). Default: the arrays, as NumPy's `npz`, with float32 for bfloat16.

        Args:
            data: bytes of the member.
            arrays: its decoded arrays, as in `decode_into`.
        """
        file, dtypes = io.BytesIO(), {name: spec.dtype for name, spec in self.arrays().items()}
        plain = {
            name: as_tensor(values, "bfloat16").float().numpy() if dtypes.get(name) == "bfloat16" else values
            for name, values in arrays.items()
        }
        np.savez(file, **plain)  # type: ignore[arg-type]
        return "npz", file.getvalue()

    def describe(self) -> dict[str, Any]:
        """Return everything that counts and values depend on, JSON-safe."""
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
        """Its dataclass fields, JSON-safe. Raises TypeError for a field without a JSON form."""
        return dataclass_values(self)

    def row_bytes(self, itemsize: int = 0) -> int:
        """Memory of one row of all its arrays, with at least `itemsize` bytes a value."""
        return sum(
            int(np.prod(spec.row_shape, dtype=np.int64)) * max(itemsize, stored_dtype(spec.dtype).itemsize)
            for spec in self.arrays().values()
            if spec.per == "row"
        )


class TakesRng(NamedTuple):
    """Which methods of a modality's class have a parameter `rng`."""

    decode: bool
    decode_into: bool


def _takes_rng(kind: type[Modality]) -> TakesRng:
    """Return which methods of a class have a parameter `rng`. Raises TypeError if `decode` has one, and an overridden
    `decode_into`, which calls it, has none.
    """
    found = TakesRng(False, False)
    for name in TakesRng._fields:
        with suppress(ValueError, TypeError):  # some functions of extension modules have no signature
            found = found._replace(**{name: "rng" in inspect.signature(getattr(kind, name)).parameters})
    if found.decode and not found.decode_into and kind.decode_into is not Modality.decode_into:
        raise TypeError(
            f"{kind.__qualname__}.decode has a parameter rng, but its decode_into has none to pass on: add it there"
        )
    return found


takes_rng: Final[Callable[[type[Modality]], TakesRng]] = lru_cache(maxsize=256)(_takes_rng)  # type: ignore[assignment]


def decode_part(
    modality: Modality,
    data: bytes | memoryview,
    size: PartSize,
    out: Mapping[str, NDArray[Any]],
    limits: Limits,
    field: str,
    generator: Callable[[], np.random.Generator],
) -> None:
    """Decode one part into the given arrays, as `Modality.decode_into`; each call of a decoder is here. `generator` is
    called only if the modality draws. Raises FieldError; MemoryError for lack of memory, and for any failure that may
    be that in a process with its own memory limit.
    """
    takes = takes_rng(type(modality))
    decode: Any = modality.decode_into if takes.decode_into else modality.decode
    try:
        if not any(takes) or not modality.draws():
            modality.decode_into(data, size, out, limits)
        elif takes.decode_into:
            decode(data, size, out, limits, rng=generator())
        else:
            copy_into(modality, decode(data, limits, rng=generator()), out)
    except Exception as error:  # noqa: BLE001 - any exception of a decoder is a failure of its part
        doubt = _doubt(error, modality, data, size, limits)
        failure = error.at(field) if isinstance(error, DecodeError) else as_field_error(error, "decoded", field)
        cause = error.__cause__ if isinstance(error, DecodeError) else error
        raise FieldError(failure.field, failure.reason + doubt) from cause


_LEAST_BYTES: Final = 1 << 26
"""Memory that a decoder may take for data of any size."""


def _doubt(error: Exception, modality: Modality, data: bytes | memoryview, size: PartSize, limits: Limits) -> str:
    """Return a remark if less memory is left than a decoder may need for a part of this size; else "". Raises
    MemoryError in a process with its own memory limit: other processes then decode the sample alone.
    """
    left = room()
    if left is None:
        return ""
    need_bytes = DECODER_BYTES
    if counts_from_header(modality):
        try:
            header = read_header(type(modality), len(data), lambda count: bytes(data[:count]), limits)
            need_bytes = _LEAST_BYTES + 4 * modality.decoding_bytes(((header, size),))
        except MemoryError:
            raise
        except Exception:  # noqa: BLE001, S110 - `error` is reported already
            pass
    if left.is_own:
        pass_shortage(error, need_bytes)
    if left.left_bytes >= need_bytes:
        return ""
    return f" (or for lack of memory: {left.left_bytes} bytes are left under {left.limit})"


def copy_into(modality: Modality, arrays: Mapping[str, Any], out: Mapping[str, NDArray[Any]]) -> None:
    """Copy what `Modality.decode` returned into the batch's memory. Raises DecodeError if it does not fit there."""
    if missing := out.keys() ^ arrays.keys():
        raise DecodeError(f"decode() and arrays() differ in {', '.join(sorted(missing))}")
    for name, target in out.items():
        spec = modality.arrays()[name]
        values = stored(arrays[name], spec.dtype)
        if spec.per == "part" and values.shape == spec.row_shape:
            values = values[None]
        if values.shape != target.shape:
            raise DecodeError(f"decoded to {name} of shape {values.shape}, the index says {target.shape}: index again")
        target[...] = values


def inner_field(field: str, modality: str) -> str:
    """Field name of a part inside a member."""
    return f"{field} ({modality})"


def outer_of(field: str) -> tuple[str, str]:
    """Split the name of an inner part: (member, modality); (field, "") if it is no inner part."""
    if field[-1:] != ")":
        return field, ""
    outer, _, inner = field[:-1].rpartition(" (")
    return (outer, inner) if outer else (field, "")


def counts_from_header(modality: Modality) -> bool:
    """Whether a part's size follows from its header, so that its bytes need not be read again."""
    return type(modality).count is Modality.count


_COUNTING: Final = ("count", "count_header", "among", "expand", "arrays", "decoding_bytes", "probe", "parameters")


def names_no_counts(kind: type[Modality]) -> frozenset[str]:
    """Return the parameters of a class that change no count. A subclass that counts in a way of its own must name them
    itself.
    """
    for base in kind.__mro__:
        if "no_counts" in vars(base):
            return frozenset(base.no_counts)  # type: ignore[attr-defined]
        if not vars(base).keys().isdisjoint(_COUNTING):
            return frozenset()
    return frozenset()


def keeps_headers_of(modality: type[Modality], other: type[Modality]) -> bool:
    """Whether a subclass finds the same headers as the other class."""
    same = (modality.probe.__func__, modality.scan) == (other.probe.__func__, other.scan)  # type: ignore[attr-defined]
    return same and modality.num_facts == other.num_facts


def probe_id(modality: Modality) -> str:
    """Name of the headers that its class finds, for all parameters: a probe may read attributes of the class."""
    return f"{qualified(type(modality))} {modality.version}"


def qualified(kind: type[Any]) -> str:
    """Return the name of a class with its module: equal in a script and in the worker processes that it starts."""
    module = "__main__" if kind.__module__ == "__mp_main__" else kind.__module__
    return f"{module}.{kind.__qualname__}"


def dataclass_values(value: object) -> dict[str, Any]:
    """Return the dataclass fields of a value, JSON-safe. Raises TypeError for a field without a JSON form."""
    own: tuple[Field[Any], ...] = dataclass_fields(value) if is_dataclass(value) else ()
    kind = type(value)
    hidden = [name for name in vars(value) if name not in {each.name for each in own} and not hasattr(kind, name)]
    if hidden:
        raise TypeError(
            f"{kind.__qualname__} is no dataclass, so that no fingerprint would see its {', '.join(hidden)}: make it a "
            "frozen dataclass, or override the method that describes it"
        )
    described = [each.name for each in own if NOT_DESCRIBED not in each.metadata]
    return {name: plain(getattr(value, name), f"{kind.__qualname__}.{name}") for name in described}


def plain(value: Any, name: str) -> Any:
    """Return a value in JSON form, the same in every process. Raises TypeError for one that has none."""
    if isinstance(value, float) and not isfinite(value):
        return str(value)  # NaN does not even equal itself
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return [plain(item, name) for item in value]
    if isinstance(value, Mapping):
        return {str(key): plain(item, name) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        own = {each.name: plain(getattr(value, each.name), f"{name}.{each.name}") for each in dataclass_fields(value)}
        return {"class": qualified(type(value)), **own}
    raise TypeError(
        f"{name} is a {type(value).__name__}, which no fingerprint can hold: use numbers, strings, tuples and frozen "
        "dataclasses, or override the method that describes it"
    )


# NumPy has no bfloat16: its bits are stored as uint16.
_BITS: Final = {"bfloat16": np.dtype(np.uint16)}


def stored_dtype(dtype: str) -> np.dtype[Any]:
    """NumPy dtype that stores values of an `ArraySpec.dtype`."""
    return _BITS.get(dtype) or np.dtype(dtype)


def stored(values: Any, dtype: str) -> NDArray[Any]:
    """Return decoded values, a NumPy array or CPU tensor, in stored form. Raises DecodeError for another dtype."""
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
    """Return the array, stored as in `stored_dtype`, as a tensor of `dtype`; shares memory."""
    import torch

    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor


TOLERANCE_SECONDS: Final = 0.05
TOLERANCE_SHARE: Final = 0.01
"""A clip may lack this much of what it declares, the larger of the two."""
LONGEST_SIDE: Final = 1 << 25
"""For a longer side, Pillow's resizing overflows 32 bits and reports a lack of memory."""


def check_pixels(width: int, height: int, limits: Limits, kind: str = "image") -> None:
    """Raise DecodeError for a picture that is too large."""
    if width * height > limits.image_pixels:
        size = f"{width}x{height} = {width * height} pixels"
        raise DecodeError(f"{kind} of {size}, above Limits.image_pixels={limits.image_pixels}")
    if max(width, height) > LONGEST_SIDE:
        raise DecodeError(f"{kind} of {width}x{height} pixels: no side above {LONGEST_SIDE} can be resized")


def check_size(width: int, height: int, limits: Limits) -> None:
    """Raise DecodeError for the size of an image that cannot be decoded."""
    check_pixels(width, height, limits)
    if width < 1 or height < 1:
        raise DecodeError(f"not a readable image: its header says {width} x {height} pixels")


def check_seconds(frames: int, rate: int, limits: Limits) -> None:
    """Raise DecodeError for a clip that is too long."""
    if rate and frames > limits.audio_seconds * rate:
        raise DecodeError(f"audio of {frames / rate:.0f} s, above Limits.audio_seconds={limits.audio_seconds:g}")


def starts_with(data: bytes) -> str:
    """The first eight bytes, for an error: as text if they are printable."""
    head = data[:8]
    return repr(head.decode("ascii")) if head.isascii() and head.decode("ascii").isprintable() else repr(head)[1:]


def check_at_least_one(owner: str, name: str, value: object) -> None:
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{owner}.{name} must be an int of at least 1, got {value!r}")


def check_choice(owner: str, name: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{owner}.{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


HEAD_BYTES: Final = 1 << 16
"""Number of bytes that are read before a member is read in full."""


def read_header(kind: type[Modality], size: int, read: Callable[[int], bytes], limits: Limits) -> Header:
    """Return the header of one member of `size` bytes, of which `read` returns the first n. `limits` are for the probe.
    Raises DecodeError for another format than its name says, or damage, and MemoryError if there may have been too
    little.
    """
    if size == 0:
        raise DecodeError("empty: 0 bytes")
    data = read(min(size, HEAD_BYTES))
    status, header = _scan_one(kind, size, data)
    if status != FOUND and len(data) < size:
        data = read(size)
        if status == MORE:
            status, header = _scan_one(kind, size, data)
    if status == FOUND:
        return header
    if len(data) < size:
        raise DecodeError(f"cut: {len(data)} of {size} bytes")
    try:
        return kind.probe(data, limits)
    except Exception as error:
        pass_shortage(error)
        raise


def scan_heads(
    kind: type[Modality], buffer: NDArray[np.uint8], ranges: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Scan headers of many members: `ranges`, int64 (n, 3), are the start of each in the buffer, its bytes there, its
    size. Returns facts, int64 (n, num_facts), zeros where the scan failed, and the indices of those, for `read_header`.
    """
    facts = np.zeros((len(ranges), kind.num_facts), np.int64)
    status = np.empty(len(ranges), np.uint8)
    starts, available, sizes = np.ascontiguousarray(ranges.T)
    view = buffer.view()
    view.flags.writeable = False  # for numba, writable arrays are another type, and it would compile twice
    kind.scan(Heads(view, starts, available, sizes, status, facts))
    rest = np.flatnonzero(status != FOUND)
    facts[rest] = 0
    return facts, rest


def _scan_one(kind: type[Modality], size: int, data: bytes) -> tuple[int, Header]:
    """Return status and header of a member that begins with `data`."""
    facts, rest = np.zeros((1, kind.num_facts), np.int64), np.empty(1, np.uint8)
    view: NDArray[np.uint8] = np.frombuffer(data, np.uint8)
    one = np.array([0, len(data), size], np.int64)
    kind.scan(Heads(view, one[:1], one[1:2], one[2:], rest, facts))
    return int(rest[0]), tuple(facts[0].tolist())


# A thread keeps at most this much between samples; a larger buffer is freed with its sample.
_KEPT_BYTES = 64 << 20
_LINE_BYTES = 64


class Scratch(threading.local):
    """One buffer per thread, kept between samples, for decoders. The thread's next `take` overwrites the result of the
    previous one.
    """

    def __init__(self) -> None:
        self._buffer = np.empty(0, np.uint8)

    def take(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return uninitialized bytes (num_bytes,), aligned to a cache line of the CPU, as torch's memory is."""
        if num_bytes <= len(self._buffer):
            return self._buffer[:num_bytes]
        is_kept = num_bytes <= _KEPT_BYTES
        # A power of two: samples that grow a little do not each allocate fresh pages.
        size = max(1 << 20, 1 << (num_bytes - 1).bit_length()) if is_kept else num_bytes
        memory = np.empty(size + _LINE_BYTES, np.uint8)
        first = -memory.ctypes.data % _LINE_BYTES
        self._buffer = memory[first : first + size] if is_kept else self._buffer
        return memory[first : first + num_bytes]

    def floats(self, *shape: int) -> NDArray[np.float32]:
        """Return uninitialized float32 of `shape`."""
        return self.take(4 * prod(shape)).view(np.float32).reshape(shape)
