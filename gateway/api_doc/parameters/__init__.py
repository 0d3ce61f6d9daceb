"""Every parameter of every endpoint that takes a body. tests/unit/test_api_doc.py holds it equal to the validators.

To add a parameter: let the validator read it through Fields (gateway/fields.py), put it into the list of its endpoint
here (COMMON in shared.py for both generating ones) with a schema that has the validator's bounds, and run
`python -m gateway.api_doc`, which writes the tables of docs/api.md. A name that a validator reads and that is not here,
one that is here and nobody reads, a bound that the validator does not keep: each fails a test.
"""

from __future__ import annotations

from gateway.api_doc.parameter import Parameter
from gateway.api_doc.parameters.chat import CHAT
from gateway.api_doc.parameters.completion import COMPLETION
from gateway.api_doc.parameters.embeddings import EMBEDDINGS
from gateway.api_doc.parameters.responses import RESPONSES
from gateway.api_doc.parameters.shared import COMMON
from gateway.api_doc.parameters.tokens import DETOKENIZE, TOKENIZE

__all__ = ["BODIES", "CHAT", "COMMON", "COMPLETION"]

BODIES: dict[str, tuple[Parameter, ...]] = {
    "/v1/chat/completions": (*CHAT[:1], *COMMON, *CHAT[1:]),
    "/v1/completions": (*COMPLETION[:1], *COMMON, *COMPLETION[1:]),
    "/v1/embeddings": EMBEDDINGS,
    "/v1/responses": RESPONSES,
    "/tokenize": TOKENIZE,
    "/detokenize": DETOKENIZE,
}
