"""`imagematrix needs`: what an image needs from a node, for people and for systems that choose it."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from imagematrix.cli.shared.options import AllowCpu, CatalogName, Image, Json, Policy, Where
from imagematrix.cli.shared.output import (
    fold_paragraph,
    print_document,
    print_info,
    print_json,
    print_text,
)
from imagematrix.common.text import shorten_words
from imagematrix.errors import UsageError
from imagematrix.selection import drivers

EXAMPLE = "imagematrix needs registry.example.com/ml/training:v1 --knows cuda,gpu-name --injects"
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from typing import Any

    from imagematrix.images.catalog.catalog import Catalog
    from imagematrix.integrations.clouds.image_needs import ImageNeeds
    from imagematrix.selection.needs.knowledge import Knowledge
    from imagematrix.selection.needs.statement import Assumption

SYSTEMS = ("runpod",)
PEOPLE = "arch,cpu-flags,driver,gpu-name,gpu-least-memory-mib"  # facts that people know of a node
NAMES = {
    "unknown_compute": "or of an unknown capability:",
    "last_branch": "GPUs supported up to driver branch",
    "states": "GPU state",
    "brands": "GPU brand",
    "modules": "kernel modules",
    "differs": "another user-mode driver than the kernel modules:",
    "accelerators": "other accelerators:",
    "data_centre": "data-centre GPUs:",
}
SHOWN_VARIANTS = 2  # variants that an assumption is about
WORDS = {True: "yes", False: "no", None: "unknown"}
SHOWN = 6  # names of GPUs in a line of text; --json has all


def command(
    image: Image,
    catalog: CatalogName = None,
    policy: Policy = None,
    where: Where = None,
    allow_cpu: AllowCpu = False,
    knows: Annotated[
        str | None,
        typer.Option(
            "--knows",
            metavar="FACT[,...]",
            help="Say it in these facts of a node only, such as cuda,gpu-name, with what is then assumed.",
        ),
    ] = None,
    injects: Annotated[
        bool,
        typer.Option(
            "--injects",
            help="The system adds its node's driver to every container, as NVIDIA's runtime does: leave out "
            "variants with a driver of their own.",
        ),
    ] = False,
    system: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="SYSTEM",
            help="Print the requests of a system, one JSON body in each line: runpod.",
            autocompletion=lambda: list(SYSTEMS),
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Print what each variant of an image, and the version as a whole, needs from a node.

    Without --knows, the text is about what people know of a node: driver, GPUs and CPU; where these do not
    tell whether a variant fits, it is about all facts. --json has all facts that rules compare: a node meets
    its conditions if and only if the variant fits.

    With --knows, print a statement about nodes in these facts: every node that meets it, and for which the
    listed assumptions hold, runs the variant. If there is none, the exit code is 3.
    """
    from imagematrix.cli.shared.inputs import find_catalog
    from imagematrix.integrations.clouds.image_needs import find_image_needs
    from imagematrix.selection.query import narrow_catalog, parse_where

    if system is not None:
        _require_alone(system, {"--knows": knows, "--injects": injects, "--allow-cpu": allow_cpu})
    knowledge = _parse_knowledge(knows)
    narrowed = narrow_catalog(find_catalog(image, catalog, policy), parse_where(where or ()))
    if system is not None:
        _print_requests(narrowed, json=json)
        return
    needs = find_image_needs(narrowed, knowledge, injects=injects, allow_cpu=allow_cpu)
    if json:
        print_json(needs.to_json())
    elif needs.variants:
        if knowledge is None:
            known = _parse_knowledge(PEOPLE)
            shown = find_image_needs(narrowed, known, injects=injects, allow_cpu=allow_cpu)
            needs = _prefer(shown, needs)
        print_text(*_format_needs(needs))
    needs.require_variants()


def _require_alone(system: str, options: Mapping[str, object]) -> None:
    """Raise UsageError if there is no such system, or for options that it decides itself."""
    from imagematrix.common.suggestions import require_known

    require_known(system, SYSTEMS, "--for")
    for option, value in options.items():
        if value:
            raise UsageError(
                f"--for {system} says what the system knows and does", remedy=f"leave out {option}"
            )


def _parse_knowledge(knows: str | None) -> Knowledge | None:
    from imagematrix.integrations.kubernetes.nodes.labels import VOCABULARY
    from imagematrix.selection.needs.knowledge import Knowledge, parse_words

    if knows is None:
        return None
    return Knowledge(vocabulary=VOCABULARY, words=parse_words(knows, VOCABULARY))


def _prefer(shown: ImageNeeds, complete: ImageNeeds) -> ImageNeeds:
    """Return `complete`, with the variants as in `shown` where it has them."""
    variants = {one.variant: one for one in shown.variants}
    return replace(complete, variants=tuple(variants.get(one.variant, one) for one in complete.variants))


def _print_requests(catalog: Catalog, *, json: bool) -> None:
    """Print the bodies of RunPod's requests; on stderr what they assume, and what is left out."""
    from json import dumps

    from imagematrix.integrations.clouds.runpod import find_runpod_needs, make_bodies

    needs = find_runpod_needs(catalog)
    bodies = make_bodies(needs)
    if json:
        print_json(needs.to_json() | {"bodies": bodies})
    else:
        # Where all are left out, the error says why.
        left_out = _format_left_out(needs) if needs.variants else ()
        for line in (*_format_assumptions(needs), *left_out):
            print_info(line)
        for body in bodies:
            print_document(f"{dumps(body)}\n")
    needs.require_variants()


def _format_needs(needs: ImageNeeds) -> Iterator[str]:
    for one in needs.variants:
        mode = f"driver mode {drivers.get_driver_mode(one.variant)}" if one.variant.gpu else "for CPUs only"
        facts = [one.variant.platform, mode, *([f"CUDA {one.variant.cuda}"] if one.variant.cuda else [])]
        yield f"{one.variant.reference}: {', '.join(facts)}"
        for index, alternative in enumerate(one.alternatives):
            conditions = "; ".join(_describe_conditions(one.describe(alternative))) or "nothing"
            yield from fold_paragraph("  ", f"{'or ' if index else ''}needs {conditions}")
        if one.stricter:
            asked = " and ".join(one.variant.requires)
            than = "stricter than its code" if one.stricter == "image" else "no stricter than its code"
            yield from fold_paragraph("  ", f"the image's own NVIDIA_REQUIRE_* is {than}: {asked}")
    yield from _format_left_out(needs)
    yield ""
    least = "; ".join(_describe_least(needs.describe_least()))
    yield from fold_paragraph("", f"{needs.catalog.image}:{needs.catalog.version} as a whole: {least}")
    yield from _format_assumptions(needs)


def _format_assumptions(needs: ImageNeeds) -> Iterator[str]:
    """Yield each assumption once, with the variants that it is about if others do without it."""
    references: dict[Assumption, list[str]] = {}
    for one in needs.variants:
        for assumption in one.assumptions:
            references.setdefault(assumption, []).append(one.variant.reference)
    for assumption, about in references.items():
        names = "" if len(about) == len(needs.variants) else f" for {shorten_words(about, SHOWN_VARIANTS)}"
        yield from fold_paragraph("", f"assumed{names}: {assumption.text}")


def _format_left_out(needs: ImageNeeds) -> Iterator[str]:
    for one in needs.left_out:
        yield from fold_paragraph("", f"left out: {one.reference}: {one.reason}")


def _describe_conditions(conditions: Mapping[str, Any]) -> Iterator[str]:
    """Yield the conditions of a need in words; those without words of their own by their keys."""
    shown = {"driver", "cuda", "gpus", "vendor", "computes", "gpu_names", "memory_mib", "cpu"}
    if "driver" in conditions:
        yield _describe_driver(conditions["driver"])
    if "cuda" in conditions:
        yield f"a driver for CUDA {_format_range(conditions['cuda'], 'or newer')}"
    if conditions.get("gpus") is False:
        yield "no GPU"
    elif conditions.get("gpus"):
        yield _describe_gpus(conditions)
    if "cpu" in conditions:
        words = [conditions["cpu"]["level"], *conditions["cpu"]["flags"]]
        yield f"CPU {' '.join(filter(None, words))}"
    for key, value in conditions.items():
        if key not in shown:
            words = [WORDS.get(word, str(word)) for word in (value if isinstance(value, list) else [value])]
            yield f"{NAMES.get(key, key.replace('_', ' '))} {' or '.join(words)}"


def _describe_driver(driver: Mapping[str, Any]) -> str:
    if "version" in driver:
        return f"driver {driver['version']}"
    rules = f" ({', '.join(driver['rules'])})" if "rules" in driver else ""
    bounds = [
        *([f"{driver['oldest']} or newer{rules}"] if "oldest" in driver else []),
        *([f"older than {driver['below']}"] if "below" in driver else []),
        *(f"not {version}" for version in driver.get("other_than", ())),
    ]
    return f"driver {', '.join(bounds)}"


def _describe_gpus(conditions: Mapping[str, Any]) -> str:
    words = "NVIDIA GPUs"
    if "computes" in conditions:
        words += f" {_format_computes(conditions['computes'])}"
    if "memory_mib" in conditions:
        words += f" with {conditions['memory_mib']} MiB or more"
    names = conditions.get("gpu_names", [])
    return f"{words}: {shorten_words(names, SHOWN)}" if names else words


def _format_computes(ranges: Iterable[Mapping[str, str | None]]) -> str:
    return ", ".join(_format_range(span, "and later") for span in ranges)


def _format_range(span: Mapping[str, str | None], rest: str) -> str:
    if span["last"] is None:
        return f"{span['first']} {rest}"
    return f"{span['first']}" if span["first"] == span["last"] else f"{span['first']} to {span['last']}"


def _describe_least(least: Mapping[str, Any]) -> Iterator[str]:
    yield ", ".join(least["platforms"])
    if driver := least["driver"]:
        rules = f" ({', '.join(driver['rules'])})" if driver["rules"] else ""
        yield f"oldest driver {driver['version']}{rules}, with {driver['reference']}"
    if least["cuda"]:
        yield f"CUDA {', '.join(least['cuda'])}"
    if least["computes"]:
        memory = f" with {least['memory_mib']} MiB or more" if least["memory_mib"] else ""
        yield f"NVIDIA GPUs {_format_computes(least['computes'])}{memory}"
    if least["cpu_level"]:
        yield f"CPU from {least['cpu_level']} on"
