"""The Python of docs/ runs, and its commands parse.

The blocks of a page run in turn in one process, with the names that `doc_pages.RUN` has for the page. A comment before
a block says where else it runs (`run by FILE`), or why it does not (`not run: REASON`), which ten blocks may say.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from doc_pages import RUN
from typer.main import get_command
from typer.testing import CliRunner

import orchdata as od
from orchdata.cli import app

REPOSITORY = Path(__file__).resolve().parents[1]
PAGES = sorted((REPOSITORY / "docs").glob("*.md"))
MOST_EXCUSED = 10

FENCE = re.compile(r"^(?:<!-- (?P<note>.*?) -->\n)?```(?P<language>\w*)\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block: the page, the line of its code, the code, and what the comment in front of it says."""

    page: Path
    line: int
    language: str
    code: str
    note: str

    @property
    def where(self) -> str:
        return f"{self.page.name}:{self.line}"


def _blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(page, text[: found.start("code")].count("\n") + 1, found["language"], found["code"], found["note"] or "")
        for found in FENCE.finditer(text)
    ]


PYTHON = [block for page in PAGES for block in _blocks(page) if block.language == "python"]


def run_blocks(blocks: list[Block], names: dict[str, Any]) -> None:
    """Run blocks in turn in one namespace; an error has the page and the line of the block that raised it."""
    for block in blocks:
        code = "\n" * (block.line - 1) + block.code  # so that tracebacks count the lines of the page
        exec(compile(code, str(block.page), "exec", dont_inherit=True), names)


@pytest.mark.parametrize("page", sorted(RUN))
@pytest.mark.filterwarnings("ignore:.*FileIO name='texts:pytest.PytestUnraisableExceptionWarning")  # webdataset's
def test_the_blocks_of_a_page_run_in_turn(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = RUN[page]()
    run_blocks([block for block in PYTHON if block.page.name == page and not block.note], {"od": od} | names)


def test_every_block_runs_somewhere_or_says_why_not() -> None:
    assert {block.page.name for block in PYTHON if not block.note} == set(RUN)
    excused = []
    for block in PYTHON:
        kind, _, said = block.note.partition(" by " if block.note.startswith("run by ") else ": ")
        if kind == "run":
            assert block.page.name in (REPOSITORY / said).read_text(), f"{block.where}: {said} does not name the page"
        elif block.note:
            assert kind == "not run" and len(said.split()) > 2, f"{block.where}: {block.note}"
            excused.append(block.where)
    assert len(excused) <= MOST_EXCUSED, excused


def test_an_error_has_the_page_and_line_of_its_block(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A page\n\n```python\nnumber = 1\n```\n\nThen:\n\n```python\n\nnumber / 0\n```\n")
    with pytest.raises(ZeroDivisionError) as raised:
        run_blocks(_blocks(page), {})
    last = raised.traceback[-1]
    assert (str(last.path), last.lineno + 1) == (str(page), 11)


# --- commands -------------------------------------------------------------------------------------------------------


def _commands() -> list[tuple[str, str, bool]]:
    """Where, command, and whether it is whole, as in a block of a shell; in a sentence paths and values may lack."""
    pages = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *PAGES]
    whole = [
        (block.where, line, True)
        for page in pages
        for block in _blocks(page)
        if block.language == "bash"
        for line in block.code.splitlines()
        if line.startswith("orchdata ")
    ]
    inline = [
        (page.name, re.sub(r"\bN\b", "8", command), False)
        for page in pages
        for command in re.findall(r"`(orchdata [^`]+)`", re.sub(FENCE, "", page.read_text()))
    ]
    return whole + inline


LEFT_OUT = ("MissingParameter", "BadOptionUsage")  # no paths, or an option without its value


def parse(line: str, *, is_whole: bool = True) -> None:
    """Parse a command as the program does, without running it. Raises AssertionError with what the program prints."""
    name, *arguments = shlex.split(line, comments=True)
    assert name == "orchdata"
    command: Any = get_command(app)
    while arguments and arguments[0] in getattr(command, "commands", {}):
        command = command.commands[arguments.pop(0)]
    assert not hasattr(command, "commands") or command.invoke_without_command, f"{line}: no such command"
    try:
        command.make_context(command.name, arguments)
    except Exception as error:
        if is_whole or type(error).__name__ not in LEFT_OUT:
            raise AssertionError(f"{line}: {error}") from error


@pytest.mark.parametrize(("where", "line", "is_whole"), _commands())
def test_a_command_parses(where: str, line: str, is_whole: bool) -> None:
    parse(line, is_whole=is_whole)


@pytest.mark.parametrize("line", ["orchdata profle", "orchdata profile --rank 8", "orchdata profile --batch-size many"])
def test_a_command_that_is_none_does_not_parse(line: str) -> None:
    with pytest.raises(AssertionError):
        parse(line, is_whole=False)


def test_only_a_whole_command_needs_its_paths() -> None:
    parse("orchdata profile --batch-size 8", is_whole=False)
    with pytest.raises(AssertionError, match="paths"):
        parse("orchdata profile --batch-size 8")


@pytest.mark.slow
def test_the_commands_that_show_whether_a_setting_pays_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    page = next(page for page in PAGES if page.name == "choosing_settings.md")
    RUN[page.name]()
    cost = re.search(r"^cost = (.*?^\))", page.read_text(), re.MULTILINE | re.DOTALL)
    assert cost
    Path("my_costs.py").write_text(f"import orchdata as od\n\nCOST = {cost[1]}\n")
    commands = re.findall(r"^\| .* \| `orchdata (.*?)` \|$", page.read_text(), re.MULTILINE)
    assert len(commands) > 10
    for command in commands:
        if command.startswith("bench "):
            continue  # minutes; its own tests run it
        done = CliRunner().invoke(app, shlex.split(command))
        assert done.exit_code == 0, f"{command}: {done.output}"
