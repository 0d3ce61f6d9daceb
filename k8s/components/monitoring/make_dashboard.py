"""Generates dashboard.json: python k8s/components/monitoring/make_dashboard.py. A test checks that it is current."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHOSEN = 'namespace=~"$namespace"'
IN_USE = 'state=~"leased|quarantined"'
RATE = "$__rate_interval"
LOOKED_UP, ACCEPTANCE = "baton_prefix_lookup_tokens_total", "baton_speculation_acceptance_length"
COLUMNS, WIDTH, HEIGHT = 3, 8, 8  # Panels of a row, and their size on Grafana's grid of 24 columns.


@dataclass(frozen=True)
class Panel:
    """A panel of the dashboard."""

    title: str
    lines: dict[str, str]  # Legend -> PromQL.
    unit: str = "short"  # In Grafana's names.
    most: float | None = None
    stacked: bool = False
    exemplars: bool = False  # Show exemplars, which link to traces.
    about: str = ""


def named(metric: str, *matchers: str) -> str:
    """A selector of the metric in the chosen namespace."""
    return metric + "{" + ", ".join((CHOSEN, *matchers)) + "}"


def rate(metric: str, by: str = "", *matchers: str) -> str:
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate({named(metric, *matchers)}[{RATE}]))"


def total(metric: str, by: str = "", *matchers: str) -> str:
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} ({named(metric, *matchers)})"


def quantile(q: float, metric: str, by: str = "") -> str:
    grouped = f"le, {by}" if by else "le"
    return f"histogram_quantile({q}, {rate(metric + '_bucket', grouped)})"


def ratio(metric: str, other: str, by: str = "") -> str:
    return f"{rate(metric, by)} / {rate(other, by)}"


def highest(metric: str) -> str:
    return f"max by (pod) ({named(metric)})"


def percentiles(metric: str) -> dict[str, str]:
    return {f"p{round(100 * q)}": quantile(q, metric) for q in (0.5, 0.9, 0.99)}


#: Panels by heading.
ROWS: dict[str, list[Panel]] = {
    "Requests": [
        Panel("Requests per second", {"{{outcome}}": rate("baton_requests_total", "outcome")}, "reqps", stacked=True),
        Panel("Time to first token", percentiles("baton_ttft_seconds"), "s", exemplars=True),
        Panel("Time between tokens", percentiles("baton_itl_seconds"), "s"),
        Panel("Whole answers", percentiles("baton_e2e_seconds"), "s", exemplars=True),
        Panel(
            "Running and waiting",
            {
                "running": total("baton_requests_running"),
                "waiting in the gateway": total("baton_admission_waiting"),
                "waiting on pods": total("baton_sequences", "", 'state="waiting"'),
            },
        ),
        Panel(
            "Not as wished, per second",
            {
                "refused by {{by}}": rate("baton_rejections_total", "by"),
                "aborted: {{reason}}": rate("baton_aborts_total", "reason"),
                "tried again: {{kind}}": rate("baton_retries_total", "kind"),
                "pod lost in mid-answer: {{outcome}}": rate("baton_resumed_sequences_total", "outcome"),
            },
            "reqps",
        ),
        Panel(
            "Waiting time",
            {
                "gateway p99": quantile(0.99, "baton_admission_wait_seconds"),
                "prefill pod p50": quantile(0.5, "baton_queue_seconds"),
                "prefill pod p99": quantile(0.99, "baton_queue_seconds"),
            },
            "s",
        ),
        Panel("Pods", {"{{role}} {{state}}": total("baton_pods", "role, state")}, stacked=True),
        Panel(
            "Tokens by tenant, per second", {"{{tenant}} {{kind}}": rate("baton_tenant_tokens_total", "tenant, kind")}
        ),
    ],
    "Work": [
        Panel(
            "Tokens per second",
            {
                "answered": rate("baton_output_tokens_total"),
                "sampled on {{pod}}": rate("baton_generated_tokens_total", "pod"),
            },
        ),
        Panel(
            "Prompt tokens computed per second",
            {"{{reason}}": rate("baton_prompt_tokens_computed_total", "reason")},
            stacked=True,
            about="local: by decode pods; recompute: again, after a preemption.",
        ),
        Panel("Step time, median", {"{{kind}}": quantile(0.5, "baton_step_seconds", "kind")}, "s"),
        Panel("Step time, p99", {"{{kind}}": quantile(0.99, "baton_step_seconds", "kind")}, "s"),
        Panel("Sequences in a step", percentiles("baton_batch_size")),
        Panel("Prompt tokens that wait", {"{{pod}}": total("baton_queued_prompt_tokens", "pod")}),
    ],
    "KV memory and prefix cache": [
        Panel(
            "KV blocks in use",
            {
                "{{pod}}": (
                    f"sum by (pod) ({named('baton_kv_blocks', IN_USE)}) / sum by (pod) ({named('baton_kv_blocks')})"
                )
            },
            "percentunit",
            1.0,
        ),
        Panel(
            "KV memory by state",
            {
                "{{state}}": f"sum by (state) ({named('baton_kv_blocks')} * on (instance) group_left ()"
                f" {named('baton_kv_block_bytes')})"
            },
            "bytes",
            stacked=True,
        ),
        Panel(
            "Prefix hits, share of prompt tokens",
            {
                "found": ratio("baton_prefix_hit_tokens_actual_total", LOOKED_UP),
                "expected": ratio("baton_prefix_hit_tokens_predicted_total", LOOKED_UP),
                "could have been found": ratio("baton_prefix_repeated_tokens_total", LOOKED_UP),
            },
            "percentunit",
            1.0,
        ),
        Panel("Preemptions per second", {"{{pod}}": rate("baton_preemptions_total", "pod")}),
        Panel(
            "Routing",
            {
                "{{step}} p50": quantile(0.5, "baton_routing_seconds", "step"),
                "{{step}} p99": quantile(0.99, "baton_routing_seconds", "step"),
                "index look-up p99": quantile(0.99, "baton_kv_index_lookup_seconds"),
            },
            "s",
        ),
        Panel("Index mode", {"{{mode}}": total("baton_kv_index_mode", "mode")}, stacked=True),
    ],
    "Transfers": [
        Panel("KV moved, bytes per second", {"{{transport}}": rate("baton_transfer_bytes_total", "transport")}, "Bps"),
        Panel("From the first push to the commit", percentiles("baton_transfer_seconds"), "s", exemplars=True),
        Panel("Exposed hand-off time", percentiles("baton_exposed_hand_off_seconds"), "s", exemplars=True),
        Panel(
            "KV to each pod while under way, bytes per second",
            {"{{peer}}": ratio("baton_pair_bytes_total", "baton_pair_busy_seconds_total", "peer")},
            "Bps",
        ),
        Panel(
            "Pulls of prefixes per second", {"{{outcome}}: {{reason}}": rate("baton_pulls_total", "outcome, reason")}
        ),
        Panel("Hand-offs per second", {"{{transport}}": rate("baton_hand_offs_total", "transport")}),
        Panel("Under way", {"{{direction}}": total("baton_transfers_open", "direction")}),
        Panel(
            "Failed or dropped, per second",
            {
                "failed on {{pod}}": rate("baton_transfers_failed_total", "pod"),
                "dropped: {{reason}}": rate("baton_transfer_messages_dropped_total", "reason"),
            },
        ),
    ],
    "Speculation": [
        Panel(
            "Acceptance length",
            {"{{proposer}}": ratio(f"{ACCEPTANCE}_sum", f"{ACCEPTANCE}_count", "proposer")},
            about="Tokens of a sequence's step with drafts; 1.00 means that drafts are never right.",
        ),
        Panel(
            "Drafts per second",
            {"{{proposer}} {{outcome}}": rate("baton_speculation_tokens_total", "proposer, outcome")},
        ),
    ],
    "Machines": [
        Panel("GPU busy", {"{{pod}}": highest("baton_gpu_utilization_ratio")}, "percentunit", 1.0),
        Panel(
            "GPU memory in use",
            {
                "{{pod}}": f"max by (pod) ({named('baton_gpu_memory_used_bytes')}"
                f" / {named('baton_gpu_memory_total_bytes')})"
            },
            "percentunit",
            1.0,
        ),
        Panel(
            "Host memory in use",
            {
                "{{pod}}": f"max by (pod) ({named('baton_host_memory_used_bytes')}"
                f" / {named('baton_host_memory_limit_bytes')})"
            },
            "percentunit",
            1.0,
        ),
        Panel("CPU cores", {"{{pod}}": rate("baton_process_cpu_seconds_total", "pod")}),
        Panel("Resident memory", {"{{pod}}": total("baton_process_resident_memory_bytes", "pod")}, "bytes"),
        Panel(
            "Steps that ran out of memory",
            {"{{pod}}": f"sum by (pod) (increase({named('baton_out_of_memory_total')}[{RATE}]))"},
        ),
    ],
}


def panel_json(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    custom: dict[str, Any] = {"fillOpacity": 10, "showPoints": "never", "spanNulls": False}
    if panel.stacked:
        custom |= {"stacking": {"mode": "normal", "group": "A"}, "fillOpacity": 40}
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0, "custom": custom}
    if panel.most is not None:
        defaults["max"] = panel.most
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "gridPos": {"x": x, "y": y, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + i), "expr": expr, "legendFormat": legend, "exemplar": panel.exemplars}
            for i, (legend, expr) in enumerate(panel.lines.items())
        ],
    }


def dashboard() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        heading = {"id": len(panels) + 1, "type": "row", "title": title, "collapsed": False, "panels": []}
        panels.append({**heading, "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}})
        y += 1
        for i, panel in enumerate(row):
            x = WIDTH * (i % COLUMNS)
            panels.append(panel_json(panel, len(panels) + 1, x, y + HEIGHT * (i // COLUMNS)))
        y += HEIGHT * -(-len(row) // COLUMNS)
    namespaces = "label_values(baton_requests_running, namespace)"
    return {
        "title": "Baton",
        "uid": "baton",
        "tags": ["baton"],
        "schemaVersion": 39,
        "timezone": "browser",
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "graphTooltip": 1,
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"},
                {
                    "name": "namespace",
                    "type": "query",
                    "label": "Namespace",
                    "refresh": 2,
                    "definition": namespaces,
                    "query": {"query": namespaces, "refId": "namespaces"},
                    "datasource": {"type": "prometheus", "uid": "${datasource}"},
                    "includeAll": True,
                    "allValue": ".*",
                    "multi": True,
                    "current": {"text": "All", "value": "$__all"},
                },
            ]
        },
        "panels": panels,
    }


def text() -> str:
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("dashboard.json").write_text(text())
