"""select, explain and run on the saved hosts, with the catalog of the shipped matrix."""

import json

import pytest

from imagematrix.hardware.host.host import Host

# The variant that each host gets: first with its GPUs, then with --gpus none.
CHOSEN = {
    "broadwell-m60": ("cuda11.8-drv535.261.03-sm52-broadwell", "cpu-broadwell"),
    "skylake-v100": ("cuda12.4-drv535.261.03-sm70-skylake-avx512", "cpu-skylake-avx512"),
    "rome-a100": ("cuda12.4-drv550.163.01-sm80-znver2", "cpu-znver2"),
    "milan-a10": ("cuda12.4-drv535.261.03-sm86-znver3", "cpu-znver3"),
    "icelake-l40s": ("cuda12.4-drv550.163.01-sm89-icelake-server", "cpu-icelake-server"),
    "sapphirerapids-h100": ("cuda12.4-drv550.163.01-sm90-sapphirerapids", "cpu-sapphirerapids"),
    "genoa-h200": ("cuda12.4-drv550.163.01-sm90-znver4", "cpu-znver4"),
    "mig": ("cuda12.4-drv550.163.01-sm90-sapphirerapids", "cpu-sapphirerapids"),
    # The kernel-mode driver decides; a mismatched user-mode driver on the host is irrelevant.
    "driver-mismatch": ("cuda12.4-drv550.163.01-sm89-icelake-server", "cpu-icelake-server"),
    # A Genoa without avx512_bf16 does not count as znver4. AVX-512 outranks the vendor, and generic code
    # outranks code for the other vendor; with an L40S, there is only code for the other vendor.
    "masked": ("cuda12.4-drv550.163.01-sm89-icelake-server", "cpu-x86-64-v4"),
    # Its CPU has all flags of Broadwell, and code for the CPU's vendor outranks generic code.
    "laptop": ("cpu-broadwell", "cpu-broadwell"),
}
# The rules that fail for the nearest variant on hosts where nothing fits.
REFUSED = {"grace-hopper": ["platform", "cpu"], "mixed": ["device-code"]}


@pytest.fixture
def choose(cli, profiles, catalog_file):
    """Call it with a command, a host and more options."""

    def call(command, host, *options):
        return cli(command, "training:v1", "--host", profiles[host], "--catalog", catalog_file, *options)

    return call


def test_every_saved_host_has_an_expectation(profiles):
    assert set(profiles) == {*CHOSEN, *REFUSED}


@pytest.mark.parametrize("name", CHOSEN)
def test_each_host_selects_its_variant(choose, name):
    for cell, options in zip(CHOSEN[name], [(), ("--gpus", "none")], strict=True):
        result = choose("select", name, *options)
        assert result == (0, f"training:v1-{cell}-0123456789ab\n", "")


@pytest.mark.parametrize("name", CHOSEN)
def test_explain_and_run_select_the_same_variant(cli, choose, profiles, catalog_file, name):
    variant = f"{CHOSEN[name][0]}-0123456789ab"
    assert f"    1  {variant} <- selected\n" in choose("explain", name).out
    words = ("--host", profiles[name], "--catalog", catalog_file, "--dry-run", "training:v1")
    assert cli("run", *words).out.endswith(f" training:v1-{variant}\n")


def test_mig_device_nodes_come_from_the_host_document(cli, profiles, catalog_file):
    words = ("--host", profiles["mig"], "--catalog", catalog_file, "--dry-run", "--gpus", "1g.10gb")
    shown = cli("run", *words, "training:v1").out
    assert [word for word in shown.split() if "nvidia-cap" in word] == [
        "/dev/nvidia-caps/nvidia-cap84",
        "/dev/nvidia-caps/nvidia-cap85",
    ]


def test_an_unknown_user_mode_driver_of_the_node_is_a_warning(cli, profiles, shipped_catalog, tmp_path):
    host = json.loads(profiles["genoa-h200"].read_text())
    host["driver"]["user_mode"] = None
    (tmp_path / "host.json").write_text(json.dumps(host))
    variant = next(one for one in shipped_catalog.to_json()["variants"] if one["cubins"] == ["90"])
    document = shipped_catalog.to_json() | {"variants": [variant | {"driver": {"mode": "host"}}]}
    (tmp_path / "catalog.json").write_text(json.dumps(document))
    words = ["--host", tmp_path / "host.json", "--catalog", tmp_path / "catalog.json"]
    warning = "the version of the node's own user-mode driver is unknown"
    assert warning in cli("select", *words, "training:v1").err
    words[1] = profiles["genoa-h200"]
    assert cli("select", *words, "training:v1").err == ""


@pytest.mark.parametrize("name", REFUSED)
def test_nothing_fits_lists_every_reason(choose, name, shipped_catalog, conforms):
    choose("select", name).refuses(
        3, f"none of the {len(shipped_catalog.variants)} variants of training:v1 fits this host"
    )
    explained = choose("explain", name)
    assert explained.code == 3
    assert f"nothing fits\n\n{len(shipped_catalog.variants)} refused, the nearest first\n" in explained.out
    document = conforms(json.loads(choose("explain", name, "--json").out))
    assert document["selected"] is None
    assert [rule["rule"] for rule in document["candidates"][0]["rules"] if not rule["ok"]] == REFUSED[name]


def test_error_on_a_mixed_node_names_gpus_that_fit(choose):
    assert "pass --gpus device=0" in choose("select", "mixed").err
    assert "sm70-x86-64-v3" in choose("select", "mixed", "--gpus", "device=0").out
    assert "sm80-znver2" in choose("select", "mixed", "--gpus", "device=1").out


def test_select_and_explain_print_the_same_document(choose, conforms):
    for name in ("genoa-h200", "mixed"):
        result, explained = choose("select", name, "--json"), choose("explain", name, "--json")
        assert result.out == explained.out
        assert result.code == explained.code
        conforms(json.loads(result.out))


@pytest.mark.parametrize("name", sorted({*CHOSEN, *REFUSED}))
def test_explain_fits_in_100_columns(choose, name):
    result = choose("explain", name)
    assert max(map(len, result.out.splitlines())) <= 100
    assert result.err == ""


def test_cpu_only_image_is_never_a_silent_fallback(cli, profiles, shipped_catalog, tmp_path):
    few = [variant.to_json() for variant in shipped_catalog.variants if not variant.gpu]
    path = tmp_path / "cpu.json"
    path.write_text(json.dumps(shipped_catalog.to_json() | {"variants": few}))
    words = ("select", "training", "--host", profiles["rome-a100"], "--catalog", path)
    assert cli(*words).code == 3
    assert cli(*words, "--allow-cpu").out == "training:v1-cpu-znver2-0123456789ab\n"


def test_dry_run_prints_the_docker_command(cli, profiles, catalog_file):
    words = (
        "--host",
        profiles["rome-a100"],
        "--catalog",
        catalog_file,
        "--gpus",
        "2",
        "--rm",
        "-it",
        "--dry-run",
    )
    result = cli("run", *words, "training:v1", "train", "--epochs", "3 or 4")
    assert (result.code, result.err) == (0, "")
    line = result.out.split()
    assert line[:2] == ["docker", "run"]
    assert result.out.endswith(
        " training:v1-cuda12.4-drv550.163.01-sm80-znver2-0123456789ab train --epochs '3 or 4'\n"
    )
    assert " --rm -it --label " in result.out
    # The minors of the first two GPUs of this node.
    assert [word for word in line if word.startswith("/dev/nvidia") and word[11:].isdigit()] == [
        "/dev/nvidia2",
        "/dev/nvidia3",
    ]


def test_run_without_an_image_shows_usage(cli):
    cli("run").refuses(2, "missing argument: IMAGE", "imagematrix run [OPTIONS] IMAGE[:VERSION] [COMMAND...]")
    assert "--dry-run" in cli("run", "--help").out


@pytest.mark.usefixtures("engine")
def test_run_refuses_missing_device_nodes(cli, profiles, catalog_file, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    host = json.loads(profiles["rome-a100"].read_text())
    for gpu in host["gpus"]:
        gpu["minor"] += 200  # does not exist on any machine
    path = tmp_path / "host.json"
    path.write_text(json.dumps(host))
    cli("run", "--host", path, "--catalog", catalog_file, "training:v1").refuses(5, "/dev/nvidia2")


@pytest.mark.usefixtures("engine")
def test_missing_docker_command_has_a_remedy(cli, profiles, catalog_file, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    cli("run", "--host", profiles["laptop"], "--catalog", catalog_file, "training:v1").refuses(
        8, "cannot start `docker`: No such file or directory", "docker-cli"
    )


def test_file_catalog_serves_only_its_own_image(cli, profiles, catalog_file):
    for name in ("serving:v1", "training:v2", "serving"):
        cli("select", name, "--host", profiles["laptop"], "--catalog", catalog_file).refuses(
            4, f"is the catalog of training:v1, not of {name}"
        )
    assert cli("select", "training", "--host", profiles["laptop"], "--catalog", catalog_file).code == 0


def test_engine_is_the_default_catalog(cli, profiles, engine, shipped_catalog):
    engine.add_catalog(shipped_catalog)
    result = cli("select", "training:v1", "--host", profiles["genoa-h200"])
    assert result == (0, "training:v1-cuda12.4-drv550.163.01-sm90-znver4-0123456789ab\n", "")


def test_root_option_reads_a_captured_tree(cli, catalog_file, tmp_path):
    (tmp_path / "proc").mkdir()
    cpuinfo = "processor\t: 0\nvendor_id\t: GenuineIntel\nflags\t\t: fpu fxsr lm mmx sse sse2\n\n"
    (tmp_path / "proc" / "cpuinfo").write_text(cpuinfo)
    words = ("training:v1", "--catalog", catalog_file, "--root", tmp_path)
    assert cli("select", *words).code == 3
    result = cli("explain", *words)
    assert result.out.startswith("training:v1 on ")
    assert "the host's CPUs lack" in result.out


def test_unprintable_names_are_escaped(cli, profiles, catalog_file, tmp_path):
    host = json.loads(profiles["rome-a100"].read_text())
    host["cpu"]["model"] = "A \ud800 [bold]CPU[/]"
    path = tmp_path / "host.json"
    path.write_text(json.dumps(host))
    words = ("training:v1", "--host", path, "--catalog", catalog_file)
    assert r"A \ud800 [bold]CPU[/]" in cli("explain", *words).out
    host["gpus"][0]["uuid"] = "GPU-\udfff"
    path.write_text(json.dumps(host))
    assert r"uuid: 'GPU-\udfff' is not a UUID" in cli("select", *words, "--json").err


def test_gpu_variable_on_a_host_without_gpus_is_an_error(cli, profiles, catalog_file, monkeypatch):
    words = ("select", "training:v1", "--catalog", catalog_file)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert cli(*words, "--host", profiles["laptop"]).code == 0
    monkeypatch.setattr("imagematrix.cli.shared.inputs.load_host", lambda *_: Host.load(profiles["laptop"]))
    for options in ((), ("--gpus", "all")):
        cli(*words, *options).refuses(
            3, "CUDA_VISIBLE_DEVICES=0: it names GPUs, but none was found on this node", "--allow-cpu"
        )
    assert cli(*words, "--allow-cpu").code == 0
    assert cli(*words, "--gpus", "none").code == 0
    monkeypatch.setenv("NVIDIA_VISIBLE_DEVICES", "none")
    assert cli(*words).code == 0


@pytest.mark.parametrize("command", [("select",), ("explain",), ("run", "--dry-run")])
def test_unusable_accelerator_refuses_a_cpu_image(cli, profiles, catalog_file, tmp_path, command):
    host = json.loads(profiles["laptop"].read_text())
    host["accelerators"] = [{"kind": "wsl", "where": "/dev/dxg", "why": "it is behind it"}]
    path = tmp_path / "host.json"
    path.write_text(json.dumps(host))
    words = ("--host", path, "--catalog", catalog_file, "training:v1")
    result = cli(*command, *words)
    assert result.code == 3
    assert "/dev/dxg: it is behind it" in result.out + result.err
    for wish in (("--allow-cpu",), ("--gpus", "none")):
        assert cli(*command, *wish, *words).code == 0


def test_gpu_variable_applies_only_to_this_machine(cli, profiles, catalog_file, monkeypatch):
    words = ("select", "training:v1", "--catalog", catalog_file, "--json")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert len(json.loads(cli(*words, "--host", profiles["rome-a100"]).out)["gpus"]) == 8
    monkeypatch.setattr(
        "imagematrix.cli.shared.inputs.load_host", lambda *_: Host.load(profiles["rome-a100"])
    )
    assert len(json.loads(cli(*words).out)["gpus"]) == 1
    assert len(json.loads(cli(*words, "--gpus", "1").out)["gpus"]) == 1
    cli(*words, "--gpus", "2").refuses(2, "restricted by CUDA_VISIBLE_DEVICES=0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    taken = json.loads(cli(*words, "--gpus", "1").out)["gpus"]
    assert taken == [json.loads(profiles["rome-a100"].read_text())["gpus"][3]["uuid"]]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert json.loads(cli(*words).out)["gpus"] == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "42")
    cli("select", "training:v1", "--catalog", catalog_file).refuses(
        2, "CUDA_VISIBLE_DEVICES=42: '42' not found on this host"
    )


def test_reference_selects_a_variant_from_a_file_catalog(cli, profiles, catalog_file):
    words = ("--host", profiles["rome-a100"], "--catalog", catalog_file)
    name = "training:v1-cpu-znver2-0123456789ab"
    assert cli("select", name, *words, "--gpus", "none").out == f"{name}\n"
    result = cli("select", "training:v1-cpu-znver4-0123456789ab", *words, "--gpus", "none")
    assert result.code == 3
    cli("select", "training:v1-cpu-znver9-0123456789ab", *words).refuses(
        4, "did you mean 'training:v1-cpu-znver"
    )


@pytest.fixture
def pythons(tmp_path):
    """The file of a catalog with an image for each of two versions of Python."""
    variants = [
        {
            "reference": f"hello:v1-{python}",
            "digest": None,
            "platform": "linux/amd64",
            "axes": {"python": python},
        }
        for python in ("3.9", "3.13")
    ]
    path = tmp_path / "hello.json"
    document = {"schema": "imagematrix.catalog/v1", "image": "hello", "version": "v1", "variants": variants}
    path.write_text(json.dumps(document))
    return path


@pytest.mark.parametrize("command", [("select",), ("explain",), ("run", "--dry-run")])
def test_open_axis_requires_where(cli, profiles, pythons, command):
    words = (*command, "--host", profiles["laptop"], "--catalog", pythons)
    cli(*words, "hello").fails(
        2, "variants of hello:v1 that fit this host differ in python (3.9, 3.13)", "--where python="
    )
    result = cli(*words, "--where", "python=3.9", "hello")
    assert (result.code, result.err) == (0, "")
    assert "hello:v1-3.13" not in result.out
    if command[0] == "explain":
        assert result.out.startswith("hello:v1 with python 3.9 on 12th Gen Intel")
    else:
        assert result.out.endswith("hello:v1-3.9\n")
    for expression in ("pyton=3.9", "python=3.10", "python"):
        assert cli(*words, "--where", expression, "hello").code == 2


@pytest.mark.parametrize("command", ["select", "explain"])
def test_open_axis_is_in_the_json_document(cli, profiles, pythons, conforms, command):
    result = cli(command, "--host", profiles["laptop"], "--catalog", pythons, "--json", "hello")
    assert result.code == 2
    document = conforms(json.loads(result.out))
    assert (document["selected"], document["open"]) == (None, {"python": ["3.9", "3.13"]})


def test_coverage_accepts_where(cli, profiles, pythons):
    words = ("coverage", "--catalog", pythons, profiles["laptop"])
    assert cli(*words).code == 2
    assert "serves 1 of 1 host" in cli(*words, "--where", "python=3.13").out


def with_facts(shipped_catalog, tmp_path, **facts):
    variants = [variant.to_json() | {"facts": facts} for variant in shipped_catalog.variants]
    path = tmp_path / "told.json"
    path.write_text(json.dumps(shipped_catalog.to_json() | {"variants": variants}))
    return path


def test_explain_marks_facts_read_from_bytes(cli, profiles, shipped_catalog, tmp_path, conforms):
    catalog = with_facts(shipped_catalog, tmp_path, driver="bytes", cpu_flags="unknown")
    words = ("explain", "training:v1", "--host", profiles["genoa-h200"], "--catalog", catalog)
    out = cli(*words).out
    assert "\n       driver-exact (bytes): the image carries driver 535.261.03" in out
    assert "\n       device-code: no device code" in out
    assert " <- selected\n       some of its needs are unknown: cpu\n" in out
    document = conforms(json.loads(cli(*words, "--json").out))
    sources = {rule["rule"]: rule["source"] for rule in document["candidates"][0]["rules"]}
    assert (sources["driver-exact"], sources["device-code"], sources["cpu"]) == ("bytes", "claim", "unknown")


@pytest.mark.parametrize(
    "command",
    [
        ("select", "training:v1"),
        ("explain", "training:v1"),
        ("run", "--dry-run", "training:v1"),
        ("kubernetes", "labels"),
        ("kubernetes", "device-plugin", "--dry-run"),
    ],
)
@pytest.mark.parametrize("option", ["--root", "--nvidia-smi"])
def test_a_saved_host_is_not_mixed_with_another(cli, profiles, command, option):
    if (command[0], option) == ("run", "--root") or (command[1], option) == ("device-plugin", "--nvidia-smi"):
        return  # which has no such option
    options = ("--host", profiles["laptop"], option, "/nonexistent")
    at = 1 if command[0] == "run" else len(command)
    code, out, err = cli(*command[:at], *options, *command[at:])
    assert (code, out) == (2, "")
    assert err.startswith(f"imagematrix: --host and {option} are mutually exclusive")
    assert len(err.splitlines()) == 2


def test_select_names_the_gpus_of_a_mixed_node(choose):
    wanted = choose("select", "mixed", "--gpus", "1")
    assert wanted.code == 0
    assert wanted.err == "imagematrix: for GPU 0 (Tesla T4)\n"
    assert choose("select", "mixed", "--gpus", "device=0") == (0, wanted.out, "")
    assert choose("select", "rome-a100", "--gpus", "1").err == ""


def test_explain_says_of_each_refusal_where_the_need_comes_from(cli, profiles, shipped_catalog, tmp_path):
    words = ("explain", "training:v1", "--host", profiles["skylake-v100"], "--catalog")
    for source in ("unknown", "table", "bytes"):
        told = with_facts(shipped_catalog, tmp_path, cpu_flags=source)
        assert f"\n       cpu ({source}): " in cli(*words, told).out


@pytest.mark.parametrize("command", ["select", "explain", "ls", "coverage"])
def test_a_policy_that_cannot_be_read_is_an_error_for_a_saved_catalog(cli, profiles, pythons, command):
    host = {"ls": [], "coverage": [profiles["laptop"]]}.get(command, ["--host", profiles["laptop"]])
    words = [command, "hello", *host, "--catalog", pythons, "--policy", "absent.json"]
    cli(*words).refuses(2, "absent.json cannot be read: No such file")
