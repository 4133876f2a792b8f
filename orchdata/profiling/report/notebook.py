"""What a notebook shows of a profile: its sentences, what samples are made of, and what ranks wait for."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from orchdata.loaders.amounts import counted
from orchdata.loaders.html.elements import bar, paragraph, table
from orchdata.loaders.html.notebook import view
from orchdata.loaders.html.words import percent
from orchdata.profiling.report.plots import LABELS
from orchdata.profiling.report.summary import step_words

if TYPE_CHECKING:
    from orchdata.profiling.profile import Profile


def profile_view(profile: Profile) -> str:
    """Return the view of a profile. It names no sample: `Profile.write_html` writes a page of all figures."""
    title = f"Profile of {counted(profile.samples, 'sample')} in {counted(profile.shards, 'shard')}"
    sentences = "".join(f"<li>{escape(sentence)}</li>" for sentence in profile.summary)
    return view(title, f"<ul>{sentences}</ul>", _modalities(profile), _settings(profile))


def _modalities(profile: Profile) -> str:
    total = sum(modality.tokens for modality in profile.modalities.values()) or 1
    rows = [
        (
            escape(name),
            bar(modality.share, percent(modality.share)),
            bar(modality.tokens / total, percent(modality.tokens / total)),
            f"{modality.tokens:,}",
        )
        for name, modality in profile.modalities.items()
    ]
    return table(("modality", "share of samples", "share of LLM tokens", "LLM tokens"), rows, numbers_from=3)


def _settings(profile: Profile) -> str:
    scale = profile.main_scale
    unit, waits = "in positions, not time", "less positions than the fullest rank"
    if profile.has_cost_model:
        unit, waits = "by your cost model", "ranks wait"
    rows = [
        (LABELS[name], bar(setting.waiting, percent(setting.waiting)), f"{setting.costliest:.2f}")
        for name, setting in scale.settings.items()
    ]
    columns = ("balanced", waits, "costliest step over an even one")
    return paragraph(f"At {step_words(scale)}, {unit}:") + table(columns, rows, numbers_from=2)
