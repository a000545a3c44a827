"""An engine in memory that lists, inspects and removes images, and has containers."""

import json
from itertools import count
from types import SimpleNamespace
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
import requests
from docker.errors import APIError, ImageNotFound
from publishing import labels_of, tag, warm_label

from imagematrix.images.catalog import labels
from imagematrix.images.catalog.warm_image import make_warm_tag
from imagematrix.images.engine import transport
from imagematrix.images.engine.transport import EngineResponse

OLD = "2026-01-01T00:00:00.123456789Z"


class NodeEngine:
    """The engine of a node: a Transport for reading, and docker-py's client for removing.

    `images` are by ID, as `inspect` shows them; `containers` are by name, with the ID of their image and the
    name that they were started by. `removed` are the names in the order in which they were removed.
    """

    def __init__(self):
        self.images = {}
        self.containers = {}
        self.removed = []
        self._numbers = count(1)
        self.api = SimpleNamespace(remove_image=self.remove_image)

    def add(self, cell, version="v1", *, image="training", names=(), named=OLD, pulled=False, **changes):
        """Add a variant under its name, or without it as one `pulled` by digest; return its ID."""
        own = labels_of(cell, version=version, **changes)
        return self.add_labelled(own, image, names, named=named, pulled=pulled)

    def add_labelled(self, own, image, names=(), *, named=OLD, pulled=False):
        """Add an image with these labels."""
        number = f"sha256:{next(self._numbers):064x}"
        config = {"Labels": own}
        inspected = {"Id": number, "Config": config, "Os": "linux", "Architecture": "amd64"}
        inspected["RootFS"] = {"Layers": [f"sha256:{own[labels.CELL]}"]}
        own[labels.CONTENT] = labels.hash_content(inspected)
        self.images[number] = inspected | {
            "RepoTags": [*([] if pulled else [f"{image}:{tag(own)}"]), *names],
            "RepoDigests": [f"{image}@{number}"],
            "Metadata": {"LastTagTime": named},
            "Size": 1_000_000,
        }
        return number

    def add_warm(self, base, version="v1", *, image="training", names=(), **changes):
        """Add the warm image of a variant with a digest, as a node pulls it; return its ID.

        `changes` are of its label.
        """
        label = warm_label(base, **changes)
        own = {labels.WARM: json.dumps(label), labels.CELL: f"warm {version}"}
        number = self.add_labelled(own, image, [*names], pulled=True)
        del own[labels.CELL], own[labels.CONTENT]
        self.images[number]["RepoTags"].append(f"{image}:{make_warm_tag(version, base, label['key'])}")
        return number

    def start(self, name, image, by=None):
        """Start a container of the image with an ID, by this or another name of it."""
        self.containers[name] = (image, by or image)

    def get(self, resource, answer_s=None):  # noqa: ARG002
        path = unquote(urlsplit(resource).path)
        if path == "/containers/json":
            return self._answer(
                [
                    {"Id": name, "Names": [f"/{name}"], "ImageID": image, "Image": by}
                    for name, (image, by) in self.containers.items()
                ]
            )
        if path == "/images/json":
            filters = json.loads(parse_qs(urlsplit(resource).query)["filters"][0])
            (label,) = filters["label"]
            listed = [{**image, "Labels": image["Config"]["Labels"]} for image in self.images.values()]
            return self._answer([image for image in listed if label in image["Labels"]])
        number = self.find(path.removeprefix("/images/").removesuffix("/json"))
        return self._answer(self.images[number]) if number else self._answer({"message": "none"}, 404)

    @staticmethod
    def _answer(document, status=200):
        body = json.dumps(document).encode()
        return EngineResponse(where="memory", status=status, headers=frozenset(), body=body)

    def find(self, name):
        """Return the ID of the image with a name or ID, or None."""
        names = ("RepoTags", "RepoDigests")
        return next(
            (
                number
                for number, image in self.images.items()
                if name == number or any(name in image[key] for key in names)
            ),
            None,
        )

    def remove_image(self, name, *, noprune):
        """Remove a name, and the image with the last one unless a container uses it."""
        number = self.find(name)
        if number is None:
            raise ImageNotFound(name)
        image = self.images[number]
        names = list(dict.fromkeys([*image["RepoTags"], *image["RepoDigests"]]))
        if names == [name] and any(used == number for used, _ in self.containers.values()):
            answer = requests.Response()
            answer.status_code = 409
            raise APIError("conflict", response=answer, explanation="a container is using its image")
        assert noprune
        self.removed.append(name)
        for key in ("RepoTags", "RepoDigests"):
            image[key] = [one for one in image[key] if one != name]
        if names == [name]:
            del self.images[number]

    def close(self):
        pass


@pytest.fixture
def node(monkeypatch):
    engine = NodeEngine()
    monkeypatch.setattr(transport, "open_local_socket", lambda *_: engine)
    monkeypatch.setattr(transport, "open_client", lambda: engine)
    return engine
