"""What settings refuse, in one line: the setting, its value, and what is allowed."""

from __future__ import annotations

from typing import get_args


def require(condition: bool, name: str, value: object, allowed: str) -> None:
    if not condition:
        raise ValueError(f"{name} = {value!r}: {allowed}")


def positive(config: object, prefix: str, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        require(value >= 1, f"{prefix}.{name}", value, "must be at least 1")


def choices(config: object, prefix: str, **literals: object) -> None:
    for name, literal in literals.items():
        value, allowed = getattr(config, name), get_args(literal)
        require(value in allowed, f"{prefix}.{name}", value, f"must be one of {', '.join(allowed)}")
