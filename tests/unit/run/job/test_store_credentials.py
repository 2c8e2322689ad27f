"""What opens the store on the nodes: rights of their own, or keys made for them; fresh keys where keys expire (F16)."""

from __future__ import annotations

from pathlib import Path

import pytest
from mgpu_train.agent.status.status import Phase
from mgpu_train.config import Secrets
from mgpu_train.timeouts import Timeouts

from mgpu.errors import ConnectionFailed, InputError, Transient
from mgpu.events import Warned
from mgpu.run.job.request import require_secrets, resolve, secrets_of, store_keys
from mgpu.run.job.store_credentials import StoreKeys
from mgpu.run.supervision.background_calls import BackgroundCalls
from mgpu.run.supervision.credential_renewal import EVERY_S, CredentialRenewal
from mgpu.spec.model import RunSpec
from mgpu.spec.provider import Capabilities

STATIC = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "eu-west-1", "AWS_PROFILE": "p"}
PLACE = {"AWS_REGION": "eu-west-1"}


class Session:
    """What boto3 finds, with keys that change when they are renewed."""

    region_name = "eu-north-1"

    def __init__(self) -> None:
        self.serial = 1
        self.error: Exception | None = None
        self.made = 0

    def __call__(self) -> Session:
        self.made += 1
        return self

    def get_credentials(self) -> Session | None:
        return self

    def get_frozen_credentials(self) -> Session:
        if self.error:
            raise self.error
        return self

    @property
    def access_key(self) -> str:
        return f"id-{self.serial}"

    secret_key, token = "secret", "token"


@pytest.fixture
def session(monkeypatch) -> Session:
    made = Session()
    monkeypatch.setattr("boto3.Session", made)
    return made


def spec(to="s3://bucket/runs", data=()) -> RunSpec:
    more = {"command": ["t.py"], "checkpoint": {"to": to}, "data": [{"from": url, "to": "d"} for url in data]}
    return RunSpec.model_validate({"name": "a", "provider": "aws", "max_hours": 1, "max_price_usd_per_hour": 1} | more)


class Here:
    """A provider whose machines are this one."""

    capabilities = Capabilities(this_machine=True)


def keys(*urls, environ=None, provider=Here) -> StoreKeys:
    return StoreKeys("run-1", STATIC if environ is None else environ, provider and provider(), reads=urls)


def request(data=()):
    return resolve(spec(data=data), "run-1", Path("/base"), timeouts=Timeouts())


def test_on_this_machine_the_operators_keys_open_it_and_nothing_else_of_the_environment_is_given():
    assert keys("s3://b/x").now() == {name: value for name, value in STATIC.items() if name != "AWS_PROFILE"}
    assert keys("file:///x").now() == {}


def test_the_operators_keys_go_to_no_other_machine(session):
    elsewhere = type("Elsewhere", (), {"capabilities": Capabilities()})
    for provider in (elsewhere, None):
        for environ in (STATIC, {}):
            with pytest.raises(InputError, match="no credentials of the object store for the nodes") as caught:
                keys("s3://b/x", environ=environ, provider=provider).now()
            assert "MGPU_STORE_ACCESS_KEY_ID" in caught.value.next_step
        assert keys("file:///x", provider=provider).now() == {}
    assert session.made == 0


def test_keys_that_were_made_for_nodes_go_instead_of_all_others(world, session):
    made = {"MGPU_STORE_ACCESS_KEY_ID": "theirs", "MGPU_STORE_SECRET_ACCESS_KEY": "s"}
    sent = {**PLACE, "AWS_ACCESS_KEY_ID": "theirs", "AWS_SECRET_ACCESS_KEY": "s"}
    for provider in (Here, None, lambda: world.cloud):
        assert keys("s3://b/x", environ=STATIC | made, provider=provider).now() == sent
    assert world.cloud.granted == []
    with pytest.raises(InputError, match="belong together"):
        keys("s3://b/x", environ={"MGPU_STORE_ACCESS_KEY_ID": "theirs"}).now()


def test_where_the_provider_gives_machines_rights_nothing_secret_of_the_operator_travels(world, session):
    wanted = request(data=["s3://bucket/tokens", "file:///here"])
    require_secrets(wanted, STATIC, world.cloud)
    assert world.cloud.granted == [], "a look gives none"
    kept = store_keys(wanted, STATIC, world.cloud)
    assert kept.now() == kept.now() == {"MGPU_STORE_ROLE": "role-of-run-1"} | PLACE
    assert world.cloud.granted == [("run-1", ["s3://bucket/tokens"], ["s3://bucket/runs/run-1"])]
    assert secrets_of(wanted, STATIC, world.cloud).store == {"MGPU_STORE_ROLE": "role-of-run-1"} | PLACE
    assert session.made == 0, "nobody is asked for keys that are not needed"


def test_rights_that_cannot_be_given_are_told_before_anything_is_made(world):
    wanted = request()
    for look in (require_secrets, secrets_of):
        world.cloud.refuses["store"] = [Transient("503")]
        with pytest.raises(Transient):
            look(wanted, STATIC, world.cloud)
    assert world.cloud.granted == []


def test_keys_of_a_profile_are_asked_for_again_from_the_session_that_renews_them(session):
    kept = keys("s3://b/x", environ={})
    assert kept.now() == {
        "AWS_ACCESS_KEY_ID": "id-1", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_SESSION_TOKEN": "token",
        "AWS_REGION": "eu-north-1",
    }  # fmt: skip
    session.serial = 2
    assert kept.now()["AWS_ACCESS_KEY_ID"] == "id-2"
    assert session.made == 1


def test_keys_that_cannot_be_renewed_are_an_input_error_without_a_traceback(session):
    from botocore.exceptions import UnauthorizedSSOTokenError

    session.error = UnauthorizedSSOTokenError()
    with pytest.raises(InputError, match="cannot be used") as caught:
        keys("s3://b/x", environ={}).now()
    assert "aws sso login" in caught.value.next_step


# --- sent to agents that live -----------------------------------------------------------------------------------------


class Bench:
    """Two nodes that train, and a renewal whose clock the test sets."""

    def __init__(self, world, keys, sent):
        world.has_nodes(2)
        record = world.record("run-1")
        self.world, self.now, self.calls, self.said = world, 0.0, BackgroundCalls(), []
        self.monitors = [Monitor(node) for node in world.nodes]
        for node in world.nodes:
            node.says(Phase.TRAINING)
        session = type("S", (), {"record": record, "timeouts": world.timeouts})()
        self.renewal = CredentialRenewal(session, keys, sent, lambda: self.now, self.said.append)

    def passes(self, seconds=0.0, count=2):
        self.now += seconds
        for _ in range(count):
            self.renewal.round(self.monitors, self.calls)
            self.calls.wait(5)

    @property
    def given(self):
        """How often each node was given keys, and which they were last."""
        asked = [sum(argv[0] == "renew" for argv in node.agent) for node in self.world.nodes]
        return asked, [node.renewed.get("AWS_ACCESS_KEY_ID") for node in self.world.nodes]


class Monitor:
    def __init__(self, node):
        self.node, self.rank, self.dead, self.status = node, node.target.rank, False, None


@pytest.fixture
def bench(world, session):
    def make(sent):
        return Bench(world, keys("s3://b/x", environ={}), sent)

    return make


def test_new_keys_are_sent_to_every_agent_before_the_old_ones_end(bench, session):
    sent = keys("s3://b/x", environ={}).now()
    made = bench(sent)
    made.passes()
    made.passes(EVERY_S)
    assert made.given == ([0, 0], [None, None]), "they have these"
    session.serial = 2
    made.passes(EVERY_S - 1)
    assert made.given == ([0, 0], [None, None])
    made.passes(1)
    made.passes(EVERY_S)
    assert made.given == ([1, 1], ["id-2", "id-2"])


def test_who_attaches_sends_them_at_once(bench):
    made = bench(None)
    made.passes()
    assert made.given == ([1, 1], ["id-1", "id-1"])


def test_a_node_that_cannot_be_reached_gets_them_when_it_can(bench):
    made = bench(None)
    made.world.nodes[1].closed = True
    made.passes(count=4)
    assert made.given[0] == [1, 0]
    made.world.nodes[1].closed = False
    made.world.nodes[1].faults["renew"] = [ConnectionFailed("lost")]
    made.passes(count=1)
    assert "node 1 could not be given" in made.said[0]
    made.passes(count=3)
    assert made.given == ([1, 1], ["id-1", "id-1"])


def test_keys_that_cannot_be_had_are_told_and_the_nodes_keep_theirs(bench, session):
    made = bench(None)
    session.get_credentials = lambda: None
    made.passes()
    assert made.given[0] == [0, 0]
    assert "no credentials" in made.said[0]
    del session.get_credentials
    made.passes(EVERY_S)
    assert made.given[0] == [1, 1]


def test_an_agent_that_has_ended_is_left_alone(bench):
    made = bench(None)
    made.monitors[0].dead = True
    made.passes(count=4)
    assert made.given[0] == [0, 1]


def test_a_later_attempt_has_the_keys_of_its_time(world, session):
    from mgpu.run.lifecycle.supervise import fresh_secrets

    kept = keys("s3://b/x", environ={})
    before = Secrets(env={"TOKEN": "t"}, store=kept.now())
    session.serial = 2
    run = type("S", (), {"emit": world.events.append, "stores": {"local": before.store}})()
    assert fresh_secrets(run, before, kept, "local").store["AWS_ACCESS_KEY_ID"] == "id-2"
    session.get_credentials = lambda: None
    fresh = keys("s3://b/x", environ={})
    assert fresh_secrets(run, before, fresh, "local").store["AWS_ACCESS_KEY_ID"] == "id-2"
    assert "no credentials" in world.of(Warned)[0].text


def test_the_nodes_of_another_provider_never_get_them(world, session):
    from mgpu.run.lifecycle.supervise import fresh_secrets

    run = type("S", (), {"emit": world.events.append, "stores": {"local": {"AWS_ACCESS_KEY_ID": "the operator's"}}})()
    session.get_credentials = lambda: None
    with pytest.raises(InputError, match="no credentials"):
        fresh_secrets(run, Secrets(), keys("s3://b/x", environ={}), "yard")
