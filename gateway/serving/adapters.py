"""Changes of the LoRA adapters of a model: a name gets an adapter on all of its pods or on none.

    check   every pod reads the adapter without a name     -> a refusal by any pod ends here; the names are as before
    commit  every pod gives it the name, under one version -> the name means the new adapter

Between the two, requests get the adapter that has the name. A pod that fails in the second step loads the adapter for
its first request that needs it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace

from common.errors import AdapterNotLoaded, BatonError, ConfigError, InvalidRequest, ObjectNotFound, Unavailable
from common.types import AdapterEntry
from gateway.pods.adapters import LOAD_TIMEOUT_S
from gateway.pods.pod import Pod
from gateway.serving.models import ServedModel

_log = logging.getLogger(__name__)


async def load_for(pod: Pod, model: ServedModel, timeout_s: float) -> None:
    """Returns once a pod has the model's adapter. Raises as AdapterLoader.load."""
    if model.adapter is not None:
        await pod.adapters.load(model.adapter, min(LOAD_TIMEOUT_S, timeout_s))


async def load_adapter(model: ServedModel, name: str, path: str) -> AdapterEntry:
    """Gives an adapter below the pods' adapter directories a name, also that of another adapter.

    Raises InvalidRequest if a pod refuses name, path or adapter, AdapterNotLoaded if a pod serves no adapters or has
    other files than the others, Unavailable if a pod does not answer. The error names the pod.
    """
    pods = _pods(model)
    asked = AdapterEntry(name, "", path=path)
    checked = await asyncio.gather(*(pod.adapters.call_load(asked) for pod in pods), return_exceptions=True)
    entries = list[AdapterEntry]()
    for pod, result in zip(pods, checked, strict=True):
        if isinstance(result, BaseException):
            raise _refusal(pod, result)
        entries.append(result)
    for pod, entry in zip(pods, entries, strict=True):
        if entry.digest != entries[0].digest:
            text = f"pods {pods[0].name} and {pod.name} have different files at {entry.path!r}"
            raise AdapterNotLoaded(text, field="lora_path")
    names = model.pod_table.adapters
    named = replace(entries[0], version=names.next_version(name))
    results = await asyncio.gather(*(pod.adapters.call_load(named) for pod in pods), return_exceptions=True)
    failed = [(pod, result) for pod, result in zip(pods, results, strict=True) if isinstance(result, BaseException)]
    for pod, error in failed:
        _log.warning("pod %s did not name the adapter %s: %s", pod.name, name, error)
    if len(failed) == len(pods):
        raise _refusal(*failed[0])
    names.update([named])
    _log.info("adapter %s of %s: %s, digest %s", name, model.name, named.path, named.digest)
    return named


async def unload_adapter(model: ServedModel, name: str) -> AdapterEntry:
    """Takes the name from its adapter on all pods. Requests that are under way finish on it.

    Raises ObjectNotFound for an unknown name. Raises Unavailable with the names of pods that do not answer; the others
    have removed the name, and this gateway too.
    """
    names = model.pod_table.adapters
    entry = names.find(name)
    if entry is None:
        raise ObjectNotFound(f"{model.name} has no adapter {name[:200]!r}", field="lora_name")
    removed = AdapterEntry(name, "", version=names.next_version(name))
    pods = [pod for pod in _pods(model) if pod.adapters.serves]
    calls = (pod.adapters.call_unload(name, removed.version) for pod in pods)
    results = await asyncio.gather(*calls, return_exceptions=True)
    names.update([removed])
    if failed := [pod.name for pod, result in zip(pods, results, strict=True) if isinstance(result, BaseException)]:
        raise Unavailable(f"these pods did not confirm the removal: {', '.join(sorted(failed))}", retry_after_s=1.0)
    _log.info("adapter %s of %s was unloaded", name, model.name)
    return entry


def _pods(model: ServedModel) -> Sequence[Pod]:
    """Returns the pods that run. Raises Unavailable if there are none."""
    pods = [pod for pod in model.pod_table.pods.values() if pod.alive and pod.info is not None and not pod.leaves]
    if not pods:
        raise Unavailable(f"no pod of {model.name} is ready", retry_after_s=1.0)
    return pods


def _refusal(pod: Pod, error: BaseException) -> BatonError:
    """Returns the error for the client, with the pod's name."""
    if not isinstance(error, BatonError):
        raise error
    text = f"pod {pod.name} refuses the adapter: {error.message}"
    if isinstance(error, InvalidRequest | ConfigError):
        return InvalidRequest(text, field=error.field if error.field in ("lora_name", "lora_path") else "lora_path")
    if isinstance(error, AdapterNotLoaded):
        return AdapterNotLoaded(text, field="lora_path")
    return Unavailable(text, retry_after_s=1.0)
