import json
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagematrix.errors import UsageError
from imagematrix.hardware.host import nvml, nvml_query
from imagematrix.hardware.host.host import Driver, MigDevice

A100 = "bus=00000000:07:00.0,dev=20b0,uuid=GPU-a,minor=2,name=NVIDIA A100-SXM4-40GB,cc=8.0,mib=40960,mig=0"
H100_MIG = (
    "bus=00000000:1B:00.0,dev=2330,uuid=GPU-h,minor=0,name=NVIDIA H100 80GB HBM3,cc=9.0,mib=81559,mig=1,"
    "migs=2:0:40448:3g.40gb/9:0:9984:1g.10gb"
)
M60 = "bus=00000000:05:00.0,dev=13f2,uuid=GPU-m,minor=1,name=Tesla M60,cc=5.2,mib=8129,brand=2"


@pytest.fixture
def ask(pynvml, monkeypatch):
    """Queries the real pynvml in this process, over the stub."""

    def query(**settings):
        for name, value in settings.items():
            monkeypatch.setenv(f"STUB_{name.upper()}", str(value))
        return nvml.parse_nvml(json.loads(json.dumps(nvml_query.query_nvml(pynvml))))

    return query


def test_the_separate_process(configure_nvml):
    configure_nvml(gpus=f"{A100};{H100_MIG}", driver="550.163.01")
    answer = nvml.read_nvml()
    assert (answer.error, answer.message) == (None, "")
    assert (answer.driver, answer.library) == ("550.163.01", "550.144.03")
    first, second = answer.gpus
    assert first == nvml.NvmlGpu(
        index=0,
        bus_id="0000:07:00.0",
        device_id="20b0",
        minor=2,
        uuid="GPU-a",
        name="NVIDIA A100-SXM4-40GB",
        compute="8.0",
        brand="nvidia",
        memory_mib=40960,
        virtualization=0,
        processes=(),
        memory_used_mib=0,
        utilization=0,
        temperature=30,
        persistence=1,
    )
    assert second.mig == (
        MigDevice(uuid="MIG-2-0", profile="3g.40gb", gpu_instance=2, compute_instance=0, memory_mib=40448),
        MigDevice(uuid="MIG-9-0", profile="1g.10gb", gpu_instance=9, compute_instance=0, memory_mib=9984),
    )


def test_a_mixed_node(ask):
    answer = ask(gpus=f"{M60};{A100}")
    assert [(gpu.compute, gpu.brand, gpu.memory_mib) for gpu in answer.gpus] == [
        ("5.2", "tesla", 8129),
        ("8.0", "nvidia", 40960),
    ]
    assert [gpu.mig for gpu in answer.gpus] == [None, None]  # not supported, and off


def test_mig_without_devices(ask):
    (gpu,) = ask(gpus="mig=1").gpus
    assert gpu.mig == ()


def test_unsupported_facts_are_none(ask):
    (gpu,) = ask(gpus="mib=-1,brand=-1,virt=-1,mig=-1").gpus
    assert (gpu.memory_mib, gpu.brand, gpu.virtualization, gpu.mig) == (None, None, None, None)
    assert gpu.errors == {"memory": 3, "brand": 3, "virtualization": 3, "mig": 3}
    assert gpu.is_reached
    assert gpu.uuid == "GPU-1"


def test_current_readings(ask):
    (gpu,) = ask(gpus=f"{A100},used=1024,kept=600,util=97,temp=61,persist=0,procs=41/42:2:0").gpus
    assert (gpu.memory_used_mib, gpu.utilization, gpu.temperature, gpu.persistence) == (1024, 97, 61, 0)
    assert gpu.processes == (
        nvml.Process(pid=41),
        nvml.Process(pid=42, gpu_instance=2, compute_instance=0),
    )
    assert gpu.errors == {}


def test_processes_with_older_drivers(ask):
    (gpu,) = ask(gpus=f"{A100},old=1,procs=41,used=1024,kept=600").gpus
    assert gpu.memory_used_mib == 1624
    assert gpu.processes == (nvml.Process(pid=41),)
    assert gpu.errors == {}


def test_unknown_processes_do_not_mean_idle(ask):
    (gpu,) = ask(gpus=f"{A100},procs=-1,util=-1,temp=-1,persist=-1").gpus
    assert (gpu.processes, gpu.utilization, gpu.temperature, gpu.persistence) == (None, None, None, None)
    assert gpu.errors == {"processes": 3, "utilization": 3, "temperature": 3, "persistence": 3}
    (gpu,) = ask(gpus=f"{A100},old=1,procs=-1").gpus
    assert (gpu.processes, gpu.errors) == (None, {"processes": 3})


@pytest.mark.parametrize("code", [15, 16, 4, 17, 999])
def test_an_unreachable_gpu(ask, code):
    bad, good = ask(gpus=f"handle={code};{A100}").gpus
    assert bad == nvml.NvmlGpu(index=0, errors={"handle": code})
    assert not bad.is_reached
    assert good.is_reached


def test_a_gpu_that_is_lost_during_the_query(ask):
    (gpu,) = ask(gpus="query=15").gpus
    assert not gpu.is_reached
    assert gpu.errors["uuid"] == 15
    assert gpu.bus_id is None


def test_a_name_that_is_not_utf_8(ask, monkeypatch):
    import os

    monkeypatch.setitem(os.environb, b"STUB_GPUS", b"name=\xff\xfe")
    (gpu,) = ask().gpus
    assert gpu.name is None
    assert gpu.errors["name"] == 999


@pytest.mark.parametrize(("brand", "name"), [(0, None), (5, "geforce"), (13, "nvidiartx"), (77, None)])
def test_brands(ask, brand, name):
    (gpu,) = ask(gpus=f"brand={brand}").gpus
    assert gpu.brand == name


def test_no_gpus(ask):
    assert ask(gpus="") == nvml.Nvml(driver="550.163.01")


@pytest.mark.parametrize("code", [4, 9, 12, 13, 17, 18, 999])
def test_a_failed_initialisation(ask, code):
    answer = ask(init=code)
    assert answer.error == code
    assert answer.message
    assert answer.gpus == ()


def test_mismatch_names_the_library(configure_nvml):
    configure_nvml(init=18)
    answer = nvml.read_nvml()
    assert (answer.error, answer.library) == (18, "550.144.03")
    sentence = nvml.explain_failure(answer, Driver(version="550.163.01", kind="open", source="x"))
    assert "550.144.03" in sentence
    assert "550.163.01" in sentence
    assert "reboot" in sentence
    assert "driver is another version" in nvml.explain_failure(nvml.Nvml(error=18, message="x"), None)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (nvml.Nvml(error=12, message="x"), "libnvidia-ml.so.1"),
        (nvml.Nvml(error=9, message="x"), "nvidia-modprobe"),
        (nvml.Nvml(error=4, message="x"), "/dev/nvidiactl"),
        (nvml.Nvml(error=999, message="Unknown Error"), r"\(error 999\): Unknown Error"),
        (nvml.Nvml(message="too slow"), "query failed: too slow"),
    ],
)
def test_explanations(answer, words):
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(nvml.explain_failure(answer, None))


def test_no_library(tmp_path, monkeypatch):
    # A folder before the system's own has a file of that name that is not a library.
    (tmp_path / "libnvidia-ml.so.1").write_text("no library")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    answer = nvml.read_nvml()
    assert answer.error in {9, 12}
    assert answer.gpus == ()


def test_a_library_outside_the_loader_s_path(nvml_stub, tmp_path, monkeypatch):
    # pynvml loads it by name, and gets the library that was loaded from elsewhere.
    program = (
        "import sys; from imagematrix.hardware.host import nvml_library, nvml_query; "
        "nvml_library.FOLDERS = sys.argv[1:]; nvml_query.main()"
    )
    monkeypatch.setenv("STUB_GPUS", A100)
    command = [sys.executable, "-c", program, tmp_path, nvml_stub]
    done = subprocess.run(command, capture_output=True, check=True)
    answer = nvml.parse_nvml(json.loads(done.stdout))
    assert (answer.message, answer.library) == ("", "550.144.03")
    assert [gpu.uuid for gpu in answer.gpus] == ["GPU-a"]


def test_tables_are_read_and_the_query_runs_from_an_archive(nvml_stub, tmp_path, monkeypatch):
    import pynvml

    archive = tmp_path / "imagematrix.pyz"
    package = Path(nvml.__file__).parents[2]
    with zipfile.ZipFile(archive, "w") as made:
        made.write(pynvml.__file__, "pynvml.py")
        for file in (*package.rglob("*.py"), *package.rglob("*.json")):
            made.write(file, file.relative_to(package.parent))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(nvml_stub))
    monkeypatch.setenv("PYTHONPATH", archive.name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STUB_GPUS", A100)
    program = (
        "from imagematrix.hardware.host import nvml; from imagematrix.hardware.vendors import marches; "
        "print(nvml.__file__, nvml.read_nvml().gpus[0].uuid, marches.get_vendor('znver4'))"
    )
    done = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [f"{archive}/imagematrix/hardware/host/nvml.py", "GPU-a", "amd"]


def test_a_hanging_query_times_out(configure_nvml):
    configure_nvml(sleep=60)
    started = time.monotonic()
    answer = nvml.read_nvml(0.3)
    assert time.monotonic() - started < 30
    assert answer.error is None
    assert answer.message == "no response within 0.3 seconds"


def test_a_process_that_cannot_be_killed(monkeypatch):
    class Stuck:
        stdout = None
        stderr = None
        returncode = None

        def __init__(self, *_, **__):
            self.killed = False

        def communicate(self, timeout):
            raise subprocess.TimeoutExpired("nvml", timeout)

        def kill(self):
            self.killed = True

        def wait(self, timeout):
            raise subprocess.TimeoutExpired("nvml", timeout)

    monkeypatch.setattr(subprocess, "Popen", Stuck)
    assert "within 5 seconds" in nvml.read_nvml(5).message


def test_a_process_that_cannot_be_started(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert "cannot start a process: No such file" in nvml.read_nvml().message
    monkeypatch.setattr(sys, "executable", "")
    assert nvml.read_nvml().message


@pytest.mark.parametrize("program", ["true", "false"])
def test_a_process_that_prints_nothing(monkeypatch, program):
    monkeypatch.setattr(sys, "executable", f"/bin/{program}")
    assert "failed: exit" in nvml.read_nvml().message


def test_pynvml_of_the_current_folder_is_not_run(configure_nvml, tmp_path, monkeypatch):
    (tmp_path / "pynvml.py").write_text("raise SystemExit('hijacked')")
    monkeypatch.chdir(tmp_path)
    configure_nvml(gpus=A100)
    assert nvml.read_nvml().message == ""


def test_without_pynvml(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    nvml_query.main()
    answer = nvml.parse_nvml(json.loads(capsys.readouterr().out))
    assert "pynvml is not installed" in answer.message


def test_main(ask, capsys):
    ask(gpus=A100)
    nvml_query.main()
    answer = nvml.parse_nvml(json.loads(capsys.readouterr().out))
    assert answer.gpus[0].uuid == "GPU-a"


@pytest.mark.parametrize(
    ("maps", "path"),
    [
        ("", None),
        ("7f00-7f01 r-xp 00000000 08:01 42   /usr/lib/libc.so.6\n", None),
        ("7f00-7f01 r-xp 0 08:01 42   /lib/a b/libnvidia-ml.so.550.1\n", "/lib/a b/libnvidia-ml.so.550.1"),
    ],
)
def test_library(maps, path):
    assert nvml_query.find_library(maps) == path


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "error",
                    "message",
                    "driver",
                    "library",
                    "gpus",
                    "index",
                    "errors",
                    "mig",
                    "brand",
                    "fact",
                    "code",
                ]
            ),
            inner,
        )
    ),
    max_leaves=12,
)


@given(JSON)
def test_any_document(document):
    try:
        nvml.parse_nvml(document)
    except UsageError:
        return


def test_mig_devices_without_numbers_are_left_out():
    gpu = {"index": 0, "mig": [{"gpu_instance": None, "compute_instance": 0}], "errors": []}
    answer = nvml.parse_nvml({"error": None, "message": "", "gpus": [gpu]})
    assert answer.gpus[0].mig == ()
