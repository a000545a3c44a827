"""ResourceClaims as an API server has them."""

import uuid

from imagematrix.common.json_documents import Fields
from imagematrix.integrations.kubernetes.dra.resource_claims import ClaimReference
from imagematrix.integrations.kubernetes.dra.slices import DRIVER

NODE = "n1"


class Claims:
    """Makes ResourceClaims of the namespace `default`."""

    @staticmethod
    def uid(number):
        return str(uuid.UUID(int=number))

    @classmethod
    def reference(cls, number, **changes):
        fields = {"namespace": "default", "name": f"claim-{number}", "uid": cls.uid(number)}
        return ClaimReference(**(fields | changes))

    @classmethod
    def document(cls, number, *devices, request="gpu", pool=NODE, driver=DRIVER, config=(), **more):
        """Return a claim with devices allocated; a device may be a pair of its request and its name."""
        pairs = [one if isinstance(one, tuple) else (request, one) for one in devices]
        results = [
            {"request": asked, "driver": driver, "pool": pool, "device": name, **more}
            for asked, name in pairs
        ]
        return {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": {"namespace": "default", "name": f"claim-{number}", "uid": cls.uid(number)},
            "spec": {},
            "status": {"allocation": {"devices": {"results": results, "config": list(config)}}},
        }

    @classmethod
    def fields(cls, *args, **more):
        return Fields(cls.document(*args, **more), "claim")
