"""The messages of kubelet's APIs that imagematrix uses: device plugins (v1beta1), pod resources, DRA (v1).

Field numbers are those of api.proto in k8s.io/kubelet, pkg/apis/deviceplugin/v1beta1,
pkg/apis/podresources/v1, pkg/apis/pluginregistration/v1 and pkg/apis/dra/v1. Messages are described here
instead of generated, because generated modules work only with the protobuf releases that they were made for.
Fields for mounts, annotations and CDI devices are left out of the messages of device plugins, so that ours
cannot set them. Unknown fields are skipped, as protobuf does.
"""

from __future__ import annotations

from functools import cache

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

VERSION = "v1beta1"
REGISTRATION, DEVICE_PLUGIN = "v1beta1.Registration", "v1beta1.DevicePlugin"
PODS = "v1.PodResourcesLister"
PLUGIN_REGISTRATION, DRA_PLUGIN = (
    "pluginregistration.Registration",
    "k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin",
)
PACKAGE = "imagematrix.kubelet"

# For each message: field number, name and type. A type with "*" is repeated. A map is a list of entries with
# a key and a value: Variables, PreparedClaims and UnpreparedClaims.
MESSAGES: dict[str, tuple[tuple[int, str, str], ...]] = {
    "Empty": (),
    "DevicePluginOptions": (
        (1, "pre_start_required", "bool"),
        (2, "get_preferred_allocation_available", "bool"),
    ),
    "RegisterRequest": (
        (1, "version", "string"),
        (2, "endpoint", "string"),
        (3, "resource_name", "string"),
        (4, "options", "DevicePluginOptions"),
    ),
    "Device": ((1, "ID", "string"), (2, "health", "string")),
    "ListAndWatchResponse": ((1, "devices", "Device*"),),
    "PreferredAllocationRequest": ((1, "container_requests", "ContainerPreferredAllocationRequest*"),),
    "ContainerPreferredAllocationRequest": (
        (1, "available_deviceIDs", "string*"),
        (2, "must_include_deviceIDs", "string*"),
        (3, "allocation_size", "int32"),
    ),
    "PreferredAllocationResponse": ((1, "container_responses", "ContainerPreferredAllocationResponse*"),),
    "ContainerPreferredAllocationResponse": ((1, "deviceIDs", "string*"),),
    "AllocateRequest": ((1, "container_requests", "ContainerAllocateRequest*"),),
    "ContainerAllocateRequest": ((1, "devices_ids", "string*"),),
    "AllocateResponse": ((1, "container_responses", "ContainerAllocateResponse*"),),
    "ContainerAllocateResponse": ((1, "envs", "Variable*"), (3, "devices", "DeviceSpec*")),
    "Variable": ((1, "key", "string"), (2, "value", "string")),
    "DeviceSpec": ((1, "container_path", "string"), (2, "host_path", "string"), (3, "permissions", "string")),
    "ListPodResourcesResponse": ((1, "pod_resources", "PodResources*"),),
    "PodResources": (
        (1, "name", "string"),
        (2, "namespace", "string"),
        (3, "containers", "ContainerResources*"),
    ),
    "ContainerResources": ((1, "name", "string"), (2, "devices", "ContainerDevices*")),
    "ContainerDevices": ((1, "resource_name", "string"), (2, "device_ids", "string*")),
    "PluginInfo": (
        (1, "type", "string"),
        (2, "name", "string"),
        (3, "endpoint", "string"),
        (4, "supported_versions", "string*"),
    ),
    "RegistrationStatus": ((1, "plugin_registered", "bool"), (2, "error", "string")),
    "Claim": ((1, "namespace", "string"), (2, "uid", "string"), (3, "name", "string")),
    "NodePrepareResourcesRequest": ((1, "claims", "Claim*"),),
    "NodePrepareResourcesResponse": ((1, "claims", "PreparedClaim*"),),
    "PreparedClaim": ((1, "key", "string"), (2, "value", "NodePrepareResourceResponse")),
    "NodePrepareResourceResponse": ((1, "devices", "PreparedDevice*"), (2, "error", "string")),
    "PreparedDevice": (
        (1, "request_names", "string*"),
        (2, "pool_name", "string"),
        (3, "device_name", "string"),
        (4, "cdi_device_ids", "string*"),
        (5, "share_id", "string"),
    ),
    "NodeUnprepareResourcesRequest": ((1, "claims", "Claim*"),),
    "NodeUnprepareResourcesResponse": ((1, "claims", "UnpreparedClaim*"),),
    "UnpreparedClaim": ((1, "key", "string"), (2, "value", "NodeUnprepareResourceResponse")),
    "NodeUnprepareResourceResponse": ((1, "error", "string"),),
}


def load_message(name: str) -> Any:
    """Return the class of a message."""
    return message_factory.GetMessageClass(_build_pool().FindMessageTypeByName(f"{PACKAGE}.{name}"))


def make_call(channel: Any, method: str, answer: str) -> Any:
    """Return the function that calls a method on a channel of grpc or grpc.aio; `answer` names a message."""
    return channel.unary_unary(
        method,
        request_serializer=lambda request: request.SerializeToString(),
        response_deserializer=load_message(answer).FromString,
    )


@cache
def _build_pool() -> Any:
    field = descriptor_pb2.FieldDescriptorProto
    scalars = {"bool": field.TYPE_BOOL, "int32": field.TYPE_INT32, "string": field.TYPE_STRING}
    file = descriptor_pb2.FileDescriptorProto(name="kubelet.proto", package=PACKAGE, syntax="proto3")
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, key, kind in fields:
            word = kind.removesuffix("*")
            entry = message.field.add(name=key, number=number)
            entry.label = field.LABEL_REPEATED if kind.endswith("*") else field.LABEL_OPTIONAL
            entry.type = scalars.get(word, field.TYPE_MESSAGE)
            if word not in scalars:
                entry.type_name = f".{PACKAGE}.{word}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool
