"""Which tables there are, and what each takes from stored reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.report.results import ResultsError, column, figure, ran_on, read_report
from orchdata.bench import Report, WideTable, digits

Cell = str | float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A row of the table of claims.

    Attributes:
        report: name of the stored report.
        what: was measured.
        measured: the sentence, with places for figures.
        figures: place -> name of the result.
    """

    report: str
    what: str
    measured: str
    figures: Mapping[str, str]

    def cells(self) -> tuple[str, str, str, str]:
        """Return what, measured, machine and command."""
        report = read_report(self.report)
        values = {place: figure(report, name) for place, name in self.figures.items()}
        return self.what, self.measured.format(**values), ran_on(report), f"`{report.command}`"


def claims_table() -> str:
    """The main table of benchmarks/README.md: one line a benchmark."""
    return markdown(("what", "measured", "machine", "command"), [claim.cells() for claim in CLAIMS])


def wide_table(name: str, columns: Sequence[str] = ()) -> str:
    """The first table of a stored report, below its command and machine; all columns, or those named."""
    report = read_report(name)
    if not report.tables:
        raise ResultsError(f"{name}.json has no table")
    table = report.tables[0]
    return f"{_origin(report)}\n\n{_shown_table(table, columns or table.columns)}"


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown. A bar in a cell would end it, so it is escaped."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _shown_table(table: WideTable, headings: Sequence[str]) -> str:
    shown = [[_shown(cell, table.unit) for cell in column(table, heading)] for heading in headings]
    return markdown(headings, list(zip(*shown, strict=True)))


def _origin(report: Report) -> str:
    load = report.machine.get("load")
    busy = f", load {digits(load)}" if load is not None else ""
    return f"`{report.command}` on {ran_on(report)}{busy}:"


def _shown(cell: Cell, unit: str) -> str:
    if cell is None:
        return ""
    return cell if isinstance(cell, str) else digits(cell, unit)


CLAIMS: Final = (
    Claim(
        report="demo",
        what="two CPU ranks training on the demo's data",
        measured="largest over mean of the ranks: CPU time {cpu_before:.2f} to {cpu_after:.2f}; by the cost model, "
        "image encoder {image_before:.2f} to {image_after:.2f}, audio encoder {audio_before:.2f} to "
        "{audio_after:.2f}, LLM {llm_before:.2f} to {llm_after:.2f}; same loss curve",
        figures={
            "cpu_before": "cpu_imbalance, unbalanced",
            "cpu_after": "cpu_imbalance, balanced",
            "image_before": "planned imbalance, image, unbalanced",
            "image_after": "planned imbalance, image, balanced",
            "audio_before": "planned imbalance, audio, unbalanced",
            "audio_after": "planned imbalance, audio, balanced",
            "llm_before": "planned imbalance, llm, unbalanced",
            "llm_after": "planned imbalance, llm, balanced",
        },
    ),
    Claim(
        report="train",
        what="a model with fitted costs on a skewed mix, against unbalanced",
        measured="{joint:.2f} times as fast joint, {apart:.2f} with encoders balanced apart: {joint_share:.0%} and "
        "{apart_share:.0%} of the gain that the plans predict; exchange {exchange:.1%} of the step",
        figures={
            "joint": "joint over unbalanced",
            "apart": "per phase over unbalanced",
            "joint_share": "joint: share of the predicted gain",
            "apart_share": "per phase: share of the predicted gain",
            "exchange": "exchange: share of the step",
        },
    ),
    Claim(
        report="exchange",
        what="carrying features between 4 gloo ranks",
        measured="{times:.0f} times as fast as gathering all and dropping",
        figures={"times": "gathering and dropping over the exchange"},
    ),
    Claim(
        report="post_balance",
        what="`od.post_balance` around another loader, with a step of 50 ms",
        measured="adds {two:.1f}, {four:.1f} and {eight:.1f} ms at 2, 4 and 8 ranks",
        figures={
            "two": "added to a step of 50 ms, 2 ranks",
            "four": "added to a step of 50 ms, 4 ranks",
            "eight": "added to a step of 50 ms, 8 ranks",
        },
    ),
    Claim(
        report="balance",
        what="balancing 40,960 samples over 2,560 ranks, worst of 12 distributions",
        measured="{ratio:.3f} times the lower bound in {ms:.1f} ms; Karmarkar-Karp on 512 ranks is {least:.1f} to "
        "{most:.1f} % above it and {fast:.0f} to {slow:.0f} times slower",
        figures={
            "ratio": "2,560 ranks x 16: makespan over lower bound, worst distribution",
            "ms": "2,560 ranks x 16: slowest distribution",
            "least": "Karmarkar-Karp, 512 ranks: above the bound, least",
            "most": "Karmarkar-Karp, 512 ranks: above the bound, most",
            "fast": "Karmarkar-Karp, 512 ranks: times as slow, least",
            "slow": "Karmarkar-Karp, 512 ranks: times as slow, most",
        },
    ),
    Claim(
        report="plan",
        what="planning a step, 2,560 ranks x 16 samples, three phases",
        measured="{one:.0f} ms, {three:.0f} in three micro-steps; {apart:.0f} and {apart_three:.0f} with encoders "
        "balanced apart",
        figures={
            "one": "2,560 ranks x 16",
            "three": "2,560 ranks x 16, three micro-steps",
            "apart": "2,560 ranks x 16, per phase",
            "apart_three": "2,560 ranks x 16, per phase, three micro-steps",
        },
    ),
    Claim(
        report="plans",
        what="largest load over the mean, 512 ranks x 32 samples, 6B vision and a 7B LLM",
        measured="{joint:.2f}; {llm:.2f} with the LLM alone balanced, {none:.2f} unbalanced",
        figures={
            "joint": "512 ranks x 32, instructions, 6B vision: joint",
            "llm": "512 ranks x 32, instructions, 6B vision: LLM only",
            "none": "512 ranks x 32, instructions, 6B vision: none",
        },
    ),
    Claim(
        report="bins",
        what="microbatches of one length: tokens over room, 4,096 samples, bins of 16,384",
        measured="{least:.3f} in the worst of 12 lists of lengths",
        figures={"least": "tokens over room, least of 12 lists"},
    ),
    Claim(
        report="start",
        what="starting a loader over an index of 10 and of 100 million samples",
        measured="{ten:.2g} and {hundred:.2g} s, {ten_mib:.0f} and {hundred_mib:.0f} MiB of anonymous memory",
        figures={
            "ten": "10 million samples",
            "ten_mib": "10 million samples: anonymous memory",
            "hundred": "100 million samples",
            "hundred_mib": "100 million samples: anonymous memory",
        },
    ),
    Claim(
        report="index",
        what="indexing: shards and headers on one core; tars of one sample on two, and if nothing changed",
        measured="{samples:,.0f} samples/s; {tars:,.0f} and {unchanged:,.0f} shards/s; counting tokens takes "
        "{tokens:.2f} times the tokenizer's own time",
        figures={
            "samples": "shards and media headers, one core",
            "tars": "tars of one sample, two cores",
            "unchanged": "tars of one sample, nothing changed",
            "tokens": "token counts over the tokenizer alone",
        },
    ),
    Claim(
        report="decode",
        what="decoding a JPEG, a clip and text in one thread, against Pillow, soundfile and torch",
        measured="{native:.1f} times as fast at native resolution, {small:.1f} times at 256 tokens an image",
        figures={
            "native": "over Pillow, soundfile and torch: native resolution",
            "small": "over Pillow, soundfile and torch: 256 tokens an image",
        },
    ),
)

_LOADERS: Final = ("loader", "samples/s", "of bare", "first batch s", "CPU ms/sample", "without files MiB")

# Name in a marker -> what is written below it.
TABLES: Final[Mapping[str, Callable[[], str]]] = {
    "claims": claims_table,
    "loaders": lambda: wide_table("loaders", _LOADERS),
    "loaders, Xeon": lambda: wide_table("loaders_xeon", _LOADERS),
    "loaders, memory": lambda: wide_table("loaders_memory"),
    "loaders, Energon": lambda: wide_table("loaders_energon", _LOADERS),
    "reports": lambda: wide_table("profile_report"),
    "steps, H200": lambda: wide_table("steps_h200"),
    "resume": lambda: wide_table("resume", ("loader", "ranks", "text", "images")),
    "memory": lambda: wide_table("memory", ("loader", "sources", "anonymous", "its anonymous", "all processes")),
    "teams": lambda: wide_table("teams"),
}
