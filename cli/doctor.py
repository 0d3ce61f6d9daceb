"""The checks of `baton doctor`: each one examines one requirement of Baton on this machine, or running pods.

Checks that need torch or NIXL run in child processes, so a library that crashes at import becomes a finding.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import grpc
from rich.console import Console
from rich.markup import escape

from cli.demo.model import INSTALL, PACKAGE
from cli.fit.cards import parse_card, write_card
from cli.gpus import Gpu, visible_gpus
from cli.probes import redis_trouble
from cli.stack.valkey import EmbeddedValkey
from common.errors import BatonError, ConfigError, Unavailable, describe
from common.model.directory import SMOLLM2, cache_dir, smollm2_dir
from common.pb import transfer_pb2, transfer_pb2_grpc
from common.redis.url import RedisUrl
from common.rpc import connection_hint, open_channel
from common.telemetry import memory_usage
from common.tls import TlsFiles
from common.wire import role_from_pb
from prefix_index.reader import IndexReader

CHILD_DEADLINE_S = 90.0
INFO_S = 3.0
MIN_FREE_MEMORY = 3 << 30  # two pods with the demo model and small pools
MIN_FREE_DISK = 2 << 30
SLOW = ("tcp", "unknown")  # Transports that are too slow between processes of one host.


class Level(enum.StrEnum):
    """How bad a finding is."""

    OK = "ok"
    WARN = "warn"  # Works, but slower or only in part.
    MISSING = "missing"  # `baton serve` cannot work.


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    what: str
    level: Level
    detail: str
    fix: str = ""  # Advice for the user; empty if there is nothing to do.


async def report(redis_url: str | None, pods: Sequence[str] = (), tls: TlsFiles | None = None) -> int:
    """Prints each finding as its check ends, and a verdict. Returns 1 if a requirement is missing, else 0.

    `pods` are addresses of running pods that the index may not have.
    """
    console = Console(highlight=False)
    marks = {Level.OK: "[green]ok     [/]", Level.WARN: "[yellow]warning[/]", Level.MISSING: "[red]missing[/]"}
    missing, warned = list[str](), list[str]()
    async for finding in _findings(redis_url, pods, tls):
        found = {Level.MISSING: missing, Level.WARN: warned}.get(finding.level)
        if found is not None:
            found.append(finding.what)
        mark, what, detail = marks[finding.level], escape(finding.what), escape(finding.detail)
        console.print(f"{mark}  [bold]{what}[/]: {detail}", soft_wrap=True)
        if finding.fix:
            console.print(f"         {escape(finding.fix)}", soft_wrap=True)
    console.print(f"\n{escape(verdict(missing, warned))}", style="bold", soft_wrap=True)
    return int(bool(missing))


async def measure_card(path: Path) -> str:
    """Measures this machine's first GPU, or its CPUs, in a child process and writes the file of `baton plan fit`.

    Returns a line with the rates. Raises Unavailable if the child fails, ConfigError if the file cannot be written.
    """
    reply = await _json_of_child([sys.executable, "-P", "-m", "engine.card_rates"], {})
    if isinstance(reply, str):
        raise Unavailable(f"the rates of this machine cannot be measured: {reply}")
    card = parse_card(reply, "the measurement")
    try:
        write_card(card, path)
    except OSError as e:
        raise ConfigError(f"--measure: {path} cannot be written: {describe(e)}", field="measure") from e
    fp8 = f", {card.fp8_flop_s / 1e12:.4g} TFLOP/s in FP8" if card.fp8_flop_s else ""
    return (
        f"{card.name}: {card.memory_bytes / 2**30:.1f} GiB, copies {card.copy_byte_s / 1e9:.4g} GB/s, products "
        f"{card.product_flop_s / 1e12:.4g} TFLOP/s{fp8}, attention {card.attention_flop_s / 1e12:.4g} TFLOP/s: {path}"
    )


def verdict(missing: Sequence[str], warned: Sequence[str]) -> str:
    """One sentence about all findings; `missing` and `warned` name those that are not in order."""
    number = "1 warning" if len(warned) == 1 else f"{len(warned)} warnings"
    slower = f"; {number}: {', '.join(warned)}" if warned else ""
    if missing:
        return f"Baton cannot run here before this is mended: {', '.join(missing)}{slower}."
    return f"Baton can run here{slower}." if warned else "Baton can run here."


async def _findings(redis_url: str | None, pods: Sequence[str], tls: TlsFiles | None) -> AsyncIterator[Finding]:
    """Runs all checks, one after another."""
    gpus = await asyncio.to_thread(visible_gpus)
    # On a machine with GPUs, NIXL needs UCX with support for their memory.
    tcp = {"UCX_TLS": "tcp,cuda_copy" if gpus else "tcp", "UCX_NET_DEVICES": "lo"}
    yield _check_python()
    yield await _check_torch()
    yield await _check_nixl("NIXL, default transport", {})
    yield await _check_nixl("NIXL, TCP", tcp, without=Level.WARN)
    yield await _check_redis(redis_url)
    yield _check_memory()
    yield _check_model()
    yield await _check_ranks(gpus)
    for findings in (_check_pairs(gpus), check_pods(redis_url, pods, tls)):
        async for finding in findings:
            yield finding


def _check_python() -> Finding:
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    detail = f"{platform.python_version()} on {platform.system()} {platform.machine()}, {cores} cores"
    if sys.platform != "linux":
        return Finding("Python", Level.WARN, detail, "NIXL has wheels for Linux only: pods need Linux")
    return Finding("Python", Level.OK, detail)


_TORCH_PROBE = """
import json, torch
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
gpus = [torch.cuda.get_device_properties(i) for i in range(count)]
print(json.dumps({"version": torch.__version__, "threads": torch.get_num_threads(), "cuda": torch.version.cuda,
                  "gpus": [f"{g.name}, {g.total_memory / 2**30:.0f} GiB" for g in gpus]}))
"""


async def _check_torch() -> Finding:
    reply = await _json_of_child([sys.executable, "-c", _TORCH_PROBE], {})
    if isinstance(reply, str):
        return Finding("torch", Level.MISSING, reply, "pip install torch (for CPUs: a CPU build of it)")
    head = f"torch {reply['version']}"
    if reply["gpus"]:
        return Finding("torch", Level.OK, f"{head}, CUDA {reply['cuda']}: " + "; ".join(map(str, reply["gpus"])))
    if reply["cuda"]:
        detail = f"{head} built for CUDA {reply['cuda']}, but no GPU is visible: CPU with {reply['threads']} threads"
        return Finding("torch", Level.WARN, detail, "check nvidia-smi and CUDA_VISIBLE_DEVICES if there should be one")
    return Finding("torch", Level.OK, f"{head}, CPU with {reply['threads']} threads")


async def _check_nixl(what: str, env: dict[str, str], *, without: Level = Level.MISSING) -> Finding:
    """Transfers data between two processes. `without` is the level of a failure."""
    reply = await _json_of_child([sys.executable, "-P", "-m", "kv_transfer.probe"], env)
    if isinstance(reply, str):
        return Finding(what, without, reply, "pip install nixl-cu13 (Linux x86_64 or aarch64); check UCX_* variables")
    detail = f"{reply['mebibytes']} MiB between two processes, intact, {_carried(reply)}"
    if not env and reply["transport"] in SLOW:
        fix = "slow on one host: unset UCX_TLS; containers need SYS_PTRACE, or one IPC and PID namespace with /dev/shm"
        return Finding(what, Level.WARN, detail, fix)
    return Finding(what, Level.OK, detail)


def _carried(reply: dict[str, Any]) -> str:
    return f"{reply['gigabytes_per_s']:.1f} GB/s, by {reply['transport']} ({reply['source']})"


async def _check_ranks(gpus: Sequence[Gpu]) -> Finding:
    """Sums vectors over all GPUs, or over two processes, as the ranks of a tensor-parallel pod do."""
    several = len(gpus) > 1
    devices = [f"cuda:{index}" for index in range(len(gpus))] if several else []
    what = f"ranks, {len(gpus)} GPUs" if several else "ranks, 2 processes"
    reply = await _json_of_child([sys.executable, "-P", "-m", "engine.parallel.link_probe", *devices], {})
    if isinstance(reply, str):
        fix = (
            "nvidia-smi topo -m shows the links; NCCL_DEBUG=WARN says more"
            if several
            else "127.0.0.1 must be reachable"
        )
        return Finding(what, Level.WARN, f"tensor parallelism does not work: {reply}", fix)
    detail = f"sums intact, {reply['small_us']:.0f} us for 16 KiB, {reply['gigabytes_per_s']:.1f} GB/s"
    if several and not reply["direct"]:
        return Finding(
            what, Level.WARN, f"{detail}, no direct access", "GPUs without NVLink or PCIe peer access are slow"
        )
    return Finding(what, Level.OK, detail)


async def _check_pairs(gpus: Sequence[Gpu]) -> AsyncIterator[Finding]:
    """Transfers data from every GPU to every other one; pairs without a common GPU run at the same time.

    A single GPU transfers to itself, as a prefill and a decode pod that share it would.
    """
    for together in _rounds(len(gpus)):
        for finding in await asyncio.gather(*(_check_pair(gpus, *pair) for pair in together)):
            yield finding


async def _check_pair(gpus: Sequence[Gpu], source: int, target: int) -> Finding:
    what = f"NIXL, GPU {source} -> GPU {target}"
    argv = [sys.executable, "-P", "-m", "kv_transfer.probe", gpus[source].id, gpus[target].id]
    reply = await _json_of_child(argv, {})
    if isinstance(reply, str):
        return Finding(what, Level.MISSING, reply, "check nvidia-smi topo -m, and that no UCX_TLS is set")
    if reply["transport"] in SLOW:
        fix = "pods refuse this without --allow-tcp; unset UCX_TLS, and PYTORCH_CUDA_ALLOC_CONF=expandable_segments"
        return Finding(what, Level.WARN, _carried(reply), fix)
    return Finding(what, Level.OK, _carried(reply))


def _rounds(count: int) -> list[list[tuple[int, int]]]:
    """All ordered pairs of `count` GPUs; the pairs of one round have no GPU in common (circle method)."""
    if count < 2:
        return [[(0, 0)]] * count
    ring = [*range(count), *([-1] if count % 2 else [])]
    rounds: list[list[tuple[int, int]]] = []
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        pairs = [(a, b) for a, b in zip(ring[:half], reversed(ring[half:]), strict=True) if min(a, b) >= 0]
        rounds += [pairs, [(b, a) for a, b in pairs]]
        ring.insert(1, ring.pop())
    return rounds


async def _check_redis(url: str | None) -> Finding:
    if url is not None:
        problem, shown = await redis_trouble(url), RedisUrl.parse(url)
        if problem is None:
            return Finding("Redis", Level.OK, f"{shown} answers")
        fix = "pods and gateways work without it, but routing ignores prefix caches"
        return Finding("Redis", Level.WARN, f"{shown}: {problem}", fix)
    with tempfile.TemporaryDirectory(prefix="baton-doctor-") as directory:
        valkey = EmbeddedValkey(0, Path(directory))
        try:
            problem = await redis_trouble(await valkey.start())
        except BatonError as error:
            return Finding("Redis", Level.WARN, error.message, "pip install 'baton-serving[demo]', or pass --redis URL")
        finally:
            await valkey.stop()
    if problem is not None:
        return Finding("Redis", Level.WARN, f"the embedded Valkey does not answer: {problem}", "pass --redis URL")
    return Finding("Redis", Level.OK, "the embedded Valkey starts and answers")


def _check_memory() -> Finding:
    memory = memory_usage()
    cache = cache_dir()
    existing = next(p for p in (cache, *cache.parents) if p.exists())
    disk = shutil.disk_usage(existing).free
    free, limit = memory.free / 2**30, memory.limit / 2**30
    detail = f"{free:.1f} of {limit:.1f} GiB memory free, {disk / 2**30:.0f} GiB disk for {cache}"
    if memory.free < MIN_FREE_MEMORY:
        return Finding("memory", Level.WARN, detail, f"the demo needs about {MIN_FREE_MEMORY >> 30} GiB")
    if disk < MIN_FREE_DISK:
        return Finding("memory", Level.WARN, detail, "set BATON_CACHE to a directory on a larger disk")
    return Finding("memory", Level.OK, detail)


def _check_model() -> Finding:
    what = f"model {SMOLLM2}"
    if (smollm2_dir() / "config.json").is_file():
        return Finding(what, Level.OK, f"ready in {smollm2_dir()}")
    if absent := [name for name in (PACKAGE, "gguf", "transformers", "accelerate") if not _installed(name)]:
        fix = f"{INSTALL}, or serve a model of your own"
        return Finding(what, Level.WARN, f"not installed: {', '.join(absent)}", fix)
    return Finding(what, Level.OK, "installed; it is converted at its first use (about a minute)")


def _installed(name: str) -> bool:
    with contextlib.suppress(PackageNotFoundError):
        return bool(version(name))
    return False


async def _json_of_child(argv: Sequence[str], env: dict[str, str]) -> dict[str, Any] | str:
    """The JSON object on the last line of a child's output, or a sentence with the reason why there is none."""
    child = await asyncio.create_subprocess_exec(
        *argv, env={**os.environ, **env}, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        out, err = await asyncio.wait_for(child.communicate(), CHILD_DEADLINE_S)
    except TimeoutError:
        child.kill()
        await child.wait()
        return f"no answer within {CHILD_DEADLINE_S:.0f} s"
    lines = (out if child.returncode == 0 else err).decode(errors="replace").strip().splitlines()
    if child.returncode != 0 or not lines:
        return lines[-1] if lines else f"ended with exit code {child.returncode}"
    try:
        reply: dict[str, Any] = json.loads(lines[-1])
    except ValueError:
        return f"unreadable answer: {lines[-1][:100]}"
    return reply


async def check_pods(
    redis_url: str | None, addresses: Sequence[str], tls: TlsFiles | None = None
) -> AsyncIterator[Finding]:
    """Checks the pods at these addresses and the pods in the index, concurrently."""
    known = dict.fromkeys([*addresses, *await _indexed(redis_url)])
    answers = await asyncio.gather(*(_ask(address, tls) for address in known))
    for address, answer in zip(known, answers, strict=True):
        for finding in _of_pod(address, answer):
            yield finding


async def _indexed(redis_url: str | None) -> list[str]:
    """Addresses of the pods in the index; none if it does not answer, which another check reports."""
    if redis_url is None:
        return []
    reader = IndexReader(redis_url)
    try:
        return [status.record.address for status in await reader.pods()]
    except BatonError:
        return []
    finally:
        await reader.close()


async def _ask(address: str, tls: TlsFiles | None) -> transfer_pb2.InfoResponse | str:
    async with open_channel(address, tls) as peer:
        try:
            return await transfer_pb2_grpc.TransferStub(peer).Info(transfer_pb2.InfoRequest(), timeout=INFO_S)
        except grpc.aio.AioRpcError as e:
            details = e.details() or e.code().name
            return connection_hint(details) or details


def _of_pod(address: str, answer: transfer_pb2.InfoResponse | str) -> list[Finding]:
    if isinstance(answer, str):
        return [Finding(f"pod at {address}", Level.WARN, answer, "the pod has ended, or this machine cannot reach it")]
    state = "ready" if answer.ready else "draining" if answer.draining else "not ready"
    level = Level.OK if answer.ready else Level.WARN
    pod = Finding(f"pod {answer.pod}", level, f"{role_from_pb(answer.role)} at {address}, {state}")
    return [pod, *(_of_pair(answer.pod, pair) for pair in answer.pairs)]


def _of_pair(pod: str, pair: transfer_pb2.Pair) -> Finding:
    """The finding about the KV that a pod sent to another one."""
    what = f"{pod} -> {pair.pod}"
    if pair.trouble:
        return Finding(
            what, Level.WARN, f"no KV can be sent: {pair.trouble}", "the network between the pods, their logs"
        )
    by = f"{pair.transport} ({pair.transport_source})" if pair.transport else "not connected"
    if pair.HasField("block_age_s"):
        by += f", last block {pair.block_age_s:.0f} s ago"
    detail = f"{by}, {pair.gb_s:.2f} GB/s, {pair.transfers} hand-offs and {pair.pulls} pulls of {pair.blocks} blocks"
    if pair.transfers:
        detail += f", {1e3 * pair.exposed_s / pair.transfers:.1f} ms exposed each"
    if pair.failures:
        return Finding(what, Level.WARN, f"{detail}, {pair.failures} failed", "the pods' logs say why")
    return Finding(what, Level.OK, detail)
