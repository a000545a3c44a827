"""Tests of images: what runs them, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from imagematrix.errors import BuildError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TextIO

    from imagematrix.build.plan.plan import Planned
    from imagematrix.build.plan.protocols import BuildRequest, BuiltImage
    from imagematrix.images.catalog.catalog import Variant


class ImageTestError(BuildError):
    """The test of an image failed."""


class ImageTestOutcome(StrEnum):
    """What came of the test of an image."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_TESTED = "not-tested"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageTestResult:
    """What came of the test of an image here, and why it was not tested or failed."""

    outcome: ImageTestOutcome
    why: str | None = None

    def to_json(self) -> dict[str, object]:
        """Return the value of `test` in the Build document."""
        return {"outcome": self.outcome, "why": self.why}


class ImageTester(Protocol):
    """Runs the tests of images; thread-safe. Methods that run one raise ImageTestError and EngineError."""

    def test_built(
        self, item: Planned, variant: Variant, order: BuildRequest, made: BuiltImage, log: TextIO
    ) -> ImageTestResult | None:
        """Test an image that is not stored yet, whose catalog entry is `variant`; None without a test.

        `log` receives the output of the test. Raises MissingBlobError if the image lacks bytes of a layer.
        """
        ...

    def test_stored(self, item: Planned, variant: Variant, log: TextIO) -> ImageTestResult | None:
        """Test an image that its store has under the reference of `variant`; None without a test."""
        ...

    def is_due(self, item: Planned) -> bool:
        """Whether an image that is up to date is to be tested again."""
        ...

    def find_known_result(self, item: Planned) -> ImageTestResult | None:
        """Return what is known of the test of an image that is up to date and not tested again."""
        ...

    def record_result(self, item: Planned, result: ImageTestResult | None) -> None:
        """Record that an image is stored, with what came of its test."""
        ...

    def stop(self) -> None:
        """Stop the tests that are running, which raise StoppedError, and run no others."""
        ...
