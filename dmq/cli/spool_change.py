"""``dmq spool repair|requeue|adopt``: what changes directories, free ones only."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from broker_adapter.clock import SystemClock
from dmq.cli import output as out
from dmq.cli.confirm import confirm
from dmq.cli.errors import CommandFailed, ExitCode
from dmq.cli.options import OutputOption
from dmq.cli.progress import Progress
from dmq.cli.spool_options import (
    ROOT_DEFAULT,
    RootOption,
    TypeOption,
    YesOption,
    as_json,
    directories_of,
    in_use,
    silent,
    uid_of,
)

if TYPE_CHECKING:
    from dmq.spool.kept import Kept
    from dmq.spool.salvage import Report
    from dmq.store.commit import Unit

_PER_UNIT = 256
_NAMED_MAX = 20


def repair(
    ctx: typer.Context,
    *,
    directory: Annotated[
        list[str] | None,
        typer.Argument(metavar="[DIRECTORY]...", help="Directory names.  [default: all that no process uses]"),
    ] = None,
    root: RootOption = ROOT_DEFAULT,
    yes: YesOption = False,
    output: OutputOption = None,
) -> None:
    """Recover what can be read of damaged directories, and report what is missing.

    Each entry that can be read goes into a new directory; when that is complete, the damaged one is put aside as
    damaged-<id>, with the report as damaged-<id>.json beside it, and is never removed. What is whole stays as it is.
    """
    from dmq.errors import StoreLocked
    from dmq.spool.salvage import repair as repair_one

    known = {path.name: path for path in directories_of(root)}
    for name in directory or ():
        if name not in known:
            text = f"there is no directory {name} in {root}"
            raise CommandFailed(out.printable(text), ExitCode.NOT_FOUND)
    chosen = [known[name] for name in dict.fromkeys(directory or known)]
    if chosen:
        confirm(f"what is damaged of {_counted(len(chosen))} of {root} would be saved and put aside", yes=yes)
    reports: list[Report] = []
    used: list[str] = []
    with silent(), Progress(f"repair of {root}", quiet=as_json(ctx, output)) as progress:
        for path in chosen:
            try:
                reports.append(
                    repair_one(path, SystemClock(), lambda text, name=path.name: progress.show(f"{name}: {text}"))  # type: ignore[misc]
                )
            except StoreLocked as error:
                if directory:
                    raise in_use(error) from error
                used.append(str(error))
    if as_json(ctx, output):
        out.show_json([report.as_json() for report in reports])
    else:
        for report in reports:
            _show_report(report)
    for text in used:
        typer.echo(f"dmq: left alone: {out.printable(text)}", err=True)


def requeue(
    ctx: typer.Context,
    *,
    uids: Annotated[list[str] | None, typer.Argument(metavar="[UID]...", help="Uids of the entries.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="The whole dead set.")] = False,
    type_name: TypeOption = None,
    root: RootOption = ROOT_DEFAULT,
    yes: YesOption = False,
    output: OutputOption = None,
) -> None:
    """Requeue dead entries of directories that no process uses: due now, attempts reset.

    Name them, or mean many with --all, which --type narrows. The process that owns such a directory next sends them.
    """
    if bool(uids) == everything or (type_name and not everything):
        raise typer.BadParameter("give uids, or --all and perhaps --type", param_hint="UID, --all, --type")
    wanted = {uid_of(text) for text in uids or ()}
    paths = directories_of(root)
    if everything:
        what = f" of type {', '.join(type_name)}" if type_name else ""
        confirm(f"all dead entries{what} in the free directories of {root} would be sent again", yes=yes)
    moved, used = set[bytes](), list[str]()
    with silent(), Progress(f"requeue in {root}", quiet=as_json(ctx, output)) as progress:
        for path in paths:
            moved |= _requeue_in(path, wanted, type_name, used, progress)
    left = len(wanted - moved)
    if wanted and not moved:
        text = f"no such entry is dead in a free directory of {root}{_but(used)}"
        raise CommandFailed(out.printable(text), ExitCode.UNAVAILABLE if used else ExitCode.NOT_FOUND)
    if as_json(ctx, output):
        out.show_json({"requeued": len(moved), "not_found": left, "left_alone": used})
        return
    rest = f"; {left:,} not found" if left else ""
    typer.echo(f"{'1 entry waits' if len(moved) == 1 else f'{len(moved):,} entries wait'} again{rest}")
    for text in used:
        typer.echo(f"dmq: left alone: {out.printable(text)}", err=True)


def adopt(
    ctx: typer.Context,
    *,
    root: RootOption = ROOT_DEFAULT,
    source: Annotated[
        Path | None,
        typer.Option("--from", metavar="DIR", help="Folder of another spool.  [default: the same]"),
    ] = None,
    output: OutputOption = None,
) -> None:
    """Move the entries of all directories that no process uses into one, which the next process takes over.

    With --from: those of another spool, such as a volume that a replaced container left. Directories in use and damaged
    ones are left alone, and named.
    """
    from dmq.spool.copies import holder

    origin = source or root
    before = directories_of(origin)
    used = [f"{path.name} is in use by pid {pid}" for path in before if (pid := holder(path))]
    free = [path for path in before if not any(text.startswith(f"{path.name} ") for text in used)]
    if origin.resolve() == root.resolve() and len(free) < 2:
        done = _Adopted(free[0].name if free else "", 0, [], [])
    else:
        done = _adopt(root, origin, len(free), quiet=as_json(ctx, output))
    into, moved, adopted = done.into, done.entries, done.directories
    left = used + done.damaged
    if as_json(ctx, output):
        out.show_json({"into": into, "entries": moved, "adopted": adopted, "left_alone": left})
    elif adopted:
        entries = "1 entry" if moved == 1 else f"{moved:,} entries"
        typer.echo(out.printable(f"{entries} of {_counted(len(adopted))} now in {root / into}"))
    else:
        why = "only one directory is free" if free and origin == root else "no directory is free"
        typer.echo(out.printable(f"nothing to take over in {origin}: {why}"))
    for text in left:
        typer.echo(f"dmq: left alone: {out.printable(text)}", err=True)


class _Adopted(NamedTuple):
    into: str
    entries: int
    directories: list[str]
    damaged: list[str]


def _adopt(root: Path, origin: Path, free: int, *, quiet: bool) -> _Adopted:
    from dmq.spool.adopt import Adopter
    from dmq.spool.copies import directories
    from dmq.spool.inspect import store_options
    from dmq.spool.root import Root
    from dmq.spool.running import Running

    before = {path.name for path in directories(origin)}
    clock = SystemClock()
    if not free:
        return _Adopted("", 0, [], [])
    with silent(), Progress(f"adoption from {origin}", quiet=quiet) as progress:
        progress.show(_counted(free))
        running = Running(Root(root, clock, store_options()), is_driven=True)
        try:
            folder = Root(origin, clock, store_options())
            moved = Adopter(folder, running).adopt()
            into = running.path.name
            damaged = [f"{path.name} is damaged: {each.error}" for path, each in folder.damaged.items()]
        finally:
            running.close()
    return _Adopted(into, moved, sorted(before - {path.name for path in directories(origin)}), damaged)


def _requeue_in(
    path: Path, wanted: set[bytes], types: list[str] | None, used: list[str], progress: Progress
) -> set[bytes]:
    """Requeue what is meant in one directory, if it is free; return the uids."""
    from dmq.errors import StoreError, StoreLocked
    from dmq.spool.copies import choosing, holder
    from dmq.spool.inspect import store_options
    from dmq.spool.kept import Kept
    from dmq.spool.root import Root
    from dmq.store.store import Store

    try:
        with choosing(path.parent):
            if (adopter := Root.adopter_of(path)) is not None:
                used.append(f"{path} is being moved to {adopter}")
                return set()
            store = Store.open(path, SystemClock(), store_options())
    except StoreLocked:
        used.append(f"{path} is in use by pid {holder(path) or 'unknown'}")
        return set()
    except StoreError as error:
        used.append(f"{path} is damaged: {error}")
        return set()
    moved = set[bytes]()
    try:
        kept = Kept(store)
        for name in sorted(kept.names.topics):
            if types and name not in types:
                continue
            moved |= _requeue_type(kept, name, wanted)
            progress.show(f"{len(moved):,} in {path.name}")
    finally:
        store.close()
    return moved


def _requeue_type(kept: Kept, name: str, wanted: set[bytes]) -> set[bytes]:
    moved = set[bytes]()
    after = b""
    while True:
        with kept.lock:
            uids = sorted(wanted) if wanted else [each.entry.uid for each in kept.dead(name, after, _PER_UNIT)]
        waiting: list[Future[None]] = []
        for uid in uids:
            done: Future[None] = Future()
            with kept.lock:
                if kept.requeue(name, uid, _into(done)):
                    waiting.append(done)
                    moved.add(uid)
        for done in waiting:
            done.result()
        if wanted or not uids:
            return moved
        after = uids[-1]


def _into(done: Future[None]) -> Callable[[Unit], None]:
    def settle(unit: Unit) -> None:
        if unit.error is not None:
            done.set_exception(unit.error)
        else:
            done.set_result(None)

    return settle


def _show_report(report: Report) -> None:
    if not report.saved_in:
        typer.echo(out.printable(f"{report.directory}: whole, left as it is"))
        return
    uids = [*report.missing_uids[:_NAMED_MAX]]
    more = len(report.missing_uids) - len(uids)
    out.show_facts(
        [
            ("directory", report.directory),
            ("damage", report.error),
            ("saved", f"{report.waiting:,} waiting, {report.dead:,} dead, in {report.saved_in}"),
            (
                "missing",
                f"{report.missing} entries" + (f": {' '.join(uids)}" if uids else "") + (" ..." if more else ""),
            ),
            ("lost changes", f"{report.lost_events:,}; what ended in one is sent again" if report.lost_events else ""),
            ("superseded", f"{report.superseded:,} older states" if report.superseded else ""),
            ("type names", f"from a damaged record: {' '.join(report.guessed_types)}" if report.guessed_types else ""),
            ("lost names", f"entries are saved as {' '.join(report.unknown_types)}" if report.unknown_types else ""),
            ("cannot be read", "; ".join([*report.dropped, *report.holes, *report.unreadable])),
            ("kept", f"{report.kept_in}, report in {report.kept_in}.json"),
        ]
    )


def _counted(directories: int) -> str:
    return "1 directory" if directories == 1 else f"{directories:,} directories"


def _but(used: list[str]) -> str:
    return f"; left alone: {'; '.join(used)}" if used else ""
