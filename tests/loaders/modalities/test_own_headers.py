"""Headers of a modality that the library does not know: when they are probed, and kept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from own_modalities import Tracks, track
from own_shards import indexed, one_shard, parts_of, reasons, recipe_of
from shard_factory import write_shard

import orchdata as od


class Probe:
    calls = 0


@dataclass(frozen=True, kw_only=True)
class Counted(Tracks):
    """Counts how often members are probed."""

    @classmethod
    def probe(cls, data: bytes, limits: od.Limits) -> tuple[int, ...]:
        Probe.calls += 1
        return super().probe(data, limits)


@dataclass(frozen=True, kw_only=True)
class Same(Counted):
    """Keeps the probe."""

    fields = ("track", "other")


@dataclass(frozen=True, kw_only=True)
class Raised(Counted):
    version = 2


@dataclass(frozen=True, kw_only=True)
class Own(Counted):
    @classmethod
    def probe(cls, data: bytes, limits: od.Limits) -> tuple[int, ...]:
        return super().probe(data, limits)


@pytest.fixture
def probed(tmp_path: Path) -> Any:
    """Indexes tracks, and tells how many members were probed."""
    shard = one_shard(tmp_path, *[{"track": track(3 + n)} for n in range(5)], {"track": b"no track at all"})

    def run(modality: od.Modality, **options: Any) -> int:
        before = Probe.calls
        recipe = recipe_of(tracks=modality)
        index = indexed(shard, recipe, **options)
        stride = getattr(modality, "stride", 2)
        assert [size.tokens for size in parts_of(index, "tracks", recipe)] == [-(-n // stride) for n in range(3, 8)]
        assert reasons(index) == {"s5": ("track", "not a track")}
        return Probe.calls - before

    run.shard = shard  # type: ignore[attr-defined]
    return run


def test_headers_are_kept_for_a_probe_and_its_version_under_all_parameters(probed: Any) -> None:
    assert probed(Counted(stride=2)) == 6
    assert probed(Counted(stride=3)) == 0  # the failed one is not tried again either
    assert probed(Same()) == 6  # its class attributes may be what the probe reads
    assert probed(Raised()) == 6
    assert probed(Own()) == 6
    assert probed(Counted(stride=4)) == 0


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "gone"])
def test_damaged_headers_are_probed_again(probed: Any, private_cache: Path, damage: str) -> None:
    assert probed(Counted()) == 6
    (kept,) = private_cache.rglob("*.headers")
    content = bytearray(kept.read_bytes())
    if damage == "flipped":
        content[len(content) // 2] ^= 1
    kept.write_bytes({"cut": content[:-1], "empty": b""}.get(damage, content))
    if damage == "gone":
        kept.unlink()
    assert probed(Counted(stride=3)) == 6
    assert probed(Counted(stride=4)) == 0


def test_a_changed_shard_is_probed_again(probed: Any) -> None:
    assert probed(Counted()) == 6
    write_shard(Path(probed.shard), [{"__key__": "s0", "track": track(40)}])
    before = Probe.calls
    index = indexed(probed.shard, recipe_of(tracks=Counted()), rebuild=True)
    assert [size.positions for size in parts_of(index, "tracks", recipe_of(tracks=Counted()))] == [40]
    assert Probe.calls == before + 1
    indexed(probed.shard, recipe_of(tracks=Counted(stride=3)))
    assert Probe.calls == before + 1
