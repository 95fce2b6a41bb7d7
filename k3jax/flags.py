"""Command-line settings over frozen dataclasses.

`--config=NAME` picks a configuration from a registry that the program passes in; repeated
`--set path.to.leaf=value` changes single settings. A value is read by the type of its setting;
wrong names and wrong types are refused with one line that says what was meant or expected.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import math
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from absl import flags

from k3jax.config import ExperimentConfig

TRUE, FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")

type Registry = Mapping[str, Callable[[], ExperimentConfig]]


def define(registry: Registry, values: flags.FlagValues = flags.FLAGS) -> None:
    """Define the flags that every program shares."""
    names = ", ".join(sorted(registry))
    flags.DEFINE_string("config", None, f"One of: {names}.", flag_values=values)
    flags.DEFINE_bool("dry_run", False, "Describe the run, do nothing.", flag_values=values)
    define_workdir(values)


def define_workdir(values: flags.FlagValues = flags.FLAGS) -> None:
    """Define the flags of a program that finds its configuration in a directory."""
    flags.DEFINE_multi_string("set", [], "path.to.leaf=value; may repeat.", flag_values=values)
    flags.DEFINE_string("workdir", None, "Where a run writes and resumes.", flag_values=values)


def resolve(registry: Registry, values: flags.FlagValues = flags.FLAGS) -> ExperimentConfig:
    """The configuration that `--config` and `--set` describe."""
    return override(registered(registry, values), values["set"].value or [])


def registered(registry: Registry, values: flags.FlagValues = flags.FLAGS) -> ExperimentConfig:
    """The configuration that `--config` names, without what `--set` changes."""
    name = values["config"].value
    if name is None:
        raise ValueError(f"--config: missing, must be one of {', '.join(sorted(registry))}")
    if name not in registry:
        raise ValueError(f"--config = {name!r}: {_hint(name, sorted(registry))}")
    return registry[name]()


def override[C](config: C, assignments: Iterable[str]) -> C:
    """`config` with `path.to.leaf=value` assignments applied together.

    They take effect at once, so settings that must agree may be given in any order. Raises
    `ValueError` for a malformed assignment, an unknown path, a value of the wrong type, and
    whatever the configuration itself refuses.
    """
    changes: dict[str, Any] = {}
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals:
            raise ValueError(f"--set {assignment!r}: must read path.to.leaf=value")
        path = path.strip()
        changes[path] = _parse(path, _annotation(config, path), text.strip())
    return _replace(config, changes)


def leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """`(path, value)` of every setting of `config`."""
    for field in dataclasses.fields(config):
        value, path = getattr(config, field.name), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{path}.")
        else:
            yield path, value


def differences(old: Any, new: Any, prefix: str = "") -> list[str]:
    """`path: old, now new` for every setting in which two configurations of one class differ."""
    now = dict(leaves(new, prefix))
    return [
        f"{path}: {was!r}, now {now[path]!r}"
        for path, was in leaves(old, prefix)
        if was != now[path]
    ]


def to_json(config: Any) -> str:
    """`config` as indented JSON."""
    return json.dumps(dataclasses.asdict(config), indent=2) + "\n"


def from_json[C](cls: type[C], text: str) -> C:
    """The configuration that `to_json` wrote; a setting that is absent has its default.

    Raises `ValueError` for text that is no JSON object, unknown settings and wrong types.
    """
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"configuration: not JSON, {error}") from error
    return _build(cls, values, "")


def _build(cls: Any, values: Any, prefix: str) -> Any:
    if not isinstance(values, dict):
        raise ValueError(f"{prefix or 'configuration'} = {values!r}: must be a JSON object")
    hints = get_type_hints(cls)
    built = {}
    for name, value in values.items():
        path = f"{prefix}{name}"
        if name not in hints:
            raise ValueError(f"{path}: {_hint(name, list(hints))}")
        if dataclasses.is_dataclass(hints[name]):
            built[name] = _build(hints[name], value, f"{path}.")
        else:
            value = tuple(value) if isinstance(value, list) else value
            built[name] = _checked(path, hints[name], value)
    return cls(**built)


def _annotation(config: Any, path: str) -> Any:
    """The declared type of the leaf at `path`."""
    cls, names = type(config), path.split(".")
    for depth, name in enumerate(names):
        hints = get_type_hints(cls) if dataclasses.is_dataclass(cls) else {}
        if name not in hints:
            raise ValueError(f"--set {path}: {_hint(path, [leaf for leaf, _ in leaves(config)])}")
        cls = hints[name]
        if dataclasses.is_dataclass(cls) and depth == len(names) - 1:
            inside = ", ".join(field.name for field in dataclasses.fields(cls))
            raise ValueError(f"--set {path}: a group of settings, name one of: {inside}")
    return cls


def _hint(name: str, known: list[str]) -> str:
    """What was probably meant, by the whole name or by its last part."""
    by_end = [path for path in known if path.rpartition(".")[2] == name.rpartition(".")[2]]
    close = by_end or difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if close:
        return f"unknown, did you mean {' or '.join(close)}?"
    if len(known) > 20:
        return f"unknown, none of the {len(known)} settings that --dry_run shows"
    return f"unknown, must be one of {', '.join(known)}"


def _replace(config: Any, changes: dict[str, Any]) -> Any:
    """`config` with the values at dotted paths replaced, each class built once."""
    groups: dict[str, dict[str, Any]] = {}
    direct = {}
    for path, value in changes.items():
        head, dot, rest = path.partition(".")
        if dot:
            groups.setdefault(head, {})[rest] = value
        else:
            direct[head] = value
    nested = {name: _replace(getattr(config, name), inner) for name, inner in groups.items()}
    return dataclasses.replace(config, **direct, **nested)


def _parse(path: str, annotation: Any, text: str) -> Any:
    """`text` as a value of `annotation`."""
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        options = get_args(annotation)
        if type(None) in options and text.lower() == "none":
            return None
        for option in options:
            if option is not type(None):
                try:
                    return _parse(path, option, text)
                except ValueError:
                    continue
        raise _wrong(path, annotation, text)
    if origin is tuple:
        text = text[1:-1] if text[:1] + text[-1:] in ("()", "[]") else text
        parts = [part.strip().strip("'\"") for part in text.split(",") if part.strip()]
        entries = _entry_types(annotation, parts)
        if len(entries) != len(parts):
            raise _wrong(path, annotation, text)
        return tuple(map(functools.partial(_parse, path), entries, parts))
    if annotation is bool:
        if text.lower() not in TRUE + FALSE:
            raise _wrong(path, annotation, text)
        return text.lower() in TRUE
    if annotation in (int, float):
        try:
            value = annotation(text)
        except ValueError:
            raise _wrong(path, annotation, text) from None
        return _checked(path, annotation, value)
    return _checked(path, annotation, text)


def _checked(path: str, annotation: Any, value: Any) -> Any:
    """`value`, if it is one of `annotation`; an int may stand for a float."""
    if not _matches(annotation, value):
        raise _wrong(path, annotation, value)
    return float(value) if annotation is float else value


def _matches(annotation: Any, value: Any) -> bool:
    origin = get_origin(annotation)
    if origin is Literal:
        return value in get_args(annotation)
    if origin in (Union, types.UnionType):
        return any(_matches(option, value) for option in get_args(annotation))
    if origin is tuple:
        entries = _entry_types(annotation, value) if isinstance(value, tuple) else None
        return (
            entries is not None
            and len(entries) == len(value)
            and all(map(_matches, entries, value))
        )
    if annotation is float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and math.isfinite(value)
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, annotation)


def _entry_types(annotation: Any, values: Any) -> tuple[Any, ...]:
    entries = get_args(annotation)
    return entries[:1] * len(values) if entries[-1:] == (Ellipsis,) else entries


def _wrong(path: str, annotation: Any, value: Any) -> ValueError:
    return ValueError(f"{path} = {value!r}: must be {_describe(annotation)}")


def _describe(annotation: Any) -> str:
    origin, entries = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return f"one of {', '.join(map(str, entries))}"
    if origin in (Union, types.UnionType):
        return " or ".join(map(_describe, entries))
    if origin is tuple:
        if entries[-1:] == (Ellipsis,):
            return f"a comma-separated list, each {_describe(entries[0])}"
        return f"{len(entries)} comma-separated values ({', '.join(map(_describe, entries))})"
    names = {int: "an integer", float: "a finite number", bool: "true or false", str: "text"}
    return "none" if annotation is type(None) else names.get(annotation, str(annotation))
