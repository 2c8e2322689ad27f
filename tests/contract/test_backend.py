"""Runs of a backend that is a bucket, as two machines see them: each has a state folder of its own, and one bucket."""

from __future__ import annotations

import json
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from fakes.gateway import Team
from mgpu_train.agent.machine import procs
from mgpu_train.store import Ambiguous
from waiting import until

import mgpu.cli
from mgpu.backend import lease, location, owner, settings
from mgpu.backend.lease import Lease
from mgpu.errors import InputError, OverLimit, StackError, TakenOver
from mgpu.iac.engine import state_file
from mgpu.run.budget import account
from mgpu.run.budget.costs import all_records, remember, stretches, total
from mgpu.run.lifecycle import removal
from mgpu.run.record import record as records
from mgpu.run.record import shared
from mgpu.run.record.folder import Folder
from mgpu.run.record.record import Record, Spent, State, supervised, supervising, supervisor_of
from mgpu.run.record.supervisor_lock import me


def run(run_id: str = "first-1", **changes: object) -> Record:
    known = Record(
        run_id=run_id, name="first", project="p", project_base="/", run_file="/mgpu.yaml", stack=run_id, own_stack=True,
        fleet_name="f", provider="local", nodes=1, created_at=1.0,
    )  # fmt: skip
    return replace(known, **changes)


def test_a_limit_holds_on_all_machines_and_what_was_spent_is_known_on_all(team: Team):
    spent = [Spent(1, 5.0, 3600.0, 7200.0, 0.5)]
    with team.on("a"):
        records.save(run("gone-1", state=State.FAILED, ended_at=7200.0, teardown="confirmed", spending=spent))
        removal.remove(records.every())
        account.change(runs=1)
        account.change(usd_per_hour=60.0)

        def claimed(number: int) -> bool:
            with suppress(OverLimit):
                return account.claim(f"run-{number}", lambda: 20.0)
            return False

        with ThreadPoolExecutor(8) as pool:
            assert sum(pool.map(claimed, range(8))) == 1
        (first,) = account.in_use(time.time()).runs
        records.save(run(first, state=State.PROVISIONING))
    with team.on("b"):
        assert total(stretches(all_records(), 9e9)).usd == 5.5
        with pytest.raises(OverLimit, match="over a limit") as refused:
            account.claim("other-1", lambda: 50.0)
        assert [each.partition(":")[0] for each in refused.value.over] == ["runs at once", "dollars per hour"]
        there = records.load(first)
        there.to(State.STOPPED)
        records.save(there)
        assert account.claim("other-1", lambda: 50.0)


def too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on every lock is: S3 counts whole seconds, and nothing is to wait for them."""
    monkeypatch.setenv("MGPU_TIMEOUTS", json.dumps({"lock_s": -1}))


def test_a_run_of_one_machine_is_seen_and_removed_by_another(team: Team):
    with team.on("a"):
        records.save(run(state=State.RUNNING, step=3))
    with team.on("b"):
        assert records.load("first").step == 3
        tag = owner.owner()
    with team.on("a"):
        assert owner.owner() == tag
        records.save(run(state=State.FAILED, step=7))
    with team.on("b"):
        (seen,) = records.every()
        assert (seen.state, seen.step) == (State.FAILED, 7)
        removal.remove([seen])
        assert records.ids() == []
    with team.on("a"):
        assert records.ids() == []
        assert not Folder("first-1").root.exists()


def test_one_machine_at_a_time_supervises_and_the_other_is_told_which(team: Team):
    with team.on("a"), supervising("first-1") as token:
        assert token
        mine = me(token)
        with team.on("b"):
            assert supervised("first-1")
            assert supervisor_of("first-1") == mine
            with supervising("first-1") as other:
                assert not other
            assert str(mine) in records.busy("first-1").what
        team.environ("XDG_STATE_HOME", str(team.folder / "a"))
    with team.on("b"):
        assert not supervised("first-1")
        with supervising("first-1") as token:
            assert token


def test_who_has_a_run_knows_the_hosts_of_all_before_it_however_they_let_go(team: Team):
    store, too_old_s = location.current().ours, -1
    for number, host in enumerate("abbcd"):
        grip = Lease(store, "lock", {"token": str(number), "host": host}, too_old_s)
        assert grip.take(lambda _: False) is None
        assert grip.renew() is None
        if host == "c":
            grip.release()
    assert grip.hosts == {*"abc"}


def test_one_whose_lock_ran_out_writes_nothing_more(team: Team, monkeypatch: pytest.MonkeyPatch):
    with team.on("a"), supervising("first-1") as first:
        records.save(run(supervisor=first, step=1))
        with team.on("b"):
            too_old(monkeypatch)
            assert not supervised("first-1")
            with supervising("first-1") as second:
                taken = records.load("first-1")
                taken.supervisor, taken.step = second, 2
                records.save(taken)
                with team.on("a"), pytest.raises(TakenOver, match="first-1"):
                    records.save(run(supervisor=first, step=9))
                with team.on("b"):
                    assert records.load("first-1").step == 2
    with team.on("c"):
        assert records.load("first-1").step == 2


def test_the_keeper_notices_that_its_run_was_taken(team: Team, monkeypatch: pytest.MonkeyPatch):
    with team.on("a"), supervising("first-1") as first:
        store = location.current().shared
        renewal = shared.LockRenewal(store, "first-1", Lease(store, "locks/first-1.json", {"token": first}, 90), 0, 0)
        with team.on("b"), supervising("first-1", force=True) as second:
            assert second
            with team.on("a"):
                renewal._turn()
                lost = records.taken_from(Folder("first-1").lock, first)
                assert lost is not None
                assert lost.token == second


def test_a_lock_is_sure_for_two_thirds_of_its_time_from_when_its_newest_writing_began(team: Team, monkeypatch):
    with team.on("a"), supervising("first-1") as token:
        assert shared.unsure_s("first-1") == 0
        store, now = location.current().shared, [1000.0]
        lease = Lease(store, "locks/first-1.json", {"token": token}, 90)
        renewal = shared._renewals["first-1"] = shared.LockRenewal(store, "first-1", lease, 90, 1000.0, lambda: now[0])
        now[0] += 60
        assert shared.unsure_s("first-1") == 0
        now[0] += 5
        assert shared.unsure_s("first-1") == 5
        monkeypatch.setattr(lease, "renew", lambda write=lease.renew: now.__setitem__(0, now[0] + 20) or write())
        assert renewal._turn()
        assert shared.unsure_s("first-1") == 0
        now[0] += 41
        assert shared.unsure_s("first-1") == 1, "it was written some time after its writing began"


def test_the_lock_of_a_process_that_died_on_this_machine_is_free(team: Team):
    gone = subprocess.Popen(["true"])
    dead = procs.of(gone.pid)
    gone.wait()
    with team.on("a"):
        store = location.current().shared
        said = {**vars(me("gone")), "pid": dead.pid, "start_ticks": dead.start_ticks, "space": shared._space()}
        assert Lease(store, "locks/first-1.json", said, 90).take(lambda _: False) is None
        assert not supervised("first-1")
        elsewhere = {**said, "token": "else", "space": "another boot"}
        assert Lease(store, "locks/first-1.json", elsewhere, 90).take(shared._dead) is None
    with team.on("a"):
        assert supervised("first-1"), "of another machine's processes nothing is known here"


def test_the_end_is_asked_for_from_another_machine(team: Team):
    with team.on("a"), supervising("first-1") as token:
        folder = Folder("first-1")
        with team.on("b"):
            shared.ask_to_stop("first-1")
        renewal = shared.LockRenewal(location.current().shared, "first-1", None, 90, 0)
        with team.on("a"):
            renewal.look_for_stop()
        assert token
        assert folder.stop.exists()
    with team.on("b"):
        shared.withdraw_stop("first-1")
        assert location.current().shared.stat("stops/first-1") is None


def test_a_backend_that_does_not_answer_is_named(team: Team, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(location.VARIABLE, "s3://team/x?endpoint=http://127.0.0.1:9&region=us-east-1")
    with team.on("a"):
        with pytest.raises(StackError, match="s3://team/x"):
            records.load("first-1")
        with pytest.raises(StackError, match="s3://team/x"):
            records.save(run())
        assert json.loads(Folder("first-1").record.read_text())["run_id"] == "first-1", "nothing is lost"


def test_what_a_machine_knew_is_shown_where_its_backend_does_not_answer(team: Team, monkeypatch: pytest.MonkeyPatch):
    there = location.current().url
    with team.on("a"):
        records.save(run(state=State.RUNNING, step=3, fleet={"nodes": []}))
        (Folder("first-1").root / "logs").mkdir(exist_ok=True)
        (Folder("first-1").root / "logs" / "node-0.1.i-1.log").write_bytes(b"step 3\n")
        shared.files.send("first-1")
    away = there.replace(there.partition("endpoint=")[2].partition("&")[0], "http://127.0.0.1:9")
    with team.on("b"):
        assert "step 3" in cli("logs", "first-1")

    def asked(machine: str, *words: str) -> Result:
        monkeypatch.setenv(location.VARIABLE, away)
        with team.on(machine):
            return CliRunner().invoke(mgpu.cli.cli, words, standalone_mode=False)

    for words, shown in (
        (("ls",), "first-1"),
        (("status", "first-1"), "not known"),
        (("logs", "first-1", "-f"), "step 3"),
    ):
        done = asked("b", *words)
        assert (done.exception, done.return_value or 0) == (None, 0), words
        assert shown in done.stdout, words
        assert "no supervisor" not in done.stdout + done.stderr, words
        assert "mgpu attach" not in done.stdout + done.stderr, words
        assert done.stderr.count("what this machine knew") == 1, words
    for words in (("ls", "--json"), ("status", "--json")):
        assert 0 <= json.loads(asked("b", *words).stdout)["stale_s"] < 600
    for words in (("stop", "first-1"), ("attach", "first-1"), ("reconcile",), ("rm", "first-1", "--yes")):
        failed = asked("b", *words)
        assert isinstance(failed.exception, StackError) or failed.return_value == StackError.exit_code, words
    for words in (("ls",), ("status",), ("logs",)):
        assert isinstance(asked("nobody", *words).exception, StackError), "it knows nothing"
    monkeypatch.setenv(location.VARIABLE, there)
    with team.on("b"):
        assert json.loads(cli("status", "--json"))["stale_s"] is None


def test_a_run_that_nobody_has_is_said_with_the_backend(team: Team):
    with team.on("a"), pytest.raises(InputError) as error:
        records.load("none")
    assert "s3://" in error.value.why


class Deaf:
    """A store of which every other answer is lost after the write was done."""

    def __init__(self, store):
        self._store, self._lost = store, 0

    def __getattr__(self, name):
        return getattr(self._store, name)

    def _through(self, done: bool) -> bool:
        self._lost += 1
        if self._lost % 2:
            raise Ambiguous("the answer was lost")
        return done

    def put_if_absent(self, key, data):
        return self._through(self._store.put_if_absent(key, data))

    def replace(self, key, data, version):
        return self._through(self._store.replace(key, data, version))


def test_a_lost_answer_takes_no_lease_twice_and_loses_none(site):
    first = Lease(Deaf(site.store), "lock", {"token": "1"}, 90)
    second = Lease(Deaf(site.store), "lock", {"token": "2"}, 90)
    assert first.take(lambda _: False) is None
    held = second.take(lambda _: False)
    assert held is not None
    assert held.token == "1"
    assert first.renew() is None
    assert second.renew().token == "1"
    first.release()
    assert lease.look(site.store, "lock", 90).over
    assert second.take(lambda _: False) is None
    assert first.renew().token == "2"


# --- moved, and named ---------------------------------------------------------------------------------------------


def cli(*words: str, code: int = 0) -> str:
    done = CliRunner().invoke(mgpu.cli.cli, words, standalone_mode=False)
    if code:
        assert getattr(done.exception, "exit_code", None) == code, done.output
        return str(done.exception)
    assert done.exception is None, done.output
    return done.stdout


def filled(folder: Path) -> None:
    """A folder's backend with a run that is over, all its files, and a stack."""
    records.save(run(state=State.FAILED, step=7, project=str(folder)))
    here = Folder("first-1")
    here.run_file.write_text("name: first\n")
    for name, text in {
        "work/train.py": "print()",
        "work/.config/lock": "the user's own",
        "logs/node-0.0000.x.log": "step 7\n",
        "journal/1.jsonl": "{}\n",
    }.items():
        (here.root / name).parent.mkdir(parents=True, exist_ok=True)
        (here.root / name).write_text(text)
    state = location.current().state
    state.put(".pulumi/stacks/p/first-1.json", b'{"checkpoint": {"latest": null}}')
    state.put(".pulumi/stacks/p/first-1.json.attrs", b"{}")
    state.put(".pulumi/meta.yaml", b"version: 1\n")


def files(run_id: str) -> dict[str, str]:
    root = Folder(run_id).root
    found = (path.relative_to(root) for path in sorted(root.rglob("*")) if path.is_file())
    return {str(path): (root / path).read_text() for path in found if not path.parts[0].startswith(".")}


def test_all_of_a_folder_moves_to_a_bucket_and_back(team: Team, monkeypatch: pytest.MonkeyPatch):
    bucket = location.current().url
    monkeypatch.delenv(location.VARIABLE)
    with team.on("a"):
        filled(team.folder)
        account.change(runs=7)
        remember([run("old-1", spending=[Spent(1, 5.0, 0.0, 3600.0)])])
        tag, before, home = owner.owner(), files("first-1"), location.current().url
        moved = json.loads(cli("backend", "move", bucket, "--yes", "--json"))
        assert (moved["runs"], moved["stacks"], moved["owner"], moved["shared"]) == (1, 1, tag, True)
        with pytest.raises(InputError, match="was moved to s3://"):
            records.ids()
    monkeypatch.setenv(location.VARIABLE, bucket)
    with team.on("b"):
        assert records.load("first-1").step == 7
        shared.files.bring("first-1")
        assert files("first-1").items() >= {name: text for name, text in before.items() if name != "lock"}.items()
        assert [key for *_, key in state_file.stacks()] == [".pulumi/stacks/p/first-1.json"]
        back = f"file://{team.folder}/shared"
        cli("backend", "move", back, "--yes")
    with team.on("b"), pytest.raises(InputError, match="was moved to file://"):
        records.ids()
    monkeypatch.setenv(location.VARIABLE, back)
    with team.on("c"):
        assert files("first-1").items() >= {name: text for name, text in before.items() if name != "lock"}.items()
        assert owner.owner() == tag
        assert account.limits().runs == 7
        assert total(stretches(all_records(), 9e9)).runs == {"old-1"}
    with team.on("a"):
        cli("backend", "move", home, "--yes")
        monkeypatch.delenv(location.VARIABLE)
        assert records.ids() == ["first-1"], "the mark of the first time is gone"


def test_a_move_that_was_cut_off_is_done_again(team: Team, monkeypatch: pytest.MonkeyPatch):
    bucket = location.current().url
    monkeypatch.delenv(location.VARIABLE)
    with team.on("a"):
        filled(team.folder)
        (location.current().root / location.MOVED).write_text(bucket)  # all that a power cut left
        assert "was moved to" in cli("ls", code=2)
        cli("backend", "move", bucket, "--yes")
    monkeypatch.setenv(location.VARIABLE, bucket)
    with team.on("b"):
        assert records.ids() == ["first-1"]


def test_who_goes_on_has_the_code_of_the_newest_submission(team: Team):
    for text in ("old", "new"):
        with team.on("a"):
            folder = Folder("first-1")
            (folder.root / "work").mkdir(parents=True, exist_ok=True)
            (folder.root / "work" / "train.py").write_text(text)
            folder.run_file.write_text(f"name: {text}\n")
            shared.files.keep("first-1")
        with team.on("b"):
            shared.files.bring("first-1")
            there = files("first-1")
            assert (there["work/train.py"], there["mgpu.yaml"]) == (text, f"name: {text}\n")


def test_many_who_follow_a_run_write_each_line_once(team: Team):
    with team.on("a"):
        log = Folder("first-1").root / "logs" / "node-0.0000.x.log"
        log.parent.mkdir(parents=True)
        for number in range(6):
            with log.open("a") as file:
                file.write(f"step {number}\n" * 100)
            shared.files.send("first-1")
        whole = log.read_text()
    with team.on("b"):
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda _: shared.files.bring_grown("first-1"), range(8)))
        assert (Folder("first-1").root / "logs" / log.name).read_text() == whole


def test_nothing_moves_while_somebody_is_at_work_or_over_something_else(team: Team, monkeypatch: pytest.MonkeyPatch):
    bucket = location.current().url
    with location.using(bucket) as there:
        there.state.put(".pulumi/stacks/p/first-1.json", b"another")
    monkeypatch.delenv(location.VARIABLE)
    with team.on("a"):
        filled(team.folder)
        with supervising("first-1"):
            assert "run first-1 is being supervised" in cli("backend", "move", bucket, "--yes", code=2)
        assert "has another .pulumi/stacks/p/first-1.json" in cli("backend", "move", bucket, "--yes", code=2)
        assert records.ids() == ["first-1"], "it stays where it was"
        assert "not agreed" in cli("backend", "move", bucket, code=2)
        assert "is the backend already" in cli("backend", "move", location.current().url, "--yes", code=2)


def test_who_encrypts_secrets_moves_too(team: Team, monkeypatch: pytest.MonkeyPatch):
    with team.on("a"):
        settings.choose_secrets_provider("awskms://alias/mgpu")
        there = location.current().url.replace("/team", "/other")
        cli("backend", "move", there, "--yes")
        monkeypatch.setenv(location.VARIABLE, there)
        assert settings.secrets_provider() == "awskms://alias/mgpu"


def test_logs_are_sent_at_once_when_something_has_happened(team: Team):
    with team.on("a"):
        records.save(run(state=State.RUNNING))
        with supervising("first-1"):
            log = Folder("first-1").root / "logs" / "node-0.0000.x.log"
            log.write_text("node 1 is gone\n")
            shared.files.send_soon("first-1")
            store = location.current().ours
            until(lambda: any("grown/logs" in found.key for found in store.list("runs/first-1/")), 60)
        shared.files.send_soon("first-1")  # nobody has it any more: nothing happens


def test_a_backend_has_one_secrets_provider(team: Team):
    with team.on("a"):
        assert settings.secrets_provider() == "passphrase"
        settings.choose_secrets_provider("awskms://alias/mgpu")
    with team.on("b"):
        assert settings.secrets_provider() == "awskms://alias/mgpu"
        with pytest.raises(InputError, match="has awskms://alias/mgpu"):
            settings.choose_secrets_provider("awskms://alias/other")
