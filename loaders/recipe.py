"""The recipe: how a sample's bytes become tensors. A frozen value with a fingerprint; nothing runs here.

`load_required` imports the packages that a recipe needs, before its first sample: a missing or broken one is one error
that names it, and never a sample's failure.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, FrozenInstanceError, fields, is_dataclass, make_dataclass
from functools import cached_property, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Final

from orchdata.loaders.environment import OWN
from orchdata.loaders.errors import (
    NOT_DATA,
    OrchdataError,
    PackageError,
    is_refusal,
    package_error,
    pass_broken_package,
)
from orchdata.loaders.field_names import is_kept_as, names_of
from orchdata.loaders.functions import UserFunction
from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities.audio import AudioPreprocessor
from orchdata.loaders.modalities.builtin import BUILTINS, KINDS, OTHER, TEXT, UNUSED
from orchdata.loaders.modalities.image import ImagePreprocessor, image_grid
from orchdata.loaders.modalities.modality import (
    Modality,
    Slot,
    counts_from_header,
    names_no_counts,
    outer_of,
    plain,
    stored_dtype,
)
from orchdata.loaders.storage.storage import tried
from orchdata.loaders.text.conversation import Rules
from orchdata.loaders.text.preprocessor import TEXT_FIELDS, TextPreprocessor
from orchdata.loaders.text.template import ChatTemplate, MediaWords, record_keys

__all__ = [
    "AudioPreprocessor",
    "ChatTemplate",
    "ImagePreprocessor",
    "Limits",
    "Modality",
    "Recipe",
    "TextPreprocessor",
    "image_grid",
]

_NAME: Final = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
# Names with another meaning in batches, samples and phases.
_TAKEN: Final = frozenset(("text", "llm", "limits", "keep", "step", "record", "record_id"))
_INT32_MAX: Final = 2**31 - 1
# Names of a batch's model inputs under every recipe, and of a modality's further inputs next to its arrays.
_INPUTS: Final = frozenset("input_ids position_ids labels cu_seqlens max_seqlen attention_mask".split())
_COMPANIONS: Final = ("cu_seqlens", "max_seqlen", "mask", "token_places", "positions", "route")
# Attributes of the objects with a modality's arrays, in batches and samples.
_ATTRIBUTES: Final = frozenset("arrays num_tokens valid map modality dtypes extras tensor".split())
_LONGEST_REPR: Final = 120
_LARGEST_ITEM: Final = 4
"""Bytes of a value in the largest dtype of our own modalities."""


VERDICTS: Final = 1
"""How samples are judged: raised by each change after which the same shard, under the same recipe, has other bad ones.
An index file of another number is used as it is, with a warning."""
COUNTS: Final = 2
"""How samples are counted: raised by each change after which they have other tokens, labels, frames, patches or values.
It is part of every fingerprint. An index file of another number is refused."""


def versions() -> list[int]:
    """Return the two numbers: what the cache folder keeps of others is made again."""
    return [VERDICTS, COUNTS]


class Recipe:
    """How each modality is prepared.

    Any keyword that holds a `Modality` is one: `Recipe(points=MyPoints())`. Modalities are in a fixed order: image,
    audio, then the others by name.

    Args:
        text: tokens, templates and placeholders.
        image, audio: None ignores that modality's members; a placeholder for one is an error of the sample.
        video: an `od.VideoPreprocessor`; None ignores video files, and GIFs are images.
        limits: upper limits on sizes; larger data are an error.
        record: a function of yours, from the fields of a sample (a dict) to its record: a string with placeholders, a
            list of turns, or a dict as in JSON Lines; None leaves the sample out. Media are references, `od.Media`.
        record_id: identity of that function, part of the fingerprint; needed if its source text alone does not say what
            it does.
        keep: fields that go with each sample, in `Batch.fields`, or in `Sample.fields` for a collate_fn of your own:
            members of tars and columns by their suffixes ("cls") or whole names ("meta.json"), without numbers; keys
            of records.
        modalities: more of them, by name.

    Attributes:
        modalities: name -> Modality, in order. `recipe.points` and the like read it; `recipe.image`, `recipe.audio` and
            `recipe.video` are None if there is none.

    Raises:
        TypeError: a value is no modality.
        ValueError: a name is taken, two modalities claim the same field, mark, type of item or input of a model, or
            `record` needs a `record_id`.
    """

    text: TextPreprocessor
    limits: Limits
    keep: tuple[str, ...]
    record: UserFunction | None
    modalities: dict[str, Modality]
    _given: dict[str, Modality | None]  # with None for built-in ones that are left out

    def __init__(
        self,
        *,
        image: Modality | None = ImagePreprocessor(),  # noqa: B008 - a frozen value
        audio: Modality | None = AudioPreprocessor(),  # noqa: B008
        video: Modality | None = None,
        text: TextPreprocessor = TextPreprocessor(),  # noqa: B008
        limits: Limits = Limits(),  # noqa: B008
        keep: tuple[str, ...] = (),
        record: Callable[[dict[str, Any]], Any] | UserFunction | None = None,
        record_id: str | None = None,
        **modalities: Modality | None,
    ) -> None:
        # Check the types and names of all arguments.
        modalities |= {} if video is None else {"video": video}
        given = {"image": image, "audio": audio, **{name: modalities[name] for name in sorted(modalities)}}
        for name, value in given.items():
            if name in _TAKEN or not _NAME.fullmatch(name):
                raise ValueError(f"a modality cannot be called {name!r}: use a lower-case word without another meaning")
            others = tuple(kind for other, kind in BUILTINS.items() if name in BUILTINS and other != name)
            if value is not None and (not isinstance(value, Modality) or isinstance(value, others)):
                wanted = BUILTINS[name].__name__ if name in BUILTINS else "an od.Modality"
                raise TypeError(f"Recipe.{name} must be {wanted}, got {type(value).__name__}")
        for name in modalities.keys() - BUILTINS.keys():
            if modalities[name] is None:
                raise TypeError(f"the recipe has no {name!r} to leave out; only {', '.join(BUILTINS)} may be None")
        for name, part, kind in (("text", text, TextPreprocessor), ("limits", limits, Limits)):
            if not isinstance(part, kind):
                raise TypeError(f"Recipe.{name} must be {kind.__name__}, got {type(part).__name__}")
        if isinstance(keep, str) or not all(isinstance(name, str) for name in keep):
            raise ValueError(f"Recipe.keep must be a tuple of names, got {keep!r}")
        if record is None and record_id is not None:
            raise ValueError("Recipe.record_id belongs to a function: pass record= too")
        if record is not None and not isinstance(record, UserFunction):
            record = UserFunction.of("Recipe.record", record, record_id)
        # Set the attributes past `__setattr__`, then check them against each other.
        vars(self).update(
            text=text,
            limits=limits,
            keep=tuple(sorted({name.lower() for name in keep})),
            record=record,
            modalities={name: value for name, value in given.items() if value is not None},
            _given={name: value for name, value in given.items() if value is not None or name in BUILTINS},
        )
        for name, modality in self.modalities.items():
            _check_words(name, modality)
        _ = self._claims, self.rules  # raise on contradictions
        _check_arrays(self.modalities)

    def __setattr__(self, name: str, value: object) -> None:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    @property
    def image(self) -> Any:
        """How images are prepared; None if they are ignored."""
        return self.modalities.get("image")

    @property
    def audio(self) -> Any:
        """How audio is prepared; None if it is ignored."""
        return self.modalities.get("audio")

    @property
    def video(self) -> Any:
        """How videos are prepared; None if they are ignored."""
        return self.modalities.get("video")

    def __getattr__(self, name: str) -> Modality:
        modalities: dict[str, Modality] = vars(self).get("modalities", {})
        if name not in modalities:
            raise AttributeError(f"the recipe has no modality {name!r}")
        return modalities[name]

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(f"cannot delete field {name!r}")

    if TYPE_CHECKING:  # a type checker wants that of a class
        __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    else:

        @property
        def __dataclass_fields__(self) -> dict[str, Field[Any]]:
            """Fields that `dataclasses.replace(recipe, limits=...)` and `asdict` copy, including the modalities."""
            names = (*self._parts, *self._given)
            fields: dict[str, Field[Any]] = vars(make_dataclass("Recipe", names))["__dataclass_fields__"]
            return fields

    def __repr__(self) -> str:
        """Show the arguments that differ from their defaults, and of their fields those that do."""
        parts = self._given | self._parts
        if self.record is not None:
            parts |= {"record": self.record.name, "record_id": self.record.id}
        defaults: dict[str, Any] = vars(Recipe)["__init__"].__kwdefaults__
        given = {name: value for name, value in parts.items() if repr(value) != repr(defaults.get(name))}
        return f"Recipe({_shown_fields(given)})"

    def __eq__(self, other: object) -> bool:
        """Compare `describe()`: parameters may be of any type."""
        if self is other:
            return True
        return type(self) is type(other) and self.text == other.text and self.describe() == other.describe()

    def __hash__(self) -> int:
        return hash((self.kinds, self.keep))

    def __reduce__(self) -> tuple[Any, ...]:
        return _make, (type(self), self._parts | self._given)

    @property
    def _parts(self) -> dict[str, Any]:
        """Arguments that are no modalities."""
        parts = {"text": self.text, "limits": self.limits, "keep": self.keep}
        return parts | ({} if self.record is None else {"record": self.record})

    @cached_property
    def uses(self) -> dict[Any, Any]:
        """Cache of `samples.members`, for samples with the same fields."""
        return {}

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """Kind codes of members and parts -> names under this recipe, text first."""
        return ("text", *self.modalities)

    @cached_property
    def num_facts(self) -> int:
        """Length of the longest header."""
        return max((modality.num_facts for modality in self.modalities.values()), default=0)

    @cached_property
    def num_extents(self) -> int:
        """Length of the longest extent."""
        return max((modality.num_extents for modality in self.modalities.values()), default=0)

    @cached_property
    def row_bytes(self) -> dict[str, int]:
        """Memory of one row of all arrays, by modality."""
        return {name: modality.row_bytes() for name, modality in self.modalities.items()}

    @cached_property
    def largest_row_bytes(self) -> dict[str, int]:
        """`row_bytes` under the largest dtype that may be chosen, which says whether a sample is above the limits."""
        return {
            name: modality.row_bytes(_LARGEST_ITEM if "dtype" in names_no_counts(type(modality)) else 0)
            for name, modality in self.modalities.items()
        }

    @property
    def of_processor(self) -> tuple[str, ...]:
        """Modalities that `od.hf.recipe` made of a processor: `od.hf.Inputs` has its model's names for their arrays."""
        made = {name: type(modality).__module__ for name, modality in self.modalities.items()}
        return tuple(name for name, module in made.items() if module.startswith("orchdata.hf."))

    def modality(self, kind: int) -> Modality | None:
        """The modality of a kind; None for text and for no modality."""
        return self.modalities[self.kinds[kind]] if TEXT < kind < len(self.kinds) else None

    def kind_of(self, field: str, kind: int) -> int:
        """Return the kind, a code, UNUSED or OTHER, of a member with this field name and kind in the facts."""
        outer, inner = outer_of(field)
        if inner in self.embedded_modalities(outer):
            return self.kinds.index(inner)
        claimed = next((self._claims[name] for name in names_of(field) if name in self._claims), None)
        if claimed is not None:
            return self.kinds.index(claimed)
        if kind == OTHER:
            own = self.text.fields if self.text.fields != TEXT_FIELDS else ()  # a suffix that only this recipe reads
            return TEXT if any(name in own for name in names_of(field)) else OTHER
        name = KINDS[kind]
        is_ours = name == "text" or (name in self.modalities and self.modalities[name].fields == BUILTINS[name].fields)
        return self.kinds.index(name) if is_ours else UNUSED

    def embedded_modalities(self, field: str) -> tuple[str, ...]:
        """Return the modalities that may have a part inside a member of another modality."""
        hosts = {name: modality.embedded_in for name, modality in self.modalities.items() if modality.embedded_in}
        return tuple(name for name, fields in hosts.items() if not set(names_of(field)).isdisjoint(fields))

    def asks_for(self, field: str) -> bool:
        """Whether a member is claimed by name, or kept."""
        return self.keeps(field) or any(name in self._claims for name in names_of(field))

    def keeps(self, field: str) -> bool:
        """Whether a member is kept with the sample."""
        return any(is_kept_as(field, name) for name in self.keep)

    @cached_property
    def _claims(self) -> dict[str, str]:
        """Field -> the modality that claims it by name, without the built-in kinds, which facts contain already."""
        claims: dict[str, str] = {}
        known = {
            modality.fields: name
            for name, modality in self.modalities.items()
            if name in BUILTINS and modality.fields == BUILTINS[name].fields
        }
        for name, modality in self.modalities.items():
            other = known.get(modality.fields)
            if other == name:
                continue
            if other is not None:
                raise ValueError(
                    f"{name} and {other} both claim {', '.join(modality.fields[:3])}, ...: give {name} fields of its "
                    f"own, or leave the other out with {other}=None"
                )
            for field in (*modality.fields, name):
                owner = claims.setdefault(field.lower(), name)
                if owner != name:
                    raise ValueError(f"{owner} and {name} both claim the field {field!r}")
        return claims

    @cached_property
    def slots(self) -> dict[str, Slot]:
        """The slot of each modality in text, including built-in ones that are left out."""
        slots = {name: modality.slot for name, modality in self.modalities.items()}
        for name in BUILTINS:
            if name in slots and slots[name] != Slot():
                continue
            ids = (getattr(self.text, f"{name}_{part}_id") for part in ("token", "start", "end"))
            slots[name] = Slot(getattr(self.text, f"{name}_placeholder"), *ids)
        return {name: slot._replace(mark=f"<{name}>") if slot.mark is None else slot for name, slot in slots.items()}

    @cached_property
    def counted_from_bytes(self) -> tuple[str, ...]:
        """Modalities whose parts have a size that no header contains."""
        return tuple(name for name, modality in self.modalities.items() if not counts_from_header(modality))

    @cached_property
    def mark_tokens(self) -> dict[str, int]:
        """Modality -> token of its mark, if a fast tokenizer has one for it."""
        slots = {name: self.slots[name] for name, modality in self.modalities.items() if modality.places}
        marks = {name: slot for name, slot in slots.items() if self.text.whole and slot.mark}
        return {name: slot.token_id for name, slot in marks.items() if self.text.token_id(slot.mark) == slot.token_id}

    @cached_property
    def rules(self) -> Rules:
        """How conversations are read, and which words stand for media. Words of built-in modalities that are left out
        count too, so that a missing medium is noticed and its word is not taken for text.
        """
        names = dict.fromkeys((*BUILTINS, *self.modalities))
        words = {name: (self.modalities.get(name) or BUILTINS[name]).words for name in names}
        marks: dict[str, str] = {}
        for name in names:
            mark = self.slots[name].mark
            if mark and marks.setdefault(mark, name) != name:
                raise ValueError(f"the marks of {marks[mark]} and {name} are both {mark!r}")
        slots = {name: getattr(self.modalities.get(name), "placeholder", "") or mark for mark, name in marks.items()}
        if self.text.whole:  # texts are written for any model: accept "<image>" if this model's mark differs
            for name in slots:
                marks.setdefault(f"<{name}>", name)
        items = {word: name for name in BUILTINS for word in (name, *words[name])}
        claimed: dict[str, str] = {}
        for name in self.modalities:  # may claim a word of a built-in one that is left out
            for word in (name, *words[name]):
                if claimed.setdefault(word, name) != name:
                    raise ValueError(f"{claimed[word]} and {name} both claim items of type {word!r}")
                items[word] = name
        listed = frozenset(name for name, modality in self.modalities.items() if modality.listed)
        media_words = MediaWords(tuple(marks.items()), items, record_keys(names), slots, listed)
        return Rules(self.text.template, media_words, tuple(dict.fromkeys((*self.text.fields, *TEXT_FIELDS))))

    def describe(self) -> dict[str, Any]:
        """Return all that costs and values depend on, JSON-safe; compare two of these to name a difference.

        Raises TypeError for a field of a modality without a JSON form.
        """
        described: dict[str, Any] = {
            "rules_version": COUNTS,
            **{name: _described(name, modality) for name, modality in self._given.items()},
            "text": self.text.describe(),
            "limits": plain_fields(self.limits),
        }
        if self.record is not None:
            described["record"] = self.record.id
        return described | ({"keep": list(self.keep)} if self.keep else {})

    def fingerprint(self) -> str:
        """Return a hex string, the same for equal recipes in every process and on every machine."""
        return digest(self.describe())

    def count_fingerprint(self) -> str:
        """Return the `fingerprint` of what an index depends on: parameters that only change values are left out."""
        described = self.describe()
        for name, modality in self.modalities.items():
            if isinstance(parameters := described.get(name), Mapping):
                described[name] = _of_counts(modality, parameters)
        return digest(described)

    def size_fingerprint(self, name: str) -> str:
        """Return the `fingerprint` of what the sizes of a modality's parts depend on."""
        modality = self.modalities[name]
        return digest([name, _of_counts(modality, _described(name, modality) or {})])

    def text_fingerprint(self) -> str:
        """Return the `fingerprint` of what the counts of a text depend on: not of the sizes of media, and of no limit,
        because whether a counted text is used is decided later.
        """
        media = {
            name: [
                *(list(each) for each in (modality.fields, modality.words, self.slots[name], modality.embedded_in)),
                *(modality.placeholder, modality.places, modality.listed),
            ]
            for name, modality in self.modalities.items()
        }
        text = {name: value for name, value in self.text.describe().items() if name not in ("max_tokens", "overflow")}
        record = None if self.record is None else self.record.id
        return digest([media, text, record, *self.keep])  # a sample without a text is good if its words are kept


def _of_counts(modality: Modality, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a modality that change counts."""
    without = names_no_counts(type(modality))
    return {key: value for key, value in parameters.items() if key not in without}


def digest(value: object) -> str:
    """Return a digest of a JSON-safe value, 32 hex digits."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()


def _shown_fields(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={_shown(value)}" for name, value in values.items())


def _shown(value: Any) -> str:
    """Return a repr without fields that have their defaults; of an object with a long repr its class alone."""
    is_generated = is_dataclass(value) and hasattr(type(value).__repr__, "__wrapped__")  # not one of the user's own
    if not is_generated:
        text = repr(value)
        is_long = len(text) > _LONGEST_REPR and type(value).__module__ != "builtins"
        return f"<{type(value).__qualname__}>" if is_long else text
    given = {}
    for each in fields(value):
        default = each.default if each.default_factory is MISSING else each.default_factory()
        if each.init and each.repr and repr(getattr(value, each.name)) != repr(default):
            given[each.name] = getattr(value, each.name)
    return f"{type(value).__qualname__}({_shown_fields(given)})"


def _make(kind: type[Recipe], given: dict[str, Any]) -> Recipe:
    return kind(**given)


def _described(name: str, modality: Modality | None) -> dict[str, Any] | None:
    """Describe a built-in modality by its parameters, any other by its class too."""
    if modality is None:
        return None
    return modality.parameters() if type(modality) is BUILTINS.get(name) else modality.describe()


def plain_fields(limits: Limits) -> dict[str, Any]:
    return {name: plain(getattr(limits, name), name) for name in Limits.__dataclass_fields__}


def checked_recipe(recipe: Recipe | None) -> Recipe:
    """Return the recipe, or the default one for None. Raises TypeError for anything else."""
    if recipe is not None and not isinstance(recipe, Recipe):
        if hasattr(recipe, "apply_chat_template"):  # a processor or tokenizer: its repr has thousands of characters
            what = "tokenizer" if hasattr(recipe, "special_tokens_map") else "processor"
            kind = type(recipe).__name__
            raise TypeError(f"recipe must be an od.Recipe, got a {kind}: pass recipe=od.hf.recipe({what})")
        given = " ".join(repr(recipe).split())[:100]
        raise TypeError(
            f"recipe must be an od.Recipe, such as od.Recipe(text=...) or od.hf.recipe(processor), got {given}"
        )
    return recipe if recipe is not None else Recipe()


def _check_words(name: str, modality: Modality) -> None:
    """Check the names of a modality in members and texts, and its slot. Raises ValueError."""
    for kind in ("fields", "words"):
        names = getattr(modality, kind)
        if isinstance(names, str) or not all(isinstance(word, str) and word for word in names):
            raise ValueError(f"{kind} of {name} must be a tuple of names, got {names!r}")
    for field in modality.fields:
        if field.startswith("."):
            raise ValueError(f"a field of {name} must be called {field.lstrip('.')!r}, without its dot, got {field!r}")
    slot = modality.slot
    if not isinstance(slot.mark, str | None):
        raise ValueError(f"the mark of {name} must be a string or None, got {slot.mark!r}")
    for kind in ("token_id", "start_id", "end_id"):
        token = getattr(slot, kind)
        missing = token is None and kind != "token_id"
        if not missing and not (isinstance(token, int) and 0 <= token <= _INT32_MAX):
            raise ValueError(f"the {kind} of {name} must be an int in [0, {_INT32_MAX}], got {token!r}")


def _check_arrays(modalities: Mapping[str, Modality]) -> None:
    """Check the arrays of modalities: each must be valid, and have a unique name in a batch. Raises TypeError for a
    dtype that tensors do not have, otherwise ValueError.
    """
    owners = dict.fromkeys(_INPUTS, "every batch")
    for name, modality in modalities.items():
        specs = modality.arrays()
        for array, spec in specs.items():
            if not array.isidentifier() or array in _ATTRIBUTES or array in _COMPANIONS:
                raise ValueError(f"an array of {name} cannot be called {array!r}: batches use that name")
            if spec.per not in ("row", "part"):
                raise ValueError(f"{name}.{array} has per={spec.per!r}: it is 'row' or 'part'")
            if not all(isinstance(side, int) and side >= 1 for side in spec.row_shape):
                raise ValueError(f"{name}.{array} has rows of shape {spec.row_shape!r}: sides are ints of at least 1")
            if stored_dtype(spec.dtype).kind not in "biufc":
                raise TypeError(f"{name}.{array} has dtype {spec.dtype!r}: name one that tensors have")
        for suffix in (*specs, *_COMPANIONS):
            owner = owners.setdefault(f"{name}_{suffix}", name)
            if owner != name:
                raise ValueError(f"{owner} and {name} both have an input called {name}_{suffix}: rename one of them")


_DEPTH: Final = 1_000


def load_required(recipe: Recipe, *, decodes: bool = True) -> None:
    """Import everything that a recipe needs for reading, measuring and, unless not `decodes`, decoding. Repeated calls
    are cheap. Raises ValueError for a recursion limit below Python's default (nested JSON would look damaged),
    PackageError for a failed import or set-up, StorageError if the system cannot do it now, TypeError for wrong
    `required_modules`.
    """
    if (depth := sys.getrecursionlimit()) < _DEPTH:
        raise ValueError(f"sys.getrecursionlimit() is {depth}, below Python's default: sys.setrecursionlimit({_DEPTH})")
    _load(recipe.text, "the recipe's text", decodes)
    for name, modality in recipe.modalities.items():
        _load(modality, f"the recipe's {name}", decodes)


def load_for_scanning(recipe: Recipe) -> None:
    """`load_required` without what only decoding needs, and also the readers of headers of media that the recipe leaves
    out: facts of shards contain these too. A broken one of these is an error only when such a header is met.
    """
    load_required(recipe, decodes=False)
    load_built_in(decodes=False)


def load_built_in(*, decodes: bool = True) -> None:
    """Import the readers of images and audio, as far as that succeeds; decoding needs more. Raises StorageError."""
    for name, kind in BUILTINS.items():
        with contextlib.suppress(PackageError):
            _load(kind(), name, decodes)


def _load(user: TextPreprocessor | Modality, needed_by: str, decodes: bool) -> None:
    modules = user.required_modules()
    if not isinstance(modules, tuple | list) or not all(isinstance(name, str) for name in modules):
        raise TypeError(f"{type(user).__name__}.required_modules() must return a tuple of names, got {modules!r}")
    calls: list[tuple[Callable[[], object], str]] = [(partial(import_module, module), module) for module in modules]
    set_up = user._set_up_counting if isinstance(user, Modality) and not decodes else user.set_up_process
    for call, module in [*calls, (set_up, modules[0] if modules else "")]:
        attempt = partial(_attempt, call, needed_by, module.partition(".")[0])
        tried(f"what {needed_by} needs", "cannot be loaded", attempt)


def _attempt(call: Callable[[], object], needed_by: str, package: str) -> None:
    """Call it. An error of the system passes, to be tried again; any other is the package's, if one is known."""
    try:
        call()
    except Exception as error:
        if isinstance(error, (*NOT_DATA, OrchdataError)) or is_refusal(error):
            raise
        known = package if package != OWN else ""
        pass_broken_package(error, needed_by, known)
        if not package:  # a user's own `set_up_process`: its exception says what is wrong
            raise
        raise package_error(error, needed_by, known) from error
