"""Tool calls: how models write them, how they are read back, and how they are enforced."""
