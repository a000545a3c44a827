"""Which warm image of the chosen variant fits a host: the last step, after the decision about variants.

It compares facts of the host and of the GPUs that are passed with what each warm image's `match` states. A
fact that is unknown on either side never matches.
"""

from __future__ import annotations

from imagematrix.common.record import Record, replace
from imagematrix.common.text import shorten_words
from imagematrix.images.catalog.warm_image import LABEL_SCHEMA, WarmMatch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from imagematrix.hardware.host.host import Gpu, Host
    from imagematrix.images.catalog.warm_image import Fact, WarmImage

SHOWN = 8  # flags that are listed
UNKNOWN = "unknown"
OF_A_START = ("gpus.count", "cpus")  # facts that differ between starts on one host


class Mismatch(Record):
    """A fact that keeps a warm image from a host: its key, what the `match` needs, and what is there."""

    field: str
    need: str
    have: str


class WarmVerdict(Record):
    """A warm image, and what keeps it from a host; None if nothing does."""

    image: WarmImage
    mismatch: Mismatch | None

    def to_json(self) -> dict[str, object]:
        """Return one element of the Selection document's `warm_images`."""
        mismatch = self.mismatch
        return {
            "reference": self.image.reference,
            "digest": self.image.digest,
            "matches": mismatch is None,
            "field": mismatch.field if mismatch else None,
            "need": mismatch.need if mismatch else None,
            "have": mismatch.have if mismatch else None,
        }


class WarmChoice(Record):
    """The warm image that a host starts, None for the variant itself, and the verdicts on all of them."""

    image: WarmImage | None
    verdicts: tuple[WarmVerdict, ...]


def choose_warm_image(warm_images: Iterable[WarmImage], host: Host, gpus: Sequence[Gpu]) -> WarmChoice:
    """Return the choice among the warm images of one variant, for a host that passes these GPUs.

    Of those that match, it is the one with the newest schema, and then the one whose name sorts first. The
    verdicts are in that order.
    """
    ordered = sorted(warm_images, key=lambda image: (-image.schema, image.reference))
    devices = [device for gpu in gpus for device in _list_devices(gpu)]
    verdicts = tuple(
        [WarmVerdict(image=image, mismatch=_find_mismatch(image, host, devices)) for image in ordered]
    )
    chosen = next((verdict.image for verdict in verdicts if verdict.mismatch is None), None)
    return WarmChoice(image=chosen, verdicts=verdicts)


def may_be_started(image: WarmImage, host: Host) -> bool:
    """Whether the match of a warm image holds for some start on a host, on any of its GPUs and CPUs."""
    facts = tuple([fact for fact in image.match.facts if fact[0] not in OF_A_START])
    relaxed = replace(image, match=WarmMatch(facts=facts))
    devices = [device for gpu in host.gpus for device in _list_devices(gpu)]
    return any(
        _find_mismatch(relaxed, host, passed) is None for passed in ([], *([device] for device in devices))
    )


class _Device(Record):
    """A GPU or a MIG device as programs see it: `mig` is its profile, empty without MIG."""

    compute: str | None
    name: str | None
    memory_mib: int | None
    mig: str | None


def _list_devices(gpu: Gpu) -> list[_Device]:
    if not gpu.mig:
        return [_Device(compute=gpu.compute, name=gpu.name, memory_mib=gpu.memory_mib, mig="")]
    return [
        _Device(compute=gpu.compute, name=gpu.name, memory_mib=device.memory_mib, mig=device.profile)
        for device in gpu.mig
    ]


def _find_mismatch(image: WarmImage, host: Host, devices: Sequence[_Device]) -> Mismatch | None:
    """Return the first stated fact that the host does not have, None if it has all."""
    if image.schema > LABEL_SCHEMA:
        return Mismatch(field="schema", need=str(image.schema), have=f"at most {LABEL_SCHEMA}")
    for field, need in image.match.facts:
        have = _COMPARISONS[field](need, host, devices) if need is not None else UNKNOWN
        if have is not None:
            return Mismatch(field=field, need=_describe(need), have=have)
    return None


def _describe(value: Fact | None) -> str:
    if isinstance(value, tuple):
        return shorten_words(value, SHOWN)
    return UNKNOWN if value is None else str(value) or "none"


def _compare(need: Fact, have: Fact | None) -> str | None:
    """Return what is there instead of a fact, None if it is there."""
    return None if have == need else _describe(have)


def _compare_devices(fact: str) -> Callable[[Fact, Host, Sequence[_Device]], str | None]:
    """Return the comparison of a fact that all GPUs must have."""

    def compare(need: Fact, _: Host, devices: Sequence[_Device]) -> str | None:
        values = {getattr(device, fact) for device in devices}
        return None if values == {need} else ", ".join(sorted(map(_describe, values))) or "no GPU"

    return compare


def _compare_flags(need: Fact, host: Host, _: Sequence[_Device]) -> str | None:
    needed = need if isinstance(need, tuple) else ()
    possible = host.cpu.flags | host.cpu.unknown_flags
    missing = [flag for flag in needed if flag not in possible]
    if missing and host.cpu.flags:
        return f"without {shorten_words(missing, SHOWN)}"
    return UNKNOWN if _is_unknown(needed, host) else None


def _compare_absent_flags(need: Fact, host: Host, _: Sequence[_Device]) -> str | None:
    absent = need if isinstance(need, tuple) else ()
    present = [flag for flag in absent if flag in host.cpu.flags]
    if present:
        return shorten_words(present, SHOWN)
    return UNKNOWN if _is_unknown(absent, host) else None


def _is_unknown(flags: Iterable[str], host: Host) -> bool:
    """Whether it is unknown of one of these flags whether a host has it."""
    return not host.cpu.flags or not host.cpu.unknown_flags.isdisjoint(flags)


# By the keys of FACTS: each returns what the host has instead of a fact that is needed, None if it has it.
_COMPARISONS: Mapping[str, Callable[[Fact, Host, Sequence[_Device]], str | None]] = {
    "gpus.count": lambda need, _, devices: _compare(need, len(devices)),
    "gpus.compute": _compare_devices("compute"),
    "gpus.name": _compare_devices("name"),
    "gpus.memory_mib": _compare_devices("memory_mib"),
    "gpus.mig": _compare_devices("mig"),
    "user_mode": lambda need, host, _: _compare(need, host.driver.user_mode if host.driver else None),
    "cpu.vendor": lambda need, host, _: _compare(need, host.cpu.vendor),
    "cpu.flags": _compare_flags,
    "cpu.without": _compare_absent_flags,
    "cpu.name": lambda need, host, _: _compare(need, host.cpu.model),
    "cpus": lambda need, host, _: _compare(need, host.cpu.usable),
}
