"""What is read of Slurm's own words, and what a run file may say; no Slurm is asked."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from importlib import resources

import pytest
from mgpu_train.timeouts import Timeouts

from mgpu.acquire.refusals import Refusals
from mgpu.acquire.terms import limits
from mgpu.errors import (
    AmbiguousCreate,
    AuthError,
    InputError,
    InvalidRequest,
    NoOffer,
    PermissionDenied,
    QuotaExceeded,
    Transient,
)
from mgpu.plan.model import Offer, Requirements
from mgpu.providers import slurm
from mgpu.providers.base import Handle, NodePhase, NodeState
from mgpu.providers.slurm import findings, login
from mgpu.providers.slurm.login import Login
from mgpu.providers.slurm.options import SlurmOptions
from mgpu.providers.slurm.provider import Gang, SlurmProvider

SOLD = {"provider": "slurm", "instance_type": "x", "market": "on-demand", "price_usd_per_hour": 0, "fetched_at": 0}


@pytest.mark.parametrize(
    ("gres", "wanted", "found"),
    [
        ("gpu:h100:8(S:0-1)", 8, [("h100", 8)]),
        ("nvme:1,gpu:a100-80:4", 2, [("a100-80", 4)]),
        ("gpu:t4:2,gpu:h100:4", 2, [("t4", 2), ("h100", 4)]),
        ("gpu:t4:1,gpu:h100:4", 4, [("h100", 4)]),
        ("gpu:4", 4, [(None, 4)]),
        ("gpu:h100:2", 4, []),
        ("(null)", 1, []),
        ("gpu:h100:2", 0, [(None, 0)]),
    ],
)
def test_the_gpus_of_a_node(gres, wanted, found):
    assert findings.NodeShape.of(f"nodes|main|32+|4096|{gres}|1|idle").gpus_for(wanted) == found


def test_a_type_of_gpus_in_a_partition_is_one_offer_with_what_its_smallest_node_has(monkeypatch):
    said = [
        "partition|PartitionName=main MaxTime=UNLIMITED State=UP",
        "partition|PartitionName=old MaxTime=UNLIMITED State=DOWN",
        "nodes|main|64|524288|gpu:h100:8|2|idle",
        "nodes|main|32|1048576|gpu:h100:4|3|mix",
        "nodes|main|16|131072|gpu:t4:4|1|idle",
        "nodes|main|8|8192|(null)|9|idle",
        "nodes|old|64|524288|gpu:h100:8|2|idle",
    ]
    monkeypatch.setattr(Login, "said", lambda *_, **__: said)
    needed = Requirements(provider="slurm", gpu=("H100",), gpus_per_node=4, max_price_usd_per_hour=1, max_hours=1)
    sold = SlurmProvider({"login": "me@login"}).offers(needed)
    assert [(each.instance_type, each.gpu, each.gpus, each.vcpus, each.memory_gib) for each in sold.offers] == [
        ("main/32cpu-4xh100", "h100", 4, 32, 512),
        ("main/16cpu-4xt4", "t4", 4, 16, 128),
    ]
    assert sold.notes[0] == "main/32cpu-4xh100: 2 of 5 nodes are idle"
    asked = [findings.sbatch(SlurmOptions(), needed, each) for each in sold.offers]
    assert ["--gres=gpu:h100:4" in each for each in asked] == [True, False], "the offer that is taken says the type"


def test_a_partition_that_is_none_is_named(monkeypatch):
    said = ["partition|PartitionName=main MaxTime=UNLIMITED State=UP", "nodes|main|64|524288|gpu:h100:8|2|idle"]
    monkeypatch.setattr(Login, "said", lambda *_, **__: said)
    needed = Requirements(provider="slurm", gpus_per_node=8, max_price_usd_per_hour=1, max_hours=1)
    answer = SlurmProvider({"login": "me@login", "partition": "mian"}).offers(needed)
    assert (answer.offers, answer.notes) == ((), ("no partition mian is up; up: main",))
    assert "no partition" not in str(SlurmProvider({"login": "me@login", "partition": "main"}).offers(needed).notes)


@pytest.mark.parametrize("limit", ["00:10:00", "00:40:00", "01:40:00", "7-00:00:00", "51-10:34:02"])
def test_as_many_hours_as_a_partition_is_said_to_allow_are_allowed(monkeypatch, limit):
    said = [f"partition|PartitionName=main MaxTime={limit} State=UP", "nodes|main|64|524288|(null)|2|idle"]
    monkeypatch.setattr(Login, "said", lambda *_, **__: said)
    needed = Requirements(provider="slurm", max_price_usd_per_hour=1, max_hours=1440)
    (offer,) = SlurmProvider({"login": "me@login"}).offers(needed).offers
    assert offer.obstacle is not None
    hours = float(re.findall(r"`max_hours` to ([0-9.]+),", offer.obstacle.cure)[0])
    (offer,) = SlurmProvider({"login": "me@login"}).offers(needed.model_copy(update={"max_hours": hours})).offers
    assert offer.obstacle is None


@pytest.mark.parametrize(
    ("said", "seconds"),
    [("01:00:00", 3600), ("2-00:30:00", 2 * 86400 + 1800), ("UNLIMITED", float("inf"))],
)
def test_the_longest_time_of_a_partition(said, seconds):
    assert findings.limit_s({"MaxTime": said}) == seconds


def gang(
    state: str, *, down: bool = False, ended: bool = False, begun: bool = True, cap_s: float = 600, nodes: str = "n1"
) -> NodePhase:
    said = [f"job|7|{state}|None|{nodes}"] if state else []
    said += ["down|n1"] if down else []
    node = {"node": "n1", "hard_cap_at": time.time() + cap_s}
    said += [f"file|node-0.json|0|{json.dumps(node)}"] if begun else []
    said += ['file|ended-0.json|0|{"why": "given back"}'] if ended else []
    phase, reason = Gang.of(said).phase(0)
    assert reason or phase is NodePhase.RUNNING
    return phase


def test_a_node_is_gone_only_when_its_job_has_ended_everywhere():
    assert gang("PENDING", begun=False, nodes="") is NodePhase.PENDING
    assert gang("RUNNING", begun=False) is NodePhase.PENDING, "its task has not said how it is reached"
    assert gang("RUNNING") is NodePhase.RUNNING
    assert gang("RUNNING", down=True) is NodePhase.RUNNING, "a node that does not answer Slurm is unknown, not gone"
    assert gang("RUNNING", ended=True) is NodePhase.STOPPING
    assert gang("COMPLETING", ended=True) is NodePhase.STOPPING
    assert gang("CANCELLED", ended=True) is NodePhase.TERMINATED
    assert gang("NODE_FAIL", down=True) is NodePhase.ENDING, "its processes may live on"
    assert gang("NODE_FAIL", down=True, cap_s=-1) is NodePhase.TERMINATED, "by its own clock"
    assert gang("NODE_FAIL", down=True, ended=True) is NodePhase.TERMINATED
    assert gang("NODE_FAIL") is NodePhase.TERMINATED
    assert gang("") is NodePhase.TERMINATED, "Slurm knows of no such job"


def described(monkeypatch, *said: str) -> NodeState:
    """The node of a gang of one, of which login.sh says this."""
    monkeypatch.setattr(Login, "said", lambda *_, **__: list(said))
    about = {"provider": "slurm", "region": "here", "fleet": "f", "generation": 1, "token": "f0" * 20}
    (node,) = SlurmProvider().describe(Handle.model_validate({**about, "ids": ("f0f0f0f0f0-0",)})).nodes
    return node


@pytest.mark.parametrize(
    ("reason", "cure"),
    [
        ("PartitionTimeLimit", "max_hours"),
        ("QOSMaxWallDurationPerJobLimit", "max_hours"),
        ("AssocMaxGRESPerJob", "one job"),
        ("BadConstraints", "constraint"),
        ("InvalidQOS", "a QOS"),
        ("Priority", ""),
        ("Resources", ""),
        ("QOSMaxJobsPerUserLimit", ""),
        ("QOSMaxGRESPerUser", ""),
        ("AssocGrpNodeLimit", ""),
        ("ReqNodeNotAvail, UnavailableNodes:n1", ""),
        ("None", ""),
    ],
)
def test_a_job_that_waits_for_ever_is_told_from_one_whose_turn_comes(monkeypatch, reason, cure):
    node = described(monkeypatch, f"job|7|PENDING|{reason}|")
    assert (node.queued, node.cure_scope) == (True, "zone")
    assert (cure in node.cure) if cure else (node.cure == "")
    running = Gang.of([f"job|7|RUNNING|{reason}|n1"])
    assert running.cure == ""


@pytest.mark.parametrize("name", ["asked.json", "node-0.json"])
def test_of_a_file_that_cannot_be_read_nothing_is_concluded_while_the_job_runs(monkeypatch, name):
    files = {"asked.json": "{}", "node-0.json": '{"port": 22}', name: ""}
    with pytest.raises(Transient, match=name):
        described(monkeypatch, "job|7|RUNNING|None|n1", *(f"file|{each}|1|{text}" for each, text in files.items()))


def test_a_file_that_stays_unreadable_keeps_no_job_from_having_ended(monkeypatch):
    """Nothing of it is asked for any more; but a node that is down may be the one that it would name."""
    job, file, written = "job|7|NODE_FAIL|None|n1", "file|node-0.json|{:.0f}|", time.time()
    asked = 'file|asked.json|1|{"hard_cap_s": 600}'
    assert described(monkeypatch, job, "file|asked.json|1|", file.format(written)).phase is NodePhase.TERMINATED
    assert (
        described(monkeypatch, job, asked, file.format(written), "file|ended-0.json|1|").phase is NodePhase.TERMINATED
    )
    node = described(monkeypatch, job, asked, file.format(written), "down|n1")
    assert (node.phase, "n1" in node.reason) == (NodePhase.ENDING, True)
    late = described(monkeypatch, job, asked, file.format(written - 601), "down|n1")
    assert late.phase is NodePhase.TERMINATED, "by its own clock, which has begun before the file was written"
    with pytest.raises(
        Transient, match=r"remove ~/\.mgpu-slurm/gangs/(f0){20}/node-0\.json"
    ):  # nothing says until when
        described(monkeypatch, job, "file|asked.json|1|", file.format(written), "down|n1")
    assert described(monkeypatch, job, "file|asked.json|1|", "down|n1").phase is NodePhase.TERMINATED, "removed"


@pytest.mark.parametrize("state", ["REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "CONFIGURING", "POWERING_UP"])
def test_a_state_that_is_no_end_is_none(state):
    waiting = Gang.of([f"job|7|{state}|None|"])
    assert (waiting.waits, waiting.phase(0)[0]) == (True, NodePhase.PENDING)
    assert gang(state) is NodePhase.RUNNING
    assert not Gang.of([f"job|7|{state}|None|n1"]).waits


@pytest.mark.parametrize("state", [*login.ENDED, "COMPLETING", ""])
def test_a_job_that_has_ended_without_nodes_does_not_wait(state):
    assert not Gang.of([f"job|7|{state}|None|"] if state else []).waits


FAILED = "sbatch: error: Batch job submission failed: "
POLICY = "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"
SAID = [
    (f"{FAILED}Requested node configuration is not available", NoOffer),
    (f"{FAILED}Requested time limit is invalid (missing or exceeds some limit)", NoOffer),
    (f"{FAILED}Node count specification invalid", NoOffer),
    (f"sbatch: error: QOSMaxSubmitJobPerUserLimit\n{FAILED}{POLICY}", QuotaExceeded),
    (f"{FAILED}{POLICY}", QuotaExceeded),
    ("scancel: error: Kill job error on job id 7: Access/permission denied", PermissionDenied),
    ("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", Transient),
    ("sh: 1: squeue: not found", InvalidRequest),
    ("mgpu: no locks in /shared/x", InvalidRequest),
    ("mgpu: cannot write to /shared/x", InvalidRequest),
    ("mgpu: timed out waiting for the lock of /shared/x", Transient),
    ("mgpu: job 7 has this token, and was made with another work folder", InvalidRequest),
    ("me@login: Permission denied (publickey).", AuthError),
]


@pytest.fixture
def answer(monkeypatch):
    """`answer(status, out, err)`: what the next script ends with."""

    def give(status: int, out: str = "", err: str = "") -> None:
        def run(argv, *, stderr, **_):
            stderr.write(err.encode())
            return subprocess.CompletedProcess(argv, status, out.encode())

        monkeypatch.setattr(login.subprocess, "run", run)

    return give


@pytest.mark.parametrize(("words", "kind"), SAID, ids=[kind.__name__ + str(i) for i, (_, kind) in enumerate(SAID)])
def test_what_slurm_says_is_an_error_with_a_cure(answer, words, kind):
    answer(1, err=words)
    with pytest.raises(kind) as caught:
        Login(SlurmOptions(login="me@login")).said("tell")
    assert words.splitlines()[-1] in caught.value.why
    assert caught.value.next_step


@pytest.mark.parametrize(
    "words",
    [
        "Invalid account or account/partition combination specified",
        "Invalid qos specification",
        "Invalid partition name specified",
        "User's group not permitted to use this partition",
        "Required partition not available (inactive or drain)",
        "Requested partition configuration not available now",
        "Access/permission denied",
    ],
)
def test_a_partition_that_is_closed_to_the_user_rules_out_no_other(answer, words):
    offers = [
        Offer.model_validate({**SOLD, "instance_type": f"{name}/8cpu", "region": "here", "zone": name})
        for name in ("main", "open")
    ]
    answer(1, err=FAILED + words)
    with pytest.raises(NoOffer) as caught:
        Login(SlurmOptions()).said('submit "$@"')
    refusals = Refusals()
    refusals.add(offers[0], words, caught.value)
    assert [refusals.rule_out(each) for each in offers] == [True, False]


def test_what_stands_before_slurms_words_on_stderr_is_none_of_them(answer):
    answer(1, err=f"Quota limit: 5 of 10 GB\n@mgpu begins\n{FAILED}Requested node configuration is not available\n")
    with pytest.raises(NoOffer) as caught:
        Login(SlurmOptions(login="me@login")).said("tell")
    assert "Quota" not in caught.value.why
    answer(255, err="me@login: Permission denied (publickey).\n@mgpu begins\n")
    with pytest.raises(AuthError):
        Login(SlurmOptions(login="me@login")).said("tell")


def test_a_connection_that_ssh_keeps_open_holds_nobody_up(monkeypatch, tmp_path):
    """OpenSSH before 8.5 leaves stderr open in the process that ControlPersist puts in the background."""
    ssh = tmp_path / "ssh"
    ssh.write_text(f'#!/bin/sh\nsleep 60 </dev/null >/dev/null &\necho $! >{tmp_path}/master\necho "@mgpu 17 1"\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(login, "_CALL_S", 10.0)
    try:
        assert Login(SlurmOptions(login="me@login")).said("look") == ["17 1"]
    finally:
        os.kill(int((tmp_path / "master").read_text()), signal.SIGKILL)


@pytest.mark.parametrize(("script", "kind"), [("submit", AmbiguousCreate), ("tell", Transient)])
@pytest.mark.parametrize("lost", [255, -9])
def test_an_answer_that_is_lost_is_unsure_for_a_submission_alone(answer, script, kind, lost):
    answer(lost, err="client_loop: send disconnect: Broken pipe")
    with pytest.raises(kind):
        Login(SlurmOptions(login="me@login")).said(script)


def test_what_a_start_up_file_prints_is_passed_over(answer):
    answer(0, "Welcome to the cluster!\n@mgpu 17 1\nbye\n")
    assert Login(SlurmOptions()).said("look") == ["17 1"]


def test_a_token_that_was_given_up_is_no_refusal_that_ends_a_search(monkeypatch, tmp_path):
    """Whoever goes on with the run on another machine asks by it, and then by the next one."""
    for name in ("squeue", "sbatch"):
        (tmp_path / name).write_text("#!/bin/sh\nexit 0\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    login_node = Login(SlurmOptions(work_folder=str(tmp_path / "work")))
    assert login_node.said('give_up "$@"', "f0" * 20) == []
    assert login_node.said('submit "$@"', "f0" * 20, "digest", files="") == ["conflict"]


def test_a_job_that_slurm_does_not_cancel_keeps_no_other(monkeypatch, tmp_path):
    """Nor does a folder that takes no file, as on a disk that is full."""
    why = "scancel: error: Kill job error on job id 17: Access/permission denied"
    denied = f'[ "$1" != 17 ] || {{ echo "{why}" >&2; exit 1; }}'
    programs = {"squeue": "printf 'PENDING:17\\nRUNNING:18\\n'", "scancel": f'echo "$1" >>{tmp_path}/asked; {denied}'}
    for name, program in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{program}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "work" / "gangs" / ("f0" * 20) / "given-back").mkdir(parents=True)
    with pytest.raises(PermissionDenied, match="could not cancel a job") as caught:
        Login(SlurmOptions(work_folder=str(tmp_path / "work"))).said('give_back "$@"', "f0" * 20, doing="cancel a job")
    assert caught.value.why == why
    assert (tmp_path / "asked").read_text().split() == ["17", "--signal=USR2", "18"]


def test_nodes_get_no_secret_of_the_operators():
    given = {"HOME": "/h", "PATH": "/bin", "MODULEPATH": "/m", "AWS_SECRET_ACCESS_KEY": "x", "SLURM_JOB_ID": "1"}
    assert login.passed_on(given) == {"HOME": "/h", "PATH": "/bin", "MODULEPATH": "/m"}


def test_the_token_that_logs_in_to_slurm_reaches_its_commands_and_no_job(monkeypatch, tmp_path):
    """On a login node that has no munge it is the only way in; a job that waits an hour for its turn has an old one."""
    assert login.passed_on({"SLURM_JWT": "t"}) == {"SLURM_JWT": "t"}
    for name, does in {"srun": f"env >{tmp_path}/env", "scontrol": "true"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    given = {"PATH": f"{tmp_path}:/usr/bin:/bin", "MGPU_GANG": str(tmp_path), "SLURM_JOB_ID": "7", "SLURM_JWT": "t"}
    batch = resources.files(slurm).joinpath("batch.sh").read_text(encoding="utf-8")
    subprocess.run(["bash", "-c", batch], env={**given, "SLURM_JOB_NUM_NODES": "1"}, check=True)
    seen = (tmp_path / "env").read_text()
    assert "SLURM_JOB_ID=7" in seen
    assert "SLURM_JWT" not in seen


def test_every_option_reaches_sbatch():
    options = SlurmOptions(
        account="a", qos="q", constraint="ib&h100", reservation="r", cpus_per_node=8, memory_gib=64, tmp_gib=500,
        exclusive=True,
    )  # fmt: skip
    needed = Requirements(provider="slurm", nodes=3, gpus_per_node=2, max_price_usd_per_hour=1, max_hours=1)
    offer = Offer.model_validate({**SOLD, "region": "here", "zone": "main", "gpu": "h100", "gpus": 2})
    assert findings.sbatch(options, needed, offer) == [
        *("--partition=main", "--nodes=3", "--ntasks-per-node=1", "--account=a", "--qos=q", "--constraint=ib&h100"),
        *("--reservation=r", "--gres=gpu:h100:2", "--cpus-per-task=8", "--mem=64G", "--tmp=500G"),
        *("--signal=URG@120", "--no-requeue", "--exclusive"),
    ]
    assert "--gres=gpu:2,lic:1" in findings.sbatch(SlurmOptions(gres="gpu:2,lic:1"), needed, offer)


def test_nodes_that_slurm_starts_in_a_cloud_are_waited_for_as_long_as_slurm_does():
    needed = Requirements(provider="slurm", max_price_usd_per_hour=1, max_hours=1)
    assert limits(Timeouts(), SlurmProvider(), needed).provision_s >= 1800, "ResumeTimeout of AWS ParallelCluster"


def test_all_mistakes_of_the_block_are_told_at_once():
    wrong = {
        "login": "-oProxyCommand=x",
        "partition": "a b",
        "constraint": "x;y",
        "work_folder": "here",
        "prologue": '["a\\nb"]',
        "queue_hours": "0",
        "tier": "9",
    }
    with pytest.raises(InputError) as caught:
        SlurmProvider(wrong)
    for key in wrong:
        assert f"slurm.{key}:" in str(caught.value)


def test_a_cluster_is_asked_only_where_there_is_one(monkeypatch, tmp_path):
    monkeypatch.delenv("SLURM_CONF", raising=False)
    monkeypatch.setattr("mgpu.providers.slurm.provider._SETTINGS", (str(tmp_path / "slurm.conf"),))
    assert not SlurmProvider().configured()
    needed = Requirements(provider="slurm", max_price_usd_per_hour=1, max_hours=1)
    with pytest.raises(NoOffer, match="no Slurm on this machine"):
        SlurmProvider().offers(needed)
    assert [each.status for each in SlurmProvider().findings(needed, str)] == ["failed"]
    assert SlurmProvider({"login": "me@login"}).configured()
