"""Moves KV blocks between pods: transfer agents, sender and receiver state machines, handshake. Independent of the
engine.
"""
