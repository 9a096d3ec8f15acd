"""messages -> what a template is given: every text shielded, every picture a bare part.

The pictures themselves are taken out, in their order; a template has no business with their data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.chat.media import ImagePart
from app.chat.shield import Shield

Messages = Sequence[Mapping[str, Any]]  # as `schemas.messages.for_template` gives them


@dataclass(slots=True)
class Conversation:
    """A conversation ready for its template.

    Attributes:
        messages: with every text shielded.
        images: the picture parts in their order.
        tool_images: `param` of those in tool messages, where not every template has a place.
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    images: list[ImagePart] = field(default_factory=list)
    tool_images: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, messages: Messages, shield: Shield) -> Conversation:
        """Shield and sort out. Raises `RequestError` for a text that is no valid Unicode."""
        conversation = cls()
        for index, message in enumerate(messages):
            before = len(conversation.images)
            conversation.messages.append(conversation._message(message, index, shield))
            if message["role"] == "tool":
                conversation.tool_images += [i.param for i in conversation.images[before:]]
        return conversation

    def _message(self, message: Mapping[str, Any], index: int, shield: Shield) -> dict[str, Any]:
        shielded: dict[str, Any] = {"role": message["role"]}
        content = message.get("content")
        if isinstance(content, list):
            shielded["content"] = [
                self._part(part, f"messages[{index}].content[{j}]", shield)
                for j, part in enumerate(content)
            ]
        else:
            shielded["content"] = shield.of(content or "")
        for key in ("name", "tool_call_id"):
            if message.get(key) is not None:
                shielded[key] = shield.of(message[key])
        thought = message.get("reasoning_content") or message.get("reasoning")
        if thought is not None:
            # under both names, since templates know one or the other (O46)
            shielded["reasoning_content"] = shielded["reasoning"] = shield.of(thought)
        if calls := message.get("tool_calls"):
            shielded["tool_calls"] = [_call(call, shield) for call in calls]
        return shielded

    def _part(self, part: Mapping[str, Any], param: str, shield: Shield) -> dict[str, Any]:
        if part["type"] == "text":
            return {"type": "text", "text": shield.of(part["text"])}
        url = part["image_url"]
        self.images.append(ImagePart(url["url"], url.get("detail"), param))
        return {"type": "image"}


def _call(call: Mapping[str, Any], shield: Shield) -> dict[str, Any]:
    function = call["function"]
    return {
        "id": shield.of(call["id"]),
        "type": "function",
        "function": {
            "name": shield.of(function["name"]),
            "arguments": shield.deep(function["arguments"]),
        },
    }


def texts(messages: Messages) -> Iterator[str]:
    """The texts that make up nearly all of a prompt."""
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            yield content
        elif content:
            yield from (part["text"] for part in content if part["type"] == "text")
