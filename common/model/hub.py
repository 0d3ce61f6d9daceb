"""Models of the Hugging Face hub by name, through `huggingface_hub`.

    OWNER/NAME[@REVISION]  ->  commit  ->  snapshot directory in the library's cache, with the files that Baton needs

The library brings the cache (HF_HOME), the token (HF_TOKEN, `hf auth login`), mirrors (HF_ENDPOINT), offline mode
(HF_HUB_OFFLINE), progress bars, and downloads that continue after a lost connection. The library is imported when a
name is resolved. A commit in the cache needs no network. Without a connection a branch or tag means the commit of the
last download.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import logging
import os
import re
import resource
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import BatonError, ConfigError, describe, first_line

#: Configuration, tokenizer, chat templates and pooling of a model; patterns of `fnmatch`.
FILES = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("chat_template.jinja", "additional_chat_templates/*.jinja", "modules.json", "*_Pooling/config.json"),
    *("hf_quant_config.json", "quantize_config.json", "quant_config.json"),
)
#: Weights: one file, or an index of several. The first form that a repository has is used.
WEIGHTS = (
    ("model.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
REPORT_S = 10.0  #: Time between two lines about a download, where no progress bar is shown.
_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)(?:@([^\s@]+))?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_log = logging.getLogger(__name__)

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class HubName:
    """A model of the hub: OWNER/NAME, and a branch, a tag or a commit."""

    repo: str
    revision: str = "main"

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}"

    @property
    def pinned(self) -> bool:
        """The revision is a commit, which never changes."""
        return _COMMIT.fullmatch(self.revision) is not None


def hub_name(model: str) -> HubName | None:
    """Returns the model of the hub that a value of --model names; None for a path. An existing path wins."""
    match = _NAME.fullmatch(model)
    if match is None or Path(model).exists():
        return None
    return HubName(match[1], match[2] or "main")


def pin(name: HubName) -> HubName:
    """Returns the model with its commit in place of a branch or tag. Raises ConfigError (field "model")."""
    return name if name.pinned else HubName(name.repo, _config_file(name).parent.name)


def snapshot_dir(name: HubName) -> Path:
    """Returns the directory of a pinned model in the cache; it may not exist yet."""
    from huggingface_hub import constants

    folder = f"models--{name.repo.replace('/', '--')}"
    return (Path(constants.HF_HUB_CACHE).expanduser() / folder / "snapshots" / name.revision).resolve()


def snapshot_name(directory: Path) -> str | None:
    """Returns OWNER/NAME of a snapshot directory in the library's cache, None for any other directory."""
    repo = directory.parent.parent.name
    if directory.parent.name != "snapshots" or not repo.startswith("models--"):
        return None
    return "/".join(repo.split("--")[1:])


def fetch(
    name: HubName, *, weights: bool, check: Callable[[Path], object] = lambda _: None, say: Say = _log.info
) -> Path:
    """Returns the model's directory with all files that Baton needs; downloads the missing ones.

    Args:
        check: Called with the directory before weights are downloaded; an error that it raises ends the download.
        say: Called with a line when a download starts, and about its progress if stderr is not a terminal.

    Raises ConfigError (field "model") with one line for each cause: no access, no such model, revision or file, no
    network, no space.
    """
    directory = _config_file(name).parent
    name = HubName(name.repo, directory.name)
    indexes = [index for _, index in WEIGHTS] if weights else []
    _snapshot(name, (*FILES, *indexes))
    if weights and not any(_complete(directory, *form) for form in WEIGHTS):
        check(directory)
        _fetch_weights(name, directory, say)
    return directory


def remove_partial_files() -> None:
    """Removes the incomplete files of this process's downloads (Linux). Call it before the process ends at once.

    The process cannot open files afterwards.
    """
    with contextlib.suppress(OSError):
        status = Path("/proc/self/status").read_text("ascii")
        slots = int(status.partition("FDSize:")[2].split()[0])
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))  # a download thread would open its next file
        _remove_open_partial_files(slots)
        time.sleep(0.05)  # a file that was created before the limit has its descriptor now
        _remove_open_partial_files(slots)


def _remove_open_partial_files(slots: int) -> None:
    for descriptor in range(2 * slots):  # the table can have grown once since its size was read
        with contextlib.suppress(OSError):
            if (file := os.readlink(f"/proc/self/fd/{descriptor}")).endswith(".incomplete"):
                os.unlink(file)


def weight_files(directory: Path, single: str, index: str) -> list[str]:
    """Returns the names of the files of one form of weights: those in the index if there is one, else `single`."""
    try:
        if not (directory / index).is_file():
            return [single]
        names = sorted(set(json.loads((directory / index).read_text("utf-8"))["weight_map"].values()))
        if all(isinstance(name, str) and re.fullmatch(r"[\w.-]+", name) for name in names):
            return names
        problem = "a name is not a file beside the index"
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        problem = describe(error)
    raise ConfigError(f"{directory / index} is not an index of weights: {problem}", field="model")


def _complete(directory: Path, single: str, index: str) -> bool:
    return all((directory / file).is_file() for file in weight_files(directory, single, index))


def _config_file(name: HubName) -> Path:
    """Returns config.json in the snapshot directory, after a download if the revision has a new commit."""
    from huggingface_hub import hf_hub_download

    with _explained(name):
        return Path(hf_hub_download(name.repo, "config.json", revision=name.revision))


def _snapshot(name: HubName, patterns: Sequence[str]) -> None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()  # a log would get a line for each state of a bar
    with _explained(name):
        snapshot_download(name.repo, revision=name.revision, allow_patterns=list(patterns))


def _fetch_weights(name: HubName, directory: Path, say: Say) -> None:
    from huggingface_hub import HfApi

    for form in WEIGHTS:
        missing = [file for file in weight_files(directory, *form) if not (directory / file).is_file()]
        with _explained(name):
            found: Any = HfApi().get_paths_info(name.repo, missing, revision=name.revision)
        sizes = {entry.path: int(entry.size) for entry in found if hasattr(entry, "size")}
        if set(missing) <= set(sizes):
            break
        if sizes or (directory / form[1]).is_file():
            lost = min(set(missing) - set(sizes))
            raise ConfigError(f"model {name.repo}: {form[1]} names {lost}, which the repository lacks", field="model")
    else:
        problem = "its repository has neither model.safetensors nor pytorch_model.bin, nor an index of several files"
        raise ConfigError(f"model {name.repo} has no weights that Baton reads: {problem}", field="model")
    cache, size = directory.parent.parent, sum(sizes.values())
    _require_space(name, cache, size)
    files = f"{len(missing)} files" if len(missing) > 1 else missing[0]
    say(f"downloading {name.repo} at {name.revision[:12]}: {files}, {_bytes(size)}, into {cache}")
    with _reported(cache / "blobs", size, say):
        _snapshot(name, [glob.escape(file) for file in missing])


def _require_space(name: HubName, cache: Path, size: int) -> None:
    """Raises ConfigError if the disk has no room for a download of `size` bytes."""
    free = shutil.disk_usage(cache).free
    if size > free:
        needed = f"needs {_bytes(size)} more in {cache}, where {_bytes(free)} are free"
        raise ConfigError(f"model {name.repo} {needed}: make room, or set HF_HOME to a larger disk", field="model")


@contextlib.contextmanager
def _reported(blobs: Path, size: int, say: Say) -> Iterator[None]:
    """Reports every REPORT_S how much of a download is done, and at its end how fast it was.

    On a terminal huggingface_hub shows progress bars, so only the end is reported.
    """
    ended, began, before = threading.Event(), time.monotonic(), _bytes_in(blobs)

    def line(done: int) -> str:
        seconds = max(time.monotonic() - began, 1e-3)
        return f"downloaded {_bytes(done)} of {_bytes(size)} in {seconds:.0f} s, {_bytes(int(done / seconds))}/s"

    def report() -> None:
        while not ended.wait(REPORT_S):
            say(line(_bytes_in(blobs) - before))

    thread = threading.Thread(target=report, name="download-report", daemon=True)
    if not sys.stderr.isatty():
        thread.start()
    try:
        yield
        say(line(size))
    finally:
        ended.set()
        if thread.ident is not None:
            thread.join()


def _bytes_in(blobs: Path) -> int:
    total = 0
    for file in blobs.glob("*"):
        with contextlib.suppress(OSError):  # a finished file is renamed
            total += file.stat().st_size
    return total


def _bytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


@contextlib.contextmanager
def _explained(name: HubName) -> Iterator[None]:
    """Turns the library's errors into one line that says what to do. Raises ConfigError (field "model")."""
    try:
        yield
    except BatonError:
        raise
    except Exception as error:  # errors of the HTTP client too, and the library has changed its HTTP client before
        raise ConfigError(_explanation(name, error), field="model") from error


def _explanation(name: HubName, error: Exception) -> str:
    from huggingface_hub import constants, errors, get_token

    repo, hub, page = name.repo, constants.ENDPOINT, f"{constants.ENDPOINT}/{name.repo}"
    log_in = "log in with `hf auth login`, or set HF_TOKEN"
    status = getattr(getattr(error, "response", None), "status_code", None)
    here = f"there is no directory {str(name).removesuffix('@main')!r} here"
    match error:
        case errors.GatedRepoError():
            then = log_in if get_token() is None else "wait until your account has access"
            return f"model {repo} is gated: accept its terms at {page}, then {then}"
        case errors.RepositoryNotFoundError():
            private = f"; if it is private, {log_in}" if get_token() is None else ", or your token has no access to it"
            return f"{here}, and {hub} has no model {repo}{private}"
        case errors.RevisionNotFoundError():
            return f"model {repo} has no branch, tag or commit {name.revision!r}: see {page}/commits/main"
        case errors.LocalEntryNotFoundError():
            return f"{here}, and {_not_cached(name, error)}"
        case errors.EntryNotFoundError():
            return f"model {repo} has no config.json at {name.revision}, so Baton cannot load it: see {page}"
        case errors.HFValidationError():
            return f"{here}, and {repo!r} is not the name of a model of the hub: {first_line(error)}"
        case errors.OfflineModeIsEnabled():
            return f"{here}, and {_not_cached(name, errors.LocalEntryNotFoundError(''))}"
    if status == 401:
        return f"{hub} rejects the token (401) for model {repo}: {log_in} again, or unset HF_TOKEN"
    if status == 403:
        return f"{hub} refuses access to model {repo} (403): the token needs the permission to read it, see {page}"
    if status == 429:
        return f"{hub} answers 429 (too many requests) for model {repo}: wait some minutes, or {log_in}"
    if status is not None:
        return f"{hub} answers {status} for model {repo}: try again later"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space is left in {constants.HF_HUB_CACHE} for model {repo}: make room, or set HF_HOME elsewhere"
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
        return f"the cache {constants.HF_HUB_CACHE} cannot be written ({error.strerror}): set HF_HOME elsewhere"
    broken = f"the download of model {repo} from {hub} broke off: {describe(error)}"
    return f"{broken}; the next start, or `baton pull {repo}`, continues after the files that are complete"


def _not_cached(name: HubName, error: Exception) -> str:
    """Returns the message for a model that is not in the cache and cannot be downloaded now."""
    from huggingface_hub import constants

    missing = f"model {name} is not, or not completely, in the cache {constants.HF_HUB_CACHE}"
    if constants.HF_HUB_OFFLINE:
        return f"{missing}, and HF_HUB_OFFLINE is set: run `baton pull {name.repo}` with a network first"
    cause = error.__cause__ or error
    return f"{missing}, and {constants.ENDPOINT} cannot be reached: {describe(cause)}"
