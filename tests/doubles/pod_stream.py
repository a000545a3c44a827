"""Pods that are created one after the other while something happens in a cluster."""

import itertools
import json
import threading

BATCH = 20
GATE = {"name": "test.imagematrix.io/never"}  # keeps pods from the scheduler


class PodStream:
    """Creates pods in a thread, within its context, in turn with each of the `specs`, which have names.

    They are created for real, but never scheduled. `refusals` are errors and warnings of kubectl; the first
    ends the creation. At the end of the context, it goes on until there are `least` pods.
    """

    def __init__(self, cluster, name, specs, least):
        self.name = name
        self.refusals = []
        self.created = 0
        self._cluster, self._specs, self._least = cluster, specs, least
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self):
        self._thread.start()
        self._cluster.wait(lambda: self.created or self.refusals)
        return self

    def __exit__(self, *failed):
        if failed[0]:
            self._least = 0
        self._end.set()
        self._thread.join()

    def _run(self):
        numbers = itertools.count()
        while not self.refusals and (self.created < self._least or not self._end.is_set()):
            self._create([self._pod(next(numbers)) for _ in range(BATCH)])

    def _pod(self, number):
        names = sorted(self._specs)
        kind = names[number % len(names)]
        metadata = {"name": f"{self.name}-{number}", "labels": {"stream": self.name, "kind": kind}}
        spec = {"schedulingGates": [GATE], **self._specs[kind]}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}

    def _create(self, pods):
        given = json.dumps({"apiVersion": "v1", "kind": "List", "items": pods})
        done = self._cluster.kubectl("create", "-f", "-", input=given, check=False)
        self.created += done.stdout.count(" created")
        self.refusals += done.stderr.splitlines()

    def images(self):
        """Return the images of the pods that exist, by the names of the specs, and how many there are."""
        pods = self._cluster.get("pods", "-l", f"stream={self.name}")["items"]
        found: dict[str, set[str]] = {}
        for pod in pods:
            images = found.setdefault(pod["metadata"]["labels"]["kind"], set())
            images.update(one["image"] for one in pod["spec"]["containers"])
        return found, len(pods)

    def delete(self):
        """Delete the pods."""
        self._cluster.kubectl("delete", "pods", "-l", f"stream={self.name}", "--grace-period=0", "--force")
