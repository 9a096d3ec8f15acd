"""Messages of a chat: roles, content parts, tool calls and their results, checked (O38 to O46).

`for_template` gives them back in the one form that templates are given: the content is a text or
a list of text and picture parts, in the order and at the places of the request, so that an index
in a later error is the client's index.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Discriminator, Field, PlainValidator, Tag, WithJsonSchema
from pydantic.json_schema import SkipJsonSchema

from app.errors import shown
from app.jsontext import parse_object
from app.schemas.shared import Strict, only, problem
from engine.errors import RequestError

Detail = Literal["auto", "low", "high", "original"]
_OTHER_MEDIA: Final = {"input_audio", "file", "input_file", "video_url", "input_video", "video"}


class TextPart(Strict):
    """A piece of text; `input_text` is the same under another name."""

    type: Literal["text", "input_text"]
    text: str


class RefusalPart(Strict):
    """An earlier refusal, given to the template as text."""

    type: Literal["refusal"]
    refusal: str


def _short_form(value: Any) -> Any:
    return {"url": value} if isinstance(value, str) else value


class ImageUrl(Strict):
    """Where the picture is (a data URL), and how finely it is looked at (O48, O55)."""

    url: str
    detail: Detail | None = None


class ImagePart(Strict):
    """A picture; the short form gives the URL itself (O48)."""

    type: Literal["image_url", "input_image"]
    image_url: Annotated[
        ImageUrl,
        BeforeValidator(_short_form, json_schema_input_type=ImageUrl | str),
    ]
    detail: Detail | None = None  # `input_image` carries it here


def _known_part(value: Any) -> Any:
    if not isinstance(value, Mapping):
        raise problem("invalid_type", "a content part is an object with a type")
    kind = value.get("type")
    if isinstance(kind, str) and kind in _OTHER_MEDIA:
        raise problem("unsupported_modality", f"this model does not take parts of type {kind}")
    if not isinstance(kind, str) or kind not in _PART_TAGS:
        raise problem("invalid_value", "the type of a part is text or image_url")
    return value


def _text_only(value: Any) -> Any:
    checked = _known_part(value)
    if _PART_TAGS[checked["type"]] == "~image":
        raise problem(
            "unsupported_modality", "a picture belongs into a user or tool message, not here"
        )
    return checked


_PART_TAGS: Final = {
    "text": "~text",
    "input_text": "~text",
    "refusal": "~refusal",
    "image_url": "~image",
    "input_image": "~image",
}


def _part_tag(value: Any) -> str | None:
    return _PART_TAGS.get(value["type"]) if isinstance(value, Mapping) else None


def _content_tag(value: Any) -> str:
    return "~parts" if isinstance(value, list) else "~string"


_Text = Annotated[TextPart, Tag("~text")]
_Refusal = Annotated[RefusalPart, Tag("~refusal")]
_Image = Annotated[ImagePart, Tag("~image")]
AnyPart = Annotated[
    Annotated[_Text | _Refusal | _Image, Discriminator(_part_tag)], BeforeValidator(_known_part)
]
PlainPart = Annotated[
    Annotated[_Text | _Refusal, Discriminator(_part_tag)], BeforeValidator(_text_only)
]
AnyContent = Annotated[
    Annotated[str, Tag("~string")]
    | Annotated[Annotated[list[AnyPart], Field(min_length=1)], Tag("~parts")],
    Discriminator(_content_tag),
]
PlainContent = Annotated[
    Annotated[str, Tag("~string")]
    | Annotated[Annotated[list[PlainPart], Field(min_length=1)], Tag("~parts")],
    Discriminator(_content_tag),
]
Name = Annotated[str, Field(max_length=64)]


def _arguments(value: Any) -> dict[str, Any]:
    """A JSON object, as text or as it is; `""` counts as none (O45)."""
    if isinstance(value, dict):
        return value
    if value == "":
        return {}
    try:
        if isinstance(value, str):
            return parse_object(value.encode())
    except RequestError:
        pass
    raise problem("invalid_tool_call", "the arguments are no JSON object")


class CalledFunction(Strict):
    """The function that was called."""

    name: str
    arguments: Annotated[
        dict[str, Any],
        PlainValidator(_arguments),
        WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}]}),
    ]


class ToolCall(Strict):
    """A call that the assistant made earlier."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class SystemMessage(Strict):
    """An instruction; `developer` is the same under another name (O38)."""

    role: Literal["system", "developer"]
    content: PlainContent
    name: Name | None = None


class UserMessage(Strict):
    """What the user says and shows."""

    role: Literal["user"]
    content: AnyContent
    name: Name | None = None


class AssistantMessage(Strict):
    """An earlier answer, with its calls; without calls it needs content (O39)."""

    role: Literal["assistant"]
    content: PlainContent | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None
    function_call: Annotated[Any, only(mend="send tool_calls instead")] = None
    name: Name | None = None


class ToolMessage(Strict):
    """The result of a call."""

    role: Literal["tool"]
    content: AnyContent
    tool_call_id: str
    name: Name | None = None


_ROLE_TAGS: Final = {
    "system": "~system",
    "developer": "~system",
    "user": "~user",
    "assistant": "~assistant",
    "tool": "~tool",
}


def _known_role(value: Any) -> Any:
    if not isinstance(value, Mapping):
        raise problem("invalid_type", "a message is an object with a role")
    return value


def _role_tag(value: Any) -> str:
    role = value.get("role")  # whatever is no role goes to `OtherMessage`, which refuses it
    return _ROLE_TAGS.get(role, "~other") if isinstance(role, str) else "~other"


def _refuse_role(value: Any) -> str:
    if value == "function":
        raise problem("invalid_value", "the role function is not taken; use tool")
    kind = "invalid_value" if isinstance(value, str) else "invalid_type"
    raise problem(kind, "a role is system, developer, user, assistant or tool")


class OtherMessage(Strict):
    """A message whose role is not one of ours: always refused, at the role itself."""

    role: Annotated[str, BeforeValidator(_refuse_role)]


Message = Annotated[
    Annotated[
        Annotated[SystemMessage, Tag("~system")]
        | Annotated[UserMessage, Tag("~user")]
        | Annotated[AssistantMessage, Tag("~assistant")]
        | Annotated[ToolMessage, Tag("~tool")]
        | Annotated[SkipJsonSchema[OtherMessage], Tag("~other")],
        Discriminator(_role_tag),
    ],
    BeforeValidator(_known_role),
]


def check_history(messages: Sequence[Any], *, lenient: bool = False) -> None:
    """Contents and calls fit together over the whole conversation (O39, O44).

    Args:
        messages: checked one by one before.
        lenient: take results and calls that do not match; the template shows them as they are.

    Raises:
        RequestError: `invalid_tool_call` for a result without its call, a second result, or a
            call without a result; `invalid_type` for an assistant message that says nothing.
    """
    asked_at, open_ids, known_ids = 0, set[str](), set[str]()
    for index, message in enumerate(messages):
        match message:
            case ToolMessage() if not lenient:
                _check_result(index, message.tool_call_id, open_ids, known_ids)
                open_ids.discard(message.tool_call_id)
            case UserMessage() | AssistantMessage():
                if open_ids and not lenient:
                    raise _call_error(asked_at, f"the call {_first(open_ids)} has no result")
        if isinstance(message, AssistantMessage):
            if message.tool_calls:
                known_ids = {call.id for call in message.tool_calls}
                asked_at, open_ids = index, set(known_ids)
            elif message.content is None and not _refusal_of(message):
                raise RequestError(
                    f"messages[{index}].content: an assistant message without tool_calls needs "
                    "content.",
                    code="invalid_type",
                    param=f"messages[{index}].content",
                )


def for_template(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """The messages as plain objects in the one form that templates are given."""
    return [_plain(message) for message in messages]


def _check_result(index: int, call: str, open_ids: set[str], known_ids: set[str]) -> None:
    if call in open_ids:
        return
    if call in known_ids:
        raise _call_error(index, "this call has a result already")
    raise _call_error(index, "tool_call_id names no call of the assistant message before it")


def _call_error(index: int, why: str) -> RequestError:
    place = f"messages[{index}]"
    return RequestError(f"{place}: {why}.", code="invalid_tool_call", param=place)


def _first(ids: set[str]) -> str:
    return shown(min(ids))


def _plain(message: Any) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": _plain_content(message.content)}
    if message.name is not None:
        plain["name"] = message.name
    if isinstance(message, ToolMessage):
        plain["tool_call_id"] = message.tool_call_id
    if isinstance(message, AssistantMessage):
        if message.content is None:
            plain["content"] = _refusal_of(message)
        thought = message.reasoning_content or message.reasoning
        if thought is not None:
            plain["reasoning_content"] = plain["reasoning"] = thought
        if message.tool_calls:
            plain["tool_calls"] = [_plain_call(call) for call in message.tool_calls]
    return plain


def _refusal_of(message: AssistantMessage) -> str:
    refusal = (message.model_extra or {}).get("refusal")
    return refusal if isinstance(refusal, str) else ""


def _plain_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": call.function.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _plain_content(content: Any) -> Any:
    if content is None or isinstance(content, str):
        return content or ""
    return [_plain_part(part) for part in content]


def _plain_part(part: TextPart | RefusalPart | ImagePart) -> dict[str, Any]:
    match part:
        case TextPart():
            return {"type": "text", "text": part.text}
        case RefusalPart():
            return {"type": "text", "text": part.refusal}
        case ImagePart():
            url: dict[str, Any] = {"url": part.image_url.url}
            detail = part.image_url.detail or part.detail
            if detail is not None:
                url["detail"] = detail
            return {"type": "image_url", "image_url": url}
