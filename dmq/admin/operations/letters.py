"""Operations on dead letters, and on the jobs that redrive or purge them."""

from __future__ import annotations

from collections.abc import Sequence

from broker_adapter.contracts.errors import group_unknown
from broker_adapter.contracts.topics import dead_letter_topic
from dmq.admin.requests.status import DeadPage, DeadStatus
from dmq.broker.broker import EmbeddedBroker
from dmq.broker.operations.dead_letters import Letter
from dmq.runtime.slices import in_slices
from retry.dead_letter import DeadFilter, Job

_JOBS_SHOWN_MAX = 100


class Letters:
    """Dead letters of every group. Raise ``Refused`` for a group that does not exist and left none."""

    def __init__(self, broker: EmbeddedBroker) -> None:
        self._broker = broker

    async def dead_letters(
        self, group: str, chosen: DeadFilter, *, offset: int, limit: int, with_outcome: bool
    ) -> DeadPage:
        """Return dead letters of a group in the order of their death."""
        self._known_letters(group)
        page = await self._broker.dead_letters.page(
            group, chosen, offset=offset, limit=limit, with_outcome=with_outcome
        )
        letters = [_shown(letter) async for letter in in_slices(page.letters)]
        return DeadPage(letters=letters, next_offset=page.next_offset)

    async def start_job(self, job: Job, *, is_dry_run: bool) -> Job:
        """Start a redrive or a purge."""
        self._known_letters(job.group)
        return await self._broker.dead_letters.start(job, is_dry_run=is_dry_run)

    async def jobs(self, group: str) -> Sequence[Job]:
        """Return the jobs of a group, or of all, newest first."""
        return self._broker.dead_letters.jobs(group)[:_JOBS_SHOWN_MAX]

    async def stop_job(self, job_id: int) -> Job:
        """Stop a running job, durable on return; completed parts stay."""
        return await self._broker.dead_letters.stop(job_id)

    def group_of_job(self, job_id: int) -> str:
        """Return the group of a job; empty if there is no such job."""
        return next((job.group for job in self._broker.dead_letters.jobs() if job.job_id == job_id), "")

    def _known_letters(self, group: str) -> None:
        """Raise if a group does not exist and left no dead letters."""
        names = self._broker.names
        if dead_letter_topic(group) not in names.topics and group not in names.groups:
            raise group_unknown(group)


def _shown(letter: Letter) -> DeadStatus:
    outcome = letter.outcome
    return DeadStatus(
        dead=letter.dead,
        payload=letter.payload,
        dead_at_ms=letter.dead_at_ms,
        outcome=outcome.what if outcome is not None else "",
        outcome_at_ms=outcome.at_ms if outcome is not None else 0,
        outcome_note=outcome.note if outcome is not None else "",
    )
