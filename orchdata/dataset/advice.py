"""What a loader says of its data: one warning for each kind, issued once.

Fields that the model does not get, samples without a token to learn, damaged shards, chats that never learn to stop,
steps that leave ranks empty, phases without a cost. Imports no torch: commands say some of it too.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import closing
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from orchdata.dataset.indexed import is_partial
from orchdata.loaders.errors import DataError, FieldError
from orchdata.loaders.index.index import Index
from orchdata.loaders.index.stored import StoredSample, missing_names
from orchdata.loaders.index.table import UNREAD
from orchdata.loaders.modalities.builtin import BUILTINS
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.samples.members import uses_of
from orchdata.loaders.shards.open import OpenShards, by_identity
from orchdata.loaders.text.messages import HARMLESS
from orchdata.loaders.text.preprocessor import TEXT_FIELDS
from orchdata.loaders.text.template import TextSegment, record_keys
from orchdata.loaders.unread_names import above, modality_of_name
from orchdata.notices import warn_once
from orchdata.order.steps import Batches, TokenBatches
from orchdata.planning.balance import Balance, Layout
from orchdata.planning.sharing.accumulated import better_budget
from orchdata.planning.windows import WindowBatches
from orchdata.ranks.parallel import Rank

if TYPE_CHECKING:
    from orchdata.building.pages import IndexedShards
    from orchdata.dataset.mixture import Mixture
    from orchdata.dataset.shard_dataset import ShardDataset

Ints = NDArray[np.int64]
_SHOWN: Final = 40
_MEDIA_SHOWN: Final = 3
_FEW: Final = 0.01  # share of samples without a token to learn that is no reason for a warning
_CHATS: Final = 100
_OTHERS: Final = 20  # samples that are no chats, after which no more are read: they are spread over the data


def unread_of(dataset: ShardDataset | Mixture | None, index: Index) -> dict[str, Any]:
    """Return {"names": name -> number of samples, "others": the sum of all other counts} of fields that are not read,
    the most frequent first; without those of `index_fields`.
    """
    own = {field for leaf in dataset.leaves for field in leaf.dataset.index_fields} if dataset else set()
    unread = index.totals[UNREAD]
    names = sorted(unread["names"].items(), key=lambda each: (-each[1], each[0]))
    return {"names": {name: count for name, count in names if own.isdisjoint(above(name))}, "others": unread["others"]}


def warn_of_unread(dataset: ShardDataset | Mixture, index: Index, rank: int) -> None:
    """Warn about fields that are not read, those of each source of a mixture. One rank speaks for all."""
    if not rank and (message := unread_in_words(dataset, index)):
        warn_once(f"unread fields of {index.fingerprint} {message}", message)


def unread_in_words(dataset: ShardDataset | Mixture, index: Index) -> str:
    """Return what a warning says of fields that are not read; "" if there is nothing to say.

    Named are fields that are below no other, but for harmless ones, and those that the data set ignores.
    """
    said, more, ways = list[str](), list[str](), dict[str, str]()
    for (source, one, *_), each, _ in dataset.parts(index):
        # A media_root without media: records probably name them under a key that is not read.
        totals, known = each.totals, one.recipe.modalities
        has_media = any(kind.get("parts") for kind in totals["modalities"].values()) or is_partial(each, one.urls)
        if one.media_root is not None and known and totals["samples"] != totals["bad"] and not has_media:
            keys = ", ".join(record_keys(BUILTINS))
            more.append(
                f"media_root={one.media_root!r} is given, and no sample has media: records name them under {keys}"
            )
        counts = unread_of(one, each)["names"]
        top = {
            name: count
            for name, count in counts.items()
            if name not in HARMLESS
            and counts.keys().isdisjoint(parents := above(name)[:-1])
            and {name, *parents}.isdisjoint(one.ignore)
        }
        if top:
            shown = ", ".join(f"{name!r} ({count:,})" for name, count in [*top.items()][:_SHOWN])
            rest = f" and {len(top) - _SHOWN:,} more" if len(top) > _SHOWN else ""
            said.append(f"of source {source!r} {shown}{rest}" if source else shown + rest)
        for name, kind in ((name, kind) for name in top if (kind := modality_of_name(name)) is not None):
            way = f"is of a modality that the recipe lacks: {kind}= of od.Recipe, or od.hf.recipe(processor)"
            if kind in known:
                way = f"is {kind} in a format or under a name that is not read: convert or rename it"
            ways[name] = f"{name!r} {way}"
    if not said:
        return ". ".join(more)
    way_out = (
        "Recipe(keep=...) delivers a field, Recipe(record=...) or columns= reads it, and ShardDataset(ignore=...) says "
        "no more of it: docs/layouts.md#fields-that-are-not-read"
    )
    found = f"fields that are not read, with the samples that have them: {'; '.join(said)}"
    return ". ".join([found, *more, *[*ways.values()][:_MEDIA_SHOWN], way_out])


def warn_of_no_loss(dataset: ShardDataset | Mixture, index: Index, unchosen: Ints) -> None:
    """Warn about each data set of which no chosen sample, or more than a few, have no token to learn. `unchosen` are
    rows of the index, ascending.
    """
    for (name, one, *_), each, first in dataset.parts(index):
        rows = unchosen[slice(*np.searchsorted(unchosen, (first, first + each.num_rows)))] - first
        without, usable = each.totals["without_loss"], each.totals["samples"] - each.totals["bad"]
        if rows.size:
            left_out = np.union1d(rows, each.bad_rows())
            usable = int(each.num_rows - left_out.size)
            with_loss = np.count_nonzero(each.loss_tokens) - np.count_nonzero(each.loss_tokens[left_out])
            without = int(usable - with_loss)
        if one.recipe.keep or without <= _FEW * usable:  # kept are classes, say, which are learned
            continue
        of = f" of source {name!r}" if name else ""
        chosen = " among those that its data set chooses" if rows.size else ""
        nothing = "gives no loss in any step" if name else "batch.loss_tokens is 0 in every step"
        said = f"no sample{of} has a token to learn{chosen}: {nothing}"
        if without < usable:
            said = (
                f"{without:,} of {usable:,} samples{of} have no token to learn{chosen}: they take time in steps, and "
                "dataset.filter('loss_tokens > 0') leaves them out"
            )
        warn_once(
            f"no loss tokens of {name} {one.selections} {each.fingerprint}",
            f"{said}. A text is read from {', '.join(TEXT_FIELDS)}, and of a chat the roles in ChatTemplate.loss_roles "
            "are trained. Rename a column with columns={old: 'text'}: docs/layouts.md",
        )


def warn_of_missing(dataset: ShardDataset | Mixture, index: Index) -> None:
    """Warn about names of `Recipe.keep` that no sample has; where first samples alone are indexed, others may."""
    containers, found = by_identity(dataset.containers), list[tuple[Recipe, Any]]()
    for leaf, own, _ in dataset.parts(index):
        if (recipe := leaf.dataset.recipe).keep and not is_partial(own, leaf.dataset.urls):
            found.append((recipe, missing_names(own, recipe, containers, dataset.files)))
    there = {name for recipe, each in found for name in {*recipe.keep} - {*each.names}}
    if missing := sorted({name for recipe, _ in found for name in recipe.keep} - there):
        others = ", ".join(map(repr, list(dict.fromkeys(name for _, each in found for name in each.others))[:12]))
        records = sum(each.num_records for _, each in found)
        where = f", no key of {records:,} of its records," if records else ","
        warn_once(
            f"no kept fields of {index.fingerprint}",
            f"Recipe.keep names {', '.join(map(repr, missing))}, and no sample of the data set has such a "
            f"field{where} but {others}",
        )


def warn_of_damage(index: Index, num_lost: int) -> None:
    """Warn about damaged shards: not every lost sample has a listed failure."""
    damaged = [number for number, shard in enumerate(index.shards) if shard.lost_bytes]
    if not damaged:
        return
    url = index.shards[damaged[0]].url
    bad = np.intersect1d(index.bad_rows(), index.rows_of(damaged[0]))
    if not bad.size:
        raise index.damaged(f"{url} is marked as damaged, and none of its samples is bad")
    warnings.warn(
        f"{len(damaged)} of {len(index.shards)} shards are damaged, and about {num_lost} of their samples "
        f"lost besides those listed; the first is {url}: {index.failure(int(bad[-1])).reason}",
        stacklevel=2,
    )


def warn_of_costs(phases: Sequence[str], rank: Rank, balance: Balance) -> None:
    """Say, where no costs are given, that phases are balanced by their positions, if what they cost may differ."""
    if len(phases) > 1 and rank.size > 1 and balance.scope != "none":
        warn_once(
            "positions as costs",
            f"no cost= is given, so positions cost the same in the phases {', '.join(phases)}: a patch as much as an "
            "LLM token. Plans are better with what your model costs: cost=od.hf.cost(model) for a Hugging Face model, "
            "else an od.CostModel with an od.TransformerCost(hidden=..., layers=..., ffn=...) for each phase",
        )


def warn_of_steps(batches: Batches, layout: Layout, num_ranks: int, *, has_media: bool) -> None:
    """Warn about microbatches of a fixed length, or of windows, that stay empty."""
    length = layout.length
    if isinstance(batches, TokenBatches) and length is not None:
        budget = batches.budgets[-1][1]
        if (better := better_budget(budget, length, num_ranks)) is not None:
            windows = f", and Packed(length={length}, concatenate=True) fills all windows of plain text"
            warn_once(
                "a budget that fills no microbatches",
                f"steps of global_batch_tokens={budget} fill microbatches of length={length} on {num_ranks} ranks "
                f"badly: global_batch_tokens={better} would fill them{'' if has_media else windows}",
            )
    if isinstance(batches, WindowBatches) and (empty := -batches.size % num_ranks):
        warn_once(
            "windows that ranks cannot share",
            f"global_batch_size={batches.size} windows on {num_ranks} ranks: in a step {empty} of these "
            f"{batches.size + empty} have no window and are padding. {batches.size + empty} windows would fill them",
        )


def warn_of_unended(shards: IndexedShards, rank: int = 0) -> None:
    """Render the first chats, of each source of a mixture, and warn if none of them learns an end token or end mark:
    nothing after their last answer carries loss. On the first rank.
    """
    if rank:
        return
    with closing(shards.open()) as opened:
        for start, stop in pairwise(shards.index.first_rows.tolist()):
            if chats := _unended(shards, opened, start, stop):
                warn_once(
                    f"unended chats of {shards.index.fingerprint} from {start}",
                    f"chats never learn to stop: of the first {chats} none has an end token or a text of its template "
                    "with loss after its last answer. TextPreprocessor(eos_token_id=...), or append_eos=True of "
                    "od.hf.recipe, appends the end token; or take a template that writes one, inside of its "
                    "{% generation %} where it has that: docs/text.md",
                )


def _unended(shards: IndexedShards, opened: OpenShards, start: int, stop: int) -> int:
    """Return the number of chats that were rendered; 0 if one of them learns to stop."""
    chats = others = 0
    row, stride = start, max(1, 2 * (stop - start) // _OTHERS)
    while row < stop and chats < _CHATS and others < _OTHERS:
        recipe = shards.recipe_of(row)
        if recipe.text.learns_end:
            break
        trained = _last_trained(StoredSample(shards.index, opened, row), recipe)
        if trained is None:
            others += 1
            row += 1 if others % 2 else stride
            continue
        answer, is_last = trained
        if recipe.text.is_ended(answer) or (is_last and recipe.text.eos_token_id is not None):
            return 0
        chats += 1
        row += 1
    return chats


def _last_trained(sample: StoredSample, recipe: Recipe) -> tuple[str, bool] | None:
    """Return the last text of a chat with loss, and whether the chat ends there; None for samples without."""
    uses = uses_of(sample.members, recipe)
    if not (uses.json or uses.other_text or recipe.record is not None):
        return None
    try:
        composition = sample.composition(recipe)
    except (DataError, FieldError):
        return None  # it is reported when it is loaded
    runs = groupby(composition.segments, lambda each: isinstance(each, TextSegment) and each.loss)
    texts = ["".join(each.text for each in run if isinstance(each, TextSegment)) if loss else "" for loss, run in runs]
    answer = next(filter(None, reversed(texts)), None)
    return (answer, answer == texts[-1]) if composition.is_chat and answer is not None else None
