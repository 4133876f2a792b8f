"""What a profile says, in sentences, of settings that were planned alone, each figure with its error; and in tables.

Profile --settings of one number of ranks--> Finding, Finding, ... and the DataLoader(...) call to take
Profile --figures--> tables, which the terminal, the page and a notebook render; text of the data without secrets, cut
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import ceil
from typing import Any, Final, NamedTuple

from orchdata.delivery.policy import DEFAULT_SHARE
from orchdata.html import number, percent, plain
from orchdata.loaders.amounts import counted
from orchdata.profiling.content import PERCENTILES, Figures
from orchdata.profiling.planned import CLEAR, SettingName

_LARGE_ERROR: Final = 0.02
_WORTH: Final = 0.02
"""Less waiting that makes a setting worth its price: that features travel between ranks."""
_LITTLE: Final = 0.02
_LITTLE_LONGER: Final = 0.005
_MUCH_TOKENIZED: Final = 2.0
"""Share of waiting that is not worth a range."""
TEXT: Final = "{}"
DATA: Final = "data"
CODE: Final = "code"
SHARE: Final = "share"
COUNT: Final = "{:,}"
SIZES: Final = "{:>}"
"""Text that is a size: to the right, as numbers are."""
LABELS: Final[Mapping[SettingName, str]] = {
    "none": "none",
    "llm": "LLM tokens alone",
    "joint": "whole samples",
    "per_phase": "per phase",
    "grouped": "in groups",
    "grid": "in a grid",
    "tokens": "steps in tokens",
    "teams": "shared by teams",
    "peers": "shared by peers",
}


class Finding(NamedTuple):
    """A sentence or two, without names from the data; shard and key of the sample that it speaks of; the setting whose
    share of waiting it names, and the bounds of that share.
    """

    text: str
    shard: str = ""
    key: str = ""
    setting: SettingName | None = None
    low: float = 0.0
    high: float = 0.0


def findings(profile: Figures) -> list[Finding]:
    """Return what a profile says, the most important first."""
    said = []
    if not profile.has_cost_model:
        said.append(
            "No cost model was given, so all figures are positions, not time, and nothing is said about waiting or "
            "speed. Give the model's costs, as in --cost MODULE:NAME or profile(cost=...)."
        )
    if profile.main_scale.less_than_a_step:
        said.append(
            f"The data set has less than one step of {profile.main_scale.ranks:,} ranks: figures are of all of it as "
            "one step."
        )
    if (peers := profile.main_scale.settings.get("peers")) is not None:
        said.append(
            f"Each of the {peers.num_peers} peers of a rank encodes all media of its rank, except where peers share "
            "encoders: figures count what they repeat as lost."
        )
    found = _of_waiting(profile) if profile.has_cost_model else []
    return [*found, *map(Finding, said), *_of_content(profile)]


def recommended(scale: Figures) -> SettingName:
    """Return the simplest setting that no other clearly beats by enough.

    Balancing whole samples costs nothing, so it need not be clear that it helps: one rare step may hide it.
    """
    settings = scale.settings
    best: SettingName = "joint" if settings["none"].waiting - settings["joint"].waiting >= _WORTH else "none"
    others: list[SettingName] = ["per_phase", "teams", "peers"]
    better = [name for name in others if name in settings and best in settings[name].better_than]
    least = min(better, key=lambda name: settings[name].waiting, default=best)
    if settings[best].waiting - settings[least].waiting >= _WORTH:
        return least
    if best == "joint" and scale.groups > 1 and "grouped" in settings and helps(scale, "grouped"):
        close = settings["joint"].waiting >= settings["grouped"].waiting - _WORTH
        # Clearly fewer groups read a shard than over all ranks, and than with one stream.
        grouped = scale.scopes["grouped"]
        fewest = min(scale.scopes["global"].groups_per_shard, grouped.groups_per_shard_of_one_stream)
        reads_fewer = grouped.groups_per_shard <= 0.75 * fewest
        if close and "grouped" not in settings["joint"].better_than and reads_fewer:
            return "grouped"
    return best


def helps(scale: Figures, name: SettingName) -> bool:
    """Whether ranks clearly wait less than without balancing, and by enough to matter."""
    setting, none = scale.settings[name], scale.settings["none"]
    return "none" in setting.better_than and none.waiting - setting.waiting >= _WORTH


def step_words(scale: Figures) -> str:
    """Return the size of a step in words."""
    none, ranks = scale.settings["none"], counted(scale.ranks, "rank")
    if scale.batch_size is not None:
        return f"{ranks} x {counted(scale.batch_size, 'sample')} ({number(none.tokens)} LLM tokens a step)"
    return f"{ranks} x {scale.batch_tokens:,} LLM tokens ({number(none.samples)} samples a step)"


def left_out_words(profile: Figures) -> str:
    """Return which numbers of ranks were left out, and why."""
    ranks = ", ".join(f"{each:,}" for each in profile.ranks_left_out)
    return f"Not planned: {ranks} ranks, whose step would have more than the data. Name them to plan them."


def _of_waiting(profile: Figures) -> list[Finding]:
    scale = profile.main_scale
    settings, size = scale.settings, step_words(scale)
    none = settings["none"]
    added = _added(profile)
    # Without balancing.
    where = _where(none)
    found = [
        _finding(
            f"At {size}, ranks wait {{}} of the step without balancing{where}, by your cost model "
            f"({counted(scale.steps, 'step')} planned).",
            "none",
            none,
            added["none"],
        )
    ]
    # The settings of the same steps.
    costs_tokens = any(name in str(profile.teams) for name in ("per_token=", "cost="))
    of_teams = "" if costs_tokens else " (their communication not counted)"
    said: list[tuple[SettingName, str]] = [
        ("llm", "Balancing by LLM tokens alone"),
        ("joint", "Balancing whole samples over all ranks"),
        ("per_phase", "Balancing each phase by itself (features travel between ranks)"),
        ("grid", "Balancing in a grid of groups"),
        ("teams", f"Sharing long sequences by teams of ranks{of_teams}"),
        ("peers", "Sharing encoders among the peers of each rank (features travel between ranks, and among peers)"),
    ]
    helped = False
    for name, what in said:
        if name not in settings or (name == "grid" and scale.groups == 1):
            continue
        if name in ("per_phase", "grid") and not (
            "joint" in settings[name].better_than and settings["joint"].waiting - settings[name].waiting >= _WORTH
        ):
            continue
        if helps(scale, name):
            found.append(
                _finding(f"{what} brings that to {{}}, in steps of the same size.", name, settings[name], added[name])
            )
            helped = helped or name != "llm"
        elif name in none.better_than:
            found.append(_finding(f"{what} makes it worse: {{}}.", name, settings[name], added[name]))
        elif none.waiting >= _LITTLE:
            found.append(_finding(f"{what} leaves it at {{}}.", name, settings[name], added[name]))
    if scale.groups > 1 and "grouped" in settings:
        scope, beaten = scale.scopes["grouped"], "grouped" in settings["joint"].better_than
        compared = "more than over all ranks" if beaten else "no clear difference to all ranks"
        what = (
            f"Balancing in groups of {scale.group_size} ranks gives {{}}, {compared}. With "
            f"shuffle=od.Shuffle(streams={scale.streams}) {scope.groups_per_shard:.1f} of {scale.groups:,} groups read "
            f"from a shard; with one stream, {scope.groups_per_shard_of_one_stream:.1f} do."
        )
        found.append(_finding(what, "grouped", settings["grouped"], added["grouped"]))
    if not helped:
        found.append(_of_no_help(profile, none))
    if any(finding.high > _bounds(settings[finding.setting], 0.0)[1] for finding in found if finding.setting):
        # What "over a whole epoch" means; the sentence before may be about the largest sample.
        no_step, adds = "No planned step had", '"over a whole epoch" counts what such samples add at most.'
        largest = profile.largest[0]
        rest = f"the largest sample. A step in which one rank has it takes at least {_times(largest.step)} as "
        rest += f"long as an even one; {adds}"
        found.append(
            Finding(f"{no_step} this sample: {adds}")
            if found[-1].shard
            else Finding(f"{no_step} {rest}", largest.shard, largest.key)
        )
    return found + _of_sharing(profile)


def _of_sharing(profile: Figures) -> list[Finding]:
    """Name teams where a sequence of text sets the pace, unless they were planned or would be refused."""
    scale, largest = profile.main_scale, profile.largest[0]
    if profile.teams is not None:
        if "teams" not in scale.settings:
            few = "Teams of so few ranks do not hold every usable sample within max_tokens: they were not planned."
            return [Finding(few)]
        # What members of teams read and tokenize: all of each text of which they have a part.
        ratio = scale.settings["teams"].tokenized
        said = f"With teams ranks tokenize {ratio:.1f} tokens for each token of a step: a member does all of its texts."
        if ratio > _MUCH_TOKENIZED:
            said += (
                " That is much: see that loaders keep up (`stats()`), give them num_workers=, or cut long texts by "
                "TextPreprocessor(max_tokens=..., overflow=...)."
            )
        return [Finding(said)]
    refused = profile.layout == "padded" or profile.length or {"equal_count", "max_samples"} & {*profile.balance}
    has_media = any(count for phase, count in largest.positions.items() if phase != "llm")
    if refused or has_media or recommended(scale) == "per_phase" or "peers" in scale.settings:
        return []
    if scale.ranks == 1 or largest.step < 1 + _LITTLE or scale.settings["joint"].waiting < _LITTLE:
        return []
    size = min(1 << (ceil(largest.step) - 1).bit_length(), 1 << (scale.ranks.bit_length() - 1))
    return [
        Finding(
            f"The largest sequence takes one rank {_times(largest.step)} as long as an even step. Ranks can share it: "
            f"--teams {size} plans that, as does Balance(teams=od.Teams(largest={size}))."
        )
    ]


def _of_no_help(profile: Figures, none: Figures) -> Finding:
    if none.waiting_error is None:
        return Finding(text="A single step shows no error, so settings are not compared.")
    if none.waiting < _LITTLE:
        return Finding(text="Ranks hardly wait, so there is nothing to balance.")
    largest = profile.largest[0]
    if largest.step < 1 + _LITTLE:
        return Finding(text="No setting that was planned clearly shortens the wait.")
    return Finding(
        text=f"No setting that was planned clearly shortens the wait. The sample that sets the pace costs "
        f"{largest.cost:,.0f} times the mean sample: a step in which one rank has it takes at least "
        f"{_times(largest.step)} as long as an even one.",
        shard=largest.shard,
        key=largest.key,
    )


def stored_words(profile: Figures) -> str:
    """Return what figures of samples are of, if an epoch delivers other shares: for the end of a heading."""
    return " (of the stored samples, each once)" if profile.sources else ""


def _of_content(profile: Figures) -> list[Finding]:
    total = sum(modality.tokens for modality in profile.modalities.values()) or 1
    shares = {name: (modality.share, modality.tokens / total) for name, modality in profile.modalities.items()}
    if profile.epoch:
        shares = {name: (modality.share, modality.token_share) for name, modality in profile.epoch.items()}
    said = [
        f"{percent(of_samples)} of the samples have {name}, which gives {percent(of_tokens)} of the LLM tokens"
        for name, (of_samples, of_tokens) in shares.items()
        if name != "text" and of_samples
    ]
    if said and profile.epoch:
        said[0] = f"Over an epoch of the mixture, {said[0]}"
    found = [Finding(text="; ".join(said) + ".")] if said else []
    if profile.bad:
        found.append(Finding(text=f"{counted(profile.bad, 'sample')} cannot be used; see the reasons below."))
    if profile.failed_shards:
        found.append(Finding(text=f"{counted(profile.failed_shards, 'shard')} cannot be read at all."))
    return found


def _where(setting: Figures) -> str:
    """Say in which phase ranks wait most, if it is most of the waiting."""
    if len(setting.phases) < 2 or not setting.waiting:
        return ""
    name, part = max(setting.phases.items(), key=lambda each: each[1])
    if part <= setting.waiting / 2:
        return ""
    return ", most of it in the LLM" if name == "llm" else f", most of it in the {name} encoder"


def _finding(text: str, name: SettingName, setting: Figures, added: float) -> Finding:
    low, high = _bounds(setting, added)
    return Finding(text=text.format(_share(setting, added)), setting=name, low=low, high=high)


def _share(planned: Figures, added: float) -> str:
    """Return a share of waiting with three standard errors, or as a range where its error is large.

    `added` is what samples of no planned step add to the cost of a mean step, in that of an even step.
    """
    low, high = _bounds(planned, 0.0)
    error = planned.waiting_error
    share, about = f"{100 * planned.waiting:.0f} %", [f"± {100 * _margin(planned):.0f}"]
    if error is None:
        about = ["of one step, so without an error"]
    elif error >= _LARGE_ERROR:
        share, about = f"{100 * low:.0f} to {100 * high:.0f} %", []
    if (longer := _bounds(planned, added)[1]) > high:
        about.append(f"up to {100 * longer:.0f} % over a whole epoch")
    return f"{share} ({'; '.join(about)})" if about else share


def _margin(planned: Figures) -> float:
    """Return three standard errors, in whole points, at least one."""
    return max(1, ceil(100 * CLEAR * (planned.waiting_error or 0.0))) / 100


def _bounds(planned: Figures, added: float) -> tuple[float, float]:
    rounded = round(planned.waiting, 2)
    low, high = max(0.0, rounded - _margin(planned)), min(1.0, rounded + _margin(planned))
    longer = 1 - (1 - high) / (1 + added * (1 - high))
    return low, high if longer - high < _LITTLE_LONGER else ceil(100 * longer) / 100


def _added(profile: Figures) -> dict[SettingName, float]:
    """Return what the largest samples add to a mean step at most, in the cost of an even one, if no planned step had
    them: a step in which one rank has such a sample costs more than all that were planned.
    """
    scale = profile.main_scale
    costliest = min(
        setting.costliest
        for name, setting in scale.settings.items()
        if name not in ("per_phase", "tokens", "teams", "peers")
    )
    unplanned = [sample.step for sample in profile.largest if sample.step > costliest]
    per_step = scale.samples / profile.samples  # how often a sample comes in a step
    added = {
        name: per_step * sum(step - 1 / (1 - setting.waiting) for step in unplanned if step * (1 - setting.waiting) > 1)
        if name != "teams"
        else 0.0
        for name, setting in scale.settings.items()
    }
    # A sample adds no more where peers share its parts than where each of them encodes all.
    return added | ({"peers": added["joint"]} if "peers" in added else {})


def _times(ratio: float) -> str:
    return f"{ratio:.1f} times" if ratio < 10 else f"{ratio:,.0f} times"


def arguments_of_call(profile: Figures) -> list[tuple[str, str]]:
    """Return the arguments of the call for the ranks that the summary speaks of: Python source, and why it is so."""
    scale = profile.main_scale
    best = recommended(scale) if profile.has_cost_model else "joint"
    arguments = [("dataset", "the data set of this profile")]
    if scale.batch_size is not None:
        step = f"{scale.global_batch_size:,} samples a step on {scale.ranks:,} ranks"
        arguments.append((f"batch_size={scale.batch_size}", step))
    else:
        step = f"{scale.batch_tokens:,} LLM tokens for each of {scale.ranks:,} ranks"
        arguments.append((f"global_batch_tokens={scale.global_batch_tokens}", step))

    # The order.
    streams = scale.streams if best == "grouped" else scale.global_streams
    if streams == 1:
        arguments.append(("shuffle=True", "one stream over all shards, as planned here"))
    else:
        each_its_own = best == "grouped" and streams == scale.groups
        reason = "streams: each group of ranks reads its own" if each_its_own else "streams: as planned here"
        arguments.append((f"shuffle=od.Shuffle(streams={streams})", reason))
    if scale.less_than_a_step:
        few = "the data are less than a step: take a smaller batch, or fewer ranks"
        arguments.append(("drop_last=False", few))
    else:
        arguments.append(("drop_last=True", "steps of one size, as planned"))

    # The layout, with the padding of each.
    options = ["padded=True"] if profile.layout == "padded" and profile.is_of_processor else []
    options += [] if profile.multiple_of == 1 else [f"multiple_of={profile.multiple_of}"]
    options += [] if profile.length is None else [f"length={profile.length}"]
    chosen = "one length" if profile.length is not None else profile.layout
    reason = "padding of the LLM: " + ", ".join(
        f"{its.layout} {100 * its.padding:.0f} %{' (this)' if its.layout == chosen else ''}" for its in profile.layouts
    )
    name = "od.Padded" if profile.layout == "padded" else "od.Packed"
    is_cut_later = best == "teams" and "cut='trainer'" in str(profile.teams)
    if profile.is_of_processor and not is_cut_later:
        name, options = "od.hf.Inputs", ["model.config", *options]
        names = "the recipe is of a Hugging Face processor, and its model takes batches with its own names"
        reason = f"{names}; {reason}"
    arguments.append((f"collate_fn={name}({', '.join(options)})", reason))

    # The balance.
    own: dict[str, object] = {}
    reason = "the default; give a cost model to compare settings"
    if best == "none":
        own, reason = {"scope": "none"}, "no setting clearly shortens the wait"
    elif best == "peers":
        own = {"assignment": "per_phase"}
        reason = "peers share encoders, each phase by itself; use od.exchange in the model"
        of_mesh = f"the mesh: {scale.ranks:,} data-parallel ranks of {scale.settings['peers'].num_peers} peers"
        arguments.append(('dp=od.DataParallel(mesh, encoder_dims=("tp",))', of_mesh))
    elif best == "per_phase":
        own = {"assignment": "per_phase"}
        reason = "each phase by itself waits clearly less; use od.exchange in the model"
    elif best == "grouped":
        own = {"scope": "grouped", "group_size": scale.group_size}
        read = f"{scale.scopes['grouped'].groups_per_shard:.1f} groups read a shard"
        reason = f"in groups ranks wait no longer, and {read}"
    elif profile.has_cost_model:
        no_better = "no setting clearly shortens the wait, and this one costs nothing"
        no_better = "no simpler setting waits less" if helps(scale, "joint") else no_better
        reason = f"whole samples over all ranks: {no_better}"
    given_too = {name: of for name, of in profile.balance.items() if name != "encode" or "assignment" in own}
    given = ", ".join(f"{name}={value!r}" for name, value in (own | given_too).items())
    if best == "teams":
        given = ", ".join(filter(None, (f"teams={profile.teams}", given)))
        attention = "attention is od.TeamAttention, or od.hf.share_attention(model, loader)"
        cut = "the trainer cuts them, as by od.megatron_packed" if is_cut_later else attention
        reason = f"ranks share long sequences; {cut}"
    arguments.append((f"balance=od.Balance({given})", reason))
    if profile.has_cost_model:
        arguments.append(("cost=cost", "the cost model of this profile"))

    # Samples that cannot be used.
    if profile.bad > DEFAULT_SHARE * profile.samples:
        listed = f"{profile.bad:,} samples cannot be used: `orchdata verify PATHS --out bad.jsonl` lists them"
        arguments.append(('quarantine="bad.jsonl"', listed))
    elif profile.bad or profile.failed_shards:
        reason = "samples that cannot be used are left out, up to 1 %; see od.ErrorPolicy"
        arguments.append(('on_error="skip"', reason))
    arguments.append((f"seed={profile.seed}", "any number; the order depends on it"))
    return arguments


def call_of(profile: Figures) -> str:
    """Return the call as Python source, with reasons as comments."""
    lines = [f"    {source},  # {reason}" for source, reason in arguments_of_call(profile)]
    return "\n".join(["loader = od.DataLoader(", *lines, ")"])


class Table(NamedTuple):
    """Columns are title -> how their cells are written: a format of Python, SHARE, DATA or CODE. None is empty."""

    columns: Mapping[str, str]
    rows: Iterable[Sequence[Any]]


def written(value: Any, form: str) -> str:
    """Return a cell as plain text."""
    if value is None:
        return "-"
    if form == SHARE:
        return percent(value)
    return str(value) if form in (DATA, CODE) else form.format(value)


def modalities(profile: Figures, *more: str) -> Table:
    """`more`: counts besides LLM tokens, as "samples"."""
    total = sum(its.tokens for its in profile.modalities.values()) or 1
    rows = [
        (name, its.share, its.tokens / total, *map(its.get, more), its.tokens)
        for name, its in profile.modalities.items()
    ]
    shares = dict.fromkeys(("share of samples", "share of LLM tokens"), SHARE)
    return Table({"modality": TEXT, **shares, **dict.fromkeys((*more, "LLM tokens"), COUNT)}, rows)


def combinations(profile: Figures) -> Table:
    rows = [
        (" + ".join(its.modalities) or "nothing", its.samples / profile.samples, its.samples, its.tokens)
        for its in profile.content.combinations
    ]
    return Table({"samples of": TEXT, "share of samples": SHARE, "samples": COUNT, "LLM tokens": COUNT}, rows)


def joint_shares(joint: Figures) -> Table:
    bins = len(joint.samples)
    names = [f"{100 * place // bins} to {100 * (place + 1) // bins} %" for place in range(bins)]
    rows = [
        (*(names[place] for place in (i, j)[: len(joint.modalities)]), count)
        for i, row in enumerate(joint.samples)
        for j, count in enumerate(row)
        if count
    ]
    return Table({**dict.fromkeys(joint.modalities, TEXT), "samples": COUNT}, rows)


def bins_of(its: Figures, unit: str) -> tuple[Table, Table]:
    """Return samples by length in bins of a factor of 2, and percentiles."""
    rows = [(f"{2**bit:,} to {2 ** (bit + 1) - 1:,}", count) for bit, count in enumerate(its.bins) if count]
    percentiles = Table({"percentile": TEXT, unit: COUNT}, its.percentiles.items())
    return Table({unit: TEXT, "samples": COUNT}, rows), percentiles


def phases(profile: Figures) -> Table:
    rows = [(name, its.positions, *map(its.percentiles.get, PERCENTILES)) for name, its in profile.phases.items()]
    return Table({"phase": TEXT, "total": COUNT, **dict.fromkeys(PERCENTILES, COUNT)}, rows)


def settings(profile: Figures) -> Table:
    columns = {"ranks": COUNT, "setting": TEXT, "waiting" if profile.has_cost_model else "unevenness": SHARE}
    columns |= {"error, points": "{:.1f}", "samples": "{:,.0f}", "LLM tokens": SIZES, "micro-steps": "{:.1f}"}
    rows = [
        (
            scale.ranks,
            LABELS[name],
            its.waiting,
            None if its.waiting_error is None else 100 * its.waiting_error,
            its.samples,
            number(its.tokens),
            its.microbatches,
            f"{scale.steps}" + (" all" if scale.less_than_a_step else ""),
        )
        for scale in profile.scales
        for name, its in scale.settings.items()
    ]
    return Table({**columns, "steps": SIZES}, rows)


def waiting_in_phases(scale: Figures) -> Table | None:
    """Return where ranks wait; None if they meet at the end of the step only."""
    with_phases = {name: its for name, its in scale.settings.items() if its.phases}
    if not with_phases:
        return None
    names = tuple(next(iter(with_phases.values())).phases)
    rows = [(LABELS[name], *(its.phases[phase] for phase in names)) for name, its in with_phases.items()]
    return Table({"setting": TEXT, **{f"in {phase}": SHARE for phase in names}}, rows)


def groups(scales: Sequence[Figures]) -> Table:
    columns = {"ranks": COUNT, "groups": TEXT, "scope": TEXT, "groups a shard": "{:.1f}", "with one stream": "{:.1f}"}
    rows = [
        (scale.ranks, f"{scale.groups:,} of {scale.group_size}", name, *its.values())
        for scale in scales
        if scale.groups > 1
        for name, its in scale.scopes.items()
    ]
    return Table(columns, rows)


def layouts(profile: Figures) -> Table:
    names = [its.layout + ("" if its.length is None else f", {its.length:,} tokens") for its in profile.layouts]
    rows = [(name, its.padding, its.microbatches, its.steps) for name, its in zip(names, profile.layouts, strict=True)]
    return Table({"layout": TEXT, "padding": SHARE, "micro-steps": "{:.1f}", "steps": COUNT}, rows)


def largest(profile: Figures, name: Callable[[str], str], *, named: bool) -> Table:
    columns = {"key": DATA, "shard": DATA, "cost over the mean": "{:,.1f}", "step at least": "{:.2f}"}
    rows = [
        [
            plain(its.key, 120) if named else None,
            plain(name(its.shard), 120),
            its.cost,
            its.step,
            *its.positions.values(),
        ]
        for its in profile.largest
    ]
    return Table({**columns, **dict.fromkeys(profile.phases, COUNT)}, rows)


def unlike(parts: Sequence[Figures], what: str, name: Callable[[str], str], modalities: Sequence[str]) -> Table:
    columns = {what: DATA, **{f"{modality}, of tokens": SHARE for modality in modalities}, "samples": COUNT}
    rows = [
        (plain(name(its.name), 120), *map(its.shares.get, modalities), its.samples, its.tokens_per_sample)
        for its in parts
    ]
    return Table({**columns, "LLM tokens a sample": "{:,.0f}"}, rows)


def sources(profile: Figures, names: Iterable[str]) -> Table:
    found = [(name, profile.sources[name]) for name in names]
    rows = [(plain(name, 120), its.share, its.tokens, its.samples, its.passes) for name, its in found]
    columns = {"source": DATA, "share of tokens": SHARE, "LLM tokens": COUNT, "samples": COUNT, "passes": "{:.3g}"}
    return Table(columns, rows)


def unread(profile: Figures) -> Table:
    """Return the fields that no recipe reads, with the samples that have them."""
    rows = [(plain(name), count) for name, count in profile.unread.items()]
    rows += [("values of more fields", profile.unread_others)] if profile.unread_others else []
    return Table({"field": DATA, "samples that have it": COUNT}, rows)
