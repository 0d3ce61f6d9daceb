"""The pods that a gateway may use: discovery, health, calls and token streams, and their load as routing sees it."""
