"""Which exceptions are of an import that failed, what they name, and what to do."""

from __future__ import annotations

import csv
import functools
import io
import json
import os
import struct
import subprocess
import sys
import threading
import time
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from unittest.mock import ANY

import pytest
from forked_program import run_forked
from images import encoded, photo, pixels_of
from PIL import Image
from shard_factory import omni_shards, write_shard

import orchdata as od
from orchdata.loaders import environment
from orchdata.loaders.environment import failed_import, is_installed
from orchdata.loaders.errors import DataError, DecodeError, FieldError, PackageError, as_field_error, pass_trouble
from orchdata.loaders.index.build import build_index
from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities.image_decode import probe_image
from orchdata.loaders.recipe import Recipe


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


# Settings of the whole process, which any program may change: no good sample becomes a bad one for them.


@contextmanager
def cells_of(characters: int) -> Iterator[None]:
    before = csv.field_size_limit(characters)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def failures(path: Path) -> list[str]:
    index = build_index([str(path)], Recipe())
    return [index.failure(int(row)).reason for row in index.bad_rows()]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "rows.csv"
    path.write_text("id,text\n1," + "w " * 1_000 + "\n2,b\n")
    return path


def test_a_low_limit_of_cells_is_refused_and_not_recorded(table: Path) -> None:
    with cells_of(100), pytest.raises(PackageError, match=r"csv.field_size_limit\(\) is 100.*131072"):
        build_index([str(table)], Recipe())
    assert failures(table) == []


def test_little_recursion_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "a", "more": json.loads("[" * 300 + "]" * 300)}) + "\n")
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(600)
    try:
        with pytest.raises(ValueError, match=r"getrecursionlimit\(\) is 600.*setrecursionlimit\(1000\)"):
            build_index([str(path)], Recipe())
    finally:
        sys.setrecursionlimit(before)
    assert failures(path) == []


@pytest.mark.parametrize("kind", ["PNG", "GIF", "BMP", "PPM", "JPEG2000"])
def test_pillows_own_limit_of_pixels_is_none_of_ours(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(photo(64, 48), kind)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    assert probe_image(data, Limits()) == (64, 48)
    assert pixels_of(data, (64, 48)).shape == (48, 64, 3)


def unsound_apng() -> bytes:
    """A PNG that is good, but for a chunk of no frames, of which Pillow warns."""
    data = encoded(photo(64, 48), "PNG")
    control = b"acTL" + struct.pack(">II", 0, 0)
    chunk = struct.pack(">I", 8) + control + struct.pack(">I", zlib.crc32(control))
    return data[:33] + chunk + data[33:]


def test_a_warning_that_is_made_an_exception_is_no_damage(tmp_path: Path) -> None:
    data = unsound_apng()
    with pytest.warns(UserWarning, match="Invalid APNG"):
        Image.open(io.BytesIO(data))  # the control
    path = write_shard(tmp_path / "a.tar", [{"__key__": "a", "png": data, "txt": b"x"}])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader = od.DataLoader(od.ShardDataset(path, Recipe(audio=None)), batch_size=1, num_threads=0)
        assert [key for batch in loader for _, key in batch.sample_ids] == ["a"]


def jpeg_with(stray: bytes) -> bytes:
    data = encoded(photo(64, 48), "JPEG")
    return data[:2] + stray + data[2:]


@pytest.mark.parametrize("stray", [b"\xff", b"\0", b"\xff\0"])
def test_what_pillow_reads_byte_by_byte_in_a_jpeg_is_bounded(stray: bytes) -> None:
    with pytest.raises(DecodeError, match="more than 65536 bytes"):
        probe_image(jpeg_with(b"\xff" + stray * (1 << 24)), Limits())
    assert probe_image(jpeg_with(b"\xff" * 1_000), Limits()) == (64, 48)


# torch's vector math is called first by one thread, whoever loads.


COUNTED = """
import sys, threading, torch
from collections import Counter
from orchdata.loaders import first_calls

calls, threads, seen = Counter(), set(), []
def counted(name, function):
    def call(values):
        calls[name, values.dtype] += 1
        threads.add(threading.current_thread().name)
        return function(values)
    return call
for name in first_calls._FUNCTIONS:
    setattr(torch, name, counted(name, getattr(torch, name)))
together = threading.Barrier(8)
def load():
    together.wait()
    first_calls.settle_first_calls()
    seen.append(sum(calls.values()))
sys.setswitchinterval(1e-6)
started = [threading.Thread(target=load) for _ in range(8)]
for thread in started: thread.start()
for thread in started: thread.join()
print(len(threads), set(calls.values()), set(seen) == {2 * len(first_calls._FUNCTIONS)})
"""

LOADED = """
import sys
import torch
import orchdata as od
from orchdata.loaders import first_calls

class Items:
    def __len__(self): return 8
    def __getitem__(self, row): return torch.tensor(first_calls._is_settled)

if __name__ == "__main__":
    options = eval(sys.argv[1])
    print(first_calls._is_settled, all(batch.all() for batch in od.DataLoader(Items(), batch_size=2, **options)))
"""


def said_by(folder: Path, program: str, *args: str) -> list[str]:
    return run_forked(program, *args, folder=folder).stdout.split("\n")[:-1]


def test_one_thread_makes_each_first_call_and_the_others_wait_for_it(tmp_path):
    assert said_by(tmp_path, COUNTED) == ["1 {1} True"]


@pytest.mark.parametrize("options", ["{}", "{'num_workers': 1}"])
def test_they_are_made_before_anything_is_loaded(options, tmp_path):
    assert said_by(tmp_path, LOADED, options) == ["False True"]


# Which packages a process loads for a recipe: all that decoding needs, or only what counting needs.


JOB = """
import sys
from orchdata.cli import main
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.recipe import load_required

try:
    main()
except SystemExit as ended:
    assert not ended.code
print()
print("torch" in sys.modules)
load_required(Recipe())
print("torch" in sys.modules)
"""


@pytest.mark.slow
def test_the_command_indexes_images_and_audio_without_torch(tmp_path: Path) -> None:
    urls = omni_shards(tmp_path, shards=1, samples=6)
    done = subprocess.run([sys.executable, "-c", JOB, "index", *urls, "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *report, indexed, loaded = done.stdout.splitlines()
    found = json.loads("\n".join(report))
    assert (found["samples"], found["bad"]) == (6, 0)
    # Decoding sound imports torchaudio, and torchaudio imports torch.
    assert (indexed, loaded) == ("False", str(is_installed("torchaudio")))


# Worker processes share the cores, and a fork of a process with threads of `tokenizers` neither waits nor warns.


pytest.importorskip("tokenizers")

THREADS_JOB = Path(__file__).parents[1] / "support" / "tokenizer_threads_job.py"
CORES = len(os.sched_getaffinity(0))
SHARE = max(1, CORES // 2)


UNSET = ({}, "None", SHARE, SHARE)
TRUE = ({"TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": "3"}, "true", 3, 3)
FALSE = ({"TOKENIZERS_PARALLELISM": "false"}, "false", SHARE, 0)


CASES = {
    "fork": ("fork", *UNSET),
    "fork-true": ("fork", *TRUE),
    "forkserver": ("forkserver", *UNSET),
    "spawn-false": ("spawn", *FALSE),
}


def outcomes(folder: Path) -> dict[str, tuple[int, str, str]]:
    """Exit code, stdout and stderr of each case."""
    environment = {
        name: value for name, value in os.environ.items() if "TOKENIZERS" not in name and "RAYON" not in name
    }
    environment["PYTHONPATH"] = str(THREADS_JOB.parent)
    cases = json.dumps([case[:2] for case in CASES.values()])
    done = subprocess.run(
        [sys.executable, str(THREADS_JOB), cases, str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(CASES, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.slow
def test_workers_share_the_cores_and_forks_go_on(tmp_path: Path) -> None:
    for case, (code, out, err) in outcomes(tmp_path).items():
        start_method, _, used, count, started = CASES[case]
        assert code == 0, err
        assert "forked" not in err
        lines = out.split("\n")
        in_workers = (
            f"false {count} 0" if start_method == "fork" else f"{used} {count} {started}"
        )  # none survive a fork
        assert {line for line in lines if line.startswith("worker")} == {f"worker {in_workers}"}, (case, out)
        assert "batches 10" in lines and "fork false" in lines and f"program {used}" in lines, (case, out)
