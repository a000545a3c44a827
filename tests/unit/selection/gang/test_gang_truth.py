"""The choice for several hosts, compared with what trying every assignment of variants finds."""

from __future__ import annotations

from functools import partial
from itertools import combinations, product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies import allowed, catalogs, hosts

from imagematrix.common.record import replace
from imagematrix.errors import ImagematrixError, UsageError
from imagematrix.selection.gang.gang import NothingFitsAll
from imagematrix.selection.gang.gang_selection import select_gang
from imagematrix.selection.hardware_key import keep_distinct_gpus
from imagematrix.selection.order import make_sort_key, order_criteria
from imagematrix.selection.selection import NothingFits
from imagematrix.selection.selection_target import Target
from imagematrix.selection.selector import select

LIBRARIES = (None, (), (("nccl", None),), (("nccl", "2.18.1"),), (("nccl", "2.27.3"), ("torch", "2.8.0")))
NAMES = st.sampled_from([None, (), ("nccl",), ("cuda",), ("cuda", "nccl", "mpi", "torch")])


@st.composite
def audited(draw):
    """Return a catalog whose variants have libraries; most hosts are served by some of its variants."""
    catalog = draw(catalogs)
    return replace(
        catalog,
        variants=tuple(
            replace(variant, libraries=draw(st.sampled_from(LIBRARIES))) for variant in catalog.variants[:6]
        ),
    )


@st.composite
def differing(draw):
    """Return hosts of which no two are equal in flags, memory, addresses or anything else of their own."""
    some = {}
    for number, host in enumerate(draw(st.lists(hosts, min_size=1, max_size=4))):
        lacking = draw(st.sets(st.sampled_from(sorted(host.cpu.flags) or ["none"]), max_size=3))
        flags = host.cpu.flags - lacking | {f"own{number}"} if host.cpu.flags else host.cpu.flags
        gpus = tuple(
            replace(gpu, uuid=f"GPU-{number}-{gpu.index}", minor=gpu.index + number, memory_mib=900 + number)
            for gpu in host.gpus
        )
        cpu = replace(host.cpu, flags=flags, model=f"CPU {number}")
        some[f"n{number}"] = replace(host, cpu=cpu, gpus=gpus, warnings=(f"of {number}",))
    return some


gangs = st.lists(hosts, min_size=1, max_size=4).map(lambda some: {f"n{i}": one for i, one in enumerate(some)})


def fits(host, catalog, variant, **options):
    """Whether `select` takes a variant that is the only one."""
    try:
        return select(host, replace(catalog, variants=(variant,)), **options).variant is not None
    except NothingFits:
        return False


def like(one, other, names):
    """Whether two variants may run together."""
    if one is other:
        return True
    if names is None or (one.platform, one.gpu, one.axes) != (other.platform, other.gpu, other.axes):
        return False
    for name in names:
        if name == "cuda":
            if one.cuda != other.cuda or (one.gpu and one.cuda is None):
                return False
            continue
        if one.libraries is None or other.libraries is None:
            return False
        own, its = dict(one.libraries).get(name, "-"), dict(other.libraries).get(name, "-")
        if own is None or own != its:
            return False
    return True


def assignments(some, fitting, names):
    """Return the assignments of variants to hosts in which all are alike."""
    return [
        chosen
        for chosen in product(*(fitting[name] for name in some))
        if all(like(one, other, names) for one, other in combinations(chosen, 2))
    ]


def best(some, found, catalog, names, *, allow_cpu):
    """Return the assignment in which each host gets its best, and the worst off fares best."""
    criteria = order_criteria(catalog.prefer)
    targets = [
        keep_distinct_gpus(Target(host=host, gpus=host.gpus, allow_cpu=allow_cpu)) for host in some.values()
    ]
    ranked = []
    for seed in found:
        inside = [chosen for chosen in found if all(like(seed[0], one, names) for one in chosen)]
        each = tuple(
            min({chosen[place] for chosen in inside}, key=partial(make_sort_key, criteria, target))
            for place, target in enumerate(targets)
        )
        worst = [
            max(criterion.rate(target, one) for target, one in zip(targets, each, strict=True))
            for criterion in criteria
        ]
        references = [one.reference for one in each]
        ranked.append((worst, sorted(references), references))
    return min(ranked)[-1]


@settings(max_examples=200)
@given(st.one_of(gangs, differing()), audited(), NAMES, allowed)
def test_trying_every_assignment_finds_the_same(some, catalog, names, allow_cpu):
    fitting = {
        name: [one for one in catalog.variants if fits(host, catalog, one, allow_cpu=allow_cpu)]
        for name, host in some.items()
    }
    found = assignments(some, fitting, names)
    if found:
        gang = select_gang(some, catalog, alike=names, allow_cpu=allow_cpu)
        chosen = [member.variant.reference for member in gang.members]
        assert chosen == best(some, found, catalog, names, allow_cpu=allow_cpu)
        assert gang.complete
        return
    with pytest.raises(NothingFitsAll) as caught:
        select_gang(some, catalog, alike=names, allow_cpu=allow_cpu)
    gang = caught.value.gang
    largest = max(
        (
            len(part)
            for size in range(len(some))
            for part in combinations(some, size)
            if part and assignments(part, fitting, names)
        ),
        default=0,
    )
    assert len(gang.members) == largest
    assert all(like(a.variant, b.variant, names) for a, b in combinations(gang.members, 2))
    assert all(member.variant in fitting[member.name] for member in gang.members)
    left = [name for part in gang.left for name in part.hosts]
    assert sorted([*left, *(member.name for member in gang.members)]) == sorted(some)
    assert all(part.rules for part in gang.left) or not catalog.variants


@given(differing(), audited(), NAMES, allowed, st.sampled_from([None, 1, "none", "memory>=900M"]))
def test_hosts_get_and_lack_the_same_whatever_is_their_own(some, catalog, names, allow_cpu, gpus):
    """Flags that no variant needs, and what no rule reads, change neither the answer nor a reason."""

    def told(each):
        options = {"alike": names, "allow_cpu": allow_cpu, "gpus": gpus}
        try:
            return select_gang(each, catalog, **options).to_json()
        except NothingFitsAll as error:
            return error.gang.to_json(), error.remedy
        except UsageError as error:
            return str(error)

    shared = {
        name: replace(host, cpu=replace(host.cpu, flags=host.cpu.flags - {f"own{name[1:]}"}), warnings=())
        for name, host in some.items()
        if host.cpu.flags != {f"own{name[1:]}"}
    }
    assume(len(shared) == len(some))
    assert told(some) == told(shared)


@given(hosts, audited(), NAMES, allowed, st.sampled_from([None, 1, 2, "none"]))
def test_a_gang_of_one_gets_what_select_returns(host, catalog, names, allow_cpu, gpus):
    try:
        wanted = select(host, catalog, gpus=gpus, allow_cpu=allow_cpu)
    except ImagematrixError as error:
        with pytest.raises(NothingFitsAll if isinstance(error, NothingFits) else UsageError):
            select_gang([host], catalog, gpus=gpus, allow_cpu=allow_cpu, alike=names)
        return
    (member,) = select_gang([host], catalog, gpus=gpus, allow_cpu=allow_cpu, alike=names).members
    assert (member.variant, member.gpus) == (wanted.variant, wanted.gpus)


@settings(max_examples=150)
@given(gangs, audited(), st.sampled_from([1, 2]), allowed)
def test_a_count_of_gpus_is_served_wherever_a_variant_fits_so_many(some, catalog, count, allow_cpu):
    assume(catalog.variants)
    options = {"gpus": count, "allow_cpu": allow_cpu}
    try:
        fitting = [
            [fits(host, catalog, one, **options) for host in some.values()] for one in catalog.variants
        ]
    except UsageError:
        with pytest.raises(UsageError):
            select_gang(some, catalog, **options)
        return
    common = [one for one, each in zip(catalog.variants, fitting, strict=True) if all(each)]
    try:
        gang = select_gang(some, catalog, **options)
    except NothingFitsAll:
        assert not common
        return
    assert gang.members[0].variant in common
    for member in gang.members:
        alone = replace(catalog, variants=(member.variant,))
        assert member.gpus == select(member.host, alone, **options).gpus
        assert gang.selection(member.name).selected == member.variant.reference
