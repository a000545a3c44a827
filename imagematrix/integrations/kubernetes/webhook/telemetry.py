"""The webhook's log lines, for refusals and changes, and its metrics for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from imagematrix.errors import ImagematrixError

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 1.0)


class Telemetry:
    """Log lines, which `on_line` gets, and metrics of this process, in a `registry`."""

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self.log = on_line
        self.registry = CollectorRegistry()
        self._reviews = Counter(
            "imagematrix_webhook_reviews",
            "Reviews answered: patched, unchanged, undecided, refused, invalid, expensive, or unready.",
            ("outcome",),
            registry=self.registry,
        )
        self._seconds = Histogram(
            "imagematrix_webhook_review_seconds",
            "Time from a whole request to its answer.",
            buckets=SECONDS,
            registry=self.registry,
        )
        self._nodes = Gauge(
            "imagematrix_webhook_nodes",
            "Nodes, by whether their class label matches their other labels.",
            ("labelled",),
            registry=self.registry,
        )
        self._decided = Gauge(
            "imagematrix_webhook_decided_timestamp_seconds",
            "When nodes and catalogs last changed the decisions.",
            registry=self.registry,
        )
        self._events = Counter(
            "imagematrix_webhook_events",
            "Events written about pending pods, by their reason.",
            ("reason",),
            registry=self.registry,
        )
        self._failures = Counter(
            "imagematrix_webhook_failures",
            "Failures to read nodes, a catalog, the certificate or pods, whose last state stays in use; "
            "and to use the lease or write Events.",
            ("what",),
            registry=self.registry,
        )

    def record_review(self, outcome: str, seconds: float, pod: str = "", reason: str | None = None) -> None:
        """Count a review; log it if the image was not decided."""
        self._reviews.labels(outcome).inc()
        self._seconds.observe(seconds)
        if reason:
            # The name is not validated yet: a repr has no line breaks.
            self.log(f"pod {pod[:320]!r} {outcome}: {reason}")

    def record_policies(self, labelled: int, unlabelled: Sequence[str]) -> None:
        """Log new policies, and the nodes without a matching class label."""
        count = len(unlabelled)
        self._nodes.labels("yes").set(labelled)
        self._nodes.labels("no").set(count)
        self._decided.set_to_current_time()
        without = f"; {count} without a matching class label, such as {unlabelled[0]}" if unlabelled else ""
        self.log(f"policies made for {labelled} nodes{without}")

    def count_event(self, reason: str) -> None:
        """Count an Event about a pod."""
        self._events.labels(reason).inc()

    def record_failure(self, what: str, error: ImagematrixError) -> None:
        """Count and log a failure to read or write `what`."""
        self._failures.labels(what).inc()
        self.log(f"{what}: {error.details}")
