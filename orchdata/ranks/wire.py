"""Samples as bytes and back, without pickle.

A message is 16 bytes (a mark, the length of the header), a JSON header that describes the sample as a tree, and the
tree's buffers in its order, each at a multiple of 16 bytes. Nothing in it is executed, and every length is checked
before it is used.

    None, bool, int, float, str   JSON values; integers beyond 64 bits in hexadecimal
    list, tuple, dict             [tag, ...]; keys are str or int
    bytes-like                    a buffer; comes back as bytes
    numpy array or scalar         dtype, shape, a buffer in C order
    torch tensor on the CPU       dtype, shape, a buffer, contiguous
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from orchdata.loaders.errors import OrchdataError

ALIGNMENT = 16  # enough for every dtype
_MARK = 0x3157_4454_4144_4352
_PREFIX_BYTES = 16
_MAX_DEPTH = 64
_NUMPY_KINDS = "biufc"
_NUMPY_NAME = re.compile(rf"[<>|][{_NUMPY_KINDS}]\d{{1,2}}")
_MAX_SIDE = 1 << 62

Bytes = NDArray[np.uint8]
Path = tuple[Any, ...]
Buffer = torch.Tensor | NDArray[Any] | bytes | bytearray | memoryview


class WireError(OrchdataError, ValueError):
    """A message is cut, or is not a message of this module."""


@dataclass(frozen=True, slots=True)
class Message:
    """A sample ready to be written: a header of JSON, and buffers, in the order of the tree, which still belong to the
    sample and are copied only when written; `num_bytes` in all, a multiple of 16.
    """

    header: bytes
    buffers: list[Buffer]
    num_bytes: int

    def write_to(self, out: Bytes) -> None:
        """Fill `out`, uint8 (num_bytes,)."""
        out[:_PREFIX_BYTES] = np.array([_MARK, len(self.header)], "<i8").view(np.uint8)
        end = _PREFIX_BYTES + len(self.header)
        out[_PREFIX_BYTES:end] = np.frombuffer(self.header, np.uint8)
        for buffer in self.buffers:
            start = _aligned(end)
            out[end:start] = 0
            flat = flat_bytes(buffer)
            end = start + len(flat)
            out[start:end] = flat
        out[end:] = 0


def describe(sample: Any) -> Message:
    """Return the message of a sample, without copying its buffers.

    Raises:
        TypeError: a value of another type, a tensor that is not on the CPU or requires grad; names its path in the
            sample.
        ValueError: nested deeper than 64 levels, as a list that contains itself.
    """
    buffers: list[Buffer] = []
    try:
        tree = _describe(sample, 0, buffers)
    except _TooDeep as error:
        raise ValueError(f"{path_name(tuple(error.path[:-4:-1]))}... {error.why}") from None
    except _CannotBeSent as error:
        raise TypeError(f"{path_name(tuple(error.path[::-1]))} {error.why}") from None
    header = json.dumps(tree, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    num_bytes = _aligned(_PREFIX_BYTES + len(header))
    for buffer in buffers:
        num_bytes += _aligned(buffer.nbytes if not isinstance(buffer, bytes | bytearray) else len(buffer))
    return Message(header, buffers, num_bytes)


def read(message: Bytes) -> Any:
    """Return the sample of a message, uint8 (num_bytes,).

    Arrays and tensors are views of the message: writable if it is, and they keep it alive.

    Raises:
        WireError: the message is cut, is longer than its header says, or is no message.
    """
    if len(message) < _PREFIX_BYTES:
        raise WireError(f"a message has at least {_PREFIX_BYTES} bytes, got {len(message)}")
    mark, header_bytes = (int(value) for value in message[:_PREFIX_BYTES].copy().view("<i8"))
    if mark != _MARK or not 0 <= header_bytes <= len(message) - _PREFIX_BYTES:
        raise WireError(f"no message: mark {mark:#x}, a header of {header_bytes} bytes in {len(message)}")
    end = _PREFIX_BYTES + header_bytes
    reader = _Reader(message, end)
    try:
        tree = json.loads(message[_PREFIX_BYTES:end].tobytes().decode("utf-8", "surrogatepass"))
        sample = _read(tree, reader)
    except WireError:
        raise
    except (ValueError, TypeError, RuntimeError, OverflowError, IndexError, KeyError) as error:
        raise WireError(f"the header of a message cannot be read: {error}") from error
    if _aligned(reader.end) != len(message):
        raise WireError(f"a message of {len(message)} bytes describes {_aligned(reader.end)}")
    return sample


def path_name(path: Path) -> str:
    """Return a path as code: sample['meta'][0]."""
    return "sample" + "".join(f"[{step!r}]" for step in path)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def flat_bytes(buffer: Buffer) -> Bytes:
    """Return the bytes of a buffer in C order, uint8 (num_bytes,); a view if its elements are in C order."""
    if isinstance(buffer, torch.Tensor):
        plain = buffer.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        if not all(plain.stride()):  # torch calls an empty tensor contiguous, but cannot view this one as bytes
            plain = plain.clone(memory_format=torch.contiguous_format)
        flat: Bytes = plain.view(torch.uint8).numpy()
        return flat
    if isinstance(buffer, np.ndarray):
        return np.ascontiguousarray(buffer).reshape(-1).view(np.uint8)
    return np.frombuffer(buffer.tobytes() if isinstance(buffer, memoryview) else buffer, np.uint8)


# --- sample -> tree


def _describe(value: Any, depth: int, buffers: list[Buffer]) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if depth > _MAX_DEPTH:
        raise _TooDeep
    describer = _DESCRIBERS.get(kind)
    if describer is not None:
        return describer(value, depth, buffers)
    if isinstance(value, np.generic):
        return ["scalar", *_describe_array(np.asarray(value), depth, buffers)[1:2]]
    advice = "send tensors, numpy arrays, bytes, str, numbers, None, and dicts, lists and tuples of them"
    if kind.__module__.partition(".")[0] == "PIL":
        advice = "keep the encoded bytes in the sample, and decode them after post_balance"
    raise _CannotBeSent(f"is a {kind.__module__}.{kind.__qualname__}, which cannot be sent: {advice}")


class _CannotBeSent(Exception):
    """Why a value cannot be sent, and its path in the sample: each level that the error passes adds a step."""

    def __init__(self, why: str) -> None:
        self.why = why
        self.path: list[Any] = []


class _TooDeep(_CannotBeSent):
    def __init__(self) -> None:
        super().__init__(f"is nested deeper than {_MAX_DEPTH} levels: flatten the sample")


def _describe_list(value: Any, depth: int, buffers: list[Buffer]) -> Any:
    tree: list[Any] = ["list" if type(value) is list else "tuple"]
    for item in value:
        try:
            tree.append(item if type(item) in _PLAIN else _describe(item, depth + 1, buffers))
        except _CannotBeSent as error:
            error.path.append(len(tree) - 1)
            raise
    return tree


def _describe_dict(value: dict[Any, Any], depth: int, buffers: list[Buffer]) -> Any:
    tree: list[Any] = ["dict"]
    for key, item in value.items():
        if type(key) is not str and type(key) is not int:
            raise _CannotBeSent(f"has the key {key!r} of type {type(key).__name__}: use str or int")
        try:
            tree += (
                key if type(key) is str else _describe(key, depth, buffers),
                item if type(item) in _PLAIN else _describe(item, depth + 1, buffers),
            )
        except _CannotBeSent as error:
            error.path.append(key)
            raise
    return tree


def _describe_bytes(value: Any, depth: int, buffers: list[Buffer]) -> Any:  # noqa: ARG001 - as the others
    buffers.append(value)
    return ["bytes", value.nbytes if isinstance(value, memoryview) else len(value)]


def _describe_array(value: NDArray[Any], depth: int, buffers: list[Buffer]) -> Any:  # noqa: ARG001 - as the others
    if value.dtype.kind not in _NUMPY_KINDS:
        raise _CannotBeSent(f"is a numpy array of dtype {value.dtype}: only numbers and bools can be sent")
    buffers.append(value)
    return ["array", value.dtype.str, list(value.shape)]


def _describe_tensor(value: torch.Tensor, depth: int, buffers: list[Buffer]) -> Any:  # noqa: ARG001 - as the others
    name = str(value.dtype).removeprefix("torch.")
    is_dense = value.layout == torch.strided and not value.is_nested
    if value.device.type != "cpu" or not is_dense or name not in _TORCH_DTYPES:
        raise _CannotBeSent(
            f"is a tensor of {value.dtype}, layout {value.layout}, on {value.device}: only dense ones on the CPU can be"
            " sent; move it to the device after post_balance"
        )
    if value.requires_grad:
        raise _CannotBeSent("requires grad, which cannot be sent: detach it")
    buffers.append(value)
    return ["tensor", name, list(value.shape)]


_PLAIN = frozenset({type(None), bool, float, str})
_DESCRIBERS: dict[type, Callable[[Any, int, list[Buffer]], Any]] = {
    int: lambda value, depth, buffers: value if -(2**63) <= value < 2**63 else ["int", hex(value)],
    list: _describe_list,
    tuple: _describe_list,
    dict: _describe_dict,
    bytes: _describe_bytes,
    bytearray: _describe_bytes,
    memoryview: _describe_bytes,
    np.ndarray: _describe_array,
    np.memmap: _describe_array,
    torch.Tensor: _describe_tensor,
}
_TORCH_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
        *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    )
}


# --- tree -> sample


class _Reader:
    """Buffers one after another in a message, as `Message.write_to` writes them."""

    def __init__(self, message: Bytes, end: int) -> None:
        self.end = end
        self._message = message

    def take(self, num_bytes: int) -> Bytes:
        start = _aligned(self.end)
        if num_bytes < 0 or start + num_bytes > _aligned(len(self._message)):
            raise WireError(f"a buffer of {num_bytes} bytes at {start} is not within {len(self._message)} bytes")
        self.end = start + num_bytes
        if self.end > len(self._message):
            raise WireError(f"a message of {len(self._message)} bytes is cut: a buffer ends at {self.end}")
        return self._message[start : self.end]


def _read(tree: Any, reader: _Reader) -> Any:
    if type(tree) is not list:
        if type(tree) is dict:
            raise WireError("a header has no JSON objects")
        return tree
    tag, *rest = tree
    reading = _READERS.get(tag) if type(tag) is str else None
    if reading is None:
        raise WireError(f"unknown tag {tag!r}")
    return reading(rest, reader)


def _read_items(rest: list[Any], reader: _Reader) -> list[Any]:
    return [node if type(node) in _PLAIN or type(node) is int else _read(node, reader) for node in rest]


def _read_dict(rest: list[Any], reader: _Reader) -> dict[Any, Any]:
    if len(rest) % 2:
        raise WireError("a dict has a key without a value")
    items = _read_items(rest, reader)
    return dict(zip(items[::2], items[1::2], strict=True))


def _read_bytes(rest: list[Any], reader: _Reader) -> bytes:
    (num_bytes,) = rest
    return reader.take(num_bytes).tobytes()


def _read_array(rest: list[Any], reader: _Reader) -> NDArray[Any]:
    name, shape = rest
    # numpy evaluates other names, as "(1,2)i4", like expressions.
    if not isinstance(name, str) or _NUMPY_NAME.fullmatch(name) is None:
        raise WireError(f"no array of dtype {name!r:.80} can be sent")
    dtype = np.dtype(name)
    _check_sides(shape)
    array: NDArray[Any] = reader.take(prod(shape) * dtype.itemsize).view(dtype).reshape(shape)
    return array


def _read_tensor(rest: list[Any], reader: _Reader) -> torch.Tensor:
    name, shape = rest
    dtype = _TORCH_DTYPES[name]
    _check_sides(shape)
    flat = reader.take(prod(shape) * dtype.itemsize)
    # Not a slice of one large tensor: torch.save writes the whole storage of a view.
    return torch.frombuffer(flat, dtype=dtype).view(shape) if len(flat) else torch.empty(shape, dtype=dtype)


def _check_sides(shape: Any) -> None:
    is_shape = type(shape) is list and len(shape) <= _MAX_DEPTH
    if not (is_shape and all(type(side) is int and 0 <= side < _MAX_SIDE for side in shape)):
        raise WireError(f"no array has the shape {shape!r:.80}")


_READERS: dict[str, Callable[[list[Any], _Reader], Any]] = {
    "int": lambda rest, reader: int(rest[0], 16),
    "list": _read_items,
    "tuple": lambda rest, reader: tuple(_read_items(rest, reader)),
    "dict": _read_dict,
    "bytes": _read_bytes,
    "array": _read_array,
    "scalar": lambda rest, reader: _read_array([*rest, []], reader)[()],
    "tensor": _read_tensor,
}
