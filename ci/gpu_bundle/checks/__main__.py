"""Check imagematrix on this machine's NVIDIA GPU, as far as the machine permits, and write a report.

    check [--report FILE] [--limit SECONDS] [--steps N]
    check --pytorch-on-cpu CAP    only compare PyTorch, trimmed to CAP, with operators on the CPU

The exit code is 0 if no check failed, and 1 if a check failed or there is no GPU.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

BUNDLE = Path(__file__).resolve().parents[1]
sys.path.append(str(BUNDLE / "imagematrix.pyz"))

import anybody  # noqa: E402 - what they import is in the bundle
import daemonless  # noqa: E402
import engine  # noqa: E402
import loads  # noqa: E402
import pytorch  # noqa: E402
import root  # noqa: E402
import warm_caches  # noqa: E402
from machine import FailedError, Machine, NotTriedError  # noqa: E402
from report import FAILED, NOT_TRIED, PASSED, Mask, Result, written  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shared import Check

    Tiers = Sequence[tuple[str, Sequence[Check]]]

LIMIT_S = 450.0  # with cleaning up, less than eight minutes
CLEANING_S = 20.0
STEPS = 1000
REPORT = "gpu-report.md"
TIERS = (
    ("Anybody", (*anybody.CHECKS, *loads.CHECKS)),
    ("Root", root.CHECKS),
    ("Without a daemon", daemonless.CHECKS),
    ("An engine", engine.CHECKS),
    ("PyTorch", pytorch.CHECKS),
    ("Warm caches", warm_caches.CHECKS),
)


class Run:
    """One run of checks. It writes a report, however it ends."""

    def __init__(self, machine: Machine, target: Path, tiers: Tiers = TIERS) -> None:
        self.machine = machine
        self.target = target
        self._mask = Mask(machine)
        self._start = time.monotonic()
        self._checks = [(tier, check) for tier, checks in tiers for check in checks]
        self._results: list[Result] = []
        self._ending = threading.Lock()

    def all(self) -> int:
        """Run every check in turn; return the exit code."""
        for tier, check in self._checks:
            start = time.monotonic()
            how, why, evidence = _outcome(check, self.machine)
            seconds = time.monotonic() - start
            self._results.append(Result(tier, _name(check), how, why, evidence, seconds))
            line = f"{how:<9}  {': '.join(filter(None, [_name(check), why]))}"
            print(self._mask(line), file=sys.stderr)
        return self.end()

    def end(self, why: str = "") -> int:
        """Write the report, with `why` for checks that were not run; return the exit code."""
        with self._ending:
            results = self._results.copy()
            for tier, check in self._checks[len(results) :]:
                how = NOT_TRIED if results and results[-1].why == why else FAILED
                results.append(Result(tier, _name(check), how, why))
            text = written(self.machine, self._mask, results, time.monotonic() - self._start)
            self.target.write_text(text, "utf-8")
        print(f"check: the report is {self.target}", file=sys.stderr)
        probes = [one for one in results if one.name == _name(anybody.finds_gpus)]
        without_gpu = any(one.how != PASSED for one in probes)
        if without_gpu:
            print("check: no GPU that works was found here", file=sys.stderr)
        nothing = not any(one.how == PASSED for one in results)
        return int(without_gpu or nothing or any(one.how == FAILED for one in results))

    def abandon(self) -> None:
        """End at once with a report of the results so far: a call into a faulty driver may never return."""
        with suppress(OSError):
            self.end("the time was up")
        cleaner = threading.Thread(target=self._clean, daemon=True)
        cleaner.start()
        cleaner.join(CLEANING_S)
        os._exit(1)

    def _clean(self) -> None:
        self.machine.end_all()
        shutil.rmtree(self.machine.work, ignore_errors=True)


def main() -> int:
    """Run the checks."""
    parser = argparse.ArgumentParser(
        prog="check", description="Check imagematrix on this machine's NVIDIA GPU."
    )
    parser.add_argument("--report", type=Path, default=Path(REPORT), help=f"default: {REPORT}")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help=f"seconds, default: {LIMIT_S:g}")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of training, default: {STEPS}")
    parser.add_argument(
        "--pytorch-on-cpu",
        metavar="CAP",
        help="only compare PyTorch, trimmed to CAP, on the CPU; needs no GPU",
    )
    asked = parser.parse_args()
    tiers = (("PyTorch", (pytorch.on_the_cpu(asked.pytorch_on_cpu),)),) if asked.pytorch_on_cpu else TIERS
    if asked.report.is_dir():
        asked.report /= REPORT
    with suppress(OSError):
        asked.report.touch()
    if not os.access(asked.report, os.W_OK):
        asked.report = Path(tempfile.gettempdir(), f"gpu-report-{os.getpid()}.md")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="gpu-check-", ignore_cleanup_errors=True) as name:
        run = Run(Machine(BUNDLE, Path(name), asked.steps), asked.report.resolve(), tiers)
        watchdog = threading.Timer(asked.limit, run.abandon)
        watchdog.daemon = True
        watchdog.start()
        try:
            code = run.all()
        except KeyboardInterrupt:
            code = run.end("it was interrupted")
        run.machine.end_all()
        watchdog.cancel()
    return code


def _name(check: Check) -> str:
    return (check.__doc__ or "").removeprefix("Check that ").rstrip(".")


def _outcome(check: Check, machine: Machine) -> tuple[str, str, str]:
    evidence: list[str] = []
    try:
        remark = check(machine, evidence.append)
    except NotTriedError as error:
        return NOT_TRIED, str(error), "\n".join(evidence)
    except FailedError as error:
        return FAILED, str(error), "\n".join(evidence)
    except Exception as error:  # noqa: BLE001 - a check that crashes must not hide the others
        return FAILED, f"the check crashed: {type(error).__name__}: {error}", "\n".join(evidence)
    return PASSED, remark or "", "\n".join(evidence)


if __name__ == "__main__":
    sys.exit(main())
