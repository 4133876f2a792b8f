"""The same data in four places: equal batches, and a state of each loads in each other."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from remote_epochs import digests
from servers.http_server import HttpServer
from servers.s3_server import S3Server
from shard_factory import omni_shards

import orchdata as od

RECIPE = od.Recipe(image=od.ImagePreprocessor(dtype="float32"), audio=od.AudioPreprocessor(dtype="float32"))
STEPS_BEFORE = 3


pytestmark = pytest.mark.usefixtures("same_cache")


@pytest.fixture(scope="module")
def places(
    module_cache: Path, tmp_path_factory: pytest.TempPathFactory, s3_server: S3Server, http_server: HttpServer
) -> dict[str, Any]:
    """The arguments of a loader by the name of each place."""
    folder = tmp_path_factory.mktemp("places")
    paths = [Path(path) for path in omni_shards(folder, shards=3, samples=16)]
    bucket = s3_server.make_bucket("places")
    urls = []
    for path in paths:
        s3_server.put(bucket, f"data/{path.name}", path.read_bytes())
        urls.append(http_server.put(f"places/{path.name}", path.read_bytes()))
    far = od.ShardDataset(f"s3://{bucket}/data/*.tar", RECIPE, storage_options=s3_server.options)
    return {
        "local": {"dataset": od.ShardDataset(paths, RECIPE)},
        "s3": {"dataset": far},
        "http": {"dataset": od.ShardDataset(urls, RECIPE, storage_options=http_server.options)},
        "cached": {"dataset": far, "cache": od.Cache(folder / "cache", max_bytes=1 << 30)},
    }


def loader(place: dict[str, Any]) -> od.DataLoader:
    return od.DataLoader(**place, batch_size=4, seed=5, shuffle=True)


@pytest.fixture(scope="module")
def whole(places: dict[str, Any]) -> list[Any]:
    return digests(loader(places["local"]))


def test_copies_of_the_cache_are_read(places: dict[str, Any]) -> None:
    # The tests below are of copies, once they are whole.
    made = loader(places["cached"])
    for _ in range(100):
        before = made.stats()["reads"]["storage_bytes"]
        digests(made)
        reads = made.stats()["reads"]
        if reads["cache_bytes"] and reads["storage_bytes"] == before:
            break
    else:
        pytest.fail("the copies are not read")


@pytest.fixture(scope="module")
def states(places: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The state after some steps in each place."""
    found = {}
    for name, place in places.items():
        made = loader(place)
        for _ in itertools.islice(iter(made), STEPS_BEFORE):
            pass
        found[name] = made.state_dict()
    return found


@pytest.mark.slow_cases("http")
@pytest.mark.parametrize("name", ["s3", "http", "cached"])
def test_batches_are_those_of_local_files(places: dict[str, Any], whole: list[Any], name: str) -> None:
    assert len(whole) == 12
    assert digests(loader(places[name])) == whole
    assert digests(loader(places[name] | {"num_workers": 1})) == whole


@pytest.mark.parametrize(
    ("before", "after"), [("local", "s3"), ("s3", "http"), ("http", "cached"), ("cached", "local")]
)
def test_a_run_goes_on_in_another_place(
    places: dict[str, Any], whole: list[Any], states: dict[str, dict[str, Any]], before: str, after: str
) -> None:
    made = loader(places[after])
    made.load_state_dict(states[before])
    assert digests(made) == whole[STEPS_BEFORE:]


@pytest.mark.parametrize(
    ("place", "options", "steps"),
    [("local", {}, 2), ("s3", {}, 4), ("http", {}, 4), ("s3", {"prefetch_factor": 1}, 1)],
)
def test_more_steps_are_under_way_where_answers_take_long(
    places: dict[str, Any], place: str, options: dict[str, Any], steps: int
) -> None:
    running = iter(od.DataLoader(**places[place], batch_size=1, num_threads=2, **options))
    next(running)
    assert len(running._stream._under_way) == steps
    running.close()
