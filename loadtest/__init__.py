"""Load tests: clients only, that know nothing of a server but its public API."""
