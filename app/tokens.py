"""tokenizer (its file) and incremental detokenizer; no half characters.

There is one encoder, made from the checkpoint's own file *without* its added tokens: whatever it
is given comes out as ordinary text tokens, so that nobody can type a special token (O41, rule 34).
Added tokens, here called markers, are matched by `encode_marked` alone, and only where a template
or the caller of a raw prompt wrote them.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer as Encoder

from engine.errors import ModelError

FILE: Final = "tokenizer.json"


class Tokenizer:
    """Text to ids and back, for one checkpoint.

    Attributes:
        size: ids are below this; an id of the model at or above it has no text.
        markers: every added token's text -> id, e.g. `<|user|>`.
        special: ids of the markers that never show as text in an answer.
        start_ids: ids that the file puts before a raw prompt; often none.
        longest: bytes of the longest text token: n bytes of text are at least n / longest tokens.
    """

    def __init__(
        self,
        encoder: Encoder,
        *,
        markers: Mapping[str, int],
        special: Iterable[int],
        pieces: Sequence[bytes],
    ) -> None:
        self.markers = dict(markers)
        self.special = frozenset(special)
        self.size = len(pieces)
        marks = set(self.markers.values())
        self.longest = max(len(piece) for id_, piece in enumerate(pieces) if id_ not in marks)
        self.start_ids = tuple(encoder.encode("", add_special_tokens=True).ids)
        self._encoder = encoder
        self._pieces = tuple(pieces)
        self._visible = tuple(
            b"" if id_ in self.special else piece for id_, piece in enumerate(pieces)
        )
        longest_first = sorted(self.markers, key=len, reverse=True)
        self._marker = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    @classmethod
    def open(cls, folder: Path, *, rows: int) -> Tokenizer:
        """Read `tokenizer.json`. Raises `ModelError` naming the file and the mend.

        Args:
            folder: of the checkpoint.
            rows: of the model's embedding; a tokenizer with more ids belongs to another model.
        """
        path = folder / FILE
        description = _read(path)
        if (decoder := _decoder_type(description)) != "ByteLevel":
            raise ModelError(
                f"{path} has the decoder {decoder}; this server reads byte-level tokenizers. "
                "Use a checkpoint whose decoder is ByteLevel."
            )
        try:
            vocab: dict[str, int] = dict(description["model"]["vocab"])
            added = [(t["content"], t["id"], t["special"]) for t in description["added_tokens"]]
            # One character cannot be guarded against being typed; as text it is the same token.
            markers: dict[str, int] = {text: id_ for text, id_, _ in added if len(text) > 1}
            highest = max([*vocab.values(), *markers.values()])
            encoder = Encoder.from_str(json.dumps(_without_markers(description, markers)))
        except Exception as error:  # noqa: BLE001 - the library raises bare Exception
            raise ModelError(
                f"{path} cannot be read: {_one_line(error)}. Use the file of the checkpoint."
            ) from None
        if highest >= rows:
            raise ModelError(
                f"{path} goes up to id {highest} and the model's embedding has {rows} rows: they "
                "belong to different models. Use the tokenizer.json of this checkpoint."
            )
        return cls(
            encoder,
            markers=markers,
            special={id_ for _, id_, special in added if special},
            pieces=_pieces(vocab, markers),
        )

    def encode(self, text: str) -> list[int]:
        """The ids of plain text; no marker is recognised in it."""
        return self._encode([text])[0]

    def encode_marked(self, text: str, *, without: str = "") -> list[int]:
        """The ids of text whose markers count as such.

        Args:
            text: what a template wrote, or a raw prompt.
            without: a character taken out of everything between the markers, after they were
                found: a marker with that character inside is none.
        """
        between: list[str] = []
        found: list[int] = []
        at = 0
        for match in self._marker.finditer(text):
            between.append(text[at : match.start()])
            found.append(self.markers[match.group()])
            at = match.end()
        between.append(text[at:])
        if without:
            between = [part.replace(without, "") for part in between]
        parts = self._encode(between)
        ids = parts[0]
        for marker, part in zip(found, parts[1:], strict=True):
            ids.append(marker)
            ids += part
        return ids

    def _encode(self, texts: list[str]) -> list[list[int]]:
        # The batch call even for one text: `encode` holds the interpreter lock all the while, 2.4 s
        # for 1.6 MB, in which the event loop stands still whatever thread this runs in.
        encodings = self._encoder.encode_batch_fast(texts, add_special_tokens=False)
        return [list(encoding.ids) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, markers by name, so that `encode_marked` gives the ids back."""
        return b"".join(map(self.bytes_of, ids)).decode("utf-8", "replace")

    def bytes_of(self, id_: int) -> bytes:
        """A token's raw bytes, a part of a character too; empty where an id has no text."""
        return self._pieces[id_] if 0 <= id_ < self.size else b""

    def detokenizer(self) -> Detokenizer:
        """A new detokenizer for one answer; special markers do not show."""
        return Detokenizer(self._visible)


class Detokenizer:
    """Ids of one answer -> its text, piece by piece, whole characters only (O81).

    The pieces joined are the text of the whole, wherever the tokens are cut. Bytes that can never
    become a character show as U+FFFD; a character that the answer's end cuts is dropped.
    """

    __slots__ = ("_decode", "_pieces", "_reset", "_size")

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces
        self._size = len(pieces)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decode = decoder.decode
        self._reset = decoder.reset

    def feed(self, id_: int) -> str:
        """The text that became whole with this token; empty while a character is incomplete."""
        return self._decode(self._pieces[id_]) if 0 <= id_ < self._size else ""

    def close(self) -> None:
        """Drop an incomplete character; what is fed next starts afresh."""
        self._reset()


def _read(path: Path) -> dict[str, Any]:
    try:
        description = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"{path} is missing. Copy the tokenizer.json of the checkpoint into this folder."
        ) from None
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{path} cannot be read: {_one_line(error)}. Use the file of the checkpoint."
        ) from None
    if not isinstance(description, dict):
        raise ModelError(f"{path} is no JSON object. Use the tokenizer.json of the checkpoint.")
    return description


def _decoder_type(description: Mapping[str, Any]) -> str:
    decoder = description.get("decoder")
    return str(decoder.get("type")) if isinstance(decoder, dict) else "none"


def _without_markers(description: Mapping[str, Any], markers: Mapping[str, int]) -> dict[str, Any]:
    """The file's description with no way to a marker, nor to a cut or padded text."""
    model = description["model"]
    if listed := markers.keys() & model["vocab"].keys():
        # Some files list their markers in the vocabulary too, where `ignore_merges` would find
        # them. What a merge leads to has to stay: it is text, and the merges refer to it.
        merges = [m.split(" ") if isinstance(m, str) else m for m in model.get("merges") or []]
        lost = listed - {left + right for left, right in merges}
        vocab = {token: id_ for token, id_ in model["vocab"].items() if token not in lost}
        model = model | {"vocab": vocab}
    return {**description, "model": model, "added_tokens": [], "truncation": None, "padding": None}


def _pieces(vocab: Mapping[str, int], markers: Mapping[str, int]) -> list[bytes]:
    alphabet = _byte_alphabet()
    pieces = [b""] * (max([*vocab.values(), *markers.values()]) + 1)
    for token, id_ in vocab.items():
        try:
            pieces[id_] = bytes(alphabet[character] for character in token)
        except KeyError:  # not of the byte alphabet: a marker that the vocabulary lists as well
            pieces[id_] = token.encode("utf-8")
    for token, id_ in markers.items():
        pieces[id_] = token.encode("utf-8")
    return pieces


def _byte_alphabet() -> dict[str, int]:
    """Printable stand-in -> byte, as every byte-level BPE writes its vocabulary (GPT-2).

    Printable Latin-1 bytes stand for themselves; the others take characters from 256 up, in order.
    """
    itself = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in itself]
    alphabet = {chr(byte): byte for byte in itself}
    return alphabet | {chr(256 + n): byte for n, byte in enumerate(others)}


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
