"""These tests create network namespaces, so they run only under `make e2e-netns`."""

from __future__ import annotations

import os

collect_ignore_glob = [] if "NETNS_E2E" in os.environ else ["test_*.py"]
