"""Every parameter of every endpoint that takes a body. tests/unit/test_api_doc.py holds it equal to the validators.

To add a parameter: let the validator read it through Fields (gateway/api/http/json_fields.py), put it into the list of its endpoint
here (COMMON in shared.py for both generating ones) with a schema that has the validator's bounds, and run
`python -m gateway.api.docs`, which writes the tables of docs/api.md. A name that a validator reads and that is not here,
one that is here and nobody reads, a bound that the validator does not keep: each fails a test.
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
