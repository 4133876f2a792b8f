"""A state to where a run continues: also where rules have changed since, and other samples are usable.

state --same content?--yes--> the position
             |--no, allow=("rules",)--> the begun epoch ends in its old order
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orchdata
from orchdata.dataset.mixed import restore_mixture
from orchdata.dataset.options import PreparedDataset
from orchdata.dataset.resume.begun import Begun, begun_in, former_order, load_begun, rest_of
from orchdata.dataset.resume.changes import changes_of, lists_of
from orchdata.dataset.resume.form import OF_RULES, Written, bound_recipe, present_rules, rules_text, written_rows
from orchdata.dataset.resume.former import Former, former_of_index, former_of_state
from orchdata.dataset.resume.mixture import mixture_of
from orchdata.dataset.resume.rows import MOST_TEXT, SourceRows
from orchdata.dataset.selection import Taken
from orchdata.loaders.errors import StateError
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loop.position import Position
from orchdata.loop.state import RULES, check_form, load_state
from orchdata.notices import warn_user
from orchdata.order.begun import BegunEpoch
from orchdata.order.mixture import MixtureOrder
from orchdata.order.order import Order
from orchdata.order.sources import PassStart


def restore(
    prepared: PreparedDataset, state: Mapping[str, Any], allow: Sequence[str], num_workers: int
) -> tuple[PreparedDataset, Position]:
    """Return the data set that continues from a state, and the position.

    Raises:
        StateError: as `load_state`; with what changed, if other rows are usable and `allow` does not name the rules, or
            if the rows of then are not known any more.
    """
    check_form(state)
    if not prepared.rows:
        return prepared, load_state(state, prepared.fingerprint, prepared.steps, allow, num_workers)
    written, changed, entries = written_rows(state, prepared.fingerprint, prepared.rows)
    try:
        if not any(changed):
            return restore_mixture(_continuing(prepared, load_begun(state, prepared.rows)), state, allow, num_workers)
        return _restored(prepared, dict(state), allow, num_workers, written, changed, entries)
    except StateError as error:
        if words := _of_numbers(prepared, state, written):
            raise StateError(f"{error}. {words}") from error
        raise


def _restored(
    prepared: PreparedDataset,
    state: dict[str, Any],
    allow: Sequence[str],
    num_workers: int,
    written: Written,
    changed: list[bool],
    entries: Sequence[Mapping[str, Any]],
) -> tuple[PreparedDataset, Position]:
    # Everything else must be equal: this raises if it is not.
    load_state(
        _with_order(state, prepared), prepared.bound_fingerprint, prepared.steps, allow, num_workers, check=False
    )
    if prepared.has_windows:
        _refuse_windows(prepared, state, written, changed)
    known = [
        _former(source, state, written, entry) if is_changed else None
        for source, is_changed, entry in zip(prepared.rows, changed, entries, strict=True)
    ]
    _check_listed(prepared.rows[0], known[0], state)
    state = _with_order(state, prepared)
    words = _words(prepared, written, changed, known, entries)
    if RULES not in allow:
        raise StateError(f"{words}. {_way_out(prepared, state)}")
    return _after_change(prepared, state, allow, num_workers, written, changed, known, entries, words)


# The rows of then, and words about them


def _former(source: SourceRows, state: Mapping[str, Any], written: Written, entry: Mapping[str, Any]) -> Former | None:
    """Return the rows of a source when the state was written; None if they are not known."""
    former = former_of_state(entry, source)
    if former is not None or not isinstance(written.rules, Mapping):
        return former
    named = state["fingerprint"].get("sources", {}).get(source.name) if source.name else state["fingerprint"]
    recipe = named.get("recipe")
    if not isinstance(recipe, Mapping):
        recipe = bound_recipe(source.dataset.recipe.describe())
    return former_of_index(source, written.rules, {OF_RULES: written.recipe_rules, **recipe}, entry.get("usable"))


def _words(
    prepared: PreparedDataset,
    written: Written,
    changed: Sequence[bool],
    formers: Sequence[Former | None],
    entries: Sequence[Mapping[str, Any]],
) -> str:
    """Return who wrote the state, and what has changed since."""
    parts = []
    for number, source in enumerate(prepared.rows):
        if changed[number]:
            of = f"of {source.called}: " if source.name else ""
            parts.append(of + changes_of(source, formers[number], entries[number]))
    if written.rules == present_rules():
        why = "usable samples are others than in the state, because shards have changed, or quarantine= is another"
        return f"{why}: {'; '.join(parts)}"
    return f"{_versions(written)}: {'; '.join(parts)}"


def _versions(written: Written) -> str:
    now = f"orchdata {orchdata.__version__} under rules {rules_text(present_rules(), written.rules)}"
    return f"the state was written by {written}, and this is {now}"


def _way_out(prepared: PreparedDataset, state: Mapping[str, Any]) -> str:
    epoch = state["epoch"]
    if not _has_begun(prepared, state):
        return (
            f"Nothing of epoch {epoch} was delivered: load_state_dict(state, allow=({RULES!r},)) begins it with the "
            f"samples that are usable now. So does loader.set_epoch({epoch}) in place of load_state_dict"
        )
    return (
        f"load_state_dict(state, allow=({RULES!r},)) ends epoch {epoch} in its old order and goes on with the samples "
        f"that are usable now. Or begin the next epoch: loader.set_epoch({epoch + 1}) in place of load_state_dict"
    )


def _of_numbers(prepared: PreparedDataset, state: Mapping[str, Any], written: Written) -> str:
    """Return the way out of a state under other rules, if samples were chosen by number; else nothing."""
    chosen = [each.called for each in prepared.rows if any(isinstance(one, Taken) for one in each.dataset.selections)]
    if not chosen or written.rules == present_rules():
        return ""
    return (
        f"{_versions(written)}. take(), slices and select() of {', '.join(chosen)} count usable samples: if rules made "
        "other samples usable, the same numbers choose other samples, and allow= cannot change that. Begin "
        f"{_fresh_epoch(prepared, state)} in place of load_state_dict"
    )


def _fresh_epoch(prepared: PreparedDataset, state: Mapping[str, Any]) -> str:
    """Return which epoch begins without a state, and how: one of which nothing was delivered is not left out."""
    epoch = state["epoch"]
    if _has_begun(prepared, state):
        return f"the next epoch by loader.set_epoch({epoch + 1})"
    return f"epoch {epoch}, of which nothing was delivered, by loader.set_epoch({epoch})"


def _has_begun(prepared: PreparedDataset, state: Mapping[str, Any]) -> bool:
    """Return whether samples of then may still come in the epoch: passes of "repeat" go on over its start."""
    order = prepared.spec.plan.order
    is_endless = isinstance(order, MixtureOrder) and order.stop == "repeat"
    return state.get("position") != 0 or (is_endless and state["epoch"] > 0)


def _refuse_windows(
    prepared: PreparedDataset, state: Mapping[str, Any], written: Written, changed: Sequence[bool]
) -> None:
    names = ", ".join(source.called for source, each in zip(prepared.rows, changed, strict=True) if each)
    raise StateError(
        f"{_versions(written)}: usable documents of {names}, or their tokens, have changed. Where a step of "
        "Packed(concatenate=True) begins depends on all documents before it, so allow= cannot change that: begin "
        f"{_fresh_epoch(prepared, state)} in place of load_state_dict"
    )


# A run that continues


def _continuing(prepared: PreparedDataset, begun: Sequence[Begun]) -> PreparedDataset:
    """Return the data set with epochs that go on in the order that they began with."""
    if not any(epoch is not None or anchor is not None for epoch, anchor in begun):
        return prepared
    order = prepared.spec.plan.order
    if isinstance(order, MixtureOrder):
        sources = [source.continuing(*each) for source, each in zip(order.sources, begun, strict=True)]
        return prepared.with_order(order.continuing(sources))
    assert isinstance(order, Order)
    return prepared.with_order(order.continuing(begun[0].epoch))


def _after_change(
    prepared: PreparedDataset,
    state: dict[str, Any],
    allow: Sequence[str],
    num_workers: int,
    written: Written,
    changed: Sequence[bool],
    formers: Sequence[Former | None],
    entries: Sequence[Mapping[str, Any]],
    words: str,
) -> tuple[PreparedDataset, Position]:
    """Continue a state of other usable rows: its epoch goes on in its old order, with the samples of now."""
    order, sources = prepared.spec.plan.order, prepared.rows
    for source, former, is_changed, each in zip(sources, formers, changed, begun_in(state, len(sources)), strict=True):
        if is_changed and isinstance(each, Mapping):
            _known(former, state, written, source)
    stored = load_begun(state, sources, formers)
    if not isinstance(order, MixtureOrder):
        position = state.get("position")
        if type(position) is int and position > 0:
            former = _known(formers[0], state, written, sources[0])
            tokens = state.get("tokens", 0)
            epoch = rest_of(
                sources[0], former, number=state["epoch"], position=position, tokens=tokens, begun=stored[0].epoch
            )
            prepared = _continuing(prepared, [Begun(epoch)])
        place = load_state(state, prepared.bound_fingerprint, prepared.steps, allow, num_workers, cut=True, check=False)
        warn_user(f"{words}; {lists_of(place.epoch, has_begun=_has_begun(prepared, state))}")
        return prepared, place
    # A mixture: what each source has given says where its pass goes on.
    mixture = mixture_of(state, order, state["epoch"])
    begun = []
    for number, source in enumerate(sources):
        if not changed[number]:
            begun.append(stored[number])
            continue
        count, given = mixture.now.progress.counts[number], mixture.now.progress.given[number]
        if order.stop == "repeat":
            passed, at = _pass_of(stored[number], count, entries[number]["num_usable"])
        else:
            passed, at = state["epoch"], count
        anchor = PassStart(passed, count - at, given) if order.stop == "repeat" else None
        rest: BegunEpoch | None = None
        if at:
            former = _known(formers[number], state, written, source)
            before = stored[number].epoch
            rest = rest_of(
                source,
                former,
                number=passed,
                position=at,
                tokens=0 if anchor is not None else given,
                begun=before if before is not None and before.number == passed else None,
            )
        begun.append(Begun(rest, anchor))
    start = mixture.now if any(mixture.now.progress.counts) else None
    resumed = mixture.resumed._replace(stretch_start=start, is_changed=True)
    continued = _continuing(prepared, begun)
    now = continued.spec.plan.order
    assert isinstance(now, MixtureOrder)
    continued = continued.with_order(now.restaged(now.stages, resumed))
    place = load_state(state, prepared.bound_fingerprint, continued.steps, allow, num_workers, cut=True, check=False)
    warn_user(f"{words}; {lists_of(place.epoch, has_begun=_has_begun(prepared, state))}")
    return continued, place


def _pass_of(begun: Begun, count: int, size: int) -> tuple[int, int]:
    """Return the pass of a source in a run that repeats it, and its position there, after so many samples."""
    epoch, anchor = begun
    if anchor is None:
        return divmod(count, size)
    length = size if epoch is None else epoch.length
    if count < anchor.samples + length:
        return anchor.number, count - anchor.samples
    number, at = divmod(count - anchor.samples - length, size)
    return anchor.number + 1 + number, at


def _with_order(state: dict[str, Any], prepared: PreparedDataset) -> dict[str, Any]:
    """Return the state with the rows of now in the user's own order, which `_check_listed` compares."""
    if prepared.rows[0].listed is None:
        return state
    fingerprint = state["fingerprint"]
    return {**state, "fingerprint": {**fingerprint, "order": prepared.bound_fingerprint["order"]}}


def _check_listed(source: SourceRows, former: Former | None, state: dict[str, Any]) -> None:
    """Raise StateError if the user's own order was another one."""
    if source.listed is None or former is None:
        return
    theirs = state["fingerprint"]["order"]
    then = former_order(source, former.num_rows, former.excluded).describe()
    if former.rows.size or then["rows"] != theirs.get("rows"):
        raise StateError(
            "the order of your own, shuffle=array, is another one than in the state, or its rows have other numbers now"
        )


def _known(
    former: Former | None,
    state: Mapping[str, Any],
    written: Written,
    source: SourceRows,
) -> Former:
    if former is None:
        raise StateError(
            f"the rows of {source.called} that the epoch began with are not known: {_gone(state, written)}"
        )
    return former


def _gone(state: Mapping[str, Any], written: Written) -> str:
    large = any(isinstance(each, Mapping) and "too_large" in each for each in state["rows"])
    others = "are of other samples than those that the shards have now, usable or not"
    why = f"need more than {MOST_TEXT >> 10} KiB, or {others}" if large else others
    return (
        f"they {why}, and the index that {written} made of them is no longer in the cache folder "
        f"{CacheFolder().root}. Begin the next epoch by loader.set_epoch({state['epoch'] + 1}) in place of "
        "load_state_dict, or make that index again: `orchdata index` of that release with the same cache folder"
    )
