"""Runs unchanged clients against a complete stack, each in a separate virtual environment with its own command.

    python tests/clients/run.py [--venvs DIR] [NAME ...]     (or: make clients)

Lifecycle: one stack (SmolLM2, one prefill and one decode pod) -> each client: venv, install, run -> a line with name,
version and outcome -> the stack must be at rest. The exit code is the number of clients that failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from cli.demo.model import demo_model  # noqa: E402
from tests.rigs.stack.cluster import Cluster  # noqa: E402

HERE = Path(__file__).resolve().parent
TIME_LIMIT_S = 600
HUB_COMMIT = "0" * 40


@dataclass(frozen=True)
class Site:
    """The paths and the URL (ending with /v1) that a client needs."""

    url: str
    model: str
    model_dir: Path
    bin: Path
    work: Path

    @property
    def root_url(self) -> str:
        return self.url.removesuffix("/v1")


@dataclass(frozen=True)
class Client:
    """One client to run."""

    #: Packages for pip, or for npm. The report has the version of the first.
    packages: tuple[str, ...]
    #: Returns the commands to run.
    argv: Callable[[Site], list[list[str]]]
    node: bool = False  # the client runs in node, and is skipped where there is none


def _script(name: str) -> Callable[[Site], list[list[str]]]:
    return lambda site: [[str(site.bin / "python"), str(HERE / name), site.url, site.model]]


def _node(name: str) -> Callable[[Site], list[list[str]]]:
    """Runs a copy of a script beside the installed packages, because node looks for packages above the script."""

    def argv(site: Site) -> list[list[str]]:
        script = shutil.copy(HERE / "js" / name, site.bin / name)
        return [["node", str(script), site.url, site.model]]

    return argv


def _lm_eval(site: Site) -> list[list[str]]:
    """A task by log-probabilities and one by generated text, with the tokenizer of the client and of the server."""
    questions = [
        {"question": f"{a} + {b} =", "choices": [f" {a + b}", " 77"], "answer": 0} for a in (1, 2) for b in (1, 3)
    ]
    (site.work / "sums.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    data = [
        "dataset_path: json",
        f"dataset_kwargs: {{data_files: {{test: {site.work / 'sums.jsonl'}}}}}",
        *("test_split: test", 'doc_to_text: "{{question}}"'),
    ]
    choices = ["output_type: multiple_choice", 'doc_to_choice: "{{choices}}"', "doc_to_target: answer"]
    until = 'generation_kwargs: {until: ["\\n"], max_gen_toks: 8}'
    texts = ["output_type: generate_until", 'doc_to_target: "{{choices[0]}}"', until]
    for name, lines, metric in (("sums_choice", choices, "acc"), ("sums_text", texts, "exact_match")):
        lines = [f"task: {name}", *data, *lines, f"metric_list: [{{metric: {metric}}}]"]
        (site.work / f"{name}.yaml").write_text("\n".join(lines) + "\n")
    model = f"model={site.model},base_url={site.url}/completions,num_concurrent=2,max_retries=1,max_length=2048"
    tokenizers = (
        f"tokenizer_backend=huggingface,tokenizer={site.model_dir},tokenized_requests=True",
        f"tokenizer_backend=huggingface,tokenizer={site.model_dir},tokenized_requests=False",
        "tokenizer_backend=remote,tokenized_requests=True",
    )
    shared = [str(site.bin / "lm_eval"), "--model", "local-completions", "--include_path", str(site.work)]
    return [[*shared, "--tasks", "sums_choice,sums_text", "--model_args", f"{model},{t}"] for t in tokenizers]


def _guidellm(site: Site) -> list[list[str]]:
    shared = [
        *(str(site.bin / "guidellm"), "run", "--profile", "kind=concurrent,streams=2", "--disable-console-interactive"),
        *("--tokenizer", f"kind=huggingface_auto,model={site.model_dir}"),
        *("--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16"),
        *("--constraint", "kind=max_requests,count=8", "--constraint", "kind=max_errors,count=1"),
        *("--output", f"kind=json,path={site.work / 'guidellm.json'}"),
    ]
    backend = f"kind=openai_http,target={site.root_url},model={site.model}"
    kinds = ("/v1/chat/completions", "/v1/completions")
    return [[*shared, "--backend", f"{backend},request_format={kind}"] for kind in kinds]


def _aiperf(site: Site) -> list[list[str]]:
    """A synthetic load and a Mooncake trace. The tokenizer must come from a hub cache."""
    cache = site.work / "hub" / "hub" / "models--local--smol"
    (cache / "refs").mkdir(parents=True, exist_ok=True)
    (cache / "refs" / "main").write_text(HUB_COMMIT)
    snapshot = cache / "snapshots" / HUB_COMMIT
    snapshot.mkdir(parents=True, exist_ok=True)
    for file in site.model_dir.glob("*.json"):
        shutil.copy(file, snapshot / file.name)
    trace = site.work / "trace.jsonl"
    trace.write_text("".join(_trace_line(i) for i in range(6)))
    shared = [
        *(str(site.bin / "aiperf"), "profile", "--model", site.model, "--url", site.root_url, "--ui", "simple"),
        *("--endpoint-type", "chat", "--streaming", "--no-gpu-telemetry", "--extra-inputs", "ignore_eos:true"),
        *("--artifact-dir", str(site.work / "aiperf")),
    ]
    goodput = "time_to_first_token:5000 inter_token_latency:500"
    synthetic = ["--isl", "64", "--osl", "16", "--concurrency", "2", "--request-count", "8", "--goodput", goodput]
    replay = ["--input-file", str(trace), "--custom-dataset-type", "mooncake_trace", "--fixed-schedule"]
    return [
        [*shared, "--tokenizer", "local/smol", *synthetic],
        [*shared, "--tokenizer", "local/smol", *replay],
    ]


def _trace_line(number: int) -> str:
    blocks = "[0]" if number % 2 else "[0, 1]"
    length = 512 if number % 2 else 1024
    return f'{{"timestamp": {500 * number}, "input_length": {length}, "output_length": 8, "hash_ids": {blocks}}}\n'


CLIENTS = {
    "openai": Client(("openai", "pydantic"), _script("use_openai.py")),
    "anthropic": Client(("anthropic",), _script("use_anthropic.py")),
    "litellm": Client(("litellm",), _script("use_litellm.py")),
    "langchain": Client(("langchain-openai",), _script("use_langchain.py")),
    "openai-agents": Client(("openai-agents==0.24.0",), _script("use_openai_agents.py")),
    "llama-index": Client(
        ("llama-index-llms-openai-like==0.8.1", "llama-index-embeddings-openai-like"), _script("use_llama_index.py")
    ),
    "pydantic-ai": Client(("pydantic-ai-slim[openai]==2.68.0",), _script("use_pydantic_ai.py")),
    "instructor": Client(("instructor==1.17.0",), _script("use_instructor.py")),
    "haystack": Client(("haystack-ai==3.4.1",), _script("use_haystack.py")),
    "smolagents": Client(("smolagents[openai]==1.26.0",), _script("use_smolagents.py")),
    "lm-eval": Client(("lm-eval[api]==0.4.13", "transformers"), _lm_eval),
    "codex": Client(("httpx==0.28.1",), _script("use_codex.py")),
    "openai-js": Client(("openai@7.55.0",), _node("use_openai.mjs"), node=True),
    "ai-sdk": Client(
        ("ai@7.0.173", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "zod"), _node("use_ai_sdk.mjs"), node=True
    ),
    "guidellm": Client(("guidellm", "torch"), _guidellm),
    "aiperf": Client(("aiperf",), _aiperf),
}


def install(name: str, client: Client, venvs: Path) -> Path:
    """Returns the client's bin folder and creates the environment if missing. torch stays the pinned CPU build."""
    folder = venvs / name
    if client.node:
        folder.mkdir(parents=True, exist_ok=True)
        quiet = ("--no-audit", "--no-fund", "--loglevel=error")
        subprocess.run(["npm", "install", "--prefix", str(folder), *quiet, *client.packages], check=True)
        return folder
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch==")]
    limits = folder / "constraints.txt"
    limits.write_text("\n".join(pins) + "\n")
    pip = [str(python), "-m", "pip", "-qq", "--disable-pip-version-check", "install", "-c", str(limits)]
    subprocess.run([*pip, *client.packages], check=True, stderr=subprocess.DEVNULL)
    return python.parent


def version_of(client: Client, programs: Path) -> str:
    """Returns the installed version of the client's first package."""
    if client.node:
        package = client.packages[0].rpartition("@")[0]
        return str(json.loads((programs / "node_modules" / package / "package.json").read_text())["version"])
    package = re.split(r"[\[=]", client.packages[0])[0]
    code = f"from importlib.metadata import version; print(version({package!r}))"
    return subprocess.run(
        [str(programs / "python"), "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def run(name: str, site: Site) -> str:
    """Runs a client. Returns ok or the end of its output."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "HTTP_PROXY", "HTTPS_PROXY")}
    env |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(site.work / "hub"), "OPENAI_API_KEY": "none", "NO_PROXY": "*"}
    for argv in CLIENTS[name].argv(site):
        try:
            done = subprocess.run(
                argv, env=env, cwd=site.work, capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return f"took more than {TIME_LIMIT_S} s"
        (site.work / f"{name}.log").write_text(f"{argv}\n{done.stdout}\n{done.stderr}")
        if done.returncode != 0:
            return (done.stdout + done.stderr)[-3000:]
    return "ok"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(CLIENTS), metavar="NAME", help=", ".join(CLIENTS))
    parser.add_argument("--venvs", type=Path, default=ROOT / ".run" / "clients", help="where environments are kept")
    args = parser.parse_args()
    model_dir = demo_model()
    venvs = args.venvs.resolve()
    skipped = [name for name in args.names if CLIENTS[name].node and shutil.which("npm") is None]
    for name in skipped:
        print(f"{name}: skipped, because there is no node and npm on this machine", flush=True)
    programs = {name: install(name, CLIENTS[name], venvs) for name in args.names if name not in skipped}
    failed = 0
    with tempfile.TemporaryDirectory() as folder, Cluster(model_dir, Path(folder) / "logs") as cluster:
        for name in programs:
            work = Path(folder) / name
            work.mkdir()
            outcome = run(name, Site(cluster.base_url, cluster.stack.model, model_dir, programs[name], work))
            failed += outcome != "ok"
            print(f"{name} {version_of(CLIENTS[name], programs[name])}: {outcome}", flush=True)
            cluster.check_idle()
    return failed


if __name__ == "__main__":
    sys.exit(main())
