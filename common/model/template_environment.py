"""The Jinja environment of chat templates: like that of `transformers`, with bounded memory.

A template is a program from a model's repository, and its loops depend on the client's chat. So each operation that
can make a text or a list much longer than its operands is checked first, and the sum of all results is limited.
Filters and global names are those of Jinja (without `lipsum`) and of `transformers`.
"""

from __future__ import annotations

import functools
import json
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from types import BuiltinMethodType
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame, optimizeconst
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_TEXT = 1 << 26  #: Characters of one text, or entries of one list, that a template makes.
MAX_TOTAL = 1 << 29  #: Characters and entries that one rendering makes in sum.
MAX_WIDTH = 1 << 10  #: Width, indent or precision that a template asks for, and characters of a separator.
MAX_BITS = 1 << 12  #: Bits of an integer.

#: Filters and methods. Their numbers and separators decide the length of the result.
_WIDTHS = {
    *("center", "ljust", "rjust", "zfill", "expandtabs", "to_bytes"),
    *("indent", "batch", "slice", "wordwrap", "round", "tojson", "join"),
}
#: A width or precision of five digits in a format string.
_WIDE = {"%": re.compile(r"%[^a-zA-Z%]*\d{5}"), "{": re.compile(r"\{[^{}]*:[^{}]*\d{5}")}
#: A width or precision that an argument gives.
_VARIABLE_WIDTH = {"%": re.compile(r"%[^a-zA-Z%]*\*"), "{": re.compile(r"\{[^{}]*:[^{}]*\{")}


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: Sequence[str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Returns JSON. Unlike Jinja's own filter it does not escape `<`, `>`, `&` and `'`."""
    pair: Any = separators
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=pair, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class _Dict:
    """The global `dict`, without the attributes of the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """The global `namespace`. Names that begin with an underscore are refused, as everywhere in the sandbox."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # a template may use the name `self`
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _refuse_private(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace has no attribute {name!r}: it begins with an underscore")


class GenerationTag(Extension):
    """`{% generation %} ... {% endgeneration %}`, which marks the model's part for training. The body is rendered."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _BoundedCode(CodeGenerator):
    """Jinja's compiler, with the operator `~` as a call that TemplateEnvironment checks."""

    @optimizeconst
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat(map(str, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")


class _Made(threading.local):
    """The characters and entries that the rendering of this thread has made."""

    total = 0


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compiles chat templates. A template that makes too much raises MemoryError or OverflowError."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))
    code_generator_class = _BoundedCode

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols])
        self._made = _Made()
        self.filters["tojson"] = _tojson
        self.filters = {name: self._checked_filter(name, function) for name, function in self.filters.items()}
        del self.globals["lipsum"]
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "dict": _Dict(),
            "namespace": _Namespace,
        }

    def start(self) -> None:
        """Begins the count of a rendering in this thread."""
        self._made.total = 0

    def concat(self, parts: Iterable[str]) -> str:
        """Joins the parts of an output, of a block or of a macro."""
        made: list[str] = []
        size = 0
        for part in parts:
            size += len(part)
            if size > MAX_TEXT:
                self._charge(size)
            made.append(part)
        self._charge(size)
        return "".join(made)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            result = left + right
            if isinstance(result, str | list | tuple):
                self._charge(len(result))
            return result
        if isinstance(left, int) and isinstance(right, int):
            if operator == "*":
                _check_bits(left.bit_length() + right.bit_length())
            elif operator == "**":
                _check_bits(left.bit_length() * max(0, right))
        elif operator == "*":
            for many, times in ((left, right), (right, left)):
                if isinstance(many, str | bytes | list | tuple) and isinstance(times, int):
                    self._charge(len(many) * max(0, times))
        elif operator == "%" and isinstance(left, str):
            self._check_format(left, "%", right if isinstance(right, tuple) else (right,))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        if isinstance(function, BuiltinMethodType):
            of, name = function.__self__, function.__name__
            self._check_call(name, ("", of) if name == "join" else (of, *args), kwargs)
        result = super().call(context, function, *args, **kwargs)
        if isinstance(result, str | bytes | list | tuple | range):
            self._charge(len(result))
        return result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if (wrapped := super().wrap_str_format(value)) is None:
            return None

        def formatted(*args: Any, **kwargs: Any) -> str:
            given = args[0] if value.__name__ == "format_map" and args else kwargs
            self._check_format(value.__self__, "{", (*args, *(given.values() if isinstance(given, Mapping) else ())))
            return wrapped(*args, **kwargs)

        return formatted

    def _checked_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)  # with the attributes by which Jinja passes its context
        def checked(*args: Any, **kwargs: Any) -> Any:
            if name == "format":
                self._check_format(str(args[0]), "%", (*args[1:], *kwargs.values()))
            first = next((at for at, arg in enumerate(args) if not _is_of_jinja(arg)), 0)
            self._check_call(name, args[first:], kwargs)
            result = function(*args, **kwargs)
            if isinstance(result, str | list | tuple):
                self._charge(len(result))
            return result

        return checked

    def _charge(self, size: int) -> None:
        """Counts what the rendering makes. Raises MemoryError beyond a limit."""
        self._made.total += size
        if size > MAX_TEXT or self._made.total > MAX_TOTAL:
            raise MemoryError(f"the template makes more than {MAX_TEXT if size > MAX_TEXT else MAX_TOTAL} characters")

    def _check_call(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Checks a filter or a method of a built-in type; the first argument is the value."""
        if name in _WIDTHS:
            for given in (*args[1:], *kwargs.values()):
                if isinstance(given, int) and abs(given) > MAX_WIDTH:
                    raise OverflowError(f"{name} with the number {given}: the limit is {MAX_WIDTH}")
                if isinstance(given, str) and len(given) > MAX_WIDTH:
                    raise OverflowError(f"{name} with a text of {len(given)} characters: the limit is {MAX_WIDTH}")
        elif name == "replace" and len(args) >= 3:
            text, old, new = (str(arg) for arg in args[:3])
            self._charge(text.count(old) * len(new))
        elif name == "translate" and len(args) == 2 and isinstance(args[1], Mapping):
            self._charge(len(args[0]) * max((len(str(text)) for text in args[1].values()), default=0))

    def _check_format(self, form: str, mark: str, args: Sequence[Any]) -> None:
        """Checks the arguments of a format string. Its fields begin with `mark`."""
        if _WIDE[mark].search(form):
            raise OverflowError(f"a width in the format {form[:40]!r} is over {MAX_WIDTH}")
        values = [value for arg in args for value in (arg.values() if isinstance(arg, Mapping) else (arg,))]
        if _VARIABLE_WIDTH[mark].search(form) and any(
            isinstance(value, int) and abs(value) > MAX_WIDTH for value in values
        ):
            raise OverflowError(f"a width for the format {form[:40]!r} is over {MAX_WIDTH}")
        self._charge(form.count(mark) * max((len(value) for value in values if isinstance(value, str)), default=0))


def _is_of_jinja(arg: Any) -> bool:
    """Returns whether Jinja added this argument: the context, its evaluation or the environment."""
    return isinstance(arg, jinja2.Environment | jinja2.runtime.Context | nodes.EvalContext)


def _check_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise OverflowError(f"an integer of more than {MAX_BITS} bits")
