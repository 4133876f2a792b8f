"""A state to where a run continues: at its position, or, if other samples are usable now, at the next epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from orchdata.dataset.mixed import restore_mixture
from orchdata.dataset.options import PreparedDataset
from orchdata.dataset.resume.rows import changes_since
from orchdata.loaders.errors import StateError
from orchdata.loop.position import Position
from orchdata.loop.state import SAMPLES, check_form, check_loader, is_alike, load_state, place_of
from orchdata.notices import warn_user
from orchdata.order.mixture import MixtureOrder


def restore(
    prepared: PreparedDataset, state: Mapping[str, Any], allow: Sequence[str], num_workers: int
) -> tuple[PreparedDataset, Position]:
    """Return the data set that continues from a state, and the position.

    Raises:
        StateError: as `load_state`; with what changed, if other rows are usable and `allow` does not name the samples.
    """
    check_form(state)
    if not prepared.rows:
        return prepared, load_state(state, prepared.fingerprint, prepared.steps, allow, num_workers)
    # The state of another data set raises an error that names the difference.
    fingerprint = prepared.bound_fingerprint
    changes = changes_since(state, prepared.rows) if is_alike(state, fingerprint) else []
    if not changes:
        return restore_mixture(prepared, state, allow, num_workers)

    # Everything else must be equal. An epoch of which nothing was delivered is not left out.
    check_loader(state, fingerprint, allow)
    epoch, step = place_of(state)
    begins = f"epoch {epoch + 1}" if step else f"epoch {epoch}, of which nothing was delivered,"
    words = "; ".join(changes)
    if SAMPLES not in allow:
        raise StateError(
            f"{words}. The rest of epoch {epoch} would be another one. load_state_dict(state, allow=({SAMPLES!r},)) "
            f"begins {begins} with the samples that are usable now"
        )
    warn_user(f"{words}: {begins} begins with the samples that are usable now")
    order = prepared.spec.plan.order
    if isinstance(order, MixtureOrder):
        prepared = prepared.with_order(order.restaged(order.stages))
    return prepared, Position(epoch + 1 if step else epoch)
