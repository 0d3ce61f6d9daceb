"""Baton for Python users: the engine without services, its parameters and its errors.

    from baton import LLM, SamplingParams

    llm = LLM("smollm2")
    print(llm.generate(["The capital of France is"], SamplingParams(temperature=0.0, max_tokens=8))[0].text)

A name is imported from its module when it is first used, so `import baton` loads neither torch nor the engine. No other
package of Baton imports this one.
"""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from common.errors import BatonError, ConfigError, InvalidRequest
    from common.types import FinishReason, Grammar, SamplingParams, Token, TokenLogprob
    from engine.config import EngineConfig
    from engine.llm import LLM, Completion

__all__ = [
    "LLM",
    "BatonError",
    "Completion",
    "ConfigError",
    "EngineConfig",
    "FinishReason",
    "Grammar",
    "InvalidRequest",
    "SamplingParams",
    "Token",
    "TokenLogprob",
]

__version__: str  #: Version of the installed distribution.

if not TYPE_CHECKING:  # with it, type checkers would accept every name

    def __getattr__(name: str) -> Any:
        """Imports a public name at its first use; AttributeError for other names."""
        if name == "__version__":
            return metadata.version("baton-serving")
        if name in ("BatonError", "ConfigError", "InvalidRequest"):
            from common import errors as module
        elif name in ("LLM", "Completion"):
            from engine import llm as module
        elif name == "EngineConfig":
            from engine import config as module
        elif name in __all__:
            from common import types as module
        else:
            raise AttributeError(f"module 'baton' has no attribute {name!r}; it has {', '.join(__all__)}")
        value = globals()[name] = getattr(module, name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
