"""The parameters of every endpoint that reads a body; tests/unit/test_api_doc.py compares them with the parsers.

To add a parameter: read it in the parser with JsonFields (gateway/api/http/json_fields.py), add it here to the list of
its endpoint (to COMMON in shared.py for both generating endpoints) with the parser's bounds in its schema, and run
`python -m gateway.api.docs`, which writes the tables of docs/api.md. Tests fail for a parameter that only the parser or
only this list has, and for a bound that the parser does not keep.
"""

from __future__ import annotations

from gateway.api.docs.parameter import Parameter
from gateway.api.docs.parameters.generate import CHAT, COMPLETION
from gateway.api.docs.parameters.other import DETOKENIZE, EMBEDDINGS, TOKENIZE
from gateway.api.docs.parameters.responses import RESPONSES
from gateway.api.docs.parameters.shared import COMMON

__all__ = ["BODIES", "CHAT", "COMMON", "COMPLETION"]

BODIES: dict[str, tuple[Parameter, ...]] = {
    "/v1/chat/completions": (*CHAT[:1], *COMMON, *CHAT[1:]),
    "/v1/completions": (*COMPLETION[:1], *COMMON, *COMPLETION[1:]),
    "/v1/embeddings": EMBEDDINGS,
    "/v1/responses": RESPONSES,
    "/tokenize": TOKENIZE,
    "/detokenize": DETOKENIZE,
}
