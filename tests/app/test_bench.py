"""The load client: what it counts, when its clock starts and stops, and that failures are seen."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from app.bench import (
    BenchError,
    Load,
    Server,
    bodies,
    exact_prompt,
    measure,
    measure_and_print,
    percentiles,
    together,
)
from app.bench_client import Sample
from engine.errors import ConfigError
from tests.fakes.openai_server import TEMPLATE_TOKENS, Manner, OpenAIServer, count_tokens


def a_load(url: str, **changes: object) -> Load:
    base = Load(url=url, streams=2, requests=4, clients=1, prompt_tokens=40, answer_tokens=5)
    return msgspec.structs.replace(base, **changes)


def test_the_first_token_is_the_first_chunk_with_text() -> None:
    """Given a role chunk at once and text 150 ms later, the time to first token is the latter."""
    with OpenAIServer(Manner(first_text_s=0.15)) as server:
        result = measure(a_load(server.url))["result"]

    assert result["ttft_ms"]["p50"] >= 150
    assert result["itl_ms"]["p50"] < 100
    assert result["failed"] == 0


def test_rates_are_tokens_of_the_usage_over_seconds_of_the_clock() -> None:
    with OpenAIServer(Manner(token_s=0.02)) as server:
        result = measure(a_load(server.url, streams=1, requests=2, answer_tokens=10))["result"]

    assert result["answer_tokens"] == 20
    assert result["itl_ms"]["p50"] >= 20
    assert 20 <= result["stream_tokens_per_s"]["p50"] <= 8 / (9 * 0.02)
    assert result["tokens_per_s"] <= 10 / (10 * 0.02)


def test_every_request_is_sent_once_and_so_many_run_at_the_same_time() -> None:
    """Given 12 requests in 4 streams of 2 client processes, the server sees 12 and never 5."""
    manner = Manner(token_s=0.02)
    with OpenAIServer(manner) as server:
        result = measure(a_load(server.url, streams=4, requests=12, clients=2, warm_up=1))["result"]

    assert result["requests"] == 12
    assert len(manner.seen) == 13
    assert manner.at_once == 4
    assert len({body["messages"][0]["content"] for body in manner.seen}) == 13


def test_a_request_asks_for_an_answer_of_exact_length() -> None:
    manner = Manner()
    with OpenAIServer(manner) as server:
        measure(a_load(server.url, requests=1, warm_up=0, key="secret"))

    (body,) = manner.seen
    assert body["ignore_eos"] is True
    assert (body["max_tokens"], body["temperature"], body["model"]) == (5, 0, "words")
    assert body["stream_options"] == {"include_usage": True}
    assert manner.headers[0]["Authorization"] == "Bearer secret"


@pytest.mark.parametrize("has_tokenize", [True, False], ids=["tokenize", "usage"])
@pytest.mark.parametrize("tokens", [12, 100, 101, 3_000])
def test_prompts_have_exactly_the_tokens_asked_for(tokens: int, *, has_tokenize: bool) -> None:
    """A server without `/tokenize` is asked for one token instead and its usage is read."""
    with OpenAIServer(Manner(has_tokenize=has_tokenize)) as server:
        load = a_load(server.url, requests=2, prompt_tokens=tokens)
        with Server(load) as asked:
            made = bodies(load, "words", lambda text: asked.prompt_tokens("words", text))

    texts = [json.loads(body)["messages"][0]["content"] for body in made]
    assert [count_tokens(text) for text in texts] == [tokens] * 3


def test_prompts_with_the_same_beginning_differ_in_their_last_word_only() -> None:
    manner = Manner()
    with OpenAIServer(manner) as server:
        measure(a_load(server.url, prompt_tokens=60, same_beginning=True))

    texts = [body["messages"][0]["content"] for body in manner.seen]
    assert len(set(texts)) == len(texts) == 5
    assert len({text.rpartition(" ")[0] for text in texts}) == 1
    assert {count_tokens(text) for text in texts} == {60}


def test_a_prompt_shorter_than_the_template_is_refused_with_the_number() -> None:
    with pytest.raises(ConfigError, match=f"{TEMPLATE_TOKENS + 1} tokens, not 3"):
        exact_prompt(count_tokens, 3, "1000")


def test_pictures_are_sent_in_turn_as_data_urls(tmp_path: Path) -> None:
    files = [tmp_path / "a.png", tmp_path / "b.jpg"]
    for path in files:
        path.write_bytes(path.name.encode())
    manner = Manner()
    with OpenAIServer(manner) as server:
        load = a_load(server.url, requests=3, streams=1, images=tuple(files), prompt_tokens=None)
        report = measure(load)

    urls = [body["messages"][0]["content"][0]["image_url"]["url"] for body in manner.seen]
    assert [url.partition(";")[0] for url in urls] == [
        "data:image/png",
        "data:image/jpeg",
        "data:image/png",
        "data:image/jpeg",
    ]
    assert report["load"]["images"] == 1


def test_failed_requests_are_counted_and_the_first_is_shown() -> None:
    """Given every second stream ends with an error event, half fail and none is timed."""
    with OpenAIServer(Manner(fails_every=2)) as server:
        result = measure(a_load(server.url, requests=6, streams=1, warm_up=0))["result"]

    assert (result["requests"], result["failed"]) == (6, 3)
    assert "broken" in result["first_failure"]
    assert result["answer_tokens"] == 3 * 5


def test_a_stream_that_ends_without_done_is_a_failure() -> None:
    with (
        OpenAIServer(Manner(ends_without_done=True)) as server,
        pytest.raises(BenchError, match=r"all 4 requests failed.*without \[DONE\]"),
    ):
        measure(a_load(server.url))


def test_a_refusal_is_shown_with_its_status() -> None:
    with (
        OpenAIServer(Manner(status=503)) as server,
        pytest.raises(BenchError, match=r"status 503.*no room"),
    ):
        measure(a_load(server.url))


def test_a_server_that_is_not_there_is_one_error() -> None:
    with pytest.raises(BenchError, match="does not answer"):
        measure(a_load("http://127.0.0.1:9"))


def test_percentiles_are_measured_values() -> None:
    values = [float(n) for n in range(1, 101)]
    assert percentiles(values) == {"p50": 50.0, "p95": 95.0, "p99": 99.0, "max": 100.0}
    assert percentiles([7.0]) == {"p50": 7.0, "p95": 7.0, "p99": 7.0, "max": 7.0}
    assert percentiles([]) is None


def test_the_report_goes_to_stdout_and_to_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with OpenAIServer(Manner(fails_every=2)) as server:
        code = measure_and_print(a_load(server.url, streams=1, warm_up=0), tmp_path / "out.json")

    printed = capsys.readouterr().out
    assert code == 1  # two of the four failed
    assert json.loads(printed) == json.loads((tmp_path / "out.json").read_text())


def a_sample(first_s: float, gap_s: float, pieces: int, tokens: int) -> Sample:
    gaps = (gap_s,) * (pieces - 1)
    ended_s = first_s + sum(gaps)
    return Sample(
        started_s=0.0, first_s=first_s, ended_s=ended_s, gaps_s=gaps, answer_tokens=tokens
    )


def test_the_decode_rate_counts_only_while_every_stream_decodes() -> None:
    """Given one stream that waited a second for its prompt, that second is not decode time."""
    early = a_sample(0.0, 0.1, pieces=31, tokens=31)  # decodes from 0 to 3 s, 10 tokens a second
    late = a_sample(1.0, 0.05, pieces=41, tokens=82)  # from 1 to 3 s, 40 tokens a second

    assert together([early, late], 2) == pytest.approx(10 + 40, rel=0.06)
    assert together([early, late], 1) == pytest.approx((30 + 80) / 3, rel=0.06)
    assert together([early, late], 3) is None
