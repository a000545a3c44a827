"""Create pods in an API server over one connection, without storing them, and print how long that takes.

Reads a JSON object: `address`, `authority` (a file), `token`, `pods` by name, and `changed`, which says by
name whether a pod has to get another image. Prints the seconds of `rounds` answers by name, after `warm`
uncounted ones. With a `node` in place of `rounds`, it creates the node, if it is not null, and prints the
seconds until the only pod gets another image.
"""

from __future__ import annotations

import http.client
import json
import ssl
import sys
import time
from typing import Any

NODES, PODS = "/api/v1/nodes", "/api/v1/namespaces/default/pods?dryRun=All"
PAUSE_S = 0.01


class Client:
    """A connection to the API server."""

    def __init__(self, asked: dict[str, Any]) -> None:
        context = ssl.create_default_context(cafile=asked["authority"])
        self._connection = http.client.HTTPSConnection(asked["address"], 443, context=context)
        self._headers = {"Authorization": f"Bearer {asked['token']}", "Content-Type": "application/json"}

    def create(self, path: str, body: str) -> tuple[float, dict[str, Any]]:
        """Return the seconds until the answer, and the answer."""
        start = time.perf_counter()
        self._connection.request("POST", path, body, self._headers)
        told = self._connection.getresponse().read()
        return time.perf_counter() - start, json.loads(told)


def changed(answer: dict[str, Any]) -> bool:
    """Whether the answer is a pod that has got another image."""
    return answer["kind"] == "Pod" and "@" in answer["spec"]["containers"][0]["image"]


def main() -> None:
    """Do what stdin asks for."""
    asked = json.load(sys.stdin)
    client = Client(asked)
    bodies = {name: json.dumps(pod) for name, pod in asked["pods"].items()}
    if "rounds" not in asked:
        if asked["node"]:
            _, made = client.create(NODES, json.dumps(asked["node"]))
            if made["kind"] != "Node":
                sys.exit(str(made))
        start = time.perf_counter()
        (body,) = bodies.values()
        while not changed(client.create(PODS, body)[1]):
            time.sleep(PAUSE_S)
        print(time.perf_counter() - start)
        return
    taken: dict[str, list[float]] = {name: [] for name in bodies}
    for _ in range(asked["warm"] + asked["rounds"]):
        for name, body in bodies.items():
            seconds, answer = client.create(PODS, body)
            if answer["kind"] != "Pod" or changed(answer) != asked["changed"][name]:
                sys.exit(f"{name}: {answer}")
            taken[name].append(seconds)
    print(json.dumps({name: seconds[asked["warm"] :] for name, seconds in taken.items()}))


if __name__ == "__main__":
    main()
