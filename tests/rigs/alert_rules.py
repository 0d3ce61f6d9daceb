"""The rules of k8s/components/monitoring, parsed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser
import yaml

RULES = Path(__file__).parents[2] / "k8s/components/monitoring/rules.yaml"


@dataclass(frozen=True)
class Rule:
    """A rule. `name` is the alert, or the series that the rule records."""

    name: str
    records: bool
    expr: Any
    for_s: float

    @classmethod
    def all(cls) -> list[Rule]:
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
