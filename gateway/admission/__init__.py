"""Decides whether and when a request goes to the pods: API keys, their limits, and one fair queue (gate) per model."""
