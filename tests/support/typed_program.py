"""A user's program with every public name: tests/orchdata/test_wheel.py has mypy check it, and nothing runs it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, assert_type

import torch

import orchdata as od


def record(fields: dict[str, Any]) -> str:
    picture = od.Media("jpg")
    return f"{picture} {fields['txt']}"


class Points(od.Modality):
    fields = ("points",)


table_of: Any = None


class Lines(od.Shard):
    def __init__(self, source: od.ShardSource) -> None:
        self.lines = source.read(0, source.size).splitlines()

    def facts(self) -> Any:
        return table_of(self.lines)

    def read(self, rows: Sequence[int]) -> list[bytes]:
        return [self.lines[row] for row in rows]


class LineFiles(od.Container):
    def claims(self, path: str) -> bool:
        return path.endswith(".lines")

    def open(self, source: od.ShardSource) -> Lines:
        return Lines(source)


def collate(samples: list[od.Sample], step: od.StepInfo) -> dict[str, Any]:
    return {"keys": [sample.key for sample in samples], "scale": step.loss_scale}


def collate_by_name(samples: list[od.Sample], *, step: od.StepInfo) -> Any:
    return collate(samples, step)


def collate_samples(samples: list[od.Sample]) -> list[str]:
    return [sample.key for sample in samples]


def one_item(item: torch.Tensor) -> torch.Tensor:
    return item


mesh: Any = None
config: Any = None
recipe = od.Recipe(
    image=od.ImagePreprocessor(),
    audio=od.AudioPreprocessor(),
    video=od.VideoPreprocessor(),
    text=od.TextPreprocessor(template=od.ChatTemplate()),
    limits=od.Limits(),
    record=record,
    points=Points(),
)
array, size, slot = od.ArraySpec, od.PartSize, od.Slot
dataset = od.ShardDataset("train.tar", recipe=recipe, containers=[LineFiles()], index_fields=("score",))
od.check_container(LineFiles(), "a.lines")
od.check_engine(od.RayEngine(num_cpus=1), od.ShardDataset("a.tar"), batch_size=4)
notes = od.ShardDataset("notes/*.md", containers=[od.TextFiles((".md",))])
mixture = od.Mixture({"web": od.Source(dataset, weight=0.7)})
cost = od.CostModel(
    image=od.PhaseCost(linear=1),
    llm=od.TransformerCost(hidden=64, layers=2, ffn=128, moe=od.MoE(num_experts=8, top_k=2, ffn=64)),
)
loader = od.DataLoader(
    dataset,
    8,
    shuffle=od.Shuffle(window=64),
    cost=cost,
    balance=od.Balance(teams=od.Teams(largest=4, cut="trainer")),
    dp=od.DataParallel(mesh),
    collate_fn=od.Packed(),
    on_error=od.ErrorPolicy(),
)
loaders = [
    od.DataLoader(mixture, 8, collate_fn=od.Padded()),
    od.DataLoader(dataset, 8, collate_fn=collate, cache=od.Cache("/nvme", max_bytes=2 << 40)),
    od.DataLoader(dataset, 8, collate_fn=collate_by_name),
    od.DataLoader(dataset, 8, collate_fn=partial(collate)),
    od.DataLoader(dataset, 8, collate_fn=collate_samples),
    od.DataLoader(dataset, 8, collate_fn=lambda samples: len(samples)),
    od.DataLoader(torch.zeros(4, 2), None, collate_fn=one_item),
    od.DataLoader(dataset, 8, num_workers=2, engine=od.RayEngine(num_cpus=1, resources={"loader": 1})),
]


def train(batches: od.DataLoader[od.Batch], plan: od.Plan, route: od.Route) -> Iterator[torch.Tensor]:
    for batch in batches:
        assert_type(batch, od.Batch)
        od.megatron_packed(batch)
        assert_type(batch.teams, tuple[od.Team, ...])
        yield od.exchange(torch.zeros(3, 4), batch.route("image"), requires_grad=True)
    for step in batches.steps():
        for group in od.rounds(step, lambda name, media: media.arrays[name], recompute=True):
            assert_type(group, od.Round)
            assert_type(next(iter(group)), od.Batch)
            group.backward()
        assert_type(od.clip_grad_norm_(torch.nn.Linear(2, 2).parameters(), 1.0), torch.Tensor)
    assert_type(plan.hash, str)
    print(od.profile(dataset.index(), cost=cost).to_dict())
    profile: od.Profile = dataset.profile(cost=cost, ranks=(8,), seed=1)
    profile.write_html("report.html", dataset, samples=0)
    shown: od.ShownSamples = od.show(dataset, ["key", 3])
    print(shown)
    print(od.shuffle_quality(od.Order(100, shuffle=None, seed=0), 0, 8).mean_displacement)
    made = od.make_route
    print(route.parts, made)
    for post in od.post_balance([[1], [2]], cost=len):
        assert_type(post, od.PostBatch)
    per_phase = od.Balance(assignment="per_phase")
    for post in od.post_balance(
        [[1], [2]],
        cost=lambda sample: {"image": sample, "llm": sample},
        parts=lambda sample: (None, {"image": [od.Part(b"pixels", cost=sample, rows=1)]}),
        balance=per_phase,
    ):
        yield od.exchange(torch.zeros(3, 4), post.routes["image"], requires_grad=True)
        print(post.parts["image"], post.arriving["image"][:, 2])


def failing() -> None:
    try:
        next(iter(loader))
    except (
        od.DamagedIndexError,
        od.DataError,
        od.ContainerError,
        od.FunctionError,
        od.MissingIndexError,
        od.PackageError,
        od.ShardError,
        od.StaleIndexError,
        od.StateError,
        od.StorageError,
        od.TooManyFailures,
    ) as error:
        print(error)
    except od.StepError as error:
        assert_type(error.step, int)
    except od.OrchdataError as error:
        raise SystemExit(1) from error


class Trainer(od.hf.TrainerMixin):
    """Over transformers.Trainer in a real program."""


class TitanTrainer(od.torchtitan.TrainerMixin):
    """Over torchtitan's Trainer in a real program."""


def hugging_face(processor: Any, model: Any, accelerator: Any, batch: od.Batch) -> None:
    assert_type(od.hf.recipe(processor), od.Recipe)
    assert_type(od.hf.cost(model), od.CostModel)
    od.DataLoader(dataset, 8, collate_fn=od.hf.Inputs(model.config))
    od.hf.accelerate(loader, accelerator)
    od.hf.share_attention(model, loader)
    print(
        od.TeamAttention(loader).group(2),
        od.hf.image_modality(processor),
        od.hf.encode,
        od.hf.rounds,
        od.hf.loss,
        od.torchtitan.DataLoader,
    )


def plan(index: od.planners.Workload) -> od.planners.RunPlan:
    shape = od.TransformerCost(hidden=64, layers=2, ffn=128)
    module, cluster = od.planners.Module("llm", shape), od.planners.Cluster.named("h100x8")
    workload = od.planners.Workload.of(dataset, cost=cost, global_batch_size=8)
    assert_type(workload.phases["llm"], od.planners.Columns)
    assert_type(cluster.assumed, od.planners.Assumed)
    assert_type(od.planners.cells(module, workload, cluster), list[od.planners.Cell])
    layout = od.planners.Layout(placements=(od.planners.Placement(module=module),), microbatch_tokens=4096)
    assert_type(od.planners.simulate(layout, workload, cluster), od.planners.Simulation)
    found = od.planners.plan_run([module], index, cluster)
    assert_type(found.choices, tuple[od.planners.Choice, ...])
    return found


def plan_others(file: str, table: od.planners.TogetherTable) -> None:
    cell = od.planners.JobCell(kind="a", nodes=1, gpus_a_node=2, seconds=1.0)
    jobs = [*od.planners.read_jobs(file, {"a": [cell]}), od.planners.Job(name="b", iterations=2, cells=(cell,))]
    of_jobs: od.planners.JobsPlan = od.planners.plan_jobs(jobs, [od.planners.GpuKind(name="a", nodes=1, gpus_a_node=2)])
    assert_type(of_jobs.runs, tuple[od.planners.JobRun, ...])
    waves: od.planners.WavesPlan = od.planners.plan_waves(
        [od.planners.Operators(name="a", count=2, seconds={1: 1.0})], 4
    )
    assert_type(waves.runs, tuple[od.planners.OperatorsRun, ...])
    assert_type(od.planners.plan_together(table), od.planners.TogetherPlan)
