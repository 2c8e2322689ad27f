"""`python -m mgpu.providers.local.node_process <root> <instance>`: keeps one node alive.

When it ends, all of the node ends with it.

The node process leaves whoever started it (own session, own parent), claims the instance, opens the bill, and then
holds two children: the SSH server and the script that enforces the lease; both are started again when they die. As a
subreaper it inherits whatever on the node outlives its parent. On SIGTERM it ends all of it, removes the folder and
closes the bill. It carries out what the control file orders (mgpu.providers.local.control): a notice, or an end without
a warning.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from mgpu.providers.local import bill, containers, control, nodes, procs
from mgpu.providers.local.nodes import Instance, NodeSpec

_HERE = Path(__file__).parent
_BEAT_S = 1.0
_LEASE_POLL_S = 2
_TERM_S = 1.0  # between SIGTERM and SIGKILL for what runs on the node
_KILL_S = 5.0
_POWER_OFF_GRACE_S = 15


def main(argv: list[str]) -> int:
    """Starts the node process and returns once the instance is claimed: 0, or 1 when it could not be."""
    instance = Instance(Path(argv[1]), argv[2])
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # an order: the file is read when the node process listens
    answer, announce = os.pipe()
    if os.fork():
        os.close(announce)
        return 0 if os.read(answer, 1) else 1
    os.close(answer)
    os.setsid()
    _keep(instance, announce)
    return 0


def _keep(instance: Instance, announce: int) -> None:
    process = procs.of(os.getpid())
    if process is not None and instance.claim(process):
        procs.become_subreaper()
        spec = instance.spec()
        bill.write_start(instance.root, _start_line(instance, spec, process))
        os.write(announce, b"1")
        os.close(announce)
        _NodeProcess(instance, spec, process).run()
    else:  # another node process was first, or the instance was ended before it began
        os.write(announce, b"1")


def _start_line(instance: Instance, spec: NodeSpec, process: procs.Process) -> bill.Start:
    return bill.Start(
        at=round(time.time(), 3),
        instance=instance.id,
        fleet=spec.fleet,
        generation=spec.generation,
        owner=spec.owner,
        pid=process.pid,
        start_ticks=process.start_ticks,
        boot_id=process.boot_id,
        price_usd_per_hour=spec.price_usd_per_hour,
        market=spec.market,
    )


class _NodeProcess:
    def __init__(self, instance: Instance, spec: NodeSpec, process: procs.Process) -> None:
        self.instance = instance
        self.spec = spec
        self.process = process
        late_s = max(0.0, time.time() - spec.asked_at) if spec.asked_at else 0.0  # one that was started after its gang
        self.hard_cap = int(procs.uptime_s() + max(0.0, spec.hard_cap_s - late_s))
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        self.started_at: dict[str, float] = {}
        self.orders = control.Orders(instance)
        self.ending = ""
        self.outright = False  # the provider takes the machine: nothing on it is warned

    def run(self) -> None:
        wakeup = self._listen()
        reason = "the node process failed"
        try:
            nodes.furnish(self.instance, self.spec)
            while not self.ending:
                self._beat()
                self._revive()
                left_s = self.orders.left_s()
                if left_s <= 0:
                    self.ending, self.outright = control.INTERRUPTED, True
                    break
                select.select([wakeup], [], [], min(_BEAT_S, left_s))
                _drain(wakeup)
            reason = self.instance.end_reason() or self.ending
        finally:
            self._end(reason)

    def _listen(self) -> int:
        wakeup, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        signal.signal(signal.SIGTERM, self._on_term)
        for signum in (signal.SIGCHLD, signal.SIGUSR1):
            signal.signal(signum, lambda *_: None)  # a handler, so that the wake-up is written
        for signum in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
            signal.signal(signum, signal.SIG_DFL)  # what the starter ignored, the node's programs would ignore too
        return wakeup

    def _on_term(self, *_: object) -> None:
        self.ending = "the node process was told to end"

    def _beat(self) -> None:
        try:
            bill.heartbeat(self.instance.root, self.instance.id).touch()
        except OSError:
            self.ending = "the provider's records are gone"  # nobody could ever find this node again
        if not self.instance.folder.is_dir():
            self.ending = "its folder is gone"

    def _revive(self) -> None:
        ended = procs.reap_children()
        for name, command in (("sshd", self._sshd), ("lease", self._lease)):
            child = self.children.get(name)
            if child is not None and child.pid in ended:
                child.returncode = os.waitstatus_to_exitcode(ended[child.pid])
                sys.stderr.write(f"{name} ended with {child.returncode}; starting it again\n")
            gone = child is None or child.returncode is not None
            if gone and time.monotonic() - self.started_at.get(name, -_BEAT_S) >= _BEAT_S:
                self.started_at[name] = time.monotonic()
                self.children[name] = command()

    def _sshd(self) -> subprocess.Popen[bytes]:
        command = (sys.executable, "-P", "-s", "-m", "mgpu.providers.local.sshd")
        return subprocess.Popen([*command, str(self.instance.root), self.instance.id])

    def _lease(self) -> subprocess.Popen[bytes]:
        power_off = (_HERE.parent / "poweroff.sh").read_text(encoding="utf-8")
        grace = str(_POWER_OFF_GRACE_S)
        node_process = (str(self.process.pid), str(self.process.start_ticks), self.instance.id, grace)
        lease = (str(self.instance.home / nodes.LEASE), str(self.hard_cap), str(_LEASE_POLL_S))
        # outlives a node process that is killed, and then ends what remains of the node: no parent-death signal
        command = ("/bin/sh", "-c", power_off, "poweroff", *node_process)
        return subprocess.Popen(["/bin/sh", _HERE.parent / "lease.sh", *lease, *command])

    def _end(self, reason: str) -> None:
        if not self.outright and not self.instance.end_reason() and procs.uptime_s() >= self._lease_end():
            reason = "its lease or its hard cap has ended"
        with suppress(OSError):  # a full disk, or no record any more: what runs is ended all the same
            self.instance.ask_to_end(reason)
        term_s = 0 if self.outright else _TERM_S
        ended = procs.end(self._below, term_s=term_s, kill_s=_KILL_S, reap=procs.reap_children)
        containers.remove(self.instance.home)
        if not ended:
            raise OSError("a process of the node cannot be killed")  # the next describe tries again
        self.instance.finish(reason)

    def _below(self) -> list[procs.Process]:
        # those that cleared their environment are found below this process, those that got away by their mark
        others = (process for process in self.instance.remains() if process != self.process)
        return list({*procs.descendants(self.process.pid), *others})

    def _lease_end(self) -> float:
        lease = self.instance.home / nodes.LEASE
        try:
            # anything but a file (a pipe) might never answer
            return min(self.hard_cap, int(lease.read_text(encoding="utf-8"))) if lease.is_file() else self.hard_cap
        except (OSError, ValueError):
            return self.hard_cap


def _drain(fd: int) -> None:
    try:
        os.read(fd, 4096)
    except BlockingIOError:
        return


if __name__ == "__main__":
    raise SystemExit(main(sys.argv))
