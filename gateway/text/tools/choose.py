"""Chooses a model's format of tool calls: by name, or by its chat template, tokens, architecture and name.

Another package registers a format by an entry point of the group `baton.tool_formats`. Its name is a value of
--tool-parser. Its object is a ToolFormat, or a callable without arguments that returns one.
"""

from __future__ import annotations

from collections.abc import Collection
from importlib.metadata import entry_points

from common.errors import ConfigError, describe
from common.settings.kinds import TOOL_FORMAT_GROUP, TOOL_PARSERS
from gateway.text.tools.format import ModelFacts, Signs, ToolFormat
from gateway.text.tools.harmony import HarmonyFormat
from gateway.text.tools.json_formats import MISTRAL_ARGS, SMOLLM2_SIGNS, HermesFormat, Llama3Format, MistralFormat
from gateway.text.tools.known_formats import KNOWN_FORMATS
from gateway.text.tools.pythonic import PythonicFormat


def choose_tool_format(
    name: str,
    template: str,
    tokens: Collection[str],
    architectures: tuple[str, ...] = (),
    names: tuple[str, ...] = (),
) -> ToolFormat | None:
    """Returns the format with this name; for "auto" the model's format, None if it is unknown. Raises ConfigError.

    The arguments after `name` are those of ModelFacts.
    """
    facts = ModelFacts(template, tokens, architectures, names)
    if name == "auto":
        return recognise(facts)
    for tool_format in all_formats(facts):
        if tool_format.name == name:
            return tool_format
    return _registered(name)


def all_formats(facts: ModelFacts) -> list[ToolFormat]:
    """Returns this package's formats in the order in which `auto` tries them."""
    return [
        HarmonyFormat(),
        *KNOWN_FORMATS,
        HermesFormat(),
        HermesFormat(signs=SMOLLM2_SIGNS),
        MistralFormat(named=MISTRAL_ARGS in facts.tokens),
        PythonicFormat(),
        Llama3Format(),
    ]


def recognise(facts: ModelFacts) -> ToolFormat | None:
    """Returns the format of a model, None if no format has a sign that fits.

    A registered format goes before this package's formats. The template and the tokens decide first, then the
    architecture, then the name.
    """
    formats = [*(_registered(point.name) for point in entry_points(group=TOOL_FORMAT_GROUP)), *all_formats(facts)]
    for fits in (Signs.in_template, Signs.in_architecture, Signs.in_name):
        for tool_format in formats:
            if fits(getattr(tool_format, "signs", Signs()), facts):
                return tool_format
    return None


def _registered(name: str) -> ToolFormat:
    for point in entry_points(group=TOOL_FORMAT_GROUP):
        if point.name != name:
            continue
        try:
            loaded = point.load()
            made = loaded if hasattr(loaded, "new_parser") and not isinstance(loaded, type) else loaded()
        except Exception as error:  # the package of a third party may raise any error
            problem = f"tool_parser: the format {name!r} of {point.value} does not load: {describe(error)}"
            raise ConfigError(problem, field="tool_parser") from error
        tool_format: ToolFormat = made
        return tool_format
    raise ConfigError(f"tool_parser: {name!r} is not one of {', '.join(TOOL_PARSERS)}", field="tool_parser")
