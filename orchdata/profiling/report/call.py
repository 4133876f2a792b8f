"""The DataLoader(...) call that follows from a profile, with the reason for each setting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchdata.delivery.policy import DEFAULT_SHARE
from orchdata.profiling.ranks.settings import SettingName
from orchdata.profiling.report.summary import helps, recommended

if TYPE_CHECKING:
    from orchdata.profiling.profile import Profile


@dataclass(frozen=True, kw_only=True, slots=True)
class Argument:
    """One argument of the call: Python source, and why it is so."""

    source: str
    reason: str


def arguments_of_call(profile: Profile) -> list[Argument]:
    """Return the arguments of the call for the ranks that the summary speaks of."""
    scale = profile.main_scale
    arguments = [Argument(source="dataset", reason="the data set of this profile")]
    if scale.batch_size is not None:
        step = f"{scale.global_batch_size:,} samples a step on {scale.ranks:,} ranks"
        arguments.append(Argument(source=f"batch_size={scale.batch_size}", reason=step))
    else:
        step = f"{scale.batch_tokens:,} LLM tokens for each of {scale.ranks:,} ranks"
        arguments.append(Argument(source=f"global_batch_tokens={scale.global_batch_tokens}", reason=step))
    arguments.append(_shuffle(profile))
    if scale.global_batch_size is not None and scale.global_batch_size > profile.samples:
        few = f"{profile.samples:,} samples are fewer than a step: take a smaller batch, or fewer ranks"
        arguments.append(Argument(source="drop_last=False", reason=few))
    else:
        arguments.append(Argument(source="drop_last=True", reason="steps of one size, as planned"))
    arguments.append(Argument(source=f"collate_fn={_layout(profile)}", reason=_reason_of_layout(profile)))
    arguments.append(_balance(profile))
    if profile.has_cost_model:
        arguments.append(Argument(source="cost=cost", reason="the cost model of this profile"))
    if profile.bad > DEFAULT_SHARE * profile.samples:
        listed = f"{profile.bad:,} samples cannot be used: `orchdata verify PATHS --out bad.jsonl` lists them"
        arguments.append(Argument(source='quarantine="bad.jsonl"', reason=listed))
    elif profile.bad or profile.failed_shards:
        reason = "samples that cannot be used are left out, up to 1 %; see od.ErrorPolicy"
        arguments.append(Argument(source='on_error="skip"', reason=reason))
    arguments.append(Argument(source=f"seed={profile.seed}", reason="any number; the order depends on it"))
    return arguments


def call_of(profile: Profile) -> str:
    """Return the call as Python source, with reasons as comments."""
    arguments = arguments_of_call(profile)
    lines = [f"    {argument.source},  # {argument.reason}" for argument in arguments]
    return "\n".join(["loader = od.DataLoader(", *lines, ")"])


def _recommended(profile: Profile) -> SettingName:
    return recommended(profile.main_scale) if profile.has_cost_model else "joint"


def _shuffle(profile: Profile) -> Argument:
    scale, is_grouped = profile.main_scale, _recommended(profile) == "grouped"
    streams = scale.streams if is_grouped else scale.global_streams
    if streams == 1:
        return Argument(source="shuffle=True", reason="one stream over all shards, as planned here")
    each_its_own = is_grouped and streams == scale.groups
    reason = "streams: each group of ranks reads its own" if each_its_own else "streams: as planned here"
    return Argument(source=f"shuffle=od.Shuffle(streams={streams})", reason=reason)


def _layout(profile: Profile) -> str:
    options = ["padded=True"] if profile.layout == "padded" and profile.is_of_processor else []
    options += [] if profile.multiple_of == 1 else [f"multiple_of={profile.multiple_of}"]
    options += [] if profile.length is None else [f"length={profile.length}"]
    if profile.is_of_processor:
        return f"od.hf.Inputs({', '.join(['model.config', *options])})"
    return f"od.{'Padded' if profile.layout == 'padded' else 'Packed'}({', '.join(options)})"


def _reason_of_layout(profile: Profile) -> str:
    padding = {layout.layout: layout.padding for layout in profile.layouts}
    chosen = "one length" if profile.length is not None else profile.layout
    shares = "padding of the LLM: " + ", ".join(
        f"{name} {100 * share:.0f} %{' (this)' if name == chosen else ''}" for name, share in padding.items()
    )
    names = "the recipe is of a Hugging Face processor, and its model takes batches with its own names"
    return f"{names}; {shares}" if profile.is_of_processor else shares


def _balance(profile: Profile) -> Argument:
    scale = profile.main_scale
    best = _recommended(profile)
    given = dict(profile.balance)
    near = f"{scale.scopes['grouped'].groups_per_shard:.1f} groups read a shard" if "grouped" in scale.scopes else ""
    reasons: dict[SettingName, str] = {
        "none": "no setting clearly shortens the wait",
        "joint": "whole samples over all ranks: "
        + (
            "no simpler setting waits less"
            if helps(scale, "joint")
            else "no setting clearly shortens the wait, and this one costs nothing"
        ),
        "per_phase": "each phase by itself waits clearly less; use od.exchange in the model",
        "grouped": f"in groups ranks wait no longer, and {near}",
    }
    own: dict[str, object] = {}
    if best == "none":
        own = {"scope": "none"}
    elif best == "per_phase":
        own = {"assignment": "per_phase"}
    elif best == "grouped":
        own = {"scope": "grouped", "group_size": scale.group_size}
    source = ", ".join(f"{name}={value!r}" for name, value in (own | given).items())
    reason = reasons[best] if profile.has_cost_model else "the default; give a cost model to compare settings"
    return Argument(source=f"balance=od.Balance({source})", reason=reason)
