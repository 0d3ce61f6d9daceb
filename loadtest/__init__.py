"""The load generator. It uses only the public API of a server."""
