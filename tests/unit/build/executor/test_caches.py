"""Places of caches as buildx takes them, and what BuildKit says of caches."""

import json
import re

import pytest

from imagematrix.build.executor.caches import CacheUse, ExternalCaches, format_cache_name
from imagematrix.common.image_reference import Reference
from imagematrix.errors import UsageError

IMPORTED = "#5 importing cache manifest from reg/cache:one\n#5 inferred cache manifest type: x\n"
CACHED = "#7 [stage-1 2/2] RUN make\n#7 CACHED\n"


@pytest.mark.parametrize(
    ("spec", "option"),
    [
        ("reg:5000/cache", "type=registry,ref=reg:5000/cache:one,mode=max"),
        ("reg:5000/cache:main", "type=registry,ref=reg:5000/cache:main-one,mode=max"),
        ("ref=reg/cache,mode=min", "type=registry,ref=reg/cache:one,mode=min"),
        ("type=local,dest=/a", "type=local,dest=/a,tag=one,mode=max"),
        (
            "type=local,dest=/a,tag=x,compression=zstd",
            "type=local,dest=/a,tag=x-one,mode=max,compression=zstd",
        ),
        ('type=local,"dest=/a,b"', 'type=local,"dest=/a,b",tag=one,mode=max'),
    ],
)
def test_each_cache_has_a_name_of_its_own(spec, option):
    with ExternalCaches(exports=[spec]).format_export_options("one") as options:
        assert options == [f"--cache-to={option}"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("type=gha", "caches of the type 'gha' are not supported"),
        ("type=inline", "caches of the type 'inline' are not supported"),
        ("type=registry", "ref is missing"),
        ("type=local,dest=/a", "src is missing"),
        ("type=local,src", "'src' is not NAME=VALUE"),
        ("", "ref is missing"),
        ('"', "is not a line of CSV"),
        ("a\nb=c", "is not a line of CSV"),
        ("reg/Cache", "invalid image reference"),
        (f"reg/cache@sha256:{'0' * 64}", "a digest is one cache"),
        ("type=registry,ref=reg/cache,tag=x", "tag is for folders only"),
        (f"reg/cache:{'x' * 51}", "the tag has 51 characters"),
    ],
)
def test_other_places_are_refused(spec, message):
    with pytest.raises(UsageError, match=message):
        ExternalCaches(imports=[spec])


def test_the_longest_tag_has_room_for_the_longest_cell():
    caches = ExternalCaches(exports=[f"reg/cache:{'x' * 50}"])
    with caches.format_export_options(format_cache_name("y" * 99)) as options:
        (reference,) = re.findall("ref=([^,]*)", options[0])
    assert len(Reference.parse(reference).tag) == 128


def test_folder_without_the_cache_is_not_read(tmp_path):
    caches = ExternalCaches([f"type=local,src={tmp_path}", "reg/cache"])
    registry = "--cache-from=type=registry,ref=reg/cache:one"
    assert caches.format_import_options("one") == [registry], (
        "BuildKit itself passes over one that no registry has"
    )
    for text in (
        "{",
        json.dumps({"manifests": [{}, {"annotations": {"org.opencontainers.image.ref.name": 1}}]}),
    ):
        (tmp_path / "index.json").write_text(text)
        assert caches.format_import_options("one") == [registry]
    found = {"manifests": [{"annotations": {"org.opencontainers.image.ref.name": "one"}}]}
    (tmp_path / "index.json").write_text(json.dumps(found))
    assert caches.format_import_options("one") == [
        f"--cache-from=type=local,src={tmp_path},tag=one",
        registry,
    ]


def test_names_of_caches_are_tags_and_differ():
    assert format_cache_name("cuda12.4-2.8+cpu", "a/b", "x").startswith("cuda12.4-2.8_cpu-")
    assert len(format_cache_name("x" * 200, "a")) < 128 - len("main-")
    assert format_cache_name("x", "a", "b") != format_cache_name("x", "a", "c")


@pytest.mark.parametrize(
    ("output", "imported"),
    [
        (f"{IMPORTED}#5 DONE 0.1s\n{CACHED}", True),
        (f"{IMPORTED}#5 ERROR: not found\n{CACHED}", False),
        (f"{IMPORTED}#5 DONE 0.1s\n#7 [stage-1 2/2] RUN make\n#7 DONE 0.4s\n", False),
        (f"{IMPORTED}#5 DONE 0.1s\n#4 [1/2] FROM a:1@sha256:0\n#4 CACHED\n", False),
        (f"{IMPORTED}#5 DONE 0.1s\n#1 [internal] load build context\n#1 CACHED\n", False),
        (CACHED, False),
    ],
)
def test_a_cache_is_used_if_it_was_found_and_a_step_did_not_run(output, imported):
    use = CacheUse()
    for line in output.splitlines(keepends=True):
        use.read_line(line)
    assert use.has_imported is imported
