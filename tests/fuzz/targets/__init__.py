"""The fuzz targets, one per surface that gets bytes from outside."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

from tests.fuzz.target import FuzzTarget


@dataclass(frozen=True, slots=True)
class TargetEntry:
    """Where a target is. A process imports only the target that it runs."""

    module: str
    cls: str
    share: int  #: Part of all inputs, relative to the shares of the other targets.

    def make(self) -> FuzzTarget:
        target: FuzzTarget = getattr(import_module(f"tests.fuzz.targets.{self.module}"), self.cls)()
        return target


#: By name. The slowest first, so that the processes end at about the same time.
TARGETS = {
    "http-bodies": TargetEntry("gateway", "HttpBodies", 4),
    "http-bytes": TargetEntry("gateway", "HttpBytes", 4),
    "inference": TargetEntry("gateway", "Inference", 2),
    "pods": TargetEntry("pods", "Pods", 1),
    "templates": TargetEntry("templates", "Templates", 5),
    "tokenizer-files": TargetEntry("model_files", "TokenizerFiles", 3),
    "model-files": TargetEntry("model_files", "ModelFiles", 2),
    "expert-files": TargetEntry("model_files", "ExpertFiles", 2),
    "quantized-files": TargetEntry("quantized_files", "QuantizedFiles", 2),
    "tool-calls": TargetEntry("answers", "ToolCalls", 20),
    "records": TargetEntry("files", "Records", 4),
    "settings": TargetEntry("files", "SettingsFiles", 5),
    "notifications": TargetEntry("pods", "Notifications", 10),
    "reasoning": TargetEntry("answers", "Reasoning", 12),
    "wire": TargetEntry("wire", "Wire", 28),
}


def target_entry(name: str) -> TargetEntry:
    """Returns the entry of a name in TARGETS, or of MODULE:CLASS."""
    module, _, cls = name.partition(":")
    return TargetEntry(module, cls, 1) if cls else TARGETS[name]
