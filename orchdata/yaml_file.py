"""A user's YAML file, read within limits on bytes, values (with aliases expanded) and levels.

A name may occur once in its mapping, and 1e-3 is a number as in JSON. Reading any file takes time and memory in
proportion to its length.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import yaml
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError

from orchdata.loaders.storage.atomic import read_small

MOST_BYTES: Final = 4 << 20
MOST_VALUES: Final = 50_000
MOST_LEVELS: Final = 32
_MOST_DIGITS: Final = 100
_NUMBERS: Final = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_EXPONENT: Final = re.compile(r"[-+]?(?:[0-9][0-9_]*\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+")


def read_yaml(path: str | Path) -> Any:
    """Return the content of a file. Raises FileNotFoundError, and ValueError, which names it, for what is not a regular
    file, not YAML, or beyond a limit.
    """
    data = read_small(path, MOST_BYTES)
    try:
        return _Loader(data.decode()).get_single_data()
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not readable as YAML: {error}") from error


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._levels = self._values = 0
        self._sizes: dict[int, int] = {}  # of each complete node: the values in it, with aliases expanded

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        mark, is_alias = self.peek_event().start_mark, self.check_event(yaml.AliasEvent)
        self._levels += 1
        self._values += 1
        if self._levels > MOST_LEVELS:
            raise ComposerError(None, None, f"it is nested deeper than {MOST_LEVELS} levels", mark)
        if self._values > MOST_VALUES:
            raise ComposerError(None, None, f"it has more than {MOST_VALUES} values", mark)
        node = super().compose_node(parent, index)
        self._levels -= 1
        if not is_alias:
            self._sizes[id(node)] = 1 + sum(map(self._sizes.__getitem__, map(id, _children(node))))
        elif id(node) not in self._sizes:
            raise ComposerError(None, None, "an alias refers to a value that contains it", mark)
        if self._sizes[id(node)] > MOST_VALUES:
            raise ComposerError(None, None, f"it has more than {MOST_VALUES} values with aliases expanded", mark)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names: set[str] = set()
        for name, _ in node.value:
            if isinstance(name, yaml.ScalarNode):
                if name.value in names:
                    raise ConstructorError(None, None, f"{name.value!r:.80} comes twice", name.start_mark)
                names.add(name.value)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        # Converting n digits takes time in proportion to n squared.
        if node.tag in _NUMBERS and isinstance(node, yaml.ScalarNode) and len(node.value) > _MOST_DIGITS:
            raise ConstructorError(None, None, f"a number has more than {_MOST_DIGITS} digits", node.start_mark)
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError, TypeError, OverflowError) as error:
            # The parser's constructors raise these for a value that does not fit its tag, such as a 13th month.
            message = f"{node.value!r:.80} is not a value of the tag {node.tag}: {error!r:.80}"
            raise ConstructorError(None, None, message, node.start_mark) from error


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+.0123456789"))


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [each for pair in node.value for each in pair]
    return node.value if isinstance(node, yaml.SequenceNode) else []
