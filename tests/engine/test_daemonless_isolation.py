"""What a container without a daemon cannot reach, and what of its image cannot act on the node.

The images here are hostile, or their programs are. They belong to the ordinary user who starts them.
"""

import contextlib
import fcntl
import json
import os
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

import pytest
from machines import wait_until
from ordinary_user import AS_USER, HOST, USER, OrdinaryUser, Root, make_folders

from imagematrix.common.programs import SYSTEM_PATH

IMAGE = ("--gpus", "1", "training:v1")
PROGRAM = (sys.executable, "-P", "-m", "imagematrix")
# The program, with containers among the processes of the node, as for a task of a batch system.
AMONG_THE_NODE_S = """\
import sys
from imagematrix.cli import dispatch
from imagematrix.cli.shared import daemonless
daemonless.DaemonlessLaunch.__init__.__kwdefaults__["own_processes"] = False
sys.exit(dispatch.run_command(sys.argv[1:]))
"""
APPTAINERS = ("APPTAINERENV_", "APPTAINER_MESSAGELEVEL", "ENGINE_CONFIG")  # what it tells its own processes
ON_NODE = (sys.executable, "-P", "-c", AMONG_THE_NODE_S)
OTHER_FOLDER = 150  # a descriptor beyond those that the program itself uses first

# What is started on the node, by names that could be found in a folder of the image's PATH.
NAMES = (
    *("runc", "crun", "bwrap", "ch-run", "apptainer", "squashfuse", "squashfuse_ll"),
    *("sh", "bash", "cat", "env", "fusermount", "fusermount3", "newuidmap", "newgidmap", "python3", "mount"),
)
LIBRARY = """\
#include <fcntl.h>
#include <unistd.h>
unsigned la_version(unsigned version) { return version; }
__attribute__((constructor)) static void begin(void) {
    int file = open(MARKER, O_WRONLY | O_CREAT | O_APPEND, 0666);
    if (file >= 0) { write(file, "library\\n", 8); close(file); }
}
"""

# Types "x" and a new line into each terminal that it has, by TIOCSTI of ioctl_tty(2).
TYPING = """\
open($files[$_], "+<&=$_") || open($files[$_], "<&=$_") || open($files[$_], ">&=$_") for 0, 1, 2;
open($own, "+<", "/dev/tty") && push @files, $own;
for $file (grep { defined fileno $_ } @files) {
    for $typed ("x", "\\n") { $key = $typed; ioctl $file, 0x5412, $key; }
}
print "typed\\n";
"""
# Opens, for writing, what somebody may write to in the kernel's folders, and what is mounted read-only.
# Anybody may have /proc/pressure watched.
OPENING = """\
open $found, "-|", "find /proc/[!0-9]* /sys -type f -perm /222 | grep -v ^/proc/pressure/";
chomp(@paths = <$found>);
for $path (@paths, "/etc/hosts", "/etc/resolv.conf", "/in/file") {
    if (open $file, ">>", $path) { print "opened: $path\n"; close $file }
}
print @paths > 1000 ? "looked\n" : "few: @paths\n";
"""
# The same, after trials to make them writable, also as root of a user namespace.
CHANGING = """\
exec 2> /dev/null
for place in /in /proc /proc/sys /sys /sys/fs/cgroup /etc/hosts; do
    mount -o remount,bind,rw $place
    mkdir -p /new$place && mount --rbind $place /new$place && mount -o remount,bind,rw /new$place
    umount -l /new$place
done
perl -e "$1"
unshare --user --map-root-user --mount --pid --fork --mount-proc perl -e "$1" | grep opened:
exit 0
"""
# What decides, on some node, what a program loads or starts, or where it writes.
HOSTILE = {
    "PATH": "{evil}:/usr/local/bin:/usr/bin:/bin",
    "LD_PRELOAD": "{evil}/lib.so",
    "LD_AUDIT": "{evil}/lib.so",
    "LD_LIBRARY_PATH": "{evil}:",
    "LD_DEBUG_OUTPUT": "{evil}/debug",
    "PYTHONPATH": "{evil}",
    "PYTHONHOME": "{evil}",
    "PYTHONSTARTUP": "{evil}/sitecustomize.py",
    "BASH_ENV": "{evil}/start.sh",
    "ENV": "{evil}/start.sh",
    "SHELLOPTS": "xtrace",
    "PS4": "$(echo prompt >> {evil}/../marker)",
    "GCONV_PATH": "{evil}",
    "LOCPATH": "{evil}",
    "NLSPATH": "{evil}/%N",
    "LANG": "xx_XX.UTF-8",
    "TMPDIR": "{evil}",
    "HOME": "{evil}",
    "USER": "root",
    "XDG_RUNTIME_DIR": "{evil}",
    "XDG_CONFIG_HOME": "{evil}",
    "XDG_DATA_HOME": "{evil}",
    "XDG_CACHE_HOME": "{evil}",
    "APPTAINER_BIND": "{evil}:/evil",
    "SINGULARITY_BIND": "{evil}:/evil",
    "APPTAINERENV_X": "1",
    "SINGULARITYENV_PATH": "{evil}",
    "APPTAINER_CONFIGDIR": "{evil}",
    "CH_RUN_STORAGE": "{evil}",
    "CH_IMAGE_STORAGE": "{evil}",
    "CH_RUN_ANNOYING": "yes",
    "DOCKER_HOST": "unix://{evil}/docker.sock",
    "DOCKER_CONFIG": "{evil}",
    "IMAGEMATRIX_STORE": "{evil}",
    "IMAGEMATRIX_LOCKS": "{evil}",
    "IMAGEMATRIX_RUNTIME": "{evil}/runc",
    "NOTIFY_SOCKET": "{evil}/notify",
    "LISTEN_FDS": "3",
    "LISTEN_PID": "1",
    "_LIBCONTAINER_INITPIPE": "3",
    "_LIBCONTAINER_LOGPIPE": "4",
    "GODEBUG": "inittrace=1",
    "GOTRACEBACK": "crash",
    "G_MESSAGES_DEBUG": "all",
    "FUSERMOUNT_PROG": "{evil}/fusermount3",
    "MALLOC_TRACE": "{evil}/malloc",
    "PMI_FD": "no-number",
}
TIOCSTI = Path("/proc/sys/dev/tty/legacy_tiocsti")


@pytest.fixture(scope="module")
def unpacked(archive, folder):
    """A store with the image as a folder."""
    store = folder / "unpacked"
    pulled = ("pull", "training:v1", *HOST, "--catalog", archive, "--to", store, "--unpacked")
    store.mkdir()
    os.chown(store, USER, USER)
    OrdinaryUser(folder).imagematrix(*pulled)
    return store


@pytest.fixture(params=["squashfs", "unpacked"])
def store(request, folder):
    if request.param == "squashfs":
        return folder / "store"
    return request.getfixturevalue("unpacked")


def run(*options):
    return ("run", *HOST, *options, *IMAGE)


@contextlib.contextmanager
def image_variables(store, variables):
    """Have an image in a store that sets other variables, too."""
    (path,) = (store / "images").glob("*/image.json")
    before = path.read_text()
    document = json.loads(before)
    config = document["config"]["config"]
    own = [text for text in config.get("Env") or () if text.partition("=")[0] not in variables]
    config["Env"] = [*own, *(f"{name}={value}" for name, value in variables.items())]
    path.write_text(json.dumps(document))
    try:
        yield
    finally:
        path.write_text(before)


@contextlib.contextmanager
def started(user, *words, program=PROGRAM, options=(), **how):
    """Start a container, which says when it is ready; yield the keeper's process, and end both."""
    with subprocess.Popen(
        [*AS_USER, *program, "run", *HOST, *map(str, options), *IMAGE, *words],
        env=user.environment,
        cwd=user.folder,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        **how,
    ) as keeper:
        try:
            assert keeper.stdout.readline() == "ready\n"
            yield keeper
        finally:
            end_containers()
            keeper.wait(60)


def end_containers():
    """End the user's containers, and wait until their keepers have ended, too."""

    def ended():
        left = commands()
        for pid, line in left.items():
            if not line.startswith(sys.executable):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return not left

    wait_until(ended, "the end of all containers")


def commands():
    """Return the command lines of the user's processes by PID, but for those that have ended."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            status = (path / "status").read_text()
            if f"Uid:\t{USER}\t" in status and not re.search(r"^State:\s+[ZX]", status, re.MULTILINE):
                line = (path / "cmdline").read_bytes().rstrip(b"\0")
                found[int(path.name)] = line.replace(b"\0", b" ").decode(errors="replace")
    return found


def process_of(command):
    """Return the PID of the user's process with this command line, once there is one."""
    found: list[int] = []

    def there():
        found[:] = [pid for pid, line in commands().items() if line == command]
        return len(found) == 1

    wait_until(there, f"a process {command}")
    return found[0]


def children(pid):
    listed = (path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children"))
    return [int(child) for text in listed for child in text.split()]


def environment_of(pid):
    """Return the variables of a process, as root sees them."""
    text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    return dict(line.partition("=")[::2] for line in text.split("\0") if line)


def leases(user):
    return [path.name for path in (user.folder / "store/leases").iterdir()]


class Trap:
    """A folder of the node whose programs and libraries leave a mark when something starts them."""

    def __init__(self, folder):
        self.path = folder / "evil"
        self._marker = folder / "marker"
        self.path.mkdir()
        for name in NAMES:
            program = self.path / name
            program.write_text(f"#!/bin/sh\necho {name} >> {self._marker}\n")
            program.chmod(0o755)
        mark = f"open({str(self._marker)!r}, 'a').write('python\\n')\n"
        (self.path / "sitecustomize.py").write_text(mark)
        (self.path / "start.sh").write_text(f"echo start >> {self._marker}\n")
        source = folder / "lib.c"
        source.write_text(LIBRARY)
        self.library = self.path / "lib.so"
        built = ("gcc", "-shared", "-fPIC", f'-DMARKER="{self._marker}"', "-o", self.library, source)
        subprocess.run(built, check=True)
        # A process that looks for these in a folder of LD_LIBRARY_PATH or GCONV_PATH takes them.
        for name in ("libc.so.6", "libfuse3.so.3", "libseccomp.so.2", "libcap.so.2"):
            shutil.copy(self.library, self.path / name)
        self.before = self.listed()

    def listed(self):
        found = {path.name: path.stat().st_mtime_ns for path in self.path.iterdir()}
        found.pop("__pycache__", None)  # of the positive control
        return found

    def marks(self):
        return self._marker.read_text().split() if self._marker.exists() else []

    def spring(self):
        """Set it off on purpose, as the user; return the marks, and take them away."""
        for words, variables in (
            (["runc"], {"PATH": f"{self.path}:/usr/bin:/bin"}),
            (["/bin/true"], {"LD_PRELOAD": str(self.library)}),
            (["/bin/true"], {"LD_AUDIT": str(self.library)}),
            ([sys.executable, "-c", ""], {"PYTHONPATH": str(self.path)}),
            (["bash", "-c", "true"], {"PATH": "/usr/bin:/bin", "BASH_ENV": f"{self.path}/start.sh"}),
        ):
            assigned = (f"{name}={value}" for name, value in variables.items())
            subprocess.run([*AS_USER, "env", *assigned, *words], check=True, capture_output=True)
        found = self.marks()
        self._marker.unlink()
        return found

    def variables(self, names=tuple(HOSTILE)):
        """Return these of the variables that lead to it."""
        return {name: HOSTILE[name].replace("{evil}", str(self.path)) for name in names}


@pytest.fixture(scope="module")
def trap():
    """Made where no runtime mounts anything, so that nothing inside can come across it."""
    made = Path(tempfile.mkdtemp(prefix="imx-trap-", dir="/var/tmp"))
    made.chmod(0o777)
    try:
        trap = Trap(made)
        os.chown(trap.path, USER, USER)
        yield trap
    finally:
        shutil.rmtree(made)


def show_variables(user, trap, hostile):
    """Run a container of an image that sets variables, and check that it has them."""
    with image_variables(user.folder / "store", hostile):
        out = user.run(*IMAGE, "/usr/bin/env", "-0")
    found = dict(line.partition("=")[::2] for line in out.split("\0") if line)
    # Apptainer appends a folder of its own.
    names = [name for name in hostile if (user.runtime, name) != ("apptainer", "LD_LIBRARY_PATH")]
    assert {name: found.get(name) for name in names} == {name: hostile[name] for name in names}
    assert (trap.marks(), trap.listed()) == ([], trap.before)


def test_no_variable_of_an_image_acts_on_the_node(user, trap):
    assert {"runc", "library", "python", "start"} <= {*trap.spring()}
    show_variables(user, trap, trap.variables())


@pytest.mark.long
@pytest.mark.parametrize("name", HOSTILE)
def test_no_single_variable_of_an_image_acts_on_the_node(user, trap, name):
    show_variables(user, trap, trap.variables([name]))


def test_nobody_sees_the_values_of_variables(user):
    (user.folder / "secret.env").write_text("FILE_TOKEN=hunter2y\n")
    options = ("-e", "TOKEN=hunter2x", "--env-file", user.folder / "secret.env")
    script = "echo ready; exec sleep 302"
    secrets = {"TOKEN": "hunter2x", "FILE_TOKEN": "hunter2y", "IMAGE_TOKEN": "hunter2z"}
    with (
        image_variables(user.folder / "store", {"IMAGE_TOKEN": "hunter2z"}),
        started(user, "sh", "-c", script, options=options) as keeper,
    ):
        first = process_of("sleep 302")
        assert secrets.items() <= environment_of(first).items()
        assert not [line for line in commands().values() if "hunter2" in line]
        own = {pid: environment_of(pid) for pid in children(keeper.pid) if pid != first}
        assert own, "a process that serves the image"
        for pid, variables in own.items():
            names = {name for name in variables if not name.startswith(APPTAINERS)}
            assert names <= {"PATH"}, (commands()[pid], variables)
            assert variables.get("PATH", SYSTEM_PATH) in (user.environment["PATH"], SYSTEM_PATH)


def test_a_container_has_its_streams_and_nothing_else_open(user, store):
    # The list itself is open as 3.
    script = """\
cat
ls /proc/self/fd
for fd in 0 1 2 4 5 6 7 8 9 10 11 12 100 101 102 103 150 151; do
    if ls -d /proc/self/fd/$fd/.. 2> /dev/null; then echo "by $fd"; fi
done
echo end
exec sleep 303
"""
    # The caller has folders open, also with the numbers that a program otherwise gets for its own files.
    low = ("sh", "-c", 'exec 3< / 4< /proc 7< / 9< /; exec "$@"', "sh", *PROGRAM)
    with contextlib.ExitStack() as stack:
        other = os.open("/", os.O_RDONLY)
        stack.callback(os.close, other)
        high = fcntl.fcntl(other, fcntl.F_DUPFD, OTHER_FOLDER)
        stack.callback(os.close, high)
        words = ("sh", "-c", f"echo ready; {script}")
        keeper = stack.enter_context(
            started(user, *words, program=low, options=("--store", store), pass_fds=(other, high))
        )
        out = [line.strip() for line in iter(keeper.stdout.readline, "end\n")]
        assert out == ["0", "1", "2", "3"]
        first = process_of("sleep 303")
        opened = {path.name: str(path.readlink()) for path in Path(f"/proc/{first}/fd").iterdir()}
        assert opened.keys() == {"0", "1", "2"}, opened


def test_no_variable_of_an_image_names_a_descriptor_to_pass(user):
    """PMI_FD is a batch system's: an image could name a folder that the caller or the program has open."""
    with contextlib.ExitStack() as stack:
        other = os.open("/", os.O_RDONLY)
        stack.callback(os.close, other)
        high = fcntl.fcntl(other, fcntl.F_DUPFD, OTHER_FOLDER)
        stack.callback(os.close, high)
        for number in (*range(3, 12), high):
            words = (*AS_USER, *PROGRAM, *run(), "ls", "/proc/self/fd")
            with image_variables(user.folder / "store", {"PMI_FD": str(number)}):
                done = subprocess.run(
                    [*map(str, words)],
                    env=user.environment,
                    cwd=user.folder,
                    check=False,
                    capture_output=True,
                    text=True,
                    stdin=subprocess.DEVNULL,
                    pass_fds=(other, high),
                )
            assert (done.returncode, done.stdout.split()) == (0, ["0", "1", "2", "3"]), (number, done.stderr)


@pytest.mark.parametrize("program", [PROGRAM, ON_NODE], ids=["own", "node"])
def test_no_container_starts_in_a_folder_of_the_node(user, program):
    """A runtime may have one open, as /proc/self/fd/3, when it goes to the working folder."""
    link = user.folder / "home/link"
    for number in (3, 4):
        link.unlink(missing_ok=True)
        link.symlink_to(f"/proc/self/fd/{number}")
        for place in (f"/proc/self/fd/{number}", "/in/link"):
            options = ("-v", f"{user.folder}/home:/in", "-w", place)
            words = (*AS_USER, *program, *run(*options), "ls", "-d", "..")
            done = subprocess.run(
                [*map(str, words)],
                env=user.environment,
                cwd=user.folder,
                check=False,
                capture_output=True,
                text=True,
                stdin=subprocess.DEVNULL,
            )
            assert (done.returncode, done.stdout) == (2, ""), done.stderr
            assert f"cannot start in {place}, which is below /proc" in done.stderr


@pytest.fixture(scope="module")
def of_root(archive, folder):
    """Root's folders, with the image in root's own store."""
    made = folder / "root"
    made.mkdir()
    make_folders(made)
    Root(made).imagematrix("pull", "training:v1", *HOST, "--catalog", archive, "--to", made / "store")
    return made


@pytest.mark.parametrize("program", [PROGRAM, ON_NODE], ids=["own", "node"])
@pytest.mark.parametrize("is_root", [True, False], ids=["root", "ordinary"])
def test_nothing_of_the_node_can_be_opened_for_writing(user, of_root, is_root, program):
    """Root could, and so its containers could, if these places were mounted as they are."""
    caller = Root(of_root, user.runtime) if is_root else user
    (caller.folder / "home/file").write_text("text\n")
    (caller.folder / "home/file").chmod(0o666)
    options = ("-v", f"{caller.folder}/home:/in:ro")
    done = subprocess.run(
        [*caller.prefix, *program, *map(str, run(*options)), "sh", "-c", CHANGING, "sh", OPENING],
        env=caller.environment,
        cwd=caller.folder,
        check=False,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert (done.returncode, done.stdout) == (0, "looked\n"), done.stderr
    assert (caller.folder / "home/file").read_text() == "text\n"


class Terminal:
    """A terminal at which the user starts a container; a shell that stays owns it, as in a session."""

    def __init__(self, size=(33, 77)):
        self._master, self.inner = os.openpty()
        os.set_blocking(self._master, False)
        self.resize(size)
        self._shown = b""
        self._shell = None

    def run(self, user, *words, program=PROGRAM):
        """Start the program with these words in the foreground."""
        shell = """trap : INT QUIT; "$@"; echo "code $?"; exec tail -f /dev/null"""
        command = [*AS_USER, *program, *map(str, words)]
        self._shell = subprocess.Popen(
            ["setsid", "--ctty", "sh", "-c", shell, "sh", *command],
            env=user.environment,
            cwd=user.folder,
            stdin=self.inner,
            stdout=self.inner,
            stderr=self.inner,
        )

    @property
    def text(self):
        """What it has shown; each terminal that a line passes may add a carriage return."""
        return re.sub(r"\r+\n", "\n", self._shown.decode(errors="replace"))

    @property
    def session(self):
        return os.getsid(self._shell.pid)

    def resize(self, size):
        fcntl.ioctl(self.inner, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))

    def settings(self):
        return termios.tcgetattr(self.inner)

    def type(self, keys):
        os.write(self._master, keys)

    def expect(self, pattern):
        """Wait until the terminal shows what matches a pattern; return the match."""
        found: list[re.Match[str] | None] = []

        def shown():
            while select.select([self._master], [], [], 0)[0]:
                self._shown += os.read(self._master, 1 << 16)
            found[:] = [re.search(pattern, self.text)]
            return found[0] is not None

        wait_until(shown, f"{pattern!r} at the terminal")
        return found[0]

    def code(self):
        """Wait for the end of the program, and return its exit code."""
        return int(self.expect(r"code (\d+)\n")[1])

    def waiting(self):
        """Return how many characters wait to be read, by a shell that was to read its next command."""
        size = fcntl.ioctl(self.inner, termios.FIONREAD, b"\0" * 4)
        return int.from_bytes(size, sys.byteorder)

    def close(self):
        if self._shell is not None:
            self._shell.kill()
            self._shell.wait()
        os.close(self._master)
        os.close(self.inner)


@pytest.fixture
def terminal():
    made = Terminal()
    yield made
    made.close()
    end_containers()


@pytest.mark.parametrize("options", [(), ("-i",)], ids=["plain", "interactive"])
def test_a_container_has_no_terminal_of_the_caller(user, terminal, options):
    script = """\
exec 2>&1
(: < /dev/tty)
tty
for fd in 0 1 2; do if [ -t $fd ]; then echo "$fd is a terminal"; fi; done
echo end
exec sleep 304
"""
    terminal.run(user, *run(*options), "sh", "-c", script)
    terminal.expect("end\n")
    assert "No such device or address" in terminal.text
    assert "not a tty" in terminal.text
    assert "is a terminal" not in terminal.text
    first = process_of("sleep 304")
    assert os.getsid(first) != terminal.session
    number = Path(f"/proc/{first}/stat").read_text().rpartition(")")[2].split()[4]
    assert number == "0"  # tty_nr of proc_pid_stat(5)


def test_what_is_typed_comes_through_a_pipe(user, terminal):
    script = "echo up; cat | sed 's/^/in: /'; echo end; exit 5"
    terminal.run(user, *run("-i"), "sh", "-c", script)
    terminal.expect("up\n")
    terminal.type(b"hello\n\x04")
    assert terminal.code() == 5
    assert "in: hello\nend\n" in terminal.text


def test_ctrl_c_reaches_a_container_without_a_terminal(user, terminal):
    terminal.run(
        user, *run(), "sh", "-c", "trap 'echo got; exit 6' INT; echo up; while :; do sleep 0.1; done"
    )
    terminal.expect("up\n")
    terminal.type(b"\x03")
    assert terminal.code() == 6
    assert "got\n" in terminal.text


def test_a_container_s_terminal_is_its_own(user, terminal):
    before = terminal.settings()
    script = """\
for fd in 0 1 2; do test -t $fd && stat -L -c "is %d %t:%T" /proc/self/fd/$fd; done
stty size
trap 'echo changed' WINCH
echo up
while [ "$(stty size)" = "33 77" ]; do sleep 0.1; done
stty size
: < /dev/tty && echo opened
trap 'echo got; exit 6' INT
echo ready
while :; do sleep 0.1; done
"""
    terminal.run(user, *run("--tty", "-i"), "sh", "-c", script)
    terminal.expect("up\n")
    found = re.findall(r"is (\d+) (\w+):(\w+)", terminal.text)
    assert len(found) == 3
    status = os.fstat(terminal.inner)
    callers = (status.st_dev, os.major(status.st_rdev), os.minor(status.st_rdev))
    assert callers not in {(int(device), int(major, 16), int(minor, 16)) for device, major, minor in found}
    assert "33 77\n" in terminal.text
    assert terminal.settings() != before  # each key is passed on
    terminal.resize((44, 88))
    terminal.expect("44 88\n")
    terminal.expect("changed\n")
    terminal.expect("opened\n")
    terminal.expect("ready\n")
    terminal.type(b"\x03")
    if user.runtime == "bwrap":  # which has the same terminal, and ends the container with itself
        assert terminal.code() == 130
    else:
        assert terminal.code() == 6
        assert "got\n" in terminal.text
    assert terminal.settings() == before


@pytest.mark.skipif(
    TIOCSTI.exists() and TIOCSTI.read_text().strip() != "1", reason="the kernel has no TIOCSTI"
)
@pytest.mark.parametrize("options", [(), ("-i",), ("--tty",), ("--tty", "-i")], ids=" ".join)
def test_a_container_types_nothing_into_the_caller_s_terminal(user, terminal, options):
    terminal.run(user, *run(*options), "perl", "-e", TYPING)
    assert terminal.code() == 0
    assert "typed\n" in terminal.text
    assert terminal.waiting() == 0


@pytest.mark.skipif(
    TIOCSTI.exists() and TIOCSTI.read_text().strip() != "1", reason="the kernel has no TIOCSTI"
)
def test_without_a_container_a_program_types_into_its_terminal(folder, terminal):
    terminal.run(OrdinaryUser(folder), "-e", TYPING, program=("perl",))
    assert terminal.code() == 0
    assert terminal.waiting() > 0


def test_processes_of_the_node_stay_closed(user):
    """Those that start and serve the container, which it sees among all others."""
    given = user.folder / "home/pids"
    given.unlink(missing_ok=True)
    script = """\
echo ready
until [ -e /in/pids ]; do sleep 0.1; done
for pid in $(cat /in/pids); do
    ls -d /proc/$pid || echo "no $pid"
    for file in /proc/$pid/fd/*; do
        ls -d $file/. && echo "open: $file"
        readlink $file && echo "known: $file"
        (: < $file) && echo "opened: $file"
    done
    ls /proc/$pid/root/ && echo "open: root"
    ls /proc/$pid/cwd/ && echo "open: cwd"
    cat /proc/$pid/environ && echo "open: environ"
    head -c 1 /proc/$pid/mem && echo "open: mem"
done 2> /dev/null
echo end
exec sleep 305
"""
    options = ("-v", f"{user.folder}/home:/in:ro")
    with started(user, "sh", "-c", script, program=ON_NODE, options=options) as keeper:
        wait_until(lambda: children(keeper.pid), "processes of the container")
        own = {pid: Path(f"/proc/{pid}/comm").read_text().strip() for pid in children(keeper.pid)}
        others = [keeper.pid, *(pid for pid, name in own.items() if name != "sh")]
        assert any("squashfuse" in name for name in own.values()), own
        draft = given.with_suffix(".new")
        draft.write_text("\n".join(map(str, others)))
        draft.rename(given)
        out = [line.strip() for line in iter(keeper.stdout.readline, "end\n")]
    # Apptainer's containers have no process of the node among theirs.
    seen = "no {}" if user.runtime == "apptainer" else "/proc/{}"
    assert out == [seen.format(pid) for pid in others], own


@pytest.mark.parametrize("program", [PROGRAM, ON_NODE], ids=["own", "node"])
def test_what_a_program_leaves_behind_ends_with_it(user, program):
    words = (*AS_USER, *program, *run(), "sh", "-c", "sleep 306 & echo begun; exit 3")
    done = subprocess.run(
        [*map(str, words)],
        env=user.environment,
        cwd=user.folder,
        check=False,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=200,  # less than it sleeps
    )
    assert (done.returncode, done.stdout) == (3, "begun\n"), done.stderr
    assert "sleep 306" not in commands().values()
    assert leases(user) == []
