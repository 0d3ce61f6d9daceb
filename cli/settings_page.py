"""The table of settings in docs/settings.md, made from their declarations: `python -m cli.settings_page` writes it."""

from __future__ import annotations

from pathlib import Path

from common.settings.process import ServiceSettings
from common.settings.table import ENVIRONMENT, FLAG, Setting, declared, spelt

PAGE = Path(__file__).parent.parent / "docs" / "settings.md"
BEGIN = "<!-- The rest of this page is written by `python -m cli.settings_page`. -->\n"


def with_table(page: str) -> str:
    """Returns the page with the present table of settings behind the mark."""
    return page.partition(BEGIN)[0] + BEGIN + _tables()


def _tables() -> str:
    """One table per section. A setting that differs between commands has a row for each variant."""
    sections: dict[str, dict[tuple[str, str], list[str]]] = {}
    for command, cls in ServiceSettings.of_command.items():
        for setting in declared(cls).values():
            rows = sections.setdefault(setting.section, {})
            rows.setdefault((_name(setting), _escaped(setting.description)), []).append(command)
    text = ""
    for title, rows in sections.items():
        text += f"\n### {title}\n\n| setting | commands | meaning |\n|---|---|---|\n"
        text += "".join(f"| `{name}` | {', '.join(of)} | {meaning} |\n" for (name, meaning), of in sorted(rows.items()))
    return text


def _name(setting: Setting) -> str:
    if not setting.flag:
        return spelt(setting.name, ENVIRONMENT)
    flag = spelt(setting.name, FLAG)
    return flag if setting.kind.shape is bool else _escaped(f"{flag} {setting.metavar}")


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text("utf-8")), "utf-8")
