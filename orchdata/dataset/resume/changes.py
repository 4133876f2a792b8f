"""What has changed in the usable rows of a source since a state was written, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchdata.dataset.resume.former import Former
from orchdata.dataset.resume.rows import SourceRows
from orchdata.loaders.index.index import Index, basename

Ints = NDArray[np.int64]
_NAMED = 3


def changes_of(source: SourceRows, former: Former | None, entry: Mapping[str, Any]) -> str:
    """Return how the usable rows of now differ from those of then."""
    num_now = len(source) - len(source.excluded)
    if former is None:
        if entry["usable"] != source.usable:
            return f"usable samples were {entry['num_usable']:,} in the state and are {num_now:,} here"
        return "samples have other numbers of tokens"
    then = former.usable
    now = former.now(then)
    mask = np.zeros(len(source), bool)
    mask[now[now >= 0]] = True
    is_usable = source.is_usable(0, len(source))
    gone, lost, new = then[now < 0], now[now >= 0], np.flatnonzero(is_usable & ~mask)
    lost = np.sort(lost[~is_usable[lost]])
    parts = []
    if count := len(lost) + len(gone):
        names = [*_names(source, lost[:_NAMED]), *_gone_names(former, gone[: max(0, _NAMED - len(lost))])]
        parts.append(
            f"{count:,} {_samples(count)} usable when the state was written cannot be used now: "
            f"{'; '.join(names)}{'; ...' if count > len(names) else ''}"
        )
    if count := len(new):
        names = [_name(source.index, row) for row in new[:_NAMED].tolist()]
        parts.append(
            f"{count:,} {_samples(count)} not usable then can be used now: "
            f"{'; '.join(names)}{'; ...' if count > len(names) else ''}"
        )
    if former.made_by is not None:
        both = (now >= 0) & is_usable[np.maximum(now, 0)]
        other = former.made_by.llm_tokens[then[both]] != source.index.llm_tokens[now[both]]
        if count := int(np.count_nonzero(other)):
            row_then, row_now = int(then[both][other][0]), int(now[both][other][0])
            parts.append(
                f"{count:,} {'samples have' if count > 1 else 'sample has'} another number of tokens: "
                f"{_name(source.index, row_now)}: {former.made_by.llm_tokens[row_then]} then and "
                f"{source.index.llm_tokens[row_now]} now{'; ...' if count > 1 else ''}"
            )
    elif entry is not None and entry.get("tokens", source.tokens) != source.tokens and not parts:
        parts.append("samples have other numbers of tokens")
    return "; ".join(parts) or "samples have other numbers of tokens"


def lists_of(epoch: int, *, has_begun: bool) -> str:
    """Return what follows from the changes."""
    if not has_begun:
        return f"nothing of epoch {epoch} was delivered, so it begins with the samples that are usable now"
    return (
        f"epoch {epoch} ends in its old order without what cannot be used, new samples come from epoch {epoch + 1} on, "
        "and later steps are cut by the tokens of now"
    )


def _samples(count: int) -> str:
    return "samples that were" if count > 1 else "sample that was"


def _name(index: Index, row: int) -> str:
    return f"{basename(index.shard_of(row).url)}: {index.called(row)}"


def _names(source: SourceRows, rows: Ints) -> list[str]:
    """Return names of rows that cannot be used, with the reason."""
    bad = set(np.intersect1d(rows, source.index.bad_rows()).tolist())
    names = []
    for row in rows.tolist():
        reason = "a quarantine, filter or cap leaves it out"
        if row in bad:
            failure = source.index.failure(row)
            reason = f"{failure.field}: {failure.reason}" if failure.field else failure.reason
        names.append(f"{_name(source.index, row)}: {reason}")
    return names


def _gone_names(former: Former, rows: Ints) -> list[str]:
    if former.made_by is None:
        return ["pieces of texts that have fewer pieces now"] if len(rows) else []
    return [f"{_name(former.made_by, row)}: it is no longer there" for row in rows.tolist()]
