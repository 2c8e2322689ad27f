"""The driver's parts without an engine: the CLI's process, its event stream, errors that cross as text, outputs."""

from __future__ import annotations

import errno
import itertools
import json
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from mgpu_train.agent.machine import procs
from mgpu_train.timeouts import Timeouts

from mgpu import errors
from mgpu.backend import location
from mgpu.errors import (
    InputError,
    Interrupted,
    InvalidRequest,
    NoCapacity,
    QuotaExceeded,
    StackError,
    TeardownIncomplete,
)
from mgpu.events import Note, Warned
from mgpu.iac import environment, failures, outputs, tokens
from mgpu.iac.engine import install, locks, process, project, state_file
from mgpu.iac.engine.event_log import Change, EngineLog
from mgpu.iac.engine.process import CliProcess
from mgpu.iac.engine.stack import Stack, current_stack
from mgpu.providers.hosts.ssh import Mute

GOOD = {
    "version": 1,
    "fleet": "f",
    "provider": "local",
    "nodes": [{"rank": 0, "id": "i", "address": "a", "user": "u", "host_key": "k"}],
    "private_key_file": "/k",
    "new_in_version_1_1": "ignored",
}


# ---- the process


@pytest.fixture
def run(tmp_path):
    """Runs a shell script as if it were the CLI; its status."""
    cli = CliProcess(grace_s=1)

    def call(script, limit_s=10.0, look=lambda: None):
        with (tmp_path / "out").open("ab") as out:
            argv = ["/bin/sh", "-c", script]
            return cli.run(argv, cwd=tmp_path, env=os.environ, out=out, err=out, limit_s=limit_s, look=look)

    call.cli = cli
    call.out = tmp_path / "out"
    return call


WAITS = "trap 'echo int; n=1' INT; echo ready; until [ $n ]; do sleep 0.05; done; sleep 0.4; exit 3"


def test_the_status_and_the_output_of_a_program(run):
    assert run("echo hello; exit 5") == 5
    assert run.out.read_text() == "hello\n"


def test_it_runs_in_a_session_of_its_own(run):
    assert run("ps -o sid= -p $$ > sid") == 0
    assert int((run.out.parent / "sid").read_text()) != os.getsid(0)


def test_one_interrupt_is_forwarded_and_the_rest_are_not(run):
    def interrupt():
        if run.out.read_text().startswith("ready"):
            run.cli.interrupt()

    assert run(WAITS, look=interrupt) == 3
    assert run.out.read_text().count("int") == 1


def test_one_that_was_interrupted_and_takes_long_gets_no_second_interrupt_at_its_limit(run, monkeypatch):
    """It would leave without saving. Its time is over as soon as it has been told."""
    late = (run.out.exists() and "int" in run.out.read_text() for _ in itertools.count())
    monkeypatch.setattr(process, "time", SimpleNamespace(time=time.time, monotonic=lambda: 10 if next(late) else 0))

    def interrupt():
        if run.out.read_text().startswith("ready"):
            run.cli.interrupt()

    with pytest.raises(StackError, match="did not end within 10 s"):
        run(WAITS, look=interrupt)
    assert run.out.read_text().count("int") == 1


@pytest.mark.parametrize(("undone", "status"), [(True, -2), (False, 0)])
def test_an_interrupt_while_an_operation_is_being_started_is_not_lost(undone, status, tmp_path):
    """It comes after the driver's own look, and before there is a process to be told."""
    cli = CliProcess(grace_s=1)
    cli.interrupt()
    with (tmp_path / "out").open("wb") as out:
        argv = ["/bin/sleep", "1"]
        assert cli.run(argv, cwd=tmp_path, env={}, out=out, err=out, limit_s=10, undone=undone) == status


def test_what_is_under_way_is_undone_where_its_progress_cannot_be_followed(run):
    def broken():
        if run.out.read_text().startswith("ready"):
            raise ValueError("no event")

    with pytest.raises(ValueError, match="no event"):
        run("trap 'echo undone; exit 3' INT; echo ready; for i in $(seq 200); do sleep 0.02; done", look=broken)
    assert run.out.read_text() == "ready\nundone\n"


def test_ctrl_c_in_the_driver_is_forwarded_and_drained(run):
    def ctrl_c():
        if run.out.read_text().startswith("ready") and not run.cli.interrupted:
            raise KeyboardInterrupt

    assert run(WAITS, look=ctrl_c) == 3


def test_a_second_ctrl_c_leaves_and_the_cli_goes_on(run):
    def ctrl_c():
        if run.out.read_text().startswith("ready"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run("trap '' INT; echo ready; sleep 0.5; echo saved", look=ctrl_c)
    deadline = time.monotonic() + 60
    while "saved" not in run.out.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("script", "clock", "why"),
    [
        ("trap '' INT; echo ready; exec sleep 60", itertools.count(1000, 1000), "It did not obey."),
        ("trap 'exit 3' INT; echo ready; while :; do sleep 0.02; done", itertools.repeat(1000), "It was cancelled"),
    ],
    ids=["deaf", "obeys"],
)
def test_what_does_not_end_is_cancelled_and_then_killed(run, monkeypatch, script, clock, why):
    """It begins at 0, and its time is over as soon as it is ready; for the deaf one that to obey, too."""
    began = itertools.chain([False], (run.out.exists() and "ready" in run.out.read_text() for _ in itertools.count()))
    monkeypatch.setattr(
        process, "time", SimpleNamespace(time=time.time, monotonic=lambda: next(clock) if next(began) else 0)
    )
    with pytest.raises(StackError, match="did not end within 10 s") as late:
        run(script)
    assert why in late.value.why
    assert ("was killed" in late.value.what) == (why == "It did not obey.")


# ---- the event stream


def stream(*events, emitted=None):
    with tempfile.TemporaryFile() as file:
        log = EngineLog(file.fileno(), (emitted if emitted is not None else []).append)
        for event in events:
            data = event if isinstance(event, bytes) else json.dumps(event).encode() + b"\n"
            os.write(file.fileno(), data)
            log.follow()
        return log


def diagnostic(severity, message):
    return {"diagnosticEvent": {"severity": severity, "message": message}}


def test_an_image_is_not_deleted_with_its_resource_and_nobody_says_so():
    emitted = []
    for op, kind in (("delete", "Image"), ("create", "Image"), ("delete", "Fleet")):
        metadata = {"op": op, "type": f"mgpu:index:{kind}", "urn": f"urn:pulumi:s::p::mgpu:index:{kind}::it"}
        log = stream({"resourcePreEvent": {"metadata": metadata}}, emitted=emitted)
        assert [change.op for change in log.changes] == [op]
    assert [note.text for note in emitted] == ["creating Image it", "deleting Fleet it"]


def test_debug_events_and_the_programs_own_words_are_never_passed_on():
    emitted = []
    secret = "-----BEGIN OPENSSH PRIVATE KEY-----"
    log = stream(diagnostic("debug", secret), diagnostic("info#err", secret), emitted=emitted)
    assert not emitted
    assert secret not in str(log.errors)


def test_progress_warnings_and_errors():
    emitted = []
    log = stream(
        diagnostic("info", "trying a"), diagnostic("warning", "mind b"), diagnostic("error", "c\n"), emitted=emitted
    )
    assert emitted == [Note("trying a"), Warned("mind b")]
    assert log.errors == ["c"]


def test_a_line_that_comes_in_two_pieces_is_one_event():
    line = json.dumps(diagnostic("error", "whole")).encode() + b"\n"
    assert stream(line[:20], line[20:]).errors == ["whole"]


def step(op, kind="mgpu:index:Fleet", **more):
    return {"resourcePreEvent": {"metadata": {"op": op, "type": kind, "urn": f"urn:pulumi:s::p::{kind}::it", **more}}}


def test_a_line_that_a_full_disk_has_cut_off_hides_no_other():
    log = stream(b'{"diagnosticEvent": {"mess', b'{"sequence": 7}\n\n', diagnostic("error", "sold out"))
    assert (log.errors, log.outputs) == (["sold out"], None)


def test_changes_name_what_changes_and_from_what_to_what():
    sides = {"old": {"inputs": {"nodes": 2}}, "new": {"inputs": {"nodes": 3}}}
    looks = [step("same"), step("refresh"), step("delete-replaced"), step("create", "pulumi:pulumi:Stack")]
    log = stream(*looks, step("update", detailedDiff={"nodes": {"diffKind": "update"}}, **sides), step("delete"))
    assert log.changes == [
        Change("update", "mgpu:index:Fleet", "it", ("nodes: 2 => 3",)),
        Change("delete", "mgpu:index:Fleet", "it"),
    ]


# ---- errors


@pytest.mark.parametrize("kind", [InputError, NoCapacity, QuotaExceeded, TeardownIncomplete])
def test_an_error_crosses_the_engine_with_its_class_and_its_lines(kind):
    sent = kind("what", "why\nand more", "next")
    got = failures.parse(f"some prefix\n{failures.describe(sent)}\n".removeprefix("some prefix\n"))
    assert type(got) is kind
    assert (got.what, got.why, got.next_step) == ("what", "why\nand more", "next")


@pytest.mark.parametrize(
    "lines",
    [
        ("what", "", ""),
        ("what", "why", ""),
        ("what", "", "next"),
        ("what\nin two", "why\n\nand more", "next\nand then"),
    ],
)
@pytest.mark.parametrize("facts", [{}, {"scope": "zone", "retry_after": 30.5}, {"scope": "account"}])
def test_nothing_of_a_providers_error_is_lost(lines, facts):
    got = failures.parse(failures.describe(NoCapacity(*lines, **facts)).replace("\n", "\n    "))
    sent = NoCapacity(lines[0], lines[1].replace("\n\n", "\n"), lines[2], **facts)
    assert vars(got) == vars(sent)


def test_a_providers_own_kind_crosses_as_the_one_that_it_is_of():
    sent = Mute("host gpu1 has no python3", "", "Install it.", scope="offer")
    got = failures.parse(failures.describe(sent))
    assert (type(got), vars(got)) == (InvalidRequest, vars(sent))


@pytest.mark.parametrize("name", ["MgpuError", "Exception", "Scope", "no_such"])
def test_every_other_class_is_the_stacks(name):
    got = failures.parse(f"what\nnext\n[mgpu:{name}]")
    assert type(got) is StackError
    assert got.exit_code == 4


def test_mistakes_of_a_run_file_cross_as_one():
    got = failures.parse("mgpu.yaml: 2 problems\nnext\n[mgpu:SpecError why=0 next=1]")
    assert (type(got), str(got)) == (InputError, "mgpu.yaml: 2 problems\nnext")


def test_text_without_a_mark_is_no_error_of_ours():
    assert failures.parse("error: something else [mgpu]") is None


def test_the_reason_of_a_partial_failure_comes_without_the_engines_list():
    sent = NoCapacity("fleet f: none of the offers was granted", "here: none", "Try later.")
    got = failures.parse(f"1 error occurred:\n    \t* {failures.describe(sent)}\n\n")
    assert (type(got), str(got)) == (NoCapacity, str(sent))
    assert errors.ProviderError.exit_code == 3


# ---- outputs


def test_a_good_output_is_read_and_what_is_new_in_it_ignored():
    assert outputs.validated(GOOD, "s").nodes[0].id == "i"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"version": 2}, "version 2"),
        ({"version": None}, "version None"),
        ({"nodes": []}, "nodes"),
        ({"fleet": 3}, "fleet"),
    ],
)
def test_an_output_that_cannot_be_used_says_why_and_what_to_do(change, says):
    with pytest.raises(StackError) as refused:
        outputs.validated(GOOD | change, "s")
    assert says in refused.value.why
    assert refused.value.next_step


# ---- the stack, before any engine is started


@pytest.fixture
def stack(xdg, tmp_path):
    project.project_files(tmp_path / "p")
    return Stack(
        tmp_path / "p", "s", tmp_path / "r.yaml", log_dir=tmp_path / "log", emit=print, timeouts=Timeouts().scaled(0.1)
    )


def test_an_empty_passphrase_is_refused(stack):
    environment.passphrase_file().parent.mkdir(parents=True)
    environment.passphrase_file().write_text("\n")
    with pytest.raises(StackError, match="passphrase"):
        stack.init()
    assert not stack.exists()


@pytest.mark.parametrize("there", ["encryptionsalt: v1:abc\nconfig: {mgpu:runFile: elsewhere}\n", ""])
def test_a_full_disk_leaves_a_stacks_configuration_as_it_was(stack, engine, tmp_path, monkeypatch, there):
    """Empty: as a full disk has left it before."""
    engine("")
    stack.init()
    config = tmp_path / "log" / "Pulumi.s.yaml"
    config.write_text(there)

    def full(_handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            stack.init()
    assert (config.read_text(), len([*config.parent.iterdir()])) == (there, 2)
    stack.init()
    found = yaml.safe_load(config.read_text())
    assert found["config"]["mgpu:runFile"] == str(tmp_path / "r.yaml")
    assert found.get("encryptionsalt") == ("v1:abc" if there else None)


def test_an_interrupt_before_up_is_not_forgotten(stack):
    stack.interrupt()
    with pytest.raises(Interrupted, match="before `pulumi up`"):
        stack.up()


def test_nothing_is_destroyed_or_removed_where_nothing_is(stack):
    stack.destroy()
    stack.remove()
    assert stack.outputs() is None


def test_a_folder_without_a_program_is_named(tmp_path, xdg):
    stack = Stack(tmp_path, "s", tmp_path / "r", log_dir=tmp_path / "l", emit=print, timeouts=Timeouts())
    with pytest.raises(StackError, match="not a Pulumi project"):
        stack.exists()


def test_the_current_stack_is_the_environments(monkeypatch, tmp_path):
    monkeypatch.setenv("PULUMI_STACK", "mine")
    assert current_stack(tmp_path) == "mine"


# ---- the stack, with a program in the engine's place


@pytest.fixture
def engine(stack, tmp_path, monkeypatch):
    """`engine(script)`: what runs as `pulumi` on a stack that there is; the words of each call, without the name."""
    words = tmp_path / "words"
    words.touch()

    def engine(script, state=None):
        pulumi = tmp_path / "pulumi"
        pulumi.write_text(f'#!/bin/sh\necho "$*" >> {words}\n{script}\n')
        pulumi.chmod(0o700)
        found = install.PulumiEngine(pulumi, tmp_path, "3.200.0", "PATH")
        monkeypatch.setattr(install, "find_engine", lambda *_: found)
        there = location.current().folder / ".pulumi/stacks" / project.project_name(stack.project) / "s.json"
        there.parent.mkdir(parents=True, exist_ok=True)
        there.write_text(json.dumps({"checkpoint": {"latest": state or {}}}))
        engine.state = there

    engine.asked = lambda: [line.partition(" --non-interactive")[0] for line in words.read_text().splitlines()]
    return engine


def test_an_up_looks_first_at_what_a_create_that_was_cut_off_has_made(stack, engine, capsys):
    engine("", {"pending_operations": [{"type": "creating", "resource": {"urn": "u"}}]})
    stack.up()
    engine("", {"pending_operations": [{"type": "updating", "resource": {"urn": "u"}}]})
    stack.up()
    assert engine.asked() == ["refresh --stack s", "up --stack s", "up --stack s"]
    assert "an earlier create was cut off" in capsys.readouterr().out


def test_a_stack_of_the_users_own_keeps_its_configuration(tmp_path, stack, engine):
    engine("")
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "Pulumi.s.yaml").write_text("mine")
    theirs = Stack(
        stack.project,
        "s",
        tmp_path / "r.yaml",
        log_dir=tmp_path / "log",
        emit=print,
        timeouts=Timeouts(),
        own_config=False,
    )
    theirs.init()
    theirs.unprotect()
    theirs.remove()
    assert [path.name for path in (tmp_path / "log").iterdir()] == ["Pulumi.s.yaml"]
    assert [each.split(" --yes")[0] for each in engine.asked()] == ["state unprotect --all", "stack rm s"]


@pytest.mark.parametrize(
    ("resources", "found"),
    [([], None), ([{"type": "other"}, {"type": tokens.SSH_KEY}], "the key")],
    ids=["none", "one"],
)
def test_the_key_to_its_machines_is_in_its_state(stack, engine, resources, found):
    assert stack.private_key() is None  # nobody has made the stack
    resources = [{**each, "outputs": {"privateKey": {"plaintext": json.dumps("the key")}}} for each in resources]
    engine(f"echo '{json.dumps({'deployment': {'resources': resources}})}'")
    assert stack.private_key() == found
    assert engine.asked() == ["stack export --show-secrets --stack s"]


@pytest.mark.parametrize(
    ("script", "says", "cure"),
    [
        ("echo hello >&2; exit 255", ("`pulumi stack output` failed", "hello"), ""),
        ("echo error: failed to load checkpoint: EOF >&2; exit 255", ("failed to load",), "s.json.bak"),
        ("kill -9 $$", ("was killed", "Signal 9"), "same command"),
    ],
)
def test_an_engine_that_fails_says_why_and_what_helps(stack, engine, script, says, cure):
    engine(script)
    with pytest.raises(StackError) as failed:
        stack.values()
    assert [each for each in says if each not in f"{failed.value.what} {failed.value.why}"] == []
    assert cure in failed.value.next_step


@pytest.mark.parametrize("lost", [("elsewhere",), ("another", ("elsewhere", "another"))], ids=["last", "earlier"])
def test_a_host_that_has_lost_the_stack_holds_it_no_more(stack, engine, capsys, lost):
    engine("")
    lock = {"pid": 1, "username": "them", "hostname": "elsewhere", "timestamp": "yesterday"}
    held = location.current().folder / state_file.lock_prefix(project.project_name(stack.project), "s") / "a.json"
    held.parent.mkdir(parents=True)
    held.write_text(json.dumps(lock))
    with pytest.raises(StackError, match="locked by process 1 of them on elsewhere"):
        stack.up()
    stack.oust(procs.me(), *lost)
    stack.up()
    assert not held.exists()
    assert engine.asked() == ["up --stack s"]
    assert "whose run was taken over" in capsys.readouterr().out


def test_a_host_of_this_ones_name_that_has_lost_the_stack_holds_it_no_more(stack, monkeypatch):
    """A container after another one: its driver is none of the processes here."""
    lost = list[Any]()
    monkeypatch.setattr(locks, "release_dead", lambda *given: lost.append(given[-1]))
    mine = procs.me()
    for driver, hosts in ((mine, set()), (replace(mine, boot_id="another"), {os.uname().nodename})):
        stack.oust(driver, os.uname().nodename)
        stack._make_way()
        assert lost.pop() == hosts


@pytest.mark.parametrize(("script", "found"), [("echo mine", "mine"), ("exit 255", None), ("echo", None)])
def test_the_current_stack_is_else_the_engines(stack, engine, monkeypatch, tmp_path, script, found):
    monkeypatch.setenv("PULUMI_STACK", "")
    engine(script)
    assert current_stack(tmp_path) == found
    (tmp_path / "pulumi").unlink()
    with pytest.raises(StackError, match="did not name the selected stack"):
        current_stack(tmp_path)


# ---- the program that mgpu carries


def test_project_files_are_written_once(tmp_path):
    written = project.project_files(tmp_path / "new")
    assert [path.name for path in written] == ["Pulumi.yaml", "infra"]
    assert project.project_name(tmp_path / "new") == "new"
    assert "Fleet" in (tmp_path / "new/infra/__main__.py").read_text()
    (tmp_path / "new/infra/__main__.py").write_text("mine")
    with pytest.raises(errors.InputError, match="infra"):
        project.project_files(tmp_path / "new")
    assert (tmp_path / "new/infra/__main__.py").read_text() == "mine"


def test_two_folders_of_one_name_are_two_projects(tmp_path, xdg):
    project.project_files(tmp_path / "a" / "Train it")
    assert project.project_name(tmp_path / "a" / "Train it") == "train-it"
    state = location.current().folder / ".pulumi" / "stacks" / "train-it" / "dev.json"
    state.parent.mkdir(parents=True)
    state.touch()
    project.project_files(tmp_path / "b" / "Train it")
    assert project.project_name(tmp_path / "b" / "Train it") == "train-it-2"


def test_the_program_is_the_nearest_ones_or_a_copy_of_what_mgpu_carries(tmp_path, xdg):
    (tmp_path / "mine" / "deep").mkdir(parents=True)
    (tmp_path / "mine" / "Pulumi.yaml").write_text("name: mine\n")
    assert project.program(tmp_path / "mine" / "deep") == tmp_path / "mine"
    copy = project.program(tmp_path)
    assert project.project_name(copy) == "mgpu-runs"
    program = copy / "infra" / "__main__.py"
    before = program.stat()
    assert project.program(tmp_path) == copy
    assert program.stat().st_ino == before.st_ino, "an engine may be reading it"
    program.write_text("of an older version")
    project.program(tmp_path)
    assert "Fleet" in program.read_text()


def test_the_plugins_folder_is_named_and_has_it(tmp_path):
    project.project_files(tmp_path)
    settings = (tmp_path / "Pulumi.yaml").read_text()
    folder = Path(settings.partition("path: ")[2].split()[0])
    assert os.access(folder / "pulumi-resource-mgpu", os.X_OK)


def test_the_checkouts_own_pulumi_yaml_says_the_same(tmp_path):
    ours = yaml.safe_load((Path(__file__).parents[2] / "Pulumi.yaml").read_text())
    project.project_files(tmp_path)
    theirs = yaml.safe_load((tmp_path / "Pulumi.yaml").read_text())
    for key in ("plugins", "name"):  # where the plugin lies, and the folder's own name
        ours.pop(key), theirs.pop(key)
    assert ours == theirs


def test_a_program_is_kept_whole_and_finds_the_plugin_of_the_machine_that_it_is_brought_to(tmp_path):
    mine, kept = tmp_path / "mine", tmp_path / "kept"
    project.project_files(mine)
    (mine / "infra" / "more.py").write_text("x = 1")
    kept.mkdir()
    (kept / "of-before").touch()
    project.keep_program(mine, kept)
    assert not (kept / "of-before").exists()
    assert (kept / "infra" / "more.py").read_text() == "x = 1"
    settings = yaml.safe_load((kept / "Pulumi.yaml").read_text())
    here = settings["plugins"]["providers"][0]["path"]
    theirs = [{"name": "mgpu", "path": "/elsewhere"}, {"name": "other", "path": "/other"}]
    (kept / "Pulumi.yaml").write_text(yaml.safe_dump({**settings, "plugins": {"providers": theirs}}))
    with (kept / "Pulumi.yaml").open() as read:
        project.settle(kept)
        assert "/elsewhere" in read.read(), "an engine that has begun to read it reads it to its end"
    found = yaml.safe_load((kept / "Pulumi.yaml").read_text())
    assert [each["path"] for each in found.pop("plugins")["providers"]] == [here, "/other"]
    assert found.items() <= settings.items()
    with pytest.raises(StackError, match="not a Pulumi project"):
        project.keep_program(tmp_path, kept)
    assert (kept / "infra" / "more.py").exists()


@pytest.mark.parametrize(
    ("main", "program", "kept_as"),
    [
        ("run.py", "p/run.py", "run.py"),
        ("../shared", "shared/__main__.py", "program"),
        ("../shared/run.py", "shared/run.py", "program/run.py"),
        ("link", "p/real/__main__.py", "real"),
        ("link/run.py", "p/real/run.py", "real/run.py"),
    ],
)
def test_a_program_of_the_users_own_is_kept_wherever_its_settings_say_that_it_is(tmp_path, main, program, kept_as):
    folder, kept = tmp_path / "p", tmp_path / "kept"
    folder.mkdir()
    (folder / "link").symlink_to("real")
    (tmp_path / program).parent.mkdir(exist_ok=True)
    (tmp_path / program).write_text("x = 1")
    (folder / "Pulumi.yaml").write_text(yaml.safe_dump({"name": "n", "runtime": "python", "main": main}))
    project.keep_program(folder, kept)
    assert yaml.safe_load((kept / "Pulumi.yaml").read_text()) == {"name": "n", "runtime": "python", "main": kept_as}
    place = kept / kept_as
    assert (place if place.is_file() else place / Path(program).name).read_text() == "x = 1"
    assert {path.name for path in tmp_path.iterdir()} <= {"p", "kept", "shared"}
