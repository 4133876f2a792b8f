"""`orchdata doctor`: what it says is so, and what is broken makes it fail."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
from printed import run

from orchdata.cli import machine


def findings() -> tuple[int, dict[str, dict[str, str]]]:
    result = run("doctor", "--json")
    return result.exit_code, {each["name"]: each for each in json.loads(result.stdout)["findings"]}


def test_a_machine_that_works(private_cache: Path) -> None:
    code, by_name = findings()
    assert code == 0
    assert by_name["numpy"]["found"] == version("numpy")
    assert by_name["cache folder"]["found"].startswith(f"{private_cache}: ")
    assert not [each for each in by_name.values() if each["verdict"] == "broken"]
    printed = run("doctor").stdout
    assert printed.splitlines()[-1] == "all that loading needs is here"
    assert "\x1b" not in printed


@pytest.mark.usefixtures("no_pauses")
def test_a_cache_folder_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ORCHDATA_CACHE", str(tmp_path / "file"))
    code, by_name = findings()
    assert (code, by_name["cache folder"]["verdict"]) == (1, "broken")
    assert run("doctor").stdout.splitlines()[-1] == "1 broken"


@pytest.mark.parametrize(
    ("package", "error", "verdict", "hint"),
    [
        ("transformers", PackageNotFoundError("transformers"), "missing", "pip install"),
        ("av", OSError("libavcodec.so.62: no such file"), "missing", "pip install --force-reinstall --no-deps 'av"),
        ("torchaudio", RuntimeError("made for\nanother torch"), "missing", "pip install --force-reinstall"),
        ("soundfile", OSError("libsndfile.so.1"), "broken", "pip install --force-reinstall --no-deps 'soundfile"),
        ("pyarrow", ModuleNotFoundError("no C", name="planted_c"), "broken", "pip install 'planted_c'"),
    ],
)
def test_only_a_package_that_loading_needs_is_broken(
    monkeypatch: pytest.MonkeyPatch, package: str, error: Exception, verdict: str, hint: str
) -> None:
    imported = machine.importlib.import_module

    def failing(name: str, *given: Any, **options: Any) -> Any:
        if name == package:
            raise error
        return imported(name, *given, **options)

    monkeypatch.setattr(machine.importlib, "import_module", failing)
    code, by_name = findings()
    assert (code, by_name[package]["verdict"]) == (int(verdict == "broken"), verdict)
    assert " ".join(str(error).split()) in by_name[package]["found"]
    assert by_name[package]["hint"].startswith(hint)
