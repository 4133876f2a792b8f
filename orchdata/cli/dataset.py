"""The data set that a command's paths name, and its index: shards, or a mixture as a YAML file.

by: tokens
stop: repeat
epoch_tokens: 50_000_000_000
sources:
  web: {paths: "web/*.tar", weight: 0.7, recipe: "my_project.data:recipe"}
  speech:
    weight: 0.3
    sources:
      read: {paths: [read.jsonl], media_root: clips, weight: 2, filter: "tokens < 4096"}
      spoken: {paths: [spoken.tar], weight: 1, loss_weight: 0.5}

Paths and folders are relative to the file. A source without a recipe has that of the command. To look at a recipe that
the file names, Python imports a module, which may do anything: only if the command allows it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from orchdata.cli.command import Data, Kind, check_name, load_object, recipe_named
from orchdata.dataset.mixture import Mixture, Source
from orchdata.dataset.shard_dataset import ShardDataset
from orchdata.loaders.child_process import leave_out_what_is_loaded
from orchdata.loaders.index.build import BuildProgress, build_index
from orchdata.loaders.index.index import Index
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.shards.container import Container
from orchdata.loaders.shards.shard import Reading, used_containers
from orchdata.notices import progress_bar
from orchdata.yaml_file import read_yaml

SUFFIXES = (".yaml", ".yml")
_MIXTURE = ("sources", "by", "stop", "stages", "epoch_tokens", "epoch_samples")
_WEIGHTS = ("weight", "loss_weight")
_LEAF = (
    *("paths", "media_root", "columns", "containers", "index_fields", "recipe", "filter", *_WEIGHTS),
    *("key", "storage_options", "index_file"),
)
_OF_ONE_SOURCE: Final = {
    "filter": ("--filter", "a `filter:`"),
    "media_root": ("--media-root", "a `media_root:`"),
    "columns": ("--column", "`columns:`"),
    "key": ("--key", "a `key:`"),
    "index_fields": ("--index-field", "`index_fields:`"),
    "storage_options": ("--storage-options", "`storage_options:`"),
    "index_file": ("--index-file", "an `index_file:`"),
}
"""Keyword of ShardDataset -> the option, and what sources in the file of a mixture have for it."""


def indexed(data: Data) -> tuple[ShardDataset | Mixture, Index]:
    """Return the data set of a command, shards or a mixture, and its index, built where it is missing."""
    if not (len(data.paths) == 1 and data.paths[0].lower().endswith(SUFFIXES)):
        dataset = data.dataset()
        if data.expression is not None:
            dataset = dataset.filter(data.expression)  # before anything is indexed: it may be none
        return dataset, build_of(dataset)
    options = data.options()
    of_one_source = {**options, "filter": data.expression, "key": options["key"] or None}
    for name, (option, field) in _OF_ONE_SOURCE.items():
        if of_one_source[name] not in (None, (), {}):
            raise ValueError(f"{option} is of one data set: give the sources in {data.paths[0]} {field} each")
    from orchdata.dataset.indexed import index_of

    given: dict[str, Any] = {"allow_recipes": data.allow_recipes, "containers": options["containers"]}
    mixture = read_mixture(data.paths[0], recipe_named(data.recipe), **given)
    return mixture, index_of(mixture, build_of)


def build_of(dataset: ShardDataset) -> Index:
    if dataset.index_file is None:
        index = build(dataset.urls, dataset.recipe, dataset.reading, force=False)[0]
    else:
        with progress_bar("indexing shards") as advance:
            index = dataset.index(progress=advance)
    return with_fields(dataset, index, force=False)


def with_fields(dataset: ShardDataset, index: Index, *, force: bool) -> Index:
    """Return the index with the data set's `index_fields`."""
    if not dataset.index_fields:
        return index
    with progress_bar("reading index fields") as advance:
        return dataset.with_fields(index, force=force, progress=advance)


def build(
    urls: Sequence[str],
    recipe: Recipe,
    reading: Reading,
    *,
    force: bool,
    jobs: int = 1,
) -> tuple[Index, int]:
    """Return the index, and the number of its shards that were scanned now; the others were known."""
    scanned = 0
    reading = reading.looked_up(urls)
    with progress_bar("indexing shards") as advance, redirect_stdout(sys.stderr):  # what a tokenizer prints

        def shard_done(shard: BuildProgress) -> None:
            nonlocal scanned
            scanned += shard.measured

        leave_out_what_is_loaded()  # it stays: the collector need not walk it while samples are measured
        how: dict[str, Any] = {"reading": reading, "force": force, "jobs": jobs}
        index = build_index(urls, recipe, **how, progress=shard_done, under_way=advance)
        return index, scanned


def read_mixture(
    path: str | Path, recipe: Recipe, *, allow_recipes: bool = False, containers: tuple[Container, ...] = ()
) -> Mixture:
    """Return the mixture that a file describes; `allow_recipes`: modules that the file names may be imported. Raises
    FileNotFoundError for no such file, or a source without shards; ValueError, which names the file and the field.
    """
    file = Path(path)
    content = read_yaml(file)
    try:
        fields = _fields(content, "the file", _MIXTURE)
        described = _File(file.parent, recipe, allow_recipes, containers)
        sources = described.sources(fields.pop("sources", None), "sources")
        if isinstance(stages := fields.get("stages"), list):
            fields["stages"] = [tuple(stage) if isinstance(stage, list) else stage for stage in stages]
        return Mixture(sources, **fields)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file}: {error}") from error


@dataclass(frozen=True, slots=True)
class _File:
    """What is the same for all sources of a file."""

    folder: Path
    recipe: Recipe
    allow_recipes: bool
    containers: tuple[Container, ...]

    def sources(self, content: Any, field: str) -> dict[str, Source]:
        if not isinstance(content, Mapping) or not content:
            raise ValueError(f'{field} must name sources, as in `{field}: {{web: {{paths: "web/*.tar", weight: 1}}}}`')
        return {str(name): self.source(value, f"{field}.{name}") for name, value in content.items()}

    def source(self, content: Any, field: str) -> Source:
        dataset: Mixture | ShardDataset
        if isinstance(content, Mapping) and "sources" in content:
            fields = _fields(content, field, ("sources", *_WEIGHTS))
            dataset = Mixture(self.sources(fields.pop("sources"), f"{field}.sources"))
        else:
            fields = _fields(content, field, _LEAF)
            weights = {name: fields.pop(name) for name in _WEIGHTS if name in fields}
            dataset, fields = self.shards(fields, field), weights
        try:
            return Source(dataset, **fields)
        except ValueError as error:
            raise ValueError(f"{field}: {error}") from error

    def shards(self, fields: dict[str, Any], field: str) -> ShardDataset:
        for name in ("media_root", "filter", "index_file"):
            if not isinstance(value := fields.get(name), str | None):
                raise ValueError(f"{field}.{name} must be a text, got {value!r:.80}")
        paths, expression = fields.pop("paths", None), fields.pop("filter", None)
        listed = [paths] if isinstance(paths, str) else paths
        if not listed or not isinstance(listed, list) or not all(isinstance(each, str) for each in listed):
            raise ValueError(f"{field}.paths must be a path, or a list of paths, of shards, got {paths!r}")
        urls = [self.relative(each) for each in listed]

        # What a source does not name is that of the command.
        name, names = fields.pop("recipe", None), fields.pop("containers", None)
        recipe = self.recipe if name is None else self.imported(name, Recipe, f"{field}.recipe", "recipe")
        if names is None:
            containers = used_containers(self.containers, urls)
        elif isinstance(names, list):
            abstract: Any = Container
            containers = tuple(self.imported(each, abstract, f"{field}.containers", "container") for each in names)
        else:
            raise ValueError(f"{field}.containers must be a list of MODULE:NAME, got {names!r:.80}")
        fields |= {name: self.relative(fields[name]) for name in ("media_root", "index_file") if fields.get(name)}
        try:
            dataset = ShardDataset(urls, recipe, containers=containers, **fields)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{field}: {error}") from error
        return dataset if expression is None else dataset.filter(expression)

    def relative(self, path: str) -> str:
        return path if "://" in path else str(self.folder / path)

    def imported(self, name: Any, kind: type[Kind], field: str, option: str) -> Kind:
        module = check_name(name, field)
        if not self.allow_recipes:
            raise ValueError(
                f"{field} {name!r} would import the module {module!r}, which runs its code: give --allow-recipes if "
                f"you trust this file and the module, or take the {option} out of the file and give --{option}"
            )
        return load_object(name, kind, field)


def _fields(content: Any, field: str, known: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(content, Mapping):
        raise ValueError(f"{field} must have fields ({', '.join(known)}), got {content!r:.200}")
    for name in content:
        if name not in known:
            raise ValueError(f"{field} has no field {name!r}; it may have {', '.join(known)}")
    return dict(content)
