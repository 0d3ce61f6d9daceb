"""The table of failures: short rows, alerts that exist and have a scenario, and metrics that these alerts read.

tests/integration/test_metric_names.py checks that the metrics exist.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.rigs.alert_rules import RULES, Rule
from tests.rigs.promql import selectors
from tests.unit.test_alerts import SCENARIOS

PAGE = Path(__file__).parents[2] / "docs/failures.md"
MAX_CELL_CHARS = 150
COLUMNS = ("symptom", "cause", "Baton does", "you do", "metric", "alert")


@dataclass(frozen=True)
class Failure:
    """One row of the table."""

    cells: tuple[str, ...]

    @property
    def symptom(self) -> str:
        return self.cells[0]

    @property
    def metric(self) -> str:
        (metric,) = re.findall(r"^`(baton_\w+)`$", self.cells[4])
        return str(metric)

    @property
    def alert(self) -> str:
        return self.cells[5]


def failures() -> list[Failure]:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("|") and not line.startswith("|---")]
    cells = [tuple(cell.strip() for cell in row.strip("|").split("|")) for row in rows]
    return [Failure(row) for row in cells if row != COLUMNS]


def read_by(name: str) -> set[str]:
    """Returns the metrics that a rule reads, directly or through a recorded series."""
    rules = {rule.name: rule for rule in Rule.all()}
    found = set()
    for selector in selectors(rules[name].expr):
        if selector.name in rules:
            found |= read_by(selector.name)
        else:
            found |= {selector.name, re.sub(r"_(bucket|sum|count)$", "", selector.name)}
    return found


def test_the_table_has_thirty_failures_in_short_cells() -> None:
    rows = failures()
    assert len(rows) >= 30
    assert len({row.symptom for row in rows}) == len(rows)
    for row in rows:
        assert len(row.cells) == len(COLUMNS), row
        assert all(row.cells), row
        assert max(map(len, row.cells)) <= MAX_CELL_CHARS, row


@pytest.mark.parametrize("row", failures(), ids=lambda row: row.symptom[:50])
def test_the_alert_of_a_failure_exists_reads_its_metric_and_is_made_to_fire(row: Failure) -> None:
    assert row.alert in {rule.name for rule in Rule.all() if not rule.records}
    assert row.alert in SCENARIOS
    assert row.metric in read_by(row.alert)


def test_every_alert_of_a_failure_is_on_the_page() -> None:
    """It holds for the groups `failures` and `memory`. Alerts of other groups are about speed."""
    named = {row.alert for row in failures()}
    groups = yaml.safe_load(RULES.read_text())["spec"]["groups"]
    for group in groups:
        if group["name"] in ("baton-failures", "baton-memory"):
            alerts = {rule["alert"] for rule in group["rules"]}
            assert alerts <= named, group["name"]
