"""Which exceptions are of an import that failed, what they name, and what to do."""

from __future__ import annotations

import functools
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from unittest.mock import ANY

import pytest

from orchdata.loaders import environment
from orchdata.loaders.environment import failed_import
from orchdata.loaders.errors import DataError, FieldError, PackageError, as_field_error, pass_trouble


def _calls_of(thread: threading.Thread) -> list[str]:
    frame = sys._current_frames().get(thread.ident or 0)
    return [each.f_code.co_name for each, _ in traceback.walk_stack(frame)] if frame else []


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


def test_a_thread_that_waited_for_an_import_that_failed_does_not_blame_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is given the module all the same, without what its body would have defined."""
    started, go_on = threading.Event(), threading.Event()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(threading, "events_of_planted_slow", (started, go_on), raising=False)
    (tmp_path / "planted_slow.py").write_text(
        "import threading\n"
        "started, go_on = threading.events_of_planted_slow\n"
        "started.set()\n"
        "go_on.wait()\n"
        "raise OSError('planted.so')\n"
    )

    def use() -> None:
        import planted_slow

        planted_slow.help_out()

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(raised, use)
        started.wait()
        second = pool.submit(raised, use)
        while not any("_lock_unlock_module" in _calls_of(thread) for thread in pool._threads):
            time.sleep(0.001)
        go_on.set()
        errors = [first.result(), second.result()]
    for error in errors:
        failed = failed_import(error)
        assert failed is not None and failed.package == "planted_slow" and str(failed.cause) == "planted.so"
    # The control: a module that was imported is there, and what misses an attribute of it is no import.
    assert failed_import(raised(lambda: sys.no_such_name)) is None  # type: ignore[attr-defined]
