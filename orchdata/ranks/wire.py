"""Samples as bytes and back, without pickle.

A message is 16 bytes (a mark, the length of the header), a JSON header that describes the sample as a tree, and the
buffers the tree speaks of in its order, each at a multiple of 64 bytes. Nothing in it is executed, and every length is
checked before it is used.

    None, bool, int, float, str   JSON values; integers beyond 64 bits in hexadecimal
    list, tuple, dict             [tag, ...]; keys are str or int
    bytes-like                    a buffer; comes back as bytes
    numpy array or scalar         dtype, shape, a buffer in C order
    torch tensor on the CPU       dtype, shape, a buffer, contiguous
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from orchdata.loaders.errors import OrchdataError

ALIGNMENT = 64
_MARK = 0x3157_4454_4144_4352
_PREFIX_BYTES = 16
_MAX_DEPTH = 64
_NUMPY_KINDS = "biufc"

Bytes = NDArray[np.uint8]
Path = tuple[Any, ...]
Buffer = torch.Tensor | NDArray[Any] | bytes | bytearray | memoryview


class WireError(OrchdataError, ValueError):
    """A message that is cut, or not one of ours."""


@dataclass(frozen=True, slots=True)
class Message:
    """A sample ready to be written; its buffers still belong to the sample, and are copied only when written.

    Attributes:
        header: JSON, UTF-8.
        buffers: in the order of the tree.
        num_bytes: of the whole message, a multiple of 64.
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
            flat = _flat(buffer)
            end = start + len(flat)
            out[start:end] = flat
        out[end:] = 0


def describe(sample: Any) -> Message:
    """The message of a sample, without copying its buffers.

    Raises:
        TypeError: a value of another type, a tensor off the CPU or that requires grad; names its path in the sample.
        ValueError: deeper than 64 levels, as a list that contains itself is.
    """
    buffers: list[Buffer] = []
    tree = _describe(sample, (), buffers)
    header = json.dumps(tree, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    num_bytes = _aligned(_PREFIX_BYTES + len(header))
    for buffer in buffers:
        num_bytes += _aligned(buffer.nbytes if not isinstance(buffer, bytes | bytearray) else len(buffer))
    return Message(header, buffers, num_bytes)


def read(message: Bytes) -> Any:
    """The sample of a message, uint8 (num_bytes,).

    Arrays and tensors are views of the message: writable if it is, and they keep it alive.

    Raises:
        WireError: the message is cut, has more than its header says, or is no message.
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
    """As code: sample['meta'][0]."""
    return "sample" + "".join(f"[{step!r}]" for step in path)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _flat(buffer: Buffer) -> Bytes:
    """The bytes of a buffer in C order, uint8 (num_bytes,)."""
    if isinstance(buffer, torch.Tensor):
        plain = buffer.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        if not all(plain.stride()):  # Contiguous for torch where there is no element, but not viewed as bytes.
            plain = plain.clone(memory_format=torch.contiguous_format)
        flat: Bytes = plain.view(torch.uint8).numpy()
        return flat
    if isinstance(buffer, np.ndarray):
        return np.ascontiguousarray(buffer).reshape(-1).view(np.uint8)
    return np.frombuffer(buffer.tobytes() if isinstance(buffer, memoryview) else buffer, np.uint8)


# --- sample -> tree


def _describe(value: Any, path: Path, buffers: list[Buffer]) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if len(path) > _MAX_DEPTH:
        raise ValueError(f"{path_name(path[:3])}... is nested deeper than {_MAX_DEPTH} levels: flatten the sample")
    describer = _DESCRIBERS.get(kind)
    if describer is not None:
        return describer(value, path, buffers)
    if isinstance(value, np.generic):
        return ["scalar", *_describe_array(np.asarray(value), path, buffers)[1:2]]
    advice = "send tensors, numpy arrays, bytes, str, numbers, None, and dicts, lists and tuples of them"
    if kind.__module__.partition(".")[0] == "PIL":
        advice = "keep the encoded bytes in the sample, and decode them after post_balance"
    raise TypeError(f"{path_name(path)} is a {kind.__module__}.{kind.__qualname__}, which cannot be sent: {advice}")


def _describe_list(value: Any, path: Path, buffers: list[Buffer]) -> Any:
    tag = "list" if type(value) is list else "tuple"
    return [tag, *[_describe(item, (*path, index), buffers) for index, item in enumerate(value)]]


def _describe_dict(value: dict[Any, Any], path: Path, buffers: list[Buffer]) -> Any:
    tree: list[Any] = ["dict"]
    for key, item in value.items():
        if type(key) not in (str, int):
            raise TypeError(f"{path_name(path)} has the key {key!r} of type {type(key).__name__}: use str or int")
        tree.append(_describe(key, path, buffers))
        tree.append(_describe(item, (*path, key), buffers))
    return tree


def _describe_bytes(value: Any, path: Path, buffers: list[Buffer]) -> Any:  # noqa: ARG001 - as the others
    buffers.append(value)
    return ["bytes", value.nbytes if isinstance(value, memoryview) else len(value)]


def _describe_array(value: NDArray[Any], path: Path, buffers: list[Buffer]) -> Any:
    if value.dtype.kind not in _NUMPY_KINDS:
        raise TypeError(
            f"{path_name(path)} is a numpy array of dtype {value.dtype}: only numbers and bools can be sent"
        )
    buffers.append(value)
    return ["array", value.dtype.str, list(value.shape)]


def _describe_tensor(value: torch.Tensor, path: Path, buffers: list[Buffer]) -> Any:
    name = str(value.dtype).removeprefix("torch.")
    if value.device.type != "cpu" or value.layout != torch.strided or name not in _TORCH_DTYPES:
        raise TypeError(
            f"{path_name(path)} is a tensor of {value.dtype}, layout {value.layout}, on {value.device}: only dense ones"
            " on the CPU can be sent; move it to the device after post_balance"
        )
    if value.requires_grad:
        raise TypeError(f"{path_name(path)} requires grad, which does not travel: detach it")
    buffers.append(value)
    return ["tensor", name, list(value.shape)]


_PLAIN = frozenset({type(None), bool, float, str})
_DESCRIBERS: dict[type, Callable[[Any, Path, list[Buffer]], Any]] = {
    int: lambda value, path, buffers: value if -(2**63) <= value < 2**63 else ["int", hex(value)],
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
    """Hands out the buffers of a message in turn."""

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
    if not isinstance(tree, list):
        if isinstance(tree, dict):
            raise WireError("a header has no JSON objects")
        return tree
    tag, *rest = tree
    reading = _READERS.get(tag) if isinstance(tag, str) else None
    if reading is None:
        raise WireError(f"unknown tag {tag!r}")
    return reading(rest, reader)


def _read_dict(rest: list[Any], reader: _Reader) -> dict[Any, Any]:
    if len(rest) % 2:
        raise WireError("a dict has a key without a value")
    items = [_read(node, reader) for node in rest]
    return dict(zip(items[::2], items[1::2], strict=True))


def _read_bytes(rest: list[Any], reader: _Reader) -> bytes:
    (num_bytes,) = rest
    return reader.take(num_bytes).tobytes()


def _read_array(rest: list[Any], reader: _Reader) -> NDArray[Any]:
    name, shape = rest
    dtype = np.dtype(name)
    if dtype.kind not in _NUMPY_KINDS or dtype.str != name or min(shape, default=0) < 0:
        raise WireError(f"no array of dtype {name!r} and shape {shape} can be sent")
    array: NDArray[Any] = reader.take(prod(shape) * dtype.itemsize).view(dtype).reshape(shape)
    return array


def _read_tensor(rest: list[Any], reader: _Reader) -> torch.Tensor:
    name, shape = rest
    dtype = _TORCH_DTYPES[name]
    if min(shape, default=0) < 0:
        raise WireError(f"no tensor has the shape {shape}")
    flat = reader.take(prod(shape) * dtype.itemsize)
    # Not a slice of one large tensor: torch.save writes the whole storage of a view.
    return torch.frombuffer(flat, dtype=dtype).view(shape) if len(flat) else torch.empty(shape, dtype=dtype)


_READERS: dict[str, Callable[[list[Any], _Reader], Any]] = {
    "int": lambda rest, reader: int(rest[0], 16),
    "list": lambda rest, reader: [_read(node, reader) for node in rest],
    "tuple": lambda rest, reader: tuple(_read(node, reader) for node in rest),
    "dict": _read_dict,
    "bytes": _read_bytes,
    "array": _read_array,
    "scalar": lambda rest, reader: _read_array([*rest, []], reader)[()],
    "tensor": _read_tensor,
}
