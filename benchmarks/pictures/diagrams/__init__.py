"""The pictures of docs: what a step is, and plans of real lengths, drawn as SVG without matplotlib.

results/drawn_plans.json --one function a picture--> Canvas --> docs/pictures/NAME.svg
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from benchmarks.pictures.diagrams.canvas import Canvas
from benchmarks.pictures.diagrams.exchange import draw_exchange
from benchmarks.pictures.diagrams.layouts import draw_layouts
from benchmarks.pictures.diagrams.mixture import draw_mixture
from benchmarks.pictures.diagrams.pure_function import draw_pure_function
from benchmarks.pictures.diagrams.resume import draw_resume
from benchmarks.pictures.diagrams.steps import draw_micro_steps, draw_step
from benchmarks.report.results import read_report
from orchdata.bench import Report

_FROM_PLANS: Mapping[str, Callable[[Report], Canvas]] = {
    "step_before_after.svg": draw_step,
    "micro_steps.svg": draw_micro_steps,
    "packed_and_padded.svg": draw_layouts,
    "per_phase_exchange.svg": draw_exchange,
    "mixture.svg": draw_mixture,
    "resume.svg": draw_resume,
}


def diagrams() -> Mapping[str, Callable[[], bytes]]:
    """File name -> what makes its bytes."""

    def from_plans(draw: Callable[[Report], Canvas]) -> Callable[[], bytes]:
        return lambda: draw(read_report("drawn_plans")).to_svg()

    made = {name: from_plans(draw) for name, draw in _FROM_PLANS.items()}
    return {"pure_function.svg": lambda: draw_pure_function().to_svg(), **made}
