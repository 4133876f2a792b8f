"""Measuring shards in actors of a Ray cluster: the index is that of a build without it."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import jobs_recipes
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ray_clusters import TestCluster
from shard_factory import RECIPE, omni_shards, png, write_shard
from text_shards import same, texts

import orchdata as od
from orchdata.loaders.errors import ProcessError
from orchdata.loaders.index.build import build_index
from orchdata.loaders.index.building.crew import BuildProgress
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.measuring.on_ray import RayProcesses
from orchdata.verifying.verify import verify


def num_actors() -> int:
    """How many actors that measure are left."""
    from ray._private.state import actors

    known = actors().values()
    return sum(each["State"] != "DEAD" for each in known if "ShardActor" in str(each.get("ActorClassName", each)))


def costs_on_nodes(cluster: TestCluster) -> set[Path]:
    """The files of costs in the cache folders of the nodes."""
    return {path for node in cluster.caches for path in node.rglob("*.costs")}


@pytest.mark.slow
def test_the_index_is_that_of_threads(ray_cluster: TestCluster, tmp_path: Path) -> None:
    urls = omni_shards(tmp_path, shards=2, samples=6)
    broken, table = tmp_path / "broken.tar", tmp_path / "rows.parquet"
    broken.write_bytes(Path(urls[0]).read_bytes()[:700])
    pq.write_table(pa.table({"text": ["a cat", "on the mat"]}), table)
    urls += [str(broken), str(table), texts(tmp_path / "large.jsonl", 20_000), texts(tmp_path / "small.jsonl", 3)]
    alone = build_index(urls, RECIPE, cache=CacheFolder(tmp_path / "alone"))
    seen: list[BuildProgress] = []
    cache = CacheFolder(tmp_path / "cache")
    index = build_index(urls, RECIPE, cache=cache, jobs=2, processes=RayProcesses(), progress=seen.append)
    assert same(index, alone)
    assert sorted(each.url for each in seen) == sorted(urls) and all(each.measured for each in seen)
    assert {path.name for path in (tmp_path / "cache" / "facts").iterdir()} == {
        path.name for path in (tmp_path / "alone" / "facts").iterdir()
    }
    assert num_actors() == 0


@pytest.mark.slow
def test_a_node_that_does_not_see_the_cache_folder_sends_files(
    ray_cluster: TestCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchdata.loaders.index.jobs.jobs.new_mark", lambda cache: "/not/there")
    urls = omni_shards(tmp_path, shards=3, samples=6)
    alone = build_index(urls, RECIPE, cache=CacheFolder(tmp_path / "alone"))
    before = costs_on_nodes(ray_cluster)  # of other tests of this cluster
    cache = CacheFolder(tmp_path / "cache")
    assert same(build_index(urls, RECIPE, cache=cache, jobs=2, processes=RayProcesses()), alone)
    assert costs_on_nodes(ray_cluster) == before


@pytest.mark.slow
def test_an_actor_that_ends_is_one_error_that_names_the_shard(ray_cluster: TestCluster, tmp_path: Path) -> None:
    urls = [texts(tmp_path / f"{number}.jsonl", 30) for number in range(3)]
    recipe, cache = jobs_recipes.recipe(tmp_path), CacheFolder(tmp_path / "cache")
    (tmp_path / "exit").write_text("0 has 7 words")
    with pytest.raises(ProcessError, match=r"0.jsonl: the Ray actor that measures it was lost, 3 times"):
        build_index(urls, recipe, cache=cache, jobs=2, processes=RayProcesses())
    assert num_actors() == 0
    (tmp_path / "exit").unlink()
    index = build_index(urls, recipe, cache=cache, jobs=2, processes=RayProcesses())
    assert same(index, build_index(urls, recipe, cache=CacheFolder(tmp_path / "alone")))
    assert not len(index.bad_rows()), "nothing was recorded as bad"


@pytest.mark.slow
def test_actors_that_are_killed_lose_nothing(ray_cluster: TestCluster, tmp_path: Path) -> None:
    urls = [texts(tmp_path / f"{number}.jsonl", 4000) for number in range(6)]
    recipe = jobs_recipes.recipe(tmp_path)
    killed: set[int] = set()
    done = threading.Event()

    def kill() -> None:
        while not done.wait(0.3) and len(killed) < 2:
            for path in tmp_path.glob("pid-*"):
                process = int(path.name.removeprefix("pid-"))
                if process not in killed and process != os.getpid() and len(killed) < 2:
                    killed.add(process)
                    os.kill(process, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    index = build_index(urls, recipe, cache=CacheFolder(tmp_path / "cache"), jobs=2, processes=RayProcesses())
    done.set()
    thread.join()
    assert killed
    assert same(index, build_index(urls, recipe, cache=CacheFolder(tmp_path / "alone")))


def test_an_address_of_a_ray_client_is_an_error() -> None:
    with pytest.raises(ValueError, match="ray://"):
        RayProcesses("ray://somewhere:10001")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*Ray actor", "ignore:.*were lost", "ignore:.*was lost")
def test_verify_lists_what_processes_of_this_machine_list(ray_cluster: TestCluster, tmp_path: Path) -> None:
    urls = omni_shards(tmp_path, shards=2, samples=6)
    samples: list[dict[str, object]] = [{"__key__": "cut", "png": png(40, 40)[:-30], "txt": b"a"}]
    urls.append(write_shard(tmp_path / "cut.tar", [*samples, {"__key__": "good", "png": png(40, 40), "txt": b"b"}]))
    index = build_index(urls, RECIPE, cache=CacheFolder(tmp_path / "cache"))
    expected = verify(index, RECIPE, jobs=2)
    assert [failure.key for failure in expected.failures] == ["cut"]
    found = verify(index, RECIPE, jobs=2, engine=od.RayEngine(num_cpus=1))
    assert found.num_samples == expected.num_samples
    assert [str(failure) for failure in found.failures] == [str(failure) for failure in expected.failures]
