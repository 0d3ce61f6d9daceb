"""python -m gateway.api.docs: writes the tables of docs/api.md; run it in the repository's root."""

from __future__ import annotations

from pathlib import Path

from gateway.api.docs.tables import with_tables

if __name__ == "__main__":
    page = Path("docs/api.md")
    page.write_text(with_tables(page.read_text("utf-8")), "utf-8")
