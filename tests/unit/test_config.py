"""Configuration: precedence, parsing, and errors that name field, value and expectation."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest

from cli.settings_page import PAGE, with_table
from common.errors import ConfigError
from common.settings.gateway import GatewayConfig
from common.settings.pod import PodConfig, WorkerConfig
from common.settings.process import DEFAULT_SECRET
from common.settings.table import current_names, declared, misspelt
from common.settings.up import UpConfig
from common.types import Role
from engine.config import EngineConfig


def pod(env: Mapping[str, str] | None = None, file: Path | None = None, **flags: object) -> PodConfig:
    return PodConfig.load(file=file, env=env or {}, flags={"role": "decode", **flags})


def test_defaults() -> None:
    config = pod()
    assert (config.role, config.host, config.block_size, config.chunk_tokens) == (Role.DECODE, "127.0.0.1", 16, 0)
    assert (config.gpu_memory_utilization, config.cuda_graphs, config.overlap) == (0.9, True, None)
    assert config.secret == DEFAULT_SECRET
    assert GatewayConfig.load(file=None, env={}, flags={}).max_body_bytes == 8 << 20
    assert GatewayConfig.load(file=None, env={}, flags={}).port == 8000
    assert UpConfig.load(file=None, env={}, flags={}).port is None


def test_flags_beat_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = tmp_path / "baton.toml"
    file.write_text('block_size = 8\nmax_seqs = 3\nthreads = 2\nkv_memory = "1GiB"\ndrain_s = 5\n')
    config = pod({"BATON_MAX_SEQS": "4", "BATON_THREADS": "5"}, file, threads=6, max_seqs=None)
    assert (config.block_size, config.max_seqs, config.threads) == (8, 4, 6)
    assert (config.kv_memory, config.drain_s) == (1 << 30, 5.0)


@pytest.mark.parametrize(
    ("raw", "size"),
    [
        ("512M", 512 << 20),
        ("1GiB", 1 << 30),
        ("1.5g", 3 << 29),
        ("2 KB", 2000),
        ("4096", 4096),
        (4096, 4096),
        ("7b", 7),
        ("3TiB", 3 << 40),
    ],
)
def test_sizes(raw: object, size: int) -> None:
    assert pod(kv_memory=raw).kv_memory == size


@pytest.mark.parametrize("raw", ["2Gb", "512Mb"])
def test_a_unit_that_may_mean_bits_is_refused(raw: str) -> None:
    with pytest.raises(ConfigError, match=f"invalid value '{raw}': expected a size .* like 512M or 1GiB .*, or 1GB"):
        pod(kv_memory=raw)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("--max-sequences", None),  # similar, and another thing
        ("--api-keyz", "--api-keys"),
        ("--apikeys", "--api-keys"),
        ("--max_seqs", "--max-seqs"),
        ("--seqs-max", "--max-seqs"),
        ("--chunk-tokns", "--chunk-tokens"),
        ("--kv-memroy", "--kv-memory"),
        ("--max-num-batched-tokens", None),
        ("--tls-cert", None),  # two letters from --tls-dir's kind, but another file
        ("--pods", None),
        ("--porrt", "--port"),
        ("--allow-origin", None),
    ],
)
def test_only_a_misspelling_gets_a_suggestion(name: str, meant: str | None) -> None:
    known = ["--api-keys", "--max-seqs", "--chunk-tokens", "--kv-memory", "--tls-dir", "--port", "--allow-tcp"]
    assert misspelt(name, known) == meant


def test_two_equally_near_names_give_no_suggestion() -> None:
    assert misspelt("--decod", ["--decode", "--decody"]) is None


def test_a_list_may_be_json_as_other_servers_take_it() -> None:
    kind = declared(GatewayConfig)["pods"].kind
    assert kind.parse('["127.0.0.1:1", "127.0.0.1:2"]') == kind.parse("127.0.0.1:1,127.0.0.1:2")
    assert kind.parse("[::1]:7000,[::1]:7001") == ("[::1]:7000", "[::1]:7001")


@pytest.mark.parametrize("raw", ["true", "1", "YES", "on", True])
def test_booleans(raw: object) -> None:
    assert pod(checksums=raw).checksums is True
    assert pod(allow_tcp=raw).allow_tcp is True


def test_lists() -> None:
    expected = ("127.0.0.1:1", "pod-b:2")
    for raw in ("127.0.0.1:1, pod-b:2,", ["127.0.0.1:1", "pod-b:2"]):
        assert GatewayConfig.load(file=None, env={}, flags={"pods": raw}).pods == expected
    assert GatewayConfig.load(file=None, env={"BATON_PODS": ""}, flags={}).pods == ()


def test_an_empty_optional_is_none() -> None:
    assert pod({"BATON_REDIS": "", "BATON_NAME": ""}).redis is None


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("block_size", "abc", "integer from 1 to 256"),
        ("block_size", 0, "integer from 1 to 256"),
        ("block_size", True, "integer"),
        ("block_size", 1.5, "integer"),
        ("port", 70000, "from 0 to 65535"),
        ("kv_memory", "12 parsecs", "512M"),
        ("kv_memory", -1, "512M"),
        ("kv_memory", "inf", "512M"),
        ("gpu_memory_utilization", 0, "over 0 and at most 1"),
        ("gpu_memory_utilization", 1.01, "over 0 and at most 1"),
        ("gpu_memory_utilization", float("nan"), "over 0 and at most 1"),
        ("overlap", "maybe", "true or false, or nothing"),
        ("drain_s", "nan", "seconds"),
        ("drain_s", -1, "seconds"),
        ("checksums", "maybe", "true or false"),
        ("role", "chef", "prefill, decode, both"),
        ("dtype", "int8", "float32"),
        ("redis", "http://x", "redis://"),
        ("advertise", "nowhere", "host:port"),
        ("name", "a:b", "letters"),
        ("device", "tpu", "cuda"),
        ("transport", "pigeon", "nixl"),
    ],
)
def test_the_error_of_a_bad_value_names_the_expected_kind(field: str, value: object, expected: str) -> None:
    with pytest.raises(ConfigError) as e:
        pod(**{field: value})
    assert e.value.field == field
    assert e.value.message.startswith(f"--{field.replace('_', '-')}: invalid value {value!r}: expected ")
    assert expected in e.value.message
    assert "\n" not in e.value.message


def test_the_error_of_a_bad_value_shows_it_as_the_user_gave_it(tmp_path: Path) -> None:
    """The error names a flag as a flag, a variable as a variable, and a value of a file with the file."""
    file = tmp_path / "baton.toml"
    file.write_text("prefill = 0\n")
    for env, path, flags, begin in (
        ({}, None, {"prefill": "-1"}, "--prefill: invalid value -1"),
        ({}, None, {"prefill": "many"}, "--prefill: invalid value 'many'"),
        ({"BATON_PREFILL": "0"}, None, {}, "BATON_PREFILL: invalid value 0"),
        ({}, file, {}, f"prefill: invalid value 0 in {file}"),
    ):
        with pytest.raises(ConfigError) as e:
            UpConfig.load(file=path, env=env, flags=flags)
        assert e.value.message == f"{begin}: expected an integer from 1 to 64"


def test_the_constructor_checks_too() -> None:
    arguments: dict[str, Any] = {"role": Role.DECODE}
    for field, bad in (("block_size", 0), ("block_size", "16"), ("role", "decode"), ("device", None)):
        with pytest.raises(ConfigError) as e:
            PodConfig(**{**arguments, field: bad})
        assert e.value.field == field
    config = PodConfig(role=Role.DECODE, drain_s=1)
    with pytest.raises(FrozenInstanceError):
        config.port = 1  # type: ignore[misc]


def test_the_error_of_a_missing_value_names_its_flag() -> None:
    with pytest.raises(ConfigError, match="role: missing"):
        PodConfig.load(file=None, env={}, flags={})


def test_unknown_keys_are_errors_wherever_they_come_from(tmp_path: Path) -> None:
    file = tmp_path / "baton.toml"
    file.write_text("blocksize = 8\n")
    with pytest.raises(ConfigError, match=r"^blocksize: unknown setting in .*baton\.toml; did you mean block_size\?$"):
        pod(file=file)
    with pytest.raises(ConfigError, match="blocksize"):
        pod(blocksize=8)
    with pytest.raises(ConfigError, match=r"^BATON_BLOCKSIZE: .*; did you mean BATON_BLOCK_SIZE\?$"):
        pod({"BATON_BLOCKSIZE": "8"})
    file.write_text("elsewhere = 8\n")
    with pytest.raises(ConfigError, match=r"^elsewhere: .*; known: role, name, "):
        pod(file=file)


@pytest.mark.parametrize(
    ("former", "value", "present"),
    [
        ("token_budget", 128, "chunk_tokens"),
        ("mixed_tokens", 32, "local_chunk_tokens"),
        ("local_prefill_tokens", "40", "local_prefill"),
    ],
)
def test_a_former_name_works_with_a_warning_that_names_the_present_one(
    former: str, value: object, present: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "baton.toml"
    file.write_text(f"{former} = {value!r}\n")
    variable, flag = f"BATON_{former.upper()}", f"--{former.replace('_', '-')}"
    for load, name in (
        (lambda: pod(**{former: value}), f"{flag} is now --{present.replace('_', '-')}"),
        (lambda: pod({variable: str(value)}), f"{variable} is now BATON_{present.upper()}"),
        (lambda: pod(file=file), f"{former} is now {present}"),
    ):
        assert getattr(load(), present) == value
        assert name in caplog.text
        caplog.clear()
    assert current_names(PodConfig, {former: value, present: 7}) == {present: 7}


def test_a_setting_without_effect_and_a_former_value_work_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    env = {"BATON_ROUTING_POLICY": "least_loaded"}
    assert GatewayConfig.load(file=None, env=env, flags={}) == GatewayConfig()
    assert "BATON_ROUTING_POLICY has no effect: the gateway always routes by cost" in caplog.text
    assert pod(env) == pod()  # a pod of the same stack
    assert pod({"BATON_CHUNK_GRAPHS": "8192"}) == pod()
    assert "BATON_CHUNK_GRAPHS has no effect: steps of up to 1024 tokens are always CUDA graphs" in caplog.text
    assert pod({"BATON_PULL": "read"}).pull == "push"
    assert "BATON_PULL: 'read' is now 'push'" in caplog.text


def test_an_engine_is_a_pod_with_more_settings() -> None:
    of_hybrid_models = {"num_states", "snapshot_blocks"}  # pods have the defaults
    pod_settings, engine_settings = declared(PodConfig), dict(declared(EngineConfig))
    assert all(engine_settings.pop(name) for name in of_hybrid_models)
    for name in engine_settings.keys() & pod_settings.keys():
        assert engine_settings[name] == pod_settings[name]
    own = {"num_blocks", "prompt_step_tokens"}
    assert engine_settings.keys() - pod_settings.keys() == own
    assert current_names(EngineConfig, {"prompt_budget": 64}) == {"prompt_step_tokens": 64}


def test_the_page_of_settings_is_current() -> None:
    """`python -m cli.settings_page` writes it."""
    page = PAGE.read_text("utf-8")
    assert page == with_table(page)
    assert [line for line in page.splitlines() if line.count("; default: ") > 1] == []


def test_variables_of_other_settings_classes_are_ignored() -> None:
    config = pod(
        {"BATON_GRPC_PORT": "9", "BATON_PREFILL": "many", "BATON_CACHE": "/x", "BATON_CONFIG": "/y", "HOME": "/"}
    )
    assert config == pod()


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        pod(file=tmp_path / "absent.toml")
    bad = tmp_path / "bad.toml"
    bad.write_text("= 3")
    with pytest.raises(ConfigError, match="not TOML"):
        pod(file=bad)


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::", "pod.example"])
def test_listening_beyond_this_machine_needs_a_secret(host: str) -> None:
    for cls, flags in ((PodConfig, {"role": "both"}), (GatewayConfig, {}), (UpConfig, {})):
        with pytest.raises(ConfigError) as e:
            cls.load(file=None, env={}, flags={**flags, "host": host})
        assert e.value.field == "secret"
        env = {"BATON_SECRET": "long enough", "BATON_TLS_DIR": "certs"}
        assert cls.load(file=None, env=env, flags={**flags, "host": host}).host == host


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::", "pod.example"])
def test_a_service_that_listens_beyond_this_machine_needs_certificates(host: str) -> None:
    worker = {"tensor_parallel_master": "10.0.0.1:7001"}
    for cls, flags in ((PodConfig, {"role": "both"}), (WorkerConfig, worker), (GatewayConfig, {})):
        with pytest.raises(ConfigError, match="make them with `baton certs DIR`") as e:
            cls.load(file=None, env={"BATON_SECRET": "long enough"}, flags={**flags, "host": host})
        assert e.value.field == "tls_dir"


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.1.2.3", "::1", "[::1]"])
def test_listening_on_loopback_needs_no_secret(host: str) -> None:
    assert pod(host=host).host == host.strip("[]")


def test_secrets_are_not_printed() -> None:
    assert "sesame-sesame" not in repr(pod(secret="sesame-sesame"))
    with pytest.raises(ConfigError) as e:
        pod(secret="sesame")
    assert "sesame" not in e.value.message


def test_a_chunk_is_at_least_one_block() -> None:
    with pytest.raises(ConfigError) as e:
        pod(chunk_tokens=8, block_size=16)
    assert e.value.field == "chunk_tokens"


def test_the_default_name_of_a_pod_is_valid_and_unique(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pod(name="decode-7").resolve_name() == "decode-7"
    with monkeypatch.context() as m:
        m.setattr(socket, "gethostname", lambda: "host_" + 80 * "x")
        fixed = pod(port=7001).resolve_name()
        assert fixed == pod(port=7001).resolve_name()  # stable over restarts
        names = {fixed, pod(port=7002).resolve_name(), pod().resolve_name(), pod().resolve_name()}
    assert len(names) == 4
    assert all(pod(name=name).resolve_name().startswith("decode-host_x") for name in names)


@pytest.mark.parametrize(("speculation", "model"), [("draft_model", None), ("eagle", None), ("ngram", "some-dir")])
def test_a_draft_model_is_required_exactly_if_the_proposer_uses_one(speculation: str, model: str | None) -> None:
    for kind, more in ((PodConfig, {"role": Role.PREFILL}), (UpConfig, {})):
        with pytest.raises(ConfigError, match="speculation_model") as caught:
            kind(speculation=speculation, speculation_model=model, **more)
        assert caught.value.field == "speculation_model"


def test_staging_with_several_ranks_names_both_settings() -> None:
    with pytest.raises(ConfigError, match="staging on cannot be combined with tensor_parallel_size 2") as caught:
        pod(staging="on", tensor_parallel_size=2)
    assert caught.value.field == "staging"
    assert pod(staging="auto", tensor_parallel_size=2).staging == "auto"
