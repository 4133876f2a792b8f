"""Named figures: a dict whose values are attributes too, in the shape of `orchdata profile --json`."""

from __future__ import annotations

from typing import Any


class Figures(dict[str, Any]):
    """Figures by name: `figures["samples"]` is `figures.samples`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"there is no figure {name!r}") from None
