"""/v1/chat/completions: request, response, chunk."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, WithJsonSchema

from app.schemas.generation import Bound, FieldContext, GenerationFields, check_together
from app.schemas.messages import Message, check_history
from app.schemas.shared import (
    Answer,
    Integer,
    NoEffect,
    OnlyFalse,
    OnlyTrue,
    Refused,
    Strict,
    Usage,
    only,
    problem,
)
from engine.errors import RequestError


def message_count(value: Any, info: ValidationInfo) -> Any:
    """Counted before they are read: a thousand too many cost nothing."""
    if isinstance(value, list) and isinstance(info.context, FieldContext):
        limit = info.context.limits.messages
        if not 1 <= len(value) <= limit:
            raise problem("invalid_value", f"{len(value)} messages; 1 to {limit} are taken")
    return value


def _modalities(value: list[str]) -> list[str]:
    if value == ["text"]:
        return value
    if "audio" in value:
        raise problem("unsupported_parameter", "this server answers with text only")
    raise problem("invalid_value", 'use ["text"]')


def _tools(value: Any) -> Any:
    if value is None:
        return None
    if not isinstance(value, list):
        raise problem("invalid_type", "tools is a list")
    if not value:
        raise problem("invalid_value", "the list is empty; leave the field out")
    raise problem("unsupported_parameter", "this server does not support tools yet; leave it out")


def _tool_choice(value: Any) -> Any:
    if value in (None, "none", "auto"):  # there are no tools to choose from
        return value
    if value == "required" or (isinstance(value, dict) and isinstance(value.get("type"), str)):
        raise problem(
            "unsupported_parameter", "this server does not support tools yet; leave it out"
        )
    kind = "invalid_value" if isinstance(value, str | dict) else "invalid_type"
    raise problem(kind, "use none or leave it out")


class Prediction(Strict):
    """What the answer may look like; it never changes the text."""

    type: Literal["content"]
    content: str | list[Any]


class ChatRequest(GenerationFields):
    """The body of a chat request (O23, O25)."""

    messages: Annotated[
        list[Message],
        BeforeValidator(message_count),
        Field(json_schema_extra={"minItems": 1}),
    ]
    max_completion_tokens: Bound | None = None
    max_tokens: Bound | None = None

    prediction: Annotated[Prediction | None, NoEffect()] = None
    verbosity: Annotated[Literal["low", "medium", "high"] | None, NoEffect()] = None
    documents: Annotated[list[dict[str, Any]] | None, NoEffect()] = None

    logprobs: OnlyFalse | None = None
    top_logprobs: Annotated[Integer, Field(ge=0, le=20)] | None = None
    modalities: Annotated[list[str], AfterValidator(_modalities)] | None = None
    tools: Annotated[Any, AfterValidator(_tools), WithJsonSchema({"type": "null"})] = None
    tool_choice: Annotated[
        Any,
        AfterValidator(_tool_choice),
        WithJsonSchema({"enum": ["none", "auto", None]}),
    ] = None
    parallel_tool_calls: OnlyTrue | None = None
    reasoning_effort: (
        Annotated[
            Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"],
            only(mend="leave it out"),
        ]
        | None
    ) = None
    include_reasoning: OnlyTrue | None = None
    thinking_token_budget: Annotated[Integer, Field(ge=0), only(mend="leave it out")] | None = None
    chat_template_kwargs: (
        Annotated[dict[str, Any], only(neutral=({},), mend="leave it out")] | None
    ) = None
    chat_template: Annotated[str, only(mend="the model's own is used")] | None = None
    add_generation_prompt: OnlyTrue | None = None
    continue_final_message: OnlyFalse | None = None
    mm_processor_kwargs: (
        Annotated[dict[str, Any], only(neutral=({},), mend="leave it out")] | None
    ) = None
    audio: Refused = None
    web_search_options: Refused = None
    moderation: Refused = None
    functions: Annotated[Any, only(mend="tools is the name today, not supported yet")] = None
    function_call: Annotated[Any, only(mend="tools is the name today, not supported yet")] = None

    @property
    def bound(self) -> int | None:
        """The bound on generated tokens; None is the rest of the context."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def bound_name(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"


def check_chat(request: ChatRequest, context: FieldContext) -> None:
    """What no field shows alone: bounds that agree, and a history that fits together.

    Args:
        request: checked field by field before.
        context: what it was checked against.

    Raises:
        RequestError: names the field or the message.
    """
    new, old = request.max_completion_tokens, request.max_tokens
    if new is not None and old is not None and new != old:
        raise RequestError(
            f"max_tokens: {old} and max_completion_tokens={new} disagree; send one of them.",
            param="max_tokens",
        )
    if request.top_logprobs is not None:
        raise RequestError(
            "top_logprobs: it needs logprobs: true, which this server does not support yet.",
            param="top_logprobs",
        )
    check_together(request, request.bound, request.bound_name)
    check_history(request.messages, lenient=context.lenient_history)


class AnswerMessage(Answer):
    """What the assistant said.

    Its thinking stands under the names of the setting `reasoning-field`, where there is any (O34).
    """

    role: Literal["assistant"]
    content: str | None
    refusal: None
    annotations: list[Any]
    reasoning_content: str = ""
    reasoning: str = ""


class ChatChoice(Answer):
    """One choice of an answer."""

    index: int
    message: AnswerMessage
    logprobs: None
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None


class ChatCompletion(Answer):
    """The answer without streaming (section 5)."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    service_tier: Literal["default"]
    choices: list[ChatChoice]
    usage: Usage
    metadata: dict[str, str] = Field(default_factory=dict)


class ChatDelta(Answer):
    """What is new in a chunk; never a null field (O81)."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    reasoning_content: str = ""
    reasoning: str = ""


class ChatChunkChoice(Answer):
    """One choice of a chunk."""

    index: int
    delta: ChatDelta
    logprobs: None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: str | int | None = None


class ChatChunk(Answer):
    """One event of a stream (O81)."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    service_tier: Literal["default"]
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
