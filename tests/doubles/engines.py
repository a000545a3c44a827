"""Docker engines and registries that tests start: each in a network namespace of its own.

slirp4netns provides outgoing connections (builds fetch packages), so that neither the machine's firewall
nor another engine is touched.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from processes import END_WITH_US, new_folder, remove_folder

ROOT = Path(__file__).parents[2]
# Images shared by several files; all others are removed at the end of the file that built them.
SHARED = ("debian", "training")
# Engines that live for minutes spend a third of their processor time on collecting garbage otherwise.
RARE_GC = {"GOGC": "800"}
RELEASE = "IMAGEMATRIX_TEST_ENGINE"
OLDEST = "docker-bookworm"
NEEDED = ("dockerd", "docker", "docker-registry", "htpasswd", "slirp4netns", "unshare", "debootstrap")


class Engine:
    """A dockerd that the tests started; `store` is "containerd" or "classic", `node` the GpuNode it is on.

    `release` is the name of an engine that `ci/engines` fetches. Without it, the variable RELEASE names it,
    or it is the installed engine. `settings` are further ones of daemon.json.
    """

    def __init__(self, store, node=None, release=None, settings=None):
        self.store = store
        self.node = node
        release = release or os.environ.get(RELEASE)
        self.programs = ROOT / f".cache/engines/{release}/bin" if release else None
        self.folder = new_folder()
        (self.folder / "tmp").mkdir()
        self.host = f"unix://{self.folder}/docker.sock"
        self._settings = settings or {}
        self._processes = []

    def start(self):
        config = {
            **self._settings,
            "features": {"containerd-snapshotter": self.store == "containerd", "cdi": True},
            "experimental": True,  # CDI is experimental before Docker 27
        }
        if not (self.programs and self.programs.parent.name == OLDEST):  # which does not know the setting
            config["cdi-spec-dirs"] = [f"{self.folder}/cdi"]
        (self.folder / "daemon.json").write_text(json.dumps(config))
        plugins = {"cliPluginsExtraDirs": [f"{self.programs}/plugins"]} if self.programs else {}
        (self.folder / "config.json").write_text(json.dumps(plugins))
        command = [
            *END_WITH_US,
            *("unshare", "--net", *(["--mount", *self.node.inside] if self.node else [])),
            *("dockerd", "--config-file", self.folder / "daemon.json", "--host", self.host),
            *("--data-root", self.folder / "data", "--exec-root", self.folder / "run"),
            *("--pidfile", self.folder / "pid"),
        ]
        with (self.folder / "log").open("ab") as log:
            dockerd = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**self._found(os.environ), **RARE_GC},
            )
            self._processes = [dockerd]
            self._wait(lambda: self._inode(dockerd.pid) != self._inode("self"))
            slirp = [
                *END_WITH_US,
                "slirp4netns",
                "--configure",
                "--mtu=65520",
                "--disable-host-loopback",
                str(dockerd.pid),
                "tap0",
            ]
            self._processes.append(subprocess.Popen(slirp, stdout=log, stderr=log, start_new_session=True))
        self._wait(lambda: self.docker("version", check=False).returncode == 0)

    @staticmethod
    def _inode(pid):
        return Path(f"/proc/{pid}/ns/net").stat().st_ino

    def _wait(self, ready):
        for _ in range(1200):
            if ready():
                return
            time.sleep(0.1)
        pytest.fail(f"no engine: {(self.folder / 'log').read_text()[-2000:]}")

    def stop(self, how=signal.SIGTERM):
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, how)
        for process in self._processes:
            process.wait(60)
        if how == signal.SIGKILL:
            self._stop_containerd()
        self._processes = []

    def _stop_containerd(self):
        # dockerd's own containerd outlives a dockerd that was killed.
        pid = self.folder / "run" / "containerd" / "containerd.pid"
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            os.kill(int(pid.read_text()), signal.SIGKILL)
        pid.unlink(missing_ok=True)
        (self.folder / "pid").unlink(missing_ok=True)

    def remove(self):
        self.stop()
        remove_folder(self.folder)

    @property
    def environment(self):
        # `docker buildx bake` of 0.13 leaves a folder behind for each Dockerfile.
        places = {"IMAGEMATRIX_LOCKS": f"{self.folder}/locks", "TMPDIR": f"{self.folder}/tmp"}
        machine = self.node.environment if self.node else os.environ
        return {**self._found(machine), **places, "DOCKER_HOST": self.host, "NO_COLOR": "1"}

    def _found(self, environment):
        """Return an environment in which the programs of this engine's release are found first."""
        if not self.programs:
            return environment
        path = f"{self.programs}:{environment['PATH']}"
        return {**environment, "PATH": path, "DOCKER_CONFIG": str(self.folder)}

    def cosign(self, folder, *words):
        """Run a command of cosign in `folder`, on the engine's network, with a key without a password."""
        command = [*self.inside, "cosign", *words]
        environment = {**self.environment, "COSIGN_PASSWORD": "", "HOME": str(folder)}
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr

    def docker(self, *words, check=True, **options):
        return subprocess.run(
            ["docker", *words], check=check, capture_output=True, text=True, env=self.environment, **options
        )

    def has_no_containers(self):
        """Whether no container is left; the engine may still be removing ended ones."""
        for _ in range(300):
            if not self.docker("ps", "-aq").stdout:
                return True
            time.sleep(0.1)
        return False

    @property
    def running(self):
        return bool(self._processes)

    def remove_containers(self):
        if self.running and (names := self.docker("ps", "-aq").stdout.split()):
            self.docker("rm", "-f", *names, check=False)  # some may be gone by now
            assert self.has_no_containers()

    def images(self):
        """Return the names of all images except those shared by several files."""
        names = self.docker("images", "--format", "{{.Repository}}:{{.Tag}}").stdout.split()
        return {name for name in names if name.partition(":")[0] not in SHARED and "<none>" not in name}

    def inspect(self, name):
        return json.loads(self.docker("inspect", name).stdout)[0]

    @property
    def inside(self):
        """The prefix of a command that runs on the engine's node, in the network of the test registries."""
        spaces = f"/proc/{self._processes[0].pid}/ns"
        node = [f"--mount={spaces}/mnt", f"--wdns={ROOT}"] if self.node else []
        return ["nsenter", f"--net={spaces}/net", *node]

    def imagematrix(self, *words, **options):
        """Run the command line as a user does."""
        given = {"capture_output": True, "text": True, "env": self.environment, **options}
        command = [*self.inside, ROOT / ".venv/bin/imagematrix", *words]
        return subprocess.run(command, check=False, **given)

    def list_gpus(self, host):
        """Return the GPUs as `imagematrix gpus` lists them on a node with the hardware of a saved host."""
        program = (
            "from imagematrix import cli; from imagematrix.hardware.host import host, probe; "
            f"probe.assemble_host = lambda *_, **__: host.Host.load({str(host)!r}); cli.main()"
        )
        command = [*self.inside, ROOT / ".venv/bin/python", "-c", program, "gpus", "--json"]
        done = subprocess.run(command, capture_output=True, text=True, env=self.environment, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["gpus"]

    def build_shipped(self, *expressions):
        """Build cells of the shipped matrix, and return the references of the images.

        The matrix is copied, because the bases of this engine are locked beside it.
        """
        copy = self.folder / "shipped"
        if not copy.exists():
            shutil.copytree(ROOT / "templates", copy / "templates")
            shutil.copy(ROOT / "matrix.yaml", copy)
        built = []
        for expression in expressions:
            done = self.imagematrix("build", "--json", "--only", expression, "-f", copy / "matrix.yaml")
            assert done.returncode == 0, done.stderr
            built += [cell["reference"] for cell in json.loads(done.stdout)["cells"] if cell["reference"]]
        return built

    def seed(self):
        for suite in ("bookworm", "trixie"):
            archive = ROOT / f".cache/bases/{suite}.tar"
            self.docker("import", "--change", 'CMD ["bash"]', str(archive), f"debian:{suite}")


class Registry:
    """A registry in the network of an engine, on a port of loopback; with a `login` it requires one.

    Registries with the same folder `data` share their content. To serve other machines, a registry listens at
    the address `host`, with the files of a certificate and its key in `tls`.
    """

    def __init__(self, engine, port, login=None, data=None, *, host="127.0.0.1", tls=None):
        self.engine = engine
        self.address = f"{host}:{port}"
        self.folder = new_folder()
        self.data = data or self.folder / "data"
        secured = ", tls: {{certificate: '{}', key: '{}'}}".format(*tls) if tls else ""
        lines = ["version: 0.1", "log: {level: info}", f"http: {{addr: '{self.address}'{secured}}}"]
        lines += [f"storage: {{filesystem: {{rootdirectory: {self.data}}}, delete: {{enabled: true}}}}"]
        if login:
            lines.append(f"auth: {{htpasswd: {{realm: here, path: {self.folder}/htpasswd}}}}")
            made = subprocess.run(["htpasswd", "-nbB", *login], check=True, capture_output=True, text=True)
            (self.folder / "htpasswd").write_text(made.stdout)
        (self.folder / "config.yml").write_text("\n".join(lines) + "\n")
        self.start()

    def start(self):
        self._log = (self.folder / "log").open("wb")
        command = [
            *END_WITH_US,
            *self.engine.inside,
            "docker-registry",
            "serve",
            str(self.folder / "config.yml"),
        ]
        self._process = subprocess.Popen(
            command, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True
        )
        for _ in range(1200):
            if "listening on" in self.log:
                return
            time.sleep(0.05)
        pytest.fail(f"no registry: {self.log}")

    @property
    def log(self):
        return (self.folder / "log").read_text()

    def kill(self):
        with contextlib.suppress(ProcessLookupError):  # killed before
            os.killpg(self._process.pid, signal.SIGKILL)  # nsenter may have forked
        self._process.wait()
        self._log.close()

    def remove(self):
        self.kill()
        remove_folder(self.folder)


def require(*also):
    """Skip the tests, or fail them in CI, if a program in NEEDED or `also` is missing."""
    missing = [name for name in (*NEEDED, *also) if not shutil.which(name)]
    if os.getuid() != 0:
        missing.append("root")
    if missing and os.environ.get("CI"):
        pytest.fail(f"the engine tests need {', '.join(missing)}: run them with `make engine`", pytrace=False)
    if missing:
        pytest.skip(f"the engine tests need {', '.join(missing)}: run `make engine` as root")
