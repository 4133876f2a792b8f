"""`orchdata doctor`: what it says is so, and what is broken makes it fail."""

from __future__ import annotations

import json
import resource
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from orchdata.cli import app, doctor
from orchdata.loaders.modalities import image_decode


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["doctor", *arguments])


def findings() -> tuple[int, dict[tuple[str, str], dict[str, str]]]:
    result = run("--json")
    by_name = json.loads(result.stdout)["findings"]
    return result.exit_code, {(each["about"], each["name"]): each for each in by_name}


def test_a_machine_that_works(private_cache: Path) -> None:
    code, by_name = findings()
    assert code == 0
    assert by_name["versions", "numpy"]["found"] == version("numpy")
    assert by_name["cache", "folder"]["found"].startswith(f"{private_cache}: ")
    assert not [each for each in by_name.values() if each["verdict"] == "broken"]
    lines = run().stdout.splitlines()
    assert lines[-1] == "all that loading needs is here"
    assert "\x1b" not in run().stdout


@pytest.mark.usefixtures("no_pauses")
def test_a_cache_folder_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ORCHDATA_CACHE", str(tmp_path / "file"))
    code, by_name = findings()
    assert code == 1
    assert by_name["cache", "folder"]["verdict"] == "broken"
    assert "ORCHDATA_CACHE" in by_name["cache", "folder"]["hint"]
    assert run().stdout.splitlines()[-1] == "1 broken"


def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(name: str) -> str:
        if name in ("pyarrow", "transformers"):
            raise PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(doctor, "version", without)
    code, by_name = findings()
    assert code == 1
    assert by_name["versions", "pyarrow"]["verdict"] == "broken"
    assert "pip install 'pyarrow" in by_name["versions", "pyarrow"]["hint"]
    assert by_name["features", "transformers"]["verdict"] == "missing"
    assert by_name["features", "transformers"]["hint"].startswith("pip install 'transformers>=")


@pytest.mark.parametrize(
    ("package", "error", "said"),
    [
        ("av", ModuleNotFoundError("No module named 'av'", name="av"), "not installed"),
        ("av", OSError("libavcodec.so.62: no such file"), "libavcodec.so.62"),
        ("transformers", RuntimeError("made for\nanother torch"), "made for another torch"),
        ("datasets", ModuleNotFoundError("No module named 'dill'", name="dill"), "needs dill, which is not installed"),
    ],
)
def test_an_extra_that_cannot_be_used_is_no_more_than_missing(
    monkeypatch: pytest.MonkeyPatch, package: str, error: Exception, said: str
) -> None:
    imported = doctor.importlib.import_module

    def failing(name: str, *given: Any, **options: Any) -> Any:
        if name == package:
            raise error
        return imported(name, *given, **options)

    monkeypatch.setattr(doctor.importlib, "import_module", failing)
    code, by_name = findings()
    assert code == 0
    assert by_name["features", package]["verdict"] == "missing"
    assert said in by_name["features", package]["found"]
    assert by_name["features", package]["hint"].startswith("pip install")
    if package == "av":
        assert "video" in by_name["features", "av"]["found"]
        assert by_name["media", "FFmpeg"]["verdict"] == "missing"
        assert by_name["media", "audio"]["verdict"] == "good"


@pytest.mark.parametrize("error", [OSError("libcudart.so.13"), RuntimeError("two versions of CUDA")])
def test_without_torchaudio_nothing_is_missing(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    imported = doctor.importlib.import_module

    def failing(name: str, *given: Any, **options: Any) -> Any:
        if name == "torchaudio":
            raise error
        return imported(name, *given, **options)

    monkeypatch.setattr(doctor.importlib, "import_module", failing)
    code, by_name = findings()
    finding = by_name["versions", "torchaudio"]
    assert (code, finding["verdict"]) == (0, "note")
    assert finding["found"] == f"{type(error).__name__}: {error}"
    assert finding["hint"].startswith("`pip uninstall torchaudio` if it is installed and you use transformers")


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (OSError("libsndfile.so.1"), "pip install --force-reinstall --no-deps 'soundfile"),
        (RuntimeError("made for another"), "pip install --force-reinstall --no-deps 'soundfile"),
        (ModuleNotFoundError("No module named 'planted_c'", name="planted_c"), "pip install 'planted_c'"),
        (ModuleNotFoundError("No module named 'soundfile'", name="soundfile"), "pip install 'soundfile"),
    ],
)
def test_the_advice_for_a_package_that_is_needed_changes_something(
    monkeypatch: pytest.MonkeyPatch, error: Exception, hint: str
) -> None:
    imported = doctor.importlib.import_module

    def failing(name: str, *given: Any, **options: Any) -> Any:
        if name == "soundfile":
            raise error
        return imported(name, *given, **options)

    monkeypatch.setattr(doctor.importlib, "import_module", failing)
    code, by_name = findings()
    assert (code, by_name["versions", "soundfile"]["verdict"]) == (1, "broken")
    assert by_name["versions", "soundfile"]["hint"].startswith(hint)


@pytest.mark.parametrize(
    ("package", "installed", "is_good"),
    [("numpy", "1.25.9", False), ("numpy", "2.0", True), ("pillow", "14.0.0", False), ("torch", "2.6.0a0+nv", True)],
)
def test_versions_outside_what_is_required(
    monkeypatch: pytest.MonkeyPatch, package: str, installed: str, is_good: bool
) -> None:
    monkeypatch.setattr(doctor, "version", lambda name: installed if name == package else version(name))
    code, seen = findings()
    assert (code, seen["versions", package]["verdict"]) == ((0, "good") if is_good else (1, "broken"))
    assert ("is required" in seen["versions", package]["found"]) is not is_good


@pytest.mark.parametrize(
    ("most", "advice"),
    [(resource.RLIM_INFINITY, "`ulimit -n 65536`"), (5000, "`ulimit -n 5000`"), (1024, "`nofile` in /etc/security")],
)
def test_the_advice_about_open_files_is_one_that_the_shell_allows(
    monkeypatch: pytest.MonkeyPatch, most: int, advice: str
) -> None:
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda _: (256, most))
    (files,) = [each for each in doctor._machine() if each.name == "open files"]
    assert files.verdict == "note" and files.hint.startswith(advice)


def test_a_folder_for_kernels_that_numba_will_make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import numba

    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "new" / "deep"))
    (kernels,) = doctor._kernels()
    assert (kernels.verdict, kernels.hint) == ("good", "")


@pytest.mark.parametrize(
    ("torch", "state", "advice"),
    [
        ("2.13.0", "not installed", "pip install torchvision 'torch==2.13.0'"),
        (
            "2.13.0+cu130",
            "not installed",
            "pip install torchvision 'torch==2.13.0+cu130' --index-url https://download.pytorch.org/whl/cu130",
        ),
        ("2.6.0a0+nv1", "not installed", "a torchvision from where this torch 2.6.0a0+nv1 is from"),
        (
            "2.13.0+cpu",
            "RuntimeError: operator torchvision::nms does not exist",
            "`pip uninstall torchvision`: it does",
        ),
    ],
)
def test_torchvision_is_not_to_bring_another_torch(
    monkeypatch: pytest.MonkeyPatch, torch: str, state: str, advice: str
) -> None:
    monkeypatch.setattr(doctor, "_installed", lambda package, wanted: (state, "pip install it"))
    monkeypatch.setattr(doctor, "version", lambda name: torch)
    hints = {each.name: each.hint for each in doctor._features()}
    assert hints["torchvision"].startswith(advice)


def test_files_of_the_cache_that_cannot_be_looked_at(private_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private_cache.mkdir(exist_ok=True)
    (private_cache / "held").write_bytes(b"x" * 2048)
    (private_cache / "gone").write_bytes(b"x")
    asked = Path.stat

    def refusing(path: Path, **options: Any) -> Any:
        if path.name == "gone":
            raise PermissionError(path)
        return asked(path, **options)

    monkeypatch.setattr(Path, "stat", refusing)
    _, by_name = findings()
    assert by_name["cache", "folder"]["verdict"] != "broken"
    assert "2.0 KiB used" in by_name["cache", "folder"]["found"]


@pytest.mark.parametrize("same", [True, False])
def test_the_resizer_is_held_against_torchvisions(monkeypatch: pytest.MonkeyPatch, same: bool) -> None:
    resized = image_decode.resized

    class Theirs:
        class InterpolationMode:
            BICUBIC = "bicubic"

        @staticmethod
        def resize(image: Any, size: list[int], mode: str, *, antialias: bool) -> Any:
            assert (mode, antialias) == ("bicubic", True)
            import torch

            pixels = np.ascontiguousarray(image.permute(1, 2, 0).numpy())
            pixels_out = resized(pixels, (size[1], size[0]), "torchvision", "bicubic")
            return torch.from_numpy(pixels_out if same else pixels_out ^ 1).permute(2, 0, 1)

    wanted = doctor.importlib.import_module

    def imported(name: str) -> Any:
        return Theirs if name.startswith("torchvision") else wanted(name)

    monkeypatch.setattr(doctor.importlib, "import_module", imported)
    code, by_name = findings()
    assert code == (0 if same else 1)
    assert by_name["resizer", "torchvision's"]["verdict"] == ("good" if same else "broken")


def test_a_look_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def _broken() -> Any:
        raise RuntimeError("no such thing")
        yield

    monkeypatch.setattr(doctor, "_LOOKS", (_broken,))
    code, by_name = findings()
    assert code == 1
    assert "RuntimeError: no such thing" in by_name["broken", "this look"]["found"]
