"""Every counter and histogram, named in one place (O101, R102).

What the server process sees is counted here as it happens. What the worker sees comes with its
last pong, and the state from `Health`; both are read when somebody asks, so that a scrape costs
nothing in between and no series can be older than the state it describes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from app.health import Health, State
from app.logs import RequestRecord
from engine.messages import Pong

PREFIX: Final = "stagelight"
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_TIMES: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0),
)

# Counters of the worker: metric -> (the name in its pongs, help). What the worker does not count
# has not happened there: the part is not built, or the worker is new.
ENGINE_COUNTERS: Final = {
    "steps_total": ("steps_total", "Steps that the engine ran."),
    "prompt_rows_total": ("prompt_rows_total", "Prompt rows that were computed."),
    "wasted_rows_total": ("wasted_rows_total", "Rows whose results nobody wanted any more."),
    "overlays_built_total": ("overlays_built_total", "Pictures through the vision tower."),
    "request_faults_total": ("request_faults_total", "Requests that failed inside the worker."),
    "out_of_memory_total": ("out_of_memory_total", "Times that a device had no room."),
    "preemptions_total": ("preemptions_total", "Sequences that had to give their pages back."),
    "non_finite_rows_total": ("bad_rows_total", "Rows of logits that were not finite."),
    "prefix_cache_queries_total": ("prefix_cache_queries_total", "Tokens looked up for reuse."),
    "prefix_cache_hits_total": ("prefix_cache_hits_total", "Tokens found for reuse."),
    "encoder_cache_queries_total": ("encoder_cache_queries_total", "Pictures looked up for reuse."),
    "encoder_cache_hits_total": ("encoder_cache_hits_total", "Pictures found for reuse."),
    "drafts_proposed_total": ("drafts_proposed_total", "Tokens that were drafted."),
    "drafts_accepted_total": ("drafts_accepted_total", "Drafted tokens that were right."),
    "drafter_errors_total": ("drafter_errors_total", "Times that drafting was left out."),
    "replays_total": ("replays_total", "Decode steps that ran as a captured graph."),
    "captures_total": ("captures_total", "Graphs that were captured."),
    "split_steps_total": ("split_steps_total", "Steps that went through more than one stage."),
    "cursor_reconciles_total": ("cursor_reconciles_total", "Cursors brought back in step."),
}
_ROUTES = ("local", "peer", "host")
# metric by route -> (meaning, the worker's name)
_BY_ROUTE = {
    "overlay_publications_total": (
        "Overlays brought to the device of stage 0.",
        "overlay_publications_{}_total",
    ),
    "boundary_copies_total": ("Copies from stage to stage.", "boundary_copies_{}_total"),
    "boundary_rows_total": ("Rows that went from stage to stage.", "boundary_rows_{}_total"),
}
# path of `capacity_refusals_total` -> the worker's name
_REFUSALS: Final = {
    "eager": "capacity_refusals_eager_total",
    "replay": "capacity_refusals_replay_total",
    "admission": "capacity_refusals_total",
}
_PROBE_RESULTS: Final = ("ok", "miss")


class Metrics:
    """The counters of this server process and the view on its worker.

    Args:
        health: where state and pongs are read.
        version: of this program, for `build_info`.
    """

    def __init__(self, health: Health, version: str) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series a counter, which nobody asked for
        self._registry = CollectorRegistry(auto_describe=False)
        self._requests = self._counter(
            "requests_total", "Requests that ended.", "endpoint", "status", "finish_reason"
        )
        self._failed = self._counter("requests_failed_total", "Requests that got an error.", "code")
        self._cancelled = self._counter("requests_cancelled_total", "Clients that went away.")
        self._rejected = self._counter(
            "admission_rejections_total", "Requests that were refused with 503.", "reason"
        )
        self._prompt = self._counter("prompt_tokens_total", "Tokens of prompts.")
        self._image = self._counter("image_tokens_total", "Prompt tokens that are image rows.")
        self._cached = self._counter("cached_tokens_total", "Prompt tokens taken from a cache.")
        self._generated = self._counter("generation_tokens_total", "Tokens generated.")
        self._reasoning = self._counter("reasoning_tokens_total", "Generated tokens of reasoning.")
        self._retries = self._counter("client_retries_total", "Requests that were a retry.")
        self._first = self._histogram("time_to_first_token_seconds", "Until the first token.")
        self._between = self._histogram("inter_token_latency_seconds", "Between two tokens.")
        self._whole = self._histogram("e2e_request_latency_seconds", "A generation, whole.")
        self._queue = self._histogram("queue_time_seconds", "Waiting for a place.")
        self._prefill = self._histogram("prefill_time_seconds", "From a place to the first token.")
        self._decode = self._histogram("image_decode_seconds", "Decoding and cutting the pictures.")
        self._histogram("schema_compile_seconds", "Compiling the schema of an answer.")
        self._registry.register(_WorkerView(health, version))

    def text(self) -> bytes:
        """All of it in the Prometheus text form."""
        return generate_latest(self._registry)

    def ended(self, record: RequestRecord, now: float) -> None:
        """Count one request at its end."""
        if record.cancelled:
            self._cancelled.inc()
        if record.error:
            self._failed.labels(record.error).inc()
        if record.status == 503:
            self._rejected.labels(record.error).inc()
        if record.retries:
            self._retries.inc()
        status = str(record.status) if record.status else "cancelled"
        self._requests.labels(record.endpoint or "unknown", status, record.finish_reason).inc()
        self._prompt.inc(record.prompt_tokens)
        self._image.inc(record.image_tokens)
        self._cached.inc(record.cached_tokens)
        # of an answer without an end there is no usage, but its tokens were generated
        unended = record.cancelled or record.error
        self._generated.inc(record.sampled_tokens if unended else record.completion_tokens)
        self._reasoning.inc(record.reasoning_tokens)
        if record.queue_s is not None:
            self._queue.observe(record.queue_s)
        if record.prefill_s is not None:
            self._prefill.observe(record.prefill_s)
        if record.first_token_at is not None:
            self._first.observe(record.first_token_at - record.started)
            self._whole.observe(now - record.started)

    @property
    def observe_between(self) -> Callable[[float], None]:
        """Takes the seconds between two tokens of one answer."""
        return self._between.observe

    def decoded(self, seconds: float) -> None:
        """The pictures of one request were decoded and cut."""
        self._decode.observe(seconds)

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        return Counter(f"{PREFIX}_{name}", meaning, labels, registry=self._registry)

    def _histogram(self, name: str, meaning: str) -> Histogram:
        return Histogram(f"{PREFIX}_{name}", meaning, registry=self._registry, buckets=_TIMES)


class _WorkerView(Collector):
    """State and last pong as metrics, read when asked for."""

    def __init__(self, health: Health, version: str) -> None:
        self._health = health
        self._version = version

    def collect(self) -> Iterable[Metric]:
        state = self._health.state
        pong = self._health.pong
        yield _labelled(
            "engine_state",
            "One for the state that holds.",
            "state",
            {other.value: float(other is state) for other in State},
        )
        yield _gauge("gpu_fault", "1 while a fault is latched.", float(state is State.FAULTED))
        yield _labelled("build_info", "Always 1.", "version", {self._version: 1.0})
        worker = self._health.worker
        restarts = worker.generation if worker else 0  # so many came before it
        yield _counted(
            "worker_restarts_total",
            "New workers after a death.",
            "explained",
            {"no": float(restarts), "yes": 0.0},
        )
        for name in ("requests_replayed", "requests_convicted", "weights_repaired"):
            yield _count(f"{name}_total", "0: nothing of the kind has happened.", 0.0)
        yield _gauge("requests_running", "That hold a place.", pong.running if pong else 0)
        yield _gauge("requests_waiting", "That wait for one.", pong.waiting if pong else 0)
        yield from _of(pong, self._health.pong_age_s) if pong else ()
        yield from _counters(pong.counters if pong else {})


def _of(pong: Pong, older: float) -> Iterable[Metric]:
    """What a worker said, its ages as they are now: a worker that says no more is seen to age."""
    used = 1 - pong.pages_free / pong.pages_total if pong.pages_total else 0.0
    yield _gauge("kv_cache_usage_ratio", "Share of the pages in use.", used)
    yield _gauge("pages_free", "Cache pages that nobody holds.", pong.pages_free)
    yield _gauge("slots_free", "Sequence slots that nobody holds.", pong.slots_free)
    yield _gauge("scheduler_heartbeat_age_seconds", "Of the loop.", pong.heartbeat_age_s + older)
    yield _gauge("device_live_allocations", "Device buffers that live.", pong.allocations)
    yield _gauge("device_live_bytes", "Bytes in them.", pong.allocated_bytes)
    yield _labelled(
        "last_step_age_seconds",
        "Age of the last result.",
        "stage",
        {str(stage.stage): stage.last_result_age_s + older for stage in pong.stages},
    )
    yield _labelled(
        "device_wait_seconds",
        "In the device call going on; 0 in none.",
        "stage",
        {str(s.stage): s.waiting_s + older if s.waiting_s else 0.0 for s in pong.stages},
    )


def _counters(counters: dict[str, float]) -> Iterable[Metric]:
    for metric, (name, meaning) in ENGINE_COUNTERS.items():
        yield _count(metric, meaning, counters.get(name, 0.0))
    if "vision_encode_seconds_sum" in counters:
        count, seconds = (counters[f"vision_encode_seconds_{part}"] for part in ("count", "sum"))
        encode = HistogramMetricFamily(f"{PREFIX}_vision_encode_seconds", "In the vision tower.")
        encode.add_metric([], buckets=[("+Inf", count)], sum_value=seconds)
        yield encode
    yield _gauge("graphs_live", "Captured graphs in use.", counters.get("graphs_live", 0.0))
    yield _counted(
        "capacity_refusals_total",
        "Refused for want of room.",
        "path",
        {path: counters.get(name, 0.0) for path, name in _REFUSALS.items()},
    )
    for metric, (meaning, name) in _BY_ROUTE.items():
        yield _counted(
            metric,
            meaning,
            "route",
            {route: counters.get(name.format(route), 0.0) for route in _ROUTES},
        )
    yield _counted(
        "device_probe_total",
        "Probes from outside.",
        "result",
        {result: counters.get(f"device_probe_{result}_total", 0.0) for result in _PROBE_RESULTS},
    )


def _gauge(name: str, meaning: str, value: float) -> Metric:
    return GaugeMetricFamily(f"{PREFIX}_{name}", meaning, value)


def _count(name: str, meaning: str, value: float) -> Metric:
    return CounterMetricFamily(f"{PREFIX}_{name}", meaning, value)


def _labelled(name: str, meaning: str, label: str, values: dict[str, float]) -> Metric:
    family = GaugeMetricFamily(f"{PREFIX}_{name}", meaning, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _counted(name: str, meaning: str, label: str, values: dict[str, float]) -> Metric:
    family = CounterMetricFamily(f"{PREFIX}_{name}", meaning, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
