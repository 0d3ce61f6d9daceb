"""Connections and calls to other pods: handshake, probe, process watch, gRPC client, traffic per peer."""
