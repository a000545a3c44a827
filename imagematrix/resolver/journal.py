"""What the resolver did: a line for each change and refusal, and counters that Prometheus reads."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, generate_latest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from imagematrix.errors import EngineError, ImagematrixError
    from imagematrix.resolver.answer import Resolved

__all__ = ["Journal"]

METHODS = ("GET", "HEAD")


class Journal:
    """Counters of this process; `note` gets the lines."""

    TYPE = CONTENT_TYPE_LATEST

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._chosen: dict[str, str] = {}
        self._registry = CollectorRegistry()
        self._answers = Counter(
            "imagematrix_resolver_answers",
            "Requests answered, by method and HTTP status.",
            ("method", "status"),
            registry=self._registry,
        )
        self._choices = Counter(
            "imagematrix_resolver_choices",
            "Times that a tag was answered with a variant for the first time, or with another than before.",
            ("tag", "variant"),
            registry=self._registry,
        )
        self._stale = Counter(
            "imagematrix_resolver_stale_answers",
            "Answers from the last known state, while the upstream could not be read.",
            registry=self._registry,
        )

    def answered(self, method: str, status: int) -> None:
        """Count an answer; a client can send any word as a method."""
        self._answers.labels(method if method in METHODS else "other", str(status)).inc()

    def chose(self, tag: str, chosen: Resolved, key: str | None) -> None:
        """Note a variant and the `key` that signed it, if it is the tag's first or another than before."""
        if self._chosen.get(tag) != chosen.digest:
            self._chosen[tag] = chosen.digest
            self._note(f"{tag} is {chosen}{f', signed with {key}' if key else ''}")
            self._choices.labels(tag, chosen.reference).inc()

    def refused(self, path: str, error: ImagematrixError) -> None:
        """Note why a request has no answer."""
        self._note(f"{path}: {error.details}")

    def broke_off(self, path: str, error: ConnectionError) -> None:
        """Note an answer that the client or the upstream has broken off."""
        self._note(f"{path}: broken off: {error}")

    def stale(self, tag: str, error: EngineError) -> None:
        """Note an answer from the last known state."""
        self._stale.inc()
        self._note(f"{tag} is the last known: {error}")

    def text(self) -> bytes:
        """Return the exposition format."""
        return generate_latest(self._registry)
