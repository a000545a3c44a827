"""An image's device code: entries of a catalog, each of which has to run, and what all files have in common.

Files whose code no known GPU can tell apart are one entry.
"""

from __future__ import annotations

import posixpath
from fnmatch import fnmatchcase
from functools import lru_cache

from imagematrix.audit.binaries.device_code import DeviceCode
from imagematrix.common.groups import group_values
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
MOST_COMPARED = 256  # kinds of code that are compared with each other; the largest images have some dozens
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
    cubins, texts = _order_targets(code)
    return Code(
        files=files,
        name=name,
        globs=tuple(globs),
        cubins=cubins,
        ptx=() if code.scattered else texts,
        optional=optional,
        guard=None if optional else guard,
        parts=_join_parts(_make_part(part.count, _order_targets(part)) for part in code.parts),
    )


def _order_targets(code: DeviceCode | Fatbins) -> Targets:
    """Return the targets of cubins, and of PTX each with its lowest ISA version, in order."""
    lowest = dict(sorted(code.ptx, key=lambda pair: versions.make_sort_key(pair[1]), reverse=True))
    texts = sorted(lowest.items(), key=lambda pair: device_code.make_sort_key(pair[0]))
    cubins = sorted(code.cubins, key=device_code.make_sort_key)
    return tuple(cubins), tuple(Ptx(target=target, isa=isa) for target, isa in texts)


def _join_parts(listed: Iterable[FilePart]) -> tuple[FilePart, ...]:
    """Join the parts of a file that have code for the same GPUs; return none if all have.

    If there are still too many, more are joined as entries are: then more parts seem to lack code.
    """
    codes = [Code(files=part.count, name="", cubins=part.cubins, ptx=part.ptx) for part in listed]
    joined = _reduce_entries(_join_equal(codes, _judge), MOST_PARTS)
    if len(joined) < 2:  # noqa: PLR2004
        return ()
    parts = [FilePart(count=code.files, cubins=code.cubins, ptx=code.ptx) for code in joined]
    return tuple(sorted(parts, key=lambda part: (-part.count, part.cubins)))


def join_entries(codes: Iterable[Code]) -> tuple[Code, ...]:
    """Join the entries that no known GPU tells apart, and then, if there are still too many, more of them.

    First those that another entry implies, because they never decide; then any two, which leaves the code
    that both have. No GPU is added by that.
    """
    entries = list(codes)
    names = frozenset(code.name for code in entries)
    optional = _join_equal((code for code in entries if code.optional), _make_behaviour_key, names)
    deciding = _join_equal((code for code in entries if not code.optional), _make_behaviour_key, names)
    optional = _reduce_entries(optional, MOST_OPTIONAL)
    deciding = _reduce_entries(deciding, MOST - len(optional))
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
    cubins, texts = _choose_best((code.cubins, code.ptx), computes)
    parts = [_make_part(part.count, _choose_best((part.cubins, part.ptx), computes)) for part in code.parts]
    return replace(code, cubins=cubins, ptx=texts, parts=_join_parts(parts))


def _choose_best(targets: Targets, computes: Iterable[str]) -> Targets:
    """Return the targets of the code that a driver chooses on GPUs of the capabilities `computes`."""
    cubins, texts = targets
    best_cubins: set[str] = set()
    best_texts: set[Ptx] = set()
    for compute in computes:
        running = [cubin for cubin in cubins if device_code.can_run_cubin(cubin, compute)]
        if running:
            best_cubins.add(
                min(running, key=lambda cubin: (device_code.measure_distance(cubin, compute), cubin))
            )
            continue
        fitting = [ptx for ptx in texts if device_code.can_compile_ptx(ptx.target, compute)]
        best_texts.update(sorted(fitting, key=lambda ptx: (versions.make_sort_key(ptx.isa), ptx.target))[:1])
    return (
        tuple(sorted(best_cubins, key=device_code.make_sort_key)),
        tuple(sorted(best_texts, key=lambda ptx: device_code.make_sort_key(ptx.target))),
    )


def _make_part(count: int, targets: Targets) -> FilePart:
    cubins, texts = targets
    return FilePart(count=count, cubins=cubins, ptx=texts)


def serves_all(code: Code, computes: Iterable[str], newest: str | None = None) -> bool:
    """Whether an entry has code for all capabilities in `computes`; its PTX is of an ISA up to `newest`."""
    limit = (PTX, versions.make_sort_key(newest)) if newest else None
    verdicts = [_judge_capability(code, compute) for compute in computes]
    return all(verdict is not None and (limit is None or verdict <= limit) for verdict in verdicts)


def find_lacking(code: Code, promised: Sequence[Code]) -> tuple[str, ...]:
    """Return the capabilities that all entries in `promised` serve, and `code` does not, in order.

    PTX of a newer ISA does not serve where that of an older one does.
    """
    lacking = []
    judged = zip(device_code.list_capabilities(), _judge(code), *map(_judge, promised), strict=True)
    for compute, verdict, *verdicts in judged:
        served = [promise for promise in verdicts if promise is not None]
        if len(served) == len(verdicts) and (verdict is None or verdict > max(served, default=(CUBIN, ()))):
            lacking.append(compute)
    return tuple(lacking)


@lru_cache(maxsize=1024)
def _judge(code: Code) -> tuple[Match, ...]:
    """Return for each capability what runs there: a cubin, PTX with its ISA version, or None for nothing."""
    return tuple(_judge_capability(code, compute) for compute in device_code.list_capabilities())


def _judge_capability(code: Code, compute: str) -> Match:
    if code.guard and code.guard.exempts(compute):
        return CUBIN, ()
    if any(device_code.can_run_cubin(cubin, compute) for cubin in code.cubins):
        return CUBIN, ()
    isas = [
        versions.make_sort_key(ptx.isa)
        for ptx in code.ptx
        if device_code.can_compile_ptx(ptx.target, compute)
    ]
    return (PTX, min(isas)) if isas else None


def _make_behaviour_key(code: Code) -> Hashable:
    """Return what ranks a file on each GPU, its parts, and on which it is not used: equal ones are joined."""
    matches = []
    for compute, verdict in zip(device_code.list_capabilities(), _judge(code), strict=True):
        running = [cubin for cubin in code.cubins if device_code.can_run_cubin(cubin, compute)]
        nearest = min((device_code.measure_distance(cubin, compute) for cubin in running), default=0)
        matches.append((verdict, nearest))
    return tuple(matches), code.parts, code.guard and code.guard.unless


def _join_equal(
    codes: Iterable[Code], key: Callable[[Code], Hashable], names: frozenset[str] = frozenset()
) -> list[Code]:
    """Join the entries with equal keys; `names` are those of all files, if globs are to be found."""
    groups = group_values((key(code), code) for code in sorted(codes, key=lambda code: code.name))
    joined = []
    for group in groups.values():
        shortest = min(group, key=lambda code: (len(code.targets), code.targets))
        entry = replace(shortest, name=group[0].name, guard=group[0].guard, **_sum_files(group))
        if names and len(group) == entry.files > 1:
            members = [code.name for code in group]
            entry = replace(entry, globs=tuple(find_covering_globs(members, names - {*members})))
        joined.append(entry)
    return joined


def _sum_files(codes: Sequence[Code]) -> dict[str, Any]:
    """Return the fields of an entry that joins others: the number of its files, and the globs of these."""
    files = sum(code.files for code in codes)
    known = all(code.globs or code.files == 1 for code in codes)
    globs = [glob for code in codes for glob in code.globs or (code.glob,)]
    are_stated = known and files > 1 and len(globs) <= MOST_GLOBS
    return {"files": files, "globs": tuple(dict.fromkeys(globs)) if are_stated else ()}


def find_covering_globs(names: Sequence[str], excluded: Collection[str]) -> list[str]:
    """Return few globs that match all of `names` and none of `excluded`; none if that takes too many.

    Names in a folder at the top that share a beginning and an end are one glob, START*END, if that matches
    nothing else. If it does, they are divided by the letter after START: "a/x1.so", "a/x2.so" and "a/y.so"
    are "a/*.so", or beside "a/z.so" the two globs "a/x*.so" and "a/y.so".
    """
    excluded_by_folder = group_values((_get_top_folder(name), name) for name in excluded)
    by_folder = group_values((_get_top_folder(name), name) for name in sorted(set(names)))
    groups = [(members, excluded_by_folder.get(folder, [])) for folder, members in by_folder.items()][::-1]
    globs: list[str] = []
    while groups:
        if len(globs) + len(groups) > MOST_GLOBS:
            return []
        members, others = groups.pop()
        start, glob = _make_glob(members)
        others = [name for name in others if name.startswith(start)]
        if len(members) == 1 or not any(fnmatchcase(name, glob) for name in others):
            globs.append(glob)
        else:
            by_letter = group_values((name[len(start) :][:1], name) for name in members)
            groups += [(divided, others) for divided in reversed(by_letter.values())]
    return globs


def _get_top_folder(name: str) -> str:
    return "/".join(name.split("/")[: 2 if name.startswith("/") else 1])


def _make_glob(names: Sequence[str]) -> tuple[str, str]:
    """Return the START that names share, and the glob START*END; of a single name, the glob of this name."""
    start = posixpath.commonprefix(names)
    if len(names) == 1:
        return start, escape_glob(start)
    end = posixpath.commonprefix([name[len(start) :][::-1] for name in names])[::-1]
    return start, f"{escape_glob(start)}*{escape_glob(end)}"


def _reduce_entries(codes: list[Code], most: int) -> list[Code]:
    """Join entries until there are at most so many: first those that others imply, then the last two."""
    # What is joined to others is then whole.
    entries = _join_last(sorted(codes, key=lambda code: bool(code.parts)), max(most, MOST_COMPARED))
    judged = [_judge(entry) for entry in entries]
    index = 0
    while len(entries) > most and index < len(entries):
        entry, verdicts = entries[index], judged[index]
        stricter = (at for at, other in enumerate(judged) if at != index and _implies(other, verdicts))
        at = next(stricter, None)
        if at is None:
            index += 1
        else:
            entries[at] = replace(entries[at], **_sum_files([entries[at], entry]))
            del entries[index], judged[index]
    return _join_last(entries, most)


def _implies(verdicts: Sequence[Match], others: Sequence[Match]) -> bool:
    """Whether code with `others` runs wherever code with `verdicts` does, and on drivers as old."""
    return all(
        verdict is None or (other is not None and other <= verdict)
        for verdict, other in zip(verdicts, others, strict=True)
    )


def _join_last(codes: Sequence[Code], most: int) -> list[Code]:
    """Join the last two entries until there are at most so many."""
    entries = [*codes]
    while len(entries) > most:
        last = entries.pop()
        entries[-1] = _intersect_entries(entries[-1], last)
    return entries


def _intersect_entries(first: Code, second: Code) -> Code:
    codes = [
        DeviceCode(cubins=frozenset(entry.cubins), ptx=frozenset((ptx.target, ptx.isa) for ptx in entry.ptx))
        for entry in (first, second)
    ]
    return replace(
        first,
        **_sum_files([first, second]),
        parts=(),
        cubins=tuple(find_common_cubins(codes)),
        ptx=tuple(Ptx(target=target, isa=isa) for target, isa in find_common_ptx(codes)),
        guard=None if first.guard != second.guard else first.guard,
    )


def find_common_cubins(codes: Sequence[DeviceCode], guards: Sequence[UseGuard | None] = ()) -> list[str]:
    """Return the cubin targets that hold for all files: a GPU that runs such a cubin runs one of every file.

    A file with a guard, from the list of these for all files, counts only on GPUs that the guard leaves.
    """
    listed = {target for code in codes for target in code.cubins}
    pairs = list(zip(codes, guards or [None] * len(codes), strict=True))
    return sorted(
        (target for target in listed if not any(lacks_cubin(code, target, guard) for code, guard in pairs)),
        key=device_code.make_sort_key,
    )


def lacks_cubin(code: DeviceCode, target: str, guard: UseGuard | None = None) -> bool:
    """Whether a GPU that runs cubins for `target` exists for which `code` has no cubin, and needs one."""
    known = {word.rstrip("af") for word in device_code.list_capability_words()}
    computes = [compute for compute in known if device_code.can_run_cubin(target, compute)]
    return any(
        not any(device_code.can_run_cubin(cubin, compute) for cubin in code.cubins)
        for compute in computes or [device_code.get_capability(target)]
        if not (guard and guard.exempts(compute))
    )


def find_common_ptx(codes: Sequence[DeviceCode]) -> list[tuple[str, str]]:
    """Return the target and the ISA version of each PTX that holds for all files.

    If a driver can compile such PTX for a GPU, every file has PTX that the driver can compile for that GPU.
    """
    listed = {target for code in codes for target, _ in code.ptx}
    targets = []
    for target in sorted(listed, key=device_code.make_sort_key):
        lowest = [_find_lowest_isa(code, target) for code in codes]
        isas = [isa for isa in lowest if isa]
        if len(isas) == len(lowest):
            targets.append((target, max(isas, key=versions.make_sort_key)))
    return targets


def _find_lowest_isa(code: DeviceCode, target: str) -> str | None:
    """Return the lowest ISA version of PTX that runs wherever PTX for `target` runs, or None."""
    if code.scattered:
        return None
    capability = device_code.get_capability(target)
    exact = not target.isdigit()
    fitting: Iterable[str] = (
        isa
        for ptx, isa in code.ptx
        if ptx == target or (ptx.isdigit() and device_code.can_compile_ptx(ptx, capability) and not exact)
    )
    return min(fitting, key=versions.make_sort_key, default=None)
