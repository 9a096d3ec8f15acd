"""/tokenize and /detokenize: requests and answers (O91)."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator

from app.schemas.chat import message_count
from app.schemas.generation import FieldContext, in_vocabulary
from app.schemas.messages import Message, check_history
from app.schemas.shared import Answer, Integer, OnlyFalse, Refused, Strict, only
from engine.errors import RequestError


class TokenizeRequest(Strict):
    """A raw prompt or a chat, one of them."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], BeforeValidator(message_count)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: OnlyFalse | None = None
    tools: Refused = None
    chat_template_kwargs: (
        Annotated[dict[str, Any], only(neutral=({},), mend="leave it out")] | None
    ) = None


class DetokenizeRequest(Strict):
    """Token ids of the vocabulary."""

    model: str | None = None
    tokens: Annotated[list[Integer], AfterValidator(in_vocabulary)]


def check_tokenize(request: TokenizeRequest, context: FieldContext) -> None:
    """One of prompt and messages, and a history that fits together.

    Args:
        request: checked field by field before.
        context: what it was checked against.

    Raises:
        RequestError: names the field.
    """
    if request.prompt is None and request.messages is None:
        raise RequestError(
            "prompt: send prompt or messages.", code="missing_required_parameter", param="prompt"
        )
    if request.prompt is not None and request.messages is not None:
        raise RequestError("messages: send prompt or messages, not both.", param="messages")
    check_history(request.messages or [], lenient=context.lenient_history)


class Tokenized(Answer):
    """What a prompt costs."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Answer):
    """The text of the ids, special tokens by name."""

    prompt: str
