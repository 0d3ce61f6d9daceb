"""The grammars of a pod's requests."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from common.errors import InvalidRequest
from common.grammar.compiler import CompiledGrammar, GrammarSource
from common.grammar.prover import GrammarProver, prover_of
from common.types import ValidRequest
from engine.engine import Engine


class PodGrammars:
    """Compiles grammars in threads, after another process has proven that they compile in time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def prepare(self) -> None:
        """Makes the tables of tokens and starts the process that proves grammars, before the first grammar needs them.

        Making the tables holds the interpreter's lock for 0.5 s. Later that would delay the tokens of other requests.
        """
        with suppress(InvalidRequest):  # A model without a fitting tokenizer refuses grammars
            self._engine.grammar_compiler.tokenizer.for_matchers()
            self._prover.start()

    async def compile(self, request: ValidRequest) -> CompiledGrammar | None:
        """Returns the request's grammar, compiled; None without one. Raises InvalidRequest with the field."""
        grammars, grammar = self._engine.grammar_compiler, request.grammar
        if grammar is None:
            return None
        if (compiled := grammars.get_cached(grammar)) is not None:
            return compiled
        await asyncio.wrap_future(self._prover.submit(GrammarSource("text", grammar.text, grammar.field)))
        return await asyncio.to_thread(grammars.compile, grammar, proven=True)

    @property
    def _prover(self) -> GrammarProver:
        tokens = self._engine.grammar_compiler.tokenizer
        return prover_of(tokens.model_dir, tokens.eos_ids, tokens.vocab_size)
