"""PyTorch's own DataLoader tests, run with torch's loader and with orchdata's: only the import is changed.

    python scripts/torch_suite.py FILE... [--docs benchmarks/README.md] [--only REGEX]

FILE is `test/test_dataloader.py` of PyTorch (or of a repository that carries it, as Ascend/pytorch does), or a test of
torchdata's `test/stateful_dataloader/`. They are not ours, and not in this repository; `expecttest`, `psutil` and
`parameterized` must be installed. Each test runs in a process of its own, with limited time and memory: first with the
loader that the file imports, and what passes there is the denominator, then with ours. `--docs` writes the table
between its markers.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import traceback
import unittest
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

START, END = "<!-- torch's suites: start -->", "<!-- torch's suites: end -->"
MEMORY_BYTES = 6 << 30
LOADERS = ("DataLoader", "StatefulDataLoader")

# Lines of a backend that is not installed.
DROPPED = (
    r"import torch_npu.*",
    r"self\.assertFalse\(dl\._auto_collation\)",  # a private name
)
REPLACED = {r"TEST_NPU = .*": "TEST_NPU = False"}
# An argument of torchdata's loader alone.
NOT_OURS = r"\bsnapshot_every_n_steps=[\w.]+,?\s*"

# Tests of what torch's loader is made of, by the end of their names: a loader made otherwise has none of it.
LEFT_OUT = {
    "torch's data sets: no loader is in them": r"\.Test(DatasetRandomSplit|TensorDataset|StackDataset|ConcatDataset)\.",
    "torch's collate functions, which we call": r"\.test_default_(collate|convert)_|\.TestCollate",
    "torch's samplers and its NumPy seeds alone": r"\.test_(random_sampler$|distributed_sampler_invalid_rank"
    r"|sampler_reproducibility|numpy_gen_state)",
    "`_workers` of torch's iterator": r"\.test_(get_worker_info|iterable_style_dataset|partial_workers)",
    "DataPipes, which torch has given up": r"DataPipe|iterdatapipe",
    "private keys of torchdata's state": r"\.TestInitialState_shard0\.test_(initial_state|load_state_after)"
    r"|\.Test(DynamicStateIterableDataset|DatasetIteratorStateDup|SingleIterCalled)"
    r"|\.TestOutOfOrderWithCheckpointing\.test_out_of_order_iterable",
    "torchdata's format of a state": r"\.Test(IncrementalState|Flattener|IncrementalWorkerState)",
    "AssertionError of iter() for other workers: ours is a StateError of load_state_dict": r"\.TestNumWorkersMismatch",
    "iter() raises what worker_init_fn does: ours does at the first next()": r"\.test_init_error",
}

Outcome = tuple[str, str]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--docs", type=Path, help="page that gets the table")
    parser.add_argument("--only", default="", help="regular expression of the tests' names")
    parser.add_argument("--timeout", type=float, default=60, help="seconds of a test")
    parser.add_argument(
        "--ours-only", action="store_true", help="take what passes with torch's loader from the last run"
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return run_all(options.files[0], options.only, options.timeout, Path(options.child))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for number, file in enumerate(options.files):
            results = {}
            for loader in ("theirs", "ours"):
                kept = Path(tempfile.gettempdir()) / f"torch_suite_{file.parent.name}_{file.stem}_{loader}.json"
                if loader == "ours" or not options.ours_only or not kept.exists():
                    place = Path(folder) / f"{loader}{number}"
                    kept.write_text(json.dumps(run_file(file, place, loader == "ours", options)))
                results[loader] = json.loads(kept.read_text())
            rows.append(report(file, results["theirs"], results["ours"], options.only))
    if options.docs is not None:
        write_table(options.docs, rows, options.timeout)
    return 0


def substituted(source: str, *, ours: bool) -> str:
    """The text of a test module, without lines of missing backends; with our loader under the name of its own."""
    lines: list[str] = []
    pending: list[str] = []
    for line in (re.sub(NOT_OURS, "", source) if ours else source).splitlines():
        text = line.strip()
        if any(re.fullmatch(pattern, text) for pattern in DROPPED):
            continue
        for pattern, other in REPLACED.items():
            line = line[: len(line) - len(text)] + other if re.fullmatch(pattern, text) else line
        lines.append(line)
        found = re.match(r"(\s*)from (torch\.utils\.data|torchdata\.stateful_dataloader) import (.*)", line)
        if found and ours:
            pending = [found[1], found[3]]
        elif pending:
            pending[1] += " " + text
        if pending and ("(" not in pending[1] or ")" in pending[1]):
            for name, alias in re.findall(rf"\b({'|'.join(LOADERS)})\b(?: as (\w+))?", pending[1]):
                lines.append(f"{pending[0]}from orchdata import DataLoader as {alias or name}")
            pending = []
    return "\n".join(lines) + "\n"


def run_file(file: Path, place: Path, ours: bool, options: argparse.Namespace) -> dict[str, Outcome]:
    """name of a test -> (outcome, reason), with the loader that the file imports, or with ours."""
    place.mkdir()
    module = place / file.name
    module.write_text(substituted(file.read_text(), ours=ours))
    # Its own helpers, and torchdata if it is next to its tests.
    paths = [str(place), *(str(above) for above in file.resolve().parents if (above / "torchdata").is_dir())]
    paths += [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONWARNINGS": "ignore",
        "PYTORCH_PRINT_REPRO_ON_FAILURE": "0",
    }
    found = place / "results.json"
    command = [sys.executable, __file__, str(module), "--child", str(found), "--timeout", str(options.timeout)]
    command += ["--only", options.only]
    subprocess.run(command, env=environment, check=False, cwd=place)
    return {} if not found.exists() else json.loads(found.read_text())


def run_all(module: Path, only: str, timeout: float, found: Path) -> int:
    """Each test of the module in a fork of this process, which has imported it."""
    results: dict[str, Outcome] = {}
    for test in tests_of(importlib.import_module(module.stem)):
        if re.search(only, test.id()):
            results[test.id()] = ("left out", reason_of(test.id())) if reason_of(test.id()) else forked(test, timeout)
            found.write_text(json.dumps(results))
    return 0


def tests_of(module: Any) -> Iterator[unittest.TestCase]:
    """By class: the `load_tests` of torch's own modules is for being run as the program."""
    for found in list(vars(module).values()):
        if isinstance(found, type) and issubclass(found, unittest.TestCase) and found.__module__ == module.__name__:
            yield from unittest.defaultTestLoader.loadTestsFromTestCase(found)  # type: ignore[misc]


def reason_of(name: str) -> str:
    return next((reason for reason, pattern in LEFT_OUT.items() if re.search(pattern, name)), "")


def forked(test: unittest.TestCase, timeout: float) -> Outcome:
    """Runs in a session of its own, so that nothing it has started outlives it."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.setsid()
        os.close(reader)
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
        with contextlib.suppress(BaseException):
            os.write(writer, json.dumps(run_one(test)).encode()[:60000])
        os._exit(0)
    os.close(writer)
    answer, until = b"", time.monotonic() + timeout
    os.set_blocking(reader, False)
    while time.monotonic() < until:
        try:
            piece = os.read(reader, 65536)
        except BlockingIOError:
            time.sleep(0.005)
            continue
        answer += piece
        if not piece or answer.endswith(b"]"):
            break
    os.close(reader)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    if answer:
        outcome: Outcome = tuple(json.loads(answer))
        return outcome
    return ("failed", f"no end within {timeout:g} s" if time.monotonic() >= until else "the process died")


def run_one(test: unittest.TestCase) -> Outcome:
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    result = unittest.TestResult()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        test.run(result)
    if result.skipped:
        return ("skipped", str(result.skipped[0][1])[:200])
    if result.wasSuccessful():
        return ("passed", "")
    failure = (result.errors + result.failures or [(None, "expected to fail")])[0][1]
    lines = [line for line in failure.strip().splitlines() if line and not line.startswith(" ")]
    where = re.findall(r'File ".*?([\w.]+)", line (\d+)', failure)
    return ("failed", f"{lines[-1] if lines else failure}"[:300] + f" [{' '.join(':'.join(at) for at in where[-3:])}]")


def report(file: Path, theirs: dict[str, Outcome], ours: dict[str, Outcome], only: str) -> dict[str, Any]:
    """Prints what fails with ours alone, and gives the table's row."""
    asked = {name: outcome for name, (outcome, _) in theirs.items() if re.search(only, name)}
    names = [name for name, outcome in asked.items() if outcome == "passed" and not reason_of(name)]
    missing = [name for name in names if ours.get(name, ("missing", ""))[0] != "passed"]
    for name in missing:
        outcome, reason = ours.get(name, ("missing", ""))
        print(f"{outcome}: {name.split('.', 1)[1]}: {reason}")
    left = Counter(filter(None, map(reason_of, asked)))
    untold = Counter(outcome for name, outcome in asked.items() if not reason_of(name))
    print(
        f"{file}: {len(names) - len(missing)} of {len(names)} that pass with its own loader; left out: {left.total()}"
    )
    return {
        "file": file,
        "passed": len(names) - len(missing),
        "of": len(names),
        "left": left,
        "not run": untold["skipped"] + untold["failed"],
        "missing": [name.split(".", 1)[1] for name in missing],
    }


def source_of(file: Path) -> str:
    """Repository, path and commit of a file: the line in `NAME.source` next to it if that exists, else from git."""
    stored = file.parent / f"{file.stem}.source"
    if stored.exists():
        return stored.read_text().strip()
    command = ["git", "-C", str(file.parent), "log", "-1", "--format=%h", "--", file.name]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return f"{file.name} {commit}".strip()


def write_table(page: Path, rows: list[dict[str, Any]], timeout: float) -> None:
    import torch

    limits = f"{timeout:g} s and {MEMORY_BYTES >> 30} GiB at most"
    lines = [
        f"torch {torch.__version__}; every test in a process of its own, {limits}.",
        "",
        "| file | passes with its own loader | of these with ours | left out | skipped, or failing with its own |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        numbers = f"{row['of']} | {row['passed']} | {sum(row['left'].values())} | {row['not run']}"
        lines.append(f"| {source_of(row['file'])} | {numbers} |")
    left: Counter[str] = sum((row["left"] for row in rows), Counter())
    lines += ["", "Left out: " + "; ".join(f"{reason} ({count})" for reason, count in left.most_common()) + "."]
    missing = [name for row in rows for name in row["missing"]]
    if missing:
        lines += ["", "Not yet: " + ", ".join(f"`{name}`" for name in missing) + "."]
    lines = [part for line in lines for part in (textwrap.wrap(line, 140) if line[:1] not in ("", "|") else [line])]
    text = page.read_text()
    before, _, rest = text.partition(START)
    after = rest.partition(END)[2]
    page.write_text(f"{before}{START}\n" + "\n".join(lines) + f"\n{END}{after}")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        traceback.print_exc()
        sys.exit(130)
