"""Which exceptions are of an import that failed, what they name, and what to do."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from unittest.mock import ANY

import pytest

from orchdata.loaders import environment
from orchdata.loaders.environment import failed_import
from orchdata.loaders.errors import DataError, FieldError, PackageError, pass_trouble
from orchdata.loaders.failures import as_field_error

RAISES = {
    "ModuleNotFoundError": ("import planted_nowhere", "ModuleNotFoundError: No module named 'planted_nowhere'"),
    "OSError": ("raise OSError('libplanted.so.1')", "OSError: libplanted.so.1"),
    "in a call": ("def look(): return {}['x']\nlook()", "KeyError: 'x'"),
    "in a part": ("from . import part", "RuntimeError: part"),
}


@pytest.fixture
def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes `planted` importable, of the given source; it goes with the test."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(source: str) -> None:
        (tmp_path / "planted").mkdir()
        (tmp_path / "planted" / "__init__.py").write_text(source + "\n")
        (tmp_path / "planted" / "part.py").write_text("raise RuntimeError('part')\n")

    yield write
    for name in [each for each in sys.modules if each.partition(".")[0] == "planted"]:
        del sys.modules[name]


@pytest.fixture(scope="module", autouse=True)
def distributions() -> Iterator[None]:
    """What is installed is looked through once, and not for each error."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(environment, "packages_distributions", functools.cache(environment.packages_distributions))
        yield


def by_statement() -> None:
    import planted  # noqa: F401


def by_name() -> None:
    from planted import part  # noqa: F401


def by_function() -> None:
    import_module("planted")


def raised(call: Callable[[], None]) -> Exception:
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize("call", [by_statement, by_name, by_function])
@pytest.mark.parametrize("kind", RAISES)
def test_no_exception_of_an_import_is_a_fault_of_data(
    plant: Callable[[str], None], kind: str, call: Callable[[], None]
) -> None:
    source, reason = RAISES[kind]
    plant(source)
    error = raised(call)
    with pytest.raises(PackageError) as caught:
        as_field_error(error, "decoded")
    assert (caught.value.package, caught.value.reason) == ("planted", reason)
    assert caught.value.__cause__ is error
    assert isinstance(caught.value, ImportError)


def test_data_are_still_blamed_for_what_happens_after_an_import(plant: Callable[[str], None]) -> None:
    plant("def decode(data): raise ValueError(f'cut at {len(data)}')")

    def decode() -> None:
        try:
            import planted_nowhere  # noqa: F401
        except ImportError:  # a package that another takes the place of
            import planted

            planted.decode(b"abc")

    error = raised(decode)
    assert isinstance(error.__context__, ImportError)
    assert failed_import(error) is None
    failure = as_field_error(error, "decoded", "wav")
    assert isinstance(failure, FieldError) and failure.reason == "cannot be decoded: ValueError: cut at 3"


@pytest.mark.parametrize("error", [ValueError("x"), OSError("x"), KeyError("x"), DataError("s", "k", "f", "r")])
def test_other_errors_are_no_imports(error: Exception) -> None:
    def fail() -> None:
        exec(compile("raise error", "<string>", "exec"), {"error": error})

    assert failed_import(raised(fail)) is None
    pass_trouble(raised(fail))


def test_an_import_that_the_package_itself_reports_names_it() -> None:
    assert failed_import(ImportError("X needs the Y library", name="y.z")) == ("y", ANY)
    error = raised(lambda: pass_trouble(ImportError("this function needs more")))
    assert isinstance(error, PackageError) and "orchdata doctor" in str(error)
