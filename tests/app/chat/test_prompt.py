"""Messages become the ids that the reference was given; what cannot fit is told in numbers."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from app.chat.defaults import Defaults, read_checkpoint
from app.chat.media import ImagePart, plan
from app.chat.placeholders import expanded
from app.chat.prompt import Prompter
from app.chat.sandbox import Sandbox
from app.chat.template import ChatTemplate
from app.config import Limits
from app.tokens import Tokenizer
from engine.errors import ModelError, RequestError, RequestFault
from engine.messages import Loaded
from tests.app.chat.glimmer import (
    FOLDER,
    IMAGE,
    IMAGE_END,
    IMAGE_START,
    LOADED,
    REFERENCE,
    SAMPLES,
    TEXT_ONLY,
    as_sent,
    picture,
    said,
    text,
)


@pytest.fixture
async def prompter() -> AsyncIterator[Prompter]:
    opened = Prompter.open(FOLDER)
    yield opened
    opened.close()


@contextmanager
def refused(code: str, param: str | None = None) -> Iterator[Callable[[], str]]:
    """The block is refused with this code and param; gives the message afterwards."""
    caught: list[RequestError] = []
    with pytest.raises(RequestError) as error:
        yield lambda: str(caught[0])
    caught.append(error.value)
    assert error.value.code == code
    assert param is None or error.value.param == param


def small(context: int, **changes: Any) -> Loaded:
    return msgspec.structs.replace(LOADED, context=context, **changes)


@pytest.mark.parametrize("case", REFERENCE, ids=lambda case: str(case["name"]))
async def test_prompt_ids_are_those_of_the_reference(
    prompter: Prompter, case: dict[str, Any]
) -> None:
    """Every prompt of `reference.json`, pictures included."""
    messages = [as_sent(message) for message in case["messages"]]

    prompt = await prompter.chat(messages, LOADED)

    assert list(prompt.tokens) == case["prompt_ids"]
    assert prompt.image_tokens == case["prompt_ids"].count(IMAGE)
    assert prompt.max_tokens == LOADED.context - case["prompt_tokens"]
    assert prompt.starts_in_reasoning
    assert await prompter.tokenize(messages, LOADED) == prompt.tokens  # O60, O91


async def test_prompt_tokens_of_every_sample(prompter: Prompter) -> None:
    """`prompt_tokens` and `image_tokens` of `samples.json`."""
    for sample in SAMPLES:
        for question in sample["questions"]:
            asked = [picture(f"samples/{sample['file']}"), text(question["question"])]
            prompt = await prompter.chat([said(asked)], LOADED)
            assert len(prompt.tokens) == question["prompt_tokens"], question
            assert prompt.image_tokens == sample["image_tokens"], sample["file"]


async def test_pictures_stay_where_they_were_put(prompter: Prompter) -> None:
    """B-039, B-044: text, picture, text, the same picture, text; each its own rows and place."""
    shape = picture("samples/1.png")
    parts = [text("First:"), shape, text("Second:"), shape, text("Which?")]

    prompt = await prompter.chat([said(parts)], LOADED)

    encode = prompter.tokenizer.encode
    frame = [IMAGE_START, *[IMAGE] * 81, IMAGE_END]
    tail = [*encode("First:"), *frame, *encode("Second:"), *frame, *encode("Which?"), 972, 985]
    assert list(prompt.tokens[-len(tail) :]) == tail
    first, second = prompt.pictures
    assert first.digest == second.digest
    for put in prompt.pictures:
        assert set(prompt.tokens[put.position : put.position + put.tokens]) == {IMAGE}
        assert prompt.tokens[put.position - 1] == IMAGE_START
        assert len(put.patches) == put.grid[1] * put.grid[2] * 3 * 8 * 8


async def test_a_typed_placeholder_beside_a_picture_binds_nothing(prompter: Prompter) -> None:
    """B-036, rule 34."""
    typed = "The tag <|begin_of_image|><|image|><|end_of_image|> appears in my code."

    prompt = await prompter.chat([said([text(typed), picture("samples/1.png")])], LOADED)

    assert prompt.tokens.count(IMAGE) == 81
    assert prompter.tokenizer.decode(prompter.tokenizer.encode(typed)) == typed
    assert len(prompt.pictures) == 1
    assert prompt.pictures[0].position == prompt.tokens.index(IMAGE)


async def test_a_typed_placeholder_without_a_picture_is_text(prompter: Prompter) -> None:
    """B-037; also where half of it is in one part and half in the next."""
    for content in ("<|image|>", [text("<|ima"), text("ge|>")]):
        prompt = await prompter.chat([said(content)], LOADED)
        assert IMAGE not in prompt.tokens
        assert prompt.image_tokens == 0


async def test_a_placeholder_that_a_model_wrote_comes_back_as_text(prompter: Prompter) -> None:
    """B-038: as history beside one picture."""
    history = [
        said([picture("samples/1.png"), text("What?")]),
        said("I see <|image|> here.", "assistant"),
        said("Again?"),
    ]

    assert (await prompter.chat(history, LOADED)).tokens.count(IMAGE) == 81


def test_a_prompt_with_other_places_than_pictures_is_our_fault() -> None:
    """Rules 34 and 35: 500, not 400."""
    shape = picture("samples/1.png")["image_url"]["url"]
    patches = LOADED.patches
    assert patches is not None
    one = plan([ImagePart(shape, None, "here")], patches, Limits())

    assert expanded([1, IMAGE, 2], one, LOADED).tokens == [1, *[IMAGE] * 81, 2]
    for planned in ([], one * 2):
        with pytest.raises(RequestFault, match=f"1 times the vision id {IMAGE}"):
            expanded([1, IMAGE, 2], planned, LOADED)


def test_a_vision_marker_without_its_picture_is_our_fault() -> None:
    """Rule 34 counts every vision id, not only the placeholder."""
    with pytest.raises(RequestFault, match=f"vision id {IMAGE_START}"):
        expanded([1, IMAGE_START, 2], [], LOADED)


async def test_a_template_that_drops_a_picture_is_our_fault() -> None:
    """Rule 35; in a tool message it is the template's to say (O56)."""
    tokenizer = Tokenizer.open(FOLDER, rows=1024)
    drops = "{% for m in messages %}{{ m.role }}{% endfor %}"
    template = ChatTemplate(drops, markers=tokenizer.markers, names={}, where="here")
    prompter = Prompter(
        read_checkpoint(FOLDER), tokenizer, template, limits=Limits(), decode_workers=1, clamp=False
    )
    shape = [picture("samples/1.png")]

    with pytest.raises(RequestFault):
        await prompter.chat([said(shape)], LOADED)
    with refused("unsupported_modality", "messages[1].content[0]"):
        await prompter.chat([said("x"), said(shape, "tool")], LOADED)
    prompter.close()


async def test_pictures_for_a_text_model_are_refused(prompter: Prompter) -> None:
    """O57, B-041, rule 36: by what the worker said."""
    with refused("unsupported_modality", "messages[0].content[1]") as message:
        await prompter.chat([said([text("x"), picture("samples/1.png")])], TEXT_ONLY)

    assert len(message()) < 200
    assert (await prompter.chat([said("<|image|>")], TEXT_ONLY)).tokens


async def test_too_many_pictures_are_refused_by_count(prompter: Prompter) -> None:
    """B-042: nothing of them is looked at."""
    shapes = [{"type": "image_url", "image_url": {"url": "data:nonsense"}}] * 17

    with refused("too_many_images", "messages[0].content[16]"):
        await prompter.chat([said(shapes)], LOADED)


async def test_a_picture_error_names_its_part(prompter: Prompter) -> None:
    """O27."""
    broken = {"type": "image_url", "image_url": {"url": "data:;base64,AAAA"}}

    with refused("unsupported_image_format", "messages[1].content[1]"):
        await prompter.chat([said("Hi"), said([text("x"), broken])], LOADED)


async def test_a_prompt_that_just_fits_has_one_token_of_answer(prompter: Prompter) -> None:
    """O62, B-067: 14 tokens."""
    prompt = await prompter.chat([said("Who are you?")], small(15), max_tokens=1)

    assert (len(prompt.tokens), prompt.max_tokens) == (14, 1)


async def test_a_prompt_that_cannot_fit_is_told_in_three_numbers(prompter: Prompter) -> None:
    """O62: limit, prompt tokens, image tokens among them."""
    for context in (14, 13, 1):
        with refused("context_length_exceeded", "messages") as message:
            await prompter.chat([said("Who are you?")], small(context))
        assert "has 14 tokens, 0 of them of pictures" in message()
        assert f"context is {context}," in message()


async def test_pictures_count_before_they_are_decoded(prompter: Prompter) -> None:
    """B-045, rules 31 and 37: the picture is cut off behind its header, and nobody noticed."""
    whole = (FOLDER / "samples" / "3.jpg").read_bytes()
    good = picture("samples/3.jpg")
    cut = picture("samples/3.jpg")
    keep = len("data:image/png;base64,") + len(whole) // 3
    cut["image_url"]["url"] = cut["image_url"]["url"][: keep - keep % 4 + 2]

    fits = await prompter.chat([said([good])], LOADED)
    with refused("context_length_exceeded") as message:
        await prompter.chat([said([cut])], small(len(fits.tokens)))
    with refused("invalid_image"):
        await prompter.chat([said([cut])], small(len(fits.tokens) + 1))

    assert f"has {len(fits.tokens)} tokens, 77 of them of pictures" in message()
    exact = await prompter.chat([said([good])], small(len(fits.tokens) + 1))
    assert exact.max_tokens == 1


@pytest.mark.parametrize("asked", [86 - 14 + 1, 100_000_000])
async def test_a_bound_beyond_the_context_is_told_in_three_numbers(asked: int) -> None:
    """B-066: the length of the context, of the prompt, and what was asked."""
    prompter = Prompter.open(FOLDER)
    with refused("context_length_exceeded", "max_tokens") as message:
        await prompter.chat(
            [said("Who are you?")], small(86), max_tokens=asked, bound_name="max_tokens"
        )
    prompter.close()

    assert all(str(number) in message() for number in (86, 14, asked))


async def test_a_bound_that_fits_exactly_is_taken(prompter: Prompter) -> None:
    """B-065, B-066."""
    fits = await prompter.chat([said("Who are you?")], small(86), max_tokens=86 - 14)
    absent = await prompter.chat([said("Who are you?")], small(86))

    assert fits.max_tokens == absent.max_tokens == 72
    assert fits.cut_to is None


async def test_a_clamped_bound_is_cut_and_told() -> None:
    """O62, the setting `clamp`; a prompt that cannot fit stays refused."""
    prompter = Prompter.open(FOLDER, clamp=True)
    prompt = await prompter.chat([said("Who are you?")], small(86), max_tokens=100)
    exact = await prompter.chat([said("Who are you?")], small(86), max_tokens=72)
    with refused("context_length_exceeded"):
        await prompter.chat([said("Who are you?")], small(14), max_tokens=1)
    prompter.close()

    assert (prompt.max_tokens, prompt.cut_to) == (72, 72)
    assert exact.cut_to is None


async def test_a_pool_smaller_than_the_context_is_the_limit(prompter: Prompter) -> None:
    """B-117: the real limit is named."""
    with refused("context_length_exceeded") as message:
        await prompter.chat([said("Who are you?")], small(8192, pool_tokens=10))

    assert "context is 10," in message()


async def test_a_prompt_ten_times_too_long_is_counted(prompter: Prompter) -> None:
    """B-067."""
    with refused("context_length_exceeded") as message:
        await prompter.chat([said("word " * 81_920)], LOADED)

    number = int(message().split("has ")[1].split()[0])
    assert number > 81_920


async def test_a_body_full_of_text_is_refused_without_counting(prompter: Prompter) -> None:
    """O14, O62: 20 MB would take 20 s to count; the template never sees them either."""
    with refused("context_length_exceeded") as message:
        await asyncio.wait_for(prompter.chat([said("word " * 4_000_000)], LOADED), 5)
    with refused("context_length_exceeded", "prompt"):
        await asyncio.wait_for(prompter.text("word " * 4_000_000, LOADED), 5)

    assert "tokens or more" in message()


async def test_the_loop_goes_on_while_a_template_burns_time() -> None:
    """O47, B-134."""
    tokenizer = Tokenizer.open(FOLDER, rows=1024)
    burns = (
        "{% if messages[0].content|length > 10 %}{% for a in range(100000) %}"
        "{% for b in range(100000) %}{% endfor %}{% endfor %}{% endif %}"
    )
    template = ChatTemplate(
        burns,
        markers=tokenizer.markers,
        names={},
        where="here",
        sandbox=Sandbox(time_limit_s=0.3),
    )
    prompter = Prompter(
        read_checkpoint(FOLDER), tokenizer, template, limits=Limits(), decode_workers=1, clamp=False
    )
    burning = asyncio.ensure_future(prompter.chat([said("x" * 20)], LOADED))
    turns = 0

    while not burning.done():
        await asyncio.sleep(0)
        turns += 1

    with refused("template_error"):
        await burning
    assert turns > 20
    prompter.close()


# -- raw prompts ----------------------------------------------------------------------------------


async def test_markers_in_a_raw_prompt_count_as_such(prompter: Prompter) -> None:
    """O88: the caller writes the template."""
    prompt = await prompter.text("[gMASK]<sop><|user|>Hi<|assistant|><think></think>", LOADED)

    hello = prompter.tokenizer.encode("Hi")
    assert list(prompt.tokens) == [966, 968, 971, *hello, 972, 985, 986]
    assert not prompt.starts_in_reasoning


async def test_a_raw_prompt_of_ids_is_taken_as_it_is(prompter: Prompter) -> None:
    assert (await prompter.text([966, 968, 40], LOADED, max_tokens=5)).tokens == (966, 968, 40)


@pytest.mark.parametrize("prompt", ["", []])
async def test_an_empty_raw_prompt_needs_a_start_token(
    prompter: Prompter, prompt: str | list[int]
) -> None:
    """O88: this family has none."""
    with refused("invalid_value", "prompt"):
        await prompter.text(prompt, LOADED)


@pytest.mark.parametrize("prompt", ["a<|image|>", [40, IMAGE], "<|begin_of_image|>", [999]])
async def test_an_image_placeholder_in_a_raw_prompt_is_refused(
    prompter: Prompter, prompt: str | list[int]
) -> None:
    """O88, rule 34."""
    with refused("invalid_value", "prompt"):
        await prompter.text(prompt, LOADED)


@pytest.mark.parametrize("id_", [-1, 1000, 2**40])
async def test_an_id_outside_the_vocabulary_is_refused(prompter: Prompter, id_: int) -> None:
    with refused("invalid_value", "prompt") as message:
        await prompter.text([40, id_], LOADED)

    assert str(id_) in message()


async def test_a_raw_prompt_that_cannot_fit_is_refused(prompter: Prompter) -> None:
    with refused("context_length_exceeded", "prompt"):
        await prompter.text([40] * 20, small(20))
    with refused("context_length_exceeded", "max_tokens"):
        await prompter.text([40] * 20, small(30), max_tokens=11)


# -- what a checkpoint says -----------------------------------------------------------------------


def copied(folder: Path, **files: Callable[[dict[str, Any]], Any]) -> Path:
    """A copy of the checkpoint without weights; `config=change` edits config.json."""
    for path in FOLDER.glob("*.j*"):
        if path.name != "reference.json":
            shutil.copy(path, folder / path.name)
    for name, change in files.items():
        path = folder / f"{name}.json"
        content = json.loads(path.read_text("utf-8"))
        change(content)
        path.write_text(json.dumps(content), "utf-8")
    return folder


def test_defaults_come_from_the_generation_config(tmp_path: Path) -> None:
    """O29: `do_sample: false` is temperature 0."""
    greedy = read_checkpoint(FOLDER)
    sampling = {"do_sample": True, "temperature": 0.7, "top_p": 0.95, "top_k": 20}
    family = read_checkpoint(copied(tmp_path, generation_config=lambda c: c.update(sampling)))
    (tmp_path / "generation_config.json").unlink()

    assert greedy.defaults == Defaults(temperature=0.0)
    assert family.defaults == Defaults(temperature=0.7, top_p=0.95, top_k=20)
    assert read_checkpoint(tmp_path).defaults == Defaults()


def test_a_setting_takes_the_defaults_of_the_hosted_api_instead() -> None:
    """O29: end tokens stay the checkpoint's."""
    opened = Prompter.open(FOLDER, sampling_defaults="openai")
    assert opened.defaults == Defaults()
    assert opened.defaults.temperature == 1.0
    assert opened.end_ids == Prompter.open(FOLDER).end_ids


def test_end_ids_are_those_of_both_files(tmp_path: Path) -> None:
    """B-055."""
    folder = copied(tmp_path, generation_config=lambda c: c.update(eos_token_id=5))

    assert read_checkpoint(FOLDER).end_ids == (964, 971, 973)
    assert read_checkpoint(folder).end_ids == (5, 964, 971, 973)


@pytest.mark.parametrize("wrong", ["hot", -1, 3, True, [1]])
def test_a_default_that_is_no_such_number_ends_the_boot(tmp_path: Path, wrong: Any) -> None:
    change = {"do_sample": True, "temperature": wrong}

    with pytest.raises(ModelError, match=r"generation_config\.json: temperature"):
        Prompter.open(copied(tmp_path, generation_config=lambda c: c.update(change)))


@pytest.mark.parametrize(
    "file", ["config.json", "tokenizer.json", "chat_template.jinja", "generation_config.json"]
)
def test_a_broken_file_ends_the_boot_and_is_named(tmp_path: Path, file: str) -> None:
    """B-132, B-133."""
    (copied(tmp_path) / file).write_text("{% {")

    with pytest.raises(ModelError) as refusal:
        Prompter.open(tmp_path)

    assert str(tmp_path / file) in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "chat_template.jinja"])
def test_a_missing_file_ends_the_boot_and_is_named(tmp_path: Path, file: str) -> None:
    (copied(tmp_path) / file).unlink()

    with pytest.raises(ModelError, match=f"{file} is missing"):
        Prompter.open(tmp_path)


def test_a_tokenizer_without_the_placeholder_ends_the_boot(tmp_path: Path) -> None:
    """B-132: named by config.json, unknown to tokenizer.json."""

    def without(tokenizer: dict[str, Any]) -> None:
        kept = [token for token in tokenizer["added_tokens"] if token["id"] != IMAGE]
        tokenizer["added_tokens"] = kept

    with pytest.raises(
        ModelError, match=rf"tokenizer\.json has no added token with the id {IMAGE}"
    ):
        Prompter.open(copied(tmp_path, tokenizer=without))


def test_a_tokenizer_larger_than_the_embedding_ends_the_boot(tmp_path: Path) -> None:
    """B-132."""
    folder = copied(tmp_path, config=lambda c: c["text_config"].update(vocab_size=900))

    with pytest.raises(ModelError, match="900 rows"):
        Prompter.open(folder)
