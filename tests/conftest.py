"""Shared fixtures. Real media come from the fixtures folder, which is never part of the repository."""

from __future__ import annotations

import gc
import os
import signal
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from hypothesis import settings

# Tensors of tests are small: threads of one operation would only wait for each other, and for whoever shares the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell starts what it runs in the background without Ctrl-C, which tests send.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A loaded machine is no fault of an example; what needs more examples says so itself.
settings.register_profile("no clock", deadline=None, max_examples=50)
settings.load_profile("no clock")

REPOSITORY = Path(__file__).resolve().parent.parent

pytest_plugins = ["servers.fixtures", "ray_clusters", "browsers"]


def pytest_sessionstart(session: pytest.Session) -> None:
    """Compile kernels before several processes of tests, and the processes that they start, each compile the same."""
    if getattr(session.config.option, "numprocesses", None) and not hasattr(session.config, "workerinput"):
        from orchdata.engines.warm import FAMILIES, Warming

        Warming(list(FAMILIES)).wait()
    else:
        gc.disable()  # until tests are collected: a third of the time of all imports was looking for garbage


# Files that take long and have few tests, as those of jobs of ranks. Workers take whole files: one that took such a
# file when the others have nothing left would end long after them.
BEGUN_FIRST = (
    "benchmarks/test_resume.py",
    "orchdata/engines/test_corners.py",
    "orchdata/test_failures.py",
    "benchmarks/test_runs.py",
    "benchmarks/test_pictures.py",
    "faults/test_planted.py",
    "orchdata/hf/test_packing.py",
    "balancers/costs/test_real_models.py",
    "test_readme.py",
    "test_docs_run.py",
    "faults/test_hostile_files.py",
    "faults/test_failing_system_calls.py",
    "examples/test_examples.py",
    "orchdata/storage/test_faulty_servers.py",
    "orchdata/test_demo.py",
    "orchdata/test_wheel.py",
    "orchdata/engines/test_engines.py",
    "orchdata/engines/test_processes.py",
    "orchdata/engines/test_starting.py",
    "orchdata/hf/test_trainer.py",
    "orchdata/hf/test_families.py",
    "orchdata/ranks/test_team_attention.py",
    "orchdata/test_shared_media.py",
    "orchdata/test_teams.py",
    "orchdata/test_rounds.py",
    "orchdata/test_peer_loaders.py",
    "orchdata/storage/test_secrets.py",
    "fuzz/test_fuzz.py",
    "orchdata/test_per_phase_job.py",
    "orchdata/post_balancing/test_post_balance.py",
    "orchdata/test_parity.py",
    "orchdata/test_mixture_parity.py",
    "orchdata/ranks/test_exchange.py",
    "loaders/shards/test_parquet_children.py",
    "orchdata/test_exactly_once.py",
    "loaders/index/test_build.py",
    "loaders/index/test_index.py",
    "test_recipes.py",
    "benchmarks/test_loading.py",
)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark those cases of a test slow that it names by parts of their ids."""
    named = [part for mark in item.iter_markers("slow_cases") for part in mark.args]
    if any(part in item.name.partition("[")[2] for part in named):
        item.add_marker("slow")


@pytest.hookimpl(trylast=True)  # slow ones are left out before
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order files for workers, which take them in this order (`--no-loadscope-reorder`): long ones, then by tests."""
    if not hasattr(config, "workerinput"):
        return
    first = {str(REPOSITORY / "tests" / name): number for number, name in enumerate(BEGUN_FIRST)}
    num_tests = Counter(item.path for item in items)
    items.sort(key=lambda item: (first.get(str(item.path), len(first)), -num_tests[item.path], item.path))


def pytest_collection_finish() -> None:
    """Leave modules and collected tests out of garbage collections: many tests collect, and each looked through all."""
    gc.enable()
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many points of a run were tried, where tests record it (`record_property("points", number)`)."""
    reports = [report for each in terminalreporter.stats.values() for report in each if hasattr(report, "nodeid")]
    points = [
        dict(report.user_properties).get("points", 0) for report in reports if getattr(report, "when", "") == "call"
    ]
    if sum(points):
        terminalreporter.write_line(f"{sum(points):,} faults were injected at one call each")


@pytest.fixture(scope="session")
def fixtures_dir() -> Path:
    """The folder of real images, speech, text and shards; skips where it is absent."""
    path = Path(os.environ.get("ORCHDATA_FIXTURES", REPOSITORY.parent / "shared" / "fixtures"))
    if not path.is_dir():
        pytest.skip(f"no fixtures at {path}: set ORCHDATA_FIXTURES to the folder that holds them")
    return path


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the system refuses is tried as often as ever, at once."""
    monkeypatch.setattr("orchdata.loaders.storage.storage.PAUSES_SECONDS", (0, 0, 0))


@pytest.fixture
def no_hang() -> Iterator[None]:
    """What would go on for ever, or wait for what never comes, ends as a failure."""
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("does not end"))
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="session")
def new_caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folders that are made without a look at those that are there, as pytest's are: of thousands it takes long."""
    folder = tmp_path_factory.mktemp("caches")
    return (folder / str(number) for number in count())


@pytest.fixture(autouse=True)
def private_cache(new_caches: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test gets a cache folder of its own."""
    path = next(new_caches)
    path.mkdir(mode=0o700)
    monkeypatch.setenv("ORCHDATA_CACHE", str(path))
    return path


@pytest.fixture(scope="module")
def module_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache folder for what tests of a module share; `same_cache` gives it to a test too."""
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("cache-of-all")
        patch.setenv("ORCHDATA_CACHE", str(path))
        yield path


@pytest.fixture(scope="module")
def kept_parquet_processes() -> Iterator[None]:
    """Processes that measure Parquet files stay from one test of a module to the next: a start takes half a second."""
    from orchdata.loaders.shards.children import measuring

    with measuring():
        yield


@pytest.fixture
def same_cache(private_cache: Path, module_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORCHDATA_CACHE", str(module_cache))
