"""Redis: URLs, clients of any topology, Lua scripts, a circuit breaker."""
