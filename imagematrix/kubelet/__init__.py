"""Kubelet's APIs on a node: where its sockets are, and the messages."""
