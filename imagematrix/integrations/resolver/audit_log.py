"""The log of the resolver: a line for each changed answer and each refusal, and counters for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from imagematrix.errors import EngineError, ImagematrixError
    from imagematrix.integrations.resolver.choice import ResolvedTag

METHODS = ("GET", "HEAD")
TAGS = 1_000  # whose variants are remembered and counted; clients can combine the words of a tag in many ways


class ResolverLog:
    """The counters of this process, in a `registry`; `on_line` is called with each line."""

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self._on_line = on_line
        self._chosen: dict[str, ResolvedTag] = {}  # by tag, the one that changed least recently first
        self.registry = CollectorRegistry()
        self._answers = Counter(
            "imagematrix_resolver_answers",
            "Requests answered, by method and HTTP status.",
            ("method", "status"),
            registry=self.registry,
        )
        self._choices = Counter(
            "imagematrix_resolver_choices",
            "Tags answered with their present variant for the first time, or with another warm image of it.",
            ("tag", "variant"),
            registry=self.registry,
        )
        self._stale = Counter(
            "imagematrix_resolver_stale_answers",
            "Answers from the last known state, while the upstream could not be read.",
            registry=self.registry,
        )

    def count_answer(self, method: str, status: int) -> None:
        """Count an answer. Unusual methods, which clients can invent, share one counter."""
        self._answers.labels(method if method in METHODS else "other", str(status)).inc()

    def log_choice(self, tag: str, variant: ResolvedTag, keys: Sequence[str]) -> None:
        """Log a tag's variant and the `keys` that signed it, the first time and after every change."""
        earlier = self._chosen.get(tag)
        if earlier is None or (earlier.digest, earlier.warm) != (variant.digest, variant.warm):
            self._chosen.pop(tag, None)
            self._chosen[tag] = variant
            if earlier is not None and earlier.reference != variant.reference:
                self._choices.remove(tag, earlier.reference)
            if len(self._chosen) > TAGS:
                oldest = next(iter(self._chosen))
                self._choices.remove(oldest, self._chosen.pop(oldest).reference)
            signed = f", signed with {' and '.join(keys)}" if keys else ""
            self._on_line(f"{tag} is {variant}{signed}")
            self._choices.labels(tag, variant.reference).inc()

    def log_refusal(self, path: str, error: ImagematrixError) -> None:
        """Log why a request was refused."""
        self._on_line(f"{path}: {error.details}")

    def log_lost_warm_image(self, reference: str, why: str) -> None:
        """Log that a variant is the answer in place of its warm image."""
        self._on_line(f"{reference} cannot be had, so its variant is the answer: {why}")

    def log_abort(self, path: str, why: str) -> None:
        """Log an answer that the client or the upstream aborted."""
        self._on_line(f"{path}: aborted: {why}")

    def log_stale_answer(self, tag: str, error: EngineError) -> None:
        """Log an answer from the last known state."""
        self._stale.inc()
        self._on_line(f"{tag} is answered from the last known state: {error}")
