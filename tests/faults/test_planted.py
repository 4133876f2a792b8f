"""Planted faults fit the code and name tests; what `make test-planted` says of them can be trusted."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Any

import plant
import pytest
from plant import FOLDER, REPOSITORY, Fault, Outcome, PatchError, faults, read_fault, read_report, verdict_of

FAULTS = faults()
KINDS = {
    "order": ("orchdata/order", "orchdata/planning", "orchdata/dataset", "orchdata/building"),
    "state": ("orchdata/loop", "orchdata/delivery", "orchdata/order", "orchdata/dataset"),
    "cache": ("loaders/storage", "loaders/storage/cache.py"),
    "index": ("loaders/index", "loaders/shards", "orchdata/dataset"),
    "ray": ("orchdata/engines/",),
}
"""What the first word of a name says a fault is of, and the folders that it may change."""


@cache
def functions_of(path: str) -> frozenset[str]:
    tree = ast.parse((REPOSITORY / path).read_text())
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def check(fault: Fault, tree: Path) -> None:
    """Raise AssertionError, or PatchError, for a fault that cannot be planted in a tree, or proves nothing."""
    folders = KINDS[fault.name.partition("-")[0]]
    assert all(path.endswith(".py") and path.startswith(folders) for path in fault.paths), fault.paths
    assert 1 <= fault.num_changed <= 6
    assert fault.loses.endswith(".") and len(fault.loses) > 40
    for test in fault.tests:
        path, _, name = test.partition("::")
        assert path.startswith("tests/") and name.partition("[")[0] in functions_of(path), test
    for path in fault.paths:
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        if (REPOSITORY / path).is_file():
            (tree / path).write_text((REPOSITORY / path).read_text())
    fault.apply(tree)
    for path in fault.paths:
        changed = (tree / path).read_text()
        assert changed != (REPOSITORY / path).read_text()
        ast.parse(changed)


def test_there_are_enough_of_each_kind() -> None:
    kinds = [fault.name.partition("-")[0] for fault in FAULTS]
    assert len(FAULTS) >= 20 and all(kinds.count(kind) >= 3 for kind in KINDS)
    assert {path.suffix for path in FOLDER.iterdir()} == {".patch"}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_each_fits_the_code_and_names_tests_that_exist(fault: Fault, tmp_path: Path) -> None:
    check(fault, tmp_path)


PLACE = "orchdata/order/order.py"
LINE = '        return super().describe() | {"rows": self._digest}'
DIFF = f"--- a/{PLACE}\n+++ b/{PLACE}\n@@ -1 +1 @@\n-{LINE}\n+{LINE.replace('_digest', '_rows')}\n"
HEAD = "# tests/orchdata/order/test_order.py::test_samples_come_in_the_order_of_an_array\n"
HEAD += "# Orders that differ would be taken for one another.\n"


def written(folder: Path, text: str) -> Path:
    path = folder / "order-made-up.patch"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (HEAD + DIFF.replace("super()", "other()"), "0 places of orchdata/order/order.py have these lines.*renew"),
        (HEAD + DIFF.replace(LINE, "", 2), "places of orchdata/order/order.py have these lines, and one should"),
        (HEAD + DIFF.replace("order/order", "order/gone"), "no orchdata/order/gone.py: renew the patch"),
        (HEAD + DIFF.replace("order/order", "hf/images"), "hf/images"),
        (HEAD.replace("samples_come", "nothing_comes") + DIFF, "test_nothing_comes"),
        (HEAD + DIFF + "+\n" * 6, "6"),
        (HEAD, "it changes nothing"),
        (DIFF, "its first line names tests"),
        (HEAD + DIFF + "and more\n", "'and more' is no line of a diff"),
    ],
)
def test_a_fault_that_does_not_fit_is_an_error(text: str, words: str, tmp_path: Path) -> None:
    check(read_fault(written(tmp_path, HEAD + DIFF)), tmp_path / "sound")
    with pytest.raises((AssertionError, PatchError), match=words):
        check(read_fault(written(tmp_path, text)), tmp_path / "tree")


def report(folder: Path, *cases: str) -> Outcome:
    path = folder / "report.xml"
    path.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    return read_report(path, "words")


PASSED, FAILED = '<testcase name="a"/>', '<testcase name="b"><failure/></testcase>'
ENDED, SKIPPED = '<testcase name="c"><error/></testcase>', '<testcase name="d"><skipped/></testcase>'


def test_a_fault_is_caught_by_a_test_that_fails_and_by_nothing_else(tmp_path: Path) -> None:
    assert verdict_of(report(tmp_path, PASSED, FAILED)) == (True, "caught by b")
    assert verdict_of(report(tmp_path, PASSED)) == (False, "SURVIVED")
    for cases in ((), (PASSED, ENDED), (PASSED, SKIPPED)):
        found = verdict_of(report(tmp_path, *cases))
        assert not found.caught and found.words.startswith("BROKEN")
    assert not verdict_of(read_report(tmp_path / "absent.xml", "a collection that failed")).caught


@pytest.mark.slow
def test_what_is_harmless_survives_and_what_ends_otherwise_is_broken(tmp_path: Path, capfd: Any) -> None:
    """All of it, with faults of which one is caught, and the others are none, cannot be imported, or do not fit."""
    test = HEAD.replace("::test_samples_come_in_the_order_of_an_array", "")
    caught = next(fault for fault in FAULTS if fault.name == "order-excluded-sample-comes")
    made = [
        ("harmless", DIFF.replace("self._rows}", "self._digest}  # as ever")),
        ("broken", DIFF + "+import nothing_of_that_name\n"),
        ("outdated", DIFF.replace("super()", "other()")),
    ]
    others = []
    for name, diff in made:
        path = tmp_path / f"{name}.patch"
        path.write_text(test + diff)
        others.append(read_fault(path))
    assert plant.run([caught, *others], tmp_path / "work", jobs=2) == 3
    output = capfd.readouterr().out
    assert "order-excluded-sample-comes: caught by test_no_shuffle" in output
    assert "harmless: SURVIVED" in output and "broken: BROKEN: cannot be imported" in output
    assert "outdated: BROKEN: 0 places of orchdata/order/order.py have these lines" in output
