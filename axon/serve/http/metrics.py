"""Counts of the server: for Prometheus at `/metrics`, and for its page at `/state`."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from axon.fields import field_values
from axon.serve.http.access import Record
from axon.serve.request import Update
from axon.serve.stats import Stats

GAUGES = {
    "running": "requests that the engine runs",
    "waiting": "requests that wait for the engine",
    "pages": "pages of the cache",
    "free_pages": "pages of the cache that are free",
}
COUNTERS = {
    "prefix_hits": "prompt tokens that were in the cache already",
    "prefix_queries": "prompt tokens that were looked up in the cache",
    "prompt_tokens": "prompt tokens",
    "generated_tokens": "tokens generated",
    "preemptions": "requests that lost their pages to others for a time",
    "steps": "steps of the engine",
    "drafted": "tokens that were guessed, and verified",
    "accepted": "tokens that were guessed right",
    "compiles": "programs compiled",
}
"""Names of `Stats`, and what they count."""

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
WINDOW = 10.0
"""Seconds over which tokens per second are taken."""
RECENT = 200
"""Requests over which the page's latencies are taken."""


class Metrics:
    """Of one server; `stats` gives the engine's counts."""

    def __init__(self, stats: Callable[[], Stats]):
        self._stats, self.registry, self._began = stats, CollectorRegistry(), time.monotonic()
        self.registry.register(self)  # pyright: ignore[reportArgumentType]  # whatever has `collect`
        kwargs: dict[str, Any] = {"registry": self.registry}
        self._requests = Counter("axon_requests", "requests answered, by path and status", ("path", "status"), **kwargs)
        self._refused = Counter("axon_requests_refused", "requests refused, by status", ("status",), **kwargs)
        self._seconds = Histogram("axon_request_seconds", "of requests that generate", buckets=SECONDS, **kwargs)
        help = "from a request to its first token"
        self._first = Histogram("axon_first_token_seconds", help, buckets=SECONDS, **kwargs)
        self._generated: deque[tuple[float, int]] = deque()
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT)
        """Seconds of the last requests: to the first token, and of each after it."""

    def collect(self) -> Iterator[Metric]:
        """The engine's counts, for the registry."""
        stats = self._stats()
        counts = field_values(stats)
        for name, about in GAUGES.items():
            yield GaugeMetricFamily(f"axon_{name}", about, counts[name])
        yield GaugeMetricFamily("axon_used_pages", "pages of the cache in use", stats.pages - stats.free_pages)
        for name, about in COUNTERS.items():
            yield CounterMetricFamily(f"axon_{name}", about, counts[name])

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self.registry)

    def generated(self, updates: Sequence[Update]) -> None:
        """Count the tokens of a step."""
        self._generated.append((time.monotonic(), sum(len(update.ids) for update in updates)))
        self._forget()

    def answered(self, record: Record, path: str) -> None:
        """Count a request to a route's path."""
        self._requests.labels(path, record.status).inc()
        if record.status >= 400:
            self._refused.labels(record.status).inc()
        if record.first_token_seconds is not None:
            self._seconds.observe(record.seconds)
            self._first.observe(record.first_token_seconds)
            rest = record.seconds - record.first_token_seconds
            self._recent.append((record.first_token_seconds, rest / max(1, record.generated_tokens - 1)))

    def state(self) -> dict[str, Any]:
        """What a person wants to see of it; seconds are medians of the last requests, None before there was one."""
        self._forget()
        stats, uptime = self._stats(), time.monotonic() - self._began
        counts = field_values(stats, (*GAUGES, *COUNTERS))
        first, after = ([times[k] for times in self._recent] for k in range(2))
        return {
            **counts,
            "tokens_per_second": sum(count for _, count in self._generated) / min(WINDOW, max(uptime, 1)),
            "first_token_seconds": median(first) if first else None,
            "token_seconds": median(after) if after else None,
            "uptime_seconds": uptime,
        }

    def _forget(self) -> None:
        while self._generated and self._generated[0][0] < time.monotonic() - WINDOW:
            self._generated.popleft()
