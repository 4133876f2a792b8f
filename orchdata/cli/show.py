"""`orchdata show`: samples as the model sees them, by key or as a rank has them in a step."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from orchdata.cli.data import indexed, recipe_named
from orchdata.cli.options import (
    AllowRecipesOption,
    ColumnsOption,
    ContainersOption,
    CostOption,
    DataOptions,
    FilterOption,
    IndexFieldsOption,
    IndexStoreOption,
    JsonOption,
    MediaRootOption,
    RecipeOption,
    StorageOptionsOption,
    caps_of,
    load_object,
)
from orchdata.cli.output import ignored_words, one_line_errors, print_json

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from orchdata.balancers import CostModel
    from orchdata.building.spec import IndexedShards
    from orchdata.dataloader import DataLoader
    from orchdata.dataset.mixture import Mixture
    from orchdata.dataset.shard_dataset import ShardDataset
    from orchdata.loaders.generators import Pass
    from orchdata.loaders.index.index import Index

FIRST_SAMPLES = 3
_MOST_STATE_BYTES: Final = 1 << 30
_OF_A_RUN: Final = (
    "epoch rank ranks state batch_size batch_tokens shuffle seed balance group_size objective max_tokens oversize "
    "assignment padded multiple_of length quarantine"
).split()
"""Options that mean nothing without a step."""
_SAID_BY_A_STATE: Final = ("batch_size", "batch_tokens", "shuffle")
_WITH_A_LOADER: Final = ("epoch", "rank", "ranks", "state")
_OF_THE_DATA: Final = (
    "recipe",
    "allow_recipes",
    "media_root",
    "column",
    "container",
    "index_field",
    "storage_options",
    "index_store",
    "expression",
    "cost",
)


@one_line_errors
def show(
    context: typer.Context,
    paths: Annotated[
        list[str] | None,
        typer.Argument(metavar="PATHS", help="Shards: files, globs or braces; left out with --loader."),
    ] = None,
    loader: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:NAME",
            help="In place of PATHS and of all that says the run: a function that makes its DataLoader, called with "
            "dp=(rank, ranks).",
        ),
    ] = None,
    key: Annotated[
        list[str] | None, typer.Option(help="The sample of this key; last_dot: where keys end, ShardDataset(key=).")
    ] = None,
    shard: Annotated[str | None, typer.Option(help="With --key: in the shard of this url, or name.")] = None,
    step: Annotated[int | None, typer.Option(help="What a rank gets in this step of a run.")] = None,
    epoch: Annotated[int, typer.Option(help="With --step: of this epoch.")] = 0,
    rank: Annotated[int, typer.Option(help="With --step: this data-parallel rank.")] = 0,
    ranks: Annotated[int, typer.Option(help="With --step: of so many.")] = 1,
    state: Annotated[
        Path | None,
        typer.Option(
            help="With --step: a state of the run as JSON, which says its order (a mixture's but for --seed) and steps."
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Samples per rank and step.")] = 8,
    batch_tokens: Annotated[int | None, typer.Option(help="LLM tokens per rank and step, in place of samples.")] = None,
    shuffle: Annotated[bool, typer.Option("--shuffle/--no-shuffle", help="Whether the run shuffles.")] = True,
    seed: Annotated[int, typer.Option(help="Seed of its order.")] = 0,
    balance: Annotated[str, typer.Option(help="none, grouped, grid or global.")] = "global",
    max_tokens: Annotated[
        list[str] | None,
        typer.Option(metavar="[PHASE=]NUMBER", help="Positions per microbatch and rank; of llm, or PHASE. Repeatable."),
    ] = None,
    oversize: Annotated[str, typer.Option(help="Samples above --max-tokens: error, own or drop.")] = "error",
    assignment: Annotated[str, typer.Option(help="joint, or per_phase.")] = "joint",
    group_size: Annotated[
        int | None, typer.Option(help="Ranks of a group, as those of a node, for --balance grouped or grid.")
    ] = None,
    objective: Annotated[str, typer.Option(help="barrier, or sum.")] = "barrier",
    padded: Annotated[bool, typer.Option("--padded", help="LLM rows padded to the longest: od.Padded().")] = False,
    multiple_of: Annotated[
        int | None, typer.Option(help="LLM sequences are padded to a multiple of this; default: the state's, or 1.")
    ] = None,
    length: Annotated[int | None, typer.Option(help="Tokens of every microbatch: od.Packed(length=...).")] = None,
    quarantine: Annotated[Path | None, typer.Option(help="The list of what the run leaves out.")] = None,
    recipe: RecipeOption = None,
    allow_recipes: AllowRecipesOption = False,
    media_root: MediaRootOption = None,
    column: ColumnsOption = None,
    container: ContainersOption = None,
    index_field: IndexFieldsOption = None,
    storage_options: StorageOptionsOption = None,
    index_store: IndexStoreOption = None,
    expression: FilterOption = None,
    cost: CostOption = None,
    save: Annotated[Path | None, typer.Option(metavar="DIR", help="Write media as the model gets them here.")] = None,
    full: Annotated[bool, typer.Option("--full", help="All of long texts.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what the model sees: text from the token ids, what of it is trained, media with their sizes, costs.

    Shows the first samples; with --key one sample; with --step what a rank gets in a step, planned again. Samples are
    decoded as a loader does; for one that cannot be loaded it says why. Options describe the run, or --loader does:
    the function of its program that makes the DataLoader.
    """
    _check_together(context)
    from orchdata.balancers import CostModel
    from orchdata.dataset.shards import unchosen_rows
    from orchdata.showing.runs import passes_of_rank, shards_and_model, shards_of, shown_step, source_names
    from orchdata.showing.shown import ShownGroup, shown_rows

    with redirect_stdout(sys.stderr):  # what a tokenizer prints
        rule = "last_dot" if "last_dot" in (key or ()) else ""
        made = None if loader is None else _made(loader, rank, ranks)
        if made is None:
            named = recipe_named(recipe)
            given = DataOptions.parsed(media_root, column, container, index_field, storage_options, index_store, rule)
            dataset, index = indexed(paths or [], named, given, expression, allow_recipes=allow_recipes)
            model = load_object(cost, CostModel, "--cost") if cost is not None else None
            shards = shards_of(dataset, index)
        else:
            shards, model = shards_and_model(made._runtime.prepared.spec)
            dataset, index = made.dataset, shards.index
        passes: list[Pass] = []
        if step is None:
            rows = _rows(index, unchosen_rows(dataset, index), _sample_key(key), shard)
            sources = source_names(dataset, index, rows)
            groups = [ShownGroup(about={}, samples=shown_rows(shards, rows, model, sources))]
        else:
            loaded = None if state is None else _read_state(state)
            run = _made_of_options(context, dataset, model, loaded) if made is None else made
            if loaded is not None:
                run.load_state_dict(loaded)
            try:
                plan = run.plan_at(epoch, step)
            except IndexError as error:
                raise ValueError(str(error)) from None
            shards, _ = shards_and_model(run._runtime.prepared.spec)  # with the seed of the run
            groups = shown_step(shards, plan, rank, model)
            passes = passes_of_rank(shards, plan, rank)
        rows = [sample.row for group in groups for sample in group.samples]
        files = [] if save is None else _saved(shards, rows, save, passes)
    if as_json:
        ignored = dict(index.totals["ignored_fields"])
        print_json({"groups": [group.as_dict() for group in groups], "ignored_fields": ignored, "files": files})
        return
    from orchdata.dataset.indexed.unread import unread_of
    from orchdata.showing.text import print_groups

    unread = unread_of(dataset, index)["names"]
    print_groups(groups, ignored_words(unread), files, full=full)


def _check_together(context: typer.Context) -> None:
    """Raises ValueError for options that mean nothing together."""
    options = context.params
    given = [name for name in _OF_A_RUN if _is_given(context, name)]
    key = _sample_key(options["key"])
    if key is not None and options["step"] is not None:
        raise ValueError("give --key, or --step, not both")
    if options["shard"] is not None and key is None:
        raise ValueError("--shard goes with --key: it says which shard's sample of that key is meant")
    if options["loader"] is not None:
        surplus = [_flag(name) for name in given if name not in _WITH_A_LOADER]
        surplus += [_flag(name) for name in _OF_THE_DATA if _is_given(context, name)]
        if options["paths"] or surplus:
            raise ValueError(f"leave out {surplus[0] if surplus else 'PATHS'}: the DataLoader of --loader says it")
    elif not options["paths"]:
        raise ValueError("give PATHS, or --loader MODULE:NAME, which makes the run's DataLoader")
    if options["step"] is None and given:
        raise ValueError(f"{_flag(given[0])} goes with --step: it says what run the step is of")
    if options["state"] is not None and (known := [name for name in given if name in _SAID_BY_A_STATE]):
        raise ValueError(f"leave out {_flag(known[0])}: the state says the run's order and size of steps")
    if options["padded"] and options["length"] is not None:
        raise ValueError("--length is of packed microbatches: leave out --padded, or the length")


def _made_of_options(
    context: typer.Context, dataset: ShardDataset | Mixture, model: CostModel | None, state: dict[str, Any] | None
) -> DataLoader:
    """The DataLoader that the command line describes, with what a state says of it."""
    from orchdata.dataloader import DataLoader
    from orchdata.delivery.policy import ErrorPolicy
    from orchdata.planning.balance import Balance
    from orchdata.planning.layout import Packed, Padded
    from orchdata.showing.runs import arguments_of, multiple_of_state

    given = context.params
    order = {name: given[name] for name in ("seed", "shuffle", "batch_size")}
    if given["batch_tokens"] is not None:
        del order["batch_size"]
        order["global_batch_tokens"] = given["batch_tokens"] * given["ranks"]
    multiple_of = given["multiple_of"]
    if state is not None:
        known = {"seed": given["seed"]} | arguments_of(state)
        if _is_given(context, "seed") and known["seed"] != given["seed"]:
            raise ValueError(f"leave out --seed {given['seed']}: the state says {known['seed']}")
        order = known
    if multiple_of is None:
        multiple_of = 1 if state is None else multiple_of_state(state)
    balance = {name: given[name] for name in ("group_size", "oversize", "assignment", "objective")}
    return DataLoader(
        dataset,
        **order,
        collate_fn=Padded(multiple_of=multiple_of)
        if given["padded"]
        else Packed(multiple_of=multiple_of, length=given["length"]),
        balance=Balance(scope=given["balance"], max_tokens=caps_of(given["max_tokens"] or ()), **balance),
        cost=model,
        quarantine=given["quarantine"],
        on_error=ErrorPolicy("skip", max_failures=None),
        dp=(given["rank"], given["ranks"]),
    )


def _made(name: str, rank: int, ranks: int) -> DataLoader:
    """Return the DataLoader that the user's function makes for rank `rank` of `ranks`."""
    from orchdata.dataloader import DataLoader

    make: Any = load_object(name, object, "--loader")
    if not callable(make):
        raise ValueError(f"--loader {name} must be a function that makes the DataLoader, got {type(make).__name__}")
    called = f"--loader {name}, called with dp=({rank}, {ranks})"
    try:
        loader = make(dp=(rank, ranks))
    except Exception as error:  # a user's function may raise anything
        raise ValueError(f"{called}: {type(error).__name__}: {error}") from error
    if not isinstance(loader, DataLoader):
        raise ValueError(f"{called}, must give an od.DataLoader, got {type(loader).__name__}")
    if loader.steps().num_ranks != ranks:
        raise ValueError(f"{called}, gave a DataLoader of {loader.steps().num_ranks} ranks: hand it what it is given")
    return loader


def _sample_key(given: list[str] | None) -> str | None:
    return next((key for key in given or () if key != "last_dot"), None)


def _rows(index: Index, unchosen: NDArray[Any], key: str | None, shard: str | None) -> list[int]:
    import numpy as np

    from orchdata.showing.rows import rows_of_key

    if key is None:
        chosen: list[int] = np.setdiff1d(np.arange(index.num_rows), unchosen)[:FIRST_SAMPLES].tolist()
        return chosen
    try:
        return rows_of_key(index, unchosen, key, shard)
    except KeyError as error:
        raise ValueError(error.args[0]) from None


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _flag(name: str) -> str:
    return "--filter" if name == "expression" else f"--{name.replace('_', '-')}"


def _read_state(path: Path) -> dict[str, Any]:
    """Read the state of a loader from a JSON file."""
    from orchdata.loaders.storage.shared.files import read_given

    content = read_given(path, _MOST_STATE_BYTES)
    try:
        state = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is not readable as JSON ({error}): write json.dumps(loader.state_dict()) there, or of a torch "
            "checkpoint torch.load(...)[...] of the loader's entry"
        ) from error
    if not isinstance(state, dict):
        raise ValueError(f"{path} holds no state of a loader, but {type(state).__name__}")
    return state


def _saved(shards: IndexedShards, rows: list[int], folder: Path, passes: list[Pass]) -> list[str]:
    from orchdata.loaders.errors import DataError
    from orchdata.showing.saving import save_media

    files = []
    for saved in save_media(shards, rows, folder, passes):
        if isinstance(saved, DataError):
            typer.echo(f"not saved: {saved}", err=True)
        else:
            files.append(str(saved))
    return files
