"""A model's own chat template, as a value: rendered as transformers does, without transformers.

    messages --render--> text, and the spans of it that `{% generation %}` marks

Compiled templates are cached by source; several threads may use them at the same time. The work of rendering is
counted, so that a chat with too much work fails, and fails on every machine.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, Final, NamedTuple

from orchdata.loaders.errors import DecodeError, pass_trouble

ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function", "observation")
TRAINED_ROLE: Final = "assistant"
REASONING: Final = ("reasoning_content", "thinking", "reasoning")
"""Names of a turn's reasoning. A template gets it under all of these names, as in transformers."""

_GENERATION: Final = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_MESSAGE_WORK: Final = 256
"""Work of a template for one turn, or tool, in addition to writing its text, in characters."""
_CHECKED_CHARACTERS: Final = 1 << 20
"""A longer rendering is counted before it ends."""
_MOST_ITERATIONS: Final = 1 << 26
"""Of all loops of a template together, in one rendering."""
_MESSAGE_CHARACTERS: Final = 400
_MOST_WORK: Final = 1 << 31
"""Characters that may be rendered or searched for one chat."""
_RENDERED_WITH: Final = ("messages", "tools", "documents", "add_generation_prompt")
_TELLS_TIME: Final = "strftime_now"

Message = dict[str, Any]
Spans = list[tuple[int, int]]


class TooMuchWork(DecodeError):
    """A chat that takes more work than is allowed."""


@dataclass
class Work:
    """Counts the work for one chat."""

    most: int = _MOST_WORK
    done: int = 0

    def add(self, characters: int) -> None:
        """Count characters that are rendered or searched. Raises TooMuchWork."""
        self.done += characters
        self.check(0)

    def check(self, more: int) -> None:
        """Raise TooMuchWork if `more` further characters would be too many."""
        if self.done + more > self.most:
            raise TooMuchWork(
                f"more than {self.most} characters are rendered or searched to find the chat's text and which of it "
                "has loss: split the chat, or leave it out (less work is needed with a chat template that marks the "
                "text with loss by {% generation %})"
            )


class Inputs(NamedTuple):
    """Inputs of a template in addition to the turns: JSON values, None if a sample has none."""

    tools: list[Any] | None = None
    documents: list[Any] | None = None
    variables: Mapping[str, Any] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class JinjaTemplate:
    """A chat template in jinja, with everything its rendering depends on. Created by `ChatTemplate.from_jinja`."""

    source: str
    tool_source: str | None = None  # the text of another template for samples with tools
    variables: str = "{}"  # further variables of the template, besides turns, tools and documents, as JSON
    date: str | None = None  # the current date for the template
    ignore_keys: tuple[str, ...] = ()  # keys that may be lost
    roles: tuple[str, ...] = ROLES  # that turns may have
    # Whether the tokenizer's special tokens go around a rendering that does not begin with `bos_token`. transformers
    # adds them in a processor's `apply_chat_template`, but not in a tokenizer's.
    add_special_tokens: bool = False
    # Whether a prompt and its completion, as strings, are rendered as a question and its answer; else as plain text.
    pairs: bool = False

    def knows(self, role: str) -> bool:
        return role in self.roles

    def carries_loss(self, role: str) -> bool:
        return role == TRAINED_ROLE

    def adds_special_tokens(self, text: str) -> bool:
        """Whether the tokenizer's special tokens go around a rendering."""
        bos = _variables(self.variables).get("bos_token")
        return self.add_special_tokens and not (bos and text.startswith(bos))

    @property
    def eos_token(self) -> str:
        """The end token that the template knows; "" for none."""
        return str(_variables(self.variables).get("eos_token") or "")

    def marks_loss(self, inputs: Inputs) -> bool:
        """Whether the template marks what carries loss."""
        return _GENERATION.search(self._source(inputs)) is not None

    def render(
        self, messages: Sequence[Message], inputs: Inputs, *, prompt: bool = False, work: Work | None = None
    ) -> tuple[str, Spans]:
        """Return the text, and its spans that `{% generation %}` marks. Raises DecodeError.

        `prompt` ends it with the text before an answer. `work` is None for a chat that is rendered once.
        """
        work = work or Work()
        work.add(_MESSAGE_WORK * (len(messages) + len(inputs.tools or ()) + len(inputs.documents or ())))
        known: Mapping[str, Any] = _variables(self.variables)
        seen = {**known, **inputs.variables} if inputs.variables else known
        try:
            template, tracker = _compiled(self._source(inputs), self.date)
            given = dict(  # raises if a sample's own variables have one of these names
                messages=[_with_reasoning(message) for message in messages],
                tools=inputs.tools,
                documents=inputs.documents,
                add_generation_prompt=prompt,
                **seen,
            )
            with tracker:
                blocks, written = tracker.blocks, 0
                # Not `generate`: it raises exceptions again in frames that reference each other, so that all of a chat
                # stays in memory until a garbage collection if the template rejects it.
                for block in template.root_render_func(template.new_context(given)):
                    blocks.append(block)
                    written += len(block)
                    if written > _CHECKED_CHARACTERS:
                        work.check(written)
                work.add(written)
                return "".join(blocks), tracker.spans
        except DecodeError:
            raise
        except Exception as error:  # any exception of a template is a failure of the sample
            pass_trouble(error)
            said = str(error)[:_MESSAGE_CHARACTERS]  # a template may quote the sample, and all of it
            raise DecodeError(f"the chat template refuses it: {type(error).__name__}: {said}") from error

    def rendered(
        self, messages: Sequence[Message], inputs: Inputs, *, prompt: bool = False, work: Work | None = None
    ) -> tuple[str, Spans] | None:
        """`render`, but None if the template rejects the chat. Raises TooMuchWork."""
        try:
            return self.render(messages, inputs, prompt=prompt, work=work)
        except TooMuchWork:
            raise
        except DecodeError:
            return None

    def start(self) -> None:
        """Compile it in this process. Raises ImportError without jinja."""
        for source in filter(None, (self.source, self.tool_source)):
            _compiled(source, self.date)

    def _source(self, inputs: Inputs) -> str:
        return self.source if inputs.tools is None or self.tool_source is None else self.tool_source


def jinja_template(
    source: Any,
    variables: Mapping[str, Any],
    ignore_keys: tuple[str, ...],
    roles: tuple[str, ...],
    add_special_tokens: bool | None,
    date: str | None,
) -> JinjaTemplate:
    """See `ChatTemplate.from_jinja`."""
    text, tool_text = _sources(source)
    taken = next((name for name in _RENDERED_WITH if name in variables), None)
    if taken is not None:
        raise ValueError(f"a chat template has {taken!r} from each sample: it cannot be one of its variables")
    # Variables are those of the source and the arguments, as JSON.
    inner = getattr(source, "tokenizer", source)
    seen = {**getattr(inner, "special_tokens_map", {}), **variables}
    try:
        as_json = json.dumps(seen, sort_keys=True, ensure_ascii=False, allow_nan=False)
        if json.loads(as_json) != seen:
            raise TypeError("they do not survive a round trip through JSON")
    except (TypeError, ValueError) as error:
        raise TypeError(f"variables of a chat template must be JSON values: {error}") from None
    # The date is fixed now, so that later renderings give the same text.
    tells_time = any(_TELLS_TIME in each for each in (text, tool_text or ""))
    if date is not None:
        datetime.fromisoformat(date)
    template = JinjaTemplate(
        source=text,
        tool_source=tool_text,
        variables=as_json,
        date=(date or datetime.now().astimezone().date().isoformat()) if tells_time else None,
        ignore_keys=ignore_keys,
        roles=tuple(dict.fromkeys((*ROLES, *roles))),
        add_special_tokens=inner is not source if add_special_tokens is None else add_special_tokens,
    )
    for each in filter(None, (text, tool_text)):
        try:
            _compiled(each, template.date)
        except Exception as error:
            pass_trouble(error)
            raise ValueError(f"no chat template: {error}") from error
    return template


def _sources(source: Any) -> tuple[str, str | None]:
    """Return (template, template for samples with tools), as transformers chooses among several."""
    text = source
    if not isinstance(source, str | Mapping):
        text = getattr(source, "chat_template", None) or getattr(
            getattr(source, "tokenizer", None), "chat_template", None
        )
    if isinstance(text, str):
        return text, None
    if isinstance(text, Mapping) and "default" in text:
        return str(text["default"]), text.get("tool_use")
    reason = f"none is called 'default' of {sorted(text)}" if isinstance(text, Mapping) else "it has none"
    raise ValueError(f"no chat template in {type(source).__name__}: {reason}; give the text of one")


def _with_reasoning(message: Message) -> Message:
    for key in REASONING:
        reasoning = message.get(key)
        if reasoning is not None:
            return {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


@lru_cache(maxsize=64)
def _variables(as_json: str) -> dict[str, Any]:
    variables: dict[str, Any] = json.loads(as_json)
    return variables


class _Tracker(threading.local):
    """What one thread has rendered so far, and which spans of it are generated."""

    def __enter__(self) -> None:
        self.blocks: list[str] = []
        self.spans: Spans = []
        self._measured = self._length = self._iterations = 0

    def __exit__(self, *_error: object) -> None:
        pass

    def generated(self, text: str) -> str:
        self._length += sum(map(len, self.blocks[self._measured :]))
        self._measured = len(self.blocks)
        self.spans.append((self._length, self._length + len(text)))
        return text

    def looped(self, items: Any) -> Any:
        """Return the items of a loop. Raises TooMuchWork if all loops together have too many."""
        if not hasattr(items, "__len__"):
            return self._counted(items)
        self._count(1 + len(items))
        return items

    def _counted(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self._count(1)
            yield item

    def _count(self, iterations: int) -> None:
        self._iterations += iterations
        if self._iterations > _MOST_ITERATIONS:
            raise TooMuchWork(
                f"the loops of the chat template run more than {_MOST_ITERATIONS} times: split the chat, or leave "
                "it out"
            )


class _Dict:
    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


@lru_cache(maxsize=64)
def _compiled(source: str, date: str | None) -> tuple[Any, _Tracker]:
    """Compile a template in the environment of transformers' `render_jinja_template`."""
    import jinja2
    import jinja2.ext
    import jinja2.sandbox

    tracker = _Tracker()

    # `{% generation %}` records the span of its body.
    class Generation(jinja2.ext.Extension):
        tags = {"generation"}  # noqa: RUF012 - jinja defines it so

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_generated")
            return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _generated(self, caller: Any) -> str:
            return tracker.generated(caller())

        def _looped(self, items: Any) -> Any:
            return tracker.looped(items)

    class Namespace(jinja2.utils.Namespace):
        """Without names that reach into Python."""

        def __init__(*args: Any, **kwargs: Any) -> None:
            self, *given = args
            values = dict(*given, **kwargs)
            for name in values:
                refuse_hidden(name)
            jinja2.utils.Namespace.__init__(self, values)

        def __setitem__(self, name: str, value: Any) -> None:
            refuse_hidden(name)
            super().__setitem__(name, value)

    def refuse_hidden(name: object) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}: it begins with an underscore")

    def to_json(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    def strftime_now(form: str) -> str:
        return datetime.fromisoformat(date or "").strftime(form)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    environment.globals |= {"dict": _Dict(), "namespace": Namespace}
    # Wrap the items of every loop, to count its iterations.
    tree, counter = environment.parse(source), environment.extensions[Generation.identifier]
    loops: Iterator[Any] = tree.find_all(jinja2.nodes.For)
    for loop in loops:
        loop.iter = counter.call_method("_looped", [loop.iter], lineno=loop.lineno)
    return environment.from_string(tree), tracker
