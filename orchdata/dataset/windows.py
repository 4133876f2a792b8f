"""Windows of concatenated documents: the steps of an index, and checks of a loader's arguments and its index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from orchdata.balancers.costs.model import CostModel
from orchdata.loaders.index.index import Index
from orchdata.loaders.recipe import Recipe
from orchdata.notices import warn_once
from orchdata.order.mixture import AnyOrder
from orchdata.order.order import TokenCounts
from orchdata.order.steps import Batches, GlobalBatches
from orchdata.planning.balance import Balance
from orchdata.planning.windows import Ints, WindowBatches

_CHUNK_ROWS = 1 << 20


_WHOLE = "or keep samples whole, by od.Packed(length=...) without concatenate"


def check_windows(
    length: int | None,
    balance: Balance,
    size: Mapping[str, Any],
    cost: CostModel | None,
    recipes: Sequence[Recipe],
    index: Index,
) -> None:
    """Raise ValueError if a loader's arguments and data do not fit windows of `length` tokens; None for no windows."""
    if length is None:
        return
    budgets = size.get("global_batch_tokens")
    if budgets is not None:
        near = max(1, round(budgets[0][1] / length))
        raise ValueError(
            f"global_batch_tokens: the steps of Packed(concatenate=True) are counted in windows of {length} tokens; "
            f"pass global_batch_size={near}, which is {near * length} tokens"
        )
    for name, is_given in (
        ("Balance.assignment='per_phase' spreads media over ranks", balance.assignment == "per_phase"),
        (f"Balance.max_samples={balance.max_samples} caps samples", balance.max_samples is not None),
        (f"Balance.max_tokens caps {', '.join(balance.caps)}", any(phase != "llm" for phase in balance.caps)),
        (f"cost= names the phases {', '.join(cost.phases if cost else ())}", cost and cost.phases != ("llm",)),
    ):
        if is_given:
            raise ValueError(
                f"{name}, and a microbatch of Packed(concatenate=True) is one window of text: leave it out"
            )
    # Nothing but text, in the data and in what the recipes say.
    usual = Recipe().modalities
    out = f"leave media out, by od.Recipe({', '.join(f'{name}=None' for name in usual)}, text=...), {_WHOLE}"
    for name in index.modalities[1:]:
        if count := index.totals["modalities"][name]["parts"]:
            raise ValueError(
                f"Packed(concatenate=True): the data set has {count:,} parts of {name}, which cannot be cut: {out}"
            )
    for name, modality in (each for recipe in recipes for each in recipe.modalities.items()):
        if name not in usual or modality != usual[name]:
            raise ValueError(f"Packed(concatenate=True) cuts text, and the recipe says how {name} is prepared: {out}")


def check_accumulate(accumulate: int, windows: int, num_ranks: int) -> None:
    """Raise ValueError unless a step of so many windows has `accumulate` of them on a rank."""
    each = -(-windows // num_ranks)
    if each != accumulate:
        raise ValueError(
            f"a microbatch of Packed(concatenate=True) is one window, so a step of {windows} windows on {num_ranks} "
            f"ranks has {each} microbatches, not accumulate={accumulate}: leave accumulate out"
        )


def windows_of(batches: Batches, length: int, order: AnyOrder, counts: TokenCounts, index: Index) -> WindowBatches:
    """Return the steps of windows of an order. Raises ValueError if an epoch has not enough tokens for a step."""
    assert isinstance(batches, GlobalBatches)
    windows = WindowBatches(
        size=batches.size,
        length=length,
        drop_last=batches.drop_last,
        order=order,
        sums=order.sums(counts),
        counts=counts,
        index=index,
    )
    tokens = windows.sums.of_epoch(0)
    if not tokens:
        raise ValueError("the data set has no usable document, and Packed(concatenate=True) fills every window")
    if tokens < windows.step_tokens:
        most = tokens // length
        raise ValueError(
            f"the documents of an epoch have {tokens:,} tokens, and a step of {windows.size:,} windows of "
            f"length={length} has {windows.step_tokens:,}: use {f'at most {most:,} windows a step, ' if most else ''}"
            "a smaller length, or more data"
        )
    return windows


def warn_of_windows(batches: WindowBatches, recipes: Sequence[Recipe], num_ranks: int) -> None:
    """Warn once about microbatches that stay empty, and about texts that are split without need."""
    micro_steps = -(-batches.size // num_ranks)
    empty = micro_steps * num_ranks - batches.size
    if empty:
        warn_once(
            "windows that ranks cannot share",
            f"global_batch_size={batches.size} windows on {num_ranks} ranks: each rank has {micro_steps} microbatches "
            f"a step, and {empty} of these {micro_steps * num_ranks} have no window and are padding. "
            f"{micro_steps * num_ranks} windows would fill them",
        )
    if any(recipe.text.overflow == "split" for recipe in recipes):
        warn_once(
            "split texts are concatenated",
            "TextPreprocessor(overflow='split') makes documents of the pieces of a long text, which are shuffled one "
            "by one. Packed(concatenate=True) cuts long texts itself: leave max_tokens and overflow out",
        )


def check_labels(length: int | None, index: Index, excluded: Ints) -> None:
    """Raise ValueError if some tokens of a document have no label: a cut document's labels are then not known."""
    count, first = 0, -1
    if length is None:
        return
    for start in range(0, index.num_rows, _CHUNK_ROWS):
        row = np.arange(start, min(start + _CHUNK_ROWS, index.num_rows))
        tokens, loss = index.llm_tokens[row].astype(np.int64), index.loss_tokens[row]
        partial = row[(loss > 0) & (loss < tokens - 1)]
        partial = partial[~np.isin(partial, excluded)]
        first = int(partial[0]) if first < 0 and len(partial) else first
        count += len(partial)
    if count:
        raise ValueError(
            f"{count:,} of {index.num_rows:,} documents have tokens without a label, such as the prompts of a chat; "
            f"the first is {index.called(first)} of {index.shard_of(first).url}. Packed(concatenate=True) cuts "
            "documents, and which side of a cut has how many labels is not in the index. Give the model all of it as "
            f"plain text, by Recipe(record=...), a function of yours that returns a string, {_WHOLE}"
        )
