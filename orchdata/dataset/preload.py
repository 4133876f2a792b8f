"""Imports of shards' readers for the process that workers are forked from."""

from __future__ import annotations

import orchdata.building.pages  # noqa: F401
from orchdata.loaders.recipe import load_built_in

load_built_in()
