"""Random pods that an API server accepts, most of them for a few of a cluster's nodes."""

import random
from typing import Any

from imagematrix.integrations.kubernetes.nodes.labels import CLASS

FIELD = "metadata.name"
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


class RandomPods:
    """Makes pods that use one of the images, and ask for nodes by labels with these keys.

    `rank` is a label whose values are numbers.
    """

    def __init__(self, seed, nodes, images, keys, rank):
        self._rng = random.Random(seed)  # noqa: S311
        self._nodes, self._images, self._keys, self._rank = nodes, images, keys, rank

    def make(self, name):
        """Return a pod with this name."""
        rng, node = self._rng, self._rng.choice(self._nodes)
        images = rng.choices(self._images, k=rng.randint(1, 3))
        containers = [{"name": f"c{number}", "image": image} for number, image in enumerate(images)]
        spec: dict[str, Any] = {"containers": containers}
        if self._often(0.3):
            spec["initContainers"] = [{"name": "init", "image": rng.choice(self._images)}]
        if self._often(0.5):
            spec["nodeSelector"] = self._selector(node)
        if self._often(0.1):
            spec["nodeName"] = rng.choice([self._value(node, FIELD), "elsewhere"])
        if self._often(0.6):
            spec["affinity"] = self._affinity(node)
        labels = {CLASS: self._value(node, CLASS)} if self._often(0.1) else {}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec}

    def _often(self, share):
        return self._rng.random() < share

    @staticmethod
    def _value(node, key):
        metadata = node["metadata"]
        return metadata["name"] if key == FIELD else metadata["labels"].get(key, "x")

    def _selector(self, node):
        some = self._rng.sample(self._keys, self._rng.randint(1, 2))
        other = node if self._often(0.9) else self._rng.choice(self._nodes)
        return {key: self._value(other, key) for key in some}

    def _affinity(self, node):
        terms = [self._term(node) for _ in range(self._rng.randint(1, 3))]
        required = {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": terms}}}
        return self._rng.choice([{}, {"nodeAffinity": {}}, {"podAffinity": {}}, *[required] * 6])

    def _term(self, node):
        made = {}
        if self._often(0.8):
            made["matchExpressions"] = [self._expression(node) for _ in range(self._rng.randrange(3))]
        if self._often(0.2):
            values = [self._value(self._rng.choice([node, *self._nodes[:1]]), FIELD)]
            operator = self._rng.choice(["In", "NotIn"])
            made["matchFields"] = [{"key": FIELD, "operator": operator, "values": values}]
        return made

    def _expression(self, node):
        key = self._rng.choice(self._keys)
        operator = self._rng.choice(["In", "In", "In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"])
        if operator in {"Gt", "Lt"}:
            key, values = self._rank, [self._rng.choice(["0", "10", "30", "60", "100"])]
        else:
            others = self._rng.choices(self._nodes, k=self._rng.randrange(3))
            listed = [self._value(other, key) for other in others]
            values = {"In": [self._value(node, key), *listed], "NotIn": [*listed, "x"]}.get(operator, [])
        return {"key": key, "operator": operator} | ({"values": values} if values else {})
