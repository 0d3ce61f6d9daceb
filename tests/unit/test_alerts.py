"""Every alert fires in its scenario and not on a healthy day. promtool, if installed, must agree.

A scenario is an installation (one gateway, one prefill pod and one decode pod with GPUs) that is healthy for BASE
minutes and then has a failure. tests/integration/test_metric_names.py checks that the series exist.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from common.telemetry import LATENCY_BUCKETS
from tests.rigs.alert_rules import RULES, Rule
from tests.rigs.promql import Series, evaluate

PROMTOOL = os.environ.get("PROMTOOL") or shutil.which("promtool")

STEP_S = 60.0
DAY_S = 86_400.0
BASE, BAD = 40, 25  #: Minutes before and after the failure.
GATEWAY, PREFILL, DECODE, PLANNER = "gateway:8000", "prefill:9400", "decode:9400", "planner:9500"

Shape = Callable[[int], float | None]  #: Returns the value of a series in a minute; None while it is absent.
World = dict[str, Shape]  #: By series, as PromQL writes it.


def level(value: float, later: float | None = None) -> Shape:
    """A gauge with another value after the failure."""
    return lambda minute: value if later is None or minute <= BASE else later


def counter(per_minute: float, later: float | None = None) -> Shape:
    """A counter with another rate after the failure."""
    rate = per_minute if later is None else later
    return lambda minute: per_minute * min(minute, BASE) + rate * max(0, minute - BASE)


def gone(value: float) -> Shape:
    """A series that ends at the failure."""
    return lambda minute: value if minute <= BASE else None


def appears(value: float) -> Shape:
    """A series that begins at the failure."""
    return lambda minute: None if minute <= BASE else value


def tried_again(minute: int) -> float | None:
    """A pair of pods that is down: it is forgotten after a minute, and a request tries it again a minute later."""
    if minute <= BASE:
        return 1.0
    return 0.0 if minute % 2 else None


def series(name: str, instance: str, **labels: str) -> str:
    pairs = ",".join(f'{key}="{value}"' for key, value in {"instance": instance, **labels}.items())
    return f"{name}{{{pairs}}}"


def histogram(
    name: str, instance: str, value: float, per_minute: float, later: float | None = None, **labels: str
) -> World:
    """A histogram in which each observation is `value`, and after the failure `later`."""
    later = value if later is None else later
    world: World = {}
    for bound in (*LATENCY_BUCKETS, float("inf")):
        le = "+Inf" if bound == float("inf") else f"{bound:g}"
        rates = (per_minute * (value <= bound), per_minute * (later <= bound))
        world[series(f"{name}_bucket", instance, le=le, **labels)] = counter(*rates)
    world[series(f"{name}_count", instance, **labels)] = counter(per_minute)
    world[series(f"{name}_sum", instance, **labels)] = counter(per_minute * value, per_minute * later)
    return world


def healthy() -> World:
    world: World = {
        series("baton_requests_total", GATEWAY, endpoint="chat", outcome="ok"): counter(600),
        series("baton_requests_total", GATEWAY, endpoint="chat", outcome="InvalidRequest"): counter(60),
        series("baton_requests_total", GATEWAY, endpoint="chat", outcome="Unavailable"): counter(1),
        series("baton_requests_running", GATEWAY): level(50),
        series("baton_gateway_ready", GATEWAY): level(1),
        series("baton_admission_waiting", GATEWAY, model="m"): level(5),
        series("baton_rejections_total", GATEWAY, by="decode"): counter(3),
        series("baton_output_tokens_total", GATEWAY): counter(60_000),
        series("baton_prefix_lookup_tokens_total", GATEWAY): counter(100_000),
        series("baton_prefix_repeated_tokens_total", GATEWAY): counter(50_000),
        series("baton_prefix_hit_tokens_actual_total", GATEWAY): counter(40_000),
        series("baton_kv_index_mode", GATEWAY, mode="redis"): level(1),
        series("baton_limits_without_redis_total", GATEWAY): counter(0),
        series("baton_pod_breakers", GATEWAY, model="m", role="decode", state="closed"): level(1),
        series("baton_planner_decided_timestamp_seconds", PLANNER): lambda m: 60.0 * m,
        series("baton_planner_failures_total", PLANNER, action="add"): level(0),
        series("baton_retries_total", GATEWAY, kind="Unavailable"): counter(2),
        series("baton_resumed_sequences_total", GATEWAY, outcome="failed"): level(0),
        series("baton_aborts_total", GATEWAY, reason="disconnect"): counter(20),
        **{
            series("baton_pods", GATEWAY, model="m", role=role, state=state): level(state == "ready")
            for role in ("prefill", "decode")
            for state in ("ready", "starting", "connecting", "draining", "gone", "refused")
        },
        **histogram("baton_routing_seconds", GATEWAY, 0.001, 600, step="plan"),
        **histogram("baton_ttft_seconds", GATEWAY, 0.4, 600),
        **histogram("baton_itl_seconds", GATEWAY, 0.02, 60_000),
        **histogram("baton_exposed_hand_off_seconds", PREFILL, 0.004, 600),
        series("baton_transfer_bytes_total", PREFILL, transport="cuda_ipc"): counter(1e9),
        series("baton_transfers_failed_total", PREFILL): counter(0.5),
        series("baton_pair_usable", PREFILL, peer="decode-0"): level(1),
        series("baton_speculation_acceptance_length_sum", DECODE, proposer="ngram"): counter(250),
        series("baton_speculation_acceptance_length_count", DECODE, proposer="ngram"): counter(100),
        series("baton_speculation_failures_total", DECODE, proposer="ngram"): level(0),
        series("baton_speculation_useless", DECODE, proposer="ngram"): level(0),
    }
    for pod in (PREFILL, DECODE):
        blocks = {"free": 300, "cached": 300, "leased": 390, "quarantined": 10}
        world |= {series("baton_kv_blocks", pod, state=state): level(count) for state, count in blocks.items()}
        world |= {
            series("baton_sequences", pod, state="waiting"): level(2),
            series("baton_kv_pool_intact", pod): level(1),
            series("baton_pod_info", pod, role=pod.partition(":")[0], model="m", version="1.0"): level(1),
            series("baton_index_registered", pod): level(1),
            series("baton_host_tier_working", pod): level(1),
            series("baton_disk_tier_working", pod): level(1),
            series("baton_shared_tier_working", pod): level(1),
            series("baton_damaged_kv_total", pod, where="transfer"): level(0),
            series("baton_pulls_total", pod, outcome="done", reason="all"): counter(20),
            series("baton_pulls_total", pod, outcome="failed", reason="Unavailable"): counter(1),
            series("baton_transfer_messages_dropped_total", pod, reason="unauthenticated"): counter(0),
            series("baton_transfer_messages_dropped_total", pod, reason="old_generation"): counter(10),
            series("baton_preemptions_total", pod): counter(1),
            series("baton_out_of_memory_total", pod): level(0),
            series("baton_gpu_utilization_ratio", pod): level(0.8),
            series("baton_gpu_memory_used_bytes", pod): level(72e9),
            series("baton_gpu_memory_total_bytes", pod): level(80e9),
        }
    for process in (GATEWAY, PREFILL, DECODE):
        world |= {
            series("baton_host_memory_used_bytes", process): level(4e9),
            series("baton_host_memory_limit_bytes", process): level(8e9),
            series("baton_process_start_time_seconds", process): level(1.7e9),
            series("baton_process_cpu_seconds_total", process): counter(30 if process == GATEWAY else 600),
            series("baton_process_open_fds", process): level(200),
            series("baton_process_max_fds", process): level(1024),
            series("baton_certificate_expiry_timestamp_seconds", process, use="cluster"): level(90 * DAY_S),
        }
    return world


def kv(instance: str, **counts: int) -> World:
    """Counts of 1,000 blocks after the failure."""
    before = {"free": 300, "cached": 300, "leased": 390, "quarantined": 10}
    return {
        series("baton_kv_blocks", instance, state=state): level(before[state], counts.get(state, 0)) for state in before
    }


def pod_states(role: str, state: str) -> World:
    """A ready pod has another state after the failure."""
    return {
        series("baton_pods", GATEWAY, model="m", role=role, state="ready"): level(1, 0),
        series("baton_pods", GATEWAY, model="m", role=role, state=state): level(0, 1),
    }


# What goes wrong, by the alert that has to say so.
SCENARIOS: dict[str, World] = {
    "BatonTtftHigh": histogram("baton_ttft_seconds", GATEWAY, 0.4, 600, later=3.0),
    "BatonItlHigh": histogram("baton_itl_seconds", GATEWAY, 0.02, 60_000, later=0.12),
    "BatonHandOffExposed": histogram("baton_exposed_hand_off_seconds", PREFILL, 0.004, 600, later=0.9),
    "BatonQueueLong": {series("baton_sequences", DECODE, state="waiting"): level(2, 99)},
    "BatonQueueGrowing": {
        series("baton_admission_waiting", GATEWAY, model="m"): lambda m: 5 if m <= BASE else 5 + 3 * (m - BASE)
    },
    "BatonRejections": {series("baton_rejections_total", GATEWAY, by="decode"): counter(3, 60)},
    "BatonThroughputLow": {series("baton_output_tokens_total", GATEWAY): counter(60_000, 20_000)},
    "BatonGpuBusy": {series("baton_gpu_utilization_ratio", PREFILL): level(0.8, 0.99)},
    "BatonKvMemoryHigh": kv(DECODE, free=40, cached=40, leased=910, quarantined=10),
    "BatonHostMemoryHigh": {series("baton_host_memory_used_bytes", DECODE): level(4e9, 7.5e9)},
    "BatonGpuMemoryHigh": {series("baton_gpu_memory_used_bytes", DECODE): level(72e9, 78e9)},
    "BatonOutOfMemory": {series("baton_out_of_memory_total", PREFILL): level(0, 1)},
    "BatonPreemptions": {series("baton_preemptions_total", DECODE): counter(1, 30)},
    "BatonQuarantine": kv(DECODE, free=300, cached=300, leased=340, quarantined=60),
    "BatonPoolBroken": {series("baton_kv_pool_intact", DECODE): level(1, 0)},
    "BatonErrors": {
        series("baton_requests_total", GATEWAY, endpoint="chat", outcome="TransferFailed"): counter(0, 20),
    },
    "BatonRetries": {series("baton_retries_total", GATEWAY, kind="Unavailable"): counter(2, 60)},
    "BatonResumesFail": {series("baton_resumed_sequences_total", GATEWAY, outcome="failed"): level(0, 1)},
    "BatonPodsRefused": pod_states("decode", "refused"),
    "BatonPodsGone": pod_states("decode", "gone"),
    "BatonPodsAbsent": {
        series("baton_pod_info", pod, role=pod.partition(":")[0], model="m", version="1.0"): gone(1)
        for pod in (PREFILL, DECODE)
    },
    "BatonVersionsDiffer": {
        series("baton_pod_info", DECODE, role="decode", model="m", version="1.0"): gone(1),
        series("baton_pod_info", DECODE, role="decode", model="m", version="1.1"): appears(1),
    },
    "BatonPullsFail": {
        series("baton_pulls_total", PREFILL, outcome="failed", reason="Unavailable"): counter(1, 15),
    },
    "BatonKvDamaged": {series("baton_damaged_kv_total", DECODE, where="transfer"): level(0, 1)},
    "BatonHostTierBroken": {series("baton_host_tier_working", DECODE): level(1, 0)},
    "BatonDiskTierBroken": {series("baton_disk_tier_working", DECODE): level(0)},
    "BatonSharedTierBroken": {series("baton_shared_tier_working", DECODE): level(0)},
    "BatonUnauthenticated": {
        series("baton_transfer_messages_dropped_total", DECODE, reason="unauthenticated"): counter(0, 30)
    },
    "BatonCertificateExpires": {
        series("baton_certificate_expiry_timestamp_seconds", GATEWAY, use="cluster"): level(90 * DAY_S, 5 * DAY_S)
    },
    "BatonPodFails": {
        series("baton_pod_breakers", GATEWAY, model="m", role="decode", state="closed"): level(1, 0),
        series("baton_pod_breakers", GATEWAY, model="m", role="decode", state="open"): appears(1),
    },
    "BatonPodSlow": {series("baton_slow_pods", GATEWAY, model="m", role="prefill"): appears(1)},
    "BatonPlannerBlind": {
        series("baton_planner_decided_timestamp_seconds", PLANNER): lambda m: 60.0 * min(m, BASE),
    },
    "BatonPlannerFails": {series("baton_planner_failures_total", PLANNER, action="add"): level(0, 1)},
    "BatonPodNotInIndex": {series("baton_index_registered", DECODE): level(1, 0)},
    "BatonLimitsWithoutRedis": {series("baton_limits_without_redis_total", GATEWAY): counter(0, 60)},
    "BatonRoutingSlow": histogram("baton_routing_seconds", GATEWAY, 0.001, 600, later=0.09, step="plan"),
    "BatonGatewayCpuHigh": {series("baton_process_cpu_seconds_total", GATEWAY): counter(30, 59)},
    "BatonFilesHigh": {series("baton_process_open_fds", GATEWAY): level(200, 1000)},
    "BatonClientsLeave": {series("baton_aborts_total", GATEWAY, reason="disconnect"): counter(20, 200)},
    "BatonStuck": {series("baton_stuck_loops_total", DECODE, loop="engine"): level(0, 1)},
    "BatonTransfersFail": {series("baton_transfers_failed_total", PREFILL): counter(0.5, 12)},
    "BatonPairDown": {series("baton_pair_usable", PREFILL, peer="decode-0"): tried_again},
    "BatonTcpFallback": {series("baton_transfer_bytes_total", PREFILL, transport="tcp"): counter(0, 1e6)},
    "BatonIndexAway": {series("baton_kv_index_mode", GATEWAY, mode="redis"): level(1, 0)},
    "BatonNoPods": {series("baton_gateway_ready", GATEWAY): level(1, 0)},
    "BatonRestarts": {
        series("baton_process_start_time_seconds", DECODE): lambda m: 1.7e9 if m <= BASE else 1.7e9 + m // 3
    },
    "BatonGatewayAbsent": {series("baton_requests_running", GATEWAY): gone(50)},
    "BatonHitRateLow": {series("baton_prefix_hit_tokens_actual_total", GATEWAY): counter(40_000, 10_000)},
    "BatonSpeculationUseless": {
        series("baton_speculation_acceptance_length_sum", DECODE, proposer="ngram"): counter(250, 100)
    },
    "BatonSpeculationFails": {series("baton_speculation_failures_total", DECODE, proposer="ngram"): counter(0, 12)},
}
# What else is bound to fire: the same trouble from another side.
ALONG = {"BatonQueueGrowing": {"BatonQueueLong"}}

# Also true, and no reason to wake anybody.
HARMLESS: dict[str, World] = {
    "tcp without a gpu": {
        series("baton_transfer_bytes_total", "cpu:9400", transport="tcp"): counter(1e6),
    },
    "no redis at all": {series("baton_kv_index_mode", GATEWAY, mode="redis"): level(0)},
    "limits without any redis": {
        series("baton_kv_index_mode", GATEWAY, mode="redis"): level(0),
        series("baton_limits_without_redis_total", GATEWAY): counter(60),
    },
    "a rolling upgrade": {
        series("baton_pod_info", DECODE, role="decode", model="m", version="1.1"): lambda m: (
            1 if BASE < m < BASE + 15 else None
        ),
        series("baton_pods", GATEWAY, model="m", role="decode", state="gone"): lambda m: float(m == BASE + 5),
        series("baton_index_registered", DECODE): lambda m: float(m != BASE + 5),
        series("baton_retries_total", GATEWAY, kind="Unavailable"): lambda m: 2.0 * m + 10 * (m > BASE),
    },
    "messages of former generations": {
        series("baton_transfer_messages_dropped_total", DECODE, reason="old_generation"): counter(10, 300)
    },
    "clients err": {
        series("baton_requests_total", GATEWAY, endpoint="chat", outcome="InvalidRequest"): counter(60, 600)
    },
    "a quiet night": {
        series("baton_output_tokens_total", GATEWAY): counter(60_000, 5_000),
        series("baton_requests_running", GATEWAY): level(50, 4),
    },
    "prompts that never repeat": {
        series("baton_prefix_repeated_tokens_total", GATEWAY): counter(50_000, 100),
        series("baton_prefix_hit_tokens_actual_total", GATEWAY): counter(40_000, 0),
    },
    "one restart": {
        series("baton_process_start_time_seconds", DECODE): level(1.7e9, 1.8e9),
        series("baton_preemptions_total", DECODE): lambda m: float(m if m <= BASE else m - BASE),
    },
    "a pod that is replaced by another one": {
        series("baton_pair_usable", PREFILL, peer="decode-0"): lambda m: None if m > BASE + 1 else float(m <= BASE),
        series("baton_pair_usable", PREFILL, peer="decode-1"): appears(1),
    },
    "no drafts": {
        series("baton_speculation_acceptance_length_sum", DECODE, proposer="ngram"): counter(250, 0),
        series("baton_speculation_acceptance_length_count", DECODE, proposer="ngram"): counter(100, 0),
    },
}


def fired(world: World, *, only: str | None = None) -> set[str]:
    """Returns the alerts that fire in the world. With `only` this alert alone is evaluated, in every minute."""
    stored, since, firing = Series(), {}, set()
    rules = [rule for rule in Rule.all() if rule.records or only in (None, rule.name)]
    parsed = {text: promql_parser.parse(text) for text in world}
    labels = {
        text: frozenset((m.name, m.value) for m in selector.matchers.matchers) for text, selector in parsed.items()
    }
    for minute in range(BASE + BAD + 1):
        at = minute * STEP_S
        for text, shape in world.items():
            if (value := shape(minute)) is not None:
                stored.add(parsed[text].name, labels[text], at, value)
        for rule in rules:
            if not rule.records and only is None and minute % 5:
                continue  # all alerts at once: not every minute
            found = evaluate(rule.expr, stored, at)
            assert isinstance(found, dict)
            if rule.records:
                for kept, value in found.items():
                    stored.add(rule.name, kept, at, value)
                continue
            for kept in [key for key in since if key[0] == rule.name and key[1] not in found]:
                del since[kept]
            for kept in found:
                if at - since.setdefault((rule.name, kept), at) >= rule.for_s:
                    firing.add(rule.name)
    return firing


@pytest.mark.parametrize("alert", [rule.name for rule in Rule.all() if not rule.records])
def test_an_alert_fires(alert: str) -> None:
    """A new alert needs a scenario in SCENARIOS."""
    assert fired(healthy() | SCENARIOS[alert], only=alert) == {alert}


@pytest.mark.parametrize("alert", ["BatonTtftHigh", "BatonKvMemoryHigh", "BatonErrors", "BatonQueueGrowing"])
def test_nothing_else_fires(alert: str) -> None:
    assert fired(healthy() | SCENARIOS[alert]) - ALONG.get(alert, set()) <= {alert}


def test_a_healthy_day_fires_no_alert() -> None:
    assert fired(healthy()) == set()


@pytest.mark.parametrize("what", HARMLESS)
def test_harmless_situations_fire_no_alert(what: str) -> None:
    assert fired(healthy() | HARMLESS[what]) == set()


def values(shape: Shape) -> str:
    """Returns a series in the format of promtool's tests."""
    points = [shape(minute) for minute in range(BASE + BAD + 1)]
    return " ".join("_" if point is None else repr(float(point)) for point in points)


def promtool(tmp_path: Path, tests: list[Mapping[str, Any]]) -> str:
    """Returns the errors of `promtool test rules`; "" without errors."""
    assert PROMTOOL is not None
    rules = tmp_path / "rules.json"
    rules.write_text(json.dumps({"groups": yaml.safe_load(RULES.read_text())["spec"]["groups"]}))
    test = {"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "test.json").write_text(json.dumps(test))
    checked = subprocess.run([PROMTOOL, "check", "rules", rules], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    run = subprocess.run(
        [PROMTOOL, "test", "rules", tmp_path / "test.json"], capture_output=True, text=True, check=False
    )
    return "" if run.returncode == 0 else run.stdout + run.stderr


def as_test(world: World, firing: str | None) -> dict[str, Any]:
    """One test for promtool. promtool compares whole alerts, so the test evaluates the series ALERTS."""
    everything = 'count(ALERTS{alertstate="firing"}) or vector(0)'
    one = f'count(ALERTS{{alertstate="firing", alertname="{firing}"}}) > bool 0 or vector(0)'
    samples = [{"labels": "{}", "value": 0 if firing is None else 1}]
    return {
        "name": firing or "quiet",
        "interval": "1m",
        "input_series": [{"series": text, "values": values(shape)} for text, shape in world.items()],
        "promql_expr_test": [
            {
                "expr": everything if firing is None else one,
                "eval_time": f"{BASE + BAD}m",
                "exp_samples": samples,
            }
        ],
    }


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian: prometheus; or $PROMTOOL)")
def test_promtool_agrees(tmp_path: Path) -> None:
    over_again = {"BatonOutOfMemory", "BatonResumesFail", "BatonKvDamaged"}  # by the end, when promtool is asked
    tests = [as_test(healthy(), None)]
    tests += [as_test(healthy() | world, None) for world in HARMLESS.values()]
    tests += [as_test(healthy() | world, alert) for alert, world in SCENARIOS.items() if alert not in over_again]
    assert promtool(tmp_path, tests) == ""
    wrong = promtool(tmp_path, [as_test(healthy() | SCENARIOS["BatonTtftHigh"], None)])
    assert "FAILED" in wrong
