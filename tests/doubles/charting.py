"""The installation that values of the Helm chart stand for."""

from imagematrix.integrations.kubernetes.install.install import Installation


def installation_of(values, namespace):
    """Return what `render install` would write with the options that these values stand for."""
    where = [word for each in values["where"] for word in ("--where", each)]
    plugin = values["devicePlugin"]
    return Installation(
        names=tuple(values["images"]),
        program=values["program"],
        namespace=namespace,
        excluded=tuple(values["excludeNamespaces"]),
        deny=values["onUnknown"] == "deny",
        timeout_s=values["timeoutSeconds"],
        pull_secret=values["pullSecret"] or None,
        options=(*where, *(["--allow-cpu"] if values["allowCpu"] else [])),
        conditions=values["matchConditions"],
        plugin=tuple(plugin["by"]) if plugin["enabled"] else None,
        dra=values["draDriver"]["enabled"],
        kubelet=values["kubelet"],
        events=values["events"],
    )
