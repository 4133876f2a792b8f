"""A YAML file of a user's, read within bounds that are counted: bytes, values, levels, and what aliases stand for.

A name comes once in its mapping, and 1e-3 is a number as in JSON. Whatever the file holds, reading it takes time and
memory in proportion to its length.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import yaml
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError

from orchdata.loaders.storage.shared.files import read_given

MOST_BYTES: Final = 4 << 20
MOST_VALUES: Final = 50_000
MOST_LEVELS: Final = 32
_MOST_DIGITS: Final = 100
_NUMBERS: Final = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_EXPONENT: Final = re.compile(r"[-+]?(?:[0-9][0-9_]*\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+")


def read_yaml(path: str | Path) -> Any:
    """The content of a file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no regular file, no YAML, or beyond a bound; names the file.
    """
    data = read_given(path, MOST_BYTES)
    try:
        return _Loader(data.decode()).get_single_data()
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not readable as YAML: {error}") from error


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._levels = self._values = 0
        self._sizes: dict[int, int] = {}  # of each node that is complete: the values in it, aliases written out

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        mark, is_alias = self.peek_event().start_mark, self.check_event(yaml.AliasEvent)
        self._levels += 1
        self._values += 1
        if self._levels > MOST_LEVELS:
            raise ComposerError(None, None, f"it is nested deeper than {MOST_LEVELS} levels", mark)
        if self._values > MOST_VALUES:
            raise ComposerError(None, None, f"it holds more than {MOST_VALUES} values", mark)
        node = super().compose_node(parent, index)
        self._levels -= 1
        if not is_alias:
            self._sizes[id(node)] = 1 + sum(map(self._sizes.__getitem__, map(id, _inside(node))))
        elif id(node) not in self._sizes:
            raise ComposerError(None, None, "an alias stands for what it lies in", mark)
        if self._sizes[id(node)] > MOST_VALUES:
            raise ComposerError(None, None, f"it holds more than {MOST_VALUES} values, aliases written out", mark)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names: set[str] = set()
        for name, _ in node.value:
            if isinstance(name, yaml.ScalarNode):
                if name.value in names:
                    raise ConstructorError(None, None, f"{name.value!r:.80} comes twice", name.start_mark)
                names.add(name.value)
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        # The time that the conversion of digits takes grows with their square.
        if node.tag in _NUMBERS and isinstance(node, yaml.ScalarNode) and len(node.value) > _MOST_DIGITS:
            raise ConstructorError(None, None, f"a number has more than {_MOST_DIGITS} digits", node.start_mark)
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError, TypeError, OverflowError) as error:
            # What the parser's constructors raise over a value that does not fit its tag, as a 13th month.
            said = f"{node.value!r:.80} is no value of the tag {node.tag}: {error!r:.80}"
            raise ConstructorError(None, None, said, node.start_mark) from error


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+.0123456789"))


def _inside(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [each for pair in node.value for each in pair]
    return node.value if isinstance(node, yaml.SequenceNode) else []
