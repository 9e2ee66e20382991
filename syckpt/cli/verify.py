"""`syckpt verify`: read everything and check it. Exits with 5 when something is damaged."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from syckpt.cli import output
from syckpt.cli.invocation import Invocation, json_option, pass_invocation
from syckpt.cli.progress import bar
from syckpt.errors import IntegrityError, NotFoundError, exit_code

if TYPE_CHECKING:
    from syckpt.cli.progress import Draw
    from syckpt.repo.repository import Repository
    from syckpt.repo.signing import Trusted
    from syckpt.repo.verify import Progress, VerifyReport

__all__ = ["command"]


@click.command("verify", short_help="Read everything and check it.")
@click.argument("rev", required=False)
@click.option("--trusted-key", "keys", metavar="PATH.pub", multiple=True, help="Every commit must be signed by one of these keys.")
@click.option("--quick", is_flag=True, help="Documents, and presence and headers of blobs, but no tensors.")
@click.option(
    "--resume", metavar="FILE", help="Note in FILE what was found whole, and go on from there if it exists: for large repositories."
)
@click.option("--no-mark", is_flag=True, help="Change nothing: neither set nor clear the mark `damaged`.")
@json_option
@pass_invocation
@click.pass_context
def command(
    ctx: click.Context, invocation: Invocation, rev: str | None, keys: tuple[str, ...], quick: bool, resume: str | None, no_mark: bool
) -> None:
    """Check a commit (REV), or everything: commits, refs, manifests, blobs, and every block of every tensor against its digest.

    Prints a line for each finding, which begins with the damaged file and ends with the commits that it hits, and a summary. A commit
    that cannot be loaded whole is marked `damaged`, so that no script resumes from it; the mark goes when it is found whole again.
    Exit status: 0 all is well, 5 something is damaged, or not signed by any of the trusted keys.

    JSON: {"ok", "errors": [text], "findings": {text: [commit id]}, "commits", "tensors", "nbytes", "damaged": [commit id],
    "marked": [commit id], "cleared": [commit id], "resumed", "seconds"}.

    \b
    Examples:
      syckpt verify             everything
      syckpt verify HEAD        the newest commit only
      syckpt verify --quick     is every file there, of the right size?
      syckpt verify --resume ~/verify.progress
      syckpt verify best --trusted-key team.pub
      syckpt -C runs/exp1 verify || echo damaged
    """
    from syckpt.repo.signing import load_trusted
    from syckpt.repo.verify import verify

    if resume is not None and quick:
        raise click.UsageError("--resume is for a full check: leave out --quick")
    trusted = load_trusted(keys) if keys else None
    repository = invocation.repository()
    started = time.perf_counter()
    with bar("checking") as draw:
        progress = None if draw is None else _progress(draw)
        report = verify(repository, rev, quick=quick, mark=not no_mark, resume=resume, progress=progress)
    if trusted is not None:
        for text, commit in _untrusted(repository, rev, trusted):
            report.add(text, commit)
    seconds = time.perf_counter() - started
    if invocation.as_json:
        output.echo_json(
            {
                "ok": report.ok,
                "errors": report.errors,
                "findings": report.findings,
                "commits": report.commits,
                "tensors": report.tensors,
                "nbytes": report.nbytes,
                "damaged": report.damaged,
                "marked": report.marked,
                "cleared": report.cleared,
                "resumed": report.resumed,
                "seconds": round(seconds, 3),
            }
        )
    else:
        output.echo(_lines(report, seconds, quick=quick))
    if not report.ok:
        ctx.exit(exit_code(IntegrityError()))


def _untrusted(repository: Repository, rev: str | None, trusted: Trusted) -> list[tuple[str, str]]:
    """Return what is wrong with the signatures of a commit, or of all that can be loaded, and whose: what cannot be read is reported."""
    from syckpt.repo import history
    from syckpt.repo.signing import require_signed

    found: list[tuple[str, str]] = []
    for name in history.commit_ids(repository) if rev is None else [rev]:
        try:
            commit = repository.read_commit(name) if rev is None else history.resolve(repository, name)
        except (IntegrityError, NotFoundError):
            continue
        try:
            if not commit.dropped:
                require_signed(repository, commit, trusted)
        except IntegrityError as exc:
            found.append((str(exc), commit.id))
    return found


def _lines(report: VerifyReport, seconds: float, *, quick: bool) -> Iterator[str]:
    for error in report.errors:
        yield from (click.style(line, fg="red") for line in output.wrapped(output.one_line(error)))
    for commit in report.cleared:
        yield f"{commit}: whole again; its mark `damaged` is removed"
    what = output.count(report.commits, "commit")
    what += "" if quick else f", {output.count(report.tensors, 'tensor')}, {output.nbytes(report.nbytes)}"
    found = f"{output.count(len(report.errors), 'finding')}, {output.count(len(report.damaged), 'commit')} cannot be loaded whole"
    what += f" ({report.resumed} of them earlier)" if report.resumed else ""
    verdict = "ok" if report.ok else f"DAMAGED ({found})"
    yield from output.wrapped(f"{verdict}: {what} checked in {seconds:.2f} s")


def _progress(draw: Draw) -> Progress:
    """Return what draws how far a verification is: by bytes where it reads them."""

    def tell(commits: int, all_commits: int, nbytes: int, all_nbytes: int) -> None:
        text = f"{commits}/{all_commits} commits"
        if all_nbytes:
            draw(nbytes, all_nbytes, f"{text}, {output.nbytes(nbytes)} of {output.nbytes(all_nbytes)}")
        else:
            draw(commits, all_commits, text)

    return tell
