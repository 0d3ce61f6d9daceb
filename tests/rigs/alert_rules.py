"""The parsed rules of k8s/components/monitoring."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser
import yaml

RULES = Path(__file__).parents[2] / "k8s/components/monitoring/rules.yaml"


@dataclass(frozen=True)
class Rule:
    """One rule."""

    name: str  #: The alert, or the series that the rule records.
    records: bool  #: The rule records a series.
    expr: Any  #: Of promql_parser.
    for_s: float  #: Seconds for which the expression must hold before the alert fires.

    @classmethod
    def all(cls) -> list[Rule]:
        """Returns all rules, in the order of the file."""
        groups = yaml.safe_load(RULES.read_text())["spec"]["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        return [
            cls(
                rule.get("record") or rule["alert"],
                "record" in rule,
                promql_parser.parse(rule["expr"]),
                promql_parser.parse_duration(rule["for"]).total_seconds() if "for" in rule else 0.0,
            )
            for rule in rules
        ]
