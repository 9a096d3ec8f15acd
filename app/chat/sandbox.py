"""run a stranger's template: no way out of it, nothing changed, bounded time and size.

A template comes with a checkpoint, so it is somebody else's program. Jinja's immutable sandbox
closes the ways out; this adds the bounds (O47). Time is looked at in each turn of a loop and each
call of a macro, the only places where a template can go on for ever. Size is looked at wherever a
value can become much longer than what it is made of.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, Final, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import loopcontrols
from jinja2.filters import do_indent
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

TIME_LIMIT_S: Final = 2.0
SIZE_LIMIT: Final = 10_000_000  # characters of a text, items of a list, bytes of the output

_PADDING = frozenset({"center", "expandtabs", "ljust", "rjust", "zfill"})
_WIDE_FIELD = re.compile(r"\d{6}|\*|:[^}]*\{")  # `%999999999d`, `%*d`, `{:{}}`
_NOT_ASCII = re.compile(r"[^\x00-\x7f\ud800-\udfff]")
_INDENT_LIMIT = 64
_NO_FILTERS = ("batch", "center", "pprint", "random", "slice", "urlize", "wordwrap", "xmlattr")


class TemplateLimit(SecurityError):
    """The template ran too long or made something too large."""


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of chat templates: the usual names, the usual whitespace, and bounds.

    `trim_blocks` and `lstrip_blocks` are on; `tojson` writes as Python does, without escaping what
    is not ASCII; `raise_exception`, `strftime_now`, `break` and `continue` exist, as templates
    expect. One environment may render in several threads at a time.
    """

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, time_limit_s: float = TIME_LIMIT_S) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols], finalize=_bounded
        )
        self._clock = threading.local()
        self._time_limit_s = time_limit_s
        for name in _NO_FILTERS:
            del self.filters[name]
        del self.globals["lipsum"]
        self.filters |= {
            "format": _format,
            "indent": _indent,
            "join": _join,
            "replace": _replace,
            "string": lambda value: str(_bounded(value)),
            "tojson": tojson,
        }
        self.globals |= {"raise_exception": _refuse, "strftime_now": _now}

    def compiled(self, tree: nodes.Template) -> Template:
        """A parsed template, ready to run within the bounds; changes the tree."""
        _Bounds(self).visit(tree)
        return Template.from_code(self, self.compile(tree), self.make_globals(None))

    def run(self, template: Template, values: Mapping[str, Any]) -> str:
        """The output. Raises `TemplateLimit`, or whatever the template raises."""
        self._clock.deadline = time.monotonic() + self._time_limit_s
        output = template.render(values)
        if len(output) * 4 > SIZE_LIMIT:
            _check(len(output.encode("utf-8", "replace")))
        return output

    def tick(self) -> str:
        """Called by each turn of a loop and each macro; empty, so that it can stand as output."""
        if time.monotonic() > self._clock.deadline:
            raise TemplateLimit(f"The template ran longer than {self._time_limit_s:g} s.")
        return ""

    def concat(self, parts: Iterable[str]) -> str:
        """Join output; every macro, block and the whole come through here."""
        gathered: list[str] = []
        size = 0
        for part in parts:
            size += len(part)
            _check(size)
            gathered.append(part)
        return "".join(gathered)

    def tilde(self, *parts: Any) -> str:
        """What `a ~ b` means."""
        return self.concat(str(_bounded(part)) for part in parts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """`+`, `*`, `**` and `%`, refused when the result would be too large."""
        if operator == "+":
            _check(_length(left) + _length(right))
        elif operator == "*":
            _check(_times(left, right))
        elif operator == "**":
            _check(_power_bits(left, right))
        elif isinstance(left, str):
            _check_format(left, right if isinstance(right, tuple) else (right,))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Every call of a template; methods of a text that can blow it up are measured first."""
        text = getattr(__obj, "__self__", None)
        if isinstance(text, str):
            name = __obj.__name__
            if name in _PADDING:
                _check(max([0, *(arg for arg in args if isinstance(arg, int))]))
            elif name == "replace":
                _check_replace(text, *args)
            elif name == "join":
                return _join(args[0], text)
            elif name == "translate":
                raise SecurityError("A template may not use str.translate.")
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format` of the sandbox, refused when a field is too wide."""
        inner = super().wrap_str_format(value)
        if inner is None:
            return None
        text = value.__self__

        def measured(*args: Any, **kwargs: Any) -> str:
            _check_format(text, (*args, *kwargs.values()))
            return inner(*args, **kwargs)

        return measured


class _Bounds(NodeTransformer):
    """Write the looks at the clock, and the bounded `~`, into a parsed template."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._ticking(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._ticking(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._ticking(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._call("tilde", node.nodes, node.lineno)

    def _ticking(self, node: nodes.For | nodes.Macro | nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.Output([self._call("tick", [], node.lineno)], lineno=node.lineno))
        return node

    def _call(self, name: str, arguments: list[nodes.Expr], line: int) -> nodes.Call:
        call = nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None)
        return call.set_lineno(line).set_environment(self._sandbox)  # type: ignore[return-value]


def tojson(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - templates pass it by either way
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002 - as above
) -> str:
    """JSON as templates expect it: ", " and ": ", keys in order, nothing escaped for HTML.

    With `ensure_ascii` everything but a lone surrogate is escaped: that one is no text but a mark
    of our own (`app/chat/shield.py`), which has to be found again.
    """
    _check_indent(indent or 0)
    text = json.dumps(
        _bounded(value),
        ensure_ascii=False,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
    return _NOT_ASCII.sub(lambda found: json.dumps(found[0])[1:-1], text) if ensure_ascii else text


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _format(text: str, *args: Any, **kwargs: Any) -> str:
    _check_format(text, (*args, *kwargs.values()))
    return str(text) % (kwargs or args)


def _replace(text: Any, old: str, new: str, count: int = -1) -> str:
    _check_replace(str(text), old, new)
    return str(text).replace(old, new, count)


def _join(value: Iterable[Any], d: str = "", attribute: str | None = None) -> str:
    if attribute is not None:
        value = (item[attribute] for item in value)
    gathered: list[str] = []
    size = 0
    for item in value:
        gathered.append(str(_bounded(item)))
        size += len(gathered[-1]) + len(d)
        _check(size)
    return d.join(gathered)


def _indent(text: str, width: int | str = 4, *args: Any, **kwargs: Any) -> str:
    _check_indent(width if isinstance(width, int) else len(width))
    return do_indent(text, width, *args, **kwargs)


def _check_indent(width: int) -> None:
    if width > _INDENT_LIMIT:
        raise TemplateLimit(f"The template indents by {width}; the limit is {_INDENT_LIMIT}.")


def _check(size: int) -> None:
    if size > SIZE_LIMIT:
        raise TemplateLimit(f"The template makes something larger than {SIZE_LIMIT:,}.")


def _check_replace(text: str, old: Any = "", new: Any = "", *_count: Any) -> None:
    if isinstance(old, str) and isinstance(new, str) and len(new) > len(old):
        found = text.count(old)
        _check(len(text) + found * (len(new) - len(old)))


def _check_format(text: str, values: Iterable[Any]) -> None:
    if _WIDE_FIELD.search(text):
        raise TemplateLimit("The template formats with a field that is too wide.")
    fields = text.count("%") + text.count("{")
    _check(len(text) + fields * max((_weight(value) for value in values), default=0))


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


def _times(left: Any, right: Any) -> int:
    if isinstance(left, int) and isinstance(right, int):
        return (left.bit_length() + right.bit_length()) // 8
    if isinstance(right, int):
        return _length(left) * right
    return _length(right) * left if isinstance(left, int) else 0


def _power_bits(base: Any, exponent: Any) -> int:
    if isinstance(base, int) and isinstance(exponent, int) and exponent > 0:
        return base.bit_length() * exponent
    return 0


def _bounded(value: Any) -> Any:
    """The value itself. Raises `TemplateLimit` when writing it out would be too long."""
    if type(value) is not str:
        _check(_weight(value))
    return value


def _weight(value: Any) -> int:
    """At most how long a value is when written out; stops counting beyond the limit."""
    weight = 0
    stack = [value]
    while stack and weight <= SIZE_LIMIT:
        item = stack.pop()
        weight += 8  # quotes, commas
        if isinstance(item, str):
            weight += len(item)
        elif isinstance(item, Mapping):
            weight += 64  # and a bound on how long this takes for a value that holds itself often
            stack += item
            stack += item.values()
        elif isinstance(item, list | tuple):
            weight += 64
            stack += item
    return weight
