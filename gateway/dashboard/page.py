"""The page at /: files of this package as they are, without a build step and without anything from elsewhere.

They are open to everybody; the figures that they ask for need a key where the gateway wants one.
"""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

FILES = Path(__file__).parent / "page"
FILES_PATH = "/dashboard/page"
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class _Files(StaticFiles):
    def file_response(self, *args: object, **kwargs: object) -> Response:
        response = super().file_response(*args, **kwargs)  # type: ignore[arg-type]
        response.headers.update(HEADERS)
        return response


def page_routes() -> list[BaseRoute]:
    """The page and what it is made of."""

    async def index(_request: Request) -> Response:
        return FileResponse(FILES / "index.html", headers=HEADERS)

    return [Route("/", index), Mount(FILES_PATH, _Files(directory=FILES))]
