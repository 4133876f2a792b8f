"""`orchdata plan-run`: seconds, memory and GPUs of a run, before anything is rented."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated

import typer

from orchdata.cli.command import Data, JsonOption, plain_table, print_json, print_table, takes
from orchdata.loaders.amounts import count_of

if TYPE_CHECKING:
    from orchdata.balancers.costs.model import CostModel
    from orchdata.planners.cluster import Cluster
    from orchdata.planners.layout import Module
    from orchdata.planners.run import RunPlan
    from orchdata.planners.workload import Workload


@takes(Data, *(field.name for field in fields(Data) if field.name not in ("index_field", "ignore")))
def plan_run(
    data: Data,
    cluster: Annotated[str, typer.Option(metavar="KINDxGPUS", help="GPUs, such as h100x64.")],
    global_batch_tokens: Annotated[str, typer.Option(metavar="NUMBER", help="LLM tokens of a step, such as 2M.")],
    model: Annotated[str | None, typer.Option(metavar="FOLDER|NAME", help="A Hugging Face model's config.")] = None,
    modules: Annotated[
        str | None, typer.Option(metavar="FILE", help="A YAML file: a list of modules, as od.planners.Module.")
    ] = None,
    max_tokens: Annotated[str | None, typer.Option(metavar="NUMBER", help="LLM tokens of a microbatch.")] = None,
    keep: Annotated[
        list[str] | None, typer.Option(metavar="PHASE=tpN,ppN,dpN", help="A setting to keep: llm=tp4; repeatable.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the order.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Plan a run: which layout of the model's modules on how many GPUs, how long a step is, and the loader's call.

    Nothing is started. Seconds are by formulas, from declared or fitted speeds, over real steps of the data.
    """
    from orchdata.cli.dataset import indexed
    from orchdata.planners.cluster import Cluster
    from orchdata.planners.run import plan_run as make_plan
    from orchdata.planners.workload import Workload

    gpus, budget = Cluster.named(cluster), count_of(global_batch_tokens, "--global-batch-tokens")
    cap = None if max_tokens is None else count_of(max_tokens, "--max-tokens")
    found, cost = _modules(model, modules)
    dataset, index = indexed(data)
    workload = Workload.of(index, cost=cost, global_batch_tokens=budget, seed=seed, dataset=dataset)
    plan = make_plan(found, workload, gpus, max_tokens=cap, keep=_kept(keep or []))
    if as_json:
        print_json(plan.to_dict())
    else:
        _print(plan, found, workload, gpus)


def _modules(model: str | None, modules: str | None) -> tuple[list[Module], CostModel]:
    """Return the modules, and the cost model that a loader of theirs plans by."""
    from orchdata.balancers.costs.model import CostModel
    from orchdata.balancers.costs.phase import TransformerCost
    from orchdata.planners.layout import Module
    from orchdata.yaml_file import read_yaml

    if (model is None) == (modules is None):
        raise ValueError("give one of --model and --modules")
    if modules is None:
        from transformers import AutoConfig

        from orchdata.hf.model_cost import cost as cost_of

        config = AutoConfig.from_pretrained(str(model))
        cost = cost_of(config)
        return [Module(name, TransformerCost.from_config(config, name)) for name in cost.phases], cost
    given = read_yaml(modules)
    if not isinstance(given, list):
        raise ValueError(f"{modules} must list modules, got {given!r:.80}")
    found = [Module.from_dict(each) for each in given]
    return found, CostModel(**{module.name: module.cost for module in found})


def _kept(given: list[str]) -> dict[str, dict[str, int]]:
    """`llm=tp4,pp2` -> {"llm": {"tp": 4, "pp": 2}}."""
    kept: dict[str, dict[str, int]] = {}
    for text in given:
        if not re.fullmatch(r"\w+=(tp|pp|dp)\d+(,(tp|pp|dp)\d+)*", text):
            raise ValueError(f"--keep must be PHASE=tpN,ppN,dpN, such as llm=tp4, got {text!r:.80}")
        name, sizes = text.split("=")
        kept.setdefault(name, {}).update((size, int(number)) for size, number in re.findall(r"(\w\w)(\d+)", sizes))
    return kept


def _print(plan: RunPlan, modules: list[Module], workload: Workload, cluster: Cluster) -> None:
    from orchdata.planners.cluster import Means

    means = Means(workload, cluster)
    work = means.operations(modules)
    whole, samples = sum(work.values()), workload.num_samples / workload.num_steps
    shares = ", ".join(f"{of.name} {of.parameters / 1e9:.1f}B {work[of.name] / whole:.0%}" for of in modules)
    typer.echo(
        f"{cluster.gpus:,} {cluster.name or 'GPUs'}, {means.tokens:,.0f} tokens a step ({samples:,.0f} samples): "
        f"{shares} of the work; bound of all work {plan.bound:.3g} s\n"
    )
    table = plain_table(
        "", "layout", "step s", "80 % of steps", "of bound", "MFU", "GB/GPU", "GPU-h a billion tokens", ""
    )
    for at, each in enumerate(plan.choices):
        mark = each.runs or "runs" + (" <- fastest that runs" if at == plan.recommended else "")
        if each.layout.kind == "own":
            mark += f" ({each.closed:.3g} if every microbatch were the mean one)"
        table.add_row(
            f"{each.words}, microbatches of {each.layout.microbatch_tokens:,}",
            f"{each.seconds:.3g}",
            f"{each.interval[0]:.3g}-{each.interval[1]:.3g}",
            f"{each.seconds / plan.bound:.2f}",
            f"{each.mfu:.0%}",
            " | ".join(f"{used / 1e9:.0f}" for used in each.memory.values()),
            f"{each.gpu_hours:,.3g}",
            mark,
        )
    print_table(table)
    for line in plan.rejected:
        typer.echo(f"not possible: {line}")
    typer.echo("\n" + (plan.call or "none of these runs with this library's loader") + "\n")
    typer.echo("assumed: " + "; ".join(plan.assumptions))
