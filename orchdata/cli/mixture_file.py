"""A mixture as a YAML file, for the command line.

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

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from orchdata.cli.options import Kind, check_name, load_object
from orchdata.dataset.mixture import Mixture, Source
from orchdata.dataset.shard_dataset import ShardDataset
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.shards.container import Container
from orchdata.loaders.shards.reading import used_containers
from orchdata.yaml_file import read_yaml

SUFFIXES = (".yaml", ".yml")
_MIXTURE = ("sources", "by", "stop", "stages", "epoch_tokens", "epoch_samples")
_INNER = ("sources", "weight", "loss_weight")
_OF_STORAGE = ("storage_options", "index_file")
_LEAF = (
    *("paths", "media_root", "columns", "containers", "index_fields", "recipe", "filter", "weight", "loss_weight"),
    *("key", *_OF_STORAGE),
)


def is_mixture_file(paths: list[str]) -> bool:
    """Whether a command's paths are a mixture, and not shards."""
    return len(paths) == 1 and paths[0].lower().endswith(SUFFIXES)


def read_mixture(
    path: str | Path, recipe: Recipe, *, allow_recipes: bool = False, containers: tuple[Container, ...] = ()
) -> Mixture:
    """The mixture that a file describes.

    Args:
        recipe: of sources that name none.
        containers: of sources that name none; each source takes those that claim one of its paths.
        allow_recipes: whether modules that the file names may be imported.

    Raises:
        FileNotFoundError: no such file, or a source without shards.
        ValueError: what is no mixture: names the file and the field.
    """
    file = Path(path)
    content = read_yaml(file)
    try:
        fields = _fields(content, "the file", _MIXTURE)
        described = _Described(file.parent, recipe, allow_recipes, containers)
        sources = _sources(fields.pop("sources", None), "sources", described)
        if isinstance(stages := fields.get("stages"), list):
            fields["stages"] = [tuple(stage) if isinstance(stage, list) else stage for stage in stages]
        return Mixture(sources, **fields)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file}: {error}") from error


class _Described(NamedTuple):
    """What is the same for all sources of a file."""

    folder: Path
    recipe: Recipe
    allow_recipes: bool
    containers: tuple[Container, ...]

    def recipe_named(self, name: Any, field: str) -> Recipe:
        """What a source names, or that of the command."""
        return self.recipe if name is None else self._imported(name, Recipe, field, "recipe")

    def containers_named(self, names: Any, field: str, paths: list[str]) -> tuple[Container, ...]:
        """What a source names, or those of the command that claim one of its paths."""
        if names is None:
            return used_containers(self.containers, paths)
        if not isinstance(names, list):
            raise ValueError(f"{field} must be a list of MODULE:NAME, got {names!r:.80}")
        kind: Any = Container  # abstract
        return tuple(self._imported(name, kind, field, "container") for name in names)

    def _imported(self, name: Any, kind: type[Kind], field: str, option: str) -> Kind:
        module = check_name(name, field)
        if not self.allow_recipes:
            raise ValueError(
                f"{field} {name!r} would import the module {module!r}, which runs its code: give --allow-recipes if "
                f"you trust this file and the module, or take the {option} out of the file and give --{option}"
            )
        return load_object(name, kind, field)


def _sources(content: Any, field: str, described: _Described) -> dict[str, Source]:
    if not isinstance(content, Mapping) or not content:
        raise ValueError(f'{field} must name sources, as in `{field}: {{web: {{paths: "web/*.tar", weight: 1}}}}`')
    return {str(name): _source(value, f"{field}.{name}", described) for name, value in content.items()}


def _source(content: Any, field: str, described: _Described) -> Source:
    if isinstance(content, Mapping) and "sources" in content:
        fields = _fields(content, field, _INNER)
        inner = _sources(fields.pop("sources"), f"{field}.sources", described)
        return _made(field, Mixture(inner), fields)
    fields = _fields(content, field, _LEAF)
    paths = fields.pop("paths", None)
    listed = [paths] if isinstance(paths, str) else paths
    if not isinstance(listed, list) or not listed or not all(isinstance(each, str) for each in listed):
        raise ValueError(f"{field}.paths must be a path, or a list of paths, of shards, got {paths!r}")
    folder, expression = described.folder, fields.pop("filter", None)
    recipe = described.recipe_named(fields.pop("recipe", None), f"{field}.recipe")
    root = fields.pop("media_root", None)
    if root is not None and not isinstance(root, str):
        raise ValueError(f"{field}.media_root must be a folder, got {root!r}")
    root = None if root is None else str(folder / root)
    columns = fields.pop("columns", None)
    if columns is not None and not isinstance(columns, Mapping):
        raise ValueError(f"{field}.columns must map old names to new ones, got {columns!r}")
    own = fields.pop("index_fields", ())
    if not isinstance(own, list | tuple) or not all(isinstance(name, str) for name in own):
        raise ValueError(f"{field}.index_fields must be a list of names, got {own!r}")
    urls = [_relative_to(folder, each) for each in listed]
    containers = described.containers_named(fields.pop("containers", None), f"{field}.containers", urls)
    how: dict[str, Any] = {"media_root": root, "columns": columns, "containers": containers, "index_fields": own}
    how |= {"key": fields.pop("key", ""), **_storage(fields, field, folder)}
    dataset = ShardDataset(urls, recipe, **how)
    if expression is not None:
        if not isinstance(expression, str):
            raise ValueError(f'{field}.filter must be an expression, as in "tokens < 4096", got {expression!r}')
        dataset = dataset.filter(expression)
    return _made(field, dataset, fields)


def _storage(fields: dict[str, Any], field: str, folder: Path) -> dict[str, Any]:
    """Take what a source says of object storage from its fields. Values of options are secret, and in no error."""
    options, file = (fields.pop(name, None) for name in _OF_STORAGE)
    if options is not None and not isinstance(options, Mapping):
        raise ValueError(f"{field}.storage_options must map names of options to values")
    if file is not None and not isinstance(file, str):
        raise ValueError(f"{field}.index_file must be a path or a URL, got {file!r:.80}")
    return {"storage_options": options, "index_file": None if file is None else _relative_to(folder, file)}


def _made(field: str, dataset: ShardDataset | Mixture, fields: Mapping[str, Any]) -> Source:
    try:
        return Source(dataset, **fields)
    except ValueError as error:
        raise ValueError(f"{field}: {error}") from error


def _fields(content: Any, field: str, known: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(content, Mapping):
        raise ValueError(f"{field} must have fields ({', '.join(known)}), got {content!r:.200}")
    for name in content:
        if name not in known:
            raise ValueError(f"{field} has no field {name!r}; it may have {', '.join(known)}")
    return dict(content)


def _relative_to(folder: Path, path: str) -> str:
    return path if "://" in path else str(folder / path)
