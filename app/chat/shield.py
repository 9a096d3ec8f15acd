"""user text told apart from the template's markers: shielded before rendering, bare after it.

A template joins its own markers and what people typed into one text. To find the markers again,
and only those, message text goes into the template with one character added, the shield, in two
kinds of places:

    behind every character that a marker begins with      a</think>   ->   a<S/Sthink>
    before its first character that is not blank           think>      ->   Sthink>

The first breaks a marker that lies in the text or begins in it, also where two texts are joined;
the second one that the template begins and the text would complete. Blanks at the ends stay at the
ends, so `strip` works as ever. What the template compares text with (`'</think>' in text`,
`text.split('</think>')`) is spelled the same way, so its own logic sees what it would have seen.
In the end the shield is taken out of everything between the markers.

The shield is a lone surrogate: no JSON text can hold one (O13), so it collides with nothing, nobody
can send it, and taking it out loses nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

from jinja2 import nodes
from jinja2.visitor import NodeVisitor

from engine.errors import RequestError

SHIELD: Final = "\udc80"

# Methods of text whose arguments are looked for in it, and not added to it.
_COMPARING: Final = frozenset(
    {"count", "endswith", "find", "index", "lstrip", "partition", "removeprefix", "removesuffix"}
    | {"replace", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "split", "startswith"}
    | {"strip"}
)
_SURROGATE: Final = re.compile(r"[\ud800-\udfff]")


class Shield:
    """Where the shield goes for one checkpoint's markers."""

    def __init__(self, markers: Iterable[str]) -> None:
        markers = [marker for marker in markers if marker]
        self._first = sorted({marker[0] for marker in markers})
        # Such a character ends no marker, so the shield behind it is guard enough, and `startswith`
        # of a template still matches.
        self._guarded = frozenset(self._first) - {marker[-1] for marker in markers}

    def of(self, text: str) -> str:
        """Message text, shielded. Raises `RequestError` when it is no valid Unicode text."""
        shielded = self.inside(text)
        blanks = len(text) - len(text.lstrip())
        if blanks < len(text) and text[blanks] not in self._guarded:
            return shielded[:blanks] + SHIELD + shielded[blanks:]
        return shielded

    def inside(self, text: str) -> str:
        """Text shielded in the first kind of places only, so that short words still compare."""
        if not text.isascii() and _SURROGATE.search(text):
            raise RequestError("A text holds a lone surrogate. Send valid Unicode text.")
        for first in self._first:
            text = text.replace(first, first + SHIELD)
        return text

    def deep(self, value: Any) -> Any:
        """JSON whose texts and keys are message text."""
        match value:
            case str():
                return self.of(value)
            case list():
                return [self.deep(item) for item in value]
            case dict():
                return {self.of(key): self.deep(item) for key, item in value.items()}
        return value

    def settings(self, value: Any) -> Any:
        """JSON that a template compares rather than shows: shielded inside only, keys left."""
        match value:
            case str():
                return self.inside(value)
            case list():
                return [self.settings(item) for item in value]
            case dict():
                return {key: self.settings(item) for key, item in value.items()}
        return value

    def spell(self, tree: nodes.Template) -> None:
        """Spell what a template compares text with as shielded text is spelled, in place."""
        _Spelling(self).visit(tree)


class _Spelling(NodeVisitor):
    def __init__(self, shield: Shield) -> None:
        self._shield = shield

    def visit_Compare(self, node: nodes.Compare) -> None:
        if node.ops[0].op in {"in", "notin"}:
            self._spell(node.expr)
        self.generic_visit(node)

    def visit_Call(self, node: nodes.Call) -> None:
        if isinstance(node.node, nodes.Getattr) and node.node.attr in _COMPARING:
            for argument in node.args:
                self._spell(argument)
        self.generic_visit(node)

    def visit_Filter(self, node: nodes.Filter) -> None:
        if node.name == "replace":
            for argument in node.args:
                self._spell(argument)
        self.generic_visit(node)

    def _spell(self, node: nodes.Node) -> None:
        if isinstance(node, nodes.Const) and isinstance(node.value, str):
            node.value = self._shield.inside(node.value)
        elif isinstance(node, nodes.Tuple | nodes.List):
            for item in node.items:
                self._spell(item)
