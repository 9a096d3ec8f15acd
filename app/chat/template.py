"""render the checkpoint's chat template in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from jinja2 import TemplateSyntaxError

from app.chat.sandbox import Sandbox
from app.chat.shield import SHIELD, Shield
from engine.errors import ModelError, RequestError

FILE: Final = "chat_template.jinja"
CONFIG: Final = "tokenizer_config.json"
MESSAGE_CHARACTERS: Final = 300  # of a template's own words in an error (O47)


class ChatTemplate:
    """One checkpoint's template: messages in, shielded text with its markers out."""

    def __init__(
        self,
        source: str,
        *,
        markers: Iterable[str],
        names: Mapping[str, str],
        where: str,
        sandbox: Sandbox | None = None,
    ) -> None:
        """Compile, and try one plain user turn. Raises `ModelError` naming `where`.

        Args:
            source: the Jinja text.
            markers: every added token's text, which message text must not contain as such.
            names: special tokens by name that the template may write, e.g. `bos_token`.
            where: the file, for messages.
            sandbox: where it runs; absent, one with the limits of O47.
        """
        self.shield = Shield(markers)
        self._names = dict(names)
        self._sandbox = sandbox or Sandbox()
        try:
            tree = self._sandbox.parse(source)
            self.shield.spell(tree)
            self._template = self._sandbox.compiled(tree)
            self._render([{"role": "user", "content": "Hello"}], {"add_generation_prompt": True})
        except TemplateSyntaxError as error:
            raise ModelError(
                f"{where}, line {error.lineno}: {_words(error)}. Mend the template or copy the "
                "checkpoint's own."
            ) from None
        except Exception as error:  # noqa: BLE001 - a template may raise whatever it likes
            raise ModelError(
                f"{where} fails on one plain user turn: {_words(error)}. Mend the template or copy "
                "the checkpoint's own."
            ) from None

    @classmethod
    def open(cls, folder: Path, *, markers: Iterable[str]) -> ChatTemplate:
        """Read `chat_template.jinja`, else the template in `tokenizer_config.json`."""
        config = _read_config(folder / CONFIG)
        path = folder / FILE
        try:
            source = path.read_text("utf-8")
        except FileNotFoundError:
            path, source = folder / CONFIG, _listed(config.get("chat_template"))
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} cannot be read: {_words(error)}.") from None
        if not source:
            raise ModelError(
                f"{folder / FILE} is missing and {CONFIG} has no chat_template. Copy the "
                f"checkpoint's {FILE} into this folder."
            )
        return cls(source, markers=markers, names=_special_names(config), where=str(path))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        settings: Mapping[str, Any],
    ) -> str:
        """The conversation as the model reads it, still shielded (`Tokenizer.encode_marked`).

        Takes up to 2 s, so it is no work for the event loop.

        Args:
            messages: with every text already shielded.
            add_generation_prompt: whether it ends where an answer begins.
            settings: `chat_template_kwargs` of the request, as they came.

        Raises:
            RequestError: `template_error` with the template's words when it refuses this, takes too
                long or makes too much (O47).
        """
        values = self.shield.settings(dict(settings))
        values["add_generation_prompt"] = add_generation_prompt
        try:
            return self._render(messages, values)
        except Exception as error:  # noqa: BLE001 - a template may raise whatever it likes
            raise RequestError(
                f"The chat template refused this conversation: {_words(error)}",
                code="template_error",
                param="messages",
            ) from None

    def _render(self, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any]) -> str:
        own = {"messages": messages, "tools": None, "documents": None}
        return self._sandbox.run(self._template, {**own, **self._names, **values})


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{path} cannot be read: {_words(error)}. Use the file of the checkpoint."
        ) from None
    return config if isinstance(config, dict) else {}


def _listed(template: Any) -> str:
    """The template of a config: a text, or a list of named ones of which `default` counts."""
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else ""


def _special_names(config: Mapping[str, Any]) -> dict[str, str]:
    names = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        token = config.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            names[name] = text
    return names


def _words(error: BaseException) -> str:
    words = " ".join(str(error).replace(SHIELD, "").split())
    return words[:MESSAGE_CHARACTERS] or type(error).__name__
