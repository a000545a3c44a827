"""An engine that only records its calls, and images with handwritten layers."""

import contextlib
import hashlib
import io
import json
import tarfile
import threading
from dataclasses import replace

import pytest

from imagematrix.audit.images import layer
from imagematrix.audit.images.layers import Layers
from imagematrix.build.executor.build import build
from imagematrix.build.executor.cell_builder import BuildBackend
from imagematrix.build.matrix.load import load_matrix
from imagematrix.build.plan.plan import PlanContext
from imagematrix.build.plan.planner import plan
from imagematrix.build.plan.protocols import BuiltImage, StoppedError, StoredImageInfo, StoredVariant
from imagematrix.errors import BuildError, UsageError
from imagematrix.images.catalog import labels
from imagematrix.images.oci.layout import LayoutImage, write_without_layers
from imagematrix.images.oci.parts import SizedLayer

TAR = "application/vnd.oci.image.layer.v1.tar"
MACROS = {
    "-march=x86-64-v3": "#define __AVX2__ 1\n",
    "-march=znver4": "#define __AVX2__ 1\n#define __AVX512F__ 1\n",
}


def digest(data):
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def tar(*files):
    """Return a layer with `files`, each a path with its bytes."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path, data in files:
            info = tarfile.TarInfo(path)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def layout(folder, *layers):
    """Write an image with `layers` into the OCI layout `folder` and return its manifest's digest."""
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True, exist_ok=True)

    def blob(data):
        (blobs / digest(data).removeprefix("sha256:")).write_bytes(data)
        return {"digest": digest(data), "size": len(data)}

    manifest = {
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": blob(json.dumps({"rootfs": {"diff_ids": [digest(layer) for layer in layers]}}).encode()),
        "layers": [{"mediaType": TAR} | blob(layer) for layer in layers],
    }
    return blob(json.dumps(manifest).encode())["digest"]


class FakeBackend:
    """A Backend without an engine: it makes what it is configured to make, and keeps stored images.

    `errors` are raised for the cells they are keyed by; `layers` are those of every image, or None to make
    images without a layout, as the classic image store does. `hold` keeps every build waiting until stop().
    If `local` is true, builds find the images that it keeps.
    """

    def __init__(self, folder):
        self.folder = folder
        self.macros = dict(MACROS)
        self.single = set()  # the bases that are images of one platform
        self.layers = None
        self.errors = {}
        self.missing = set()
        self.salt = ""
        self.images = {}
        self.kept = {}
        self.raw = {}  # manifest and configuration of images in layouts
        self.keeps = True
        self.calls = []
        self.hold = False
        self.local = True
        self.stopped = threading.Event()

    def __enter__(self):
        self.stopped.clear()
        return self

    def __exit__(self, *_):
        self.calls.append(("left",))

    @property
    def has_manifests(self):
        return self.layers is not None

    def keeps_layers(self, made):  # noqa: ARG002
        return self.keeps and self.has_manifests

    @property
    def parallel_exports(self):
        return 2 if self.has_manifests else 1

    def add_early_labels(self, order, promise):
        return order if self.has_manifests else replace(order, labels=promise())

    platform = "linux/amd64"  # of its machine

    def is_index(self, reference, digest):
        return digest == self.resolve(reference) and reference not in self.single

    def resolve(self, reference):
        self.calls.append(("resolve", reference))
        if reference in self.missing:
            raise UsageError(f"{reference} is nowhere")
        return digest(f"{reference}{self.salt}".encode())

    def list_variants(self, image, version):
        self.calls.append(("present", image, version))
        return [
            StoredVariant(
                reference=reference,
                cell=own[labels.CELL],
                input_digest=own[labels.INPUT],
                development=own.get(labels.DEVELOPMENT) == "true",
                labels=own,
            )
            for reference, own in self.images.items()
            if (own[labels.IMAGE], own[labels.VERSION]) == (image, version)
        ]

    def find_earlier_versions(self, image, cells):
        built = {name: self.images[name] for name in self.raw if self.images[name][labels.IMAGE] == image}
        return {
            own[labels.CELL]: name
            for name, own in built.items()
            if cells.get(own[labels.CELL]) == own[labels.INPUT]
        }

    def load_without_layers(self, reference, folder):
        write_without_layers(folder, *self.raw[reference])
        return BuiltImage(digest=digest(self.raw[reference][0]), layout=folder)

    def get_components(self, reference):
        return labels.read_components(self.images[reference]) or {}

    def inspect_image(self, reference):
        return self.kept[reference]

    def pin_by_immovable_name(self, reference, digest):
        return self.pin_by_digest(reference, digest)

    def find_source(self, reference, *, local):  # noqa: ARG002
        return f"docker-image://{reference}@{digest(reference.encode())}"

    def pin_by_digest(self, reference, digest):
        return None if digest == self.resolve(reference) else f"docker-image://{reference}@{digest}"

    def pin_permanently(self, reference, digest):
        return f"docker-image://{reference}@{digest}"

    def export(self, dockerfile, sources, first=()):  # noqa: ARG002
        self.calls.append(("export", dockerfile, sources.context))
        if "export" in self.errors:
            raise self.errors["export"]
        return {"cc": "#define __x86_64__ 1"} | {f"cc{option}": text for option, text in self.macros.items()}

    def export_base_layers(self, base, sources, together):  # noqa: ARG002
        self.calls.append(("base", base, sources))
        if base in self.errors:
            raise self.errors[base]
        if self.hold:
            self.stopped.wait(10)
        return LayoutImage(self.folder, layout(self.folder, *self.layers)).layer_files if self.layers else ()

    @contextlib.contextmanager
    def make(self, order, log, step):
        if order.no_cache and not self.has_manifests:
            raise BuildError("an image of the classic store is not built again")
        cell = order.reference.rpartition(":")[2].partition("-")[2].rpartition("-")[0]
        self.calls.append(("make", cell, order))
        log.write(f"making {cell}\n")
        step("1/1 RUN true")
        if self.hold:
            self.stopped.wait(10)
        if self.stopped.is_set():
            raise StoppedError("stopped")
        if cell in self.errors:
            raise self.errors[cell]
        if self.layers is None:
            yield BuiltImage(digest=digest(order.dockerfile.encode()))
        else:
            folder = self.folder / cell
            yield BuiltImage(digest=layout(folder, *self.layers), layout=folder)

    def list_parts(self, made):
        if made.layout:
            return LayoutImage(made.layout, made.digest).parts
        return (SizedLayer(digest="sha256:0", size=3_000_000_000, made_by="RUN make"),)

    def store(self, order, made):
        self.calls.append(("store", order.reference, made.digest))
        own = (order.labels[labels.IMAGE], order.labels[labels.CELL])
        for old, kept in list(self.images.items()):
            replaceable = labels.DEVELOPMENT in kept or labels.DEVELOPMENT in order.labels
            if replaceable and (kept[labels.IMAGE], kept[labels.CELL]) == own:
                del self.images[old]
                self.raw.pop(old, None)
        self.images[order.reference] = order.labels
        image = LayoutImage(made.layout, made.digest) if made.layout else None
        if image:
            self.raw[order.reference] = image.raw, image.get_blob_path(image.config).read_bytes()
        self.kept[order.reference] = StoredImageInfo(
            digest=made.digest,
            layers=tuple(image.configuration["rootfs"]["diff_ids"]) if image else (),
            configuration=image.configuration if image else {},
        )
        return made.digest

    def adopt(self, reference):
        self.calls.append(("adopt", reference))
        return digest(reference.encode())

    def stop(self):
        self.calls.append(("stop",))
        self.stopped.set()

    @property
    def orders(self):
        """The requests for images that were to be made."""
        return [words[2] for words in self.calls if words[0] == "make"]

    def called(self, name):
        """Return the arguments of each call of `name`."""
        return [words[1] for words in self.calls if words[0] == name]


class Silent:
    """A Reporter that discards everything."""

    def on_start(self, item):
        pass

    def on_step(self, item, text):
        pass

    def on_output(self, item, text):
        pass

    def on_finish(self, result):
        pass


class FakeTester:
    """An ImageTester that records what it is asked to test, and answers as its dictionaries say, by cell."""

    def __init__(self):
        self.results = {}
        self.errors = {}
        self.dues = set()
        self.calls = []
        self.noted = {}

    def _result(self, item, *words):
        self.calls.append((item.cell.id, *words))
        if item.cell.id in self.errors:
            raise self.errors[item.cell.id]
        return self.results.get(item.cell.id)

    def test_built(self, item, variant, order, made, log):
        log.write("testing\n")
        return self._result(item, "made", variant.reference, order.reference, made.digest)

    def test_stored(self, item, variant, log):  # noqa: ARG002
        return self._result(item, "stored", variant.reference, variant.digest)

    def is_due(self, item):
        return item.cell.id in self.dues

    def find_known_result(self, item):
        return self.results.get(item.cell.id)

    def record_result(self, item, result):
        self.noted[item.cell.id] = result

    def stop(self):
        pass


@pytest.fixture
def tester():
    return FakeTester()


@pytest.fixture
def silent():
    return Silent()


@pytest.fixture
def carry_out(backend, silent, tmp_path_factory):
    """Call it with a plan, and options of `build`, to get the results of its cells."""

    def call(plan, *, backend=backend, tester=None, **options):
        logs = tmp_path_factory.mktemp("project") / ".imagematrix" / "logs"
        made_by = BuildBackend(backend, backend, Layers(), tester)
        backend.stopped.clear()  # the build before may have ended by stopping what it did not need
        return build(plan, made_by, **{"jobs": 1, "logs": logs, "reporter": silent} | options)

    return call


@pytest.fixture
def layers_read(monkeypatch):
    """The names of the layers that are read."""
    names, real = [], layer.read_layer
    monkeypatch.setattr(
        layer, "read_layer", lambda stream, name, start: names.append(name) or real(stream, name, start)
    )
    return names


@pytest.fixture(name="tar")
def _tar():
    return tar


@pytest.fixture(name="layout")
def _layout():
    return layout


@pytest.fixture
def backend(tmp_path_factory):
    return FakeBackend(tmp_path_factory.mktemp("layout"))


@pytest.fixture
def planned(project, backend):
    """Call it with changes to the valid matrix to get its plan against the simulated engine."""

    def call(*changes, only=None, **files):
        against = PlanContext(resolve=backend.resolve, store=backend)
        return plan(load_matrix(project(*changes, **files)), against, expression=only)

    return call
