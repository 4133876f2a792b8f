"""Two modalities that the library does not know, and subclasses of those it has, as a user would write them."""

from __future__ import annotations

import io
import struct
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from shard_factory import audio, chat, jpeg

import orchdata as od
from orchdata.loaders.errors import DecodeError

_TRACK = struct.Struct("<4sI")


@dataclass(frozen=True, kw_only=True)
class Points(od.Modality):
    """A point cloud in a .npy file, (num_points, 3), counted from its bytes; `group` points become a token."""

    fields = ("npy",)

    group: int = 4

    def arrays(self) -> Mapping[str, od.ArraySpec]:
        return {"points": od.ArraySpec((3,), "float32")}

    def count(self, data: bytes | memoryview, limits: od.Limits) -> od.PartSize:
        points = _load(data)
        return od.PartSize(positions=len(points), tokens=-(-len(points) // self.group))

    def decode(self, data: bytes | memoryview, limits: od.Limits) -> Mapping[str, Any]:
        return {"points": _load(data).astype(np.float32)}


@dataclass(frozen=True, kw_only=True)
class Tracks(od.Modality):
    """A signal of values and the time of each, of which every `stride`-th is a token; its header tells the length."""

    fields = ("track",)
    words = ("signal",)
    slot = od.Slot(mark="<track>", token_id=7, start_id=8)
    num_facts = 1
    num_extents = 1

    stride: int = 2

    def arrays(self) -> Mapping[str, od.ArraySpec]:
        return {"values": od.ArraySpec((2,), "bfloat16"), "times": od.ArraySpec((), "int64")}

    @classmethod
    def probe(cls, data: bytes, limits: od.Limits) -> tuple[int, ...]:
        mark, length = _TRACK.unpack_from(data)
        if mark != b"TRCK" or len(data) != _TRACK.size + 16 * length:
            raise DecodeError("not a track")
        return (length,)

    def count_header(self, header: tuple[int, ...], limits: od.Limits) -> od.PartSize:
        (length,) = header
        return od.PartSize(positions=length, tokens=-(-length // self.stride), rows=length, extent=(length,))

    def decode(self, data: bytes | memoryview, limits: od.Limits) -> Mapping[str, Any]:
        import torch

        (length,) = self.probe(bytes(data), limits)
        times = np.frombuffer(data, "<i8", length, _TRACK.size)
        values = np.frombuffer(data, "<f4", 2 * length, _TRACK.size + 8 * length).reshape(length, 2)
        return {"values": torch.tensor(values).to(torch.bfloat16), "times": times}

    def rope(self, size: od.PartSize) -> NDArray[np.int64]:
        return np.stack([np.arange(size.tokens) * self.stride] * 3)


@dataclass(frozen=True, kw_only=True)
class Bad(Points):
    """Decodes nonsense where a cloud has 13 points."""

    kind: str = ""

    def decode(self, data: bytes | memoryview, limits: od.Limits) -> Mapping[str, Any]:
        points = super().decode(data, limits)["points"]
        if len(points) != 13:
            return {"points": points}
        if self.kind == "raises":
            raise KeyError("odd")
        if self.kind == "damaged":
            return super().decode(bytes(data)[:-5], limits)
        wrong: dict[str, Any] = {
            "shape": {"points": points[:-1]},
            "dtype": {"points": points.astype(np.float64)},
            "names": {"clouds": points},
            "too many": {"points": points, "colors": points},
            "none": None,
        }
        found: Mapping[str, Any] = wrong[self.kind]
        return found


@dataclass(frozen=True, kw_only=True)
class Cropped(od.ImagePreprocessor):
    """The left half of each image."""

    half: bool = True

    def count_header(self, header: tuple[int, ...], limits: od.Limits) -> od.PartSize:
        width, height = header
        return super().count_header((width // 2, height), limits)

    def decode_into(self, data: Any, size: od.PartSize, out: Mapping[str, Any], limits: od.Limits) -> None:
        image = Image.open(io.BytesIO(data))
        cropped = io.BytesIO()
        image.crop((0, 0, image.width // 2, image.height)).save(cropped, "PNG")
        plain = od.ImagePreprocessor(**{each.name: getattr(self, each.name) for each in fields(od.ImagePreprocessor)})
        plain.decode_into(cropped.getvalue(), size, out, limits)  # `self` would halve what it counts once more


@dataclass(frozen=True, kw_only=True)
class Loud(od.AudioPreprocessor):
    """Features twice as large."""

    def decode_into(self, data: Any, size: od.PartSize, out: Mapping[str, Any], limits: od.Limits) -> None:
        super().decode_into(data, size, out, limits)
        out["features"][:] *= 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Shouted(od.ChatTemplate):
    mark: str = "!"

    def before(self, role: str) -> str:
        return role.upper() + self.mark


@dataclass(frozen=True, kw_only=True, slots=True)
class Lowered(od.TextPreprocessor):
    shift: int = 0

    def encode(self, text: str) -> Any:
        return od.TextPreprocessor.encode(self, text.lower()) + self.shift


def _load(data: bytes | memoryview) -> NDArray[Any]:
    try:
        points = np.load(io.BytesIO(data), allow_pickle=False)
    except ValueError as error:
        raise DecodeError(f"not a .npy file: {error}") from error
    if points.ndim != 2 or points.shape[1] != 3:
        raise DecodeError(f"an array of shape {points.shape}, not (num_points, 3)")
    return points


def cloud(num_points: int, seed: int = 0) -> bytes:
    out = io.BytesIO()
    np.save(out, np.random.default_rng(seed).normal(size=(num_points, 3)).astype(np.float32))
    return out.getvalue()


def track(length: int, seed: int = 0) -> bytes:
    values = np.random.default_rng(seed).normal(size=(length, 2)).astype("<f4")
    return _TRACK.pack(b"TRCK", length) + np.arange(length, dtype="<i8").tobytes() + values.tobytes()


def mixed_samples(count: int, *, prefix: str = "s", seed: int = 0) -> list[dict[str, Any]]:
    """Text, clouds, tracks, clouds among images, and all of it in a chat, in turn, of varied sizes."""
    random = np.random.default_rng(seed)
    samples = []
    for number in range(count):
        points, length = (int(random.integers(3, 90)) for _ in range(2))
        words = " ".join("word" for _ in range(int(random.integers(1, 30))))
        sample: dict[str, Any] = {"__key__": f"{prefix}{number:04d}"}
        kind = number % 5
        if kind == 0:
            sample["txt"] = words.encode()
        elif kind == 1:
            sample |= {"npy": cloud(points, number), "txt": words.encode()}
        elif kind == 2:
            sample |= {"0.track": track(length, number), "1.track": track(5, number), "txt": b"<track> then <track>"}
        elif kind == 3:
            sample |= {
                "0.npy": cloud(points, number),
                "jpg": jpeg(80, 60, number),
                "json": chat("see <points> and <image>", words),
            }
        else:
            turns = chat("<track> is <points>, <audio>", words)
            sample |= {"npy": cloud(points, number), "track": track(length, number), "wav": audio(0.3), "json": turns}
        samples.append(sample)
    return samples


@dataclass(frozen=True, kw_only=True)
class Posed(Tracks):
    """All that a modality may define: an array of a row a part, extras, writing into the batch's own memory."""

    fields = ("posed",)
    words = ()
    slot = od.Slot()
    num_extents = 2

    def arrays(self) -> Mapping[str, od.ArraySpec]:
        return {"values": od.ArraySpec((2,), "float32"), "pose": od.ArraySpec((2, 2), "uint8", per="part")}

    def count_header(self, header: tuple[int, ...], limits: od.Limits) -> od.PartSize:
        (length,) = header
        return od.PartSize(positions=2 * length, tokens=3, rows=length, extent=(length, 7))

    def decode_into(self, data: Any, size: od.PartSize, out: Mapping[str, NDArray[Any]], limits: od.Limits) -> None:
        length, _ = size.extent
        out["values"][:] = np.frombuffer(data, "<f4", 2 * length, _TRACK.size + 8 * length).reshape(length, 2)
        out["pose"][0] = length

    def extras(self, sizes: Any) -> Mapping[str, NDArray[Any]]:
        return {"lengths": np.array([size.extent[0] for size in sizes], np.int32)}

    def dummy(self) -> od.PartSize:
        return od.PartSize(positions=4, tokens=3, rows=2, extent=(2, 7))

    def decoding_bytes(self, parts: Any) -> int:
        return sum(1_000 * length for (length,), _ in parts)
