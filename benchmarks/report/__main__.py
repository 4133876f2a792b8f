"""`python -m benchmarks.report`: write the tables of benchmarks/*.md from `benchmarks/results`.

With `--check` it writes nothing, shows what differs, and fails where a page and the stored reports are not the same.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from pathlib import Path

from benchmarks.report.pages import rewrite
from benchmarks.report.results import ResultsError
from benchmarks.report.tables import TABLES

REPOSITORY = Path(__file__).resolve().parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description="Write tables from results.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a table differs")
    check = parser.parse_args().check
    stale = 0
    for path in sorted((REPOSITORY / "benchmarks").glob("*.md")):
        name, text = str(path.relative_to(REPOSITORY)), path.read_text()
        try:
            written = rewrite(text, TABLES)
        except ResultsError as error:
            sys.exit(f"{name}: {error}")
        if written == text:
            continue
        stale += 1
        if check:
            old, new = text.splitlines(keepends=True), written.splitlines(keepends=True)
            sys.stderr.writelines(difflib.unified_diff(old, new, name, f"{name}, from benchmarks/results", n=0))
        else:
            path.write_text(written)
            sys.stdout.write(f"{name}\n")
    if check and stale:
        sys.exit(f"tables differ from benchmarks/results in {stale} page(s): run python -m benchmarks.report")


if __name__ == "__main__":
    main()
