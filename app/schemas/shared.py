"""What the schemas share: strict values, the way from a bad body to its error, usage, errors.

Strict means (O21): null is absent for every optional field, nothing is coerced, and only `16.0`
counts as an integer beside integers. A union of shapes is told apart by tags that start with `~`;
they never show in a `param`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from app.errors import STATUS, FieldErrors, shown
from engine.errors import RequestError

Model = TypeVar("Model", bound="Strict")


class Strict(BaseModel):
    """A body or a part of one, as it came: no coercion; unknown fields are kept aside (O22)."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


class Answer(BaseModel):
    """A part of an answer; these models describe answers in the OpenAPI document."""

    model_config = ConfigDict(extra="forbid", defer_build=True)


def whole(value: Any) -> Any:
    """`16.0` is an integer; `1.5`, `"16"` and `true` stay what they are and are refused."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


Integer = Annotated[int, BeforeValidator(whole)]
Number = float  # strict: an integer is fine, a boolean or a text is not


@dataclass(frozen=True, slots=True)
class NoEffect:
    """Marks a field that is checked and then has no effect here: listed in `x-ignored-params`.

    Args:
        neutral: values that ask for nothing, so that there is nothing to list.
    """

    neutral: tuple[Any, ...] = ()


def problem(code: str, message: str) -> PydanticCustomError:
    """A field error with a code of O8; the place is added by `parsed`."""
    return PydanticCustomError(code, "{message}", {"message": message})


def only(*, mend: str, neutral: tuple[Any, ...] = ()) -> AfterValidator:
    """Refuse every value but those that mean "as if absent": the part is not built (O22).

    Args:
        mend: what the client can do instead, as the end of a sentence.
        neutral: values that ask for nothing.
    """

    def check(value: Any) -> Any:
        if value is None or value in neutral:
            return value
        raise problem("unsupported_parameter", f"this server does not support it; {mend}")

    return AfterValidator(check)


Refused = Annotated[Any, only(mend="leave it out")]
OnlyTrue = Annotated[bool, only(neutral=(True,), mend="use true")]
OnlyFalse = Annotated[bool, only(neutral=(False,), mend="use false")]


def parsed(model: type[Model], body: Mapping[str, Any], context: Any = None) -> Model:
    """The body as a record.

    Raises:
        FieldErrors: names each wrong place (O27); the first decides `param` and `code`.
    """
    try:
        return model.model_validate(body, context=context)
    except ValidationError as error:
        details = error.errors(include_url=False)
        raise FieldErrors([_request_error(detail) for detail in details]) from None


def ignored_names(request: Strict) -> list[str]:
    """Fields of this body that had no effect: unknown ones and known ones (O22), as sent."""
    names = [
        name
        for name, field in type(request).model_fields.items()
        for mark in field.metadata
        if isinstance(mark, NoEffect)
        and (value := getattr(request, name)) is not None
        and value not in mark.neutral
    ]
    extra = request.model_extra or {}
    return names + [name for name, value in extra.items() if value is not None]


def _request_error(detail: ErrorDetails) -> RequestError:
    kind, place = detail["type"], param_of(detail["loc"])
    where = place or "the body"
    if kind == "missing":
        return RequestError(
            f"{where}: this field is required.", code="missing_required_parameter", param=place
        )
    if kind in STATUS:
        return RequestError(f"{where}: {detail['msg']}.", code=kind, param=place)
    code = "invalid_type" if _is_wrong_type(kind, detail) else "invalid_value"
    what = _TYPE_MESSAGE.get(kind) or detail["msg"][:1].lower() + detail["msg"][1:]
    given = "" if kind in _COUNTED else f", not {shown(detail['input'])}"
    return RequestError(f"{where}: {what}{given}.", code=code, param=place)


_TYPE_MESSAGE: Final[Mapping[str, str]] = {
    "model_type": "input should be an object",
    "model_attributes_type": "input should be an object",
    "dict_type": "input should be an object",
}


_COUNTED: Final = {"too_short", "too_long"}  # their messages tell the count


def _is_wrong_type(kind: str, detail: ErrorDetails) -> bool:
    if kind == "literal_error":
        return not isinstance(detail["input"], str)
    return kind.endswith("_type") or kind == "int_from_float"


def param_of(place: tuple[int | str, ...]) -> str | None:
    """`messages[2].content[0].image_url.url`; the tags of unions are left out."""
    path = ""
    for step in place:
        if isinstance(step, int):
            path += f"[{step}]"
        elif not step.startswith("~"):
            path += f".{step}" if path else step
    return path or None


class ErrorDetail(Answer):
    """The error itself; `code` is a string, never a number (O5)."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Answer):
    """The body of every answer that is not 2xx, the health paths excepted (O5)."""

    error: ErrorDetail


class PromptDetails(Answer):
    """Parts of the prompt; image and text tokens add up to `prompt_tokens` (O36)."""

    cached_tokens: int
    image_tokens: int
    text_tokens: int
    audio_tokens: int


class CompletionDetails(Answer):
    """Parts of the answer; reasoning counts with its end marker (O36)."""

    reasoning_tokens: int
    audio_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(Answer):
    """Tokens of one request (O36)."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


Text512 = Annotated[str, Field(max_length=512)]
