"""What is special about provider slurm, on a real Slurm: lost answers, nodes that are down, leases, login nodes."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from fakes.slurm import Cluster
from mgpu_train.agent.host.layout import LEASE
from mgpu_train.agent.machine import ports, procs
from mgpu_train.system import prctl
from mgpu_train.timeouts import Timeouts
from waiting import until

from mgpu.errors import AmbiguousCreate, Conflict, InvalidRequest, Transient
from mgpu.plan.model import Offer, Requirements
from mgpu.providers.base import FleetRequest, Handle, Intent, NodePhase, ProxyCommand, create_token
from mgpu.providers.slurm.provider import SlurmProvider
from mgpu.remote.connection import load_key
from mgpu.remote.node import Node
from mgpu.remote.targets import Target, hop

HIDDEN = 'case " $* " in *" -a "*) exec "$real" "$@" ;; esac\n'  # what everybody but root sees of such a partition


@dataclass
class Asked:
    """A request, as this test has it: its own work folder, its own token, its own key."""

    cluster: Cluster
    folder: Path
    options: dict[str, str]

    @property
    def provider(self) -> SlurmProvider:
        return SlurmProvider(self.options)

    def requirements(self, **more: object) -> Requirements:
        given = {"nodes": 2, "max_price_usd_per_hour": 9, "max_hours": 0.5, "provider_options": self.options, **more}
        return Requirements.model_validate({"provider": "slurm", **given})

    def request(self, **more: object) -> tuple[FleetRequest, Offer, str]:
        needed = self.requirements(**more)
        offer = self.provider.offers(needed).offers[0]
        key = (self.folder / "key.pub").read_text().strip()
        about = {"fleet": "f", "generation": 1, "owner": "o", "requirements": needed, "ssh_public_key": key}
        request = FleetRequest.model_validate({**about, "lease_s": 300, "hard_cap_s": 600})
        return request, offer, create_token("o", str(self.folder), 1, offer, 0)

    def gang(self, handle: Handle, name: str) -> dict:
        return json.loads((self.folder / "work" / "gangs" / handle.token / name).read_text())

    def ready(self, handle: Handle) -> None:
        until(lambda: self.provider.describe(handle).ready, why=lambda: self.provider.describe(handle))

    def phases(self, handle: Handle) -> list[NodePhase]:
        return [node.phase for node in self.provider.describe(handle).nodes]


@pytest.fixture
def asked(slurm: Cluster, tmp_path: Path) -> Asked:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "key")], check=True)
    return Asked(slurm, tmp_path, {**slurm.options, "work_folder": str(tmp_path / "work")})


def wrapped(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    """Puts a program before one of Slurm's, which it may call as $real."""
    real = shutil.which(name)
    (folder / "bin").mkdir(exist_ok=True)
    program = folder / "bin" / name
    program.write_text(f"#!/bin/sh\nreal={real}\n{text}")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}")


def test_an_answer_of_sbatch_that_is_lost_makes_no_second_job(asked: Asked, monkeypatch):
    request, offer, token = asked.request()
    lost = '"$real" "$@" >/dev/null; echo "sbatch: error: Socket timed out on send/recv operation" >&2; exit 1\n'
    with monkeypatch.context() as once:
        wrapped(asked.folder, once, "sbatch", lost)
        with pytest.raises(AmbiguousCreate):
            asked.provider.create(request, offer, token)
    found = asked.provider.find(Intent(fleet="f", generation=1, owner="o", token=token, offer=offer))
    assert found is not None
    again = asked.provider.create(request, offer, token)
    assert again == found
    assert asked.cluster.jobs() == [f"mgpu-{token}"]
    asked.ready(again)


def test_a_controller_that_does_not_answer_is_no_word_that_nothing_is_there(asked: Asked, monkeypatch):
    request, offer, token = asked.request()
    handle = asked.provider.create(request, offer, token)
    gang = asked.folder / "work" / "gangs" / token
    until((gang / "node-0.json").exists)  # the job has written its number where the operator had not
    (gang / "job").unlink()  # Slurm alone knows
    silent = 'echo "slurm_load_jobs error: Unable to contact slurm controller (connect failure)" >&2; exit 1\n'
    intent = Intent(fleet="f", generation=1, owner="o", token=token, offer=offer)
    with monkeypatch.context() as once:
        wrapped(asked.folder, once, "squeue", silent)
        for ask in (
            lambda: asked.provider.list_owned("o"),
            lambda: asked.provider.find(intent),
            lambda: asked.provider.recall(request, intent, (0, 1)),
            lambda: asked.provider.describe(handle),
            lambda: asked.provider.destroy(handle),
        ):
            with pytest.raises(Transient):
                ask()
        (asked.folder / "bin" / "squeue").unlink()
        wrapped(asked.folder, once, "sinfo", silent)
        with pytest.raises(Transient):  # which nodes are down is not known: none of them counts as gone
            asked.provider.describe(handle)
    assert asked.provider.find(intent) == handle
    assert [owned.token for owned in asked.provider.list_owned("o")] == [token]


def test_a_token_that_was_given_up_makes_nothing_more(asked: Asked):
    request, offer, token = asked.request()
    intent = Intent(fleet="f", generation=1, owner="o", token=token, offer=offer)
    assert asked.provider.recall(request, intent, (0, 1)) is None
    with pytest.raises(Conflict, match="given up"):  # from which a search goes on, by another token
        asked.provider.create(request, offer, token)  # one that was on its way until now
    assert asked.cluster.jobs() == []


def test_only_folders_of_gangs_that_slurm_has_forgotten_are_removed(asked: Asked):
    gangs = asked.folder / "work" / "gangs"
    running = asked.provider.create(*asked.request())
    forgotten = gangs / ("0a" * 20)
    stay = [
        gangs / running.token,
        gangs.parent / "thesis",
        gangs.parent / "probe",
        gangs.parent / ("0b" * 20),
        gangs / "thesis",
        gangs / ("0c" * 20),  # without a digest it is no gang's
        gangs / ("0d" * 20),  # its job runs under another name
        gangs / ("0e" * 19),
        gangs / ("0F" * 20),
    ]
    for each in (forgotten, *stay):
        each.mkdir(exist_ok=True)
        if each.name != "0c" * 20:
            (each / "digest").touch()
    shutil.copy(stay[0] / "job", gangs / ("0d" * 20) / "job")
    recent = gangs / ("09" * 20)
    recent.mkdir()
    (recent / "digest").touch()
    month = time.time() - 32 * 86400
    for each in (forgotten, *stay):
        os.utime(each, (month, month))
    request, offer, _ = asked.request()
    other = asked.provider.create(request, offer, create_token("o", "other", 2, offer, 0))
    assert not forgotten.exists()
    assert [each for each in (*stay, recent, gangs / other.token) if not each.exists()] == []
    asked.provider.findings(asked.requirements(), str)
    assert (gangs.parent / "probe").exists()
    assert list(gangs.glob("probe*")) == []


def test_jobs_of_hidden_partitions_are_seen(asked: Asked, monkeypatch):
    for name in ("squeue", "sinfo", "scontrol"):
        wrapped(asked.folder, monkeypatch, name, HIDDEN)
    request, offer, token = asked.request()
    handle = asked.provider.create(request, offer, token)
    asked.ready(handle)
    assert asked.provider.list_owned("o")
    (asked.folder / "work" / "gangs" / token / "job").unlink()
    assert asked.provider.find(Intent(fleet="f", generation=1, owner="o", token=token, offer=offer))
    until(lambda: asked.provider.destroy(handle))
    assert asked.cluster.jobs() == []


def test_what_other_jobs_are_called_hides_none_of_ours(asked: Asked):
    handle = asked.provider.create(*asked.request())
    strangers = (
        ("x\ny|z", "a\nb|c"),
        ("mgpu-check", "a\\nb\\c"),
        ("mgpu-" + "0a" * 20, '{"owner": "o"}'),
        ("mgpu-" + "0b" * 20, "[]"),
        ("thesis", '{"owner": "o", "fleet": "f", "generation": 1, "nodes": 2}'),  # a comment that was copied
    )
    for name, comment in strangers:
        asked.cluster.run("sbatch", "--hold", f"--job-name={name}", f"--comment={comment}", "--wrap=true")
    assert [each.token for each in asked.provider.list_owned("o")] == [handle.token]
    asked.ready(handle)


def test_a_folder_that_is_gone_is_told_and_a_lock_that_is_held_is_waited_for(asked: Asked, monkeypatch):
    request, offer, token = asked.request()
    asked.provider.create(request, offer, token)
    intent = Intent(fleet="f", generation=1, owner="o", token=token, offer=offer)
    gang = asked.folder / "work" / "gangs" / token
    with monkeypatch.context() as once, (gang / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        wrapped(asked.folder, once, "flock", 'shift 2; exec "$real" -w 0 "$@"\n')
        with pytest.raises(Transient, match="timed out waiting for the lock"):
            asked.provider.find(intent)
    gang.rename(asked.folder / "elsewhere")
    for ask in (lambda: asked.provider.find(intent), lambda: asked.provider.create(request, offer, token)):
        with pytest.raises(InvalidRequest, match="made with another work folder"):
            ask()


def test_a_full_disk_makes_no_job_and_gives_no_token_up(asked: Asked):
    request, offer, token = asked.request()
    gang = asked.folder / "work" / "gangs" / token
    gang.mkdir(parents=True)
    for name in ("digest", "job.none"):
        (gang / name).symlink_to("/dev/full")
    with pytest.raises(InvalidRequest, match="cannot write"):
        asked.provider.create(request, offer, token)
    with pytest.raises(InvalidRequest, match="cannot write"):
        asked.provider.recall(request, Intent(fleet="f", generation=1, owner="o", token=token, offer=offer), (0, 1))
    assert asked.cluster.jobs() == []


def test_of_two_jobs_of_one_token_one_ends_itself(asked: Asked):
    request, offer, token = asked.request()
    handle = asked.provider.create(request, offer, token)
    asked.ready(handle)
    gang = asked.folder / "work" / "gangs" / token
    second = ["--nodes=2", f"--job-name=mgpu-{token}", f"--output={gang}/second", f"--export=ALL,MGPU_GANG={gang}"]
    asked.cluster.run("sbatch", *second, str(gang / "batch.sh"))
    until(lambda: asked.cluster.jobs() == [f"mgpu-{token}"])
    until(lambda: "this one ends" in (gang / "second").read_text())
    assert asked.phases(handle) == [NodePhase.RUNNING] * 2


def test_a_gang_has_its_own_home_a_notice_and_a_lease_that_ends_it(asked: Asked, monkeypatch):
    monkeypatch.setenv("CANARY", "5ecret")
    asked.options["prologue"] = "export FROM_PROLOGUE=yes"
    handle = asked.provider.create(*asked.request(gpus_per_node=2, gpu=("H100",)))
    asked.ready(handle)
    state = asked.provider.describe(handle).nodes[1]
    target = Target(1, state.address, state.port, state.user, state.host_key, hop(None), state.python)
    with Node(target, load_key(asked.folder / "key"), Timeouts()) as node:
        told = node.run(["env"], timeout=30).stdout.decode()
        assert "FROM_PROLOGUE=yes" in told
        assert "CUDA_VISIBLE_DEVICES=0,1" in told
        assert "5ecret" not in told
        assert "SLURM_PROCID" not in told, "a program would take itself for Slurm's task"
        node.write("given", b"x")
        home = node.run(["pwd"], timeout=30).stdout.decode().strip()
        assert (Path(home) / "given").read_bytes() == b"x", "SFTP begins in the node's own home"
        node.run(["sh", "-c", "setsid sleep 600 >/dev/null 2>&1 & echo $! > stray"], timeout=30)
        stray = procs.of(int((Path(home) / "stray").read_text()))
        assert stray is not None
        asked.cluster.run("scancel", "--signal=URG", asked.cluster.run("squeue", "-h", "-o", "%i"))
        until((Path(home) / ".mgpu" / "notice.json").exists)
        assert asked.phases(handle) == [NodePhase.RUNNING] * 2, "a notice ends nothing"
        node.write(str(LEASE), f"{int(procs.uptime_s() + 1)}\n".encode())  # nobody renews it any more
    until(lambda: not asked.cluster.jobs(), why=asked.cluster.jobs)
    assert asked.phases(handle) == [NodePhase.TERMINATED] * 2
    assert "lease" in asked.provider.describe(handle).nodes[1].reason
    assert not Path(home).exists()
    assert not stray.alive, "nothing that ran there gets away"


def test_a_keeper_that_is_killed_leaves_no_ssh_server(asked: Asked):
    handle = asked.provider.create(*asked.request())
    asked.ready(handle)
    told = asked.gang(handle, "node-0.json")
    servers = [each for each in procs.descendants(told["pid"]) if "sshd_config" in procs.command_line(each.pid)]
    assert len(servers) == 1
    os.kill(told["pid"], signal.SIGKILL)
    until(lambda: not servers[0].alive)
    until(lambda: asked.phases(handle) == [NodePhase.TERMINATED] * 2, why=lambda: asked.phases(handle))


def test_a_node_that_is_down_but_works_is_not_gone(asked: Asked):
    cluster = asked.cluster
    handle = asked.provider.create(*asked.request())
    asked.ready(handle)
    keeper = next(n for n in (0, 1) if asked.gang(handle, f"node-{n}.json")["node"] == "n2")
    pid = asked.gang(handle, f"node-{keeper}.json")["pid"]
    os.kill(pid, signal.SIGSTOP)  # it ends by no word of Slurm's that reaches it all the same
    cluster.end("slurmd-n2", signal.SIGKILL)
    try:
        cluster.run("scontrol", "update", "nodename=n2", "state=down", "reason=test")
        until(lambda: asked.phases(handle)[1 - keeper] is NodePhase.TERMINATED, why=lambda: asked.phases(handle))
        os.kill(pid, 0)
        assert asked.phases(handle)[keeper] is NodePhase.ENDING, "Slurm has ended the job, and the process lives on"
        assert "may live on" in asked.provider.describe(handle).nodes[keeper].reason
        assert not asked.provider.destroy(handle)
    finally:
        os.kill(pid, signal.SIGCONT)
        os.kill(pid, signal.SIGUSR2)  # what its lease would do
        cluster.node("n2")
        until(lambda: cluster.resumed("n2"))
    until(lambda: asked.provider.destroy(handle))
    until(cluster.idle)


@pytest.fixture
def login(asked: Asked) -> Iterator[subprocess.Popen[bytes]]:
    """A login node: OpenSSH's server on this machine, reached by the user's own ssh."""
    folder, port = asked.folder, ports.free(1)[0]
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "host")], check=True)
    known = " ".join((folder / "host.pub").read_text().split()[:2])
    (folder / "known").write_text(f"[127.0.0.1]:{port} {known}\n")
    (folder / "sshd_config").write_text(
        f"ListenAddress 127.0.0.1\nPort {port}\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/key.pub\n"
        f"StrictModes no\nUsePAM no\nPidFile none\nSetEnv SLURM_CONF={os.environ['SLURM_CONF']}\n"
    )
    (folder / "ssh_config").write_text(
        f"Host cluster\n  HostName 127.0.0.1\n  Port {port}\n  IdentityFile {folder}/key\n  IdentitiesOnly yes\n"
        f"  UserKnownHostsFile {folder}/known\n"
    )
    asked.options |= {"login": "cluster", "ssh_config": str(folder / "ssh_config")}
    server = serve(asked, port)
    yield server
    server.kill()
    server.wait()


def serve(asked: Asked, port: int) -> subprocess.Popen[bytes]:
    me = os.getpid()
    server = subprocess.Popen(
        ["/usr/sbin/sshd", "-D", "-E", asked.folder / "sshd.log", "-f", asked.folder / "sshd_config"],
        preexec_fn=lambda: prctl.die_with_parent(signal.SIGTERM, me),
    )

    def answers() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    until(answers)
    return server


def test_a_login_node_that_restarts_ends_nothing_and_nodes_are_reached_through_it(asked: Asked, login):
    request, offer, token = asked.request()
    assert offer.region == "cluster"
    handle = asked.provider.create(request, offer, token)
    asked.ready(handle)
    state = asked.provider.describe(handle).nodes[0]
    assert isinstance(state.via, ProxyCommand)
    target = Target(0, state.address, state.port, state.user, state.host_key, hop(state.via.model_dump()), "python3")
    with Node(target, load_key(asked.folder / "key"), Timeouts()) as node:
        assert node.run(["echo", "there"], timeout=30).stdout == b"there\n"
    port = int((asked.folder / "known").read_text().partition("]:")[2].split()[0])
    login.kill()
    login.wait()
    with pytest.raises(Transient):
        asked.provider.describe(handle)
    with pytest.raises(AmbiguousCreate):
        asked.provider.create(request, offer, token)
    server = serve(asked, port)
    try:
        assert asked.provider.create(request, offer, token) == handle
        assert asked.provider.describe(handle).ready
        assert len(asked.cluster.jobs()) == 1
        until(lambda: asked.provider.destroy(handle))
    finally:
        server.kill()
        server.wait()


def test_settings_of_slurms_commands_on_the_login_node_change_nothing(asked: Asked, login):
    port = int((asked.folder / "known").read_text().partition("]:")[2].split()[0])
    own = "SQUEUE_STATES=SUSPENDED SQUEUE_PARTITION=urgent SQUEUE_FORMAT=%A SINFO_PARTITION=urgent SBATCH_EXPORT=NONE"
    own += " SBATCH_PARTITION=urgent SBATCH_HOLD=1 SLURM_CLUSTERS=elsewhere SLURM_JOB_ID=1 SCANCEL_STATE=SUSPENDED"
    config = asked.folder / "sshd_config"
    config.write_text(config.read_text().replace("SetEnv ", f"SetEnv {own} "))
    login.kill()
    login.wait()
    server = serve(asked, port)
    try:
        del asked.options["partition"]
        request, offer, token = asked.request()
        assert offer.zone == "main"
        handle = asked.provider.create(request, offer, token)
        asked.ready(handle)
        assert [each.token for each in asked.provider.list_owned("o")] == [token]
        until(lambda: asked.provider.destroy(handle))
        assert asked.cluster.jobs() == []
    finally:
        server.kill()
        server.wait()


def test_check_tries_the_request_and_a_node(asked: Asked):
    found = {each.subject: each for each in asked.provider.findings(asked.requirements(), str)}
    assert {subject: each.status for subject, each in found.items()} == {
        "slurm at here": "ok",
        "a node": "ok",
        "the request": "ok",
    }, found
    asked.options["constraint"] = "nowhere"
    found = {each.subject: each for each in asked.provider.findings(asked.requirements(), str)}
    assert found["the request"].status == "failed"
    assert found["the request"].cure
    longer = {each.subject: each for each in asked.provider.findings(asked.requirements(max_hours=9), str)}
    assert "no job run longer than 4 h" in longer["the request"].detail
    assert asked.cluster.jobs() == []


def test_a_request_that_waits_is_queued_by_slurms_own_reason_and_costs_nothing(asked: Asked):
    request, offer, token = asked.request()
    asked.cluster.run("scontrol", "update", "partitionname=main", "state=down")
    try:
        handle = asked.provider.create(request, offer, token)
        until(lambda: "partitiondown" in asked.provider.describe(handle).nodes[0].reason.lower())
        nodes = asked.provider.describe(handle).nodes
        assert [(node.phase, node.queued, node.hard_cap_at) for node in nodes] == [(NodePhase.PENDING, True, 0)] * 2
        until(lambda: asked.provider.destroy(handle))
    finally:
        asked.cluster.run("scontrol", "update", "partitionname=main", "state=up")
    assert asked.phases(handle) == [NodePhase.TERMINATED] * 2
    assert asked.cluster.jobs() == []


def test_offers_are_the_shapes_of_nodes_with_what_is_idle(asked: Asked):
    del asked.options["partition"]
    sold = asked.provider.offers(asked.requirements(gpus_per_node=1, gpu=("H100",), max_hours=2))
    assert [(o.zone, o.gpu, o.gpus, o.vcpus, o.stock) for o in sold.offers] == [
        ("main", "h100", 1, 32, None),
        ("urgent", "h100", 1, 32, None),
    ]
    assert sold.notes[0].endswith("2 of 2 nodes are idle")
    assert sold.offers[0].obstacle is None
    assert sold.offers[1].obstacle is not None, "its time limit is an hour"
    assert asked.provider.offers(asked.requirements(gpus_per_node=4)).offers == ()
