"""`python scripts/path_of_a_step.py`: how much code a step goes through, as a table; with `--names` the long functions.

    made-up shards --DataLoader, 1 of 2 ranks, inline--> iter(loader) .. first batch --profile hook--> functions entered
    sources of the library --ast--> lines of each function

A function's lines go from its `def` to its end, without those of its docstring and with those of functions in it. Long
ones have more than 40. On a step's path are the files that the run enters: what it enters itself, and what another
configuration would enter in the same files. Kernels, which numba runs without a call that Python sees, are apart.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import os
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import orchdata as od

REPOSITORY = Path(__file__).resolve().parent.parent
FOLDERS = ("orchdata", "loaders", "balancers", "native")
KERNELS = "native"
LONG = 40

Place = tuple[str, int]  # a file, relative to the repository, and the line where a function begins


@dataclass(frozen=True, kw_only=True)
class Function:
    """A function as it is written.

    Attributes:
        first: line of its first decorator, or of its `def`, as its code object has it.
        lines: from `def` to its end, without its docstring.
    """

    file: str
    name: str
    first: int
    lines: int


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--names", action="store_true", help="list the long functions")
    parser.add_argument("--constructor", action="store_true", help="from DataLoader(...), not from iter(loader)")
    given = parser.parse_args(arguments)
    names, begin = given.names, "DataLoader(...)" if given.constructor else "iter(loader)"
    written = {(each.file, each.first): each for path in python_files() for each in functions(path)}
    loader, entered = entered_by_a_step(constructor=given.constructor)
    files = sorted({file for file, _ in entered})
    own = [each for place, each in written.items() if place in entered]
    around = [each for each in written.values() if each.file in files and not is_kernel(each)]
    kernels = [each for each in written.values() if is_kernel(each)]
    init = written["orchdata/dataloader.py", od.DataLoader.__init__.__code__.co_firstlineno]
    rows = {
        f"functions above {LONG} lines that a step enters": len(long(own)),
        f"functions above {LONG} lines in the files that it enters": len(long(around)),
        f"functions above {LONG} lines in {KERNELS}/": len(long(kernels)),
        f"library files entered from {begin} to the first batch": len(files),
        "lines of these files": sum(len(lines_of(REPOSITORY / file)) for file in files),
        "functions entered": len(own),
        "lines of these functions": sum(each.lines for each in own),
        "lines of Python in the wheel": sum(len(lines_of(path)) for path in python_files()),
        "lines of DataLoader.__init__": init.lines,
        "lines of its file": len(lines_of(REPOSITORY / init.file)),
        "private attributes of a DataLoader": sum(name.startswith("_") for name in vars(loader)),
    }
    for what, figure in rows.items():
        print(f"{what:<60}{figure:>8,}")
    for title, found in (("In the files that a step enters", around), (f"In {KERNELS}/", kernels)):
        if names:
            print(f"\n{title} (* entered):")
            for each in sorted(long(found), key=lambda each: -each.lines):
                mark = "*" if each in own else " "
                print(f"{each.lines:>5} {mark} {each.file}:{each.first} {each.name}")


def python_files() -> list[Path]:
    """The Python files of the wheel; a test holds that each lies in a package that is listed."""
    return [path for folder in FOLDERS for path in sorted((REPOSITORY / folder).rglob("*.py"))]


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines()


def functions(path: Path) -> Iterator[Function]:
    """All functions and methods of a file, those inside of others too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            lines = node.end_lineno - node.lineno + 1 - _docstring_lines(node)
            yield Function(file=str(path.relative_to(REPOSITORY)), name=node.name, first=first, lines=lines)


def _docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    if ast.get_docstring(node, clean=False) is None:
        return 0
    docstring = node.body[0]
    assert docstring.end_lineno is not None
    return docstring.end_lineno - docstring.lineno + 1


def long(found: Iterable[Function]) -> list[Function]:
    return [each for each in found if each.lines > LONG]


def is_kernel(function: Function) -> bool:
    return function.file.startswith(f"{KERNELS}/")


def entered_by_a_step(*, constructor: bool) -> tuple[od.DataLoader, set[Place]]:
    """A loader, and the functions of the library that its first batch enters, in any thread; or its constructor too."""
    from orchdata.synth import synthesize

    codes: set[CodeType] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            codes.add(frame.f_code)

    with tempfile.TemporaryDirectory() as folder:
        os.environ["ORCHDATA_CACHE"] = f"{folder}/cache"
        synthesize("omni", Path(folder) / "shards", samples=64)
        dataset = od.ShardDataset(f"{folder}/shards/*.tar")
        dataset.index()
        if constructor:
            threading.setprofile(note)
            sys.setprofile(note)
        try:
            loader = od.DataLoader(dataset, batch_size=8, shuffle=True, dp=(0, 2), num_threads=0, num_workers=0)
            threading.setprofile(note)
            sys.setprofile(note)
            steps = iter(loader)
            next(steps)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
        steps.close()
    return loader, set(places(codes))


def places(codes: Iterable[CodeType]) -> Iterator[Place]:
    """Of the functions of the library among them; bodies of modules and classes are none."""
    for code in codes:
        path = Path(code.co_filename).resolve()  # links of the mapped folders
        if code.co_flags & inspect.CO_OPTIMIZED and path.is_relative_to(REPOSITORY):
            file = path.relative_to(REPOSITORY)
            if file.parts[0] in FOLDERS:
                yield str(file), code.co_firstlineno


if __name__ == "__main__":
    main()
