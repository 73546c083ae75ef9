"""An audit on this machine: units of work over processes, added up in their order.

A unit is the same whichever process takes it, and sums are exact, so the report does not depend on how many there are.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pyarrow as pa

from keptset.schemas.errors import KeptsetError
from keptset.trainer_bridge.audit.checkpoint import Checkpoint
from keptset.trainer_bridge.audit.conclusion import conclude
from keptset.trainer_bridge.audit.options import AuditOptions, Progress
from keptset.trainer_bridge.audit.partial import Partial
from keptset.trainer_bridge.audit.planning import Unit, plan
from keptset.trainer_bridge.audit.recorded_logprobs import RecordedColumn
from keptset.trainer_bridge.audit.report import AuditReport
from keptset.trainer_bridge.audit.unit_audit import audit_unit
from keptset.trainer_bridge.usable_cores import usable_cores

Spread = Callable[[Sequence[Unit], AuditOptions], Iterator[tuple[int, Partial]]]
"""Works units and gives the sums of runs of them, in their order, each with how many units it is of."""
_AHEAD = 2
"""Units handed out to each process at a time."""
_WORTH_A_PROCESS = 4 * 2**20
"""Bytes of files for each; a process costs half a second to begin."""


def audit(
    paths: Sequence[str | Path], options: AuditOptions | None = None, *, spread: Spread | None = None
) -> AuditReport:
    """Audit recorded rollouts: spool folders, archives, Arrow files, folders of these, globs, addresses.

    `spread` works the units elsewhere than in processes of this machine.

    Errors: InvalidInput for settings, and for a column of scores that no file has; StorageError or SchemaError where
    there is nothing that can be read. Damaged files among others are named in the report.
    """
    options = options or AuditOptions()
    planned = plan(paths, options)
    if isinstance(options.scorer, RecordedColumn):
        options.scorer.require(planned.units, unguarded=options.unguarded)
    checkpoint = Checkpoint.of(planned, options)
    done, total = checkpoint.load() or (0, Partial.start(options))
    going_on = f"going on: {done} of {len(planned.units)} units of work are done already" if done else None
    _tell(options, done, len(planned.units), total, checkpoint.note or going_on)
    merged = True
    try:
        for units, partial in (spread or _over_processes)(planned.units[done:], options):
            merged = False
            total.merge(partial)
            total.settle()
            done += units
            merged = True
            _tell(options, done, len(planned.units), total, checkpoint.save(done, total))
    except KeyboardInterrupt:
        if merged:  # or a unit would count again in what goes on from here
            checkpoint.save(done, total, now=True)
        raise
    report = conclude(total, planned, options)
    if options.work_stays:
        checkpoint.save(done, total, now=True)
    else:
        checkpoint.remove()
    return report


def _tell(options: AuditOptions, done: int, units: int, total: Partial, note: str | None = None) -> None:
    if options.progress is not None:
        options.progress(Progress(units_done=done, units_total=units, tokens=total.tokens, note=note))


def _over_processes(units: Sequence[Unit], options: AuditOptions) -> Iterator[tuple[int, Partial]]:
    """`Spread` over this machine."""
    workers = _workers(units, options)
    if workers == 1:
        for unit in units:
            yield 1, audit_unit(unit, options)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_begin_worker)
    pending: deque[Future[Partial]] = deque()
    asked = options.for_worker()
    try:
        for unit in units:
            pending.append(pool.submit(audit_unit, unit, asked))
            if len(pending) >= _AHEAD * workers:
                yield 1, pending.popleft().result()
        while pending:
            yield 1, pending.popleft().result()
    except BrokenProcessPool as error:
        raise KeptsetError(
            "a process of the audit ended before its work did: it was killed, perhaps for memory, or could not begin; "
            "run with workers=1, and in a script of your own call audit below `if __name__ == '__main__':`"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _workers(units: Sequence[Unit], options: AuditOptions) -> int:
    if options.workers is not None:
        return min(options.workers, max(len(units), 1))
    if options.scorer is not None:
        return 1
    worth = sum(unit.size for unit in units) // _WORTH_A_PROCESS
    return max(1, min(usable_cores(), worth, len(units)))


def _begin_worker() -> None:
    """An interrupt is dealt with by the process that was started; memory that Arrow frees goes back to the system."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pa.set_memory_pool(pa.system_memory_pool())
    pa.set_cpu_count(1)
