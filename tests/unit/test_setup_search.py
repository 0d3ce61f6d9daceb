"""`baton plan`: its inputs, its errors, and the direction in which its answers change."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.commands.plan import run
from common.errors import ConfigError
from loadtest.slo import percentile
from loadtest.workload.trace import WorkloadTrace, load_trace
from simulator.agent_workload import AgentWorkload
from simulator.hardware_rates import H100_8B, fit_rates, load_rates
from simulator.setup_search import ClusterSetup, SetupSearch
from simulator.spec import RequestOutcome, Slo
from tests.rigs.forked_cli import forked

MOONCAKE = (
    '{"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]}\n'
    '{"timestamp": 27000, "input_length": 1536, "output_length": 0, "hash_ids": [1, 2, 4]}\n'
)
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:17:03.9799600,4808,10\r\n"
    "2023-11-16 18:17:04.0319600,3180,8\r\n"
)


def written(tmp_path: Path, name: str, text: str) -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


# -- traces


def test_mooncake_traces_share_blocks_by_their_ids(tmp_path: Path) -> None:
    trace = load_trace(written(tmp_path, "t.jsonl", MOONCAKE))
    first, second = trace.requests
    assert (second.arrival_s, second.prompt_len, second.output_len) == (27.0, 1536, 1)
    assert (len(first.block_hashes), len(second.block_hashes)) == (2, 3)
    assert first.block_hashes == second.block_hashes[:2]
    assert trace.ideal_hit_rate() == pytest.approx(1024 / 2636)
    assert trace.sped_up(2).duration_s == 13.5


def test_azure_traces_share_nothing(tmp_path: Path) -> None:
    trace = load_trace(written(tmp_path, "t.csv", AZURE))
    assert [r.prompt_len for r in trace.requests] == [4808, 3180]
    assert trace.duration_s == pytest.approx(0.052)
    assert trace.ideal_hit_rate() == 0.0


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("t.txt", "x", "neither .jsonl"),
        ("t.jsonl", "", "two requests at different times"),
        ("t.jsonl", MOONCAKE.replace("27000", "0"), "two requests at different times"),
        ("t.jsonl", MOONCAKE + "{", "line 3: not JSON"),
        ("t.jsonl", MOONCAKE + "[]", "line 3: not an object"),
        ("t.jsonl", MOONCAKE.replace("27000", "-1"), "line 2: timestamp"),
        ("t.jsonl", MOONCAKE.replace("1536", "1537"), "line 2: 3 hash_ids for 1537 tokens"),
        ("t.jsonl", MOONCAKE.replace("1536", "0"), "line 2: input_length"),
        ("t.jsonl", MOONCAKE.replace("[1, 2, 4]", '["a"]'), "line 2: hash_ids"),
        ("t.csv", "a,b\n1,2\n", "line 1: the columns"),
        ("t.csv", AZURE + "2023-11-16 18:17:04.1,1\r\n", "line 4: 2 columns"),
        ("t.csv", AZURE + "yesterday,1,1\r\n", "line 4: Invalid isoformat"),
        ("t.csv", AZURE + "2023-11-16 18:17:05.1,none,1\r\n", "line 4: invalid literal"),
    ],
)
def test_a_wrong_trace_is_refused_with_the_line(tmp_path: Path, name: str, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=r"^--trace: ") as error:
        load_trace(written(tmp_path, name, text))
    assert says in error.value.message


# -- rates and objectives


def test_rates_are_fitted_to_measured_points() -> None:
    metrics: dict[str, Any] = {f"ttft_ms_{n}": 1.2e3 * H100_8B.prompt_s(n, 2048) for n in (1024, 4096, 15000)}
    metrics |= {
        f"decode_ms_{b}x{n}": 1e3 * H100_8B.decode_s(b, b * n) + 1 for b, n in ((1, 128), (64, 1024), (64, 2048))
    }
    rates = fit_rates(H100_8B, metrics | {"copy_gb_s": 3000}, name="measured", card="a card")
    assert rates.prompt_s(8192, 2048) == pytest.approx(1.2 * H100_8B.prompt_s(8192, 2048), rel=0.02)
    assert rates.decode_s(32, 32 * 1500) == pytest.approx(H100_8B.decode_s(32, 32 * 1500) + 0.001, rel=0.02)
    assert "a card" in rates.source


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not readable JSON"),
        ("[]", "JSON object"),
        ('{"metrics": {"ttft_ms_1024": 25}}', "two ttft_ms_N"),
        ('{"preset": "b200"}', "preset must be one of"),
        ('{"speed": 3}', "unknown field 'speed'"),
        ('{"link_byte_s": 0}', "link_byte_s must be a positive number"),
        ('{"link_byte_s": "fast"}', "link_byte_s must be a positive number"),
        ('{"prefill_tok_s": [[512, 100], [256, 100]]}', "rising"),
        ('{"prefill_tok_s": 100}', "rising"),
    ],
)
def test_wrong_rates_are_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=r"^--rates: ") as error:
        load_rates(str(written(tmp_path, "rates.json", text)))
    assert says in error.value.message


def test_rates_of_a_file_replace_those_of_a_preset(tmp_path: Path) -> None:
    rates = load_rates(str(written(tmp_path, "slow.json", '{"preset": "h100-8b", "link_byte_s": 1e9}')))
    assert replace(rates, name="", source="", link_byte_s=0) == replace(H100_8B, name="", source="", link_byte_s=0)
    with pytest.raises(ConfigError, match="h100-8b"):
        load_rates("nothing")


def test_an_slo_is_parsed() -> None:
    assert Slo.parse("ttft=2s, itl=50ms") == Slo(2.0, 0.05)
    assert Slo.parse("itl=.5s,ttft=800ms", 1.0) == Slo(0.8, 0.5, 1.0)


@pytest.mark.parametrize(
    "text", ["", "ttft=2s", "ttft=2s,itl=50", "ttft=2s,ttft=2s", "ttft=0s,itl=1s", "tpot=1s,itl=1s"]
)
def test_a_wrong_slo_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--slo: "):
        Slo.parse(text)


def test_an_slo_is_met_or_missed_by_each_of_its_limits() -> None:
    slo = Slo(1.0, 0.05)
    good = RequestOutcome(0.0, 10, 10, ttft_s=1.0, mean_itl_s=0.05, done=True)
    assert slo.is_met_by(good)
    assert slo.is_met_by(replace(good, mean_itl_s=None))
    for wrong in ({"ttft_s": 1.1}, {"mean_itl_s": 0.06}, {"done": False}, {"ttft_s": None}):
        assert not slo.is_met_by(replace(good, **wrong))  # type: ignore[arg-type]


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.001, 1))
def test_a_percentile_is_the_least_value_that_covers_its_share(values: list[float], share: float) -> None:
    found = percentile(values, share)
    assert sum(v <= found for v in values) >= share * len(values) - 1e-6
    assert sum(v < found for v in values) < share * len(values) + 1e-6


# -- plans


@pytest.fixture(scope="module")
def trace() -> WorkloadTrace:
    return AgentWorkload(rate=2.0, seconds=60.0, tenants=5, turns=3.0, system_tokens=(1000, 3000)).trace()


def plan(trace: WorkloadTrace, slo: Slo, gpus: int | None, **options: Any) -> Any:
    return SetupSearch(trace, slo, H100_8B, chunks=(2048,), **options).plan(gpus)


def test_a_looser_slo_never_lowers_the_goodput(trace: WorkloadTrace) -> None:
    slos = (Slo(0.15, 0.008), Slo(0.3, 0.012), Slo(2.0, 0.05))
    goodputs = [plan(trace, slo, 3).best.goodput for slo in slos]
    assert goodputs == sorted(goodputs)
    assert goodputs[0] < goodputs[-1]
    assert plan(trace, Slo(0.3, 0.012, 0.99), 3).best.goodput <= goodputs[1]


def test_the_ratio_follows_the_work(trace: WorkloadTrace) -> None:
    answers = replace(
        trace, requests=tuple(replace(r, output_len=1200, prompt_len=200, block_hashes=()) for r in trace.requests)
    )
    prompts = replace(trace, requests=tuple(replace(r, output_len=2) for r in trace.requests))
    slo = Slo(1.0, 0.02)
    assert plan(answers, slo, 4).best.setup.decode == 3
    assert plan(prompts, slo, 4).best.setup.prefill == 3


def test_the_fewest_pods_meet_the_slo_at_the_rate_of_the_trace(trace: WorkloadTrace) -> None:
    busy = trace.sped_up(40.0)
    found = plan(busy, Slo(1.0, 0.05), None)
    assert found.needed is not None
    assert found.needed.goodput == busy.rate
    assert found.needed.summary is not None
    assert found.needed.summary.ttft_p50_s <= 1.0
    assert found.needed.setup.gpus >= 0.5 * busy.rate / found.best.per_gpu
    assert {m.setup.gpus for m in found.measured} == {8}


def test_an_unreachable_slo_gives_no_setup(trace: WorkloadTrace) -> None:
    found = plan(trace, Slo(0.001, 0.05), 2)
    assert found.best.goodput == 0.0
    assert found.best.summary is None
    assert found.needed is None


def test_requests_that_never_fit_are_refused(trace: WorkloadTrace) -> None:
    with pytest.raises(ConfigError, match="KV memory"):
        SetupSearch(trace, Slo(1, 1), replace(H100_8B, kv_pool_bytes=1e9))
    with pytest.raises(ConfigError, match="decode times"):
        SetupSearch(trace, Slo(1, 1), load_rates("flat-8k"))


def test_setups_are_counted_in_gpus() -> None:
    assert ClusterSetup(3, 5, 2048).gpus == 8


# -- the command


def lines(trace: WorkloadTrace) -> str:
    ids: dict[bytes, int] = {}
    return "\n".join(
        json.dumps(
            {
                "timestamp": int(r.arrival_s * 1e3),
                "input_length": r.prompt_len,
                "output_length": r.output_len,
                "hash_ids": [ids.setdefault(h, len(ids)) for h in r.block_hashes]
                + [10**6 + i] * (len(r.block_hashes) * 512 < r.prompt_len),
            }
        )
        for i, r in enumerate(trace.requests)
    )


def asked(**flags: Any) -> dict[str, Any]:
    names = ("trace", "slo", "rates", "gpus", "attainment", "requests", "chunks")
    return {**dict.fromkeys(names), "as_json": False, **flags}


def test_the_command_prints_a_table_and_its_assumptions(
    trace: WorkloadTrace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(written(tmp_path, "agents.jsonl", lines(trace)))
    assert run(**asked(trace=path, slo="ttft=1s,itl=50ms", gpus="2", chunks="2048", requests="60")) == 0
    out = capsys.readouterr().out
    for part in ("1:1", "per GPU", "Assumed:", "cuBLAS", "first 60 of", "2 GPUs", "last only"):
        assert part in out
    assert run(**asked(trace=path, slo="ttft=1ms,itl=50ms", gpus="2", chunks="2048", requests="60")) == 1
    assert "No setup keeps this SLO" in capsys.readouterr().out


def test_a_repeated_trace_goes_on_at_its_rate_and_shares_nothing_between_repetitions(trace: WorkloadTrace) -> None:
    count = len(trace.requests)
    longer = trace.repeated(2 * count + 5)
    assert len(longer.requests) == 2 * count + 5
    assert longer.requests[:count] == trace.requests
    assert trace.repeated(7) == trace.first(7)
    times = [request.arrival_s for request in longer.requests]
    assert times == sorted(times)
    assert longer.rate == pytest.approx(trace.rate, rel=0.05)
    rounds = [longer.requests[at : at + count] for at in (0, count, 2 * count)]
    names = [{name for request in requests for name in request.block_hashes} for requests in rounds]
    assert not names[0] & names[1]
    assert not names[1] & names[2]
    again = replace(trace, requests=longer.requests[count : 2 * count])
    assert again.ideal_hit_rate() == pytest.approx(trace.ideal_hit_rate()), "the prefixes within a repetition stay"


def test_without_a_number_of_requests_the_replay_is_long_enough(
    trace: WorkloadTrace, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cli.commands.plan.STEADY_S", 40.0)
    path = str(written(tmp_path, "agents.jsonl", lines(trace.first(60))))
    assert run(**asked(trace=path, slo="ttft=1s,itl=50ms", gpus="2", chunks="2048", as_json=True)) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["best"]["at_goodput"]["requests"] / said["best"]["goodput_req_s"] >= 40
    assert not any("last only" in note for note in said["assumptions"])
    assert any("recorded ones, repeated with new prompts" in note for note in said["assumptions"])


def test_the_command_prints_json(trace: WorkloadTrace, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(written(tmp_path, "agents.jsonl", lines(trace)))
    assert run(**asked(trace=path, slo="ttft=1s,itl=50ms", gpus="3", chunks="2048", requests="60", as_json=True)) == 0
    said = json.loads(capsys.readouterr().out)
    best = said["best"]
    assert best["prefill"] + best["decode"] == best["gpus"] == 3
    assert best["goodput_req_s_per_gpu"] == pytest.approx(best["goodput_req_s"] / 3)
    assert best["at_goodput"]["requests"] == 60
    assert said["assumptions"]


@pytest.mark.parametrize("together", [1, 4])
def test_the_command_takes_azures_format_and_says_that_bursts_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], together: int
) -> None:
    times = (f"2023-11-16 18:{i // together:02d}:03.5,{1500 + i},8" for i in range(40))
    path = str(written(tmp_path, "azure.csv", "\r\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *times])))
    assert run(**asked(trace=path, slo="ttft=1s,itl=50ms", gpus="2", chunks="2048", requests="40", as_json=True)) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["best"]["at_goodput"]["hit_rate"] == 0.0
    assert any(f"arrive at {40 // together} times" in note for note in said["assumptions"]) == (together > 1)


WRONG: list[tuple[list[str], str]] = [
    ([], "--trace FILE and --slo"),
    (["--slo", "ttft=1s,itl=1s"], "--trace FILE and --slo"),
    (["--trace", "nowhere.jsonl", "--slo", "ttft=1s,itl=1s"], "no file nowhere.jsonl"),
    (["--trace", "{trace}", "--slo", "1s"], "--slo: '1s'"),
    (["--trace", "{trace}", "--slo", "ttft=1s,itl=1s", "--gpus", "1"], "--gpus must be a whole number from 2"),
    (["--trace", "{trace}", "--slo", "ttft=1s,itl=1s", "--attainment", "2"], "--attainment must be"),
    (["--trace", "{trace}", "--slo", "ttft=1s,itl=1s", "--chunks", "64,x"], "--chunks must be"),
    (["--trace", "{trace}", "--slo", "ttft=1s,itl=1s", "--rates", "h900"], "--rates: 'h900'"),
]


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> list[subprocess.CompletedProcess[str]]:
    path = str(written(tmp_path_factory.mktemp("plan"), "t.jsonl", MOONCAKE))
    argvs = [["plan", *(path if flag == "{trace}" else flag for flag in flags)] for flags, _ in WRONG]
    return forked(argvs, before="import sys; sys.modules['torch'] = None; import simulator.setup_search")


@pytest.mark.parametrize("number", range(len(WRONG)), ids=[" ".join(flags) for flags, _ in WRONG])
def test_wrong_flags_end_with_2_and_one_line(number: int, refused: list[subprocess.CompletedProcess[str]]) -> None:
    done, (_, says) = refused[number], WRONG[number]
    assert done.returncode == 2
    assert done.stdout == ""
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_quantised_weights_leave_memory_for_kv_and_shorten_small_steps() -> None:
    kinds = [load_rates(name) for name in ("h100-8b", "h100-8b-fp8", "h100-8b-int4")]
    assert [kind.pool_blocks(16) for kind in kinds] == sorted(kind.pool_blocks(16) for kind in kinds)
    steps = [kind.decode_s(1, 128) for kind in kinds]
    assert steps == sorted(steps, reverse=True)
    assert steps[1] < 0.6 * steps[0]
    assert kinds[2].decode_s(512, 512) < kinds[0].decode_s(512, 512)
