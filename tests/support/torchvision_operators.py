"""Import this before transformers: it lets a torchvision be imported whose compiled operators do not fit this torch."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch


def _declare_operators() -> list[torch.library.Library]:
    """Operators in name alone: only torchvision's Python is used here."""
    found = find_spec("torchvision")
    if found is None:
        return []
    compiled = next(Path(found.submodule_search_locations[0]).glob("_C*.so"))
    try:
        torch.ops.load_library(str(compiled))
    except OSError:
        operators = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            operators.define(f"{name}(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor")
        for pooled in ("roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d"):
            operators.define(f"{pooled}(Tensor input) -> Tensor")
            operators.define(f"_{pooled}_backward(Tensor grad) -> Tensor")
        return [operators]
    return []


OPERATORS = _declare_operators()
