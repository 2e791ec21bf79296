"""RPCs of ``AdminService`` about dead letters, and about the jobs that redrive or purge them."""

from __future__ import annotations

from typing import Final

from broker_adapter.contracts.errors import group_unknown
from broker_adapter.contracts.topics import check_group, dead_letter_topic
from dmq.admin import admin_v1 as wire
from dmq.admin.requests import mapping, validate
from dmq.broker import EmbeddedBroker
from dmq.broker.operations import Letter
from dmq.runtime.slices import in_slices

# With bodies a page ends before the answer exceeds the receiver's limit; one letter always fits.
BODIES_BYTES_MAX: Final = 32 * 1024 * 1024
_LETTERS_WITH_BODY_MAX: Final = 100  # each may be 4 MiB in the daemon's memory
_JOBS_SHOWN_MAX: Final = 100


class LetterCalls:
    """RPCs of dead letters. Raise ``Refused`` for invalid input, and for a group that does not exist and left none."""

    def __init__(self, broker: EmbeddedBroker) -> None:
        self._broker = broker

    async def list_dead_letters(self, request: wire.ListDeadLettersRequest) -> wire.ListDeadLettersResponse:
        """List a page of the dead letters of a group, in the order of their death."""
        limit, group = validate.check_limit(request.limit), check_group(request.group)
        chosen, offset = validate.check_filter(request.filter), validate.check_offset(request.offset)
        self._known_letters(group)
        page = await self._broker.dead_letters.page(
            group,
            chosen,
            offset=offset,
            limit=min(limit, _LETTERS_WITH_BODY_MAX) if request.with_body else limit,
            with_outcome=request.with_outcome,
        )
        response = wire.ListDeadLettersResponse(next_offset=page.next_offset)
        room_bytes = BODIES_BYTES_MAX
        async for letter in in_slices(page.letters):
            room_bytes -= len(letter.payload) if request.with_body else 0
            if room_bytes < 0 and response.letters:
                response.next_offset = letter.dead.offset
                break
            response.letters.append(_shown(letter, with_body=request.with_body))
        return response

    async def start_job(self, request: wire.StartJobRequest) -> wire.StartJobResponse:
        """Start a redrive or a purge, or count the affected dead letters (dry run)."""
        job = validate.check_job(request)
        self._known_letters(job.group)
        started = await self._broker.dead_letters.start(job, is_dry_run=request.is_dry_run)
        return wire.StartJobResponse(job=mapping.wire_job(started))

    async def list_jobs(self, request: wire.ListJobsRequest) -> wire.ListJobsResponse:
        """List the newest jobs of a group, or of all."""
        found = self._broker.dead_letters.jobs(check_group(request.group) if request.group else "")
        return wire.ListJobsResponse(jobs=[mapping.wire_job(job) for job in found[:_JOBS_SHOWN_MAX]])

    async def stop_job(self, request: wire.StopJobRequest) -> wire.StopJobResponse:
        """Stop a running job, durable on return; completed parts stay."""
        job = await self._broker.dead_letters.stop(validate.check_job_id(request.job_id))
        return wire.StopJobResponse(job=mapping.wire_job(job))

    async def resume_job(self, request: wire.ResumeJobRequest) -> wire.ResumeJobResponse:
        """Continue a stopped job, durable on return."""
        job = await self._broker.dead_letters.resume(validate.check_job_id(request.job_id))
        return wire.ResumeJobResponse(job=mapping.wire_job(job))

    def start_of_job(self, job_id: int) -> wire.StartJobRequest | None:
        """Return a request that needs the same rights as the start of a job; None if there is no such job."""
        found = next((job for job in self._broker.dead_letters.jobs() if job.job_id == job_id), None)
        if found is None:
            return None
        return wire.StartJobRequest(group=found.group, to_topic=found.to_topic, all_groups=found.all_groups)

    def group_of_job(self, job_id: int) -> str:
        """Return the group of a job; empty if there is no such job."""
        return next((job.group for job in self._broker.dead_letters.jobs() if job.job_id == job_id), "")

    def _known_letters(self, group: str) -> None:
        """Raise if a group does not exist and left no dead letters."""
        names = self._broker.names
        if dead_letter_topic(group) not in names.topics and group not in names.groups:
            raise group_unknown(group)


def _shown(letter: Letter, *, with_body: bool) -> wire.DeadLetter:
    dead, outcome = letter.dead, letter.outcome
    return mapping.filled(
        wire.DeadLetter,
        dead,
        reason=dead.reason.name if dead.reason is not None else None,
        dead_at_ms=letter.dead_at_ms,
        outcome=outcome.what if outcome is not None else "",
        outcome_at_ms=outcome.at_ms if outcome is not None else 0,
        outcome_note=outcome.note if outcome is not None else "",
        content=mapping.content_if_readable(letter.payload, with_body=with_body),
        failure=mapping.wire_reason(dead.failure),
    )
