"""What provider `hosts` promises beside the contract: one holder at a time, whoever asks; nothing left, whoever dies;
nothing touched that is somebody else's. Real SSH servers, each in namespaces of its own (fakes.hosts)."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
from fakes.hosts import MINE, Machine, Rack, make_key
from mgpu_train.timeouts import Timeouts
from waiting import until

from mgpu.errors import AuthError, InvalidRequest, MgpuError, NoCapacity, Transient
from mgpu.plan.model import Offer, Requirements
from mgpu.providers.base import FleetRequest, Handle, Intent, NodePhase, NodeState, Provider
from mgpu.providers.hosts import on_host, ssh
from mgpu.providers.hosts import provider as module
from mgpu.remote.node import Node, connect
from mgpu.remote.targets import Target

T1, T2 = "a" * 40, "b" * 40


@pytest.fixture
def key(tmp_path: Path) -> Path:
    """The run's own key; its public half is beside it."""
    path = tmp_path / "run_key"
    path.with_suffix(".pub").write_text(make_key(path))
    return path


def wanted(
    provider: Provider, key: Path, nodes: int = 2, lease_s: float = 300, owner: str = "o-1"
) -> tuple[FleetRequest, Offer]:
    asked = {"provider": "hosts", "nodes": nodes, "max_price_usd_per_hour": 9, "max_hours": 1}
    needed = Requirements.model_validate(asked)
    request = FleetRequest(
        fleet="demo",
        generation=1,
        owner=owner,
        requirements=needed,
        ssh_public_key=key.with_suffix(".pub").read_text(),
        lease_s=lease_s,
        hard_cap_s=600,
    )
    return request, provider.offers(needed).offers[0]


@contextmanager
def logged_in(node: NodeState, key: Path) -> Iterator[Node]:
    target = Target(node.rank, node.address, node.port, node.user, node.host_key, python=node.python)
    ssh = connect(target, key, Timeouts(ssh_banner_s=15, command_s=30))
    try:
        yield ssh
    finally:
        ssh.close()


def said(node: Node, *argv: str) -> str:
    return node.run(argv, timeout=30).stdout.decode().strip()


def running(rack: Rack, machine: Machine, what: str) -> bool:
    return what in rack.run(machine.name, "ps -eo args")


def nothing_is_left(rack: Rack, machine: Machine) -> bool:
    """Of any run: no lock, process, folder or key."""
    folders = [*(machine.home / ".mgpu" / "hosts").glob("*")]
    return not (machine.held or "mgpu" in machine.keys or folders or running(rack, machine, "host.py"))


def test_a_session_of_the_run_is_at_home_in_its_own_folder_and_behaves_as_any(rack: Rack, key: Path):
    provider = rack.provider()
    handle = provider.create(*wanted(provider, key, 1), T1)
    (node,) = provider.describe(handle).nodes
    machine = rack.machine(node.id)
    home = machine.home / ".mgpu" / "hosts" / f"{T1[:10]}-0" / "home"
    with logged_in(node, key) as ssh:
        assert said(ssh, "sh", "-c", "pwd; echo $HOME; dirname $TMPDIR").splitlines() == [
            *[str(home)] * 2,
            str(home.parent),
        ]
        data = bytes(range(256)) * 4000
        assert ssh.run(["cat"], stdin=data, timeout=30).stdout == data
        assert ssh.run(["sh", "-c", "exit 3"], timeout=30, check=False).status == 3
        assert ssh.run(["exec", "sh", "-c", "kill -9 $$"], timeout=30, check=False).status == -1
        assert said(ssh, "printf", "%s|", "two words", "$(id)") == "two words|$(id)|"
        ssh.write("notes/a", b"by SFTP")
        assert (home / "notes" / "a").read_bytes() == b"by SFTP"
    assert f"{MINE}/{on_host._link(key.with_suffix('.pub').read_text())}/enter" in machine.keys
    assert "expiry-time=" in machine.keys, "sshd ends it, too"


def test_all_of_a_run_ends_and_nothing_of_the_users(rack: Rack, key: Path):
    provider = rack.provider()
    handle = provider.create(*wanted(provider, key, 1), T1)
    (node,) = provider.describe(handle).nodes
    machine = rack.machine(node.id)
    keys = (rack.folder / "id.pub").read_text()
    mine = machine.home / "thesis"
    mine.write_text("years of work")
    rack.run(machine.name, "setsid sleep 1111 > /dev/null 2>&1 < /dev/null &")
    with logged_in(node, key) as ssh:
        said(ssh, "sh", "-c", "sleep 2221 > /dev/null 2>&1 &")
        said(ssh, "sh", "-c", "env -i setsid sh -c 'trap \"\" TERM; sleep 2222; :' > /dev/null 2>&1 < /dev/null &")
        said(ssh, "sh", "-c", "mkdir -p ro/in && chmod 500 ro/in ro")
        assert running(rack, machine, "sleep 2222")
        assert provider.destroy(handle)
    assert not running(rack, machine, "sleep 222"), "what left its environment and its session, too"
    assert running(rack, machine, "sleep 1111")
    assert (machine.keys, mine.read_text()) == (keys, "years of work")
    assert nothing_is_left(rack, machine)
    mine.unlink()
    rack.run(machine.name, "pkill -f 'sleep 111[1]'")


def test_a_host_ends_a_run_by_itself_when_nobody_renews_its_lease(rack: Rack, key: Path):
    provider = rack.provider()
    handle = provider.create(*wanted(provider, key, 1, lease_s=2), T1)
    machine = rack.machine(handle.ids[0])
    until(lambda: not machine.held, 30)
    assert nothing_is_left(rack, machine)
    (node,) = provider.describe(handle).nodes
    assert (node.phase, node.reason) == (NodePhase.TERMINATED, "its lease or its hard cap has ended")
    assert provider.create(*wanted(provider, key, 1), T2).ids[0].startswith("host-0/"), "free again"


def test_a_host_that_was_started_anew_holds_nothing(rack: Rack, key: Path):
    provider = rack.provider()
    handle = provider.create(*wanted(provider, key, 1), T1)
    machine = rack.machine(handle.ids[0])
    machine.lose_power()
    rack.serve()
    (node,) = provider.describe(handle).nodes
    assert (node.phase, node.reason) == (NodePhase.TERMINATED, "the host was started anew")
    assert nothing_is_left(rack, machine)


def test_of_two_takers_at_once_no_host_gets_both_and_no_loser_leaves_anything(rack: Rack, key: Path, monkeypatch):
    monkeypatch.setattr(module, "_one_at_a_time", nullcontext)  # as on two machines
    asked = [(*wanted(rack.provider(), key, 2, owner=owner), token) for owner, token in (("o-1", T1), ("o-2", T2))]
    barrier = threading.Barrier(2)

    def take(each: tuple[FleetRequest, Offer, str]) -> Handle | MgpuError:
        barrier.wait()
        try:
            return rack.provider().create(*each)
        except MgpuError as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(take, asked))
    won = [answer for answer in answers if isinstance(answer, Handle)]
    lost = [answer for answer in answers if not isinstance(answer, Handle)]
    assert len(won) <= 1, "there are three hosts, and each wants two"
    assert all(isinstance(answer, NoCapacity) for answer in lost)
    held = {machine.id for machine in rack.machines if machine.held}
    assert held == {each for handle in won for each in handle.ids}


def test_a_gang_that_cannot_be_had_whole_is_not_taken_at_all_and_its_token_stays_good(
    rack: Rack, key: Path, monkeypatch
):
    """One host is taken by somebody else between the look and the take."""
    provider, take = rack.provider(), ssh.Client.ask
    request, offer = wanted(provider, key, 3)

    def late(client: ssh.Client, host, asked, **more):
        if asked["verb"] == "take" and host.address == "host-2":
            return {"held": None}
        return take(client, host, asked, **more)

    monkeypatch.setattr(ssh.Client, "ask", late)
    with pytest.raises(NoCapacity):
        provider.create(request, offer, T1)
    assert all(nothing_is_left(rack, machine) for machine in rack.machines)
    monkeypatch.undo()
    again = rack.provider().create(request, offer, T1)
    assert {node.phase for node in rack.provider().describe(again).nodes} == {NodePhase.RUNNING}


def test_a_host_that_cannot_be_taken_is_passed_over_and_told(rack: Rack, key: Path, tmp_path: Path):
    inventory = tmp_path / "hosts.txt"
    inventory.write_text("host-0 folder=/proc/none\nhost-1\n")
    provider = rack.provider(addresses="", inventory=str(inventory))
    request, offer = wanted(provider, key, 2)
    with pytest.raises(NoCapacity) as caught:
        provider.create(request, offer, T1)
    assert "host-0 could not be taken: " in caught.value.why
    assert all(nothing_is_left(rack, machine) for machine in rack.machines[:2])
    assert provider.create(*wanted(provider, key, 1), T2).ids[0].startswith("host-1/")
    bad, good, *_ = provider.findings(None, str)
    assert (bad.status, good.status) == ("failed", "ok")
    assert "0 GiB to be had in /proc/none" in bad.detail


def test_a_create_that_was_cut_off_is_found_and_completed(rack: Rack, key: Path, monkeypatch):
    provider, take = rack.provider(), ssh.Client.ask
    request, offer = wanted(provider, key, 2)

    def killed(client: ssh.Client, host, asked, **more):
        if asked["verb"] == "take" and host.address == "host-1":
            raise KeyboardInterrupt
        return take(client, host, asked, **more)

    monkeypatch.setattr(ssh.Client, "ask", killed)
    with pytest.raises(KeyboardInterrupt):
        provider.create(request, offer, T1)
    monkeypatch.undo()
    first = rack.machines[0].id
    found = rack.provider().find(Intent(fleet="demo", generation=1, owner="o-1", token=T1, offer=offer))
    assert found is not None
    assert found.ids == (first, "")
    whole = rack.provider().create(request, offer, T1)
    assert whole.ids[0] == first
    assert whole.ids == tuple(machine.id for machine in rack.machines[:2])


def test_what_an_earlier_try_has_taken_is_free_again_where_the_rest_cannot_be_had(rack: Rack, key: Path, monkeypatch):
    provider, take = rack.provider(), ssh.Client.ask
    request, offer = wanted(provider, key, 2)

    for error, told in ((KeyboardInterrupt(), KeyboardInterrupt), (Transient("not now", ""), NoCapacity)):

        def ask(client: ssh.Client, host, asked, *, error=error, **more):
            if asked["verb"] == "take" and host.address != "host-0":
                raise error
            return take(client, host, asked, **more)

        monkeypatch.setattr(ssh.Client, "ask", ask)
        with pytest.raises(told):
            provider.create(request, offer, T1)
    assert all(nothing_is_left(rack, machine) for machine in rack.machines)


def test_a_host_that_was_set_up_anew_keeps_no_other_from_being_given_back(rack: Rack, key: Path, monkeypatch):
    provider, ask = rack.provider(), ssh.Client.ask
    handle = provider.create(*wanted(provider, key, 2), T1)

    def anew(client: ssh.Client, host, asked, **more):
        if host.address == "host-0":
            raise AuthError("host host-0 shows another host key than the known one", "")
        return ask(client, host, asked, **more)

    monkeypatch.setattr(ssh.Client, "ask", anew)
    with pytest.raises(AuthError, match="another host key"):
        provider.destroy(handle)
    assert nothing_is_left(rack, rack.machines[1])
    monkeypatch.setattr(module.time, "time", lambda at=module.time.time: at() + 601)
    assert provider.destroy(handle), "after its hard cap it holds nothing"


def test_a_host_that_does_not_answer_is_unknown_until_it_is_asked_to_end_and_a_spare_takes_its_place(
    rack: Rack, key: Path
):
    provider = rack.provider()
    request, offer = wanted(provider, key, 2)
    handle = provider.create(request, offer, T1)
    rack.machine("host-1").lose_power()
    with pytest.raises(Transient) as caught:
        provider.describe(handle)
    assert caught.value.what == "host host-1 does not answer"
    assert not provider.destroy(handle, (handle.ids[1],)), "nobody knows that it has ended"
    phases = [node.phase for node in rack.provider().describe(handle).nodes]
    assert phases == [NodePhase.RUNNING, NodePhase.ENDING], "it was asked to, and costs nothing"
    listing = provider.list_reached("o-1")
    assert [handle.ids for handle in listing.handles] == [(handle.ids[0], "")]
    assert [error.what for error in listing.failures] == ["host host-1 does not answer"]
    repaired = provider.repair(handle, (1,), request.model_copy(update={"generation": 2}), offer, T2)
    assert repaired.ids == (handle.ids[0], rack.machine("host-2").id)
    rack.serve()
    assert provider.describe(handle).lost == (1,)
    assert provider.destroy(handle, (handle.ids[1],)), "it answers, and has nothing of it"


def test_after_its_hard_cap_a_host_that_never_answers_counts_as_gone(rack: Rack, key: Path, monkeypatch):
    provider = rack.provider()
    handle = provider.create(*wanted(provider, key, 1), T1)
    rack.machine("host-0").lose_power()
    assert not provider.destroy(handle)
    monkeypatch.setattr(module.time, "time", lambda at=module.time.time: at() + 601)
    assert provider.describe(handle).nodes[0].phase is NodePhase.TERMINATED
    assert provider.destroy(handle)


def test_after_its_hard_cap_a_host_without_its_python_is_told_once_and_given_up(rack: Rack, key: Path, monkeypatch):
    provider = rack.provider()
    handle = provider.create(*wanted(provider, key, 1), T1)
    without = rack.provider(python="/nowhere/python3")
    with pytest.raises(InvalidRequest, match="has no /nowhere/python3"):
        without.destroy(handle)
    cap = handle.ids[0].rpartition(".")[2]
    os.utime(module._asked_to_end(handle.ids[0]), (float(cap) - 1,) * 2)
    monkeypatch.setattr(module.time, "time", lambda at=module.time.time: at() + 601)
    with pytest.raises(InvalidRequest, match="by hand"):
        without.destroy(handle)
    os.utime(module._asked_to_end(handle.ids[0]), (float(cap) + 1,) * 2)  # the clock of files was not moved
    assert without.destroy(handle)
    assert without.describe(handle).nodes[0].phase is NodePhase.TERMINATED
    until(lambda: provider.destroy(handle), why="it has its Python again: what is left ends")


def test_another_user_of_the_host_is_told_who_has_it_and_cannot_be_taken_from(rack: Rack, key: Path):
    host, text = rack.machines[0], ssh.script()
    record = {
        "name": "cccccccccc-0",
        "token": "c" * 40,
        "rank": 0,
        "size": 1,
        "asked": "",
        "owner": "o-9",
        "fleet": "hers",
    }
    take = {
        "verb": "take",
        "names": [],
        "record": record,
        "lease_s": 300,
        "hard_cap_s": 600,
        "ends_by": 0,
        "key": key.with_suffix(".pub").read_text(),
    }
    take |= {"source": text, "lease_script": module._LEASE.read_text(), "folder": "/var/tmp/hers"}
    nobody = "setpriv --reuid 65534 --regid 65534 --clear-groups env HOME=/var/tmp/home /usr/bin/python3 -I -S -"
    command = ["ssh", "-F", str(rack.config), host.name, f"mkdir -m 777 /var/tmp/home; {nobody}"]
    ask = "\nprint(json.dumps(main({})))\n"
    done = subprocess.run(
        command, input=text + ask.format(take), capture_output=True, text=True, timeout=60, check=True
    )
    assert json.loads(done.stdout)["held"]["fleet"] == "hers"
    provider = rack.provider()
    request, offer = wanted(provider, key, 3)
    assert offer.stock is None, "what she has comes back"
    with pytest.raises(NoCapacity) as caught:
        provider.create(request, offer, T1)
    assert "host-0 is held by nobody (fleet hers) since" in caught.value.why
    assert provider.create(*wanted(provider, key, 2), T2).ids[0].startswith("host-1/"), "the next ones are taken"
    assert "hers" in (host.folder / "var-tmp" / "mgpu-hosts-65534" / "holder.json").read_text()


def test_hosts_that_share_a_home_do_not_meet_in_it(rack: Rack, key: Path):
    first, second, third = (rack.add(home=rack.folder / "nfs") for _ in range(3))
    try:
        rack.serve()
        provider = rack.provider(first.name, second.name)
        handle = provider.create(*wanted(provider, key, 2), T1)
        one, two = provider.describe(handle).nodes
        with logged_in(one, key) as ssh, logged_in(two, key) as other:
            assert said(ssh, "pwd") != said(other, "pwd"), "each has a home of its own"
        assert provider.destroy(handle, (one.id,))
        with logged_in(two, key) as other:
            assert said(other, "echo", "still here") == "still here"
        provider = rack.provider(first.name, second.name, third.name)
        second.lose_power()
        assert not provider.destroy(handle, (two.id,))
        request, offer = wanted(provider, key, 2)
        spare = provider.repair(handle, (1,), request.model_copy(update={"generation": 2}), offer, T2)
        with logged_in(provider.describe(spare).nodes[1], key) as other:
            assert said(other, "pwd").endswith(f"{T2[:10]}-1/home"), "the line of the one before it is in the file, too"
        assert provider.destroy(spare)
        rack.serve()
        assert provider.describe(handle).nodes[1].phase is NodePhase.TERMINATED, "it was started anew"
        assert nothing_is_left(rack, third)
    finally:
        for machine in (first, second, third):
            machine.lose_power()
            rack.machines.remove(machine)


def test_a_host_whose_key_is_not_known_is_not_trusted(rack: Rack, tmp_path: Path):
    strict = tmp_path / "config"
    strict.write_text(f"UserKnownHostsFile {tmp_path}/none\nStrictHostKeyChecking no\n{rack.config.read_text()}")
    with pytest.raises(AuthError) as caught:
        rack.provider("host-0", ssh_config=str(strict)).check()
    assert "its host key is not known" in caught.value.what
    assert "`ssh host-0`" in caught.value.next_step
