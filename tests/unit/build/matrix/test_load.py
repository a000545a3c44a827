"""Every invalid matrix gets one clear error with a position, never a traceback."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from matrices import add_axis, add_include, add_key, add_option, add_properties

from imagematrix.build.matrix import document
from imagematrix.build.matrix.image_test import ImageTest
from imagematrix.build.matrix.load import load_matrix
from imagematrix.build.matrix.problems import MatrixError
from imagematrix.errors import ImagematrixError, UsageError
from imagematrix.images.catalog.warm_up import WarmUp


def message(path):
    with pytest.raises(MatrixError) as caught:
        load_matrix(path)
    return str(caught.value).replace(f"{path}:", "")


def test_valid_matrix_keeps_order_and_text(project):
    matrix = load_matrix(project())
    assert list(matrix.axes) == ["cuda", "compute", "driver", "march"]
    assert matrix.axes["cuda"] == ("none", "11.8", "12.4")
    assert matrix.properties["cuda"]["12.4"] == {"base": "debian:trixie", "compiler": "gcc-14"}
    assert matrix.exclude[0].why == "they have the newer toolkit"
    assert matrix.images[0].development is False


@pytest.mark.parametrize(
    ("text", "test"),
    [
        ("train --check", ImageTest(command=("/bin/sh", "-c", "train --check"))),
        ("[train, --check]", ImageTest(command=("train", "--check"))),
        ("{command: [train], network: true}", ImageTest(command=("train",), network=True)),
        (
            "{command: [train], secrets: [b, a]}",
            ImageTest(command=("train",), secrets=("a", "b")),
        ),
    ],
)
def test_test_of_an_image_is_a_line_or_words(project, text, test):
    (image,) = load_matrix(project(add_option(f"test: {text}"))).images
    assert image.test == test


def test_mounts_of_a_test_are_files_beside_the_matrix(project):
    def written(mounts):
        return project(add_option(f"test: {{command: a, mounts: {mounts}}}"))

    folder = written("{}").parent
    (folder / "data").mkdir()
    (image,) = load_matrix(written("{/data: data}")).images
    assert image.test.mounts == (("/data", folder / "data"),)
    for mounts, fault in (
        ("{/data: ../x}", "is outside the matrix's folder"),
        ("{/data: /etc}", "is outside the matrix's folder"),
        ("{/data: absent}", "absent not found"),
        ("{data: data}", "is not an absolute path"),
        ("{/../data: data}", "is not an absolute path"),
    ):
        with pytest.raises(MatrixError, match=fault):
            load_matrix(written(mounts))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("[]", "a test needs a command"),
        ("''", "a test needs a command"),
        ("{network: true}", "'command' is missing"),
        ("{command: a, network: perhaps}", "'perhaps' is neither true nor false"),
        ("{command: a, sercets: b}", "test has no 'sercets'"),
        ("{command: a, secrets: '../x'}", "'../x' is not an id"),
        ("[a, [b]]", "expected a word, found a list"),
    ],
)
def test_invalid_test_is_rejected(project, text, fault):
    with pytest.raises(MatrixError, match=fault):
        load_matrix(project(add_option(f"test: {text}")))


def test_warm_up_has_what_is_stated(project):
    text = """warm_up:
      command: [serve, --load-format, dummy]
      gpus: 2
      timeout: 1h
      environment: {TOKENIZERS_PARALLELISM: false, OMP_NUM_THREADS: 4}
      inputs: {tokenizer: /models/t, model: /models/m}
      network: engine
      max_size: 1.5GiB
      match: compute"""
    (image,) = load_matrix(project(add_option(text))).images
    assert image.warm_up == WarmUp(
        command=("serve", "--load-format", "dummy"),
        gpus="2",
        timeout_s=3600,
        environment=(("OMP_NUM_THREADS", "4"), ("TOKENIZERS_PARALLELISM", "false")),
        inputs=(("model", "/models/m"), ("tokenizer", "/models/t")),
        network="engine",
        max_size=1610612736,
        match="compute",
    )


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("train --warm-up", ("/bin/sh", "-c", "train --warm-up")),
        ("[train, --warm-up]", ("train", "--warm-up")),
    ],
)
def test_command_of_a_warm_up_is_a_line_or_words(project, command, words):
    (image,) = load_matrix(project(add_option(f"warm_up: {{command: {command}}}"))).images
    assert image.warm_up == WarmUp(command=words)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train", "7:14: warm_up: expected a map, found the word 'train'"),
        ("{}", "7:14: 'command' is missing\n  write command: [train, --warm-up]"),
        ("{command: []}", "7:24: a warm-up needs a command\n  such as command: [train, --warm-up]"),
        ("{command: ''}", "7:24: a warm-up needs a command"),
        ("{command: [a, [b]]}", "7:28: command: expected a word, found a list"),
        ("{commands: a}", "7:15: warm_up has no 'commands'\n  did you mean 'command'?"),
        ("{command: a, gpus: 0}", "7:33: '0' is no number of GPUs\n  write all, none or a count such as 1"),
        ("{command: a, gpus: [1]}", "7:33: gpus: expected a word, found a list"),
        (
            "{command: a, timeout: 0m}",
            "7:36: '0m' is no time that a warm-up can take\n  write a time from 1s to 24h, such as 20m",
        ),
        ("{command: a, timeout: 2d}", "7:36: '2d' is no time that a warm-up can take"),
        ("{command: a, timeout: 20}", "7:36: '20' is no time that a warm-up can take"),
        (
            "{command: a, max_size: 33GiB}",
            "7:37: '33GiB' is no size that caches can have\n  write a size from 1MB to 32GiB, such as 2GiB",
        ),
        ("{command: a, max_size: 0GB}", "7:37: '0GB' is no size that caches can have"),
        ("{command: a, network: engin}", "7:36: invalid network: 'engin'\n  did you mean 'engine'?"),
        ("{command: a, match: gpu}", "7:34: invalid match: 'gpu'\n  one of product, compute"),
        (
            "{command: a, environment: {HF_TOKEN: x}}",
            "7:41: HF_TOKEN looks like a secret, which a warm-up does not get: a cache shows it to everyone",
        ),
        ("{command: a, environment: {A-B: x}}", "7:41: 'A-B' cannot be the name of a variable"),
        ("{command: a, environment: {A: [x]}}", "7:44: A: expected a word, found a list"),
        (
            "{command: a, environment: {NUMBA_CACHE_DIR: /tmp/numba}}",
            "7:41: NUMBA_CACHE_DIR: a cache in /tmp/numba breaks when another user runs the image (--user)",
        ),
        ("{command: a, inputs: [m]}", "7:35: inputs: expected a map, found a list"),
        ("{command: a, inputs: {m: models}}", "7:36: 'models' is not the absolute path of a folder"),
        ("{command: a, inputs: {m: /a/../b}}", "7:36: '/a/../b' is not the absolute path of a folder"),
        ("{command: a, inputs: {m: /var}}", "7:36: /var overlaps /var/cache/warm, where the caches are"),
        (
            "{command: a, inputs: {m: /m, t: /m/t}}",
            "7:43: /m/t overlaps /m, the input m\n  give each its own folder",
        ),
    ],
)
def test_errors_of_a_warm_up_have_a_position_and_a_remedy(project, text, expected):
    assert expected in message(project(add_option(f"warm_up: {text}")))


def test_numbers_of_variables_and_inputs_are_limited(project):
    variables = ", ".join(f"A{number}: x" for number in range(101))
    inputs = ", ".join(f"i{number}: /m/{number}" for number in range(33))
    text = f"warm_up: {{command: a, environment: {{{variables}}}, inputs: {{{inputs}}}}}"
    found = message(project(add_option(text)))
    assert "7:40: more than 100 variables" in found
    assert "more than 32 inputs" in found


@pytest.mark.parametrize(
    ("text", "strict"), [("{march: strict}", True), ("{march: warn}", False), ("{}", False)]
)
def test_audit_strictness_is_read(project, text, strict):
    matrix = load_matrix(project(add_option(f"audit: {text}")))
    assert matrix.images[0].strict_march is strict


@pytest.mark.parametrize(
    ("properties", "expected"),
    [
        ("driver: {'6*': {driver_from: new}}", "13:12: no value of the axis driver matches 6*"),
        ("march: {'z*': {driver_from: new}}", "driver_from belongs to a version of the axis driver"),
        ("driver: {'*': {driver_from: 'new/{release}'}}", "driver_from: '{' could break out"),
        ("driver: {'*': {driver_base: 'debian:{version}'}}", "driver_base: '{' could break out"),
        (
            "driver: {550.163.01: {driver_form: drivers/550.163.01}}",
            "13:25: 'driver_form' is not a known property\n  did you mean 'driver_from'?",
        ),
        (
            "march: {znver4: {driver_from: drivers/550.163.01}}",
            "13:20: driver_from belongs to a version of the axis driver, under `properties`",
        ),
        ("driver: {550.163.01: {driver_from: [a]}}", "driver_from: expected a word, found a list"),
        ("driver: {550.163.01: {driver_from: 'a$b'}}", "driver_from: '$' could break out"),
    ],
)
def test_driver_from_is_checked_with_a_position(project, tmp_path, properties, expected):
    path = project(add_properties(properties))
    assert expected in message(path).replace(str(tmp_path), "DIR")


def test_driver_from_requires_a_version_of_the_driver_axis(project, tmp_path):
    (tmp_path / "new").mkdir()
    misplaced = "driver_from belongs to a version of the axis driver"
    host = ("550.163.01]", "host]"), add_properties("driver: {host: {driver_from: new}}")
    assert misplaced in message(project(*host, ("driver: 550.163.01", "driver: host")))
    assert misplaced in message(project(add_include("{driver_from: new}")))


COMPAT = ("550.163.01]", "550.163.01, compat, host]")


@pytest.mark.parametrize(
    ("properties", "expected"),
    [
        (
            "driver: {550.163.01: {compat_from: a}}",
            "13:25: compat_from belongs to the value compat of the axis driver, or to a release of the axis",
        ),
        ("driver: {'*': {compat_from: a}}", "13:18: compat_from belongs to the value compat"),
        ("driver: {host: {compat_from: a}}", "13:19: compat_from belongs to the value compat"),
        ("driver: {compat: {driver_from: a}}", "13:21: driver_from belongs to a version of the axis driver"),
        ("driver: {compat: {compat_form: a}}", "did you mean 'compat_from'?"),
        ("driver: {compat: {compat_from: 'a/{version}'}}", "compat_from: '{' could break out"),
        ("driver: {compat: {compat_from: 'http://a/b'}}", "compat_from: http:// is not supported"),
    ],
)
def test_compat_from_is_checked_with_a_position(project, properties, expected):
    assert expected in message(project(COMPAT, add_properties(properties)))


def test_compat_from_belongs_to_the_driver_or_to_a_release(project):
    text = 'driver: {compat: {compat_from: "a_{arch}.deb"}, "*": {driver_from: b}}'
    matrix = load_matrix(project(COMPAT, add_properties(text)))
    assert matrix.get_properties("driver", "compat") == {"compat_from": "a_{arch}.deb"}
    assert matrix.get_properties("driver", "host") == {}
    release = ('"12.4": {', '"12.4": {compat_from: a, ')
    assert load_matrix(project(COMPAT, release)).get_properties("cuda", "12.4")["compat_from"] == "a"
    without_cuda = ("none: {", "none: {compat_from: a, ")
    assert "compat_from belongs to" in message(project(COMPAT, without_cuda))
    assert "compat_from belongs to" in message(project(COMPAT, add_include("{compat_from: a}")))


def test_properties_of_a_glob_hold_for_values_without_their_own(project):
    globs = "driver: {'55*': {driver_from: a}, 550.163.01: {driver_from: b}, '*': {driver_from: c, more: d}}"
    drivers = ("550.163.01]", "host, 550.163.01, 550.54.15, 580.159.04]")
    matrix = load_matrix(project(drivers, add_properties(globs)))
    assert matrix.get_properties("driver", "550.163.01") == {"driver_from": "b"}
    assert matrix.get_properties("driver", "550.54.15") == {"driver_from": "a"}
    assert matrix.get_properties("driver", "580.159.04") == {"driver_from": "c", "more": "d"}
    assert matrix.get_properties("driver", "host") == {}


def test_driver_may_come_from_a_folder(project):
    matrix = load_matrix(project(add_properties("driver: {550.163.01: {driver_from: new}}")))
    assert matrix.properties["driver"]["550.163.01"] == {"driver_from": "new"}


@pytest.mark.parametrize(
    ("top", "of_image", "expected"),
    [
        (None, None, "zstd -3"),
        ("gzip", None, "gzip -6"),
        ("zstd", "gzip", "gzip -6"),
        ("{type: gzip, level: 9}", "zstd", "zstd -3"),
        ("{type: gzip, level: 9}", None, "gzip -9"),
        ("{type: gzip, level: 9}", "{type: gzip}", "gzip -6"),
        ("gzip", "{type: zstd, level: 19}", "zstd -19"),
        (None, "{level: 1, type: zstd}", "zstd -1"),
        (None, "{level: '01', type: gzip}", "gzip -1"),
    ],
)
def test_compression_of_an_image_overrides_that_of_the_matrix(project, top, of_image, expected):
    changes = [add_key(f"compression: {top}")] if top else []
    changes += [add_option(f"compression: {of_image}")] if of_image else []
    assert str(load_matrix(project(*changes)).images[0].compression) == expected


def test_unquoted_version_keeps_its_trailing_zero(project):
    assert load_matrix(project(('"8.9"', "12.0"))).axes["compute"] == ("7.0", "12.0")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            ("schema: imagematrix.matrix/v1\n", ""),
            "1:1: 'schema' is missing\n  write schema: imagematrix.matrix/v1",
        ),
        (("axes:", "x:"), "1:1: 'axes' is missing\n  write axes: {march: [x86-64-v2, x86-64-v3]}"),
        (
            ("images:", "x:"),
            "1:1: 'images' is missing\n  write images: {app: {version: v1, template: app/Dockerfile.j2}}",
        ),
        (("    version: v1\n", ""), "'version' is missing\n  write version: v1"),
        (("    template: training.j2\n", ""), "'template' is missing\n  write template: app/Dockerfile.j2"),
        (("matrix/v1", "matrix/v9"), "1:9: the schema is 'imagematrix.matrix/v9'"),
        (("axes:", "axis:"), "did you mean 'axes'?"),
        (
            ("  march:", "  marhc:"),
            "11:3: 'marhc' is not a known axis\n  did you mean 'march'?",
        ),
        (("  march:", "  arch:"), "11:3: 'arch' is not a known axis\n  did you mean 'platform'?"),
        (("march: [x86-64-v3, znver4]", "march: [x86-64-v3, znvr4]"), "did you mean 'znver4'?"),
        (("znver4]", "native]"), "march native depends on the builder's CPU"),
        (('"8.9"', '"9"'), "'9' is not a compute capability such as 8.6 or 9.0a\n  did you mean '9.0'?"),
        (
            ('"8.9"', "sm_90"),
            "'sm_90' is not a compute capability such as 8.6 or 9.0a\n  did you mean '9.0'?",
        ),
        (('"8.9"', "H100"), "did you mean '9.0', which such a GPU has?"),
        (('"8.9"', "100"), "did you mean '10.0'?"),
        (('"8.9"', "rtx4090"), "did you mean '8.9', which such a GPU has?"),
        (('"8.9"', "9.0b"), "'9.0b' is not a compute capability"),
        (('"12.4"]', '"12.7"]'), "unknown CUDA release 12.7"),
        (('"12.4"]', "12]"), "'12' is not a CUDA release such as 12.4"),
        (("550.163.01]", "550]"), "'550' is not a driver version such as 550.163.01"),
        (("znver4]", "znver4, znver4]"), "the value 'znver4' occurs twice"),
        (("[x86-64-v3, znver4]", "[]"), "the axis march has no values"),
        (("[x86-64-v3, znver4]", "{a: b}"), "the axis march: expected a list, found a map"),
        (("images:\n  training:", "images:\n- training:"), "images: expected a map, found a list"),
        (("version: v1", "version: v1-2"), "'v1-2' is not a version such as v1"),
        (("version: v1\n", "version:\n"), "version: expected a word, found nothing"),
        (
            ("version: v1\n", "version: development\n"),
            "4:14: 'development' would be a version like any other: frozen, and pushed when it is built",
        ),
        (("  training:", "  Training:"), "'Training' is not an image name"),
        (("training.j2", "trainin.j2"), "did you mean 'training.j2'?"),
        (("training.j2", f"{'a' * 300}.j2"), f"template {'a' * 300}.j2 not found"),
        (("context: .", "context: nowhere"), "nowhere is not a folder"),
        (("context: .", f"context: {'a' * 300}"), "is not a folder"),
        (add_option("prefer: [cuda, drivr]"), "did you mean 'driver'?"),
        (add_option("prefer: [cuda, cuda]"), "'cuda' occurs twice"),
        (add_option("prefer: {cuda: 1}"), "prefer: expected a list, found a map"),
        (add_option("development: maybe"), "'maybe' is neither true nor false"),
        (add_option("audit: {march: maybe}"), "'maybe' is neither strict nor warn"),
        (add_option("audit: {mach: strict}"), "did you mean 'march'?"),
        (
            add_key("compression: lz4"),
            "7:14: 'lz4' is not a compression of layers: zstd or gzip\n  write zstd or gzip, or with a level",
        ),
        (add_key("compression: zst"), "did you mean 'zstd'?"),
        (add_key("compression: zstd -3"), "7:14: 'zstd -3' is not a compression of layers"),
        (add_key("compression:"), "compression: expected a word, found nothing"),
        (add_key("compression: [zstd]"), "7:14: compression: expected a word, found a list"),
        (add_key("compression: {level: 3}"), "7:14: 'type' is missing"),
        (add_key("compression: {type: zstd, lvl: 3}"), "did you mean 'level'?"),
        (
            add_option("compression: {type: zstd, level: 20}"),
            "7:38: zstd has the levels 1 to 19, not '20'\n  did you mean 19?",
        ),
        (
            add_option("compression: {type: gzip, level: 10}"),
            "gzip has the levels 1 to 9, not '10'\n  did you mean 9?",
        ),
        (add_key("compression: {type: zstd, level: 0}"), "not '0'\n  did you mean 1?"),
        (
            add_key("compression: {type: zstd, level: -1}"),
            "zstd has the levels 1 to 19, not '-1'\n  write a whole number, such as 3",
        ),
        (add_key("compression: {type: zstd, level: 3.5}"), "write a whole number"),
        (add_key("compression: {type: zstd, level: \u0663}"), "write a whole number"),
        (add_key("compression: {type: zstd, level: [3]}"), "level: expected a word, found a list"),
        (add_option("device_code: bytes"), "'bytes' is not claim"),
        (add_option("device_code: [claim]"), "device_code: expected a word, found a list"),
        (add_option("cpu_code: bytes"), "'bytes' is not claim"),
        (add_option("optional_device_code: ['a b']"), "'a b' is not a glob such as"),
        (add_option("defaults: {pyton: '3.13'}"), "'pyton' is not an axis of this matrix"),
        (add_option("defaults: {march: znver4}"), "march is decided by the node's hardware"),
        (add_option("defaults: [python]"), "defaults: expected a map, found a list"),
        (add_option("defaults: {march: [znver4]}"), "march is decided by the node's hardware"),
        (add_option("defaults: {march: {a: b}}"), "the default of march: expected a list, found a map"),
        (add_option("memory: 16"), "7:13: '16' is not an amount of memory such as 15000MiB or 16GiB"),
        (add_option("memory: 0GiB"), "'0GiB' is not an amount of memory"),
        (add_option("memory: 999TiB"), "'999TiB' is not an amount of memory"),
        (add_option("memory: [16GiB]"), "memory: expected a word, found a list"),
        (add_option("memry: 16GiB"), "did you mean 'memory'?"),
        (('base: "debian:trixie"', "memory: 16GiB"), "memory belongs to an image, or under `properties`"),
        (add_include("{cuda: '12.4', memory: 16GiB}"), "memory belongs to an image, or under `properties`"),
        (('base: "debian:trixie"', "memry: 16GiB"), "'memry' is not a known property\n  did you mean"),
        (add_option("plain_pull: znver4"), "plain_pull: expected a map"),
        (add_option("plain_pull: {marhc: znver4}"), "did you mean 'march'?"),
        (add_option("plain_pull: {march: znver5}"), "did you mean 'znver4'?"),
        (
            ("version: v1", "version: v1\n    version: v2"),
            "the key 'version' occurs twice (first on line 4)",
        ),
        (("    version: v1", "\tversion: v1"), "indent with spaces: YAML does not allow tabs"),
        (('"12.4": {', '"12.5": {'), "the axis cuda has no value '12.5'"),
        (
            ("  cuda:\n    none: {", "  cudda:\n    none: {"),
            "'cudda' is not an axis of this matrix\n  did you mean 'cuda'?",
        ),
        (
            ('base: "debian:trixie"', 'base: "debian\\nRUN evil"'),
            "'\\n' could break out of a Dockerfile instruction",
        ),
        (('base: "debian:trixie"', "base: 'debian\"'"), "'\"' could break out of a Dockerfile instruction"),
        (('base: "debian:trixie"', 'march: "x"'), "a property cannot be called 'march', which is an axis"),
        (("[x86-64-v3, znver4]", '["x86\\nRUN evil"]'), "cannot be the value of an axis"),
        (('{cuda: "11.8", driver', '{cuda: "11.9", driver'), "no value of the axis cuda matches 11.9"),
        (
            ('{cuda: "11.8", driver', '{cuba: "11.8", driver'),
            "'cuba' is not an axis of this matrix\n  did you mean 'cuda'?",
        ),
        (('{cuda: "11.8", driver', '{cuda: ">=x", driver'), "invalid version in a comparison: 'x'"),
        (('- {cuda: "11.8", driver: 550.163.01, why', "- {why"), "needs a condition on at least one axis"),
        (add_include("{cuda: '9.9'}"), "unknown CUDA release 9.9"),
        (add_include("{cudas: '9.2'}"), "did you mean 'cuda'?"),
        (("exclude:", "exclude: nothing\nexcl:"), "exclude: expected a list, found the word 'nothing'"),
        (("schema:", "schema: !!python/object:os.system x\nschemas:"), "is not supported"),
        (("exclude:", "platforms:\nexclude:"), "the matrix has no 'platforms'"),
        (add_axis("platform: [linux/riscv]"), "'linux/riscv' is not a supported platform"),
        (add_axis("loop: [a]"), "'loop' is reserved: templates use this name"),
        (add_axis("X-Y: [a]"), "'X-Y' is not a valid name for an axis"),
        (("  training:", "  training:v2:"), "'training:v2' is not an image name"),
        (("  training:", "  ml..training:"), "'ml..training' is not an image name"),
        (
            ('base: "debian:trixie"', "platform: linux/arm64"),
            "a property cannot be called 'platform', which is an axis",
        ),
        (
            add_include("{cuda: '12.4', sm: '89'}"),
            "cannot be called 'sm', which is a variable or a word of templates",
        ),
        (add_include("{cuda: '12.4', Big: '1'}"), "'Big' cannot be the name of a property\n  up to 32 lower"),
        (add_include("{cuda: }"), 'found nothing\n  for no CUDA write "none"'),
        (
            ("march: [x86-64-v3, znver4]", "march: [x86-64-v3, ]\n  tune: [[a]]"),
            "expected a word, found a list",
        ),
        (('"12.4": {base: "debian:trixie"', '"12.4": {base: {a: b}'), "base: expected a word, found a map"),
    ],
)
def test_errors_have_a_position_and_a_remedy(project, change, expected):
    assert expected in message(project(change))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (add_axis("compiler_of_choice: [a]"), "compiler_of_choice"),
        (add_axis("driver_kind: [a]"), "driver_kind"),
        (("  training:", "  registry.example:5000/ml/training_a__b-c:"), "march"),
        (add_axis("platform: [linux/amd64, linux/arm64]"), "platform"),
    ],
)
def test_unusual_but_valid_matrix_is_accepted(project, change, name):
    assert name in load_matrix(project(change)).axes


def test_include_property_may_resemble_an_axis_name(project):
    change = add_include("{cuda: '12.4', driver_series: -tesla-470, why: because}")
    (include,) = load_matrix(project(change)).include
    assert include.properties == {"driver_series": "-tesla-470"}


def test_all_errors_are_reported_in_file_order(project):
    text = message(project(("znver4]", "native]"), ("version: v1", "version: ''"), ('"8.9"', '"9"')))
    assert [line.split(":")[0] for line in text.splitlines() if line[0].isdigit()] == ["4", "9", "11"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "1:1: the file is empty"),
        ("# only a comment\n", "the file is empty"),
        ("- a\n- b\n", "the matrix: expected a map, found a list"),
        ("just words", "the matrix: expected a map, found the word 'just words'"),
        ("a: 1\n---\nb: 2\n", "2:1: a second document starts here"),
        ("a: [", "not valid YAML"),
        ("a: *nowhere", "alias"),
        ("[" * 40, "nested deeper than 32 levels"),
        ("? [a]\n: b\n", "a key must be a word"),
        ("a: \x01", "is not allowed in YAML"),
        ("<<: 3\n", "<< takes a map"),
        ("b: &b [*b]\n", "the alias *b has no anchor before it"),
    ],
)
def test_file_that_is_not_a_matrix_is_rejected(project, text, expected):
    assert expected in message(project(text=text))


def test_deep_nesting_does_not_crash(project):
    # PyYAML has a limit of its own from 6.0.4 on, and applies it first where it looks ahead.
    said = message(project(text="[" * 200_000))
    assert (
        "nested deeper than 32 levels" in said or "1:1001: not valid YAML: exceeded maximum nesting" in said
    )


def test_anchor_bomb_is_rejected_quickly(project):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    assert "once aliases are followed" in message(project(text="\n".join(lines)))


def test_anchors_and_merge_keys_work(project):
    path = project(
        (
            'none: {base: "debian:trixie", compiler: gcc-14}',
            'none: &t {base: "debian:trixie", compiler: gcc-14}',
        ),
        ('"12.4": {base: "debian:trixie", compiler: gcc-14}', '"12.4": {<<: *t, nvrtc: libnvrtc12}'),
    )
    assert load_matrix(path).properties["cuda"]["12.4"]["base"] == "debian:trixie"


@pytest.mark.parametrize("own", ["<<: *t, base: own", "base: own, <<: *t", "<<: [{base: own}, *t]"])
def test_own_keys_override_merged_keys(project, own):
    path = project(
        (
            'none: {base: "debian:trixie", compiler: gcc-14}',
            'none: &t {base: "debian:trixie", compiler: gcc-14}',
        ),
        ('"12.4": {base: "debian:trixie", compiler: gcc-14}', f'"12.4": {{{own}}}'),
    )
    assert load_matrix(path).properties["cuda"]["12.4"] == {"base": "own", "compiler": "gcc-14"}


def test_overriding_a_merged_key_twice_is_rejected(project):
    text = message(project(text="x: &x {a: 1}\ny: {<<: *x, a: 2, a: 3}\n"))
    assert text == "2:19: the key 'a' occurs twice (first on line 2)"


def test_missing_or_binary_file_is_rejected(tmp_path):
    with pytest.raises(UsageError, match="no such file") as caught:
        load_matrix(tmp_path / "none.yaml")
    assert "imagematrix init" in caught.value.remedy
    with pytest.raises(UsageError, match="Is a directory"):
        load_matrix(tmp_path)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"a: b\nc: \xff\xfe\n")
    with pytest.raises(MatrixError, match=":2:1: not UTF-8"):
        load_matrix(binary)
    with binary.open("wb") as file:
        file.truncate(17 * 2**20)
    with pytest.raises(UsageError, match="larger than the limit of"):
        load_matrix(binary)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(alphabet="ab:-[]{}&*!|>'\"#\n\t ,?%@`<0.", max_size=60))
def test_arbitrary_text_raises_only_positioned_errors(text):
    try:
        document.parse_yaml(text, "fuzz")
    except ImagematrixError as error:
        assert str(error).startswith("fuzz:")  # noqa: PT017 - most texts are refused, some are fine


OWN = add_axis('python: ["3.11", "3.13"]')


def test_defaults_must_be_values_of_own_axes(project):
    (image,) = load_matrix(project(OWN, add_option("defaults: {python: 3.13}"))).images
    assert image.defaults == (("python", "3.13"),)
    with pytest.raises(MatrixError, match=r"the axis python has no value '3\.12'\n  did you mean '3\.13'\?"):
        load_matrix(project(OWN, add_option("defaults: {python: 3.12}")))


def test_defaults_may_be_a_list_in_order(project):
    (image,) = load_matrix(project(OWN, add_option("defaults: {python: ['3.13', '3.11']}"))).images
    assert image.defaults == (("python", "3.13"),)
    assert image.default_order == (("python", ("3.13", "3.11")),)
    (image,) = load_matrix(project(OWN, add_option("defaults: {python: ['3.13']}"))).images
    assert (image.defaults, image.default_order) == ((("python", "3.13"),), ())
    for stated, fault in (
        ("['3.13', '3.12']", r"the axis python has no value '3\.12'\n  did you mean '3\.13'\?"),
        ("['3.13', '3.13']", r"the default '3\.13' occurs twice"),
        ("[]", "the axis python has no default value\n  remove the line"),
        ("[[]]", "the default of python: expected a word, found a list"),
        ("", "the default of python: expected a word, found nothing"),
    ):
        with pytest.raises(MatrixError, match=fault):
            load_matrix(project(OWN, add_option(f"defaults: {{python: {stated}}}")))


def test_default_may_be_a_value_added_by_include(project):
    added = add_include("{cuda: none, python: '3.14', march: znver4}")
    (image,) = load_matrix(project(OWN, add_option("defaults: {python: 3.14}"), added)).images
    assert image.defaults == (("python", "3.14"),)


def test_too_many_cells_are_rejected(project):
    """Immediately, because computing the product would exhaust memory."""
    axes = "".join(
        f"  axis{number}: [{', '.join(f'v{value}' for value in range(10))}]\n" for number in range(9)
    )
    assert message(project(("axes:\n", f"axes:\n{axes}"))) == (
        "8:3: 24,000,000,000 cells, including excluded ones, exceed the limit of 250,000\n"
        "  split it: values that never occur together belong in separate matrices"
    )


def test_cells_that_include_may_add_are_counted(project):
    entries = "".join(f"\n  - {{cuda: none, march: m{number}}}" for number in range(300))
    images = "".join(f"\n  image{number}: {{version: v1, template: t.j2}}" for number in range(1000))
    text = message(project(("images:", f"images:{images}"), ("exclude:", f"include:{entries}\nexclude:")))
    assert (
        "cells, including excluded ones and one for each include entry, exceed the limit of 250,000" in text
    )


def test_overlong_pattern_in_a_condition_is_rejected(project):
    """The time for a pattern grows with the square of its length."""
    text = message(project(('{cuda: "11.8", driver', f"{{cuda: '{'[' * 201}', driver")))
    assert f"more than 200 characters in the pattern '{'[' * 80}'" in text


def test_overlong_version_in_a_condition_is_rejected(project):
    digits = "9" * 6000
    text = message(project(('{cuda: "11.8", driver', f'{{cuda: ">={digits}", driver')))
    assert f"invalid version in a comparison: '{digits[:80]}'" in text


@pytest.mark.parametrize(
    ("text", "amount"), [("2GB", 2_000_000_000), ("1.5GiB", 1_610_612_736), ("700M", 700_000_000)]
)
def test_size_budget_is_parsed(project, text, amount):
    (image,) = load_matrix(project(add_option(f"budget: {text}"))).images
    assert image.budget == amount


@pytest.mark.parametrize("text", ["2", "2 GB", "lots", "0GB", "-1GB", "2gb"])
def test_invalid_size_budget_is_rejected(project, text):
    result = message(project(add_option(f"budget: {text}")))
    assert f"'{text}' is not an amount of bytes such as 2GB or 1.5GiB" in result
    with pytest.raises(MatrixError, match="budget: expected a word, found a list"):
        load_matrix(project(add_option("budget: []")))


@pytest.mark.parametrize("name", ["..", "../other", "/etc", "src/../../other", "link", "link/deep"])
def test_context_outside_the_matrix_folder_needs_permission(project, tmp_path, name):
    """A matrix from somebody else could ship the files of the machine that builds it."""
    (tmp_path / "own").mkdir()
    (tmp_path / "other/deep").mkdir(parents=True)
    (tmp_path / "own/src").mkdir()
    (tmp_path / "own/link").symlink_to("../other")
    (tmp_path / "templates").rename(tmp_path / "own/templates")
    path = project(("context: .", f"context: {name}")).rename(tmp_path / "own/matrix.yaml")
    where = path.parent / name
    with pytest.raises(MatrixError, match=r"matrix.yaml:\d+:\d+: the context .* is outside") as caught:
        load_matrix(path)
    assert f"the context {where} is outside the matrix's folder" in caught.value.details
    assert "--allow-context DIR" in caught.value.details
    for allowed in (tmp_path / "own/src", tmp_path / "oth"):
        with pytest.raises(MatrixError):
            load_matrix(path, contexts=[allowed])
    assert load_matrix(path, contexts=[tmp_path / "own/src", where]).images[0].context == where
    assert load_matrix(path, contexts=[where.resolve().parent]).images[0].context == where
    assert load_matrix(path, contexts=None).images[0].context == where


@pytest.mark.parametrize("name", [".", "src", "./src/../src", "inner"])
def test_context_may_be_reached_by_links_in_the_matrix_folder(project, tmp_path, name):
    (tmp_path / "src").mkdir()
    (tmp_path / "inner").symlink_to("src")
    path = project(("context: .", f"context: {name}"))
    assert load_matrix(path).images[0].context == tmp_path / name
    elsewhere = tmp_path.with_name(f"{tmp_path.name}-link")
    elsewhere.symlink_to(tmp_path)
    assert load_matrix(elsewhere / "matrix.yaml").images[0].context == elsewhere / name


def test_device_code_of_an_image_is_claimed_or_optional(project):
    own = add_option("device_code: claim\n    optional_device_code: [b/*.so, a.so, a.so]")
    (image,) = load_matrix(project(own)).images
    assert (image.claims_code, image.optional_code) == (True, ("a.so", "b/*.so"))
    (image,) = load_matrix(project(add_option("optional_device_code: a.so"))).images
    assert (image.claims_code, image.optional_code) == (False, ("a.so",))


def test_cpu_flags_of_an_image_are_claimed(project):
    assert load_matrix(project()).images[0].claims_flags is False
    assert load_matrix(project(add_option("cpu_code: claim"))).images[0].claims_flags is True
