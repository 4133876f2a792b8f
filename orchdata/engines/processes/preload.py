"""What the process imports that workers are forked off: a worker then starts in milliseconds."""

from __future__ import annotations

import orchdata.building.spec
import orchdata.engines.processes.worker  # noqa: F401
from orchdata.loaders.modalities.builtin import load_decoders

load_decoders()
