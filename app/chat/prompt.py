"""messages and images -> the prompt of one Generate message."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, Final, Literal, ParamSpec, TypeVar

from app.chat.conversation import Conversation, Messages, texts
from app.chat.defaults import Checkpoint, Defaults, read_checkpoint
from app.chat.media import DecodePool, ImagePart, PlannedPicture, decode, plan
from app.chat.placeholders import Draft, expanded, placed, vision_ids
from app.chat.reasoning import ReasoningMarkers
from app.chat.shield import SHIELD
from app.chat.stream import AnswerPlan
from app.chat.template import ChatTemplate
from app.config import Limits
from app.tokens import FILE as TOKENIZER_FILE
from app.tokens import Tokenizer
from engine.errors import ModelError, RequestError
from engine.messages import Loaded, Picture

P = ParamSpec("P")
T = TypeVar("T")

WORKERS: Final = 2  # threads for templates and tokens: one that waits must not stop the other
COUNTED_CHARACTERS: Final = 1_000_000  # above, what cannot fit is not counted to the last token

_LIMITS: Final = Limits()
_NONE: Final[Mapping[str, Any]] = {}


class PromptTooLong(RequestError):
    """Prompt and answer do not fit the context (O62); names limit, prompt and image tokens."""

    code = "context_length_exceeded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What goes into a `Generate`, and what the answer's side has to know of it.

    Attributes:
        tokens: placeholders already repeated, one for each image row.
        image_tokens: how many of them are placeholders.
        max_tokens: bound on the answer: as asked, or what the context leaves.
        cut_to: the same number where `clamp` lowered what was asked, else None.
        decode_s: seconds that decoding and cutting the pictures took, waiting for a place included.
    """

    tokens: tuple[int, ...] = field(repr=False)
    pictures: tuple[Picture, ...] = field(default=(), repr=False)
    image_tokens: int = 0
    max_tokens: int
    cut_to: int | None = None
    decode_s: float = field(default=0.0, compare=False)
    starts_in_reasoning: bool = False


class Prompter:
    """Makes prompts for one checkpoint; template, tokens and pixels are off the event loop.

    Attributes:
        tokenizer: for `/tokenize`, `/detokenize` and the answers.
        defaults: sampling of a request that says nothing.
        end_ids: ids that end an answer, those of every file of the checkpoint.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        *,
        limits: Limits,
        decode_workers: int,
        clamp: bool,
    ) -> None:
        self.tokenizer = tokenizer
        self.defaults: Defaults = checkpoint.defaults
        self.end_ids = checkpoint.end_ids
        self._template = template
        self._reasoning = ReasoningMarkers.of(tokenizer.markers)
        self._limits = limits
        self._clamp = clamp
        self._threads = ThreadPoolExecutor(WORKERS, thread_name_prefix="prompt")
        self._decoding = DecodePool(decode_workers)

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        limits: Limits = _LIMITS,
        decode_workers: int = 1,
        clamp: bool = False,
        sampling_defaults: Literal["checkpoint", "openai"] = "checkpoint",
    ) -> Prompter:
        """Read tokenizer, template and configs of a checkpoint.

        Args:
            folder: in Hugging Face layout.
            limits: what one request may hold.
            decode_workers: pictures that are decoded at a time.
            clamp: cut a bound that does not fit instead of refusing it (O62).
            sampling_defaults: whose hold where a request says nothing (O29).

        Raises:
            ModelError: one line naming the file and the mend.
        """
        checkpoint = read_checkpoint(folder)
        if sampling_defaults == "openai":
            checkpoint = replace(checkpoint, defaults=Defaults())
        tokenizer = Tokenizer.open(folder, rows=checkpoint.rows)
        placeholder = checkpoint.image_token
        if placeholder is not None and placeholder not in tokenizer.markers.values():
            raise ModelError(
                f"{folder / TOKENIZER_FILE} has no added token with the id {placeholder}, which "
                "config.json names as image_token_id. Use the tokenizer of this checkpoint."
            )
        return cls(
            checkpoint,
            tokenizer,
            ChatTemplate.open(folder, markers=tokenizer.markers),
            limits=limits,
            decode_workers=decode_workers,
            clamp=clamp,
        )

    async def chat(
        self,
        messages: Messages,
        loaded: Loaded,
        *,
        template_kwargs: Mapping[str, Any] = _NONE,
        add_generation_prompt: bool = True,
        max_tokens: int | None = None,
        bound_name: str = "max_completion_tokens",
    ) -> Prompt:
        """The prompt of a chat. Length is checked before any picture is decoded (rule 31).

        Args:
            messages: as `schemas.messages.for_template` gives them.
            loaded: what the worker can do.
            template_kwargs: `chat_template_kwargs` of the request.
            add_generation_prompt: whether it ends where an answer begins.
            max_tokens: bound on the answer; None is the rest of the context.
            bound_name: the field that it came from.

        Raises:
            RequestError: codes of O8: template_error, context_length_exceeded, those of section 7.
            RequestFault: placeholders and pictures disagree, which is our fault (rules 34 and 35).
        """
        draft = await self._off_loop(
            self._draft,
            messages,
            loaded,
            template_kwargs,
            add_generation_prompt=add_generation_prompt,
        )
        bound, cut_to = self._room(draft, loaded, max_tokens, bound_name)
        began = monotonic()
        pictures = await decode(draft.planned, self._decoding) if draft.planned else []
        return Prompt(
            tokens=tuple(draft.tokens),
            pictures=placed(pictures, draft),
            image_tokens=draft.image_tokens,
            max_tokens=bound,
            cut_to=cut_to,
            decode_s=monotonic() - began,
            starts_in_reasoning=self._ends_in_reasoning(draft.tokens),
        )

    async def text(
        self,
        prompt: str | Sequence[int],
        loaded: Loaded,
        *,
        max_tokens: int | None = None,
        unasked: int | None = None,
        add_special_tokens: bool = True,
    ) -> Prompt:
        """A raw prompt (O88): markers in a text count as such, since the caller wrote the template.

        Args:
            prompt: the text, or its token ids.
            loaded: what the worker can do.
            max_tokens: bound on the answer that was asked for.
            unasked: bound where none was; less where the context leaves less (R71).
            add_special_tokens: whether the family's start token is put before a text.

        Raises:
            RequestError: an empty prompt, an image placeholder, an id outside the vocabulary, or
                context_length_exceeded.
        """
        tokens = await self.tokenize_text(prompt, loaded, add_special_tokens=add_special_tokens)
        if not tokens:
            raise RequestError(
                "prompt: it has no tokens, and this model has no start token. Send some text.",
                param="prompt",
            )
        draft = Draft(tokens=list(tokens), param="prompt")
        bound, cut_to = self._room(draft, loaded, max_tokens, "max_tokens")
        if max_tokens is None and unasked is not None:
            bound = min(bound, unasked)
        return Prompt(tokens=tokens, max_tokens=bound, cut_to=cut_to)

    async def tokenize(
        self,
        messages: Messages,
        loaded: Loaded,
        *,
        template_kwargs: Mapping[str, Any] = _NONE,
        add_generation_prompt: bool = True,
    ) -> tuple[int, ...]:
        """The ids that `chat` would give, of any length; pictures are planned, never decoded."""
        draft = await self._off_loop(
            self._draft,
            messages,
            loaded,
            template_kwargs,
            add_generation_prompt=add_generation_prompt,
        )
        return tuple(draft.tokens)

    async def tokenize_text(
        self, prompt: str | Sequence[int], loaded: Loaded, *, add_special_tokens: bool = True
    ) -> tuple[int, ...]:
        """The ids of a raw prompt, of any length. Raises `RequestError` as `text` does."""
        if isinstance(prompt, str):
            start = self.tokenizer.start_ids if add_special_tokens else ()
            self._check_least(len(prompt), loaded, param="prompt")
            tokens = (*start, *await self._off_loop(self.tokenizer.encode_marked, prompt))
        else:
            tokens = tuple(prompt)
        outside = next((id_ for id_ in tokens if not 0 <= id_ < loaded.vocab), None)
        if outside is not None:
            raise RequestError(
                f"prompt: token id {outside} is not in 0 to {loaded.vocab - 1}.", param="prompt"
            )
        if not vision_ids(loaded).isdisjoint(tokens):
            raise RequestError(
                "prompt: it has an image placeholder; pictures go to /v1/chat/completions.",
                param="prompt",
            )
        return tokens

    def answer_plan(
        self,
        prompt: Prompt,
        *,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        min_tokens: int = 0,
        split_reasoning: bool = True,
    ) -> AnswerPlan:
        """How the answer to a prompt is read; its `stop_ids` belong into the `Generate`.

        Args:
            prompt: of `chat` or `text`.
            stop: strings that end the answer.
            stop_token_ids: further ids that end it.
            ignore_eos: whether end ids are tokens as others are.
            min_tokens: until so many were generated nothing ends it.
            split_reasoning: False for a raw prompt, whose answer is all text.
        """
        return AnswerPlan(
            tokenizer=self.tokenizer,
            prompt_tokens=len(prompt.tokens),
            image_tokens=prompt.image_tokens,
            reasoning=self._reasoning if split_reasoning else None,
            starts_in_reasoning=prompt.starts_in_reasoning,
            stop=tuple(stop),
            end_ids=() if ignore_eos else self.end_ids,
            stop_token_ids=tuple(stop_token_ids),
            min_tokens=min_tokens,
        )

    def close(self) -> None:
        """Take no more work; what runs ends by itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._decoding.close()

    async def _off_loop(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, partial(work, *args, **kwargs))

    def _draft(
        self,
        messages: Messages,
        loaded: Loaded,
        settings: Mapping[str, Any],
        *,
        add_generation_prompt: bool,
    ) -> Draft:
        """All of a prompt but the pixels: planned pictures, tokens, and where each picture is."""
        characters = sum(map(len, texts(messages)))
        self._check_least(characters, loaded, param="messages")
        conversation = Conversation.of(messages, self._template.shield)
        planned = _planned(conversation.images, loaded, self._limits)
        self._check_least(
            characters,
            loaded,
            param="messages",
            image_tokens=sum(picture.tokens for picture in planned),
        )
        rendered = self._template.render(
            conversation.messages, add_generation_prompt=add_generation_prompt, settings=settings
        )
        marked = self.tokenizer.encode_marked(rendered, without=SHIELD)
        places = marked.count(loaded.image_token) if loaded.image_token is not None else 0
        if places < len(planned) and conversation.tool_images:
            raise RequestError(
                f"{conversation.tool_images[0]}: this model's template has no place for pictures "
                "in tool messages. Send it in a user message.",
                code="unsupported_modality",
                param=conversation.tool_images[0],
            )
        return expanded(marked, planned, loaded)

    def _check_least(
        self, characters: int, loaded: Loaded, *, param: str, image_tokens: int = 0
    ) -> None:
        """Refuse what cannot fit whatever its tokens are: counting 60 MB would take a minute.

        A character is a byte or more, and no token has more bytes than the longest.
        """
        least = characters // self.tokenizer.longest + image_tokens
        if characters > COUNTED_CHARACTERS and least > _limit(loaded):
            raise PromptTooLong(
                f"The prompt has {least} tokens or more, {image_tokens} of them of pictures, and "
                f"this model's context is {_limit(loaded)}. Send a shorter one.",
                param=param,
            )

    def _room(
        self, draft: Draft, loaded: Loaded, asked: int | None, bound_name: str
    ) -> tuple[int, int | None]:
        """The bound on the answer, and the same where it was lowered (O62)."""
        prompt, limit = len(draft.tokens), _limit(loaded)
        left = limit - prompt
        if left < 1:
            raise PromptTooLong(
                f"The prompt has {prompt} tokens, {draft.image_tokens} of them of pictures, and "
                f"this model's context is {limit}, an answer of one token included. Remove "
                f"{1 - left} tokens or more.",
                param=draft.param,
            )
        if asked is None or asked <= left:
            return left if asked is None else asked, None
        if self._clamp:
            return left, left
        raise PromptTooLong(
            f"{prompt} prompt tokens, {draft.image_tokens} of them of pictures, and "
            f"{bound_name}={asked} are {asked - left} more than this model's context of {limit}. "
            f"Use {bound_name}={left} or less, or a shorter prompt.",
            param=bound_name,
        )

    def _ends_in_reasoning(self, tokens: Sequence[int]) -> bool:
        return self._reasoning is not None and self._reasoning.open_at_end(tokens)


def _limit(loaded: Loaded) -> int:
    """Tokens of prompt and answer together: the context, or the whole pool where it is smaller."""
    return min(loaded.context, loaded.pool_tokens)


def _planned(parts: Sequence[ImagePart], loaded: Loaded, limits: Limits) -> list[PlannedPicture]:
    if not parts:
        return []
    if loaded.patches is None or loaded.image_token is None:
        if loaded.pictures_off:
            raise RequestError(
                f"{parts[0].param}: this server takes no pictures at the moment, because of how "
                "its model is placed. Leave the pictures out.",
                code="image_input_disabled",
                param=parts[0].param,
            )
        raise RequestError(
            f"{parts[0].param}: this model takes text only. Leave the pictures out.",
            code="unsupported_modality",
            param=parts[0].param,
        )
    return plan(parts, loaded.patches, limits)
