"""What a loader checks before its first step: kinds of samples that the model's forward does not take are refused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from orchdata.hf.forward.trial import Differs, Failed, Verdict, tried
from orchdata.hf.packing.kept import code_of
from orchdata.hf.packing.verdict import attention_of
from orchdata.loaders.errors import StorageError
from orchdata.loaders.storage.atomic import write_whole
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.shared.files import read_small
from orchdata.loaders.storage.shared.values import check_shape
from orchdata.notices import warn_once

if TYPE_CHECKING:
    from orchdata.hf.inputs import Inputs
    from orchdata.loaders.recipe import Recipe

_VERSION: Final = 5
"""Raise it when the same loader would be judged otherwise."""
_FOLDER: Final = "forwards"
_MOST_BYTES: Final = 1 << 20
_SHAPE: Final = {
    "failed": [{"kind": str, "error": str, "modalities": [str], "is_dummy": bool, "padded": bool}],
    "differing": [{"kind": str, "difference": float, "modalities": [str]}],
    "reading": [str],
    "untried": str,
}
_known: dict[str, Verdict] = {}
"""Verdicts that this process has computed or read, by name."""


def check_forward(inputs: Inputs, recipe: Recipe, encoders: Sequence[str], *, is_one_by_one: bool = False) -> None:
    """Refuse kinds of samples of which a tiny model of the same configuration fails, where it runs on text alone, and
    those that it gives another loss together than each alone.

    The result is stored in the cache folder, under all that it depends on. If nothing can be tried, a warning says so.

    Args:
        inputs: of a loader.
        recipe: of its data set.
        encoders: modalities that its batches have.
        is_one_by_one: whether a microbatch never holds more than one sample.

    Raises:
        ValueError: names the kind, the model's own error and what helps.
    """
    name = _name(inputs, recipe, encoders)
    verdict = None if name is None else _known.get(name) or _kept(name, encoders)
    if verdict is None:
        verdict = tried(inputs, recipe, encoders)
        if name is not None:
            _keep(name, verdict)
    if name is not None:
        _known[name] = verdict
    if verdict.untried:
        kind = inputs.config.model_type
        warn_once(
            f"no forward of {kind} was tried",
            f"whether {kind} takes the batches of this recipe was not tried: {verdict.untried}. Compare the loss of a "
            "few samples with the processor's own before a long run; od.hf.Inputs(config, probe=False) tries nothing",
        )
    if verdict.failed:
        raise ValueError(_refusal(inputs, verdict.failed))
    if verdict.differing and not is_one_by_one:
        raise ValueError(_refusal_of_neighbours(inputs, verdict.differing))
    differing = {name for each in verdict.differing for name in each.modalities} & set(verdict.reading)
    if unlike := sorted(name for name in differing if not getattr(recipe.modalities[name], "pads_with_zeros", True)):
        raise ValueError(
            f"{inputs.config.model_type} reads the padding of {_listed(unlike, 'and')}, and its processor fills the "
            "shorter of several parts of a sample with other values than zeros, so that even a sample alone would get "
            f"another loss: leave it out of the recipe ({', '.join(f'{name}=None' for name in unlike)}), or, if no "
            "sample has several parts, od.hf.Inputs(config, probe=False)"
        )


def _refusal(inputs: Inputs, failed: Sequence[Failed]) -> str:
    name, first = inputs.config.model_type, failed[0]
    version = import_module("transformers").__version__
    for_what = f", for {_listed(first.modalities, 'and')} that stands in where there is none" if first.is_dummy else ""
    others = "".join(f", and on {each.kind}" for each in failed[1:])
    left_out = ", ".join(f"{each}=None" for each in dict.fromkeys(m for each in failed for m in each.modalities))
    ways = [
        f"leave it out of the recipe ({left_out})" if left_out else "",
        "use od.hf.Inputs(config, padded=True), which takes them" if all(each.padded for each in failed) else "",
        f"take another version of transformers than {version}",
        "od.hf.Inputs(config, probe=False) if you know that your model takes them",
    ]
    return (
        f"{name} fails in its forward on {first.kind}{for_what}{others}, as batches of this recipe hold them: "
        f"{first.error}. This was tried on small random models of its configuration, which run on text alone. Either "
        "the configuration and the processor do not belong together, or this forward takes something else: "
        f"{_listed([way for way in ways if way], 'or')}"
    )


def _refusal_of_neighbours(inputs: Inputs, differing: Sequence[Differs]) -> str:
    name, worst = inputs.config.model_type, max(differing, key=lambda each: each.difference)
    kinds = _listed([each.kind for each in differing], "and")
    # Where text alone differs, nothing is gained by leaving media out.
    media = () if any(not each.modalities for each in differing) else differing
    left_out = ", ".join(f"{each}=None" for each in dict.fromkeys(m for each in media for m in each.modalities))
    ways = [
        "give each rank one sample a step, by batch_size=1 and balance=od.Balance(max_samples=1)",
        f"leave it out of the recipe ({left_out})" if left_out else "",
        "od.hf.Inputs(config, probe=False) if you accept the difference",
    ]
    return (
        f"{name} lets samples of a microbatch, or their padding, change each other: on {kinds}, "
        f"{'padded' if inputs.padded else 'packed'} as batches of this recipe hold them, the summed loss is up to "
        f"{worst.difference:.0e} off that of each sample alone. This was tried on a small random model of its "
        f"configuration: {_listed([way for way in ways if way], 'or')}"
    )


def _listed(words: Sequence[str], last: str) -> str:
    return f" {last} ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _name(inputs: Inputs, recipe: Recipe, encoders: Sequence[str]) -> str | None:
    """Under which the verdict is kept: all that it depends on. None for a configuration without a JSON form."""
    try:
        config = json.loads(inputs.config.to_json_string(use_diff=False))
    except Exception:  # noqa: BLE001 - what a class of the user's raises; it is tried again then
        return None
    facts = {
        "version": _VERSION,
        "config": config,
        "attention": attention_of(inputs.config),
        "code": code_of(inputs.config),
        "layout": [inputs.padded, inputs.multiple_of, inputs.empty],
        "recipe": recipe.fingerprint(),
        "encoders": list(encoders),
        **{name: str(import_module(name).__version__) for name in ("torch", "transformers")},
    }
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16).hexdigest()


def _with_tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with tuples instead of JSON's lists."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


def _kept(name: str, encoders: Sequence[str]) -> Verdict | None:
    try:
        stored: Any = json.loads(read_small(CacheFolder().root / _FOLDER / f"{name}.json", _MOST_BYTES))
        check_shape(stored, _SHAPE, "it")
    except (OSError, ValueError, RecursionError):
        return None  # not there, damaged or of another version: it is tried again
    named = {modality for each in (*stored["failed"], *stored["differing"]) for modality in each["modalities"]}
    if not (named | set(stored["reading"])).issubset(encoders):
        return None
    return Verdict(
        failed=tuple(Failed(**_with_tuples(each)) for each in stored["failed"]),
        differing=tuple(Differs(**_with_tuples(each)) for each in stored["differing"]),
        reading=tuple(stored["reading"]),
        untried=stored["untried"],
    )


def _keep(name: str, verdict: Verdict) -> None:
    with suppress(StorageError, OSError):  # a folder that cannot be written costs the trial again
        write_whole(CacheFolder().file(_FOLDER, f"{name}.json"), json.dumps(asdict(verdict)).encode())
