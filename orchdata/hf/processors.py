"""Processors of Hugging Face as text, and what runs from it: of images here, their classes, outputs and text of all.

processor --source_of--> JSON --running--> the same again, without a tokenizer, one a thread
"""

from __future__ import annotations

import inspect
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import import_module
from typing import Any, Final, Generic, TypeVar

import numpy as np
from PIL import Image

from orchdata.hf.image_rules import Outputs, Settings, ruled
from orchdata.loaders.modalities.image_decode import pass_order

Built = TypeVar("Built")


class OwnByThread(threading.local, Generic[Built]):
    """JSON -> what `build` makes of it, once a thread: not every class says that threads can share it."""

    def __init__(self, build: Callable[[Mapping[str, Any]], Built]) -> None:
        self._built = cache(lambda source: build(json.loads(source)))

    def __call__(self, source: str) -> Built:
        return self._built(source)


def path_of(value: Any) -> list[str]:
    """Module and name of its class. Raises ValueError where other processes could not import it by them."""
    kind = type(value)
    if getattr(import_module(kind.__module__), kind.__qualname__, None) is not kind:
        raise ValueError(
            f"{kind.__qualname__} cannot be imported from {kind.__module__}, as other processes do: define it in a file"
        )
    return [kind.__module__, kind.__qualname__]


def class_at(path: Sequence[str]) -> Any:
    module, name = path
    return getattr(import_module(module), name)


def merged_kwargs(processor: Any) -> dict[str, Any]:
    """What a processor calls its parts with, by default."""
    init_kwargs = getattr(getattr(processor, "tokenizer", None), "init_kwargs", {})
    merged: dict[str, Any] = processor._merge_kwargs(
        processor.valid_processor_kwargs, tokenizer_init_kwargs=init_kwargs
    )
    return merged


def id_of(tokenizer: Any, mark: str, *, is_added: bool = True) -> int:
    """The id of what stands for a feature. Raises ValueError unless it is one token, and an added one."""
    ids = tokenizer.encode(mark, add_special_tokens=False)
    if len(ids) != 1 or (is_added and mark not in tokenizer.get_added_vocab()):
        raise ValueError(f"{mark!r} must be one added token of {type(tokenizer).__name__}: add it as a special token")
    return int(ids[0])


def as_array(value: Any) -> np.ndarray[Any, Any]:
    """One output, as NumPy has it."""
    if hasattr(value, "detach"):
        return np.asarray(value.detach().cpu().numpy())
    return np.asarray(value)


def placeholder_of(processor: Any) -> str:
    """Return the text that a processor expects for an image; "" if it names none."""
    return str(getattr(processor, "image_placeholder_token", None) or getattr(processor, "image_token", None) or "")


def runs(text: str, mark: str) -> tuple[str | int, ...]:
    """Text with marks in it -> strings, and numbers of marks in a row."""
    pieces: list[str | int] = []
    for at, piece in enumerate(text.split(mark)):
        if at:
            if pieces and isinstance(pieces[-1], int):
                pieces[-1] += 1
            else:
                pieces.append(1)
        if piece:
            pieces.append(piece)
    return tuple(pieces)


def joined(pieces: Sequence[str | int], mark: str) -> str:
    """What `runs` has cut, as text again."""
    return "".join(piece if isinstance(piece, str) else mark * piece for piece in pieces)


_ITEMS: Final = "items by number"
# Parts of a processor that are not its settings; none of them changes images.
_PARTS = frozenset("tokenizer image_processor video_processor feature_extractor audio_tokenizer chat_template".split())


def source_of(processor: Any, image_processor: Any) -> str:
    """Return JSON of an image processor and of what its processor (None: there is none) says about images.

    Raises ValueError for classes that cannot be imported by name, TypeError for settings without a JSON form.
    """
    described = {"class": path_of(image_processor), "settings": json.loads(image_processor.to_json_string())}
    source: dict[str, Any] = {"image_processor": described, "call": {}, "processor": None, "nested": False}
    if getattr(image_processor, "backend", "pil") == "pil":
        source["resizes"] = pass_order()
    if processor is not None:
        if not hasattr(processor, "_process_images"):
            raise ValueError(f"{type(processor).__name__} is no processor of transformers 5.21 or later")
        merged = merged_kwargs(processor)
        source["call"] = {name: value for name, value in merged["images_kwargs"].items() if name != "return_tensors"}
        # Some pass on their own arguments, such as the number of tokens of an image.
        own = inspect.signature(processor._process_images).parameters.values()
        named = [each.name for each in own if each.kind is not inspect.Parameter.VAR_KEYWORD]
        source["call"] |= {name: merged[name] for name in named if name in merged and name not in source["call"]}
        attributes = {name: value for name, value in vars(processor).items() if name not in _PARTS}
        attributes = {name: getattr(value, "content", value) for name, value in attributes.items()}
        source["processor"] = {"class": path_of(processor)}
        # A mapping by numbers as a list of its items, marked: JSON would make them strings.
        source["processor"]["attributes"] = {
            name: {_ITEMS: [[key, each] for key, each in value.items()]}
            if isinstance(value, dict) and value and all(type(key) is int for key in value)
            else value
            for name, value in attributes.items()
            if _is_plain(value)
        }
        # Whether the image processor takes a list of each text's images.
        given: dict[str, Any] = {"images": [Image.new("RGB", (8, 8))], "text": [placeholder_of(processor)]}
        try:
            layout = processor.prepare_inputs_layout(**given)[0]
        except KeyError:  # of those that look there for what they are called with
            layout = processor.prepare_inputs_layout(**given, **merged)[0]
        source["nested"] = isinstance(layout[0], list | tuple)
    return json.dumps(source, sort_keys=True)


def _is_plain(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True


@dataclass(frozen=True)
class Running:
    """The processor that a source describes, rebuilt."""

    image_processor: Any
    processor: Any
    call: Mapping[str, Any]
    nested: bool

    def outputs(self, image: Any, copies: int = 1) -> tuple[Outputs, str | None]:
        """What becomes of one PIL image, RGB, and the text that stands for it; of several copies of it in one sample,
        where that makes a difference.
        """
        images = [[image] * copies] if self.nested or copies > 1 else [image]
        asked = {"return_tensors": "pt"}
        if isinstance(image, np.ndarray):  # whose axes it would guess, wrongly where an image is three pixels high
            asked["input_data_format"] = "channels_last"
        if self.processor is None:
            return dict(self.image_processor(images, **asked)), None
        arrays, texts = self.processor._process_images(images, **self.call, **asked)
        return dict(arrays), texts[0] if texts else None

    def text(self, outputs: Outputs) -> str | None:
        """The text that stands for an image of which these are the outputs, or their stand-ins."""
        if self.processor is None or getattr(self.processor, "image_token", None) is None:
            return None
        return str(self.processor.replace_image_token(outputs, image_idx=0, **self.call))

    @cached_property
    def settings(self) -> Settings:
        return Settings(self.image_processor, self.call)

    def ruled(self, width: int, height: int) -> tuple[Outputs, str | None]:
        """Return what `outputs` does, by the rule of the class. Raises as `image_rules.ruled`."""
        arrays = ruled(self.settings, width, height)
        return arrays, self.text(arrays)

    def measured(self, width: int, height: int) -> tuple[Outputs, str | None]:
        """Return what `outputs` gives for a grey image of this size."""
        return self.outputs(Image.new("RGB", (width, height), (99, 99, 99)))


def modules_of(source: str) -> tuple[str, ...]:
    """Modules that the classes of a source are imported from."""
    parsed = json.loads(source)
    return tuple(parsed[name]["class"][0] for name in ("image_processor", "processor") if parsed[name] is not None)


def _built(source: Mapping[str, Any]) -> Running:
    image_processor = class_at(source["image_processor"]["class"]).from_dict(source["image_processor"]["settings"])
    processor = None
    if source["processor"] is not None:
        # Without its constructor, which asks for a tokenizer that images do not need.
        kind = class_at(source["processor"]["class"])
        processor = kind.__new__(kind)
        attributes = {
            name: dict(value[_ITEMS]) if isinstance(value, dict) and value.keys() == {_ITEMS} else value
            for name, value in source["processor"]["attributes"].items()
        }
        vars(processor).update(attributes, image_processor=image_processor)
    return Running(image_processor, processor, source["call"], source["nested"])


running: Final = OwnByThread(_built)
"""What a source describes. Raises ImportError without transformers."""
