"""A user's YAML file. A name may occur once in its mapping, and 1e-3 is a number as in JSON.

Reading takes time and memory in proportion to the length: bytes and values, with aliases expanded, have limits.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import yaml
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError

from orchdata.loaders.storage.local import read_small

MOST_BYTES: Final = 4 << 20
MOST_VALUES: Final = 50_000
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
    # Of levels beyond Python's, and of the parser for a value that does not fit its tag, such as a 13th month.
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{path}: not readable as YAML: {error}") from error


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._begun = 0
        self._sizes: dict[int, int] = {}  # of each complete node: the values in it, with aliases expanded

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        self._begun += 1
        is_alias = self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index) if self._begun <= MOST_VALUES else None
        if node is not None and not is_alias:
            inner = [each for pair in node.value for each in pair] if isinstance(node, yaml.MappingNode) else node.value
            inner = [] if isinstance(node, yaml.ScalarNode) else inner
            self._sizes[id(node)] = 1 + sum(self._sizes[id(each)] for each in inner)
        # An alias within its own value has no size yet: it would never end.
        if self._sizes.get(id(node), MOST_VALUES + 1) > MOST_VALUES:
            raise ComposerError(None, None, f"it has more than {MOST_VALUES} values with aliases expanded")
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
        if node.tag in _NUMBERS and len(node.value) > _MOST_DIGITS:
            raise ConstructorError(None, None, f"a number has more than {_MOST_DIGITS} digits", node.start_mark)
        return super().construct_object(node, deep)


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+.0123456789"))
