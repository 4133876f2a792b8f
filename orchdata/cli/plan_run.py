"""`orchdata plan-run`: seconds, memory and GPUs of a run, before anything is rented."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from orchdata.cli.data import indexed, recipe_named
from orchdata.cli.options import (
    AllowRecipesOption,
    ColumnsOption,
    ContainersOption,
    DataOptions,
    FilterOption,
    IndexFileOption,
    JsonOption,
    KeyOption,
    MediaRootOption,
    Paths,
    RecipeOption,
    StorageOptionsOption,
)
from orchdata.cli.output import one_line_errors, plain_table, print_json, print_table

if TYPE_CHECKING:
    from orchdata.balancers.costs.model import CostModel
    from orchdata.planners.cluster import Cluster
    from orchdata.planners.layout import Module
    from orchdata.planners.run import RunPlan
    from orchdata.planners.workload import Workload


@one_line_errors
def plan_run(
    paths: Paths,
    cluster: Annotated[str, typer.Option(metavar="KINDxGPUS", help="GPUs, such as h100x64.")],
    global_batch_tokens: Annotated[str, typer.Option(metavar="NUMBER", help="LLM tokens of a step, such as 2M.")],
    model: Annotated[str | None, typer.Option(metavar="FOLDER|NAME", help="A Hugging Face model's config.")] = None,
    frozen: Annotated[
        list[str] | None, typer.Option(metavar="PHASE", help="With --model: what is not trained; repeatable.")
    ] = None,
    modules: Annotated[
        str | None, typer.Option(metavar="FILE", help="A YAML file: phase -> fields of od.TransformerCost and Module.")
    ] = None,
    max_tokens: Annotated[str | None, typer.Option(metavar="NUMBER", help="LLM tokens of a microbatch.")] = None,
    keep: Annotated[
        list[str] | None, typer.Option(metavar="PHASE=tpN,ppN,dpN", help="A setting to keep: llm=tp4; repeatable.")
    ] = None,
    recipe: RecipeOption = None,
    media_root: MediaRootOption = None,
    column: ColumnsOption = None,
    key: KeyOption = None,
    container: ContainersOption = None,
    storage_options: StorageOptionsOption = None,
    index_file: IndexFileOption = None,
    expression: FilterOption = None,
    allow_recipes: AllowRecipesOption = False,
    seed: Annotated[int, typer.Option(help="Seed of the order.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Plan a run: which layout of the model's modules on how many GPUs, how long a step is, and the loader's call.

    Nothing is started. Seconds are by formulas, from declared or fitted speeds, over real steps of the data.
    """
    from orchdata.planners.cluster import Cluster
    from orchdata.planners.run import plan_run as make_plan
    from orchdata.planners.workload import Workload

    gpus, budget = Cluster.named(cluster), _amount(global_batch_tokens, "--global-batch-tokens")
    cap, kept = max_tokens and _amount(max_tokens, "--max-tokens"), _kept(keep or [])
    found, cost = _modules(model, modules, frozen or [])
    given = DataOptions.parsed(media_root, column, container, None, storage_options, index_file, key)
    dataset, index = indexed(paths, recipe_named(recipe), given, expression, allow_recipes=allow_recipes)
    workload = Workload.of(index, cost=cost, global_batch_tokens=budget, seed=seed, dataset=dataset)
    plan = make_plan(found, workload, gpus, max_tokens=cap or None, keep=kept)
    if as_json:
        print_json(plan.to_dict())
    else:
        _print(plan, found, workload, gpus)


def _modules(model: str | None, modules: str | None, frozen: list[str]) -> tuple[list[Module], CostModel]:
    """Return the modules, and the cost model that a loader of theirs plans by."""
    from orchdata.balancers.costs.model import CostModel
    from orchdata.planners.layout import LLM, Module
    from orchdata.yaml_file import read_yaml

    if (model is None) == (modules is None):
        raise ValueError("give one of --model and --modules")
    if modules is not None:
        if frozen:
            raise ValueError("--frozen goes with --model: in --modules give a module `trained: false`")
        given = read_yaml(modules)
        if not isinstance(given, dict) or not given:
            raise ValueError(f"{modules}: must map phases to their fields, got {given!r:.80}")
        try:
            found = [Module.from_plain(str(name), fields) for name, fields in given.items()]
        except ValueError as error:
            raise ValueError(f"{modules}: {error}") from error
        return found, CostModel(**{module.name: module.cost for module in found})
    from transformers import AutoConfig

    from orchdata.hf.model_cost import cost as cost_of

    config = AutoConfig.from_pretrained(str(model))
    cost = cost_of(config, frozen=frozen)
    trains = {name: name not in frozen for name in (*cost.phases, "connector")}
    found = []
    for name in cost.phases:
        before = name == LLM and len(cost.phases) > 1 and any(trains[other] for other in trains if other != LLM)
        how = {"input_gradients": before} if name == LLM else {"connector_trainable": trains["connector"]}
        found.append(Module.from_config(config, name, trainable=trains[name], **how))
    return found, cost


def _amount(text: str, option: str) -> int:
    """`2M` -> 2000000."""
    found = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,6})?)([kKM]?)", text)
    number = float(found[1]) * {"": 1, "k": 1e3, "K": 1e3, "M": 1e6}[found[2]] if found else 0
    if number < 1 or number != int(number):
        raise ValueError(f"{option} must be a number of at least 1, such as 16384 or 2M, got {text!r:.80}")
    return int(number)


def _kept(given: list[str]) -> dict[str, dict[str, int]]:
    """`llm=tp4,pp2` -> {"llm": {"tp": 4, "pp": 2}}."""
    kept: dict[str, dict[str, int]] = {}
    for text in given:
        name, _, sizes = text.partition("=")
        pairs = [re.fullmatch(r"(tp|pp|dp)([0-9]{1,7})", each) for each in sizes.split(",")]
        if not name or name in kept or not all(pairs):
            raise ValueError(f"--keep must be PHASE=tpN,ppN,dpN, such as llm=tp4, each phase once; got {text!r:.80}")
        kept[name] = {pair[1]: int(pair[2]) for pair in pairs if pair}
    return kept


def _print(plan: RunPlan, modules: list[Module], workload: Workload, cluster: Cluster) -> None:
    from orchdata.planners.formulas import Means

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
