"""Fingerprints without what rules decide, who wrote a state, and whether it is of other rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import orchdata
from orchdata.dataset.resume.rows import SourceRows, load_rows
from orchdata.loaders.versions import RULES

OF_RULES = "rules_version"
_OF_ROWS = ("num_samples", "excluded", "num_excluded")


class Written(NamedTuple):
    """Who wrote a state.

    Attributes:
        version: of orchdata; "" if the state does not say it.
        rules: number, or numbers by topic; None if they are not known.
        recipe_rules: the number of rules in the descriptions of its recipes.
    """

    version: str
    rules: Any
    recipe_rules: Any

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


def written_rows(
    state: Mapping[str, Any], fingerprint: Mapping[str, Any], sources: Sequence[SourceRows]
) -> tuple[Written, list[bool], list[Mapping[str, Any]]]:
    """Return who wrote a state, which sources have other usable rows or tokens, and the rows that it stores: none if it
    is of other sources.
    """
    by = state.get("written_by")
    by = by if isinstance(by, Mapping) else {}
    written = Written(str(by.get("orchdata", "")), by.get("rules"), by.get("recipe_rules"))
    if not _is_alike(state, bound(fingerprint)):
        return written, [False] * len(sources), []
    entries = load_rows(state, len(sources))
    changed = [
        any(entry[name] != value for name, value in source.digests.items() if name in entry)
        for source, entry in zip(sources, entries, strict=True)
    ]
    return written, changed, entries


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


def _bound_order(order: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in order.items() if name not in _OF_ROWS}


def bound_recipe(recipe: Any) -> Any:
    return {k: v for k, v in recipe.items() if k != OF_RULES} if isinstance(recipe, Mapping) else recipe
