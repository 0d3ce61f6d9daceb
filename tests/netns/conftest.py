"""These tests make hosts: they run in namespaces of their own, as `make e2e-netns` starts them."""

from __future__ import annotations

import os

collect_ignore_glob = [] if "NETNS_E2E" in os.environ else ["test_*.py"]
