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
    load_object,
)
from orchdata.cli.output import ignored_words, one_line_errors, print_json

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from orchdata.dataloader import DataLoader
    from orchdata.loaders.index.index import Index

FIRST_SAMPLES = 3
_MOST_STATE_BYTES: Final = 1 << 30


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
            help="In place of PATHS and options of the data: a function that makes the run's DataLoader, called with "
            "dp=(rank, ranks).",
        ),
    ] = None,
    key: Annotated[
        list[str] | None, typer.Option(help="The sample of this key; last_dot: where keys end, ShardDataset(key=).")
    ] = None,
    shard: Annotated[str | None, typer.Option(help="With --key: in the shard of this url, or name.")] = None,
    step: Annotated[int | None, typer.Option(help="With --loader: what a rank gets in this step of the run.")] = None,
    epoch: Annotated[int, typer.Option(help="With --step: of this epoch.")] = 0,
    rank: Annotated[int, typer.Option(help="With --step: this data-parallel rank.")] = 0,
    ranks: Annotated[int, typer.Option(help="With --step: of so many.")] = 1,
    state: Annotated[
        Path | None, typer.Option(help="With --step: a state of the run as JSON, which the loader is given.")
    ] = None,
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

    Shows the first samples; with --key one sample; with --loader and --step what a rank gets in a step, planned again.
    Samples are decoded as a loader does; for one that cannot be loaded it says why.
    """
    # What means nothing together.
    sample_key = next((each for each in key or () if each != "last_dot"), None)
    given = {
        name for name in context.params if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
    }
    if sample_key is not None and step is not None:
        raise ValueError("give --key, or --step, not both")
    if shard is not None and sample_key is None:
        raise ValueError("--shard goes with --key: it says which shard's sample of that key is meant")
    if loader is None and step is not None:
        raise ValueError("--step goes with --loader MODULE:NAME, a function that makes the DataLoader of the run")
    if step is None and (of_a_step := sorted(given & {"epoch", "rank", "ranks", "state"})):
        raise ValueError(f"--{of_a_step[0]} goes with --step: it says what run the step is of")
    of_the_run = {"loader", "key", "shard", "step", "epoch", "rank", "ranks", "state", "save", "full", "as_json"}
    if loader is not None and (surplus := sorted(given - of_the_run)):
        flag = {"expression": "--filter", "paths": "PATHS"}.get(surplus[0], f"--{surplus[0].replace('_', '-')}")
        raise ValueError(f"leave out {flag}: the DataLoader of --loader says it")
    if loader is None and not paths:
        raise ValueError("give PATHS, or --loader MODULE:NAME, which makes the run's DataLoader")

    from orchdata.balancers import CostModel
    from orchdata.dataset.shards import unchosen_rows
    from orchdata.showing.samples import save_in, shards_and_model, shards_of, shown_rows, shown_step, source_names

    use_file = None if save is None else save_in(save)
    with redirect_stdout(sys.stderr):  # what a tokenizer prints
        run = None if loader is None else _made(loader, rank, ranks)
        if run is None:
            rule = "last_dot" if "last_dot" in (key or ()) else ""
            options = DataOptions.parsed(media_root, column, container, index_field, storage_options, index_store, rule)
            named = recipe_named(recipe)
            dataset, index = indexed(paths or [], named, options, expression, allow_recipes=allow_recipes)
            model = load_object(cost, CostModel, "--cost") if cost is not None else None
            shards = shards_of(dataset, index)
        else:
            if state is not None:
                run.load_state_dict(_read_state(state))
            shards, model = shards_and_model(run._runtime.prepared.spec)
            dataset, index = run.dataset, shards.index
        if run is None or step is None:
            rows = _rows(index, unchosen_rows(dataset, index), sample_key, shard)
            sources = source_names(dataset, index, rows)
            groups = [{"samples": shown_rows(shards, rows, model, sources, use_file=use_file)}]
        else:
            try:
                plan = run.plan_at(epoch, step)
            except IndexError as error:
                raise ValueError(str(error)) from None
            groups = shown_step(shards, plan, rank, model, use_file)
    spans = [span for group in groups for sample in group["samples"] for span in sample["spans"]]
    files = [span["file"] for span in spans if span.get("file")]
    if as_json:
        print_json({"groups": groups, "ignored_fields": dict(index.totals["ignored_fields"]), "files": files})
        return
    from orchdata.dataset.indexed.unread import unread_of
    from orchdata.showing.text import print_groups

    print_groups(groups, ignored_words(unread_of(dataset, index)["names"]), files, full=full)


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


def _rows(index: Index, unchosen: NDArray[Any], key: str | None, shard: str | None) -> list[int]:
    import numpy as np

    from orchdata.showing.samples import rows_of_key

    if key is None:
        chosen: list[int] = np.setdiff1d(np.arange(index.num_rows), unchosen)[:FIRST_SAMPLES].tolist()
        return chosen
    try:
        return rows_of_key(index, unchosen, key, shard)
    except KeyError as error:
        raise ValueError(error.args[0]) from None


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
