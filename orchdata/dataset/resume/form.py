"""Fingerprints of states in the present form, and who wrote a state.

Below version 3, fingerprints have the rules of the library and the rows that are left out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import orchdata
from orchdata.dataset.indexed.first import content_of
from orchdata.dataset.resume.rows import SourceRows, load_rows
from orchdata.loaders.index.index import shards_fingerprint
from orchdata.loaders.versions import RULES

RULES_OF_BEFORE = range(31, 0, -1)
"""Rules that may be in the identity of states below version 3."""
OF_RULES = "rules_version"
_OF_ROWS = ("num_samples", "excluded", "num_excluded")


class Written(NamedTuple):
    """Who wrote a state.

    Attributes:
        version: of orchdata; "" if the state does not say it.
        rules: number, or numbers by topic; None if they are not known.
        recipe_rules: the number of rules in the descriptions of its recipes.
        usable: of each source, the digest of its order, if the state is of before version 3.
    """

    version: str
    rules: Any
    recipe_rules: Any
    orders: Sequence[Any] = ()

    def __str__(self) -> str:
        by = f"orchdata {self.version}" if self.version else "an earlier orchdata"
        return by if self.rules is None else f"{by} under rules {rules_text(self.rules, RULES)}"


def rules_text(rules: Any, others: Any) -> str:
    """Return rules for messages: the topics in which they differ from others, with their numbers."""
    if not isinstance(rules, Mapping):
        return str(rules)
    known = others if isinstance(others, Mapping) else {}
    return ", ".join(f"{name} {number}" for name, number in rules.items() if known.get(name) != number) or "of now"


def present_rules() -> Any:
    """Return the rules of now, JSON-safe."""
    return json.loads(json.dumps(RULES))


def written_now(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a state says of who writes it."""
    return {"orchdata": orchdata.__version__, "rules": present_rules(), "recipe_rules": recipe.get(OF_RULES)}


def bound(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """Return a fingerprint of shards without what rules decide: `dump_rows` binds a state to usable rows."""
    found = dict(fingerprint)
    if "order" in found:
        found |= {"order": _bound_order(found["order"]), "recipe": bound_recipe(found["recipe"])}
        return found
    mixture = {**found["mixture"]}
    mixture["sources"] = {name: _bound_order(order) for name, order in mixture["sources"].items()}
    sources = {name: {**each, "recipe": bound_recipe(each["recipe"])} for name, each in found["sources"].items()}
    return found | {"mixture": mixture, "sources": sources}


def present_form(
    state: Mapping[str, Any], fingerprint: Mapping[str, Any], sources: Sequence[SourceRows]
) -> tuple[dict[str, Any], Written, list[bool], list[Mapping[str, Any]] | None]:
    """Return the state with a fingerprint in the present form, who wrote it, which sources have other usable rows or
    tokens, and the rows that it stores.
    """
    ours = bound(fingerprint)
    entries = load_rows(state, len(sources)) if _is_alike(state, ours) else None
    by = state.get("written_by")
    by = by if isinstance(by, Mapping) else {}
    written = Written(str(by.get("orchdata", "")), by.get("rules"), by.get("recipe_rules"))
    if entries is not None:
        changed = [
            any(entry[name] != value for name, value in source.digests.items() if name in entry)
            for source, entry in zip(sources, entries, strict=True)
        ]
        return dict(state), written, changed, entries
    theirs = state.get("fingerprint")
    if not isinstance(theirs, Mapping) or state["version"] > 2 or not _is_alike(state, ours):
        return dict(state), written, [False] * len(sources), None
    former = _Before(theirs, fingerprint, sources)
    return {**state, "fingerprint": former.present}, former.written, former.changed, None


def _is_alike(state: Mapping[str, Any], ours: Mapping[str, Any]) -> bool:
    """Return whether a state is of as many sources, with the same names."""
    theirs = state.get("fingerprint")
    if not isinstance(theirs, Mapping) or ("mixture" in theirs) != ("mixture" in ours):
        return False
    if "mixture" not in ours:
        return isinstance(theirs.get("order"), Mapping)
    names = theirs["mixture"].get("sources") if isinstance(theirs["mixture"], Mapping) else None
    named = theirs.get("sources")
    return (
        isinstance(names, Mapping)
        and isinstance(named, Mapping)
        and names.keys() == named.keys() == ours["sources"].keys()
    )


class _Before:
    """The fingerprint of a state below version 3, which has rules and left out rows in it.

    Attributes:
        present: in the present form.
        changed: which sources have other usable rows.
    """

    def __init__(self, theirs: Mapping[str, Any], full: Mapping[str, Any], sources: Sequence[SourceRows]) -> None:
        self._rules: Any = None
        self._recipe_rules: Any = None
        self.changed: list[bool] = []
        ours = bound(full)
        if "mixture" not in ours:
            source = sources[0]
            self._recipe_rules = theirs["recipe"].get(OF_RULES) if isinstance(theirs.get("recipe"), Mapping) else None
            order = self._order(theirs["order"], full["order"], ours["order"])
            found = {**theirs, "order": order, "dataset": self._dataset(theirs.get("dataset"), source, plain=True)}
            found["shards"] = ours["shards"]  # what differs is in the digest
            self.present: dict[str, Any] = found | {"recipe": bound_recipe(theirs.get("recipe"))}
            orders = [theirs["order"]]
        else:
            is_small = theirs["mixture"].get("digests") is True
            mixture, named = {**theirs["mixture"]}, {}
            orders = [theirs["mixture"]["sources"][source.name] for source in sources]
            mixture["sources"] = {}
            for source in sources:
                name = source.name
                each, order = theirs["sources"][name], theirs["mixture"]["sources"][name]
                mixture["sources"][name] = self._order(
                    order, full["mixture"]["sources"][name], ours["mixture"]["sources"][name]
                )
                recipe = self._recipe(each.get("recipe"), full["sources"][name]["recipe"], is_small=is_small)
                dataset = self._dataset(each.get("dataset"), source, plain=not is_small)
                shards = ours["sources"][name]["shards"]
                shards = _digest(shards) if is_small else shards
                named[name] = {**each, "recipe": recipe, "dataset": dataset, "shards": shards}
            self.present = {**theirs, "mixture": mixture, "sources": named}
        self.written = Written("", self._rules, self._recipe_rules, orders)

    def _order(self, theirs: Any, full: Mapping[str, Any], ours: Mapping[str, Any]) -> Any:
        if isinstance(theirs, Mapping):
            self.changed.append(any(theirs.get(name) != full[name] for name in (*_OF_ROWS, "rows") if name in full))
            order = _bound_order(theirs)
            return order | ({"rows": ours["rows"]} if self.changed[-1] and "rows" in order and "rows" in ours else {})
        # A digest: whether only its rows differ turns out when they are known.
        self.changed.append(theirs != _digest(full))
        return _digest(ours)

    def _dataset(self, theirs: Any, source: SourceRows, *, plain: bool) -> Any:
        for rules in RULES_OF_BEFORE:
            then = shards_fingerprint(source.index.shards, rules)
            if theirs == (then if plain else _digest(then)):
                self._rules = rules
                now = content_of(source.index, source.dataset.selections)
                return now if plain else _digest(now)
        return theirs

    def _recipe(self, theirs: Any, ours: Mapping[str, Any], *, is_small: bool) -> Any:
        if not is_small:
            self._recipe_rules = theirs.get(OF_RULES) if isinstance(theirs, Mapping) else None
            return bound_recipe(theirs)
        for rules in RULES_OF_BEFORE:
            if theirs == _digest({OF_RULES: rules, **bound_recipe(ours)}):
                self._recipe_rules = rules
                return _digest(bound_recipe(ours))
        return theirs


def _bound_order(order: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in order.items() if name not in _OF_ROWS}


def bound_recipe(recipe: Any) -> Any:
    return {k: v for k, v in recipe.items() if k != OF_RULES} if isinstance(recipe, Mapping) else recipe


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=8).hexdigest()
