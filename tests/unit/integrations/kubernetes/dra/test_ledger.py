"""Prepared claims on disk: whatever happens, no GPU has two claims, and no spec is left without one."""

import errno
import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from claiming import Claims
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from jsonschema import Draft7Validator

from imagematrix.common import files
from imagematrix.common.record import replace
from imagematrix.errors import GpusBusyError, ProbeError
from imagematrix.hardware.gpu_request.choice import Choice
from imagematrix.hardware.host.host import Host
from imagematrix.integrations.cdi import write_spec
from imagematrix.integrations.kubernetes.dra import cdi
from imagematrix.integrations.kubernetes.dra.ledger import ClaimLedger, find_used_units
from imagematrix.integrations.kubernetes.dra.resource_claims import ClaimError
from imagematrix.integrations.kubernetes.dra.slices import name_devices
from imagematrix.launcher.docker.devices import list_device_nodes
from imagematrix.launcher.gpu_claims import grants
from imagematrix.launcher.gpu_claims.gpu_claim import ClaimRequest, LockFolder, claim_gpus
from imagematrix.launcher.gpu_claims.survey import survey_node_leases
from imagematrix.launcher.gpu_claims.usage import Consumer, find_consumers, list_lock_names

# Of schema.json in https://github.com/cncf-tags/container-device-interface, with what we use of it.
SCHEMA = {
    "type": "object",
    "required": ["cdiVersion", "kind", "devices"],
    "additionalProperties": False,
    "properties": {
        "cdiVersion": {"const": "0.5.0"},
        "kind": {"const": "imagematrix.io/claim"},
        "devices": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["name", "containerEdits"],
                "additionalProperties": False,
                "properties": {
                    "name": {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9_.:-]*[A-Za-z0-9]$"},
                    "containerEdits": {
                        "type": "object",
                        "additionalProperties": False,
                        "properties": {
                            "deviceNodes": {
                                "type": "array",
                                "items": {
                                    "type": "object",
                                    "required": ["path"],
                                    "additionalProperties": False,
                                    "properties": {
                                        "path": {"type": "string", "pattern": "^/dev/"},
                                        "permissions": {"type": "string", "pattern": "^[rwm]*$"},
                                    },
                                },
                            }
                        },
                    },
                },
            },
        },
    },
}


@pytest.fixture
def ledger(cdi_root):
    return ClaimLedger(cdi_root)


def give(ledger, claims, host, number, *gpus, usage=None):
    """Prepare a claim on GPUs of a host, under one request."""
    return ledger.prepare(claims.reference(number), host, {"gpu": gpus}, lambda: usage or {})


def held(number_of_gpu):
    """Return the names of what holds a GPU in the lock folder."""
    return [str(one) for one in find_consumers(survey_node_leases(), [f"nvidia{number_of_gpu}"])]


def test_a_claim_gets_device_nodes_and_nothing_else(ledger, claims, host, cdi_root):
    assert give(ledger, claims, host, 1, host.gpus[3])
    (path,) = cdi_root.iterdir()
    assert path.name == f"imagematrix.io-claim_{claims.uid(1)}.json"
    assert path.stat().st_mode & 0o777 == 0o644
    document = json.loads(path.read_text())
    Draft7Validator(SCHEMA).validate(document)
    (device,) = document["devices"]
    assert device["name"] == claims.uid(1)
    given = device["containerEdits"]["deviceNodes"]
    assert [one["path"] for one in given][:3] == ["/dev/nvidia3", "/dev/nvidiactl", "/dev/nvidia-uvm"]
    assert held(3) == ["container default/claim-1 (claim)"]
    assert ledger.unprepare(claims.uid(1))
    assert [*cdi_root.iterdir()] == []
    assert held(3) == []


def test_each_of_several_requests_has_a_device(ledger, claims, hosts, cdi_root):
    host = hosts["mig"]
    whole, one, two, *_ = name_devices(host).values()
    ledger.prepare(claims.reference(1), host, {"a": (whole,), "b": (one, two)}, dict)
    (path,) = cdi_root.iterdir()
    document = json.loads(path.read_text())
    Draft7Validator(SCHEMA).validate(document)
    paths = {
        each["name"]: {node["path"] for node in each["containerEdits"]["deviceNodes"]}
        for each in document["devices"]
    }
    uid = claims.uid(1)
    assert paths.keys() == {f"{uid}_a", f"{uid}_b"}
    assert f"/dev/nvidia{whole.minor}" in paths[f"{uid}_a"] - paths[f"{uid}_b"]
    capabilities = [one.mig[0].capabilities, two.mig[0].capabilities]
    for number in {number for some in capabilities for number in some}:
        assert f"/dev/nvidia-caps/nvidia-cap{number}" in paths[f"{uid}_b"] - paths[f"{uid}_a"]
    with pytest.raises(GpusBusyError, match="claim-1"):
        give(ledger, claims, host, 2, two)


def test_a_second_claim_is_refused_until_the_first_is_taken_back(ledger, claims, host):
    give(ledger, claims, host, 1, host.gpus[0], host.gpus[1])
    with pytest.raises(GpusBusyError, match=r"in use by container default/claim-1 \(claim\)"):
        give(ledger, claims, host, 2, host.gpus[1], host.gpus[2])
    ledger.unprepare(claims.uid(1))
    assert give(ledger, claims, host, 2, host.gpus[1], host.gpus[2])


def test_a_claim_is_prepared_once(ledger, claims, host, cdi_root):
    assert give(ledger, claims, host, 1, host.gpus[0])
    (path,) = cdi_root.iterdir()
    before = files.read_stamp(path)
    # Its own pod uses the GPU by now.
    using = {"nvidia0": (Consumer(kind="process", name="python"),)}
    assert not give(ledger, claims, host, 1, host.gpus[0], usage=using)
    assert files.read_stamp(path) == before
    assert ledger.unprepare(claims.uid(1))
    assert not ledger.unprepare(claims.uid(1))


def test_a_claim_of_running_pods_stays_prepared_when_its_gpu_fails(ledger, claims, host):
    give(ledger, claims, host, 1, host.gpus[0])
    lost = replace(host.gpus[0], state="lost")
    assert not give(ledger, claims, host, 1, lost)
    ledger.unprepare(claims.uid(1))
    with pytest.raises(ClaimError, match=r"GPU 0 \(NVIDIA H200\) cannot be used: lost"):
        give(ledger, claims, host, 1, lost)


def test_a_claim_whose_spec_changes_keeps_its_gpu(ledger, claims, host, cdi_root):
    """A device node has appeared, or a new release writes another spec, while its pod runs."""
    give(ledger, claims, host, 1, host.gpus[0])
    path = cdi.get_spec_path(cdi_root, claims.uid(1))
    wanted = path.read_bytes()
    path.write_bytes(wanted.replace(b"/dev/nvidia-uvm-tools", b"/dev/nvidia-uvm-old"))
    using = {"nvidia0": (Consumer(kind="process", name="python"),)}
    assert give(ledger, claims, host, 1, host.gpus[0], usage=using)
    assert path.read_bytes() == wanted
    assert not give(ledger, claims, host, 1, host.gpus[0], usage=using)
    assert held(0) == ["container default/claim-1 (claim)"]


def test_a_spec_that_cannot_be_written_anew_leaves_the_grant(ledger, claims, host, cdi_root, monkeypatch):
    give(ledger, claims, host, 1, host.gpus[0])
    cdi.get_spec_path(cdi_root, claims.uid(1)).write_text("{")

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(ClaimError, match="cannot be written: No space left on device"):
            give(ledger, claims, host, 1, host.gpus[0])
    assert held(0) == ["container default/claim-1 (claim)"]


def test_a_claim_that_is_allocated_anew_gets_the_new_gpu(ledger, claims, host):
    give(ledger, claims, host, 1, host.gpus[0])
    assert give(ledger, claims, host, 1, host.gpus[5])
    assert (held(0), len(held(5))) == ([], 1)


@pytest.mark.parametrize("kind", ["process", "container", "lease"])
def test_a_gpu_in_use_is_not_given(ledger, claims, host, cdi_root, kind):
    using = {"nvidia2": (Consumer(kind=kind, name="train"),)}
    with pytest.raises(GpusBusyError, match=f"in use by {kind} train"):
        give(ledger, claims, host, 1, host.gpus[2], usage=using)
    assert not cdi_root.exists()


def test_a_launch_and_a_claim_take_no_gpu_from_each_other(ledger, claims, host, locks):
    first = Choice(gpus=host.gpus[:1], count=1)
    with (
        claim_gpus(ClaimRequest(choices=[first]), lambda _: {}, folder=LockFolder(path=str(locks))),
        pytest.raises(GpusBusyError, match="in use by a lease"),
    ):
        give(ledger, claims, host, 1, host.gpus[0])
    give(ledger, claims, host, 1, host.gpus[0])
    with pytest.raises(GpusBusyError, match="claim-1"):
        claim_gpus(ClaimRequest(choices=[first]), lambda _: {}, folder=LockFolder(path=str(locks)))


def restarted(cdi_root, host):
    """Return the ledger of a new process, and what it reports."""
    ledger = ClaimLedger(cdi_root)
    return ledger, [*ledger.restore(host.gpus)]


def test_after_a_restart_claims_are_as_before(ledger, claims, host, cdi_root):
    give(ledger, claims, host, 1, host.gpus[0])
    ledger, notes = restarted(cdi_root, host)
    assert (notes, ledger.list_claims()) == ([], {claims.uid(1)})
    assert not give(ledger, claims, host, 1, host.gpus[0])
    with pytest.raises(GpusBusyError):
        give(ledger, claims, host, 2, host.gpus[0])
    assert ledger.unprepare(claims.uid(1))
    assert give(ledger, claims, host, 2, host.gpus[0])


@pytest.mark.parametrize("name", ["genoa-h200", "mig"])
def test_a_spec_without_a_grant_still_holds_its_gpus(ledger, claims, hosts, cdi_root, locks, name):
    """The process was killed between the two, or somebody removed the lock folder."""
    host = hosts[name]
    units = [*name_devices(host).values()]
    give(ledger, claims, host, 1, units[-1])
    shutil.rmtree(locks)
    ledger, notes = restarted(cdi_root, host)
    assert notes == []
    assert find_consumers(survey_node_leases(), list_lock_names(units[-1]))
    assert not find_consumers(survey_node_leases(), list_lock_names(units[0]))
    with pytest.raises(GpusBusyError):
        give(ledger, claims, host, 2, units[-1])
    assert give(ledger, claims, host, 2, units[0])


def test_drafts_of_a_killed_process_are_removed(ledger, claims, host, cdi_root):
    cdi_root.mkdir(parents=True)
    draft = cdi_root / f".0123456789ab.imagematrix.io-claim_{claims.uid(1)}.json.draft"
    other = cdi_root / "nvidia.yaml"
    draft.write_text("{")
    other.write_text("kind: nvidia.com/gpu")
    ledger, notes = restarted(cdi_root, host)
    assert notes == []
    assert [*cdi_root.iterdir()] == [other]
    assert ledger.list_claims() == set()


def edited(path):
    """Return a spec with the path of a device node."""
    device = {"name": "x", "containerEdits": {"deviceNodes": [{"path": path}]}}
    return json.dumps({"kind": "imagematrix.io/claim", "devices": [device]}).encode()


@pytest.mark.parametrize(
    "junk",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b"[" * 100_000,
        b'{"kind": "imagematrix.io/claim"}',
        b'{"kind": "nvidia.com/gpu", "devices": []}',
        b'{"kind": "imagematrix.io/claim", "devices": 7}',
        edited(7),
        edited("/dev/../etc/shadow"),
    ],
)
def test_a_damaged_spec_is_reported_and_replaced(ledger, claims, host, cdi_root, junk):
    cdi_root.mkdir(parents=True)
    path = cdi.get_spec_path(cdi_root, claims.uid(1))
    path.write_bytes(junk)
    (cdi_root / "imagematrix.io-claim_..json").write_bytes(junk)  # whose name is not that of a claim
    ledger, notes = restarted(cdi_root, host)
    assert notes == [f"{path}: not a CDI spec of a claim: it is replaced or removed with its claim"]
    assert give(ledger, claims, host, 1, host.gpus[0])
    Draft7Validator(SCHEMA).validate(json.loads(path.read_text()))
    path.write_bytes(junk)
    assert give(ledger, claims, host, 1, host.gpus[0])
    path.write_bytes(junk)
    assert ledger.unprepare(claims.uid(1))
    assert not path.exists()


def test_on_a_full_disk_nothing_is_given(ledger, claims, host, cdi_root, monkeypatch):

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(ClaimError, match="cannot be written: No space left on device"):
            give(ledger, claims, host, 1, host.gpus[0])
    assert [*cdi_root.iterdir()] == []
    with monkeypatch.context() as patch:
        patch.setattr(grants, "write_grant", lambda *_: (_ for _ in ()).throw(ProbeError("full")))
        with pytest.raises(ProbeError, match="full"):
            give(ledger, claims, host, 1, host.gpus[0])
    assert [*cdi_root.iterdir()] == []
    assert held(0) == []
    assert give(ledger, claims, host, 1, host.gpus[0])


def test_a_spec_that_cannot_be_removed_stays_held(ledger, claims, host, monkeypatch):
    give(ledger, claims, host, 1, host.gpus[0])

    def refuse(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        with pytest.raises(ClaimError, match="cannot be removed: Read-only file system"):
            ledger.unprepare(claims.uid(1))
    assert len(held(0)) == 1
    assert ledger.unprepare(claims.uid(1))


def test_only_what_claims_do_not_hold_is_used(host):
    units = name_devices(host)
    first, second, third, *_ = units
    usage = {
        "nvidia0": (
            Consumer(kind="container", name="a", owner_ids=frozenset({"u1"})),
            Consumer(kind="process", name="p"),
        ),
        "nvidia1": (Consumer(kind="process", name="p"), Consumer(kind="lease", name="l")),
        "nvidia2": (Consumer(kind="container", name="a", owner_ids=frozenset({"u2"})),),
    }
    assert find_used_units(units, usage, frozenset({"u1"})) == {
        second: "process p, lease l",
        third: "container a",
    }
    assert first not in find_used_units(units, usage, frozenset({"u1"}))


HOST = Host.load(Path(__file__).parents[4] / "hosts" / "mig.json")
UNITS = tuple(name_devices(HOST).values())
numbers = st.integers(1, 4)
subsets = st.sets(st.integers(0, len(UNITS) - 1), min_size=1)


class ClaimMachine(RuleBasedStateMachine):
    """Claims that come and go on a node whose driver is killed and started again at any time."""

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.saved = os.environ["IMAGEMATRIX_LOCKS"]
        os.environ["IMAGEMATRIX_LOCKS"] = str(self.folder / "locks")
        self.cdi = self.folder / "cdi"
        self.ledger = ClaimLedger(self.cdi)
        self.given = {}  # indices of units by the number of the claim

    def teardown(self):
        os.environ["IMAGEMATRIX_LOCKS"] = self.saved
        shutil.rmtree(self.folder)

    def taken(self, number):
        """Return the units of other claims."""
        return {unit for other, units in self.given.items() if other != number for unit in units}

    @rule(number=numbers, units=subsets)
    def prepare(self, number, units):
        if units & self.taken(number):
            with pytest.raises(GpusBusyError):
                give(self.ledger, Claims, HOST, number, *(UNITS[unit] for unit in units))
            if self.given.get(number) != units:  # its earlier allocation is over
                self.given.pop(number, None)
        else:
            new = give(self.ledger, Claims, HOST, number, *(UNITS[unit] for unit in sorted(units)))
            assert new == (self.given.get(number) != units)
            self.given[number] = units

    @rule(number=numbers)
    def unprepare(self, number):
        assert self.ledger.unprepare(Claims.uid(number)) == (number in self.given)
        self.given.pop(number, None)

    @rule()
    def restart(self):
        self.ledger = ClaimLedger(self.cdi)
        assert [*self.ledger.restore(HOST.gpus)] == []

    @rule(number=numbers, unit=st.integers(0, len(UNITS) - 1))
    def be_killed_while_preparing(self, number, unit):
        if number in self.given or unit in self.taken(number):
            return
        paths = list_device_nodes(HOST, [UNITS[unit]])
        write_spec(
            cdi.get_spec_path(self.cdi, Claims.uid(number)), cdi.make_claim_spec({Claims.uid(number): paths})
        )
        self.given[number] = {unit}
        self.restart()

    @rule(number=numbers)
    def be_killed_while_unpreparing(self, number):
        if number in self.given:
            cdi.get_spec_path(self.cdi, Claims.uid(number)).unlink()  # and the grant is left
            self.given.pop(number)
            self.restart()

    @invariant()
    def each_gpu_has_one_claim_and_each_spec_a_claim(self):
        specs = {
            uid: cdi.list_device_nodes(cdi.read_spec(path))
            for uid, path in cdi.list_prepared_claims(self.cdi)
        }
        assert specs.keys() == {Claims.uid(number) for number in self.given}
        usage = survey_node_leases()
        for index, unit in enumerate(UNITS):
            own = (
                {f"/dev/nvidia-caps/nvidia-cap{one}" for one in unit.mig[0].capabilities}
                if unit.mig
                else {f"/dev/nvidia{unit.minor}"}
            )
            holders = [uid for uid, paths in specs.items() if own <= set(paths)]
            assert holders == [
                Claims.uid(number) for number in sorted(self.given) if index in self.given[number]
            ]
            assert {
                mark for one in find_consumers(usage, list_lock_names(unit)) for mark in one.owner_ids
            } == set(holders)


TestClaims = ClaimMachine.TestCase
TestClaims.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
