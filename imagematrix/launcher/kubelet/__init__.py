"""Kubelet's APIs on a node: the paths of its sockets, and the messages."""
