"""schemathesis over our OpenAPI document: no request, valid or almost valid, gets an internal error."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest_asyncio
import schemathesis
from hypothesis import HealthCheck, given, settings

from tests.rigs.gateway.gateway_rig import Rig, rig
from tests.rigs.pods.fake_pods import FakeCluster, fake_cluster

EXAMPLES = int(os.environ.get("BATON_SCHEMA_EXAMPLES", "12"))  # for each operation
REFUSED = (501, 503)  # what this gateway does not do, as documented: no Redis for responses that are kept


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    async with fake_cluster() as c:
        c.script = lambda request: [66] * min(request.sampling.max_tokens, 8)
        yield c


@pytest_asyncio.fixture
async def gw(cluster: FakeCluster, smollm2_dir: Path) -> AsyncIterator[Rig]:
    async with rig(cluster, smollm2_dir) as r:
        yield r


async def test_no_operation_of_the_document_gives_an_internal_error(gw: Rig) -> None:
    assert await asyncio.to_thread(try_all, gw.url) >= 10
    await gw.settled()
    assert not gw.gateway._requests


def try_all(url: str) -> int:
    """Calls every operation with generated requests. Returns the number of operations."""
    schema: Any = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    for operation in operations:

        @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy())
        def call(case: Any) -> None:
            response = case.call(base_url=url, timeout=30)
            limited = "x-request-timeout" in {name.lower() for name in case.headers or ()}
            fine = (*REFUSED, 504) if limited else REFUSED  # a client that gives it no time gets no answer
            assert response.status_code < 500 or response.status_code in fine, (case.body, response.text)

        call()
    return len(operations)
