"""Does a node build what the trainer would? Each actor compares what it has with what the trainer has, as it starts.

trainer: versions, fingerprints of recipes, one decoded part of each modality --Expected--> actor: differences, in words

Another version, or other code of the user's under the same id, would give other batches, and nothing else would say it.
"""

from __future__ import annotations

import platform
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from orchdata.building.contents import IndexedShards, shard_loader
from orchdata.loaders.environment import OWN, distribution_of
from orchdata.loaders.errors import DataError, ShardError, StaleIndexError, StorageError
from orchdata.loaders.generators import Pass
from orchdata.loaders.index.index import Index
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.samples.sample import MediaPart, Sample

_ALWAYS: Final = ("orchdata", "ray", "torch", "numpy", "numba", "pyarrow")
_PIXELS: Final = ("image", "video")
_MOST_FOLDERS: Final = 8
_NEAR: Final = 1e-2
"""Relative difference of the mean size of floats that other CPUs may give; the values themselves are nearer."""

Facts = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What the trainer has.

    Attributes:
        versions: package, or "Python", -> its version, without the local part.
        recipes: fingerprints.
        samples: row -> what its parts decode to, see `_decoded`.
    """

    versions: Mapping[str, str]
    recipes: tuple[str, ...]
    samples: Mapping[int, Facts]


_known: dict[tuple[str, tuple[str, ...]], Mapping[int, Facts]] = {}
"""Samples that this process has decoded, of the last index and recipes: each epoch may start actors."""


def expected_by(spec: Any) -> Expected:
    """Return what actors must have to build the steps of a spec as this process would. Raises as reading shards."""
    shards: IndexedShards | None = getattr(spec, "shards", None)
    recipes = () if shards is None else shards.recipes
    fingerprints = tuple(recipe.fingerprint() for recipe in recipes)
    samples: Mapping[int, Facts] = {}
    if shards is not None:
        key = shards.build_id, fingerprints
        if key not in _known:
            decoded = _samples(shards, _rows(shards.index, shards))
            _known.clear()
            _known[key] = decoded
        samples = _known[key]
    return Expected(versions=_versions(recipes), recipes=fingerprints, samples=samples)


def check_same(spec: Any, expected: Expected, address: str) -> None:
    """Raise RuntimeError if this process cannot read the data, or would build other steps than the trainer."""
    shards: IndexedShards | None = getattr(spec, "shards", None)
    recipes = () if shards is None else shards.recipes
    found = _versions(recipes)
    wrong = [
        f"{name} is {found.get(name, 'missing')} here and {there} in the training process"
        for name, there in expected.versions.items()
        if found.get(name) != there
    ]
    if tuple(recipe.fingerprint() for recipe in recipes) != expected.recipes:
        wrong.append("the recipe has another fingerprint here: a module that it uses differs")
    if not wrong and shards is not None:
        try:
            here = _samples(shards, list(expected.samples))
        except (ShardError, StorageError, StaleIndexError) as error:
            raise RuntimeError(
                f"node {address} cannot read the data as the training process does: {error}. All nodes need the shards "
                "under the same paths or URLs, and the credentials for them"
            ) from error
        wrong += [
            f"{shards.name_of(row)}: {what}"
            for row, there in expected.samples.items()
            for what in _differences(here[row], there)
        ]
    if wrong:
        raise RuntimeError(
            f"node {address} would build other batches than the training process: {'; '.join(wrong)}. Install the same "
            "packages and code on all nodes, or send code with od.RayEngine(runtime_env={'working_dir': '.'})"
        )


def _versions(recipes: Sequence[Recipe]) -> dict[str, str]:
    users: list[Any] = [user for recipe in recipes for user in (recipe.text, *recipe.modalities.values())]
    modules = {module.partition(".")[0] for user in users for module in user.required_modules()}
    names = {*_ALWAYS, *filter(None, map(distribution_of, sorted(modules - {OWN})))}
    versions = {"Python": platform.python_version()}
    for name in sorted(names):
        try:
            versions[name] = version(name).partition("+")[0]
        except PackageNotFoundError:
            continue
    return versions


def _rows(index: Index, shards: IndexedShards) -> list[int]:
    """Return rows with one part of each modality, and the first of a shard in each folder or bucket."""
    first = getattr(index, "indexes", (index,))[0]  # of a mixture the first source
    bad = set(first.bad_rows()[: 1 << 16].tolist())
    rows: set[int] = set()
    for name in shards.recipe.modalities:
        rows.update(_first_with(first, name, bad))
    folders: dict[str, int] = {}
    for number, shard in enumerate(first.shards):
        start, stop = first.shard_rows[number : number + 2].tolist()
        folder = shard.url.rpartition("/")[0]
        usable = next((row for row in range(start, min(stop, start + 64)) if row not in bad), None)
        if folder not in folders and usable is not None:
            folders[folder] = usable
        if len(folders) == _MOST_FOLDERS:
            break
    return sorted(rows | set(folders.values()))


def _first_with(index: Index, modality: str, bad: set[int]) -> Iterator[int]:
    if modality not in index.modalities:
        return
    code = index.code(modality)
    for start in range(0, index.part_modality.size, 1 << 16):
        for part in np.flatnonzero(index.part_modality[start : start + (1 << 16)] == code)[:64].tolist():
            row = int(np.searchsorted(index.part_offsets, start + part, side="right")) - 1
            if row not in bad:
                yield row
                return


def _samples(shards: IndexedShards, rows: Sequence[int]) -> dict[int, Facts]:
    """Decode samples with a fixed generator. Raises what reading their shards raises.

    The global random generators are left as they were.
    """
    opened, python, numpy = shards.open(), random.getstate(), np.random.get_state()  # noqa: NPY002
    load = shard_loader(shards.index, opened, shards.recipe_of)
    try:
        with torch.random.fork_rng(devices=[]):
            return {row: _loaded(load, row) for row in rows}
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        opened.close()


def _loaded(load: Any, row: int) -> Facts:
    try:
        return _decoded(load(row, Pass()))
    except DataError as error:  # it is one of the loader's failures, there and here
        return {"failure": f"{error.field}: {error.reason}"}


def _decoded(sample: Sample) -> Facts:
    """Return what must be equal on all nodes: digests of what integers decide, and sizes of floats."""
    facts: Facts = {}
    for number, part in enumerate(sample.parts):
        if not isinstance(part, MediaPart):
            facts[f"text {number}"] = _digest(part.token_ids, part.loss)
            continue
        for name, values in part.arrays.items():
            about = f"{part.modality} {number}, {name}"
            exact = values.dtype.kind in "iub" or (part.modality in _PIXELS and _has_avx2())
            facts[f"{about}: shape"] = [*values.shape, str(values.dtype)]
            size = float(np.abs(values.astype(np.float64)).mean()) if values.size else 0.0
            facts[f"{about}: values"] = _digest(values) if exact else size
    return facts


def _digest(*arrays: np.ndarray[Any, Any]) -> str:
    digest = blake2b(digest_size=16)
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _differences(here: Facts, there: Facts) -> Iterator[str]:
    for name in sorted(here.keys() | there.keys()):
        one, other = here.get(name), there.get(name)
        if isinstance(one, float) and isinstance(other, float):
            if abs(one - other) > _NEAR * max(abs(one), abs(other)):
                yield f"{name} are others (of mean size {one:g} here, {other:g} there)"
        elif type(one) is type(other) and one != other:
            yield f"{name} {'are others' if name.endswith('values') else 'differs'}"
        elif (one is None) != (other is None):
            yield f"{name} is only {'here' if other is None else 'there'}"


@cache
def _has_avx2() -> bool:
    """Whether torch resizes floats as most processors do."""
    try:
        return " avx2 " in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
