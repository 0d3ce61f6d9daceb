"""Settings are declared once, as fields of a dataclass: `x: int = setting(kind, default, help)`.

All forms of a setting come from its field: the flag (--chunk-tokens), the variable (BATON_CHUNK_TOKENS), the TOML key
(chunk_tokens), `--help`, docs/settings.md, and the flags that `baton up` gives to its processes.

A setting has the value of its flag, else of the variable, else of the TOML file (flat keys), else the default. Unknown
keys and unknown BATON_* variables are errors, so Kubernetes' service links, which inject BATON_* variables, must be
off.
"""

from __future__ import annotations

import inspect
import logging
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from common.errors import ConfigError
from common.settings.kinds import SettingKind, as_text, choice, optional

ENV_PREFIX = "BATON_"
ENV_NOT_SETTINGS = frozenset({"BATON_CACHE", "BATON_CONFIG"})  #: Variables that other code reads.
LONG_NAME = 9  #: A name of at least this many letters may be misspelt by two letters.
FLAG, ENVIRONMENT, PYTHON = " on the command line", " in the environment", ""  #: Origins of a value, besides a file.

_log = logging.getLogger(__name__)
_DECLARED: dict[type, Mapping[str, Setting]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting of one class."""

    kind: SettingKind
    help: str
    # `declared` takes these from the field and its class.
    name: str = ""
    default: Any = None
    required: bool = False
    section: str = ""  # Title of its group in `--help` and in docs/settings.md.
    metavar: str = ""  # Stands for the value in `--help`; by default from the kind, or from the last word of the name.
    flag: bool = True  # False: only the variable and the TOML key exist.
    per_process: bool = False  #: `baton up` does not pass its own value, or variable, to its processes.
    was: tuple[str, ...] = ()  # Former names. They work, with a warning, for one release.
    also: tuple[str, ...] = ()  # Names of the same flag in other servers. They work on the command line.
    was_values: Mapping[str, str] = field(default_factory=dict)  #: Former values; as `was`.

    def parse(self, raw: object, origin: str) -> Any:
        """Returns the value of text, or of a TOML or Python value. Raises ConfigError."""
        try:
            return self.kind.parse(raw)
        except (ValueError, OverflowError) as e:
            raise self.invalid(raw, origin) from e

    def invalid(self, raw: object, origin: str) -> ConfigError:
        """Builds the error with the name as the user typed it; a number in text is shown without quotes."""
        is_number = isinstance(raw, str) and re.fullmatch(r"[+-]?[\d.]+", raw)
        shown = "" if self.kind.secret else f" {raw}" if is_number else f" {raw!r}"
        where = "" if origin in (FLAG, ENVIRONMENT) else origin
        message = f"{spelt(self.name, origin)}: invalid value{shown}{where}: expected {self.kind.expected}"
        return ConfigError(message, field=self.name)

    @property
    def description(self) -> str:
        """The help text with the default, unless the text itself says what a default of 0 or nothing means."""
        if self.required:
            return f"{self.help}; required."
        if self.kind.secret or self.default in (None, 0, "", ()):
            return f"{self.help}."
        return f"{self.help}; default: {self.kind.show(self.default)}."


def setting(kind: SettingKind, default: Any, help: str, **more: Any) -> Any:
    """Declares a setting as a dataclass field. `more` are further fields of Setting."""
    return field(default=default, metadata=about(kind, help, **more), repr=not kind.secret)


def optional_setting(kind: SettingKind, help: str, **more: Any) -> Any:
    """Declares a setting that is None by default."""
    return setting(optional(kind), None, help, **more)


def choice_setting(names: Sequence[str], help: str, **more: Any) -> Any:
    """Declares a setting with one of these values; the first one is the default."""
    return setting(choice(*names), names[0], help, **more)


def about(kind: SettingKind, help: str, **more: Any) -> dict[str, Setting]:
    """Returns the metadata of a field that is a setting; used directly for a setting without a default."""
    return {"setting": Setting(kind=kind, help=help, **more)}


class Settings:
    """Base of the dataclasses with settings. A group of settings is a subclass that several classes inherit."""

    section: ClassVar[str] = ""  #: Title of its settings' group, see Setting.section.
    removed: ClassVar[Mapping[str, str]] = {}  #: Settings without effect, and why; as Setting.was.
    of_command: ClassVar[dict[str, type[Settings]]] = {}  # The settings of each `baton` command.

    def __init_subclass__(cls, section: str | None = None, command: str | None = None) -> None:
        cls.section = section or cls.section
        if command is not None:
            Settings.of_command[command] = cls

    def __post_init__(self) -> None:
        for name, setting in declared(type(self)).items():
            value = getattr(self, name)
            parsed = setting.parse(value, PYTHON)
            if parsed != value or not isinstance(value, (type(parsed), int)):
                raise setting.invalid(value, PYTHON)

    @classmethod
    def load(cls, *, file: Path | None, env: Mapping[str, str], flags: Mapping[str, object]) -> Self:
        """Reads the settings of one process; flags that are None count as not given. Raises ConfigError."""
        known = declared(cls)
        values: dict[str, Any] = {}
        for source, origin in (
            (read_toml(file), f" in {file}"),
            (_from_env(cls, env), ENVIRONMENT),
            ({name: raw for name, raw in flags.items() if raw is not None}, FLAG),
        ):
            for name, raw in current_names(cls, source, origin).items():
                if name not in known:
                    known_as = _suggestion(name, known, origin) or f"; known: {', '.join(known)}"
                    raise ConfigError(f"{spelt(name, origin)}: unknown setting{origin}{known_as}", field=name)
                values[name] = known[name].parse(raw, origin)
        for setting in known.values():
            if setting.required and setting.name not in values:
                missing = f"{spelt(setting.name, FLAG)}: missing: expected {setting.kind.expected}"
                raise ConfigError(missing, field=setting.name)
        return cls(**values)


def setting_error(name: str, problem: str) -> ConfigError:
    """Returns the error of a setting with a valid value that other settings rule out."""
    return ConfigError(f"{name}: {problem}", field=name)


def declared(cls: type[Settings]) -> Mapping[str, Setting]:
    """Returns the settings of a class by name: its own, then the inherited ones. An overridden one keeps its place."""
    if cls in _DECLARED:
        return _DECLARED[cls]
    places: dict[str, Any] = {name: base for base in cls.__mro__ for name in inspect.get_annotations(base)}
    found = {f.name: f for f in fields(cls) if "setting" in f.metadata}  # type: ignore[arg-type]
    complete: dict[str, Setting] = {}
    for name in sorted(found, key=lambda name: cls.__mro__.index(places[name])):
        setting: Setting = found[name].metadata["setting"]
        complete[name] = replace(
            setting,
            name=name,
            section=places[name].section,
            metavar=setting.metavar or setting.kind.metavar or name.rpartition("_")[2].upper(),
            required=found[name].default is MISSING,
            default=None if found[name].default is MISSING else found[name].default,
        )
    _DECLARED[cls] = complete
    return complete


def former_names(cls: type[Settings]) -> Mapping[str, str | None]:
    """Returns the present name of each former one; None for a setting that no longer exists."""
    renamed = {old: setting.name for setting in declared(cls).values() for old in setting.was}
    return {**dict.fromkeys(cls.removed), **renamed}


def current_names(cls: type[Settings], given: Mapping[str, Any], origin: str = PYTHON) -> dict[str, Any]:
    """Returns the values by present name, and logs a warning for each former name or value. A present name wins."""
    former, known = former_names(cls), declared(cls)
    current: dict[str, Any] = {}
    for name in former.keys() & given.keys():
        if (now := former[name]) is None:
            _log.warning("%s has no effect: %s", spelt(name, origin), cls.removed[name])
        else:
            _log.warning("%s is now %s; the former name will be removed", spelt(name, origin), spelt(now, origin))
            current[now] = given[name]
    current |= {name: raw for name, raw in given.items() if name not in former}
    for name in current.keys() & known.keys():
        raw = current[name]
        if isinstance(raw, str) and (value := known[name].was_values.get(raw)) is not None:
            _log.warning("%s: %r is now %r; the former value will be removed", spelt(name, origin), raw, value)
            current[name] = value
    return current


def command_line(cls: type[Settings], values: Mapping[str, Any]) -> list[str]:
    """Returns the flags that give these values to a process with settings of this class."""
    words = []
    for name, value in values.items():
        flag = spelt(name, FLAG)
        if declared(cls)[name].kind.shape is bool:
            words += [flag] if value else ["--no-" + flag[2:]] if declared(cls)[name].default is not False else []
        else:
            words.append(f"{flag}={as_text(value)}")
    return words


def spelt(name: str, origin: str) -> str:
    """Returns the name as it is spelt on the command line, in the environment, in a file or in Python."""
    if origin == FLAG:
        return "--" + name.replace("_", "-")
    return ENV_PREFIX + name.upper() if origin == ENVIRONMENT else name


def misspelt(name: str, known: Iterable[str]) -> str | None:
    """Returns the known name that `name` is a misspelling of, or None.

    A misspelling has the same letters, the same words in another order, or one wrong, missing, extra or swapped letter
    (two if the name has nine letters or more). If several known names are equally near, none is returned. A name that
    only looks similar means something else, and to suggest it would mislead.
    """
    typed, close = _letters(name), dict[str, int]()
    allowed = 2 if len(typed) >= LONG_NAME else 1
    for other in known:
        letters = _letters(other)
        if typed == letters or sorted(_words(name)) == sorted(_words(other)):
            return other
        if abs(len(typed) - len(letters)) <= allowed and (edits := _edits(typed, letters)) <= allowed:
            close[other] = edits
    nearest = [other for other, edits in close.items() if edits == min(close.values())]
    return nearest[0] if len(nearest) == 1 else None


def _words(name: str) -> list[str]:
    return re.split(r"[-_]+", name.lower().strip("-_"))


def _letters(name: str) -> str:
    return "".join(_words(name))


def _edits(a: str, b: str) -> int:
    """Returns the number of letters to insert, delete, replace or swap with the next one (Damerau, 1964)."""
    before, row = [0] * (len(b) + 1), list(range(len(b) + 1))
    for i, letter in enumerate(a, 1):
        older, before, row = before, row, [i]
        for j, other in enumerate(b, 1):
            row.append(min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != other)))
            if i > 1 and j > 1 and letter == b[j - 2] and a[i - 2] == other:
                row[j] = min(row[j], older[j - 2] + 1)
    return row[-1]


def _suggestion(name: str, known: Iterable[str], origin: str) -> str:
    """Returns the end of an error message: the known setting that `name` misspells; empty if there is none."""
    meant = misspelt(name, known)
    return f"; did you mean {spelt(meant, origin)}?" if meant else ""


def read_toml(file: Path | None) -> Mapping[str, object]:
    """Returns the settings in a file; none without a file. Raises ConfigError."""
    if file is None:
        return {}
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as e:
        raise setting_error("config", f"cannot read {file}: {e.strerror}") from e
    except (ValueError, RecursionError) as e:  # also text that is not UTF-8, and numbers that are too long
        raise setting_error("config", f"{file} is not TOML: {e}") from e


def _from_env(cls: type[Settings], env: Mapping[str, str]) -> dict[str, object]:
    """Returns this class's settings from variables. Ignores variables of other classes; unknown ones are errors."""
    anywhere = {name for c in Settings.of_command.values() for name in (*declared(c), *former_names(c))}
    values: dict[str, object] = {}
    for variable, raw in env.items():
        if not variable.startswith(ENV_PREFIX) or variable in ENV_NOT_SETTINGS:
            continue
        name = variable.removeprefix(ENV_PREFIX).lower()
        if name not in anywhere or variable != variable.upper():
            meant = _suggestion(name, [*anywhere], ENVIRONMENT)
            raise ConfigError(f"{variable}: unknown setting in the environment{meant}", field=name)
        if name in declared(cls) or name in former_names(cls):
            values[name] = raw
    return values
