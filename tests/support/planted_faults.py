"""Planted faults: small mutations of the code, a patch each, and the tests that must find them.

    # tests that must find it, as pytest takes them
    # what a user would lose if no test did
    a unified diff with a line or two of context

A hunk is found by its lines and not by its line numbers, so that a patch lasts as long as the lines that it is about.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / "tests" / "faults" / "planted"
_HEAD = "# "


class PatchError(ValueError):
    """A patch that says nothing, or no longer fits the code."""


@dataclass(frozen=True)
class Hunk:
    """Lines of a file, and what they become; each ends in a line break."""

    path: str
    old: str
    new: str
    num_changed: int


@dataclass(frozen=True)
class Fault:
    """One patch."""

    name: str  # of its file
    tests: tuple[str, ...]  # ids of the tests of which one must fail
    loses: str  # what a user would lose
    hunks: tuple[Hunk, ...]  # the mutation

    @property
    def paths(self) -> tuple[str, ...]:
        """The files that it changes."""
        return tuple(dict.fromkeys(hunk.path for hunk in self.hunks))

    @property
    def num_changed(self) -> int:
        """Lines that are changed, put in or taken out."""
        return sum(hunk.num_changed for hunk in self.hunks)

    def apply(self, root: Path) -> None:
        """Make the mutation in a tree. Raises PatchError, and leaves the tree as it is, where it does not fit."""
        texts: dict[str, str] = {}
        for hunk in self.hunks:
            path = root / hunk.path
            if not path.is_file():
                raise PatchError(f"there is no {hunk.path}: renew the patch")
            text = texts.get(hunk.path) or "\n" + path.read_text()
            found = text.count("\n" + hunk.old)
            if found != 1:
                raise PatchError(
                    f"{found} places of {hunk.path} have these lines, and one should: renew the patch\n" + hunk.old
                )
            texts[hunk.path] = text.replace("\n" + hunk.old, "\n" + hunk.new)
        for changed, text in texts.items():
            (root / changed).write_text(text[1:])


def faults(folder: Path = FOLDER) -> list[Fault]:
    """All patches of a folder, by name. Raises PatchError for what is none."""
    return [read_fault(path) for path in sorted(folder.glob("*.patch"))]


def read_fault(path: Path) -> Fault:
    tests, loses, *lines = path.read_text().splitlines()
    if not tests.startswith(f"{_HEAD}tests/") or not loses.startswith(_HEAD):
        raise PatchError(f"{path.name}: its first line names tests, and its second says what a user would lose")
    hunks = tuple(_hunks(path.name, lines))
    if not hunks:
        raise PatchError(f"{path.name}: it changes nothing")
    return Fault(path.stem, tuple(tests[len(_HEAD) :].split()), loses[len(_HEAD) :], hunks)


def _hunks(name: str, lines: list[str]) -> Iterator[Hunk]:
    path, body = "", list[str]()
    for line in [*lines, "@@"]:
        if line.startswith(("--- ", "@@")):
            if body:
                yield _hunk(path, body)
            body = []
        elif line.startswith("+++ "):
            path = line.removeprefix("+++ ").removeprefix("b/")
        elif line.startswith((" ", "+", "-")):
            body.append(line)
        elif not line.startswith(("diff ", "index ")):
            raise PatchError(f"{name}: {line!r} is no line of a diff")


def _hunk(path: str, body: list[str]) -> Hunk:
    old = "".join(f"{line[1:]}\n" for line in body if line[0] != "+")
    new = "".join(f"{line[1:]}\n" for line in body if line[0] != "-")
    signs = [line[0] for line in body]
    return Hunk(path, old, new, max(signs.count("+"), signs.count("-")))
