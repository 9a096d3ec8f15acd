"""Text to ids and back: nobody types a marker, no character is cut in half, bad files are named."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.tokens import FILE, Tokenizer
from engine.errors import ModelError
from tests.app.chat.glimmer import FOLDER, ROWS, THINK_END, USER

TOKENIZER = Tokenizer.open(FOLDER, rows=ROWS)
anytime = settings(deadline=None)  # a busy machine is no failure
MARKERS = sorted(TOKENIZER.markers)
BYTE_IDS = {TOKENIZER.bytes_of(i): i for i in range(964) if len(TOKENIZER.bytes_of(i)) == 1}
FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"  # three people joined by U+200D
HARD = f"Hi \U0001f60a! {FAMILY} \U0001f1f3\U0001f1f4 e\u0301 \ud55c\uae00 \U0001d54a\n\ttab"

plain = st.text(st.characters(exclude_categories=["Cs"]))
marked = st.lists(st.one_of(plain, st.sampled_from(MARKERS)), max_size=6).map("".join)


def shown(ids: list[int]) -> list[str]:
    detokenizer = TOKENIZER.detokenizer()
    return [detokenizer.feed(id_) for id_ in ids]


def in_bytes(text: str) -> list[int]:
    return [BYTE_IDS[bytes([byte])] for byte in text.encode()]


@anytime
@given(marked)
def test_a_typed_marker_is_ordinary_text(text: str) -> None:
    """O41, rule 34."""
    ids = TOKENIZER.encode(text)

    assert not set(ids) & set(TOKENIZER.markers.values())
    assert TOKENIZER.decode(ids) == text


@anytime
@given(marked)
def test_marked_text_comes_back_from_its_ids(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode_marked(text)) == text


def test_markers_count_where_a_template_writes_them() -> None:
    assert TOKENIZER.encode_marked("<|user|>Hi</think>") == [USER, *TOKENIZER.encode("Hi"), 986]


def test_a_marker_with_the_character_to_leave_out_is_none() -> None:
    ids = TOKENIZER.encode_marked("<|user|><\udc80|user|>", without="\udc80")

    assert ids == [USER, *TOKENIZER.encode("<|user|>")]


@pytest.mark.parametrize("text", [HARD, FAMILY, "\u0301", "a\u0000b"])
def test_characters_cut_over_tokens_come_out_whole(text: str) -> None:
    """B-049, B-050: one byte a token; nothing is normalised."""
    pieces = shown(in_bytes(text))

    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@anytime
@given(st.lists(st.tuples(plain, st.booleans()), max_size=5))
def test_the_text_is_the_same_wherever_tokens_are_cut(parts: list[tuple[str, bool]]) -> None:
    """O81: a stream parser does not care (principle 13)."""
    ids = [id_ for text, small in parts for id_ in (in_bytes if small else TOKENIZER.encode)(text)]

    assert "".join(shown(ids)) == "".join(text for text, _ in parts)


def test_a_character_that_the_end_cuts_is_dropped() -> None:
    detokenizer = TOKENIZER.detokenizer()
    first = [detokenizer.feed(id_) for id_ in in_bytes("a\U0001f60a")[:3]]

    detokenizer.close()

    assert first == ["a", "", ""]
    assert detokenizer.feed(in_bytes("b")[0]) == "b"


def test_bytes_that_are_no_character_show_as_replacement() -> None:
    assert "".join(shown([BYTE_IDS[b"\xff"], *in_bytes("a")])) == "\ufffda"


def test_special_markers_do_not_show_and_others_do() -> None:
    ids = [USER, *in_bytes("a"), TOKENIZER.markers["<tool_call>"], ROWS - 1]

    assert "".join(shown(ids)) == "a<tool_call>"
    assert TOKENIZER.decode([USER]) == "<|user|>"


def test_bytes_of_a_token_are_its_own() -> None:
    """B-061: parts of a character, not the tokenizer's stand-ins."""
    assert b"".join(map(TOKENIZER.bytes_of, in_bytes("\U0001f60a"))) == "\U0001f60a".encode()


def test_a_long_text_does_not_hold_the_interpreter() -> None:
    """O14, O93: the event loop goes on while a thread encodes."""
    thread = threading.Thread(target=TOKENIZER.encode, args=("some words " * 40_000,))
    turns = 0

    thread.start()
    while thread.is_alive():
        turns += 1
        time.sleep(0.001)

    assert turns > 10


def copy(folder: Path, **changes: Any) -> Path:
    description = json.loads((FOLDER / FILE).read_text("utf-8"))
    for key, change in changes.items():
        change(description[key]) if callable(change) else description.update({key: change})
    (folder / FILE).write_text(json.dumps(description), "utf-8")
    return folder


def refusal(folder: Path, rows: int = ROWS) -> str:
    with pytest.raises(ModelError) as refused:
        Tokenizer.open(folder, rows=rows)
    message = str(refused.value)
    assert FILE in message
    assert "\n" not in message
    return message


def test_a_missing_file_is_named_with_the_mend(tmp_path: Path) -> None:
    """B-132."""
    assert f"{tmp_path / FILE} is missing. Copy" in refusal(tmp_path)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"{}", b"\xff\xfe", b'{"decoder": 5}'])
def test_a_broken_file_is_named(tmp_path: Path, data: bytes) -> None:
    (tmp_path / FILE).write_bytes(data)

    refusal(tmp_path)


def test_a_cut_file_is_named(tmp_path: Path) -> None:
    data = (FOLDER / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(data[: len(data) // 2])

    assert "cannot be read" in refusal(tmp_path)


def test_a_model_that_the_library_refuses_is_named(tmp_path: Path) -> None:
    copy(tmp_path, model=lambda model: model["merges"].append(["no", "such tokens"]))

    assert "cannot be read" in refusal(tmp_path)


def test_a_tokenizer_of_a_larger_model_is_refused(tmp_path: Path) -> None:
    """B-132: more ids than the embedding has rows."""
    message = refusal(copy(tmp_path), rows=999)

    assert "id 999" in message
    assert "999 rows" in message
    assert Tokenizer.open(tmp_path, rows=1000).size == 1000


def test_another_kind_of_decoder_is_refused(tmp_path: Path) -> None:
    assert "ByteLevel" in refusal(copy(tmp_path, decoder={"type": "Metaspace"}))


def test_a_marker_that_the_vocabulary_lists_too_cannot_be_typed(tmp_path: Path) -> None:
    """O41: `ignore_merges` would find it."""

    def list_it(model: dict[str, Any]) -> None:
        model["vocab"]["zebra"] = 1000

    def mark_it(tokens: list[dict[str, Any]]) -> None:
        tokens.append(tokens[0] | {"content": "zebra", "id": 1000})

    folder = copy(tmp_path, model=list_it, added_tokens=mark_it)
    tokenizer = Tokenizer.open(folder, rows=ROWS)

    assert 1000 not in tokenizer.encode("zebra")
    assert tokenizer.encode_marked("zebra") == [1000]


def test_truncation_of_the_file_is_not_applied(tmp_path: Path) -> None:
    cut = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    tokenizer = Tokenizer.open(copy(tmp_path, truncation=cut), rows=ROWS)

    assert tokenizer.encode("one two three four") == TOKENIZER.encode("one two three four")


def test_the_end_of_thinking_is_a_marker_and_no_special_token() -> None:
    """The family's file says so; the reasoning parser is what keeps it out of answers."""
    assert THINK_END not in TOKENIZER.special
    assert USER in TOKENIZER.special
