"""`python -m orchdata.cli`: the console script, where it is not on the path."""

from __future__ import annotations

from orchdata.cli import main

main()
