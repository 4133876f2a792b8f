"""Planted faults, each of which some test must find: `make test-planted`, or `make test-planted ARGS="name name"`.

    planted/*.patch --each applied to a copy of the tree--> its tests run there --> caught by ..., or SURVIVED

First the tests of all patches run in a copy without a fault: one that fails or is skipped there would prove nothing. A
fault is caught where a test fails. It is broken where nothing fails and something else ends: an import, a collection.

A patch is a small mutation of the code:

    # tests that must find it, as pytest takes them
    # what a user would lose if no test did
    a unified diff with a line or two of context

A hunk is found by its lines and not by its line numbers, so that a patch lasts as long as the lines that it is about.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

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


def faults() -> list[Fault]:
    """All patches, by name. Raises PatchError for what is none."""
    return [read_fault(path) for path in sorted(FOLDER.glob("*.patch"))]


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


FIXTURES = REPOSITORY.parent / "shared" / "fixtures"
"""Folders next to `orchdata` that are packages of it."""
_LEFT_OUT = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "demo-out")
_SECONDS = 900.0
_FILES = (
    "import importlib, sys; print(*(importlib.import_module(name).__file__ for name in ('orchdata', *sys.argv[1:])))"
)


class Outcome(NamedTuple):
    """What the tests of one copy said: how many passed, names of those that failed, and of those that did not run to
    their end, and pytest's words.
    """

    passed: int
    failed: tuple[str, ...]
    silent: tuple[str, ...]
    words: str


class Verdict(NamedTuple):
    """What became of one fault."""

    caught: bool
    words: str


def copy_of_tree(target: Path) -> Path:
    """The tree without what is hidden or built, as a package that is imported from there. Compiled kernels come along:
    they are known by the times of their sources, which a copy keeps.
    """
    shutil.copytree(REPOSITORY, target, symlinks=True, ignore=_LEFT_OUT)
    return target


def environment_of(tree: Path) -> dict[str, str]:
    """In which Python imports the package of a copy and not the installed one."""
    environment = {"ORCHDATA_FIXTURES": str(FIXTURES), **os.environ, "PYTHONPATH": str(tree)}
    environment.pop("NUMBA_CACHE_DIR", None)  # by the path of a source, of which each copy has another
    return environment


def check_import(tree: Path, fault: Fault) -> str:
    """Why the copy, or a file that the fault changes, cannot be imported from there; empty where it can."""
    modules = [_module_of(path) for path in fault.paths]
    command = [sys.executable, "-c", _FILES, *modules]
    ran = subprocess.run(command, cwd=tree, env=environment_of(tree), capture_output=True, text=True)
    if ran.returncode:
        return f"cannot be imported: {ran.stderr.strip().splitlines()[-1]}"
    elsewhere = [file for file in ran.stdout.split() if not Path(file).is_relative_to(tree)]
    return f"is imported from elsewhere: {elsewhere[0]}" if elsewhere else ""


def _module_of(path: str) -> str:
    dotted = path.removesuffix(".py").replace("/", ".")
    return dotted if dotted.startswith("orchdata.") else f"orchdata.{dotted}"


def run_tests(tree: Path, tests: Sequence[str], *options: str) -> Outcome:
    """Run tests in a copy. Their report and temporary files are next to it."""
    report = tree.with_suffix(".xml")
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "-m", "slow or not slow"]
    command += [f"--junitxml={report}", f"--basetemp={tree.with_suffix('.tmp')}", *options, *tests]
    try:
        ran = subprocess.run(
            command, cwd=tree, env=environment_of(tree), capture_output=True, text=True, timeout=_SECONDS
        )
    except subprocess.TimeoutExpired:
        return Outcome(0, (), (), f"no end within {_SECONDS:g} s")
    return read_report(report, ran.stdout + ran.stderr)


def read_report(report: Path, words: str) -> Outcome:
    """What pytest's report says; nothing was run where there is none."""
    cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    failed, silent, passed = [], [], 0
    for case in cases:
        kinds = {child.tag for child in case}
        name = case.get("name", "")
        if "failure" in kinds:
            failed.append(name)
        elif kinds & {"error", "skipped"}:
            silent.append(name)
        else:
            passed += 1
    return Outcome(passed, tuple(failed), tuple(silent), words)


def verdict_of(outcome: Outcome) -> Verdict:
    if outcome.failed:
        return Verdict(True, f"caught by {outcome.failed[0]}")
    if outcome.silent or not outcome.passed:
        return Verdict(False, f"BROKEN: no test failed, and not all ran\n{_tail(outcome.words)}")
    return Verdict(False, "SURVIVED")


def tried(fault: Fault, plain: Path) -> Verdict:
    """Plant a fault in a copy of the plain copy, and run its tests."""
    tree = plain.with_name(fault.name)
    try:
        shutil.copytree(plain, tree, symlinks=True)
        fault.apply(tree)
        broken = check_import(tree, fault)
        return Verdict(False, f"BROKEN: {broken}") if broken else verdict_of(run_tests(tree, fault.tests, "-x"))
    except PatchError as error:
        return Verdict(False, f"BROKEN: {error}")
    finally:
        shutil.rmtree(tree, ignore_errors=True)
        shutil.rmtree(tree.with_suffix(".tmp"), ignore_errors=True)


def run(planted: Sequence[Fault], folder: Path, jobs: int) -> int:
    """How many faults were not caught; all of them where their tests do not pass without a fault."""
    plain = copy_of_tree(folder / "plain")
    tests = list(dict.fromkeys(test for fault in planted for test in fault.tests))
    started = time.monotonic()
    outcome = run_tests(plain, tests, "-n", str(jobs), "--dist", "loadfile")
    if outcome.failed or outcome.silent or not outcome.passed:
        names = ", ".join((*outcome.failed, *outcome.silent))
        print(f"the tests do not pass where no fault is planted: {names}\n{_tail(outcome.words)}")
        return len(planted)
    print(f"{outcome.passed} tests pass where no fault is planted ({time.monotonic() - started:.0f} s)", flush=True)

    def tell(fault: Fault) -> Verdict:
        began = time.monotonic()
        verdict = tried(fault, plain)
        print(f"{fault.name}: {verdict.words} ({time.monotonic() - began:.0f} s)", flush=True)
        return verdict

    with ThreadPoolExecutor(jobs) as pool:
        return sum(not verdict.caught for verdict in pool.map(tell, planted))


def _tail(words: str) -> str:
    return "\n".join(words.splitlines()[-20:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="of patches; default: all")
    parser.add_argument("--jobs", type=int, default=2, help="faults at a time")
    given = parser.parse_args()
    known = {fault.name: fault for fault in faults()}
    if unknown := [name for name in given.names if name not in known]:
        parser.error(f"no patch is called {unknown[0]}: there are {', '.join(known)}")
    planted = [known[name] for name in given.names or known]
    with tempfile.TemporaryDirectory(prefix="orchdata-planted-") as folder:
        left = run(planted, Path(folder).resolve(), given.jobs)
    print(f"{len(planted) - left} of {len(planted)} faults were caught")
    return int(bool(left))


if __name__ == "__main__":
    sys.exit(main())
