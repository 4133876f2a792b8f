"""Steps from actors of Ray: the contract of all engines, and what only actors can do wrong."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from digests import digest
from engine_specs import Specs, make_specs
from ray_clusters import ACTOR, TestCluster
from ray_data import Drawn, Raising, WithState, copied_on_node, numbers_over_ray
from shard_factory import RECIPE, omni_shards
from spec_job import delivered

import orchdata as od
from orchdata.engines import on_ray as cluster_module
from orchdata.engines import parcel as node_files
from orchdata.engines.engine import Workers
from orchdata.engines.on_ray import RayEngine, described, is_loss, is_own_end
from orchdata.engines.parcel import (
    check_same,
    expected_by,
    file_of_index,
    make_parcel,
    open_index,
    open_parcel,
)
from orchdata.engines.processes.worker import WorkerSpec
from orchdata.loaders.index.index import Index

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.filterwarnings("default:.*Ray actors of this loader have not started"),  # on a loaded machine
]
ENGINE = RayEngine(**ACTOR)
WORKERS = Workers(num_workers=1, num_threads=1, prefetch_factor=2)


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory, module_cache: Path) -> Specs:
    return make_specs(tmp_path_factory.mktemp("omni"))


def test_actors_build_the_same_batches_of_every_spec(specs: Specs, same_cache: None) -> None:
    running = {name: ENGINE.open(spec, WORKERS) for name, (spec, _) in specs.items()}
    for name, (spec, tasks) in specs.items():
        futures = [running[name].submit(task) for task in tasks]
        assert [delivered(future.result(240)) for future in futures] == [
            delivered(spec.open().build(task)) for task in tasks
        ], name
        running[name].close()
        running[name].close()


def loader(data: Any, **options: Any) -> od.DataLoader[Any]:
    defaults: dict[str, Any] = {"batch_size": 4, "num_workers": 2, "engine": ENGINE}
    return od.DataLoader(data, **defaults | options)


def test_an_epoch_of_shards_is_that_of_threads_and_batches_are_writable(tmp_path: Path) -> None:
    shards = omni_shards(tmp_path, shards=2, samples=12)
    dataset = od.ShardDataset(shards, RECIPE)
    here: dict[str, Any] = {"engine": None, "num_workers": 0}
    common: dict[str, Any] = {"num_threads": 1, "num_workers": 1, "shuffle": True, "seed": 1}
    expected = [batch.llm.input_ids.clone() for batch in loader(dataset, **common | here)]
    running = loader(dataset, persistent_workers=True, **common)
    batches = list(running)
    assert all(map(torch.equal, (batch.llm.input_ids for batch in batches), expected)) and len(batches) == 6
    # What is written to one batch is in no other, and not in the epoch that comes next.
    for batch in batches:
        for tensor in (batch.llm.input_ids, batch.llm.labels, batch.image.patches):
            tensor.fill_(7)
    assert running.stats()["reads"]["storage_bytes"] > 0
    state = running.state_dict()
    fresh = loader(dataset, **common | here)
    fresh.load_state_dict(state)
    assert all(map(torch.equal, (batch.llm.input_ids for batch in running), [batch.llm.input_ids for batch in fresh]))
    running.close()


def test_map_style_batches_and_random_states_are_those_of_processes() -> None:
    def drawn(**options: Any) -> list[Any]:
        torch.manual_seed(5)
        made = loader(Drawn(), shuffle=True, num_threads=0, **options)
        return [[column.tolist() for column in batch] for batch in made]

    expected = drawn(engine=None, multiprocessing_context="fork")
    assert drawn() == expected


def test_errors_arrive_with_the_traceback_of_the_actor() -> None:
    with pytest.raises(ZeroDivisionError, match=r"(?s)DataLoader worker process 0 on .*__getitem__.*item 0"):
        next(iter(loader(Raising(), num_workers=1)))


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (Drawn(), {"num_workers": 0}, "pass num_workers, or"),
        (WithState(), {}, "state of its own"),
        (Drawn(), {"multiprocessing_context": "fork"}, "multiprocessing_context is for"),
        (Drawn(), {"engine": "ray"}, "engine is a value with a method open"),
        (Drawn(), {"engine": RayEngine}, "engine is a value with a method open"),
        (None, {"address": "ray://host:10001"}, r"ray start --address=HOST:PORT --num-cpus=0"),
        (None, {"start_timeout": 0}, "start_timeout is a number of seconds above 0"),
        (None, {"lifetime": "detached"}, "sets lifetime itself"),
    ],
)
def test_what_an_engine_cannot_do_is_an_error(data: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        loader(data, **options) if data else RayEngine(**options)


def test_missing_cpus_are_a_warning_at_once_and_an_error_with_the_sum() -> None:
    crowded = loader(Drawn(), num_workers=8, num_threads=4, engine=RayEngine(start_timeout=5))
    with (
        pytest.warns(UserWarning, match=r"8 actors x 4 threads = 32 CPUs, the cluster has 6"),
        pytest.raises(RuntimeError, match=r"8 actors x 4 threads = 32 CPUs.*num_threads=.*num_cpus=.*start_timeout="),
    ):
        next(iter(crowded))


def test_a_module_that_nodes_lack_is_an_error_that_says_how_to_send_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").write_text("def cost(item): return 1\ndef collate(items): return items\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import only_here  # type: ignore[import-not-found]

    with pytest.raises(RuntimeError, match=r"cannot import the module 'only_here'.*runtime_env={'working_dir': '.'}"):
        next(iter(loader(Drawn(), collate_fn=only_here.collate)))


def test_a_function_of_the_main_program_is_sent_by_value() -> None:
    workers = replace(WORKERS, worker_init_fn=lambda number: number + 1)  # type: ignore[arg-type, return-value]
    worker = WorkerSpec(spec=None, workers=workers)  # type: ignore[arg-type]
    sent, _ = open_parcel(make_parcel(worker, expected_by(None)))
    assert sent.workers.worker_init_fn is not None and sent.workers.worker_init_fn(1) == 2  # type: ignore[func-returns-value]


def test_the_index_and_arrays_are_found_on_a_node_or_fetched_once(
    specs: Specs, ray_cluster: TestCluster, same_cache: None
) -> None:
    spec, tasks = specs["shards, packed, joint"]
    here = ray.get_runtime_context().get_node_id()
    file = file_of_index(spec.content.shards.index, here)  # type: ignore[union-attr]
    assert node_files._there(file) == Path(file.path)
    # A node that has another file under the name, or none, gets a copy in pieces.
    copy = ray.remote(copied_on_node).options(num_cpus=0, resources={"node1": 0.1})
    first, second = ray.get([copy.remote(file), copy.remote(file)])
    assert first == second and Path(first[0]).is_relative_to(ray_cluster.caches[1])
    assert Path(first[0]).read_bytes() == Path(file.path).read_bytes()
    shards = replace(spec.content.shards, index=Index(first[0]))  # type: ignore[union-attr]
    by_copy = replace(spec, content=replace(spec.content, shards=shards))  # type: ignore[type-var, call-overload]
    assert delivered(by_copy.open().build(tasks[0])) == delivered(spec.open().build(tasks[0]))


def test_a_node_that_cannot_read_the_store_asks_the_trainers_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = od.ShardDataset(omni_shards(tmp_path, shards=1, samples=3), RECIPE).index()
    file = file_of_index(index, ray.get_runtime_context().get_node_id())
    monkeypatch.setattr(node_files, "_there", lambda file: None)
    copy = open_index(file, no_store, None)
    assert copy.path.name == f"{file.digest}.index" and copy.path.read_bytes() == index.path.read_bytes()
    with pytest.raises(od.StorageError, match="cannot be read on the trainer's node") as raised:
        open_index(replace(file, path=str(tmp_path / "lost.index"), digest="0"), no_store, None)
    assert "no answer" in str(raised.value.__cause__)


def no_store() -> Index:
    raise od.StorageError("s3://bucket/index", "no answer")


def test_a_node_that_would_build_other_batches_is_an_error(specs: Specs, same_cache: None) -> None:
    spec, _ = specs["shards, packed, joint"]
    expected = expected_by(spec)
    check_same(spec, expected, "here")
    versions = dict(expected.versions) | {"numpy": "1.0", "pillow": "1.2.3"}
    with pytest.raises(RuntimeError, match=r"node 10.0.0.2 would build other batches.*numpy is .* here and 1.0 in"):
        check_same(spec, replace(expected, versions=versions), "10.0.0.2")
    with pytest.raises(RuntimeError, match="the recipe has another fingerprint here"):
        check_same(spec, replace(expected, recipes=("other",)), "10.0.0.2")
    row, facts = next((row, facts) for row, facts in expected.samples.items() if any("image" in name for name in facts))
    name = next(name for name in facts if name.startswith("image") and name.endswith("values"))
    with pytest.raises(RuntimeError, match=f"sample .*{name} are others"):
        check_same(spec, replace(expected, samples={row: facts | {name: "0"}}), "10.0.0.2")
    modalities = {name.split()[0] for facts in expected.samples.values() for name in facts}
    assert modalities == {"text", "image", "audio"}


def test_an_address_is_that_of_the_running_ray() -> None:
    running = ray.get_runtime_context().gcs_address
    for same in (None, "auto", running, f"localhost:{running.rpartition(':')[2]}", "local"):
        cluster_module.connect(same, num_ranks=1)
    for other in ("127.0.0.1:1", f"192.0.2.1:{running.rpartition(':')[2]}"):
        with pytest.raises(ValueError, match=f"{other}.*uses the Ray at {running} already. Leave the address out"):
            cluster_module.connect(other, num_ranks=1)


def test_folders_of_code_are_for_a_whole_job() -> None:
    engine = RayEngine(runtime_env={"working_dir": ".", "env_vars": {"A": "b"}})
    options, code = cluster_module.split_code(engine.ray_options)
    assert (options, code) == ({"runtime_env": {"env_vars": {"A": "b"}}}, {"working_dir": "."})
    with pytest.raises(ValueError, match=r"Ray is initialized already, without runtime_env={'working_dir'"):
        next(iter(loader(Drawn(), engine=engine)))


def living(folder: Path) -> list[int]:
    """Processes that loaded items of `Slow`, and still run."""
    pids = [int(path.name.removeprefix("pid-")) for path in folder.glob("pid-*")]
    assert pids
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def wait_until(is_so: Callable[[], bool], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.05)


TRAINER = """
import sys, warnings, time
warnings.simplefilter("ignore")
import ray, orchdata as od
from pathlib import Path
from ray_data import Slow
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
folder = Path(sys.argv[2])
batches = iter(od.DataLoader(Slow(folder, wait=False), batch_size=2, num_workers=2, engine=od.RayEngine(num_cpus=0.25)))
next(batches)
print("begun", flush=True)
if __name__ == "__main__":
    time.sleep(1000)
"""


def test_nothing_is_left_once_the_trainer_has_ended(tmp_path: Path, ray_cluster: TestCluster) -> None:
    script = tmp_path / "trainer.py"
    script.write_text(TRAINER)
    (tmp_path / "pids").mkdir()
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "support")}
    command = [sys.executable, script, ray_cluster.address, tmp_path / "pids"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env) as trainer:
        assert trainer.stdout is not None and trainer.stdout.readline() == b"begun\n"
        trainer.kill()
        trainer.wait(60)
    wait_until(lambda: not living(tmp_path / "pids"))


@pytest.mark.timeout(600)
def test_actors_and_a_node_that_are_killed_change_nothing(
    tmp_path: Path, ray_cluster: TestCluster, same_cache: None
) -> None:
    shards = omni_shards(tmp_path, shards=4, samples=30)
    dataset = od.ShardDataset(shards, RECIPE)
    common: dict[str, Any] = {"num_threads": 1, "shuffle": True, "seed": 1}
    expected = [digest(batch) for batch in loader(dataset, **common, engine=None, num_workers=0)]
    leaving = ray_cluster.cluster.add_node(num_cpus=1, object_store_memory=100 << 20, resources={"leaving": 1})
    ray_cluster.cluster.wait_for_nodes()
    chance = random.Random(3)
    got: list[str] = []
    killed = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        batches = iter(loader(dataset, **common, engine=RayEngine(num_cpus=0.5), num_workers=4))
        for batch in batches:
            got.append(digest(batch))
            del batch
            if (running := list(batches._stream._engine._supervisor.transport.actors)) and killed < 20:
                handle = chance.choice(running).handle
                killed += 1
                if chance.random() < 0.3:
                    ray.kill(handle, no_restart=chance.random() < 0.5)
                else:
                    kill_process(handle)
            if len(got) == 15:
                ray_cluster.cluster.remove_node(leaving, allow_graceful=False)
    assert got == expected and len(got) == 30 and killed == 20


def kill_process(actor: Any) -> None:
    from ray._private.state import actors

    pid = actors(actor._actor_id.hex()).get("Pid")
    if pid:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def test_what_counts_against_a_sample() -> None:
    from ray.core.generated.common_pb2 import ActorDiedErrorContext, NodeDeathInfo

    def died(reason: str, **more: Any) -> ray.exceptions.ActorDiedError:
        context = ActorDiedErrorContext(error_message=reason, actor_id=b"0" * 16, node_ip_address="10.0.0.2", **more)
        return ray.exceptions.ActorDiedError(context)

    reason = "The actor is dead because its worker process has died."
    own = died(f"{reason} Worker exit type: SYSTEM_ERROR Worker exit detail: Gone.")
    preempted = NodeDeathInfo(reason=NodeDeathInfo.AUTOSCALER_DRAIN_PREEMPTED)
    others = [
        ray.exceptions.OutOfMemoryError("killed due to the node running low on memory"),
        ray.exceptions.NodeDiedError("gone"),
        ray.exceptions.ActorUnavailableError("restarted", b"0" * 16),
        died("The actor is dead because it was killed by `ray.kill`."),
        died("The actor died because its node has died."),
        died(reason, node_death_info=preempted),
    ]
    assert is_own_end(own) and described(own) == "Gone on node 10.0.0.2"
    assert all(map(is_loss, others)) and not any(map(is_own_end, others))
    assert not is_loss(ValueError("no loss"))


def test_trials_of_ray_tune_have_actors_outside_of_their_placement_groups(
    ray_cluster: TestCluster, tmp_path: Path
) -> None:
    """Each trial has room for its own function alone, and captures what it starts."""
    from ray import tune

    def trial(options: dict[str, int]) -> None:
        tune.report({"numbers": numbers_over_ray(**options)})

    tuner = tune.Tuner(
        tune.with_resources(trial, {"cpu": 1}),
        param_space={"batch_size": tune.grid_search([2, 4])},
        run_config=tune.RunConfig(storage_path=str(tmp_path), verbose=0),
    )
    results = tuner.fit()
    assert [result.metrics["numbers"] for result in results] == [list(range(8))] * 2, results.errors


def test_data_that_a_node_does_not_see_is_an_error_that_names_the_node(tmp_path: Path) -> None:
    for folder in ("common", "alone"):
        (tmp_path / folder).mkdir()
    shards = [omni_shards(tmp_path / folder, shards=1, samples=4)[0] for folder in ("common", "alone")]
    dataset = od.ShardDataset(shards, RECIPE)
    dataset.index()
    spec = od.DataLoader(dataset, batch_size=2)._runtime.prepared.spec
    expected = expected_by(spec)
    check_same(spec, expected, "10.0.0.2")
    Path(shards[1]).unlink()
    with pytest.raises(RuntimeError, match=r"node 10.0.0.2 cannot read the data.*alone/omni.*under the same paths"):
        check_same(spec, expected, "10.0.0.2")
    (tmp_path / "other").mkdir()
    other = omni_shards(tmp_path / "other", shards=1, samples=5)[0]
    Path(shards[1]).write_bytes(Path(other).read_bytes())
    with pytest.raises(RuntimeError, match=r"node 10.0.0.2 cannot read the data.*alone/omni"):
        check_same(spec, expected, "10.0.0.2")


def test_actors_read_shards_from_a_store(tmp_path: Path, s3_server: Any) -> None:
    bucket = s3_server.make_bucket("ray")
    for path in omni_shards(tmp_path, shards=2, samples=8):
        s3_server.put(bucket, Path(path).name, Path(path).read_bytes())
    dataset = od.ShardDataset(f"s3://{bucket}/*.tar", RECIPE, storage_options=s3_server.options)
    common: dict[str, Any] = {"num_threads": 1, "shuffle": True, "seed": 1}
    expected = [digest(batch) for batch in loader(dataset, **common, engine=None, num_workers=0)]
    running = loader(dataset, **common, num_workers=1)
    assert [digest(batch) for batch in running] == expected and len(expected) == 4
    assert running.stats()["reads"]["requests"]
