"""The plan of a stack on one machine: ports, flags and environment of its processes."""

from __future__ import annotations

import contextlib
import socket
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from cli.gpus import Gpu
from cli.stack import stack as stack_module
from cli.stack.certificates import Authority
from cli.stack.stack import Stack
from cli.stack.supervisor import PortLease, require_free_port
from common.errors import ConfigError
from common.redis.url import RedisUrl
from common.settings.table import declared
from common.settings.up import UpConfig
from common.telemetry import MemoryUsage
from common.tls import TlsFiles

REDIS = "redis://127.0.0.1:6379/0"


@contextlib.contextmanager
def planned(settings: Mapping[str, object], said: list[str] | None = None, gpus: Sequence[Gpu] = ()) -> Iterator[Stack]:
    config = UpConfig.load(file=None, env={}, flags={"redis": REDIS, **settings})
    say = (said if said is not None else []).append
    with tempfile.TemporaryDirectory() as logs:
        stack = Stack.plan(config, Path("/model"), Path(logs), env={}, gpus=gpus, say=say)
        try:
            yield stack
        finally:
            stack.close()


@contextlib.contextmanager
def listening(port: int = 0) -> Iterator[int]:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", port))
        server.listen()
        yield server.getsockname()[1]


def free_port() -> int:
    with PortLease() as lease:
        return lease.port


def test_a_port_has_one_lease_and_its_server_can_restart() -> None:
    with PortLease(free_port()) as lease:
        with pytest.raises(ConfigError, match=f"^port: {lease.port} is in use$"):
            PortLease(lease.port)
        for _ in range(2):
            with listening(lease.port):
                pass
    PortLease(lease.port).close()  # given up


def test_a_free_port_has_one_lease() -> None:
    with PortLease() as lease, pytest.raises(ConfigError, match="is in use"):
        PortLease(lease.port)


@pytest.mark.parametrize("name", ["port", "grpc_port"])
def test_a_configured_port_is_leased_or_refused(name: str) -> None:
    with (
        listening() as port,
        pytest.raises(ConfigError, match=f"^{name}: {port} is in use$") as e,
        planned({"port": 0, name: port}),
    ):
        pass
    assert e.value.field == name
    with planned({"port": 0, name: port}) as stack:
        assert f"--{name.replace('_', '-')}={port}" in stack.specs[-1].process.argv
        assert str(port) in (stack.base_url if name == "port" else stack.grpc_address)


def test_the_next_free_port_replaces_the_default_one_with_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening() as taken:
        monkeypatch.setattr(stack_module, "DEFAULT_PORT", taken)
        said: list[str] = []
        with planned({}, said) as first, planned({}, said) as second:  # two at once, none of which listens yet
            ports = [int(stack.base_url.removesuffix("/v1").rpartition(":")[2]) for stack in (first, second)]
    assert taken < ports[0] < ports[1]
    assert said == [f"port {taken} is in use, using {port}" for port in ports]


def test_settings_reach_the_processes() -> None:
    settings = {"served_name": "my model", "device": "cpu", "dtype": "bfloat16", "max_model_len": 512, "drain_s": 7}
    settings |= {"speculation": "eagle", "speculation_model": "/some/head"}
    with planned({"port": 0, **settings}) as stack:
        assert stack.model == "my model"
        *pods, gateway = (spec.process.argv for spec in stack.specs)
        assert len(pods) == 2
        for argv in pods:
            assert {"--served-name=my model", "--device=cpu", "--dtype=bfloat16", "--max-model-len=512"} <= set(argv)
            assert {"--speculation=eagle", "--speculation-model=/some/head"} <= set(argv)
        assert {"--served-name=my model", "--drain-s=7.0"} <= set(gateway)
        assert all("--drain-s=7.0" in argv for argv in pods)
        assert not any(flag.startswith("--name") for argv in pods for flag in argv)  # another stack may share the Redis


def test_every_setting_that_a_stack_shares_with_its_processes_reaches_them() -> None:
    other: dict[str, object] = {"speculation": "eagle", "speculation_model": "head", "device": "cpu", "pull": "off"}
    other |= {"dtype": "float32", "kv_dtype": "fp8_e4m3", "load_format": "dummy", "speculation_accept": "rejection"}
    other |= {"log_level": "debug", "log_format": "json", "traces": "otlp", "trace_sample": 0.5, "allow_tcp": True}
    other |= {"tool_parser": "hermes", "reasoning_parser": "think", "api_keys": "keys.toml", "redis": REDIS}
    with planned({"port": 0, **other}) as stack:
        commands = {spec.name: list(spec.process.argv[5:]) for spec in stack.specs}
        envs = {spec.name: {"BATON_REDIS": (spec.process.env or {})["BATON_REDIS"]} for spec in stack.specs}
    plain = UpConfig(redis=REDIS)
    for name, command in (("prefill-0", "serve"), ("decode-0", "serve"), ("gateway", "gateway")):
        loaded = UpConfig.of_command[command].load(file=None, env=envs[name], flags=_flags(commands[name]))
        for setting in other.keys() & declared(type(loaded)).keys() - {"speculation_model"}:
            expected = getattr(UpConfig.load(file=None, env={}, flags=other), setting)
            assert getattr(loaded, setting) == expected, (name, setting)
            assert setting == "redis" or expected != getattr(plain, setting)


def _flags(argv: Sequence[str]) -> dict[str, object]:
    pairs = [word.removeprefix("--").partition("=") for word in argv]
    return {name.replace("-", "_"): value if equals else True for name, equals, value in pairs}


def test_keys_and_passwords_are_private_and_in_no_command_line() -> None:
    with planned({"port": 0, "redis": None}) as stack:
        private = stack.log_dir / "private"
        assert stat.S_IMODE(private.stat().st_mode) == 0o700
        keys = [*private.glob("*/key.pem"), private / "valkey.conf"]
        assert len(keys) == 4
        assert {stat.S_IMODE(key.stat().st_mode) for key in keys} == {0o600}
        assert not list(private.rglob("ca-key.pem")), "the throw-away authority's key is not stored"
        password = RedisUrl.parse(stack.redis).password
        assert password
        for spec in stack.specs:
            assert not any(password in word or stack.secret in word for word in spec.process.argv)
            if spec.role != "store":
                assert (spec.process.env or {})["BATON_REDIS"] == stack.redis
                assert not any(word.startswith("--redis") for word in spec.process.argv)
                assert f"--tls-dir={private / spec.name}" in spec.process.argv
                files = TlsFiles.of_directory(private / spec.name, spec.role)
                assert files is not None
                assert files.identity() == (spec.role, spec.name)
    assert not private.exists()


def test_an_api_key_reaches_only_the_gateway_and_no_command_line() -> None:
    with planned({"port": 0, "api_key": "open-sesame"}) as stack:
        assert stack.needs_key
        *pods, gateway = stack.specs
        assert (gateway.process.env or {})["BATON_API_KEY"] == "open-sesame"
        assert not any("BATON_API_KEY" in (pod.process.env or {}) for pod in pods)
        assert not any("open-sesame" in word for spec in stack.specs for word in spec.process.argv)


def test_all_processes_start_at_once_and_the_gateway_stops_first() -> None:
    with planned({"port": 0, "redis": None}) as stack:
        assert {spec.start_stage for spec in stack.specs} == {0}
        assert min(stack.specs, key=lambda spec: spec.stop_stage).name == "gateway"
        assert max(stack.specs, key=lambda spec: spec.stop_stage).name == "valkey"


def test_a_port_with_a_listener_is_refused_and_a_leased_one_is_not() -> None:
    with listening() as taken, pytest.raises(ConfigError, match=f"^metrics_port: {taken} is in use$"):
        require_free_port("127.0.0.1", taken, "metrics_port")
    with PortLease() as lease:
        require_free_port("127.0.0.1", lease.port, "port")
    require_free_port("127.0.0.1", 0, "port")


def test_a_stack_takes_certificates_from_a_directory(tmp_path: Path) -> None:
    authority = Authority.create()
    for role in ("gateway", "prefill"):
        authority.issue(tmp_path / role, role, role, days=1)
    with pytest.raises(ConfigError, match=r"decode/cert\.pem.*baton certs DIR"), planned({"tls_dir": str(tmp_path)}):
        pass
    authority.issue(tmp_path / "decode", "decode", "decode", days=1)
    with planned({"port": 0, "tls_dir": str(tmp_path), "prefill": 2}) as stack:
        for spec in stack.specs:
            assert f"--tls-dir={tmp_path / spec.role}" in spec.process.argv


GPUS = [Gpu("GPU-a", "H100", "0-3"), Gpu("GPU-b", "H100", "4-7")]


def of_pods(stack: Stack) -> list[tuple[str | None, set[str]]]:
    """CUDA_VISIBLE_DEVICES and flags of each pod."""
    return [
        (spec.process.env.get("CUDA_VISIBLE_DEVICES"), set(spec.process.argv))
        for spec in stack.specs
        if spec.name != "gateway"
    ]


def test_each_pod_has_its_own_gpu_if_there_are_enough() -> None:
    with planned({"port": 0, "net_devices": "mlx5_0:1,mlx5_1:1", "allow_tcp": True}, gpus=GPUS) as stack:
        (first, prefill), (second, decode) = of_pods(stack)
    assert (first, second) == ("GPU-a", "GPU-b")
    assert {"--cpus=0-3", "--net-devices=mlx5_0:1", "--gpu-memory-utilization=0.9000", "--allow-tcp"} <= prefill
    assert {"--cpus=4-7", "--net-devices=mlx5_1:1", "--gpu-memory-utilization=0.9000", "--device=auto"} <= decode


def test_pods_share_gpus_and_their_memory_if_there_are_too_few() -> None:
    with planned({"port": 0, "prefill": 2}, gpus=GPUS) as stack:
        pods = of_pods(stack)
    assert [gpu for gpu, _ in pods] == ["GPU-a", "GPU-b", "GPU-a"]
    shares = ["--gpu-memory-utilization=0.4500", "--gpu-memory-utilization=0.9000", "--gpu-memory-utilization=0.4500"]
    assert all(share in flags for share, (_, flags) in zip(shares, pods, strict=True))
    with planned({"port": 0, "device": "cuda:1"}, gpus=GPUS) as stack:
        pods = of_pods(stack)
    assert [gpu for gpu, _ in pods] == ["GPU-b", "GPU-b"]
    assert all({"--device=cuda", "--gpu-memory-utilization=0.4500"} <= flags for _, flags in pods)


def test_pods_on_gpus_share_half_of_the_free_memory_as_host_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    def sizes(stack: Stack) -> list[int]:
        flags = [flag for _, argv in of_pods(stack) for flag in argv if flag.startswith("--host-cache=")]
        return [int(flag.partition("=")[2]) for flag in flags]

    with planned({"port": 0}, gpus=GPUS) as stack:
        first, second = sizes(stack)
    assert 0 < first == second <= psutil.virtual_memory().total // 4
    monkeypatch.setattr("common.telemetry.memory_usage", lambda: MemoryUsage(used=0, limit=10 << 30, free=8 << 30))
    with planned({"port": 0}, gpus=GPUS) as stack:
        assert sizes(stack) == [2 << 30] * 2
    with planned({"port": 0, "host_cache": "1GiB"}, gpus=GPUS) as stack:
        assert sizes(stack) == [1 << 30] * 2
    with planned({"port": 0}) as stack:
        assert sizes(stack) == [0, 0]


def test_pods_of_several_ranks_have_neighbouring_gpus_with_their_cpus_and_nics() -> None:
    four = [*GPUS, Gpu("GPU-c", "H100", "4-7"), Gpu("GPU-d", "H100", ""), Gpu("GPU-e")]
    settings = {"port": 0, "tensor_parallel_size": 2, "net_devices": "mlx5_0:1,mlx5_1:1,mlx5_2:1"}
    with planned(settings, gpus=four) as stack:
        (first, prefill), (second, decode) = of_pods(stack)
    assert (first, second) == ("GPU-a,GPU-b", "GPU-c,GPU-d")
    assert {"--tensor-parallel-size=2", "--cpus=0-3,4-7", "--net-devices=mlx5_0:1,mlx5_1:1"} <= prefill
    assert {"--cpus=4-7", "--net-devices=mlx5_2:1,mlx5_0:1", "--host-cache=0"} <= decode
    for few, device in ((GPUS[:1], "auto"), (GPUS, "cuda:1")):
        with (
            pytest.raises(ConfigError, match="2 GPUs are needed, 1 are visible") as refused,
            planned({"port": 0, "tensor_parallel_size": 2, "device": device}, gpus=few),
        ):
            pass
        assert refused.value.field == "tensor_parallel_size"
    with planned({"port": 0, "tensor_parallel_size": 2}) as stack:
        assert all("--tensor-parallel-size=2" in flags for _, flags in of_pods(stack))


def test_aggregated_pods_have_both_roles_and_replace_the_others() -> None:
    with planned({"port": 0, "aggregated": 2, "redis": None}, gpus=GPUS[:1]) as stack:
        pods = {spec.name: set(spec.process.argv) for spec in stack.specs if spec.name not in ("valkey", "gateway")}
        for name, flags in pods.items():
            assert {"--role=both", f"--name={name}", "--gpu-memory-utilization=0.4500"} <= flags
            files = TlsFiles.of_directory(stack.log_dir / "private" / name, "both")
            assert files is not None
            assert files.identity() == ("both", name)
    assert list(pods) == ["both-0", "both-1"]
    for role in ("prefill", "decode"):
        message = f"^{role} 2 cannot be combined with aggregated 1"
        with pytest.raises(ConfigError, match=message), planned({"aggregated": 1, role: 2}):
            pass


def test_a_cpu_stack_has_no_gpu_and_a_missing_gpu_is_an_error() -> None:
    with planned({"port": 0, "device": "cpu"}, gpus=GPUS) as stack:
        assert [gpu for gpu, _ in of_pods(stack)] == [None, None]
    with (
        pytest.raises(ConfigError, match="cuda:2 does not exist here, 2 GPUs are visible"),
        planned({"port": 0, "device": "cuda:2"}, gpus=GPUS),
    ):
        pass
