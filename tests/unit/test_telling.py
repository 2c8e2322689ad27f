"""Somebody is told of what matters, once, and also when nobody could be reached at first."""

from __future__ import annotations

import hashlib
import hmac
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NoReturn

import pytest
from mgpu_train.store import Unavailable
from mgpu_train.store.file import FileStore
from waiting import until

from mgpu.backend import outbox
from mgpu.errors import InputError, StackError
from mgpu.events import (
    AttemptEnded,
    CheckpointCommitted,
    Event,
    RunEnded,
    RunRegressed,
    RunStateChanged,
    ScheduleMissed,
    SpendChanged,
    Warned,
)
from mgpu.run.record.folder import Folder
from mgpu.run.record.record import Record, State, load, save
from mgpu.sinks import command, delivery
from mgpu.sinks.delivery import Delivery, Makers, of_submission
from mgpu.spec import sink
from mgpu.spec.load import loads

RUN, SUBMISSION = "night-1125-abcde", "submissions/nightly.u1"
FILE = """
name: night
provider: local
max_price_usd_per_hour: 1
max_hours: 1
command: [train.py]
"""
ENDED = RunEnded(
    RUN, 2, 9.0, state="succeeded", reason="", fault=None, stop_reason=None, exit_code=0, teardown="confirmed",
    spent_usd=4.2, step=300, checkpoint_step=300,
)  # fmt: skip
LOST = AttemptEnded(RUN, 1, 5.0, succeeded=False, reason="node 1 is gone", fault="provider", step=40)
REPAIRING = RunStateChanged(RUN, 1, 5.1, state="repairing", before="running")


class Service:
    """An HTTP server that writes down what it is told, and answers what a test wants."""

    def __init__(self) -> None:
        self.told: list[tuple[dict[str, str], bytes]] = []
        self.paths: list[str] = []
        self.answers: list[int] = []
        self.says = b""
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                answer = service.answers.pop(0) if service.answers else 200
                if answer < 300:
                    service.told.append((dict(self.headers), body))
                    service.paths.append(self.path)
                self.send_response(answer)
                self.send_header("Content-Length", str(len(service.says)))
                self.end_headers()
                self.wfile.write(service.says)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [json.loads(body) for _, body in self.told]


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture
def told(tmp_path: Path, xdg: Path, monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """What the console hears; the run has a record."""
    monkeypatch.setattr(outbox, "WAITS_S", float("inf"))  # it is 1970 in these stories
    save(
        Record(
            *(RUN, "night", "p", str(tmp_path), "/p/mgpu.yaml", "s", True, "f", "local", 1), recoveries=1,
            metrics={"validation_loss": 1.91, "bleu": 31.0, "loss_scale": 8.0, "lr": 0.1},
            first_metrics={"validation_loss": 5.5}, expect={"bleu": {"min": 30}, "cost_usd": {"max": 5}},
        )
    )  # fmt: skip
    return []


def emits(told: list[Event], sinks: str, *events: Event) -> None:
    """One command of the run, whose run file has these sinks."""
    Folder(RUN).run_file.write_text(f"{FILE}sinks:\n{sinks}")
    deliver = Delivery(told.append)
    for event in events:
        deliver.emit(event)
    deliver.close(60)


def tell_again(told: list[Event], submission: Path | None = None) -> None:
    """What a pass does with what waits; `submission`: of the one schedule."""

    def of_schedule(whose: str) -> Makers:
        assert submission is not None
        return of_submission(submission, whose, submission.parent)

    delivery.tell_again(told.append, of_schedule)


def warned(told: list[Event]) -> str:
    return "\n".join(event.text for event in told if isinstance(event, Warned))


def test_a_webhook_is_told_signed_of_what_matters(told, service, monkeypatch):
    monkeypatch.setenv("HOOK_SECRET", "canary-5ecret")
    budget = SpendChanged(RUN, 1, 4.0, spent_usd=5.0, max_usd=10.0)
    committed = CheckpointCommitted(RUN, 1, 4.5, checkpoint_id="a001-step-40", step=40)
    block = f"  webhook: {{url: '{service.url}', secret: HOOK_SECRET}}\n"
    month = SpendChanged(RUN, 1, 4.2, spent_usd=1600.0, max_usd=2000.0, limit="usd_per_month")
    emits(told, block, budget, month, committed, LOST, REPAIRING, ENDED)
    assert [(each["event"], each["title"]) for each in service.messages] == [
        ("budget", f"run {RUN}: $5.00 of $10.00 are spent"),
        ("budget", "all runs of this month: $1600.00 of $2000.00 are spent"),
        ("interrupted", f"run {RUN} was interrupted"),
        ("ended", f"run {RUN} succeeded"),
    ]
    assert service.messages[2]["text"].startswith("node 1 is gone")
    assert (
        service.messages[3]["text"]
        == f"step 300, bleu 31, validation_loss 1.91, $4.20, 1 recoveries\nmgpu status {RUN}"
    )
    assert service.messages[3]["data"]["event"] == "RunEnded"
    for headers, body in service.told:
        assert headers["X-Mgpu-Signature"] == "sha256=" + hmac.new(b"canary-5ecret", body, hashlib.sha256).hexdigest()
        assert headers["X-Mgpu-Id"] == json.loads(body)["id"]
    assert "canary" not in str(service.told) + warned(told)


@pytest.mark.parametrize(("before", "told_of"), [("running", ["interrupted"]), ("provisioning", [])])
def test_a_run_that_is_queued_again_was_interrupted_if_it_ran(told, service, before, told_of):
    """On a kept fleet that others use, too; else the fleet was gone before anything had begun."""
    again = RunStateChanged(RUN, 1, 5.1, state="queued", before=before)
    emits(told, f"  webhook: {{url: '{service.url}'}}\n", LOST, again)
    assert [each["event"] for each in service.messages] == told_of


def test_what_is_told_can_be_chosen(told, service):
    committed = CheckpointCommitted(RUN, 1, 4.5, checkpoint_id="a001-step-40", step=40)
    block = f"  webhook: {{url: '{service.url}', events: [checkpoint, state]}}\n"
    emits(told, block, committed, LOST, REPAIRING, ENDED)
    assert [each["event"] for each in service.messages] == ["checkpoint", "state"]


REGRESSED = RunRegressed(
    RUN, 2, 8.9, schedule="nightly", code="git+https://host/you/llm@0123abc",
    checks=({"metric": "loss", "met": False, "said": "2.01 > 1.93, the median of 7 runs + 2 %", "value": 2.01},),
)  # fmt: skip
MISSED = ScheduleMissed("nightly", 1_800_000_000.0, 1_799_990_000.0, 2, "nobody looked until 7.2 h later")


def test_a_regression_is_told_with_what_it_was_compared_with(told, service):
    block = f"  webhook: {{url: '{service.url}'}}\n"
    emits(told, block, REGRESSED, replace(ENDED, exit_code=6, reason="loss 2.01"))
    first, last = service.messages
    assert (first["event"], first["title"]) == ("regression", f"schedule nightly: run {RUN} is not as expected")
    assert (
        first["text"] == f"loss 2.01 > 1.93, the median of 7 runs + 2 %\n{REGRESSED.code}\nmgpu schedule show nightly"
    )
    assert first["data"]["checks"][0]["value"] == 2.01
    assert last["title"] == f"run {RUN} succeeded, but not as expected"
    emits(told, block, REGRESSED)
    assert len(service.told) == 2
    emits(told, block, replace(REGRESSED, schedule="", submitted_at=70.0))
    assert service.messages[2]["text"].endswith(f"mgpu status {RUN}")


def missed(told: list[Event], submission: Path, sinks: str, *events: ScheduleMissed) -> None:
    """What one pass tells of a schedule, whose run file has these sinks."""
    submission.mkdir(exist_ok=True)
    (submission / "mgpu.yaml").write_text(f"{FILE}sinks:\n{sinks}")
    deliver = Delivery(told.append)
    for event in events:
        deliver.tell("schedule nightly", lambda: of_submission(submission, SUBMISSION, submission.parent), event)
    deliver.close(60)


def test_a_missed_time_is_told_of_a_schedule_that_has_no_run_yet(told, service, tmp_path):
    """Those that only hear runs are not made for it: `jsonl` would open a file of no run."""
    submission, block = tmp_path / "nightly.u1", f"  webhook: {{url: '{service.url}'}}\n  jsonl: {{}}\n"
    service.answers = [500] * 2
    missed(told, submission, block, MISSED)
    assert (service.told, outbox.waiting()) == ([], [SUBMISSION])
    tell_again(told, submission)
    missed(told, submission, block, MISSED)  # by whoever says it again
    (message,) = service.messages
    assert (message["event"], message["run_id"]) == ("missed", "")
    assert message["title"] == "schedule nightly missed its time of 2027-01-15 05:13 UTC (2 times in all)"
    assert message["text"] == "nobody looked until 7.2 h later\nmgpu schedule show nightly"
    assert (message["data"]["event"], message["data"]["times"]) == ("ScheduleMissed", 2)
    assert not (tmp_path / "mgpu-runs").exists()
    missed(told, submission, f"  webhook: {{url: '{service.url}', events: [ended]}}\n", replace(MISSED, at=2e9))
    assert len(service.told) == 1


def test_two_who_deliver_at_once_tell_once(told, tmp_path):
    (tmp_path / "tell.sh").write_text("echo told >> said; exit 1\n")
    missed(told, tmp_path / "nightly.u1", "  command: {run: [sh, tell.sh]}\n", MISSED)
    (tmp_path / "said").write_text("")
    (tmp_path / "tell.sh").write_text("echo told >> said; while [ ! -e go ]; do sleep 0.02; done\n")
    tell = partial(tell_again, told, tmp_path / "nightly.u1")
    others = [threading.Thread(target=tell) for _ in range(20)]
    for each in others:
        each.start()
    until(lambda: (tmp_path / "said").read_text())
    (tmp_path / "go").touch()
    for each in others:
        each.join()
    assert (tmp_path / "said").read_text() == "told\n"


def test_what_nobody_took_is_told_again_in_its_order_and_once(told, service):
    block = f"  webhook: {{url: '{service.url}'}}\n"
    service.answers = [500] * 3
    emits(told, block, LOST, REPAIRING, ENDED)
    assert (service.told, "it answers 500" in warned(told)) == ([], True)
    service.answers = [503]
    tell_again(told)
    assert "somebody is still to be told" in warned(told)
    assert service.told == []
    tell_again(told)
    assert [each["event"] for each in service.messages] == ["interrupted", "ended"]
    emits(told, block, ENDED)  # `mgpu down` says again that it is over
    tell_again(told)
    assert len(service.told) == 2
    emits(told, block, replace(ENDED, teardown="asked"))
    assert "may still be billed" in service.messages[2]["text"], "other news is news"


def test_where_the_backend_is_away_who_is_there_is_told_and_else_the_next_pass_tells(told, service, monkeypatch):
    save(replace(load(RUN), state=State.SUCCEEDED, has_sinks=True, teardown="confirmed"))
    block = f"  webhook: {{url: '{service.url}'}}\n"

    def away(*_: object) -> None:
        raise outbox.NotKept("the backend does not answer")

    monkeypatch.setattr(outbox.Outbox, "keep", away)
    service.answers = [500]
    emits(told, block, ENDED)
    assert "the backend does not answer; OSError: it answers 500" in warned(told)
    assert (load(RUN).untold, outbox.waiting()) == (True, [])
    emits(told, block, ENDED)
    assert (len(service.told), load(RUN).untold) == (1, False)


def test_what_was_told_while_the_backend_was_away_is_not_told_again_here(told, service, monkeypatch):
    """The record says still that nobody knows of its end, so the next pass says it again."""
    save(replace(load(RUN), state=State.SUCCEEDED, has_sinks=True, teardown="confirmed"))
    block, stat = f"  webhook: {{url: '{service.url}'}}\n", FileStore.stat

    def away(store: FileStore, key: str) -> object:
        if "told" in key:
            raise Unavailable("the backend does not answer")
        return stat(store, key)

    monkeypatch.setattr(FileStore, "stat", away)
    for _ in range(3):  # by each pass
        emits(told, block, ENDED)
        assert len(service.told) == 1
    monkeypatch.setattr(FileStore, "stat", stat)
    emits(told, block, ENDED)
    tell_again(told)
    assert (len(service.told), outbox.waiting()) == (1, [])


def test_an_end_that_another_machine_finds_once_more_is_told_once(told, service):
    """The backend was away when the run was over: whoever took it over has ended it later, for a bit more."""
    block = f"  webhook: {{url: '{service.url}'}}\n"
    unmet = RunRegressed(RUN, 2, 9.0, schedule="nightly", code="", checks=({"metric": "loss", "said": "is 2"},))
    emits(told, block, unmet, ENDED)
    said = ({"metric": "loss", "said": "is 2.0"},)
    emits(
        told, block, replace(unmet, at=80.0, attempt=3, checks=said), replace(ENDED, at=80.0, attempt=3, spent_usd=4.3)
    )
    assert [each["event"] for each in service.messages] == ["regression", "ended"]
    for number, other in enumerate(
        ({"state": "failed"}, {"teardown": "kept"}, {"submitted_at": 70.0}, {"exit_code": 7})
    ):
        emits(told, block, replace(ENDED, **other))
        assert len(service.told) == 3 + number, other


def test_an_end_that_was_taken_is_certain_to_be_told_though_it_could_not_be_delivered(told, service):
    save(replace(load(RUN), state=State.SUCCEEDED, has_sinks=True, teardown="confirmed"))
    service.answers = [500] * 9
    emits(told, f"  webhook: {{url: '{service.url}'}}\n", ENDED)
    assert (load(RUN).untold, outbox.waiting()) == (False, [f"runs/{RUN}"])


def test_a_service_that_is_not_there_holds_nothing_up(told, service):
    service.server.shutdown()
    service.server.server_close()
    emits(told, f"  webhook: {{url: '{service.url}'}}\n", ENDED)
    assert "no answer" in warned(told)
    assert service.url not in warned(told), "an address may hold a secret"


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ("  webhook: {url: NO_SUCH_VARIABLE}\n", "NO_SUCH_VARIABLE is not set here"),
        ("  webhook: {url: HOME}\n", "`url` is no address"),
        ("  webhook: {url: 'https://x', secret: NO_SUCH_VARIABLE}\n", "NO_SUCH_VARIABLE is not set here"),
        ("  command: {run: ['true'], secrets: [NO_SUCH_VARIABLE]}\n", "NO_SUCH_VARIABLE is not set here"),
        ("  apprise: {urls: [NO_SUCH_VARIABLE]}\n", "NO_SUCH_VARIABLE is not set here"),
        ("  apprise: {urls: [HOME]}\n", "HOME holds no address that Apprise knows"),
    ],
)
def test_a_sink_that_cannot_be_used_says_why(told, block, words):
    emits(told, block, ENDED)
    assert words in warned(told)


def test_a_program_of_the_users_is_told(told, tmp_path):
    (tmp_path / "tell.sh").write_text('cat > "$1"; echo "$MGPU_EVENT $MGPU_RUN $MGPU_TITLE" >> "$1.env"\n')
    emits(told, "  command: {run: [sh, tell.sh, said]}\n", ENDED)
    assert json.loads((tmp_path / "said").read_text())["title"] == f"run {RUN} succeeded"
    assert (tmp_path / "said.env").read_text() == f"ended {RUN} run {RUN} succeeded\n"
    (tmp_path / "tell.sh").write_text("exit 3\n")
    emits(told, "  command: {run: [sh, tell.sh, said]}\n", replace(ENDED, at=10.0, submitted_at=3.0))
    assert "exit status 3" in warned(told)
    (tmp_path / "tell.sh").write_text('cat > "$1"\n')
    tell_again(told)
    assert json.loads((tmp_path / "said").read_text())["data"]["at"] == 10.0


def test_apprise_tells_whoever_it_knows(told, service, monkeypatch):
    monkeypatch.setenv("TEAM", service.url.replace("http://", "json://"))
    emits(told, "  apprise: {urls: [TEAM]}\n", ENDED)
    (message,) = service.messages
    assert (message["title"], "validation_loss 1.91" in message["message"]) == (f"run {RUN} succeeded", True)
    service.answers = [500]
    emits(told, "  apprise: {urls: [TEAM]}\n", replace(ENDED, submitted_at=3.0))
    assert "not delivered" in warned(told)


def test_who_has_taken_a_message_is_not_told_again_while_another_one_cannot_be(told, service, monkeypatch):
    mail = Service()
    monkeypatch.setenv("TEAM", service.url.replace("http://", "json://"))
    monkeypatch.setenv("MAIL", mail.url.replace("http://", "json://"))
    mail.answers = [500, 500]
    emits(told, "  apprise: {urls: [TEAM, MAIL]}\n", ENDED)
    for _ in range(3):
        tell_again(told)
    mail.server.shutdown()
    mail.server.server_close()
    assert (len(service.messages), len(mail.messages)) == (1, 1)
    assert "not delivered: MAIL" in warned(told)
    assert outbox.waiting() == []


@pytest.mark.parametrize("urls", ["TEAM", "TEAM, MAIL"])
def test_who_can_be_told_does_not_wait_once_more_for_a_backend_that_is_away(told, service, monkeypatch, urls):
    def no_backend() -> NoReturn:
        asks.append(1)
        raise StackError("the backend could not be asked")

    asks = list[int]()
    for variable in ("TEAM", "MAIL"):
        monkeypatch.setenv(variable, service.url.replace("http://", "json://"))
    monkeypatch.setattr(outbox, "_backend", no_backend)
    emits(told, f"  apprise: {{urls: [{urls}]}}\n", ENDED)
    assert len(service.messages) == len(urls.split())
    assert len(asks) == 2, "to keep the message, and at the end for what waits"


def test_what_a_run_file_says_of_sinks_is_checked(told):
    for block, words in (("{url: 'https://x', events: [never]}", "events"), ("{}", "url")):
        with pytest.raises(Exception, match=words):
            loads(f"{FILE}sinks:\n  webhook: {block}\n", "mgpu.yaml")


def test_a_delivery_that_hangs_is_cut_off_and_waits(told, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "_LASTS_S", 0.1)
    emits(told, "  command: {run: [sleep, '60']}\n", ENDED)
    assert "timed out" in warned(told)
    assert outbox.waiting() == [f"runs/{RUN}"]


# --- a status of a commit


SHA = "0123abc" + "d" * 33
BEGINS = RunStateChanged(RUN, 0, 1.0, state="provisioning", before="queued")
AT_GITHUB, AT_GITLAB = f"/repos/you/llm/statuses/{SHA}", f"/projects/team%2Fnight%2Fllm/statuses/{SHA}"


@pytest.fixture
def status(told, service, monkeypatch):
    """`status("github", *events)`: what a service is told of a scheduled run whose code is a commit's."""
    monkeypatch.setenv("TOKEN", "canary-5ecret")
    urls = {"github": "git+ssh://git@github.com/you/llm.git", "gitlab": "git+https://gitlab.com/team/night/llm"}

    def emitted(host: str, *events: Event, more: str = "") -> list[dict[str, Any]]:
        save(replace(load(RUN), code=f"{urls[host]}@{SHA}", schedule="nightly"))
        emits(told, f"  {host}: {{token: TOKEN, api: '{service.url}'{more}}}\n", *events)
        return service.messages

    return emitted


@pytest.mark.parametrize(
    ("host", "path", "header", "states"),
    [
        ("github", AT_GITHUB, ("Authorization", "Bearer canary-5ecret"), ("pending", "success", "failure", "error")),
        ("gitlab", AT_GITLAB, ("PRIVATE-TOKEN", "canary-5ecret"), ("running", "success", "failed", "canceled")),
    ],
)
def test_a_commit_has_the_status_of_its_run_once(told, service, status, host, path, header, states):
    unmet = replace(ENDED, at=10.0, exit_code=6, reason="loss 2.01 > 1.93")
    stopped = replace(ENDED, at=11.0, exit_code=8, state="stopped", reason="x" * 500)
    events = (BEGINS, LOST, REPAIRING, ENDED, unmet, stopped)
    messages = status(host, *events)
    assert [each["state"] for each in messages] == [*states]
    assert {each["context"] for each in messages} == {"mgpu/nightly"}
    assert messages[1]["description"].startswith(f"{RUN}; step 300, bleu 31, validation_loss 1.91, $4.20")
    assert "loss 2.01 > 1.93" in messages[2]["description"]
    assert len(messages[3]["description"]) == 140, "GitHub refuses more"
    assert set(service.paths) == {f"/hook{path}"}
    assert all(headers[header[0]] == header[1] for headers, _ in service.told)
    assert len(status(host, *events, more=", context: other")) == 4, "as it was told already"
    written = "".join(path.read_text() for path in Folder(RUN).root.rglob("*") if path.is_file())
    assert "canary" not in written + warned(told)


@pytest.mark.parametrize("host", ["github", "gitlab"])
@pytest.mark.parametrize("token", ["canary-5ecret\n", "canary-5ecret\u2026"])
def test_a_token_that_no_header_can_have_is_told_without_it(told, service, status, monkeypatch, host, token):
    monkeypatch.setenv("TOKEN", token)
    assert status(host, ENDED) == []
    assert "TOKEN holds a line end" in warned(told)
    assert "canary" not in warned(told)


def test_a_run_that_is_over_is_not_said_to_begin_by_who_could_not_say_so_in_time(told, service, status):
    service.answers = [503] * 2
    assert status("github", BEGINS) == []
    save(replace(load(RUN), state=State.SUCCEEDED))  # by another machine, which has told it
    tell_again(told)
    assert service.messages == []
    assert [each["state"] for each in status("github", ENDED)] == ["success"]


def test_what_runs_already_at_gitlab_is_told(told, service, status):
    service.says = b'{"message": "Cannot transition status via :run from :running"}'
    service.answers = [400]
    assert [each["state"] for each in status("gitlab", BEGINS, ENDED)] == ["success"]
    service.says, service.answers = b'{"message": "401 Unauthorized"}', [401] * 2
    status("gitlab", replace(BEGINS, at=12.0))
    assert "it answers 401" in warned(told)
    assert "401 Unauthorized" in warned(told)


@pytest.mark.parametrize(
    ("block", "code", "words"),
    [
        ("github: {token: T}", "", "sinks.github cannot be used: it tells of a commit, and the code of"),
        (
            "gitlab: {token: T}",
            "git+file:///srv/you/llm@main",
            "of a repository at a host, and git+file:///srv/you/llm",
        ),
        ("github: {token: T}", "git+https://github.com/you/llm@main", ""),
        ("webhook: {url: HOOK}", "", ""),
    ],
)
def test_a_sink_of_a_commit_is_refused_where_there_is_none(block, code, words):
    spec = loads(f"{FILE}sinks: {{{block}}}\n", "mgpu.yaml")
    if not words:
        sink.require(spec.sinks, code)
    else:
        with pytest.raises(InputError, match="--code-from") as caught:
            sink.require(spec.sinks, code)
        assert words in str(caught.value)


def test_addresses_are_those_of_the_codes_host(told, status, monkeypatch):
    asked = []
    monkeypatch.setattr("mgpu.sinks.commit_status.post", lambda url, *_: asked.append(url) or (201, ""))
    for host, code in (
        ("github", "git+ssh://git@github.com/you/llm.git"),
        ("github", "git+https://me:pw@git.example.com:8443/you/llm"),
        ("gitlab", "git+https://gitlab.com/team/night/llm"),
    ):
        save(replace(load(RUN), code=f"{code}@{SHA}"))
        emits(told, f"  {host}: {{token: TOKEN}}\n", replace(BEGINS, at=len(asked) + 1.0))
    assert asked == [
        f"https://api.github.com{AT_GITHUB}",
        f"https://git.example.com:8443/api/v3{AT_GITHUB}",
        f"https://gitlab.com/api/v4{AT_GITLAB}",
    ]
