"""Command line options from HostConfig's fields: one description, one default, one place to add an option."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from peer.config import HostConfig

ConfigFile = Annotated[
    Path | None, typer.Option("--config", "-c", help="YAML file of options, all of them optional.")
]

_METAVARS: dict[Any, str] = {
    str: "TEXT",
    int: "NUMBER",
    float: "SECONDS",
    Path: "PATH",
    list[str]: "ADDRESS...",
}
_TEXT_FIELDS = ("stage", "log_level", "log_format")  # HostConfig checks them and explains


def host_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add an option for each HostConfig field; the command gets those that were given as `flags`."""
    own = [
        parameter
        for name, parameter in inspect.signature(command, eval_str=True).parameters.items()
        if name != "flags"
    ]
    added = [_parameter(name) for name in HostConfig.model_fields]

    def with_flags(**values: Any) -> None:
        given = {name: values.pop(name) for name in HostConfig.model_fields}
        command(flags={name: value for name, value in given.items() if value not in (None, [])}, **values)

    with_flags.__name__, with_flags.__doc__ = command.__name__, command.__doc__
    parameters = [*own, *added]
    with_flags.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_flags.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return with_flags


def _parameter(name: str) -> inspect.Parameter:
    field = HostConfig.model_fields[name]
    flag = "--" + name.replace("_", "-")
    kind = _option_type(name, field.annotation)
    names = (f"{flag}/--no-{flag[2:]}",) if kind is bool else (flag,)
    text = (field.description or "") + ("" if "[" in (field.description or "") else _default_in_words(name))
    option = typer.Option(*names, help=text, show_default=False, metavar=_METAVARS.get(kind))
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def _option_type(name: str, annotation: Any) -> Any:
    if name in _TEXT_FIELDS:
        return str
    if annotation in (bool, int, float, str, Path):
        return annotation
    inner = next(kind for kind in get_args(annotation) if kind is not type(None))
    return list[str] if annotation == tuple[str, ...] else inner


def _default_in_words(name: str) -> str:
    default = HostConfig.model_fields[name].get_default(call_default_factory=True)
    if name == "stage":
        return "  [auto]"
    return "" if default in (None, (), False, True) else f"  [{default}]"
