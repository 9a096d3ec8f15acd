"""A stranger's template gets no way out, no change, no time and no memory beyond the limits."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
from jinja2 import TemplateError
from jinja2.exceptions import SecurityError

from app.chat.sandbox import Sandbox, TemplateLimit


def render(source: str, sandbox: Sandbox | None = None, **values: Any) -> str:
    sandbox = sandbox or Sandbox(time_limit_s=0.2)
    return sandbox.run(sandbox.compiled(sandbox.parse(source)), values)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ tick.__func__ }}{{ self.__init__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{{ messages[0].pop('role') }}",
    ],
)
def test_there_is_no_way_out_and_nothing_is_changed(source: str) -> None:
    """O47, B-134."""
    messages = [{"role": "user", "content": "Hi"}]

    with pytest.raises((SecurityError, TemplateError)):
        render(source, messages=messages)

    assert messages == [{"role": "user", "content": "Hi"}]


THREE = "{% for a in r %}{% for b in r %}{% for c in r %}{% endfor %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        "{% set r = range(100000) %}" + THREE,
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(40) }}",
    ],
)
def test_a_template_that_goes_on_is_ended(source: str) -> None:
    """O47: 2 s; shorter here."""
    with pytest.raises(TemplateLimit, match=r"longer than 0\.2 s"):
        render(source)


GROW = "{%% set n = namespace(x='aa') %%}{%% for i in range(60) %%}%s{%% endfor %%}{{ n.x }}"


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 1000000000 }}",
        "{{ 1000000000 * 'x' }}",
        "{{ [0] * 1000000000 }}",
        "{{ 10 ** (10 ** 10) }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '%*d' % (999999999, 1) }}",
        "{{ '%999999999d'|format(1) }}",
        "{{ '{:999999999}'.format(1) }}",
        "{{ '{:{}}'.format(1, 999999999) }}",
        "{{ 'x'.ljust(1000000000) }}",
        "{{ ('x' * 1000000).replace('x', 'y' * 1000000) }}",
        "{{ ('x' * 1000000)|replace('x', 'y' * 1000000) }}",
        "{{ (['x' * 1000000] * 1000)|join }}",
        "{{ ''.join(['x' * 1000000] * 1000) }}",
        "{{ 'x'|indent(1000000000, true) }}",
        "{{ [1]|tojson(indent=1000000000) }}",
        "{% for i in range(2000) %}{{ 'x' * 10000 }}{% endfor %}",
        GROW % "{% set n.x = n.x ~ n.x %}",
        GROW % "{% set n.x = n.x + n.x %}",
        GROW % "{% set n.x = [n.x, n.x] %}",
        GROW % "{% set y %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = y %}",
    ],
)
def test_a_template_that_grows_is_ended(source: str) -> None:
    """O47: 10 MB, and no more memory than a few times that on the way."""
    tracemalloc.start()
    try:
        with pytest.raises(TemplateLimit):
            render(source, Sandbox(time_limit_s=5))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 80_000_000


def test_output_is_counted_in_bytes() -> None:
    assert len(render("{{ x }}", x="a" * 9_000_000)) == 9_000_000
    with pytest.raises(TemplateLimit):
        render("{{ x }}", x="\u20ac" * 4_000_000)


def test_a_recursion_without_end_is_an_error_like_others() -> None:
    with pytest.raises(RecursionError):
        render("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}")


def test_what_templates_expect_is_there() -> None:
    """Whitespace as `trim_blocks` and `lstrip_blocks` leave it; JSON as Python writes it."""
    source = (
        "  {% if true %}\n"
        "{{ x|tojson }}\n"
        "  {% endif %}\n"
        "{{ 'a' ~ 1 }} {{ '%s-%s' % ('a', 1) }} {{ '{}'.format(3) }} {{ [1, 2]|join(', ') }} "
        "{{ ','.join(['x', 'y']) }} {{ 'aXb'|replace('X', '-') }} {{ 2 ** 8 }} {{ [1] + [2] }}"
        "{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %} {{ i }}{% endfor %}"
    )

    assert render(source, x={"b": "é<", "a": [1, None]}) == (
        '{"b": "é<", "a": [1, null]}\na1 a-1 3 1, 2 x,y a-b 256 [1, 2] 0 1 2'
    )


def test_json_in_ascii_escapes_what_python_escapes() -> None:
    assert render("{{ x|tojson(ensure_ascii=true) }}", x='"é\U0001f60a\\') == (
        '"\\"\\u00e9\\ud83d\\ude0a\\\\"'
    )


def test_a_template_says_what_it_refuses() -> None:
    with pytest.raises(TemplateError, match="no tools here"):
        render("{{ raise_exception('no tools here') }}")
