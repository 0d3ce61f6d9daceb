"""The workload of load tests: arrival times, lengths, shared prefixes, traces and settings."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.commands.loadtest import run
from common.errors import ConfigError
from loadtest.config import LoadConfig, parse_rates
from loadtest.workload import arrivals
from loadtest.workload.sessions import (
    WORDS,
    LengthDistribution,
    Session,
    SyntheticWorkload,
    TextPiece,
    TraceWorkload,
    fit_trace,
)
from loadtest.workload.trace import (
    MOONCAKE_BLOCK_SIZE,
    WorkloadRequest,
    WorkloadTrace,
    load_trace,
    synthetic_block_hash,
)
from tests.rigs.engine.comparisons import shared


def first_turns(sessions: Iterator[Session], count: int) -> list[Session]:
    return list(islice(sessions, count))


def ids_of(session: Session, turn: int = -1) -> list[int]:
    return [i for message in session.turns[turn].messages for piece in message.pieces for i in piece.ids(0, 1 << 30)]


# -- arrivals


@pytest.mark.parametrize(
    ("times", "deviation"),
    [
        (arrivals.constant(50.0), 0.0),
        (arrivals.poisson(50.0, random.Random(1)), 1.0),
        (arrivals.gamma(50.0, 3.0, random.Random(1)), 3.0),
        (arrivals.gamma(50.0, 0.5, random.Random(1)), 0.5),
    ],
    ids=["constant", "poisson", "bursts", "steadier"],
)
def test_arrivals_have_the_rate_and_the_burstiness_they_are_asked_for(times: Iterator[float], deviation: float) -> None:
    drawn = list(islice(times, 40_000))
    gaps = [later - earlier for earlier, later in pairwise(drawn)]
    assert min(gaps) >= 0
    assert statistics.fmean(gaps) == pytest.approx(1 / 50, rel=0.05)
    assert statistics.pstdev(gaps) / statistics.fmean(gaps) == pytest.approx(deviation, rel=0.08, abs=1e-6)


def test_on_and_off_keeps_the_mean_and_is_silent_between() -> None:
    drawn = list(islice(arrivals.onoff(20.0, 2.0, 6.0, random.Random(2)), 20_000))
    assert drawn == sorted(drawn)
    assert all(at % 8.0 <= 2.0 for at in drawn)
    assert len(drawn) / drawn[-1] == pytest.approx(20.0, rel=0.05)


def test_arrivals_end_and_repeat() -> None:
    def draw(seed: int) -> list[float]:
        return list(arrivals.until(arrivals.poisson(10.0, random.Random(seed)), 30.0))

    assert draw(1) == draw(1) != draw(2)
    assert max(draw(1)) < 30.0
    assert list(arrivals.until([1.0, 2.0, 3.0], None)) == [1.0, 2.0, 3.0]


# -- lengths


def test_lengths_stay_in_their_range() -> None:
    rng = random.Random(0)
    assert {LengthDistribution.parse("x", "7").draw(rng) for _ in range(10)} == {7}
    uniform = {LengthDistribution.parse("x", "3:5").draw(rng) for _ in range(200)}
    assert uniform == {3, 4, 5}
    around = [LengthDistribution.parse("x", "~100").draw(rng) for _ in range(20_000)]
    assert statistics.median(around) == pytest.approx(100, rel=0.03)
    assert statistics.quantiles(around, n=10)[-1] == pytest.approx(279, rel=0.08)


@pytest.mark.parametrize("text", ["7", "3:5", "~100"])
def test_lengths_read_back(text: str) -> None:
    assert str(LengthDistribution.parse("x", text)) == text


@pytest.mark.parametrize("text", ["", "0", "5:3", "~1:2", "-4", "many", "1e3", "99999999"])
def test_invalid_lengths_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--input-tokens: "):
        LengthDistribution.parse("input-tokens", text)


# -- pieces


@given(seed=st.binary(max_size=20), short=st.integers(1, 60), longer=st.integers(0, 60))
def test_pieces_of_one_seed_are_equal_as_far_as_the_shorter_goes(seed: bytes, short: int, longer: int) -> None:
    a, b = TextPiece(seed, short), TextPiece(seed, short + longer)
    assert b.ids(5, 900)[:short] == a.ids(5, 900)
    assert len(b.ids(5, 900)) == short + longer
    assert b.text().split(" ")[:short] == a.text().split(" ")
    assert all(5 <= i < 900 for i in a.ids(5, 900))


def test_pieces_are_the_same_in_every_process() -> None:
    assert len(set(WORDS)) == len(WORDS) == 256
    assert all(word.isascii() and word.isalpha() and word.islower() for word in WORDS)
    assert TextPiece(b"golden", 4).ids(1000, 30000) == [4401, 26679, 15305, 26676]
    assert TextPiece(b"golden", 4).text() == "one home again at"


# -- synthetic sessions


def synthetic(**fields: object) -> SyntheticWorkload:
    return SyntheticWorkload(
        **{"seed": 3, "input_tokens": LengthDistribution(20, 40), "output_tokens": LengthDistribution(5, 9), **fields}
    )  # type: ignore[arg-type]


def test_equal_seeds_give_equal_sessions() -> None:
    assert first_turns(synthetic(turns=LengthDistribution(1, 4), pause_s=2.0).sessions(), 30) == first_turns(
        synthetic(turns=LengthDistribution(1, 4), pause_s=2.0).sessions(), 30
    )


def test_unrelated_sessions_share_no_prefix() -> None:
    a, b = first_turns(synthetic().sessions(), 2)
    other = first_turns(synthetic(seed=4).sessions(), 1)[0]
    warm = first_turns(synthetic(prefix_tokens=50).sessions("warm-up"), 1)[0]
    cold = first_turns(synthetic(prefix_tokens=50).sessions(), 1)[0]
    assert shared(ids_of(a), ids_of(b)) == shared(ids_of(a), ids_of(other)) == shared(ids_of(warm), ids_of(cold)) == 0


def test_users_of_one_system_prompt_share_it_and_no_more() -> None:
    sessions = first_turns(synthetic(prefix_tokens=50, prefixes=3).sessions(), 60)
    heads = {tuple(ids_of(s)[:50]) for s in sessions}
    assert len(heads) == 3
    for s in sessions[1:]:
        assert shared(ids_of(sessions[0]), ids_of(s)) in (0, 50)
    assert sessions[0].turns[0].messages[0].role == "system"


def test_a_turn_begins_with_the_whole_conversation_before_it() -> None:
    (session,) = first_turns(synthetic(turns=LengthDistribution(4, 4), prefix_tokens=10, pause_s=1.0).sessions(), 1)
    roles = [message.role for message in session.turns[-1].messages]
    assert roles == ["system", *["user", "assistant"] * 3, "user"]
    for earlier, later in pairwise(session.turns):
        assert later.messages[: len(earlier.messages)] == earlier.messages
        answer = later.messages[len(earlier.messages)]
        assert (answer.answer, answer.tokens) == (session.turns.index(earlier), earlier.output_tokens)
    assert session.turns[0].pause_s == 0
    assert all(turn.pause_s > 0 for turn in session.turns[1:])
    assert session.turns[1].prompt_tokens == len(ids_of(session, 1))


# -- recorded sessions

NAMES = [synthetic_block_hash("n", i) for i in range(6)]


def recorded(*requests: tuple[float, int, int, str, bytes]) -> WorkloadTrace:
    """Each request: (arrival, prompt length, output length, digits of block names, partial block)."""
    synthetic = [
        WorkloadRequest(at, n, out, tuple(NAMES[int(c)] for c in chain), tail) for at, n, out, chain, tail in requests
    ]
    return WorkloadTrace("t", MOONCAKE_BLOCK_SIZE, tuple(synthetic))


TRACE = recorded(
    (0.0, 1124, 80, "01", b"tail"),
    (0.5, 1124, 80, "01", b"tail"),
    (1.0, 1624, 40, "012", b"other"),
    (1.5, 100, 1, "", b""),
    (2.0, 100, 1, "", b""),
)


@pytest.mark.parametrize("scale", [1.0, 1 / 32, 0.1])
def test_a_trace_shares_the_blocks_that_its_ids_share(scale: float) -> None:
    sessions = first_turns(TraceWorkload(TRACE, 0, scale).sessions(), 9)
    block, tail = max(1, round(512 * scale)), max(1, round(100 * scale))
    a, twin, longer, lone, last = (ids_of(s) for s in sessions)
    assert len(a) == 2 * block + tail
    assert a == twin
    assert shared(a, longer) == 2 * block
    assert len(longer) == 3 * block + max(1, round(88 * scale))
    assert shared(a, lone) == shared(lone, last) == 0
    assert sessions[0].turns[0].output_tokens == max(1, round(80 * scale))
    assert sessions[3].turns[0].output_tokens == 1


def test_another_seed_replays_the_same_shape_with_other_content() -> None:
    a, b = (first_turns(TraceWorkload(TRACE, seed, 1.0).sessions(), 9) for seed in (0, 1))
    assert [len(ids_of(s)) for s in a] == [len(ids_of(s)) for s in b]
    assert all(shared(ids_of(x), ids_of(y)) == 0 for x, y in zip(a, b, strict=True))


def test_long_requests_are_left_out_and_long_answers_cut() -> None:
    kept = fit_trace(TRACE, length_scale=0.1, max_input=120, max_output=5)
    assert [r.prompt_len for r in kept.requests] == [1124, 1124, 100, 100]
    assert [r.arrival_s for r in kept.requests] == [0.0, 0.5, 1.5, 2.0]
    assert max(s.turns[0].output_tokens for s in TraceWorkload(kept, 0, 0.1).sessions()) == 5
    with pytest.raises(ConfigError, match="no request of t is that short"):
        fit_trace(TRACE, length_scale=1.0, max_input=99, max_output=None)


def test_mooncake_tails_are_shared_by_name(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    line = '{{"timestamp": {}, "input_length": 700, "output_length": 5, "hash_ids": [1, {}]}}\n'
    path.write_text(line.format(0, 2) + line.format(5, 2) + line.format(9, 3))
    a, twin, other = (ids_of(s) for s in TraceWorkload(load_trace(path), 0, 1.0).sessions())
    assert a == twin
    assert (len(a), shared(a, other)) == (700, 512)


# -- settings


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({}, "--rate, --users or --trace is needed"),
        ({"rate": "1", "users": "2"}, "--rate and --users exclude each other"),
        ({"rate": "0"}, "--rate must be a number above 0"),
        ({"rate": "fast"}, "--rate must be a number above 0"),
        ({"rate": "nan"}, "--rate must be a number above 0"),
        ({"users": "1.5"}, "--users must be whole"),
        ({"rate": "1", "arrivals": "weekly"}, "--arrivals must be one of poisson, constant, gamma, onoff"),
        ({"users": "1", "arrivals": "poisson"}, "--arrivals: needs --rate"),
        ({"rate": "1", "burstiness": "2"}, "--burstiness: needs --arrivals gamma"),
        ({"rate": "1", "on_s": "2"}, "--on-s: needs --arrivals onoff"),
        ({"rate": "1", "speed": "2"}, "--speed: replays a trace's own times"),
        ({"rate": "1", "length_scale": "2"}, "--length-scale: needs --trace"),
        ({"rate": "1", "ramp_s": "2"}, "--ramp-s: needs --users"),
        ({"rate": "1", "think_s": "2"}, "--think-s: needs --users, or --turns"),
        ({"trace": "t.csv", "turns": "2"}, "--turns: does not apply to a trace"),
        ({"rate": "1", "prefixes": "2"}, "--prefixes: needs --prefix-tokens"),
        ({"rate": "1", "prompts": "ids"}, "--prompts: conversations are text"),
        ({"rate": "1", "protocol": "smtp"}, "--protocol must be one of rest, grpc"),
        ({"rate": "1", "url": "ftp://x"}, "--url: 'ftp://x' is not an http"),
        ({"rate": "1", "protocol": "grpc", "url": "https://x"}, "--url: gRPC needs HOST:PORT"),
        ({"rate": "1", "protocol": "grpc", "url": "x:1", "stream": False}, "--no-stream: the gRPC API always streams"),
        ({"rate": "1", "slo": "ttft=1"}, "--slo: '1' is not a time"),
        ({"rate": "1", "slo": "joy=1s"}, "--slo: 'joy=1s' is not one of ttft=TIME, itl=TIME"),
        ({"rate": "1", "slo": "itl=1s", "stream": False}, "--slo: without streams only e2e"),
        ({"rate": "1", "attainment": "0.9"}, "--attainment needs --slo"),
        ({"rate": "1", "vocab": "9:3"}, "--vocab: '9:3' is not a range"),
        ({"rate": "1", "api_key": ["a\nb"]}, "--api-key: a key is printable ASCII"),
        ({"rate": "1", "abort_share": "2"}, "--abort-share must be a number from 0 to 1"),
    ],
)
def test_errors_name_the_flag(flags: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        LoadConfig.of(flags)
    assert refused.value.message.startswith(says)


def test_defaults() -> None:
    config = LoadConfig.of({"rate": "2", "url": "http://host:1/v1/", "model": None, "api_key": []})
    assert (config.url, config.duration_s, config.form, config.protocol) == ("http://host:1", 30.0, "text", "rest")
    assert LoadConfig.of({"rate": "2", "endpoint": "completions"}).form == "ids"
    assert LoadConfig.of({"users": "2", "requests": "9"}).duration_s is None
    assert LoadConfig.of({"trace": "t.csv", "protocol": "grpc", "url": "grpc://h:1"}).url == "h:1"


def test_a_report_names_the_settings_and_no_secrets() -> None:
    described = LoadConfig.of({"rate": "2", "api_key": ["secret"], "slo": "ttft=2s", "input_tokens": "~9"}).described()
    assert "secret" not in repr(described)
    assert (described["api_keys"], described["slo"], described["input_tokens"]) == (1, {"ttft": 2.0}, "~9")
    assert set(described) == set(LoadConfig.__dataclass_fields__)
    assert replace(LoadConfig.of({"rate": "2"}), seed=5).described()["seed"] == 5


def test_rates_of_a_sweep_rise() -> None:
    assert parse_rates("0.5,1,2") == (0.5, 1.0, 2.0)
    for text in ("", "x", "2,1", "1,1", "0,1", "-1", "nan"):
        with pytest.raises(ConfigError, match=r"^--rates: "):
            parse_rates(text)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"compared": ("a", "b"), "rate": "3"}, "--rate cannot be combined with --compare"),
        ({"compared": ("a", "b"), "tolerance": "x"}, "--tolerance: 'x' is not a share"),
        ({"compared": ("a", "b"), "tolerance": "120%"}, "--tolerance: '120%' is not a share"),
        ({"compared": ("nowhere.json", "b")}, "nowhere.json cannot be read"),
        ({"tolerance": "5%", "rate": "1"}, "--tolerance needs --compare"),
        ({"max_failed": "-1", "rate": "1"}, "--max-failed: '-1' is not a share"),
        ({"rates": "1,2", "rate": "1", "slo": "e2e=1s"}, "--rate and --rates exclude each other"),
        ({"rates": "1,2"}, "--rates needs --slo"),
        ({"trace": "nowhere.csv"}, "--trace: there is no file nowhere.csv"),
    ],
)
def test_contradictory_flags_are_refused_before_the_run(flags: dict[str, Any], says: str) -> None:
    nothing = dict.fromkeys(("out", "html", "rates", "compared", "tolerance", "max_failed"))
    with pytest.raises(ConfigError) as refused:
        run(**{**nothing, "quiet": True, "as_json": False, **flags})
    assert refused.value.message.startswith(says)
