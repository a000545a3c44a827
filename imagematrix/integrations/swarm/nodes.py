"""The nodes of a swarm as its manager lists them: what they offer, and their engines."""

from __future__ import annotations

from dataclasses import dataclass

from imagematrix.images.engine.releases import OVERLAYS_WITH_GPUS
from imagematrix.integrations.swarm.resources import OFFER, SHARES, is_ours

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmNode:
    """A node: what it offers by kind of resource (GPUs are counted), and the version of its engine.

    `shared` states that it also offers shares of its GPUs' memory.
    """

    name: str
    manager: bool
    engine: str
    shared: bool
    offers: Mapping[str, int]

    @classmethod
    def from_engine(cls, document: Mapping[str, Any]) -> SwarmNode:
        """Return a node as the engine describes it; it may be down."""
        description = document.get("Description") or {}
        engine = description.get("Engine") or {}
        offers: dict[str, int] = {}
        for resource in (description.get("Resources") or {}).get("GenericResources") or ():
            named, discrete = resource.get("NamedResourceSpec"), resource.get("DiscreteResourceSpec")
            kind = (named or discrete or {}).get("Kind", "")
            if is_ours(kind):
                offers[kind] = offers.get(kind, 0) + (1 if named else discrete["Value"])
        return cls(
            name=str(description.get("Hostname") or document.get("ID")),
            manager=bool(document.get("ManagerStatus")),
            engine=str(engine.get("EngineVersion") or ""),
            shared=(engine.get("Labels") or {}).get(OFFER) == SHARES,
            offers=offers,
        )

    @property
    def rejects_overlay(self) -> bool:
        """Whether it is a manager that rejects tasks with a generic resource and an overlay network.

        It does so for tasks on nodes that are not managers, whatever their release.
        """
        return self.manager and not OVERLAYS_WITH_GPUS.is_in(self.engine)
