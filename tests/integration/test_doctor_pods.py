"""`baton doctor --pods`: findings about running pods and the KV traffic of pairs."""

from __future__ import annotations

from pathlib import Path

from cli.doctor import Level, check_pods
from tests.rigs.pods.harness import Cluster, prompt_of, request, tiny_llama


async def test_pods_and_pairs_are_reported_by_their_counters(tmp_path: Path, unused_tcp_port: int) -> None:
    async with Cluster.start(tiny_llama(tmp_path)) as cluster:
        await cluster.generate(request(prompt_of(20), 2))
        prefill, decode = cluster.prefill.runtime, cluster.decode.runtime
        nobody = f"127.0.0.1:{unused_tcp_port}"
        found = {f.what: f async for f in check_pods(None, [prefill.address, decode.address, nobody])}
        assert found[f"pod {prefill.name}"].detail == f"prefill at {prefill.address}, ready"
        pair = found[f"{prefill.name} -> {decode.name}"]
        assert pair.level is Level.OK
        assert pair.detail.startswith("loopback (reported), ")
        assert "1 hand-offs and 0 pulls of 5 blocks" in pair.detail
        assert found[f"pod at {nobody}"].level is Level.WARN
        assert f"{decode.name} -> {prefill.name}" not in found  # it has moved nothing there
