"""First contact with many machines that boot, stay silent, or are others than they should be; none of them is real."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from mgpu_train.timeouts import Timeouts

from mgpu.acquire import Lost
from mgpu.errors import ConnectionFailed, HostKeyMismatch, InputError, RemoteError
from mgpu.iac.types import contact as contacts
from mgpu.iac.types.contact import Contact
from mgpu.providers.base import NETWORK, FleetState, Handle, JumpHost, NodePhase, NodeState, ProxyCommand
from mgpu.remote import rekey, targets
from mgpu.remote.targets import Target

PATIENCE_S = 300
TIMEOUTS = Timeouts(provision_s=2 * PATIENCE_S)


def public() -> str:
    form = serialization.PublicFormat.OpenSSH
    return Ed25519PrivateKey.generate().public_key().public_bytes(serialization.Encoding.OpenSSH, form).decode()


class Machines:
    """By address: what each shows, and what the provider has noted of it. `silent` ones refuse connections."""

    def __init__(self, count: int) -> None:
        self.shown = {f"10.0.0.{rank}": public() for rank in range(count)}
        self.first = dict(self.shown)
        self.noted: dict[str, str] = {}
        self.silent: set[str] = set()
        self.open: Counter[str] = Counter()
        self.dialled: list[Target] = []
        self.broken = False
        self.via: JumpHost | ProxyCommand | None = None
        self.outside = ""  # the address of all of them, beside a private one each

    def state(self) -> FleetState:
        return FleetState(nodes=tuple(self._node(rank, address) for rank, address in enumerate(self.first)))

    def _node(self, rank: int, address: str) -> NodeState:
        return NodeState(
            rank=rank,
            id=f"i-{rank}",
            phase=NodePhase.RUNNING,
            address=self.outside or address,
            private_address=address,
            user="ubuntu",
            host_key=self.noted.get(f"i-{rank}", self.first[address]),
            one_use_key=self.first[address],
            via=self.via,
        )

    @property
    def handle(self) -> Handle:
        ids = tuple(f"i-{rank}" for rank in range(len(self.first)))
        return Handle(provider="p", region="r", fleet="f", generation=1, token="t", ids=ids)

    def rekeyed(self, handle: Handle, node: str, host_key: str, *, used: bool) -> None:
        self.noted[node] = host_key

    # ---- in the place of mgpu.remote

    def connect(self, target: Target, _key: object, _timeouts: Timeouts) -> Session:
        self.dialled.append(target)
        if target.address in self.silent:
            raise ConnectionFailed(f"{target.label}: could not be connected to", "Connection refused.")
        if self.shown[target.address] != target.host_key:
            raise HostKeyMismatch(f"{target.label} shows another host key than the pinned one")
        self.open[target.address] += 1
        return Session(self, target)

    def prepare(self, node: Session, _timeout: float) -> str:
        if self.broken:
            raise RemoteError(f"{node.target.label}: it did not get a host key", "sudo: a password is required")
        return public()

    def install(self, node: Session, new: str, _timeout: float) -> None:
        assert self.noted[f"i-{node.target.rank}"] == new, "it is written down first"
        self.shown[node.target.address] = new


class Session:
    def __init__(self, machines: Machines, target: Target) -> None:
        self._machines, self.target = machines, target

    def close(self) -> None:
        self._machines.open[self.target.address] -= 1

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


class Bench:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, key_file: Path) -> None:
        self.now = 0.0
        self.cancelled = threading.Event()
        self._monkeypatch, self._key_file = monkeypatch, key_file
        self.of(2)

    def of(self, count: int) -> Bench:
        self.machines = Machines(count)
        self._monkeypatch.setattr(contacts, "Node", self.machines.connect)
        self._monkeypatch.setattr(rekey, "prepare", self.machines.prepare)
        self._monkeypatch.setattr(rekey, "install", self.machines.install)
        self.contact = Contact(
            self.machines,  # type: ignore[arg-type]
            self._key_file,
            TIMEOUTS,
            cancelled=self.cancelled,
            clock=lambda: self.now,
        )
        return self

    def meet(self) -> tuple[NodeState, ...]:
        return self.contact.meet(self.machines.handle, self.machines.state()).nodes


@pytest.fixture
def bench(monkeypatch, tmp_path) -> Bench:
    form, none = serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    text = Ed25519PrivateKey.generate().private_bytes(serialization.Encoding.PEM, form, none)
    (tmp_path / "id").write_bytes(text)
    return Bench(monkeypatch, tmp_path / "id")


def test_every_machine_gets_a_key_of_its_own_and_no_connection_stays(bench: Bench):
    nodes = bench.of(200).meet()
    assert not any(node.one_use_key for node in nodes)
    assert {node.address: node.host_key for node in nodes} == bench.machines.shown
    assert not set(bench.machines.shown.values()) & set(bench.machines.first.values())
    assert not any(bench.machines.open.values())


def test_it_goes_through_the_jump_host(bench: Bench):
    key = bench.machines.first["10.0.0.0"]
    bench.machines.via = JumpHost(address="jump", user="j", host_key=key)
    bench.meet()
    assert {target.via for target in bench.machines.dialled} == {targets.Jump("jump", 22, "j", key)}


def test_from_within_their_network_machines_are_met_at_their_private_addresses(bench: Bench, monkeypatch):
    bench.machines.outside = "198.51.100.1"
    monkeypatch.setenv(NETWORK, "vpc-1")
    bench.machines.silent = {"10.0.0.1"}
    assert "i-1 at 10.0.0.1" in bench.meet()[1].reason
    assert {target.address for target in bench.machines.dialled} == {"10.0.0.0", "10.0.0.1"}
    bench.machines.via = ProxyCommand(command=("carry", "i-0"))
    bench.machines.shown |= {"198.51.100.1": ""}
    bench.meet()
    assert bench.machines.dialled[-1].address == "198.51.100.1"


def test_it_goes_by_the_proxy_command_and_blames_no_port(bench: Bench):
    bench.machines.via = ProxyCommand(command=("carry", "i-0"))
    bench.machines.silent = {"10.0.0.1"}
    nodes = bench.meet()
    assert {target.via for target in bench.machines.dialled} == {targets.ProxyCommand(("carry", "i-0"))}
    assert nodes[1].reason
    assert "port 22" not in nodes[1].reason


def test_a_machine_that_boots_is_asked_again_and_the_others_only_once(bench: Bench):
    bench.machines.silent = {"10.0.0.1"}
    first = bench.meet()
    assert [bool(node.one_use_key) for node in first] == [False, True]
    assert "port 22" in first[1].reason
    asked = len(bench.machines.dialled)
    bench.machines.silent = set()
    bench.now = PATIENCE_S - 1
    assert not any(node.one_use_key for node in bench.meet())
    assert {target.address for target in bench.machines.dialled[asked:]} == {"10.0.0.1"}


def test_a_machine_that_never_answers_costs_its_gang(bench: Bench):
    bench.machines.silent = {"10.0.0.1"}
    bench.meet()
    bench.now = PATIENCE_S
    with pytest.raises(Lost, match=r"node 1 \(i-1 at 10\.0\.0\.1\).*Connection refused; is port 22 open.*300 s"):
        bench.meet()


def test_a_gang_that_comes_later_has_patience_of_its_own(bench: Bench):
    bench.machines.silent = {"10.0.0.1"}
    bench.meet()
    bench.now = PATIENCE_S
    later = bench.machines.handle.model_copy(update={"token": "t2"})
    assert bench.contact.meet(later, bench.machines.state()).nodes[1].one_use_key


def test_a_key_that_is_neither_is_not_believed_while_a_machine_boots(bench: Bench):
    own = bench.machines.shown["10.0.0.0"]
    bench.machines.shown["10.0.0.0"] = public()  # its image's first boot made one
    assert bench.meet()[0].one_use_key
    bench.machines.shown["10.0.0.0"] = own
    assert not bench.meet()[0].one_use_key


def test_another_machine_in_its_place_is_never_taken_and_ends_the_search_loudly(bench: Bench):
    bench.machines.shown["10.0.0.0"] = impostor = public()
    bench.machines.silent = {"10.0.0.1"}
    bench.meet()
    bench.now = PATIENCE_S
    with pytest.raises(HostKeyMismatch, match="node 0"):
        bench.meet()
    assert bench.machines.shown["10.0.0.0"] == impostor
    assert bench.machines.noted == {}


def test_a_machine_that_cannot_make_a_key_costs_its_gang_and_says_why(bench: Bench):
    bench.machines.silent = {"10.0.0.1"}
    bench.machines.broken = True
    assert "port 22" not in bench.meet()[0].reason
    bench.now = PATIENCE_S
    with pytest.raises(Lost, match=r"a password is required.*and 1 more"):
        bench.meet()


def test_machines_without_a_one_use_key_are_left_alone(bench: Bench):
    nodes = tuple(node.model_copy(update={"one_use_key": ""}) for node in bench.machines.state().nodes)
    assert bench.contact.meet(bench.machines.handle, FleetState(nodes=nodes)).nodes == nodes
    assert bench.machines.dialled == []


def test_a_cancel_dials_nobody(bench: Bench):
    bench.cancelled.set()
    assert all(node.one_use_key for node in bench.meet())
    assert bench.machines.dialled == []


def test_a_private_key_that_is_not_there_is_found_out_before_anything_is_rented(tmp_path):
    with pytest.raises(InputError, match="no private key"):
        Contact(None, tmp_path / "absent", TIMEOUTS)  # type: ignore[arg-type]
