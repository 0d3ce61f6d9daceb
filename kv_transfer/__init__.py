"""KV blocks on the move: NIXL agent, sender and receiver machines, handshake. Never the engine."""
