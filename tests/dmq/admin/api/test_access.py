"""The admin service behind access keys: what each role may, and what a key with rules alone may."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest
from google.protobuf.message import Message
from support.forges.messages.letters import a_message
from support.rigs.commands.live_cell import LiveCell
from support.rigs.daemon.acl import HOOK, OPERATOR, SHOP, Key, write_acl

from broker_adapter.contracts.errors import Refused
from broker_adapter.runtime.clock import ManualClock
from dmq.acl.file import KeyFile
from dmq.acl.guard import Authenticator
from dmq.admin import admin_v1 as wire
from dmq.admin.api.access import RPCS
from dmq.admin.api.dispatch import AdminDispatcher, why_of
from dmq.admin.api.service import AdminService, refusal_of

GOLDEN = Path(__file__).with_name("access.golden")
CLOCK = ManualClock()
OWN, OTHER = "redelivery", "billing"  # of HOOK, and not
VIEWER, READER, ON_CALL = Key("viewer", "v"), Key("reader-of-all", "r"), Key("on-call", "o")
ROLES = """
[keys.viewer]
secret = "v"
role = "viewer"

[keys.reader-of-all]
secret = "r"
role = "viewer"
bodies = true

[keys.on-call]
secret = "o"
role = "operator"
topics = { "orders*" = "ADMIN" }
groups = { "billing*" = "ADMIN" }

[keys.shop]
secret = "shop-secret-3f9c"
topics = { "orders*" = "PUB|SUB" }
groups = { "billing*" = "SUB" }

[keys.hook]
secret = "hook-secret-91be"
topics = { "redelivery_*" = "PUB|SUB" }
groups = { "redelivery" = "SUB|ADMIN" }

[keys.operator]
secret = "operator-secret-c041"
admin = true
"""
ADMITTED, FORBIDDEN, UNAUTHORIZED = 0, 7, 16  # statuses of gRPC
CHANGING = sorted(rpc for rpc, access in RPCS.items() if access.changes(wire.METHODS[rpc].request_class()))
LOOKING = sorted(RPCS.keys() - set(CHANGING))


class LiveDispatcher(NamedTuple):
    """The dispatcher, and the daemon on whose loop it runs."""

    dispatcher: AdminDispatcher
    live: LiveCell


@pytest.fixture(scope="module")
def dispatcher(live: LiveCell, tmp_path_factory: pytest.TempPathFactory) -> LiveDispatcher:
    guard = Authenticator(KeyFile(write_acl(tmp_path_factory.mktemp("acl"), ROLES), CLOCK), CLOCK)
    return LiveDispatcher(AdminDispatcher(AdminService(live.cell), guard), live)


def status_of(dispatcher: LiveDispatcher, key: Key, rpc: str, request: Message) -> int:
    """Return the status with which a call ends, as far as the key is concerned."""
    serve = dispatcher.dispatcher.serve(
        wire.METHODS[rpc].path, request.SerializeToString(), dict(key.signer(CLOCK).metadata()).get, "loopback"
    )
    try:
        dispatcher.live.do(serve)
    except Exception as error:  # noqa: BLE001 - what the service makes of an empty request is no matter here
        code = refusal_of(error).code
        return code if isinstance(error, Refused) and code in {FORBIDDEN, UNAUTHORIZED} else ADMITTED
    return ADMITTED


def request_of(rpc: str, topic: str, group: str) -> Message:
    request = wire.METHODS[rpc].request_class()
    for name, value in (("topic", topic), ("group", group)):
        if name in request.DESCRIPTOR.fields_by_name:
            setattr(request, name, value)
    if isinstance(request, wire.AddScheduleRequest):
        request.schedule.topic = topic
    return request


def samples(rpc: str) -> list[Message]:
    """Return requests of an RPC with each combination of the fields that its access depends on."""
    values: dict[str, tuple[object, object]] = {"topic": ("", "orders"), "group": ("", "billing")}
    values |= dict.fromkeys(("with_body", "unmasked", "is_dry_run", "all_groups"), (False, True))
    values |= {"to_topic": ("", "refunds"), "number": (0, 1)}
    request_class = wire.METHODS[rpc].request_class
    if request_class is wire.AddScheduleRequest:
        return [wire.AddScheduleRequest(schedule=wire.Schedule(topic="orders"))]
    fields = [name for name in values if name in request_class.DESCRIPTOR.fields_by_name]
    return [
        request_class(**dict(zip(fields, given, strict=True))) for given in product(*(values[name] for name in fields))
    ]


def rights(rpc: str, request: Message) -> str:
    """Return the rights that a request needs, with a schedule of ``orders`` and a job of ``billing`` in the store."""
    access = RPCS[rpc]
    needs = access.needs(request, "billing" if wire.Access.JOB in access.scopes else "orders")
    return " and ".join(f"{need} ({need.role})" for need in needs) or "nothing"


def test_the_rights_of_each_call_are_those_of_the_golden_table() -> None:
    """The rights for any request of a call, those for one request, and which calls are recorded."""
    lines = []
    for rpc in wire.METHODS:
        lines.append(f"{rpc}: {RPCS[rpc].at_all} ({RPCS[rpc].at_all.role})")
        for request in samples(rpc):
            recorded = ", recorded" if RPCS[rpc].changes(request) else ""
            given = " ".join(f"{field.name}={value}" for field, value in request.ListFields() if not field.message_type)
            lines.append(f"    ({given}): {rights(rpc, request)}{recorded}")
    assert lines == GOLDEN.read_text(encoding="utf-8").splitlines()


def test_every_call_of_operators_is_classed() -> None:
    """One that was added and not classed is found here, and so is one that is gone."""
    assert set(RPCS) == set(wire.METHODS)


@pytest.mark.parametrize("rpc", sorted(wire.METHODS))
def test_an_operator_may_call_everything_and_others_nothing(rpc: str, dispatcher: LiveDispatcher) -> None:
    """Whatever the request says."""
    request = wire.METHODS[rpc].request_class()
    assert status_of(dispatcher, OPERATOR, rpc, request) == ADMITTED
    assert status_of(dispatcher, Key("operator", "guess"), rpc, request) == UNAUTHORIZED


def test_a_viewer_looks_at_everything_and_changes_nothing(dispatcher: LiveDispatcher) -> None:
    """By the table's own word on what changes something, all RPCs; bodies are for one that was given them."""
    assert len(CHANGING) > 20
    for rpc in CHANGING:
        for key in (VIEWER, READER):
            assert status_of(dispatcher, key, rpc, request_of(rpc, "orders", "billing")) == FORBIDDEN, rpc
    for rpc in LOOKING:
        request = request_of(rpc, "orders", "billing")
        if rpc == "TakeSnapshot":
            assert status_of(dispatcher, VIEWER, rpc, request) == FORBIDDEN, "it writes a file"
            continue
        if rpc == "Subscribe":
            assert status_of(dispatcher, VIEWER, rpc, request) == FORBIDDEN, "it is as a receive, which is not recorded"
            continue
        if rpc == "VerifyLedger":
            assert status_of(dispatcher, VIEWER, rpc, request) == FORBIDDEN, "to begin one reads the whole store"
            request = wire.VerifyLedgerRequest(number=1)
        assert status_of(dispatcher, VIEWER, rpc, request) == ADMITTED, rpc
        if "with_body" in request.DESCRIPTOR.fields_by_name and rpc != "GetSchedule":  # there is no schedule here
            request = type(request)(**{"group" if rpc == "ListDeadLetters" else "topic": "orders"}, with_body=True)
            assert status_of(dispatcher, VIEWER, rpc, request) == FORBIDDEN, rpc
            assert status_of(dispatcher, READER, rpc, request) == ADMITTED, rpc
    dry = wire.StartJobRequest(group="billing", is_dry_run=True)
    assert status_of(dispatcher, VIEWER, "StartJob", dry) == ADMITTED


@pytest.mark.parametrize("key", [VIEWER, READER, ON_CALL, SHOP, HOOK], ids=lambda key: key.access_key)
def test_a_key_learns_the_calls_that_it_allows(key: Key, dispatcher: LiveDispatcher) -> None:
    """The answer has each call that the daemon then admits for the topic and group, and no other."""
    of_objects = {
        "StopJob",
        "ResumeJob",
        "ListMessageJobOutcomes",
        "StopMessageJob",
        "ResumeMessageJob",
        "GetSchedule",
        "PauseSchedule",
        "ResumeSchedule",
        "RemoveSchedule",
    }  # there are none here
    for topic, group in (("orders-new", "billing-new"), ("redelivery_new", OWN), ("prices-new", "shipping-new")):
        listed = set(access_of(dispatcher, key, topic, group).rpcs)
        for rpc in wire.METHODS.keys() - of_objects:
            admitted = status_of(dispatcher, key, rpc, request_of(rpc, topic, group)) == ADMITTED
            assert (rpc in listed) == admitted, (rpc, topic, group)
        assert ("PauseSchedule" in listed) == ("SetTopic" in listed)


def test_a_key_learns_its_role_and_calls_about_any_name(dispatcher: LiveDispatcher) -> None:
    """Without names a call is listed if a rule allows it for some name; an admin key has all."""
    admin = access_of(dispatcher, OPERATOR)
    assert (admin.key, admin.role, list(admin.rpcs)) == ("operator", "admin", list(wire.METHODS))
    on_call = access_of(dispatcher, ON_CALL)
    assert (on_call.role, "SetTopic" in on_call.rpcs, "SetQuota" in on_call.rpcs) == ("operator", True, False)
    viewer = access_of(dispatcher, VIEWER)
    assert (viewer.role, set(CHANGING) & set(viewer.rpcs)) == ("viewer", set())


def access_of(dispatcher: LiveDispatcher, key: Key, topic: str = "", group: str = "") -> wire.GetAccessResponse:
    """Return the answer of the daemon."""
    request = wire.GetAccessRequest(topic=topic, group=group).SerializeToString()
    signed = dict(key.signer(CLOCK).metadata()).get
    serve = dispatcher.dispatcher.serve(wire.METHODS["GetAccess"].path, request, signed, "loopback")
    return wire.GetAccessResponse.FromString(dispatcher.live.do(serve))


OF_TOPICS = ("CreateTopic", "SetTopic", "RemoveTopic", "ChangeMessages", "StartMessageJob", "AddSchedule")
OF_GROUPS = (
    *("CreateGroup", "RemoveGroup", "ResetGroup", "SetGroup", "RunRetriesNow", "EndRetries", "StartJob"),
    *("GetGroup", "ListRetries", "ListDeadLetters", "ListJobs"),
)


def test_an_operator_changes_the_operators_settings(dispatcher: LiveDispatcher) -> None:
    """The topics and groups that he has ADMIN on, no others, and not the cell."""
    by_name = {
        "StopJob",
        "ResumeJob",
        "StopMessageJob",
        "ResumeMessageJob",
        "PauseSchedule",
        "ResumeSchedule",
        "RemoveSchedule",
    }  # of what there is none here
    for rpc in CHANGING:
        if rpc in by_name:
            continue
        if rpc == "StartAudit":  # it changes no message
            assert status_of(dispatcher, ON_CALL, rpc, wire.StartAuditRequest()) == ADMITTED
            assert status_of(dispatcher, VIEWER, rpc, wire.StartAuditRequest()) == FORBIDDEN
            continue
        of_them = rpc in {*OF_TOPICS, *OF_GROUPS}
        own = status_of(dispatcher, ON_CALL, rpc, request_of(rpc, "orders-eu", "billing-eu"))
        assert own == (ADMITTED if of_them else FORBIDDEN), rpc
        assert status_of(dispatcher, ON_CALL, rpc, request_of(rpc, "prices", "shipping")) == FORBIDDEN, rpc
    assert status_of(dispatcher, ON_CALL, "GetStatus", wire.GetStatusRequest()) == ADMITTED


@pytest.mark.parametrize("rpc", OF_GROUPS)
def test_a_group_has_its_own_administrators(rpc: str, dispatcher: LiveDispatcher) -> None:
    """As ever they look after that group, and no other, and not all; to make, remove or reset it takes an operator."""
    request_class = wire.METHODS[rpc].request_class
    may = FORBIDDEN if rpc in {"CreateGroup", "RemoveGroup", "ResetGroup"} else ADMITTED
    assert status_of(dispatcher, HOOK, rpc, request_class(group=OWN)) == may
    assert status_of(dispatcher, HOOK, rpc, request_class(group=OTHER)) == FORBIDDEN
    assert status_of(dispatcher, HOOK, rpc, request_class()) == FORBIDDEN
    assert status_of(dispatcher, SHOP, rpc, request_class(group="billing")) == FORBIDDEN


def test_an_administrator_of_a_group_that_may_consume_may_subscribe_it(dispatcher: LiveDispatcher) -> None:
    """Both are needed: it reads the topic from then on."""
    for topic, group, may in (
        ("redelivery_notes", OWN, True),
        ("orders", OWN, False),
        ("redelivery_notes", OTHER, False),
    ):
        status = status_of(dispatcher, HOOK, "Subscribe", wire.SubscribeRequest(group=group, topic=topic))
        assert (status == ADMITTED) == may, (topic, group)
    for key in (SHOP, VIEWER):
        assert status_of(dispatcher, key, "Subscribe", wire.SubscribeRequest(group=OWN, topic="orders")) == FORBIDDEN


def test_the_starter_of_a_job_may_stop_it(dispatcher: LiveDispatcher) -> None:
    """ADMIN on its group is enough for both."""
    request = wire.StopJobRequest(job_id=1)
    assert status_of(dispatcher, HOOK, "StopJob", request) == ADMITTED  # there is none
    assert status_of(dispatcher, SHOP, "StopJob", request) == FORBIDDEN
    of_job = RPCS["StopJob"].needs(request, OWN)
    assert list(of_job) == list(RPCS["StartJob"].needs(wire.StartJobRequest(group=OWN)))


def test_a_job_is_resumed_with_the_rights_of_its_start(dispatcher: LiveDispatcher, live: LiveCell) -> None:
    """A redrive to all groups, which an admin started, is not continued by the administrator of its group."""
    jobs = {}
    for all_groups in (False, True):
        request = wire.StartJobRequest(kind=wire.REDRIVE, group=OWN, all_groups=all_groups, rate_per_s=0.001)
        jobs[all_groups] = live.ask(request).job.job_id
        live.ask(wire.StopJobRequest(job_id=jobs[all_groups]))
    for all_groups, status in ((False, ADMITTED), (True, FORBIDDEN)):
        resume = wire.ResumeJobRequest(job_id=jobs[all_groups])
        assert status_of(dispatcher, HOOK, "ResumeJob", resume) == status
        assert status_of(dispatcher, OPERATOR, "ResumeJob", resume) == ADMITTED
        assert status_of(dispatcher, SHOP, "ResumeJob", resume) == FORBIDDEN


@pytest.mark.parametrize(
    "rpc", ["GetTopic", "CountMessages", "GetMessage", "PeekMessages", "ListMessages", "GetLedger", "ListSchedules"]
)
def test_a_key_looks_at_its_own_topics(rpc: str, dispatcher: LiveDispatcher) -> None:
    """Those that it may send to or consume, with bodies those that it may consume, and no others."""
    request_class = wire.METHODS[rpc].request_class
    assert status_of(dispatcher, SHOP, rpc, request_class(topic="orders")) == ADMITTED
    assert status_of(dispatcher, SHOP, rpc, request_class(topic="prices")) == FORBIDDEN
    assert status_of(dispatcher, SHOP, rpc, request_class()) == FORBIDDEN
    assert status_of(dispatcher, HOOK, rpc, request_class(topic="orders")) == FORBIDDEN


def test_a_topic_is_its_senders(dispatcher: LiveDispatcher) -> None:
    """Who may send to it may change what waits in it, and in no other one."""
    assert status_of(dispatcher, SHOP, "ChangeMessages", wire.ChangeMessagesRequest(topic="orders")) == ADMITTED
    assert status_of(dispatcher, SHOP, "ChangeMessages", wire.ChangeMessagesRequest(topic="billing")) == FORBIDDEN
    assert status_of(dispatcher, HOOK, "ChangeMessages", wire.ChangeMessagesRequest(topic="orders")) == FORBIDDEN


async def _sent(live: LiveCell) -> None:
    due_ms = live.rig.clock.now_ms() + 3_600_000
    await live.rig.broker.send([a_message("W", topic="orders", deliver_at_ms=due_ms)])


def test_a_bulk_change_is_for_the_senders_of_its_topic(dispatcher: LiveDispatcher, live: LiveCell) -> None:
    """A key that may send to the topic starts, stops and resumes it; a viewer reads its outcomes."""
    live.do(_sent(live))
    start = wire.StartMessageJobRequest(topic="orders", query="tag:none", cancel=True)
    assert status_of(dispatcher, HOOK, "StartMessageJob", start) == FORBIDDEN
    assert status_of(dispatcher, VIEWER, "StartMessageJob", start) == FORBIDDEN
    assert status_of(dispatcher, SHOP, "StartMessageJob", start) == ADMITTED
    (job,) = live.ask(wire.ListMessageJobsRequest(topic="orders")).jobs
    for rpc in ("StopMessageJob", "ResumeMessageJob"):
        request = wire.METHODS[rpc].request_class(job_id=job.job_id)
        assert status_of(dispatcher, SHOP, rpc, request) == ADMITTED
        assert status_of(dispatcher, HOOK, rpc, request) == FORBIDDEN
        assert status_of(dispatcher, VIEWER, rpc, request) == FORBIDDEN
    listing = wire.ListMessageJobOutcomesRequest(job_id=job.job_id, limit=1)
    assert status_of(dispatcher, VIEWER, "ListMessageJobOutcomes", listing) == ADMITTED
    assert status_of(dispatcher, HOOK, "ListMessageJobOutcomes", listing) == FORBIDDEN


def test_a_redrive_to_another_topic_is_a_send(dispatcher: LiveDispatcher) -> None:
    """Who looks after a group may not send wherever they like."""
    assert (
        status_of(dispatcher, HOOK, "StartJob", wire.StartJobRequest(group=OWN, to_topic="redelivery_orders"))
        == ADMITTED
    )
    assert status_of(dispatcher, HOOK, "StartJob", wire.StartJobRequest(group=OWN, to_topic="orders")) == FORBIDDEN
    assert status_of(dispatcher, HOOK, "StartJob", wire.StartJobRequest(group=OWN, all_groups=True)) == FORBIDDEN


@pytest.mark.parametrize("given", ["x" * 201, "a%0Ab", "%00", "x" * 10_000])
def test_a_reason_that_cannot_be_kept_is_refused(given: str) -> None:
    """Before anything is done; one of other letters is read."""
    with pytest.raises(Refused, match="200 printable characters"):
        why_of(lambda _: given)
    assert why_of(lambda _: "gr%C3%BCn") == "grün"
