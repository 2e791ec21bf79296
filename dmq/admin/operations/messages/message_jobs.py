"""RPCs of ``AdminService`` about bulk changes of pending messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.contracts.message import unpack_id
from broker_adapter.contracts.topics import check_topic
from dmq.admin import admin_v1 as wire
from dmq.admin.operations.messages.messages import listed
from dmq.admin.requests import mapping, validate
from dmq.admin.requests.message_query import filter_of
from dmq.broker import EmbeddedBroker
from dmq.broker.delayed import Changed, ChangeOutcome, HeldBy
from dmq.store.schema.operators.message_jobs import JobMessage, MessageJob

_JOBS_SHOWN_MAX: Final = 100


class MessageJobCalls:
    """RPCs of bulk changes. Raise ``Refused`` for invalid input, and for a topic or a job that does not exist."""

    def __init__(self, broker: EmbeddedBroker) -> None:
        self._broker = broker

    async def start_message_job(self, request: wire.StartMessageJobRequest) -> wire.StartMessageJobResponse:
        """Start a change of all pending messages that match a query, or count them (dry run)."""
        jobs = self._broker.message_jobs
        chosen = filter_of(request.topic, request.query, self._broker.store.clock.now_ms())
        job = validate.check_message_job(request, chosen)
        if not request.is_dry_run:
            return wire.StartMessageJobResponse(job=mapping.wire_message_job(await jobs.start(job)))
        would = await jobs.dry_run(job)
        samples = [listed(wire.WAITING, each.message, is_held=each.is_held) for each in would.samples]
        job = job.selected(would.matching)
        return wire.StartMessageJobResponse(job=mapping.wire_message_job(job), samples=samples)

    async def list_message_jobs(self, request: wire.ListMessageJobsRequest) -> wire.ListMessageJobsResponse:
        """List the newest jobs of a topic, or of all."""
        found = self._broker.message_jobs.jobs(check_topic(request.topic) if request.topic else "")
        return wire.ListMessageJobsResponse(jobs=[mapping.wire_message_job(job) for job in found[:_JOBS_SHOWN_MAX]])

    async def list_message_job_outcomes(
        self, request: wire.ListMessageJobOutcomesRequest
    ) -> wire.ListMessageJobOutcomesResponse:
        """List a page of the messages of a job with their outcomes."""
        job = self._job(request.job_id)
        page = await self._broker.message_jobs.outcomes(
            job.job_id,
            offset=validate.check_offset(request.offset),
            limit=validate.check_limit(request.limit),
            only_missed=request.only_missed,
        )
        held = await self._held_by(job, page.messages)
        messages = [
            wire.ChangedMessage(
                message_id=unpack_id(each.message_id),
                outcome=wire.ChangedMessage.Outcome.Name(each.outcome),
                at_ms=each.at_ms,
                held_by=by.name,
            )
            for each, by in zip(page.messages, held, strict=True)
        ]
        return wire.ListMessageJobOutcomesResponse(messages=messages, next_offset=page.next_offset)

    async def stop_message_job(self, request: wire.StopMessageJobRequest) -> wire.StopMessageJobResponse:
        """Stop a running job, durable on return; completed parts stay."""
        job = await self._broker.message_jobs.stop(validate.check_job_id(request.job_id))
        return wire.StopMessageJobResponse(job=mapping.wire_message_job(job))

    async def resume_message_job(self, request: wire.ResumeMessageJobRequest) -> wire.ResumeMessageJobResponse:
        """Continue a stopped job, durable on return."""
        job = await self._broker.message_jobs.resume(validate.check_job_id(request.job_id))
        return wire.ResumeMessageJobResponse(job=mapping.wire_message_job(job))

    def topic_of_job(self, job_id: int) -> str:
        """Return the topic of a job; empty if there is no such job."""
        job = self._broker.message_jobs.find(job_id)
        return job.topic if job is not None else ""

    def _job(self, job_id: int) -> MessageJob:
        job = self._broker.message_jobs.find(validate.check_job_id(job_id))
        if job is None:
            raise Refused(Rule.NOT_FOUND, "no job has this number", value=job_id)
        return job

    async def _held_by(self, job: MessageJob, messages: Sequence[JobMessage]) -> list[HeldBy]:
        """Return for each message whether its topic holds it although it is due now."""
        if job.topic not in self._broker.names.topics:
            return [HeldBy.NOTHING] * len(messages)
        changed = [
            Changed(ChangeOutcome(each.outcome) if each.outcome else ChangeOutcome.UNKNOWN, each.at_ms)
            for each in messages
        ]
        return list(await self._broker.delayed.held_by(job.topic, changed))
