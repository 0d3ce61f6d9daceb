"""Hosts on one machine: network namespaces on a bridge, each with an address and the packet filter of its pod.

Network, mounts and processes belong to the namespaces of the test process (see `make e2e-netns`), so they end with it
even after a crash. The test process is the node 10.77.0.1: kubelets probe from it, and it has the API server.
"""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.k8s.manifests import Opening, Peer, Policies

NETWORK, NODE = "10.77.0", "10.77.0.1"


def run(*argv: str, text: str | None = None) -> str:
    done = subprocess.run(argv, input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{argv}: {done.stderr}"
    return done.stdout


@dataclass
class Hosts:
    """All hosts and their addresses. The file `names` is /etc/hosts of every host and follows the Services."""

    names: Path
    policies: Policies
    peers: dict[str, Peer] = field(default_factory=dict)
    addresses: dict[str, str] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(11))

    def begin(self) -> None:
        """Creates the bridge and the mount of named namespaces."""
        os.makedirs("/run/netns", exist_ok=True)
        run("mount", "-t", "tmpfs", "tmpfs", "/run/netns")
        run("ip", "link", "set", "lo", "up")
        run("ip", "link", "add", "br0", "type", "bridge")
        run("ip", "addr", "add", f"{NODE}/24", "dev", "br0")
        run("ip", "link", "set", "br0", "up")
        self.resolve({})

    def add(self, name: str, peer: Peer, address: str = "") -> str:
        """Creates a host and adds its address to all packet filters. `address` replaces the next free one."""
        number = next(self._numbers)
        address = address or f"{NETWORK}.{number}"
        run("ip", "netns", "add", name)
        run("ip", "link", "add", f"v{number}", "type", "veth", "peer", "name", "eth0", "netns", name)
        run("ip", "link", "set", f"v{number}", "master", "br0", "up")
        for words in (
            "link set lo up",
            f"addr add {address}/24 dev eth0",
            "link set eth0 up",
            f"route add default via {NODE}",
        ):
            run("ip", "-n", name, *words.split())
        self.peers[name], self.addresses[name] = peer, address
        self._filter()
        return address

    def remove(self, name: str) -> None:
        """Removes a host. Its processes must have ended."""
        run("ip", "netns", "delete", name)
        del self.peers[name], self.addresses[name]
        self._filter()

    @contextmanager
    def cut_off(self, name: str) -> Iterator[None]:
        """Drops every packet of a host in both directions, of open connections too, during the block."""
        chains = [
            f"chain {hook} {{ type filter hook {hook} priority -10; policy drop; {interface} lo accept; }}"
            for hook, interface in (("input", "iif"), ("output", "oif"))
        ]
        nft = ("ip", "netns", "exec", name, "nft", "-f", "-")
        run(*nft, text="\n".join(["table inet cut {", *chains, "}"]))
        try:
            yield
        finally:
            run(*nft, text="delete table inet cut")

    def resolve(self, services: Mapping[str, list[str]]) -> None:
        """Sets the names of /etc/hosts. Writes the file in place because it is mounted in the hosts."""
        lines = ["127.0.0.1 localhost"]
        lines += [f"{address} {name}" for name, addresses in services.items() for address in addresses]
        self.names.write_text("\n".join(lines) + "\n")

    def _filter(self) -> None:
        for name, peer in self.peers.items():
            run("ip", "netns", "exec", name, "nft", "-f", "-", text=self.ruleset(peer))

    def ruleset(self, subject: Peer) -> str:
        """Returns the nftables rules of a pod's NetworkPolicies, for the pod's interface (like a CNI plugin)."""
        lines = ["table inet baton", "delete table inet baton", "table inet baton {"]
        for chain, direction, end, interface in (
            ("input", "Ingress", "saddr", "iif"),
            ("output", "Egress", "daddr", "oif"),
        ):
            openings = self.policies.openings(direction, subject, self.peers)
            lines += [
                f"chain {chain} {{",
                f"type filter hook {chain} priority 0; policy {'accept' if openings is None else 'drop'};",
            ]
            lines += [f"{interface} lo accept", "ct state established,related accept"]
            if direction == "Ingress":
                lines.append(f"ip saddr {NODE} accept")  # the node, so its kubelet can probe
            for opening in openings or ():
                lines += self._rules(opening, end)
            lines.append("}")
        return "\n".join([*lines, "}"])

    def _rules(self, opening: Opening, end: str) -> Iterator[str]:
        who = ""
        if opening.peers is not None:
            addresses = sorted(self.addresses[name] for name in opening.peers)
            if not addresses:
                return
            who = f"ip {end} {{ {', '.join(addresses)} }} "
        for protocol, low, high in opening.ports or (("TCP", 0, 65535), ("UDP", 0, 65535)):
            yield f"{who}{protocol.lower()} dport {low}-{high} accept"
