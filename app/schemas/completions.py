"""/v1/completions: request, response, chunk."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field, PlainValidator, ValidationInfo, WithJsonSchema

from app.schemas.generation import Bound, FieldContext, GenerationFields, check_together
from app.schemas.shared import Answer, Integer, OnlyFalse, Usage, only, problem, whole

DEFAULT_MAX_TOKENS: Final = 16  # as the hosted API
PROMPTS: Final = 64

Prompt = str | tuple[int, ...]
# Fields of the other endpoint that restrict an answer: none may seem to have been kept (O22).
OfChat = Annotated[Any, only(mend="it belongs to /v1/chat/completions")]


def _prompts(value: Any, info: ValidationInfo) -> tuple[Prompt, ...]:
    """A text, a list of texts, a list of token ids, or a list of lists of them (O88)."""
    vocab = info.context.vocab if isinstance(info.context, FieldContext) else 0
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise problem("invalid_type", "a prompt is a string or a list")
    if not value:
        raise problem("invalid_value", "the list is empty")
    value = [_whole_ids(item) if isinstance(item, list) else item for item in _whole_ids(value)]
    if _are_ids(value):
        return (_ids(value, vocab),)
    if len(value) > PROMPTS:
        raise problem("invalid_value", f"{len(value)} prompts; at most {PROMPTS} are taken")
    if all(isinstance(item, str) for item in value):
        return tuple(value)
    if all(isinstance(item, list) and item and _are_ids(item) for item in value):
        return tuple(_ids(item, vocab) for item in value)
    raise problem("invalid_type", "all prompts are strings, or all are lists of token ids")


def _whole_ids(value: list[Any]) -> list[Any]:
    """`300.0` is an integer (O21)."""
    if not any(isinstance(item, float) for item in value):
        return value
    return [whole(item) for item in value]


def _are_ids(value: list[Any]) -> bool:
    return all(isinstance(item, int) and not isinstance(item, bool) for item in value)


def _ids(value: list[int], vocab: int) -> tuple[int, ...]:
    for token in value:
        if not 0 <= token < vocab:
            raise problem("invalid_value", f"token id {token} is not in 0 to {vocab - 1}")
    return tuple(value)


def _suffix(value: str) -> str:
    if value:
        raise problem("unsupported_parameter", "this server does not fill in; leave it out")
    return value


class CompletionRequest(GenerationFields):
    """The body of a plain completion (O88)."""

    prompt: Annotated[
        tuple[Prompt, ...],
        PlainValidator(_prompts),
        WithJsonSchema(
            {
                "anyOf": [
                    {"type": "string"},
                    {"type": "array", "items": {"type": "string"}, "minItems": 1},
                    {"type": "array", "items": {"type": "integer"}, "minItems": 1},
                    {
                        "type": "array",
                        "items": {"type": "array", "items": {"type": "integer"}, "minItems": 1},
                        "minItems": 1,
                    },
                ]
            }
        ),
    ]
    max_tokens: Bound | None = None
    add_special_tokens: bool | None = None

    echo: OnlyFalse | None = None
    logprobs: Annotated[Integer, Field(ge=0, le=20), only(mend="leave it out")] | None = None
    best_of: Annotated[Integer, Field(ge=1), only(neutral=(1,), mend="use 1")] | None = None
    suffix: Annotated[str, AfterValidator(_suffix)] | None = None
    max_completion_tokens: Annotated[Any, only(mend="max_tokens is its name here")] = None
    tools: OfChat = None
    tool_choice: OfChat = None
    functions: OfChat = None
    function_call: OfChat = None
    top_logprobs: OfChat = None
    thinking_token_budget: OfChat = None

    @property
    def bound(self) -> int:
        """The bound on generated tokens of one choice."""
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens


def check_completion(request: CompletionRequest) -> None:
    """What no field shows alone.

    Raises:
        RequestError: names the field.
    """
    check_together(request, request.bound, "max_tokens")


class CompletionChoice(Answer):
    """One choice; index = prompt index x n + i."""

    index: int
    text: str
    logprobs: None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: str | int | None


class Completion(Answer):
    """The answer without streaming."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    service_tier: Literal["default"]
    choices: list[CompletionChoice]
    usage: Usage
    metadata: dict[str, str] = Field(default_factory=dict)


class CompletionChunk(Answer):
    """One event of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    service_tier: Literal["default"]
    choices: list[CompletionChoice]
    usage: Usage | None = None
