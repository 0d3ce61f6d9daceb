"""GET /dashboard/state: pods, links, rates and percentiles."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence

from common.types import PoolCounts
from gateway.api.http.json import Json
from gateway.dashboard.history import MetricsHistory, MetricsSample, MetricsWindow, link_json, speculation_json
from gateway.pods.info import DraftCounts
from gateway.pods.pod import Pod
from gateway.serving.gateway import Gateway

_RATES = ("requests", "prompt_tokens", "output_tokens", "rejections", "retries")
_LOAD = ("queued_tokens", "running", "waiting", "reserved")
_GPU = ("utilization", "memory_used", "memory_total")


class DashboardState:
    """Makes the JSON of one gateway. It is computed only when the page asks for it."""

    def __init__(self, gateway: Gateway, history: MetricsHistory, version: str) -> None:
        self._gateway, self._history, self._version = gateway, history, version
        self._started = time.monotonic()

    def as_json(self) -> Json:
        """Returns the current state."""
        samples = self._history.samples
        now = self._history.now()
        window = MetricsWindow(samples[0] if samples else now, now)
        counts = window.end.counts
        return {
            "now": time.time(),
            "window_s": window.seconds,
            "gateway": self._gateway_json(counts),
            "models": self._models(),
            "pods": [_pod_json(pod, model, window) for model, pod in self._pods()],
            "links": [link_json(source, link) for source, link in window.links()],
            "rates": {f"{name}_per_s": window.rate(name) for name in _RATES},
            "errors": _errors(window),
            "latency": {name: window.histogram(name).as_json() for name in now.histograms},
            "cache": _cache(window),
            "speculation": _speculation(window),
            "series": _series((*samples, now)),
        }

    def _pods(self) -> list[tuple[str, Pod]]:
        pairs = [(model.name, pod) for model in self._gateway.models for pod in model.pod_table.pods.values()]
        return sorted(pairs, key=lambda pair: (pair[0], _role(pair[1]) or "", pair[1].name))

    def _gateway_json(self, counts: Mapping[str, float]) -> Json:
        gateway = self._gateway
        return {
            "id": gateway.id,
            "version": self._version,
            "uptime_s": time.monotonic() - self._started,
            "ready": gateway.ready,
            "draining": gateway.draining,
            "running": int(counts["running"]),
            "waiting": int(counts["waiting"]),
            "index_mode": gateway.metrics.current_index_mode,
        }

    def _models(self) -> list[Json]:
        models = self._gateway.models
        return [
            {
                "name": model.name,
                "aliases": [alias for alias, name in models.aliases.items() if name == model.name],
                "ready": model.pod_table.ready,
                "waiting": model.gate.waiting,
                "max_model_len": model.pod_table.limits().max_model_len if model.pod_table.ready else None,
            }
            for model in models
        ]


def _role(pod: Pod) -> str | None:
    return None if pod.info is None else pod.info.role.value


def _pod_json(pod: Pod, model: str, window: MetricsWindow) -> Json:
    info, load, activity = pod.info, None if pod.view is None else pod.view.load, pod.activity
    out: Json = {
        "name": pod.name,
        "address": pod.address,
        "model": model,
        "role": _role(pod),
        "state": pod.state,
        "reason": pod.trouble or None,
        "generation": None if info is None else info.generation,
        "heard_s": time.monotonic() - pod.last_answer_at,
        "block_size": None if info is None else info.block_size,
        "blocks": None if activity is None else _blocks(activity.blocks),
        "kv_used": None if activity is None else _used(activity.blocks),
    }
    out |= {name: getattr(load, name, None) for name in _LOAD}
    out["bookings"] = 0 if pod.view is None else len(pod.view.prefill_bookings) + len(pod.view.decode_bookings)
    out |= {"prefill_tokens_per_s": None, "generated_tokens_per_s": None, "preemptions": None}
    out |= {"speculation": None, "gpu": None}
    if info is None or activity is None or not pod.alive:
        return out
    key = info.name, info.generation
    out["prefill_tokens_per_s"] = window.pod_rate(key, "prefilled")
    out["generated_tokens_per_s"] = window.pod_rate(key, "generated")
    out["preemptions"] = window.preemptions(key)
    if (drafts := window.drafts(key)) is not None:
        out["speculation"] = speculation_json(drafts)
    if (gpu := activity.gpu) is not None:
        out["gpu"] = {name: getattr(gpu, name) for name in _GPU}
    return out


def _blocks(counts: PoolCounts) -> Json:
    by_state = {"free": counts.free, "cached": counts.cached, "leased": counts.leased}
    return {**by_state, "quarantined": counts.quarantined, "total": counts.total}


def _used(counts: PoolCounts) -> float | None:
    return (counts.leased + counts.quarantined) / counts.total if counts.total else None


def _errors(window: MetricsWindow) -> Json:
    requests, failed = window.count("requests"), window.count("failed")
    return {"requests": int(requests), "failed": int(failed), "ratio": failed / requests if requests else None}


def _cache(window: MetricsWindow) -> Json:
    hits, prompts = window.count("actual_hits"), window.count("routed_tokens")
    return {
        "hit_rate": hits / prompts if prompts else None,
        "hit_tokens": int(hits),
        "predicted_tokens": int(window.count("predicted_hits")),
        "prompt_tokens": int(prompts),
    }


def _speculation(window: MetricsWindow) -> Json | None:
    pods = [(key[0], drafts) for key in window.end.pods if (drafts := window.drafts(key)) is not None]
    if not pods:
        return None
    proposers = ",".join(sorted({drafts.proposer for _, drafts in pods}))
    counts = zip(*((drafts.chains, drafts.proposed, drafts.accepted) for _, drafts in pods), strict=True)
    chains, proposed, accepted = map(sum, counts)
    total = DraftCounts(proposers, chains, proposed, accepted, False)
    return {**speculation_json(total), "useless": [pod for pod, drafts in pods if drafts.useless]}


def _series(samples: Sequence[MetricsSample]) -> Json:
    """Returns the values of each period between two samples; `t` is the period's end."""
    windows = [MetricsWindow(start, end) for start, end in itertools.pairwise(samples)]
    ttft, itl = [w.histogram("ttft") for w in windows], [w.histogram("itl") for w in windows]
    return {
        "t": [w.end.at - samples[-1].at for w in windows],
        "requests_per_s": [w.rate("requests") for w in windows],
        "output_tokens_per_s": [w.rate("output_tokens") for w in windows],
        "ttft_p50": [shape.quantile(0.5) for shape in ttft],
        "ttft_p99": [shape.quantile(0.99) for shape in ttft],
        "itl_p50": [shape.quantile(0.5) for shape in itl],
        "itl_p99": [shape.quantile(0.99) for shape in itl],
        "hit_rate": [_cache(w)["hit_rate"] for w in windows],
        "running": [w.end.counts["running"] for w in windows],
        "waiting": [w.end.counts["waiting"] for w in windows],
        "kv_used": [w.end.kv_used() for w in windows],
    }
