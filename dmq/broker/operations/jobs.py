"""Jobs of operators: bulk changes that are stored, run one unit at a time, and continue after a restart.

The engine keeps the jobs of one kind, runs their tasks, applies their rates, and stops and resumes them. The *work* of
the kind executes the units. It commits the outcomes of a unit so that a crash repeats none of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Generic, Protocol, TypeVar

import structlog

from broker_adapter.contracts.errors import BrokerError, Refused, Rule
from dmq.broker.io import Commits
from dmq.errors import StoreError
from dmq.store.schema.operators.message_jobs import MessageJob
from dmq.store.writer.operations import Op
from retry.dead_letter import Job, JobState

log = structlog.get_logger("dmq.broker")

UNITS_PER_S = 10  # units per second of a rate-limited job
_PAUSE_S_MAX = 0.5
_FAILED_PAUSE_S = 10.0  # a read error rarely clears within moments
_Job = TypeVar("_Job", Job, MessageJob)


class JobWork(Protocol[_Job]):
    """Work of one kind of jobs."""

    def subject(self, job: _Job) -> tuple[str, str]:
        """Return the kind and the name of the object that at most one running job may change."""

    def ops_of(self, job: _Job) -> Sequence[Op]:
        """Return the ops that store the state of a job."""

    def to_forget(self, jobs: Sequence[_Job]) -> Sequence[_Job]:
        """Return the ended ones of all jobs, oldest first, that make room for a new one."""

    def ops_of_removal(self, job: _Job) -> Sequence[Op]:
        """Return the ops that delete a forgotten job."""

    def is_held(self, job: _Job) -> bool:
        """Return True while the next unit has to wait for free disk space."""

    async def advance(self, job: _Job) -> int:
        """Execute one unit, durable on return; return the number of messages that count for the rate."""


def rows_per_unit(job: Job | MessageJob, rows_max: int) -> int:
    """Return the number of messages that one unit of a job may change."""
    return max(1, min(rows_max, int(job.rate_per_s / UNITS_PER_S))) if job.rate_per_s else rows_max


class Jobs(Generic[_Job]):
    """Jobs of one kind. It belongs to the event loop."""

    def __init__(self, commits: Commits, work: JobWork[_Job]) -> None:
        self._commits = commits
        self._clock = commits.store.clock
        self._work: JobWork[_Job] = work
        self._jobs: dict[int, _Job] = {}  # by id, in ascending order
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def load(self, stored: Iterable[_Job]) -> None:
        """Add the stored jobs, in ascending order of their ids, and continue the running ones."""
        self._jobs.update((job.job_id, job) for job in stored)
        for job in self._jobs.values():
            if job.state is JobState.RUNNING:
                self._begin(job.job_id)

    async def close(self) -> None:
        """Stop the tasks; running jobs resume in the next run."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def newest_first(self, name: str = "") -> list[_Job]:
        """Return the jobs of the object with a name, or all."""
        return [job for job in reversed(self._jobs.values()) if not name or self._work.subject(job)[1] == name]

    def get(self, job_id: int) -> _Job:
        """Return a job. Raise ``Refused`` if there is none with this number."""
        job = self._jobs.get(job_id)
        if job is None:
            raise Refused(Rule.NOT_FOUND, "no job has this number", value=job_id)
        return job

    def find(self, job_id: int) -> _Job | None:
        """Return a job, or None."""
        return self._jobs.get(job_id)

    def is_current(self, job: _Job) -> bool:
        """Return True if a job has not changed since it was returned."""
        return self._jobs.get(job.job_id) is job

    def advanced(self, job: _Job) -> None:
        """Set the state of a job after a unit."""
        self._jobs[job.job_id] = job

    def is_at_work(self, name: str) -> bool:
        """Return True if a job is running on the object with a name."""
        return any(job.state is JobState.RUNNING and self._work.subject(job)[1] == name for job in self._jobs.values())

    def check_alone(self, job: _Job) -> None:
        """Raise ``Refused`` if another job is running on the same object."""
        kind, name = self._work.subject(job)
        if self.is_at_work(name):
            raise Refused(Rule.REQUEST, f"another job of this {kind} is running", value=name)

    async def start(self, job: _Job) -> _Job:
        """Start a job under the next number, durable on return."""
        self.check_alone(job)
        job = replace(job, job_id=max(self._jobs, default=0) + 1)
        ops = [*self._work.ops_of(job), *self._forget()]
        self._jobs[job.job_id] = job
        done = self._commits.submit(ops)
        if job.state is JobState.RUNNING:  # its units follow this one, and the caller may be cancelled from now on
            self._begin(job.job_id)
        await self._commits.committed(done)
        return job

    async def stop(self, job_id: int) -> _Job:
        """Stop a job at its current position, durable on return."""
        job = self.get(job_id)
        ops: Sequence[Op] = ()
        if job.state is JobState.RUNNING:
            job = self._jobs[job_id] = replace(job, state=JobState.STOPPED)
            ops = self._work.ops_of(job)
        await self._commits.commit(ops)  # also without ops: its end may not be durable yet
        return job

    async def resume(self, job_id: int) -> _Job:
        """Continue a stopped job at its position, durable on return."""
        job = self.get(job_id)
        ops: Sequence[Op] = ()
        if job.state is JobState.STOPPED:
            self.check_alone(job)
            job = self._jobs[job_id] = replace(job, state=JobState.RUNNING)
            ops = self._work.ops_of(job)
        done = self._commits.submit(ops)  # also without ops: its state may not be durable yet
        if ops:
            self._begin(job_id)
        await self._commits.committed(done)
        return self._jobs.get(job_id, job)

    def _forget(self) -> list[Op]:
        """Forget ended jobs to make room for a new one; return the ops."""
        ops: list[Op] = []
        for job in self._work.to_forget(list(self._jobs.values())):
            del self._jobs[job.job_id]
            ops += self._work.ops_of_removal(job)
        return ops

    def _begin(self, job_id: int) -> None:
        if job_id in self._tasks and not self._tasks[job_id].done():
            return  # stopped and resumed while it waits: it continues
        task = asyncio.get_running_loop().create_task(self._run(job_id), name=f"dmq-job-{job_id}")
        self._tasks[job_id] = task
        task.add_done_callback(partial(self._ended, job_id))

    def _ended(self, job_id: int, task: asyncio.Task[None]) -> None:
        if self._tasks.get(job_id) is task:
            del self._tasks[job_id]

    async def _run(self, job_id: int) -> None:
        job = self._jobs[job_id]
        facts = {"job": job_id, "kind": job.kind} | dict([self._work.subject(job)])
        log.info("job_started", **facts, next=job.next_offset, end=job.end_offset)
        free_at_s = 0.0
        while (job := self._jobs[job_id]).state is JobState.RUNNING:
            now_s = self._clock.monotonic_s()
            is_held = self._work.is_held(job)
            if now_s < free_at_s or is_held:
                await asyncio.sleep(_PAUSE_S_MAX if is_held else min(free_at_s - now_s, _PAUSE_S_MAX))
                continue
            try:
                done = await self._work.advance(job)
            except Exception as error:  # any error: a task that ended silently would look like a running job
                is_bug = not isinstance(error, BrokerError | StoreError)
                log.error("job_failed", job=job_id, error=str(error), exc_info=is_bug)  # noqa: TRY400
                if self._commits.store.failure is not None:
                    return
                await asyncio.sleep(_FAILED_PAUSE_S)
                continue
            if job.rate_per_s:  # measured from this unit: no catching up after a pause
                free_at_s = now_s + done / job.rate_per_s
        log.info("job_ended", **facts, state=job.state, done=job.done)
