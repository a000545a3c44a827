"""An image's device code: entries of a catalog, each of which has to run, and what all files have in common.

Files whose code no known GPU can tell apart are one entry.
"""

from __future__ import annotations

import posixpath
from fnmatch import fnmatchcase
from functools import lru_cache

from imagematrix.audit.binaries.device_code import DeviceCode
from imagematrix.common.record import replace
from imagematrix.errors import AuditError
from imagematrix.hardware.vendors import device_code, versions
from imagematrix.images.catalog.catalog import Code, FilePart, Ptx, UseGuard, escape_glob

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
    from typing import Any

    from imagematrix.audit.binaries.device_code import Fatbins

    Targets = tuple[tuple[str, ...], tuple[Ptx, ...]]
    Match = tuple[int, tuple[int, ...]] | None

MOST = 16  # entries: labels and annotations have limits
MOST_OPTIONAL = 4  # of these
MOST_PARTS = 32  # kinds of parts of an entry
MOST_GLOBS = 16  # of an entry
CUBIN, PTX = 0, 1


def make_entry(
    name: str,
    code: DeviceCode,
    *,
    files: int = 1,
    globs: Sequence[str] = (),
    optional: bool = False,
    guard: UseGuard | None = None,
) -> Code:
    """Return the entry of one file, or of several that share their code and match `globs`, `name` the first.

    PTX counts only if it can run all of the file's code.
    """
    cubins, texts = _targets(code)
    return Code(
        files=files,
        name=name,
        globs=_limited(globs),
        cubins=cubins,
        ptx=() if code.scattered else texts,
        optional=optional,
        guard=None if optional else guard,
        parts=_parts(_part(part.count, _targets(part)) for part in code.parts),
    )


def _targets(code: DeviceCode | Fatbins) -> Targets:
    """Return the targets of cubins, and of PTX each with its lowest ISA version, in order."""
    lowest = dict(sorted(code.ptx, key=lambda pair: versions.make_sort_key(pair[1]), reverse=True))
    texts = sorted(lowest.items(), key=lambda pair: device_code.make_sort_key(pair[0]))
    cubins = sorted(code.cubins, key=device_code.make_sort_key)
    return tuple(cubins), tuple(Ptx(target=target, isa=isa) for target, isa in texts)


def _parts(listed: Iterable[FilePart]) -> tuple[FilePart, ...]:
    """Join the parts of a file that have code for the same GPUs; return none if all have.

    If there are still too many, more are joined as entries are: then more parts seem to lack code.
    """
    codes = [Code(files=part.count, name="", cubins=part.cubins, ptx=part.ptx) for part in listed]
    joined = _fewer(_alike(codes, _verdicts), MOST_PARTS)
    if len(joined) < 2:  # noqa: PLR2004
        return ()
    parts = [FilePart(count=code.files, cubins=code.cubins, ptx=code.ptx) for code in joined]
    return tuple(sorted(parts, key=lambda part: (-part.count, part.cubins)))


def join_entries(codes: Iterable[Code]) -> tuple[Code, ...]:
    """Join the entries that no known GPU tells apart, and then, if there are still too many, more of them.

    First those that another entry implies, because they never decide; then any two, which leaves the code
    that both have. No GPU is added by that.
    """
    listed = list(codes)
    names = frozenset(code.name for code in listed)
    optional = _fewer(_alike((code for code in listed if code.optional), _told_apart, names), MOST_OPTIONAL)
    deciding = _fewer(
        _alike((code for code in listed if not code.optional), _told_apart, names), MOST - len(optional)
    )
    return tuple(sorted((*deciding, *optional), key=lambda code: (code.optional, code.name)))


def require_matches(codes: Sequence[Code], unmatched: Sequence[str]) -> None:
    """Raise AuditError if a glob of optional files matches none with device code, or if all are optional."""
    if unmatched:
        remedy = "write it as `imagematrix verify --json IMAGE` writes the path of a file"
        raise AuditError(f"optional device code: {unmatched[0]!r} matches no file with any", remedy=remedy)
    if codes and all(code.optional for code in codes):
        raise AuditError("all device code is optional, so nothing tells on which GPUs the image runs")


def narrow_entry(code: Code, computes: Collection[str]) -> Code:
    """Return the code of an entry that runs best on GPUs of the capabilities `computes`."""
    cubins, texts = _best((code.cubins, code.ptx), computes)
    parts = [_part(part.count, _best((part.cubins, part.ptx), computes)) for part in code.parts]
    return replace(code, cubins=cubins, ptx=texts, parts=_parts(parts))


def _best(targets: Targets, computes: Iterable[str]) -> Targets:
    listed, ptxs = targets
    cubins: set[str] = set()
    texts: set[Ptx] = set()
    for compute in computes:
        running = [cubin for cubin in listed if device_code.cubin_runs(cubin, compute)]
        if running:
            cubins.add(min(running, key=lambda cubin: (device_code.measure_distance(cubin, compute), cubin)))
            continue
        fitting = [ptx for ptx in ptxs if device_code.ptx_runs(ptx.target, compute)]
        texts.update(sorted(fitting, key=lambda ptx: (versions.make_sort_key(ptx.isa), ptx.target))[:1])
    return (
        tuple(sorted(cubins, key=device_code.make_sort_key)),
        tuple(sorted(texts, key=lambda ptx: device_code.make_sort_key(ptx.target))),
    )


def _part(count: int, targets: Targets) -> FilePart:
    cubins, texts = targets
    return FilePart(count=count, cubins=cubins, ptx=texts)


def serves_all(code: Code, computes: Iterable[str], newest: str | None = None) -> bool:
    """Whether an entry has code for all capabilities in `computes`; its PTX is of an ISA up to `newest`."""
    limit = (PTX, versions.make_sort_key(newest)) if newest else None
    verdicts = [_verdict(code, compute) for compute in computes]
    return all(verdict is not None and (limit is None or verdict <= limit) for verdict in verdicts)


def find_lacking(code: Code, promised: Sequence[Code]) -> tuple[str, ...]:
    """Return the capabilities that all entries in `promised` serve, and `code` does not, in order.

    PTX of a newer ISA does not serve where that of an older one does.
    """
    return tuple(
        compute
        for index, compute in enumerate(device_code.list_capabilities())
        if _exceeds(_verdicts(code)[index], [_verdicts(other)[index] for other in promised])
    )


def _exceeds(own: Match, promised: Sequence[Match]) -> bool:
    served = [verdict for verdict in promised if verdict is not None]
    if len(served) < len(promised):
        return False
    return own is None or own > max(served, default=(CUBIN, ()))


@lru_cache(maxsize=1024)
def _verdicts(code: Code) -> tuple[Match, ...]:
    """Return for each capability what runs there: a cubin, PTX with its ISA version, or None for nothing."""
    return tuple(_verdict(code, compute) for compute in device_code.list_capabilities())


def _verdict(code: Code, compute: str) -> Match:
    if code.guard and code.guard.exempts(compute):
        return CUBIN, ()
    if any(device_code.cubin_runs(cubin, compute) for cubin in code.cubins):
        return CUBIN, ()
    isas = [versions.make_sort_key(ptx.isa) for ptx in code.ptx if device_code.ptx_runs(ptx.target, compute)]
    return (PTX, min(isas)) if isas else None


def _matches(code: Code) -> tuple[tuple[Match, int], ...]:
    """Return the verdicts, each with the distance of the nearest cubin."""
    matches = []
    for compute, verdict in zip(device_code.list_capabilities(), _verdicts(code), strict=True):
        running = [cubin for cubin in code.cubins if device_code.cubin_runs(cubin, compute)]
        nearest = min((device_code.measure_distance(cubin, compute) for cubin in running), default=0)
        matches.append((verdict, nearest))
    return tuple(matches)


def _told_apart(code: Code) -> Hashable:
    """Return what ranks a file on each GPU, its parts, and on which it is not used: equal ones are joined."""
    return _matches(code), code.parts, code.guard and code.guard.unless


def _alike(
    codes: Iterable[Code], key: Callable[[Code], Hashable], names: frozenset[str] = frozenset()
) -> list[Code]:
    """Join the entries with equal keys; `names` are those of all files, if globs are to be found."""
    groups: dict[object, list[Code]] = {}
    for code in sorted(codes, key=lambda code: code.name):
        groups.setdefault(key(code), []).append(code)
    return [_one(group, names) for group in groups.values()]


def _one(group: Sequence[Code], names: frozenset[str]) -> Code:
    """Return one entry for entries that no GPU tells apart; `names` are those of all files."""
    shortest = min(group, key=lambda code: (len(code.targets), code.targets))
    whole = replace(shortest, name=group[0].name, guard=group[0].guard, **_files(group))
    if names and len(group) == whole.files > 1:
        own = [code.name for code in group]
        whole = replace(whole, globs=_limited(find_covering_globs(own, names - {*own})))
    return whole


def _files(codes: Sequence[Code]) -> dict[str, Any]:
    """Return the number of the files of some entries, and the globs that match these."""
    files = sum(code.files for code in codes)
    known = all(code.globs or code.files == 1 for code in codes)
    globs = [glob for code in codes for glob in code.globs or (code.glob,)]
    return {"files": files, "globs": _limited(globs) if known and files > 1 else ()}


def _limited(globs: Sequence[str]) -> tuple[str, ...]:
    """Return the globs, or none if they are too many for a label."""
    return tuple(dict.fromkeys(globs)) if len(globs) <= MOST_GLOBS else ()


def find_covering_globs(names: Sequence[str], others: Collection[str]) -> list[str]:
    """Return few globs that match all of some names and none of the others.

    Names in a folder at the top that share a beginning and an end are one glob, if that matches nothing else.
    """
    by_top: dict[str, list[str]] = {}
    for name in sorted(set(names)):
        by_top.setdefault(_top(name), []).append(name)
    return [
        glob
        for top, own in by_top.items()
        for glob in _covering(own, [other for other in others if _top(other) == top])
    ]


def _top(name: str) -> str:
    return "/".join(name.split("/")[: 2 if name.startswith("/") else 1])


def _covering(names: Sequence[str], others: Sequence[str]) -> list[str]:
    if len(names) == 1:
        return [escape_glob(names[0])]
    start = posixpath.commonprefix(names)
    rests = [name[len(start) :] for name in names]
    end = posixpath.commonprefix([rest[::-1] for rest in rests])[::-1]
    glob = f"{escape_glob(start)}*{escape_glob(end)}"
    left = [other for other in others if other.startswith(start)]
    if not any(fnmatchcase(other, glob) for other in left):
        return [glob]
    by_letter: dict[str, list[str]] = {}
    for name, rest in zip(names, rests, strict=True):
        by_letter.setdefault(rest[:1], []).append(name)
    return [glob for own in by_letter.values() for glob in _covering(own, left)]


def _fewer(codes: list[Code], most: int) -> list[Code]:
    left = sorted(codes, key=lambda code: bool(code.parts))  # what is joined to others is then whole
    index = 0
    while len(left) > most and index < len(left):
        own = left[index]
        stricter = (at for at, code in enumerate(left) if at != index and not find_lacking(own, [code]))
        at = next(stricter, None)
        if at is None:
            index += 1
        else:
            left[at] = replace(left[at], **_files([left[at], own]))
            del left[index]
    while len(left) > most:
        *left, before, last = left
        left.append(_common(before, last))
    return left


def _common(first: Code, other: Code) -> Code:
    codes = [DeviceCode(cubins=frozenset(each.cubins), ptx=_pairs(each)) for each in (first, other)]
    return replace(
        first,
        **_files([first, other]),
        parts=(),
        cubins=tuple(find_common_cubins(codes)),
        ptx=tuple(Ptx(target=target, isa=isa) for target, isa in find_common_ptx(codes)),
        guard=None if first.guard != other.guard else first.guard,
    )


def _pairs(code: Code) -> frozenset[tuple[str, str]]:
    return frozenset((ptx.target, ptx.isa) for ptx in code.ptx)


def find_common_cubins(codes: Sequence[DeviceCode], guards: Sequence[UseGuard | None] = ()) -> list[str]:
    """Return the cubin targets that hold for all files: a GPU that runs one runs some cubin of every file.

    A file with a guard, from the list of these for all files, counts only on GPUs that the guard leaves.
    """
    listed = {target for code in codes for target in code.cubins}
    pairs = list(zip(codes, guards or [None] * len(codes), strict=True))
    return sorted(
        (target for target in listed if not any(lacks(code, target, guard) for code, guard in pairs)),
        key=device_code.make_sort_key,
    )


def lacks(code: DeviceCode, target: str, guard: UseGuard | None = None) -> bool:
    """Whether a GPU that runs cubins for `target` exists for which `code` has no cubin, and needs one."""
    return any(
        not any(device_code.cubin_runs(own, compute) for own in code.cubins)
        for compute in _covered(target)
        if not (guard and guard.exempts(compute))
    )


def find_common_ptx(codes: Sequence[DeviceCode]) -> list[tuple[str, str]]:
    """Return the target and the ISA version of each PTX that holds for all files.

    If a driver can compile such PTX for a GPU, every file has PTX that the driver can compile for that GPU.
    """
    listed = {target for code in codes for target, _ in code.ptx}
    targets = []
    for target in sorted(listed, key=device_code.make_sort_key):
        needed = [_isa(code, target) for code in codes]
        isas = [isa for isa in needed if isa]
        if len(isas) == len(needed):
            targets.append((target, max(isas, key=versions.make_sort_key)))
    return targets


def _isa(code: DeviceCode, target: str) -> str | None:
    """Return the lowest ISA version of PTX that runs wherever PTX for `target` runs, or None."""
    if code.scattered:
        return None
    capability = device_code.get_capability(target)
    exact = not target.isdigit()
    fitting: Iterable[str] = (
        isa
        for own, isa in code.ptx
        if own == target or (own.isdigit() and device_code.ptx_runs(own, capability) and not exact)
    )
    return min(fitting, key=versions.make_sort_key, default=None)


def _covered(target: str) -> list[str]:
    """Return the capabilities of the known GPUs that run cubins for `target`."""
    plain = {word.rstrip("af") for word in device_code.list_capability_words()}
    return [compute for compute in plain if device_code.cubin_runs(target, compute)] or [
        device_code.get_capability(target)
    ]
