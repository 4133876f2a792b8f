"""The data of golden cases: shards whose bytes are the same on every machine, and small torch data sets."""

from __future__ import annotations

import io
import json
import shutil
import struct
import tarfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

import orchdata as od

RATE = 16_000
# The sides of pictures are multiples of 16 and no picture has more than 12 tokens, so that none is resized.
RECIPE = od.Recipe(
    image=od.ImagePreprocessor(patch_size=8, merge=2, min_tokens=1, max_tokens=12, dtype="uint8"),
    audio=od.AudioPreprocessor(num_mels=16, dtype="float32"),
)
OTHER_TEXT = od.TextPreprocessor(
    template=od.ChatTemplate(suffix="<end>"), image_placeholder="[img]", fields=("caption",), eos_token_id=260
)
RECIPES: dict[str, od.Recipe] = {
    "omni": RECIPE,
    "omni in float32": od.Recipe(image=replace(RECIPE.image, dtype="float32"), audio=RECIPE.audio),
    "omni, as waves": od.Recipe(
        image=RECIPE.image, audio=od.AudioPreprocessor(features="normalized_waveform", hop_length=320)
    ),
    "chat": od.Recipe(image=RECIPE.image, audio=RECIPE.audio, text=OTHER_TEXT),
    "text": od.Recipe(image=RECIPE.image, audio=RECIPE.audio, text=replace(OTHER_TEXT, eos_token_id=None)),
    "long": od.Recipe(image=None, audio=None, text=od.TextPreprocessor(max_tokens=48, overflow="split")),
    "records": od.Recipe(image=RECIPE.image, audio=None),
    "plain": od.Recipe(image=None, audio=None),
}
FILES_OF_RECIPE = {name: name for name in ("omni", "chat", "text", "long", "records")} | {
    "omni in float32": "omni",
    "omni, as waves": "omni",
    "plain": "long",
}
OTHER_CONTAINERS = ("parquet", "arrow", "notes")
"""Files that all have the recipe "records"."""
FOLDER = Path(__file__).resolve().parents[1] / "orchdata" / "golden"


def draw(*numbers: int) -> int:
    """A number below 2**31 that follows from the given ones: steps of a linear congruential generator."""
    state = 1
    for number in (*numbers, 0, 0):
        state = ((state + number) * 6364136223846793005 + 1442695040888963407) % 2**64
    return state >> 33


class GoldenData:
    """The shards in a folder, and the data sets over them."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._urls = {name: write(folder) for name, write in _FILES.items()}
        # Writers of these formats write other bytes from release to release, so the files are kept.
        self._urls |= {name: [shutil.copy(FOLDER / f"table.{name}", folder)] for name in ("parquet", "arrow")}
        self._sets: dict[str, od.ShardDataset] = {}

    def shards(self, name: str) -> od.ShardDataset:
        """A data set by the name of its recipe; it is made, and indexed, once."""
        if name not in self._sets:
            other = name in OTHER_CONTAINERS
            files, recipe = (name, "records") if other else (FILES_OF_RECIPE[name], name)
            containers = [Notes()] if name == "notes" else []
            self._sets[name] = od.ShardDataset(self._urls[files], RECIPES[recipe], containers=containers)
            self._sets[name].index()  # several ranks refuse to build it
        return self._sets[name]


def _omni(folder: Path) -> list[str]:
    """Text, image and text, audio and text, two images in a chat, and everything at once, in turn."""
    return [_write_tar(folder / f"omni-{shard}.tar", [_omni_sample(shard, n) for n in range(12)]) for shard in range(3)]


def _chat(folder: Path) -> list[str]:
    samples = [{"__key__": f"c{n:02d}", "json": _chat_bytes("tell me", _words(5 + 7 * n % 40, n))} for n in range(14)]
    samples[3] |= {"png": _png(32, 16, 3), "json": _chat_bytes("[img] what is it", "a picture")}
    return [_write_tar(folder / "chat.tar", samples)]


def _text(folder: Path) -> list[str]:
    samples = [{"__key__": f"t{n}", "caption": f"short {n}".encode()} for n in range(9)]
    return [_write_tar(folder / "text.tar", samples)]


def _long(folder: Path) -> list[str]:
    """Texts that are split into pieces of at most 48 tokens."""
    samples = [{"__key__": f"l{n}", "txt": _words(1 + draw(1, n) % 40, n).encode()} for n in range(12)]
    return [_write_tar(folder / "long.tar", samples)]


def _records(folder: Path) -> list[str]:
    lines = [json.dumps({"id": f"r{n}", "text": _words(1 + draw(2, n) % 12, n)}) for n in range(10)]
    (folder / "records.jsonl").write_bytes("".join(f"{line}\n" for line in lines).encode())
    return [str(folder / "records.jsonl")]


def _notes(folder: Path) -> list[str]:
    lines = [f"n{n}\t{_words(1 + draw(7, n) % 12, n)}\n" for n in range(11)]
    (folder / "notes.notes").write_text("".join(lines))
    return [str(folder / "notes.notes")]


_FILES = {"omni": _omni, "chat": _chat, "text": _text, "long": _long, "records": _records, "notes": _notes}


class NotesShard(od.Shard):
    """A sample in each line: its key and its text."""

    def __init__(self, source: od.ShardSource) -> None:
        with source.file() as file:
            self._lines = [line.split("\t") for line in file.read().decode().splitlines()]

    def facts(self) -> pa.Table:
        return pa.table({"key": [key for key, _ in self._lines], "field": ["txt"] * len(self._lines)})

    def read(self, rows: Sequence[int]) -> list[bytes]:
        return [self._lines[row][1].encode() for row in rows]


@dataclass(frozen=True)
class Notes(od.Container):
    """A container of the user's."""

    def claims(self, path: str) -> bool:
        return path.endswith(".notes")

    def open(self, source: od.ShardSource) -> NotesShard:
        return NotesShard(source)


def _omni_sample(shard: int, number: int) -> dict[str, Any]:
    seed = 100 * shard + number
    side, words = 16 * (1 + draw(3, seed) % 4), _words(1 + draw(4, seed) % 30, seed)
    picture, sound = _png(side, 48, seed), _wav(1600 + draw(5, seed) % 6_400, seed)
    fields: Sequence[Mapping[str, bytes]] = (
        {"txt": f"plain {words}".encode()},
        {"png": picture, "txt": words.encode()},
        {"wav": sound, "txt": words.encode()},
        {"0.png": picture, "1.png": _png(32, side, seed), "json": _chat_bytes("is <image> like <image> ?", words)},
        {"png": picture, "wav": sound, "json": _chat_bytes("<image> and <audio> tell", words)},
    )
    return {"__key__": f"s{shard}{number:02d}", **fields[number % 5]}


def _words(count: int, seed: int) -> str:
    return " ".join(("ab", "cde", "fghi", "j")[draw(6, seed, place) % 4] for place in range(count))


def _chat_bytes(user: str, assistant: str) -> bytes:
    return json.dumps([{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]).encode()


def _png(width: int, height: int, seed: int) -> bytes:
    """A picture of 8-bit RGB, stored: zlib's own compression may differ from release to release."""
    values = [
        [
            (seed * 29 + column * (7 + channel) + row * (11 - channel)) % 256
            for column in range(width)
            for channel in range(3)
        ]
        for row in range(height)
    ]
    raw = b"".join(b"\0" + bytes(row) for row in values)
    assert len(raw) < 1 << 16  # one stored block
    stored = b"\x78\x01\x01" + struct.pack("<HH", len(raw), len(raw) ^ 0xFFFF) + raw
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", stored + struct.pack(">I", zlib.adler32(raw))),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )


def _wav(frames: int, seed: int) -> bytes:
    """Mono, 16 bits: two triangle waves around 0, whose periods follow from the seed."""
    periods = (40 + 8 * (seed % 5), 12 + 4 * (seed % 3))
    samples = [sum(_triangle(n, period) for period in periods) for n in range(frames)]
    data = struct.pack(f"<{frames}h", *samples)
    head = struct.pack("<IHHIIHH", 16, 1, 1, RATE, 2 * RATE, 2, 16)
    return (
        b"RIFF" + struct.pack("<I", 36 + len(data)) + b"WAVEfmt " + head + b"data" + struct.pack("<I", len(data)) + data
    )


def _triangle(place: int, period: int) -> int:
    """From -4000 to 4000 and back in a period, a multiple of 4."""
    return 16_000 * abs((place + period // 4) % period - period // 2) // period - 4000


def _write_tar(path: Path, samples: Sequence[Mapping[str, Any]]) -> str:
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for sample in samples:
            for field, data in sample.items():
                if field != "__key__":
                    member = tarfile.TarInfo(f"{sample['__key__']}.{field}")  # its times and owners are 0
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    return str(path)


class Numbers(Dataset[Any]):
    """Its items are their numbers; it holds no state."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> int:
        return number


class Counted(Numbers):
    """It holds how many items it has given, and gives that too."""

    given = 0

    def __getitem__(self, number: int) -> Any:
        self.given += 1
        return number, self.given

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.given = state["given"]


class Upwards(Sampler[int]):
    """A sampler that holds its state. Its second epoch begins where the first has ended."""

    def __init__(self) -> None:
        self.epoch = self.place = 0

    def __iter__(self) -> Iterator[int]:
        while self.place < 10:
            self.place += 1
            yield self.epoch * 10 + self.place - 1
        self.place, self.epoch = 0, self.epoch + 1

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "place": self.place}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.epoch, self.place = state["epoch"], state["place"]


class Plain(IterableDataset[Any]):
    """Each worker gives (its number, the place). Workers have 3, 11 and 6 items. It holds no state."""

    sizes = (3, 11, 6)

    def __iter__(self) -> Iterator[Any]:
        worker = _worker()
        for place in range(self.sizes[worker] if get_worker_info() else 11):
            yield worker, place


class Held(IterableDataset[Any]):
    """Each worker gives (its number, the pass, the place), as many as of `Plain`. It holds its state."""

    def __init__(self) -> None:
        self.place = self.passes = 0
        self.resumed: int | None = None

    def __iter__(self) -> Iterator[Any]:
        worker = _worker()
        self.place, self.resumed = self.resumed or 0, None
        for place in range(self.place, Plain.sizes[worker] if get_worker_info() else 11):
            self.place = place + 1
            yield worker, self.passes, place
        self.place, self.passes = 0, self.passes + 1

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place, "passes": self.passes}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.resumed, self.passes = state["place"], state["passes"]


class Walks(IterableDataset[Any]):
    """Its iterators hold their state."""

    def __iter__(self) -> Walk:
        return Walk()


class Walk:
    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Walk:
        return self

    def __next__(self) -> Any:
        if self.place == 7:
            raise StopIteration
        self.place += 1
        return _worker(), self.place

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.place = state["place"]


def _worker() -> int:
    info = get_worker_info()
    return 0 if info is None else info.id
