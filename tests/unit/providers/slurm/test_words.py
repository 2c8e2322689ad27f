"""What is read of Slurm's own words, and what a run file may say; no Slurm is asked."""

from __future__ import annotations

import subprocess
import time

import pytest

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
from mgpu.providers.base import NodePhase
from mgpu.providers.slurm import findings, login
from mgpu.providers.slurm.login import Login
from mgpu.providers.slurm.options import SlurmOptions
from mgpu.providers.slurm.provider import Gang, SlurmProvider, gpus_of


@pytest.mark.parametrize(
    ("gres", "wanted", "found"),
    [
        ("gpu:h100:8(S:0-1)", 8, ("h100", 8)),
        ("nvme:1,gpu:a100-80:4", 2, ("a100-80", 4)),
        ("gpu:t4:1,gpu:h100:4", 4, ("h100", 4)),
        ("gpu:4", 4, (None, 4)),
        ("gpu:h100:2", 4, (None, 0)),
        ("(null)", 1, (None, 0)),
    ],
)
def testgpus_of_of_a_node(gres, wanted, found):
    assert gpus_of(gres, wanted) == found


@pytest.mark.parametrize(
    ("said", "seconds"),
    [("01:00:00", 3600), ("2-00:30:00", 2 * 86400 + 1800), ("UNLIMITED", float("inf"))],
)
def test_the_longest_time_of_a_partition(said, seconds):
    assert findings.limit_s({"MaxTime": said}) == seconds


def gang(state: str, *, down: bool = False, ended: bool = False, begun: bool = True, cap_s: float = 600) -> NodePhase:
    said = [f"job|7|{state}|None|n1"] if state else []
    said += ["down|n1"] if down else []
    node = {"node": "n1", "hard_cap_at": time.time() + cap_s}
    phase, reason = Gang.of(said).phase(node if begun else {}, {"why": "given back"} if ended else None)
    assert reason or phase is NodePhase.RUNNING
    return phase


def test_a_node_is_gone_only_when_its_job_has_ended_everywhere():
    assert gang("PENDING", begun=False) is NodePhase.PENDING
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


SAID = [
    ("sbatch: error: Batch job submission failed: Invalid account or account/partition combination", InvalidRequest),
    ("sbatch: error: Batch job submission failed: Requested node configuration is not available", NoOffer),
    ("sbatch: error: Batch job submission failed: Requested time limit is invalid (exceeds some limit)", NoOffer),
    ("sbatch: error: QOSMaxSubmitJobPerUserLimit\nJob violates accounting/QOS policy", QuotaExceeded),
    ("sbatch: error: User's group not permitted to use this partition", PermissionDenied),
    ("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", Transient),
    ("sh: 1: squeue: not found", InvalidRequest),
    ("mgpu: no locks in /shared/x", InvalidRequest),
    ("me@login: Permission denied (publickey).", AuthError),
]


@pytest.mark.parametrize(("words", "kind"), SAID, ids=[kind.__name__ + str(i) for i, (_, kind) in enumerate(SAID)])
def test_what_slurm_says_is_an_error_with_a_cure(monkeypatch, words, kind):
    ended = subprocess.CompletedProcess([], 1, b"", words.encode())
    monkeypatch.setattr(login.subprocess, "run", lambda *_, **__: ended)
    with pytest.raises(kind) as caught:
        Login(SlurmOptions(login="me@login")).said("tell")
    assert words.splitlines()[-1] in caught.value.why
    assert caught.value.next_step


@pytest.mark.parametrize(("script", "kind"), [("submit", AmbiguousCreate), ("tell", Transient)])
@pytest.mark.parametrize("lost", [255, -9])
def test_an_answer_that_is_lost_is_unsure_for_a_submission_alone(monkeypatch, script, kind, lost):
    ended = subprocess.CompletedProcess([], lost, b"", b"client_loop: send disconnect: Broken pipe")
    monkeypatch.setattr(login.subprocess, "run", lambda *_, **__: ended)
    with pytest.raises(kind):
        Login(SlurmOptions(login="me@login")).said(script)


def test_what_a_start_up_file_prints_is_passed_over(monkeypatch):
    ended = subprocess.CompletedProcess([], 0, b"Welcome to the cluster!\n@mgpu 17 1\nbye\n", b"")
    monkeypatch.setattr(login.subprocess, "run", lambda *_, **__: ended)
    assert Login(SlurmOptions()).said("look") == ["17 1"]


def test_nodes_get_no_secret_of_the_operators():
    given = {"HOME": "/h", "PATH": "/bin", "MODULEPATH": "/m", "AWS_SECRET_ACCESS_KEY": "x", "SLURM_JOB_ID": "1"}
    assert login.passed_on(given) == {"HOME": "/h", "PATH": "/bin", "MODULEPATH": "/m"}


def test_every_option_reaches_sbatch():
    options = SlurmOptions(
        account="a", qos="q", constraint="ib&h100", reservation="r", cpus_per_node=8, memory_gib=64, exclusive=True
    )
    needed = Requirements(provider="slurm", nodes=3, gpus_per_node=2, max_price_usd_per_hour=1, max_hours=1)
    sold = {"provider": "slurm", "instance_type": "x", "market": "on-demand", "price_usd_per_hour": 0, "fetched_at": 0}
    offer = Offer(**sold, region="here", zone="main", gpu="h100", gpus=2)
    assert findings.sbatch(options, needed, offer) == [
        *("--partition=main", "--nodes=3", "--ntasks-per-node=1", "--account=a", "--qos=q", "--constraint=ib&h100"),
        *("--reservation=r", "--gres=gpu:h100:2", "--cpus-per-task=8", "--mem=64G", "--signal=URG@120"),
        *("--no-requeue", "--exclusive"),
    ]
    assert "--gres=gpu:2,lic:1" in findings.sbatch(SlurmOptions(gres="gpu:2,lic:1"), needed, offer)


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
