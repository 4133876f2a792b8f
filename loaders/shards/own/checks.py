"""Containers of the user's, checked: that they are values, and what they say of paths."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from orchdata.loaders.errors import ContainerError, ShardError
from orchdata.loaders.shards.own.opened import called
from orchdata.loaders.shards.own.shard import Container, name_of
from orchdata.loaders.storage.storage import FileSystem


class Described(Protocol):
    """The part of a container that says what it is."""

    def describe(self) -> dict[str, Any]: ...


def checked_containers(containers: Iterable[Container]) -> tuple[Container, ...]:
    """Return them as a tuple.

    Raises ContainerError for one with a description that is not JSON, TypeError for something that is no container.
    """
    if isinstance(containers, Container) or not isinstance(containers, Iterable) or isinstance(containers, str):
        raise TypeError(f"containers is a list of od.Container, got {containers!r:.200}")
    checked = tuple(containers)
    for each in checked:
        if isinstance(each, type) and issubclass(each, Container):
            raise TypeError(f"containers has the class {each.__qualname__}: give a value of it, {each.__qualname__}()")
        if not isinstance(each, Container):
            raise TypeError(f"containers has a {type(each).__name__}: give values of subclasses of od.Container")
        check_description(each)
    return checked


def container_of(containers: Sequence[Container], path: str) -> Container | None:
    """Return the container of the user's that claims a path; None if none does.

    Raises ContainerError if two claim it, or one does not say yes or no.
    """
    claiming = [each for each in containers if _claims(each, path)]
    if len(claiming) > 1:
        names = " and ".join(name_of(each) for each in claiming)
        raise ContainerError(f"{path}: {names} both claim it: let claims() of only one return True for this path")
    return claiming[0] if claiming else None


def shards_of(containers: Sequence[Container], storage: FileSystem, path: str) -> list[str] | None:
    """Return the shards of a path that a container of the user's claims; None if none does.

    Raises ContainerError for anything but paths that the same container claims.
    """
    container = container_of(containers, storage.identity(path))
    if container is None:
        return None
    name = name_of(container)
    shards = _asked(container, path, "shards()", container.shards, storage, path)
    if not isinstance(shards, list | tuple) or not shards or not all(isinstance(each, str) for each in shards):
        raise ContainerError(f"{path}: {name}: shards() returned {shards!r:.120}: return a list of one or more paths")
    for each in shards:
        if container_of(containers, storage.identity(each)) is not container:
            raise ContainerError(
                f"{path}: {name}: shards() returned {each!r}, which its claims() does not claim: claims() must return "
                "True for the paths of its shards too"
            )
    return list(shards)


def _claims(container: Container, path: str) -> bool:
    claims = _asked(container, path, "claims()", container.claims, path)
    if not isinstance(claims, bool):
        raise ContainerError(f"{path}: {name_of(container)}: claims() returned {claims!r:.80}: return True or False")
    return claims


def _asked(container: Container, path: str, what: str, function: Any, *arguments: Any) -> Any:
    try:
        return called(name_of(container), path, what, function, *arguments)
    except ShardError as error:
        raise ContainerError(str(error)) from error.__cause__


def check_description(container: Described) -> None:
    """Raise ContainerError unless a container always describes itself by the same JSON."""
    name = name_of(container)
    try:
        described = container.describe()
        again = container.describe()
    except Exception as error:
        raise ContainerError(f"{name}: describe() raised {type(error).__name__}: {error}") from error
    try:
        is_json = isinstance(described, dict) and json.loads(json.dumps(described, allow_nan=False)) == described
    except (TypeError, ValueError, RecursionError) as error:
        raise ContainerError(
            f"{name}: describe() returned what JSON cannot say ({error}): return a dict of strings, numbers, lists and "
            "dicts"
        ) from error
    if not is_json:
        raise ContainerError(
            f"{name}: describe() returned {described!r:.120}: return a dict that JSON gives back unchanged, with "
            "string keys and lists instead of tuples"
        )
    if again != described:
        raise ContainerError(f"{name}: describe() returns another value each time: it is its identity")
