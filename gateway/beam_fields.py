"""The fields of a beam search, and what cannot be asked for beside one."""

from __future__ import annotations

from collections.abc import Sequence

from common.errors import InvalidRequest
from common.types import Grammar
from gateway.beam import BeamParams
from gateway.fields import Fields

MAX_ALTERNATIVES = 20  # per token, that pods tell: one for each beam and each stop token are needed
MAX_WIDTH = 10
MAX_LENGTH_PENALTY = 10

# What would change scores or say more than a search knows, and the value that asks for nothing. How tokens are drawn
# (temperature, top_k, top_p, min_p, seed) is without effect, since none is drawn.
_REFUSED: dict[str, object] = {
    "stream": False,
    "stop": [],
    "echo": False,
    "prompt_logprobs": None,
    "repetition_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logit_bias": {},
    "allowed_token_ids": None,
    "bad_words": [],
}


def parse_beams(fields: Fields, width: int, width_field: str) -> BeamParams | None:
    """None where no beam search is asked for. Raises InvalidRequest that names the field."""
    wanted = fields.boolean("use_beam_search") or False
    penalty = fields.number("length_penalty", -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
    early = fields.raw("early_stopping")
    if early is None:
        early = False
    if not (isinstance(early, bool) or early == "never"):
        raise InvalidRequest('early_stopping must be true, false or "never"', field="early_stopping")
    if not wanted:
        if penalty not in (None, 1.0):
            raise InvalidRequest("length_penalty needs use_beam_search to be true", field="length_penalty")
        if early is not False:
            raise InvalidRequest("early_stopping needs use_beam_search to be true", field="early_stopping")
        return None
    for name, neutral in _REFUSED.items():
        value = fields.raw(name)
        if value is not None and value != neutral:
            raise InvalidRequest(f"{name} cannot stand beside use_beam_search", field=name)
    if width > MAX_WIDTH:
        raise InvalidRequest(f"a beam search has at most {MAX_WIDTH} beams, not {width}", field=width_field)
    return BeamParams(width, 1.0 if penalty is None else penalty, early)


def refuse_beside_beams(beams: BeamParams, grammar: Grammar | None, stops: Sequence[int]) -> None:
    """Raises InvalidRequest for what only the whole request tells. stops: the model's own too."""
    if grammar is not None:
        raise InvalidRequest(
            f"use_beam_search cannot follow a grammar, as {grammar.field} wants", field="use_beam_search"
        )
    if beams.width + len(stops) > MAX_ALTERNATIVES:
        text = f"{beams.width} beams and {len(stops)} stop tokens are more than {MAX_ALTERNATIVES} together"
        raise InvalidRequest(f"with use_beam_search, {text}", field="stop_token_ids")
