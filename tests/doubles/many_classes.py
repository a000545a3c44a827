"""Nodes in 60 classes, and a version with 20 variants for them."""

from itertools import product

from choosing import Make

from imagematrix.images.catalog.catalog import Catalog
from imagematrix.integrations.kubernetes.nodes.labels import make_labels

NAME = "reg.test/t:v1"
HOST, POOL, RANK = "kubernetes.io/hostname", "pool", "rank"
# For the last driver and the last capability there is no variant.
DRIVERS = ("535.261.03", "550.163.01", "570.124.06", "580.65.06", "590.48.01")
COMPUTES = ("7.5", "8.0", "8.6", "8.9", "9.0", "7.0")
MARCHES = ("x86-64-v3", "x86-64-v4")


def catalog():
    """Return a variant for each driver and capability but the last ones."""
    return Catalog(
        image="reg.test/t",
        version="v1",
        variants=tuple(
            Make.variant(
                f"{NAME}-{number}",
                digest=f"sha256:{number:064x}",
                driver=Make.umd("exact", driver),
                cubins=(compute.replace(".", ""),),
            )
            for number, (driver, compute) in enumerate(product(DRIVERS[:-1], COMPUTES[:-1]))
        ),
    )


def nodes(count=70):
    """Yield nodes in 60 classes; two classes of one pool differ in the CPU."""
    kinds = list(product(DRIVERS, COMPUTES, MARCHES))
    more = count - len(kinds)
    others = [kinds[(6 * number + number // 10) % len(kinds)] for number in range(more)]
    for number, (driver, compute, march) in enumerate([*kinds, *others]):
        yield node(number, f"{DRIVERS.index(driver)}-{compute}", driver, compute, march)


def node(number, pool, driver, compute, march):
    """Return a node with a GPU, in a pool."""
    host = Make.host(Make.gpu(0, compute=compute, name="GPU", brand="tesla"), driver=driver, march=march)
    own = {HOST: f"n{number}", POOL: pool, RANK: str(number), "kubernetes.io/arch": "amd64"}
    labels = {**own, "kubernetes.io/os": "linux", **make_labels(host)}
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": f"n{number}", "labels": labels}}


def pod(name, *images, labels=None, annotations=None, **spec):
    """Return a pod with a container for each image."""
    containers = [{"name": f"c{number}", "image": each} for number, each in enumerate(images)]
    metadata = {"name": name, "labels": labels or {}, "annotations": annotations or {}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {"containers": containers, **spec},
    }
