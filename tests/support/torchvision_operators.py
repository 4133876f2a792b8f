"""Import this before transformers: it lets a torchvision be imported whose compiled operators do not fit this torch."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from torch import library, ops


def _declare_operators() -> None:
    """Operators in name alone: only torchvision's Python is used here."""
    found = find_spec("torchvision")
    if found is None:
        return
    try:
        ops.load_library(str(next(Path(found.submodule_search_locations[0]).glob("_C*.so"))))
    except OSError:
        for name in ("nms", "qnms"):
            library.define(f"torchvision::{name}", "(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor")
        for pooled in ("roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d"):
            library.define(f"torchvision::{pooled}", "(Tensor input) -> Tensor")
            library.define(f"torchvision::_{pooled}_backward", "(Tensor grad) -> Tensor")


_declare_operators()
