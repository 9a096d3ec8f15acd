"""The fields that both generation endpoints share, honoured, ignored or refused (O21 to O26)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field, PlainValidator, ValidationInfo, WithJsonSchema

from app.config import Limits
from app.schemas.shared import (
    Integer,
    NoEffect,
    Number,
    OnlyFalse,
    OnlyTrue,
    Refused,
    Strict,
    Text512,
    only,
    problem,
)
from engine.errors import RequestError

STOP_CHARACTERS: Final = 256
STOP_IDS: Final = 64
CHOICES: Final = 8
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


@dataclass(frozen=True, slots=True)
class FieldContext:
    """What the fields are checked against: the operator's limits and the model's vocabulary."""

    limits: Limits
    vocab: int  # ids in [0, vocab) may be sent
    lenient_history: bool = False  # take tool results and calls that do not match (O44)


def _context(info: ValidationInfo) -> FieldContext:
    if not isinstance(info.context, FieldContext):
        raise TypeError("a request is parsed with a FieldContext")
    return info.context


def _stop(value: Any, info: ValidationInfo) -> tuple[str, ...] | None:
    """One text or a list of a few; an empty one would match everywhere (B-054)."""
    if value is None:
        return None
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, list) or not all(isinstance(text, str) for text in given):
        raise problem("invalid_type", "stop is a string or a list of strings")
    limit = _context(info).limits.stop_strings
    if len(given) > limit:
        raise problem("invalid_value", f"{len(given)} stop strings; at most {limit} are taken")
    if not all(1 <= len(text) <= STOP_CHARACTERS for text in given):
        raise problem("invalid_value", f"a stop string has 1 to {STOP_CHARACTERS} characters")
    return tuple(given)


def in_vocabulary(value: Any, info: ValidationInfo) -> Any:
    vocab = _context(info).vocab
    for token in value or ():
        if not 0 <= token < vocab:
            raise problem("invalid_value", f"token id {token} is not in 0 to {vocab - 1}")
    return value


def _bias(value: Any, info: ValidationInfo) -> Any:
    """Checked in full even though a bias is refused: a bad one is told as what it is (B-070)."""
    if value is None or value == {}:
        return value
    if not isinstance(value, dict):
        raise problem("invalid_type", "logit_bias is an object from token ids to numbers")
    vocab = _context(info).vocab
    for token, bias in value.items():
        if not token.isascii() or not token.isdigit() or int(token[:20]) >= vocab:
            raise problem("invalid_value", f"a key of logit_bias is a token id below {vocab}")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise problem("invalid_value", "a value of logit_bias is a number from -100 to 100")
    if len(value) > 1024:
        raise problem("invalid_value", f"{len(value)} entries; at most 1024 are taken")
    raise problem("unsupported_parameter", "this server does not support it; leave it out")


def _response_format(value: Any) -> Any:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise problem("invalid_type", "response_format is an object with a type")
    match value.get("type"):
        case "text":
            return value
        case "json_object" | "json_schema":
            raise problem(
                "unsupported_parameter", "this server answers with plain text only; use text"
            )
        case _:
            raise problem("invalid_value", "its type is text, json_object or json_schema")


def _request_id(value: str) -> str:
    if not _REQUEST_ID.fullmatch(value):
        raise problem("invalid_value", "1 to 128 of the characters A-Z a-z 0-9 . _ -")
    return value


def _metadata(value: dict[str, str]) -> dict[str, str]:
    if len(value) > 16 or any(len(k) > 64 or len(v) > 512 for k, v in value.items()):
        raise problem(
            "invalid_value", "at most 16 pairs, keys of up to 64 and values of up to 512 characters"
        )
    return value


Bound = Annotated[Integer, Field(ge=1)]
Penalty = Annotated[Number, Field(ge=-2, le=2), only(neutral=(0.0,), mend="use 0")]
TokenIds = Annotated[list[Integer], Field(max_length=STOP_IDS), AfterValidator(in_vocabulary)]
Stop = Annotated[
    tuple[str, ...] | None,
    PlainValidator(_stop),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1, "maxLength": STOP_CHARACTERS},
                {"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": 16},
                {"type": "null"},
            ]
        }
    ),
]


class StreamOptions(Strict):
    """What a stream carries beside the text (O83)."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationFields(Strict):
    """Fields of chat and plain completions alike.

    The order is: honoured; checked and without effect; refused unless they ask for nothing.
    """

    model: str
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    top_k: Annotated[Integer, Field(ge=-1)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    stop: Stop = None
    stop_token_ids: TokenIds | None = None
    min_tokens: Annotated[Integer, Field(ge=0)] | None = None
    ignore_eos: bool | None = None
    seed: Annotated[Integer, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    request_id: Annotated[str, AfterValidator(_request_id)] | None = None

    user: Annotated[Text512 | None, NoEffect()] = None
    safety_identifier: Annotated[Text512 | None, NoEffect()] = None
    prompt_cache_key: Annotated[Text512 | None, NoEffect()] = None
    prompt_cache_options: Annotated[dict[str, Any] | None, NoEffect()] = None
    prompt_cache_retention: Annotated[str | None, NoEffect()] = None
    metadata: Annotated[
        Annotated[dict[str, str], AfterValidator(_metadata)] | None, NoEffect(({},))
    ] = None
    store: Annotated[bool | None, NoEffect((False,))] = None
    service_tier: Annotated[
        Literal["auto", "default", "flex", "scale", "priority", "fast"] | None,
        NoEffect(("auto", "default")),
    ] = None
    priority: Annotated[Annotated[Integer, Field(ge=-100, le=100)] | None, NoEffect((0,))] = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None

    n: Annotated[
        Integer, Field(ge=1, le=CHOICES), only(neutral=(1,), mend="send one request for each")
    ] | (None) = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: (
        Annotated[Number, Field(gt=0, le=10), only(neutral=(1.0,), mend="use 1")] | None
    ) = None
    logit_bias: Annotated[
        Any,
        PlainValidator(_bias),
        WithJsonSchema(
            {"anyOf": [{"type": "object", "additionalProperties": False}, {"type": "null"}]}
        ),
    ] = None
    response_format: Annotated[
        Any,
        PlainValidator(_response_format),
        WithJsonSchema(
            {
                "anyOf": [
                    {"type": "object", "properties": {"type": {"const": "text"}}},
                    {"type": "null"},
                ]
            }
        ),
    ] = None
    include_stop_str_in_output: OnlyFalse | None = None
    skip_special_tokens: OnlyTrue | None = None
    return_token_ids: OnlyFalse | None = None
    bad_words: Annotated[list[str], only(neutral=([],), mend="leave it out")] | None = None
    allowed_token_ids: (
        Annotated[list[Integer], Field(min_length=1), only(mend="leave it out")] | None
    ) = None
    truncate_prompt_tokens: (
        Annotated[Integer, Field(ge=1), only(mend="shorten the prompt")] | None
    ) = None
    structured_outputs: Refused = None
    guided_json: Annotated[Any, only(mend="nor structured_outputs yet; leave it out")] = None
    guided_regex: Annotated[Any, only(mend="nor structured_outputs yet; leave it out")] = None
    guided_choice: Annotated[Any, only(mend="nor structured_outputs yet; leave it out")] = None
    guided_grammar: Annotated[Any, only(mend="nor structured_outputs yet; leave it out")] = None

    @property
    def streams(self) -> bool:
        return self.stream is True

    @property
    def stream_choices(self) -> StreamOptions:
        return self.stream_options or StreamOptions()


def check_together(request: GenerationFields, bound: int | None, bound_name: str) -> None:
    """Rules about two fields at once.

    Args:
        request: the fields.
        bound: the bound on generated tokens; None is the rest of the context.
        bound_name: the field that set it.

    Raises:
        RequestError: `invalid_value` with the field that is wrong beside the other.
    """
    if request.stream_options is not None and not request.streams:
        raise RequestError(
            "stream_options: it is only for streams; send stream: true with it.",
            param="stream_options",
        )
    if request.min_tokens and bound is not None and request.min_tokens > bound:
        raise RequestError(
            f"min_tokens: {request.min_tokens} is more than {bound_name}={bound}.",
            param="min_tokens",
        )
