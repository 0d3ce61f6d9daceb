"""Metrics of a real gateway and a real pod: names, help texts, and the queries of alerts and dashboards."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import torch
import yaml
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as plain

from common.settings.gateway import GatewayConfig
from common.settings.pod import PodConfig
from common.telemetry import MetricDeclaration, Metrics
from common.types import Role
from fleet.planner import PlannerMetrics
from gateway.serving.gateway import Gateway
from gateway.serving.models import TextProcessor
from kv_transfer.backend.loopback import LoopbackBackend, LoopbackFabric
from pod.monitoring.gpu import GpuMonitor, GpuReading, add_gpu_metrics
from pod.runtime import PodRuntime
from tests.rigs.gateway.gateway_rig import MODEL, texts
from tests.rigs.pods.harness import tiny_llama
from tests.rigs.promql import label_names, selectors

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "k8s/components/monitoring"
AUTOSCALING = ROOT / "k8s/components/autoscaling"
PROMTOOL = os.environ.get("PROMTOOL") or shutil.which("promtool")

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
# Labels that Prometheus adds to every sample.
SCRAPED = {"instance", "job", "pod", "namespace"}
ABBREVIATED = {"s", "ms", "us", "ns", "sec", "secs", "b", "kb", "mb", "gb", "kib", "mib", "gib", "pct", "percent"}
FOREIGN_UNITS = {"milliseconds", "microseconds", "minutes", "hours", "gigabytes", "megabytes", "kilobytes", "bits"}


@pytest.fixture(scope="module")
def registries(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Metrics]:
    """Registries by service. The pod has the metrics of a GPU, a host tier and speculation."""
    torch.set_num_threads(1)

    async def made() -> dict[str, Metrics]:
        gateway = Gateway(GatewayConfig(), [TextProcessor(MODEL, *texts(smollm2_dir))], None)
        config = PodConfig(
            role=Role.PREFILL,
            model=str(tiny_llama(tmp_path_factory.mktemp("tiny"))),
            device="cpu",
            threads=1,
            kv_memory=1 << 20,
            block_size=4,
            speculation="ngram",
        )
        pod = await PodRuntime.create(config, backend=lambda _config: LoopbackBackend(LoopbackFabric()))
        add_gpu_metrics(pod.metrics.metrics, GpuMonitor(lambda: GpuReading(1, 2, 0.5)))
        planner = PlannerMetrics().base
        return {"gateway": gateway.metrics.base, "pod": pod.metrics.metrics, "planner": planner}

    return asyncio.run(made())


@pytest.fixture(scope="module")
def declared(registries: dict[str, Metrics]) -> dict[str, MetricDeclaration]:
    return {metric.name: metric for metrics in registries.values() for metric in metrics.declarations}


def test_a_scrape_has_exactly_the_declared_metrics(registries: dict[str, Metrics]) -> None:
    for metrics in registries.values():
        said = {
            family.name + ("_total" if family.type == "counter" else ""): (family.type, family.documentation)
            for family in metrics.registry.collect()
        }
        assert said == {metric.name: (metric.kind, metric.help) for metric in metrics.declarations}


def test_both_exposition_formats_can_be_parsed(registries: dict[str, Metrics]) -> None:
    for metrics in registries.values():
        assert Metrics.content_type(OPENMETRICS).startswith("application/openmetrics-text")
        modern = metrics.exposition(OPENMETRICS).decode()
        assert {family.name for family in openmetrics(modern)} == {family.name for family in metrics.registry.collect()}
        assert list(plain(metrics.exposition().decode()))


def test_a_metric_name_has_one_declaration(
    registries: dict[str, Metrics], declared: dict[str, MetricDeclaration]
) -> None:
    for metrics in registries.values():
        for metric in metrics.declarations:
            assert metric == declared[metric.name]


def test_names_are_as_promtool_wants_them(declared: dict[str, MetricDeclaration]) -> None:
    assert len(declared) > 60
    for name, metric in declared.items():
        words = name.split("_")
        assert re.fullmatch(r"baton(_[a-z0-9]+)+", name), name
        assert name.endswith("_total") == (metric.kind == "counter"), name
        assert words[-1] not in {"count", "sum", "bucket", "info"} or name == "baton_pod_info", name
        assert not ABBREVIATED & set(words), f"{name}: units are written out"
        assert not FOREIGN_UNITS & set(words), f"{name}: base units only"
        assert not {"counter", "gauge", "histogram", "summary"} & set(words), f"{name}: the type is no part of a name"
        assert len(metric.help.split()) > 2, f"{name}: {metric.help!r} helps nobody"
        assert all(re.fullmatch(r"[a-z_]+", label) and label not in ("le", "quantile") for label in metric.labels), name
        if metric.kind == "histogram":
            assert name.endswith(("_seconds", "_tokens", "_size", "_length")), f"{name}: of what?"
        if "econds" in metric.help.split(" ")[0]:
            assert "seconds" in words, name


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian: prometheus; or $PROMTOOL)")
def test_promtool_has_no_complaints(registries: dict[str, Metrics]) -> None:
    for metrics in registries.values():
        assert PROMTOOL is not None
        command = [PROMTOOL, "check", "metrics"]
        run = subprocess.run(command, input=metrics.exposition(), capture_output=True, check=False)
        assert (run.returncode, run.stdout, run.stderr) == (0, b"", b"")


# -- users of the metrics


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((MONITORING / "rules.yaml").read_text())["spec"]["groups"]
    return [rule for group in groups for rule in group["rules"]]


def recorded() -> dict[str, Any]:
    return {rule["record"]: promql_parser.parse(rule["expr"]) for rule in rules() if "record" in rule}


def panels() -> Iterator[dict[str, Any]]:
    for panel in json.loads((MONITORING / "dashboard.json").read_text())["panels"]:
        yield from [panel] if panel["type"] != "row" else panel["panels"]


def expressions() -> Iterator[tuple[str, str]]:
    """Every Prometheus query, with the file that has it."""
    for rule in rules():
        yield rule.get("alert") or rule["record"], rule["expr"]
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], target["expr"].replace("$__rate_interval", "5m").replace("$namespace", ".*")


def scaled() -> Iterator[tuple[str, str]]:
    """Queries of autoscalers: those of KEDA, and those of HorizontalPodAutoscalers through the adapter's rules."""
    for scaler in yaml.safe_load_all((AUTOSCALING / "keda/scaledobjects.yaml").read_text()):
        for trigger in scaler["spec"]["triggers"]:
            yield scaler["metadata"]["name"], trigger["metadata"]["query"]
    for name, rule in adapted().items():
        (series,) = re.findall(r'__name__="(\w+)"', rule["seriesQuery"])
        query = rule["metricsQuery"].replace("<<.Series>>", series).replace("<<.LabelMatchers>>", 'namespace="baton"')
        yield name, query.replace("<<.GroupBy>>", "pod")
        yield name, rule["seriesQuery"]


def adapted() -> dict[str, Any]:
    """The adapter's rules by the metric that they define."""
    rules = yaml.safe_load((AUTOSCALING / "hpa/prometheus-adapter.yaml").read_text())["rules"]["custom"]
    return {
        rule.get("name", {}).get("as") or re.findall(r'__name__="(\w+)"', rule["seriesQuery"])[0]: rule
        for rule in rules
    }


def test_autoscalers_query_existing_metrics(declared: dict[str, MetricDeclaration]) -> None:
    asked = list(scaled())
    assert len(asked) == 9
    for who, expr in asked:
        if expr.startswith("{"):  # a selector without a metric name
            expr = re.sub(r'^\{__name__="(\w+)",?', r"\1{", expr)
        require_known(who, expr, declared)
    named = [
        metric["pods"]["metric"]["name"]
        for scaler in yaml.safe_load_all((AUTOSCALING / "hpa/hpa.yaml").read_text())
        for metric in scaler["spec"]["metrics"]
        if metric["type"] == "Pods"
    ]
    assert set(named) == set(adapted())


def base_of(name: str, declared: dict[str, MetricDeclaration]) -> MetricDeclaration | None:
    """The metric that a series belongs to."""
    if name in declared and declared[name].kind != "histogram":
        return declared[name]
    found = declared.get(re.sub(r"_(bucket|sum|count)$", "", name))
    return found if found is not None and found.kind == "histogram" and found.name != name else None


def test_alerts_and_dashboards_query_existing_metrics(declared: dict[str, MetricDeclaration]) -> None:
    asked = list(expressions())
    assert len(asked) > 80
    for who, expr in asked:
        require_known(who, expr, declared)


def test_a_query_of_a_missing_metric_is_found(declared: dict[str, MetricDeclaration]) -> None:
    for expr in (
        "baton_nothing",
        "baton_ttft_seconds",  # a histogram has no series with its base name
        "rate(baton_requests[5m])",
        'baton_kv_blocks{kind="free"}',
        "sum by (kind) (baton_kv_blocks)",
        "baton_kv_blocks / on (role) baton_kv_block_bytes",
    ):
        with pytest.raises(AssertionError):
            require_known("somebody", expr, declared)


def require_known(who: str, expr: str, declared: dict[str, MetricDeclaration]) -> None:
    parsed = promql_parser.parse(expr)
    known = set(SCRAPED)
    for selector in selectors(parsed):
        if selector.name in recorded():
            for inside in selectors(recorded()[selector.name]):
                metric = base_of(inside.name, declared)
                assert metric is not None
                known |= {*metric.labels}
            continue
        metric = base_of(selector.name, declared)
        assert metric is not None, f"{who} asks for {selector.name}, which nobody exports"
        allowed = {*metric.labels, *SCRAPED, *(("le",) if selector.name.endswith("_bucket") else ())}
        assert {matcher.name for matcher in selector.matchers.matchers} <= allowed, f"{who}: labels of {selector.name}"
        known |= allowed
    assert label_names(parsed) <= known, f"{who} groups by a label that none of its metrics has"


def test_alerts_count_only_errors_of_the_server() -> None:
    from gateway.telemetry.metrics import SERVER_FAULT_OUTCOMES

    (rule,) = (rule for rule in rules() if rule.get("alert") == "BatonErrors")
    found = re.search(r'outcome=~"([^"]+)"', rule["expr"])
    assert found is not None
    assert set(found[1].split("|")) == SERVER_FAULT_OUTCOMES


def test_the_dashboard_file_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("make_dashboard", MONITORING / "make_dashboard.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look the module up in sys.modules
    spec.loader.exec_module(module)
    assert (MONITORING / "dashboard.json").read_text() == module.text()
    ids = [panel["id"] for panel in json.loads(module.text())["panels"]]
    assert len(set(ids)) == len(ids)


def test_the_page_of_failures_names_existing_metrics(declared: dict[str, MetricDeclaration]) -> None:
    named = set(re.findall(r"`(baton_[a-z0-9_]+)`", (ROOT / "docs/failures.md").read_text()))
    assert len(named) > 20
    assert named <= set(declared)


def test_the_operations_page_names_every_metric_and_every_alert(declared: dict[str, MetricDeclaration]) -> None:
    page = (ROOT / "docs/operations.md").read_text()
    rows = dict(re.findall(r"^\| `(baton_[a-z0-9_]+)` \| ([^|]*) \|", page, re.MULTILINE))
    assert set(rows) == set(declared)
    for name, labels in rows.items():
        assert tuple(re.findall(r"`([a-z_]+)`", labels)) == declared[name].labels, f"{name}: its labels"
    alerts = {rule["alert"] for rule in rules() if "alert" in rule}
    headings = set(re.findall(r"^#### (Baton\w+)$", page, re.MULTILINE))
    assert headings == alerts
