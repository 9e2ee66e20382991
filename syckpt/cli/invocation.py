"""What the global options say: which repository, and for whom to print."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from syckpt.errors import NotFoundError, StateError

if TYPE_CHECKING:
    from syckpt.repo.repository import Repository

__all__ = ["Invocation", "check_name", "json_option", "pass_invocation"]

_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass
class Invocation:
    """One call of `syckpt`. `directory` is `-C`; `as_json` is `--json`, wherever it stood."""

    directory: str | None
    as_json: bool

    def repository(self) -> Repository:
        """Open the repository. Raises: NotFoundError, IntegrityError, FormatError."""
        from syckpt.repo.repository import Repository
        from syckpt.stores.base import parse_root

        return Repository.open(parse_root(_nearest() if self.directory is None else self.directory))


def _nearest() -> Path:
    """Return the nearest `.syckpt` at or above the working directory."""
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / ".syckpt").is_dir():
            return folder / ".syckpt"
    raise NotFoundError(f"no syckpt repository at or above {here}: go to an experiment's directory, or name it with -C DIR")


def check_name(name: str, *, what: str) -> None:
    """Refuse an argument that cannot be the name of a new branch or tag, as a wrong call. Raises: click.BadParameter."""
    from syckpt.objects import ids

    try:
        ids.check_name(name, what=what)
    except StateError as exc:
        raise click.BadParameter(str(exc), param_hint="NAME") from exc


pass_invocation = click.make_pass_decorator(Invocation)


def json_option(function: _F) -> _F:
    """Add `--json` to a command: it means the same as before the command."""

    def note(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
        if value:
            ctx.ensure_object(Invocation).as_json = True

    return click.option("--json", is_flag=True, expose_value=False, callback=note, help="Print JSON for programs.")(function)
