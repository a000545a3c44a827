"""The macros that templates share: what they write for each kind of cell."""

import re
import shutil
from pathlib import Path

import pytest

from imagematrix.build.dockerfile.render import Renderer
from imagematrix.build.matrix.expand import expand_matrix
from imagematrix.build.matrix.load import load_matrix
from imagematrix.errors import UsageError
from imagematrix.hardware.vendors import cuda
from imagematrix.images.warm import tools

ROOT = Path(__file__).parents[3]
DRIVER = '{{ debian.driver_stage(driver_base, driver, driver_series | default("", true)) }}'


@pytest.fixture
def macro(project, tmp_path):
    """Call it with a use of macros, and changes of the good matrix, to get what the last cell has."""

    def call(use, *changes):
        for file in (ROOT / "templates").iterdir():
            if file.is_file():
                shutil.copy(file, tmp_path / "templates")
        path = project(*changes, template=f'{{% import "macros.j2" as debian %}}\n{use}\n')
        matrix = load_matrix(path)
        with Renderer(matrix.templates) as renderer:
            return renderer.render(expand_matrix(matrix).cells[-1], lambda _: None).text

    return call


def properties(text):
    return "properties:\n", f"properties:\n  driver: {text}\n"


def test_driver_is_installed_from_debian(macro):
    text = macro(DRIVER, properties('{550.163.01: {driver_base: "debian:trixie"}}'))
    assert text.startswith("FROM debian:trixie AS driver\n")
    assert '"$package=550.163.01-*"' in text
    assert text.endswith("find /driver -exec touch -h -d @0 {} +\n")


def test_driver_is_copied_from_a_folder(macro, tmp_path):
    (tmp_path / "new").mkdir()
    text = macro(DRIVER, properties("{550.163.01: {driver_from: new}}"))
    assert text == "FROM scratch AS driver\nCOPY --from=imagematrix-driver / /driver/\n"


def test_compat_is_only_in_the_linker_cache(macro):
    compat = ("550.163.01", "compat"), properties("{compat: {compat_from: new, driver_base: unused}}")
    assert macro(DRIVER, *compat) == "FROM scratch AS driver\nCOPY --from=imagematrix-driver / /driver/\n"
    cache = '{{ debian.linker_cache_stage("body", version=driver) }}'
    text = macro(cache, *compat)
    assert text.startswith("FROM body AS linker-cache\nCOPY --from=driver /driver/ /\nRUN if grep ")
    assert text.endswith("    ldconfig /usr/local/cuda/compat\n")
    plain = "FROM body AS linker-cache\nCOPY --from=driver /driver/ /\nRUN ldconfig\n"
    assert macro(cache) == macro('{{ debian.linker_cache_stage("body") }}') == plain


def test_linker_cache_of_a_cross_build_is_written_by_the_machine_that_builds(macro):
    cache = '{{ debian.linker_cache_stage("body", version=driver, cross="aarch64", base="debian:trixie") }}'
    text = macro(cache)
    assert text.startswith("FROM --platform=$BUILDPLATFORM debian:trixie AS linker-cache\n")
    assert f"\n{(ROOT / 'templates/linker_cache.py').read_text()}\nEND\n" in text
    assert "ldconfig /" not in text
    assert text.endswith(" aarch64 /image \\\n      > /etc/ld.so.cache\n")
    compat = macro(cache, ("550.163.01", "compat"), properties("{compat: {compat_from: new}}"))
    assert " aarch64 /image /usr/local/cuda/compat \\\n" in compat
    assert "if grep " in compat


def test_host_mode_installs_no_driver(macro):
    assert macro(DRIVER, ("550.163.01", "host")) == "FROM scratch AS driver\nWORKDIR /driver\n"


def test_caches_of_all_tools_are_in_the_folder_that_warm_images_have(macro):
    run, *variables = macro("{{ debian.warm_caches() }}").replace("\\\n", "\n").splitlines()
    assert run == f"RUN install -d -m 1777 {tools.ROOT}"
    words = " ".join(variables).split()
    assert words.pop(0) == "ENV"
    folders = {name: f"{tools.ROOT}/{folder}" for name, folder in tools.list_folders().items()}
    settings = {name: value for tool in tools.load_tools() for name, value in tool.settings.items()}
    assert dict(word.split("=") for word in words) == folders | settings


TOOLKIT = '{{ debian.cuda_stage(base, cuda, "nvcc nvrtc") }}'


def released(release):
    return ('"12.4"', f'"{release}"'), ("550.163.01", "580.159.04")


@pytest.mark.parametrize("release", ["13.0", "13.5"])
def test_toolkit_is_installed_from_pinned_wheels(macro, release):
    text = macro(TOOLKIT, *released(release))
    assert text.startswith("FROM debian:trixie AS cuda\n")
    wheels = re.findall(r'echo "([\w-]+)==([\d.]+)((?: --hash=sha256:[0-9a-f]{64}){2})"', text)
    assert {name for name, _, _ in wheels} == {
        "nvidia-cuda-cccl",
        "nvidia-cuda-crt",
        "nvidia-cuda-nvcc",
        "nvidia-cuda-nvrtc",
        "nvidia-cuda-runtime",
        "nvidia-nvvm",
    }
    versions = {name: version for name, version, _ in wheels}
    assert versions["nvidia-cuda-nvcc"].startswith(f"{release}.")


def test_cuda_12_wheels_have_no_nvcc(macro):
    changes = released("12.9")
    assert 'echo "nvidia-cuda-nvrtc-cu12==12.9.' in macro(TOOLKIT.replace("nvcc ", ""), *changes)
    with pytest.raises(UsageError, match=r"macros\.j2:\d+: .* has no attribute 'nvcc'"):
        macro(TOOLKIT, *changes)


def test_tables_match_the_targets_of_the_wheels(macro):
    names = macro('{% import "cuda_wheels.j2" as known %}{{ known.WHEELS | join(" ") }}').split()
    assert len(names) > 1
    for name in names:
        assert {"100", "103", "120", "121"} <= cuda.get_release(name).targets


PIP = "pip==26.3"
LOCK = """\
# as uv writes it
--index-url https://example.org/simple
Torch==2.8.0 \\
    --hash=sha256:aa \\
    --hash=sha256:ab
    # via -r requirements.in
nvidia_cublas-cu12==12.8.4.1 ; sys_platform == 'linux' --hash=sha256:bb
nvidia-nvtx-cu12==12.8.90 --hash=sha256:cc  # via torch
click[extra]==2.2.6 --hash=sha256:dd

six @ https://example.org/six.whl --hash=sha256:ee
"""


def stages(text):
    """Return the instructions of each stage by its name."""
    found = {}
    for stage in re.split(r"^FROM ", text, flags=re.MULTILINE)[1:]:
        first, _, rest = stage.partition("\n")
        found[first.partition(" AS ")[2]] = rest
    return found


def installed(stage):
    """Return the packages that a stage installs, and the folders in which it does."""
    lock = re.search(r"COPY <<\"END\" /tmp/lock.txt\n(.*?)END\n", stage, re.DOTALL)[1]
    return lock.splitlines(), re.search(r"\n    install-wheels (.*)", stage)[1].split()


@pytest.fixture
def wheels(macro, tmp_path):
    """Call it with arguments of the macro `wheels` to get its stages."""

    def call(arguments, lock=LOCK):
        (tmp_path / "templates" / "lock.txt").write_text(lock)
        return stages(macro("{{ debian.wheels(" + arguments + ") }}"))

    return call


def test_each_large_package_and_all_others_have_a_stage(wheels):
    result = wheels('"lock.txt", base, "/opt/env"')
    names = ["wheels_pip", "wheels-nvidia-cublas-cu12", "wheels_nvidia", "wheels-torch", "wheels_others"]
    assert list(result) == [*names, "wheels"]
    index = "--index-url https://example.org/simple"
    assert installed(result["wheels-torch"]) == (
        [index, "Torch==2.8.0 --hash=sha256:aa --hash=sha256:ab"],
        ["/opt/env", "/opt/env"],
    )
    assert installed(result["wheels-nvidia-cublas-cu12"]) == (
        [index, "nvidia_cublas-cu12==12.8.4.1 ; sys_platform == 'linux' --hash=sha256:bb"],
        ["/tmp/pip", "/opt/nvidia-wheels"],
    )
    lines, folders = installed(result["wheels_nvidia"])
    assert lines == [index, "nvidia-nvtx-cu12==12.8.90 --hash=sha256:cc"]
    assert folders == ["/tmp/pip", "/opt/nvidia-wheels"]
    lines, _ = installed(result["wheels_others"])
    assert lines[1:3] == [
        "click[extra]==2.2.6 --hash=sha256:dd",
        "six @ https://example.org/six.whl --hash=sha256:ee",
    ]
    assert len(lines) == 4
    assert lines[3].startswith(f"{PIP} --hash=sha256:")
    assert "nvidia-wheels.pth" in result["wheels_others"]


def test_lines_of_a_lock_for_one_package_have_one_stage(wheels):
    """`uv pip compile --universal` writes them; the markers leave one of them."""
    old = 'torch==2.7.1 ; python_version < "3.11" --hash=sha256:ef'
    cublas = "nvidia-cublas==13.0.2 --hash=sha256:ff"
    result = wheels(
        '"lock.txt", base, "/opt/env", without={"torch": "torch/test"}', f"{LOCK}{old}\n{cublas}\n"
    )
    assert copied(result) == [
        "wheels_nvidia",
        "wheels-nvidia-cublas-cu12",
        "wheels-nvidia-cublas",
        "wheels_others",
        "wheels-torch",
    ]
    lines, words = installed(result["wheels-torch"])
    assert lines[1:] == ["Torch==2.8.0 --hash=sha256:aa --hash=sha256:ab", old]
    assert words == ["/opt/env", "/opt/env", "torch/test"]
    assert installed(result["wheels-nvidia-cublas"])[0][1:] == [cublas]
    assert len(installed(result["wheels-nvidia-cublas-cu12"])[0]) == 2


def copied(result):
    """Return the stages whose wheels the resulting stage has, the lowest layer first."""
    return re.findall(r"COPY --link --from=(\S+) /wheels/ /", result["wheels"])


def test_layers_are_those_for_all_gpus_then_those_for_one_and_in_both_the_largest_last(wheels):
    """Engines unpack layers in order, and the small ones arrive first."""
    shipped = wheels('"lock.txt", base, "/opt/env"')
    assert copied(shipped) == ["wheels_nvidia", "wheels-nvidia-cublas-cu12", "wheels_others", "wheels-torch"]
    names = ["torch", "nvidia-nvtx", "nvidia-cublas-cu12", "six", "nvidia-cublas"]
    own = wheels(f'"lock.txt", base, "/opt/env", large={names}')
    nvidia = ["wheels-nvidia-nvtx-cu12", "wheels-nvidia-cublas-cu12"]
    assert copied(own) == [*nvidia, "wheels_others", "wheels-torch", "wheels-six"]


def test_stages_of_a_large_package_depend_on_nothing_else(wheels):
    """Builders run a step again if its text, or that of an earlier one, differs."""
    one, two = wheels('"lock.txt", base, "/opt/one"'), wheels('"lock.txt", base, "/opt/two", compute=compute')
    for name in ("wheels_pip", "wheels-nvidia-cublas-cu12", "wheels_nvidia"):
        assert one[name] == two[name]


def test_packages_of_nvidia_are_trimmed_only_on_request(wheels):
    plain = wheels('"lock.txt", base, "/opt/env", compute=compute, options="--keep-ptx"')
    assert {name for name, text in plain.items() if "trim.pyz" in text} == {"wheels-torch", "wheels_others"}
    assert "trim.pyz --compute 8.9 --keep-ptx /wheels\n" in plain["wheels-torch"]
    whole = wheels('"lock.txt", base, "/opt/env", compute=compute, trim_nvidia=true')
    assert {name for name, text in whole.items() if "trim.pyz" not in text} == {"wheels_pip", "wheels"}
    assert "trim.pyz --compute 8.9 --include-nvidia /wheels\n" in whole["wheels_nvidia"]
    assert "trim.pyz --compute 8.9 /wheels\n" in whole["wheels-torch"]


def test_packages_on_an_environment_go_to_a_folder(wheels):
    result = wheels(
        '"lock.txt", base, "/opt/more", on="/opt/env", without={"click": "click/tests", "six": ""}'
    )
    lines, words = installed(result["wheels_others"])
    assert words == ["/opt/env", "/opt/more", "click/tests"]
    assert not any(line.startswith("pip==") for line in lines)
    assert "nvidia-wheels.pth" not in result["wheels_others"]
    assert installed(result["wheels-torch"])[1] == ["/opt/env", "/opt/more"]


def test_without_an_environment_all_packages_are_shared(wheels):
    result = wheels('["a==1 --hash=sha256:aa", "b==1 --hash=sha256:bb"], base, large=["b"]')
    assert list(result) == ["wheels_pip", "wheels-b", "wheels_nvidia", "wheels"]
    assert installed(result["wheels-b"])[1] == ["/tmp/pip", "/opt/nvidia-wheels"]


def test_a_lock_with_pip_decides_its_version(wheels):
    lines, _ = installed(wheels('["Pip==25.1 --hash=sha256:aa"], base, "/opt/env"')["wheels_others"])
    assert lines == ["Pip==25.1 --hash=sha256:aa"]


def test_an_image_gets_at_most_40_layers_of_wheels(wheels):
    lock = "".join(
        f"{kind}{number}==1 --hash=sha256:aa\n" for kind in ("nvidia-", "a") for number in range(30)
    )
    result = wheels(
        '"lock.txt", base, "/opt/env", large=LARGE'.replace("LARGE", str(re.findall(r"[\w-]+(?===)", lock))),
        lock,
    )
    assert len(copied(result)) == 40
    lines, _ = installed(result["wheels_nvidia"])  # with the first packages of the list
    assert [line.partition("==")[0] for line in lines] == [f"nvidia-{number}" for number in range(22)]
    lines, _ = installed(result["wheels_others"])
    assert [line.partition("==")[0] for line in lines] == ["pip"]
    assert copied(result)[-1] == "wheels-a29"


def test_a_lock_that_is_missing_is_named(wheels):
    with pytest.raises(UsageError, match=r"template 'no\.txt' not found"):
        wheels('"no.txt", base, "/opt/env"')


INSTALLERS = "{{ debian.installers(driver_cuda, compute, archspec, torch_backend) }}"


def test_installers_solve_for_the_cell(macro):
    assert macro(INSTALLERS, ('"8.9"', '"9.0a"')).split() == [
        "ENV",
        'CONDA_OVERRIDE_CUDA="12.4"',
        'CONDA_OVERRIDE_CUDA_ARCH="9.0"',
        *("\\", 'CONDA_OVERRIDE_ARCHSPEC="zen4"'),
        *("\\", 'UV_TORCH_BACKEND="cu124"'),
        *("\\", 'NV_VARIANT_PROVIDER_FORCE_CUDA_DRIVER_VERSION="12.4"'),
        *("\\", 'NV_VARIANT_PROVIDER_FORCE_SM_ARCH="9.0"'),
    ]


def test_installers_see_no_gpu_in_a_cpu_only_cell(macro):
    call = '{{ debian.installers(none, none, "x86_64_v3", "cpu") }}'
    assert macro(call) == (
        'ENV CONDA_OVERRIDE_CUDA="" CONDA_OVERRIDE_CUDA_ARCH="" \\\n'
        '    CONDA_OVERRIDE_ARCHSPEC="x86_64_v3" \\\n    UV_TORCH_BACKEND="cpu"\n'
    )


def test_installers_are_not_told_what_is_unknown(macro):
    assert macro('{{ debian.installers("14.0", "9.0", none, none) }}').split() == [
        *("ENV", 'CONDA_OVERRIDE_CUDA="14.0"', 'CONDA_OVERRIDE_CUDA_ARCH="9.0"'),
        *("\\", 'NV_VARIANT_PROVIDER_FORCE_CUDA_DRIVER_VERSION="14.0"'),
        *("\\", 'NV_VARIANT_PROVIDER_FORCE_SM_ARCH="9.0"'),
    ]
