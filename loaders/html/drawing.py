"""Drawings by matplotlib, which the extra `plots` installs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchdata.loaders.errors import package_error

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def check_plots() -> None:
    """Raise PackageError if matplotlib is missing or cannot be imported."""
    try:
        import matplotlib.figure  # noqa: F401
    except Exception as error:  # a broken package may raise anything
        raise package_error(error, "a drawing", "matplotlib") from error


def axes_of(axes: Axes | None) -> Axes:
    """Return the axes, or those of a new figure for None. Raises as `check_plots`."""
    check_plots()
    if axes is not None:
        return axes
    from matplotlib.figure import Figure

    return Figure(layout="constrained").add_subplot()
