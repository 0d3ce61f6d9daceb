"""Backends that move bytes between processes: NIXL, loopback inside a process, and all ranks of a group as one."""
