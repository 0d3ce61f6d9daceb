"""GPUs of a machine, listed by a fake nvidia-smi, and their distribution over pods."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.doctor import _rounds
from cli.gpus import Gpu, assign_gpus, run_on, visible_gpus
from common.errors import ConfigError
from common.settings.pod import PodConfig
from common.types import Role
from pod.monitoring.gpu import require_mappable_kv

LISTED = """GPU-aa1, NVIDIA H100 80GB HBM3, 81559, 00000000:1A:00.0
GPU-bb2, NVIDIA H100 80GB HBM3, 81559, 00000000:9B:00.0
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two GPUs on two NUMA nodes. The path replaces /sys."""
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\ncat <<'END'\n{LISTED}END\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
    sysfs = tmp_path / "sys"
    for node, (bus, cpus) in enumerate([("0000:1a:00.0", "0-15"), ("0000:9b:00.0", "16-31")]):
        place = sysfs / "devices" / "system" / "node" / f"node{node}"
        place.mkdir(parents=True)
        (place / "cpulist").write_text(f"{cpus}\n")
        device = sysfs / "bus" / "pci" / "devices" / bus
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
    return sysfs


def test_gpus_are_listed_with_the_cpus_near_them(machine: Path) -> None:
    name = "NVIDIA H100 80GB HBM3"
    assert visible_gpus({}, sysfs=machine) == (Gpu("GPU-aa1", name, "0-15"), Gpu("GPU-bb2", name, "16-31"))


@pytest.mark.parametrize(
    ("chosen", "found"),
    [
        ("1,0", ["GPU-bb2", "GPU-aa1"]),
        ("GPU-bb", ["GPU-bb2"]),
        ("0,7,1", ["GPU-aa1"]),
        ("-1", []),
        ("", []),
        ("MIG-123", ["MIG-123"]),
    ],
)
def test_cuda_visible_devices_limits_the_list(machine: Path, chosen: str, found: list[str]) -> None:
    assert [gpu.id for gpu in visible_gpus({"CUDA_VISIBLE_DEVICES": chosen}, sysfs=machine)] == found


def test_with_one_numa_node_cpus_are_unknown_and_without_a_driver_there_are_no_gpus(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (machine / "devices" / "system" / "node" / "node1").rename(machine / "gone")
    assert [gpu.cpus for gpu in visible_gpus({}, sysfs=machine)] == ["", ""]
    monkeypatch.setenv("PATH", "/nowhere")
    assert visible_gpus({}, sysfs=machine) == ()


@given(pods=st.integers(1, 9), count=st.integers(0, 9))
def test_pods_are_spread_evenly_over_gpus(pods: int, count: int) -> None:
    places = assign_gpus(pods, [Gpu(str(i)) for i in range(count)])
    assert len(places) == pods
    if not count:
        assert set(places) == {None}
        return
    used = [place[0].id for place in places if place is not None]
    for place in places:
        assert place is not None
        assert place[1] == used.count(place[0].id)
    assert max(map(used.count, used)) - min(map(used.count, used)) <= 1
    assert len(set(used)) == min(pods, count)


@given(st.integers(0, 9))
def test_every_ordered_pair_of_gpus_is_in_one_round_and_a_round_uses_each_gpu_once(count: int) -> None:
    rounds = _rounds(count)
    wanted = list(itertools.permutations(range(count), 2)) if count > 1 else [(0, 0)] * count
    assert sorted(itertools.chain(*rounds)) == wanted
    if count > 1:
        for pairs in rounds:
            busy = list(itertools.chain(*pairs))
            assert len(busy) == len(set(busy))


def test_cpus_that_do_not_exist_are_refused() -> None:
    before = os.sched_getaffinity(0)
    with pytest.raises(ConfigError, match="none of 4000-4001"):
        run_on("4000-4001")
    one = min(before)
    try:
        run_on(f"{one},{one}-{one}")
        assert os.sched_getaffinity(0) == {one}
    finally:
        os.sched_setaffinity(0, before)


def test_unmappable_memory_is_refused_where_other_pods_map_it() -> None:
    env = {"PYTORCH_CUDA_ALLOC_CONF": "backend:native, expandable_segments: True"}
    with pytest.raises(ConfigError, match="PYTORCH_CUDA_ALLOC_CONF"):
        require_mappable_kv(PodConfig(role=Role.DECODE), env)
    require_mappable_kv(PodConfig(role=Role.BOTH), env)
    require_mappable_kv(PodConfig(role=Role.DECODE, allow_tcp=True), env)
    require_mappable_kv(PodConfig(role=Role.DECODE), {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"})
