"""The Linux machines behind a fake AWS's instances: one set of namespaces each, real sshd, user data that runs.

Made and used in the world's network (world.py, entered first). Starting returns once the machine's network stands; its
boot goes on by itself. Its end is the kernel's: whatever ran in it is gone when process 1 is. A machine that is taken
away vanishes silently: its wire goes first, so that no peer hears a socket close.

    machines = Machines(folder, on_poweroff=lambda instance: ...)
    machines.start(Machine(id="i-1", ...))     # its console: folder/machines/i-1/console.log
    machines.end("i-1")

Machines see the host's programs, but nothing under /root, /home, /tmp, /run, the fake's folder or the checkout.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from fakes.aws import metadata, world
from fakes.aws.blueprint import INSIDE, Machine, blueprint, cgroup

START_S = 20.0
END_S = 20.0

_CRASHED, _HANG = 70, signal.SIGUSR2  # as inside/init.py has them


@dataclass
class _Running:
    machine: Machine
    process: subprocess.Popen[bytes]  # unshare; it ends when all of the machine has
    pid: int  # of the machine's process 1
    link: str
    entry: metadata.Entry
    ended: bool = False  # by `end`: nobody is told

    @property
    def addresses(self) -> list[str]:
        return [each for each in (self.machine.private_address, self.entry.public_address) if each]


class Machines:
    """All machines of one fake.

    `environment` is laid over that of every process in them; `credentials` are a role's, as the metadata service gives
    them. `engine`: each has Docker, with these lines in /etc/hosts and this certificate. `on_poweroff` is called, in a
    thread of its own, with the id of a machine that switched itself off.
    """

    def __init__(
        self,
        folder: Path,
        on_poweroff: Callable[[str], None],
        *,
        environment: Mapping[str, str] | None = None,
        credentials: metadata.Credentials = metadata.made_up,
        engine: Mapping[str, str] | None = None,
    ) -> None:
        self._folder = folder / "machines"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._on_poweroff = on_poweroff
        self._environment, self._engine = dict(environment or {}), engine
        self._lock = threading.Condition()
        self._running: dict[str, _Running] = {}
        self._starting: set[str] = set()
        self._made = 0
        self._metadata = metadata.Metadata(world.METADATA, credentials=credentials)

    def start(self, machine: Machine) -> None:
        """Starts a machine. RuntimeError: it could not be; nothing of it is left."""
        with self._lock:
            if machine.id in self._running or machine.id in self._starting:
                raise RuntimeError(f"{machine.id} runs already")
            self._starting.add(machine.id)
            self._made += 1
            link = f"m{self._made}"
        try:
            running = self._start(machine, link)
            with self._lock:
                self._running[machine.id] = running
        finally:
            with self._lock:
                self._starting.discard(machine.id)
                self._lock.notify_all()
        threading.Thread(target=self._watch, args=(running,), name=machine.id, daemon=True).start()

    def end(self, instance_id: str) -> None:
        """Takes a machine away, silently; returns when nothing of it is left. An unknown one is gone already."""
        with self._lock:
            self._lock.wait_for(lambda: instance_id not in self._starting, START_S)
            running = self._running.pop(instance_id, None)
            if running is None:
                return
            running.ended = True
        self._cut(running)
        _kill(running.pid)
        running.process.wait(timeout=END_S)
        self._forget(running)

    def notice(self, instance_id: str, kind: str, body: str | None) -> None:
        """Gives or takes back (None) a notice of the metadata service. KeyError: no such machine."""
        if kind not in metadata.NOTICES:
            raise ValueError(f"{kind}: not one of {', '.join(metadata.NOTICES)}")
        notices = self._running[instance_id].entry.notices
        if body is None:
            notices.pop(kind, None)
        else:
            notices[kind] = body

    def trouble(self, instance_id: str, fault: str | None) -> None:
        """The metadata service fails for this machine, in one of metadata.FAULTS' ways, or works again (None)."""
        if fault not in (None, *metadata.FAULTS):
            raise ValueError(f"{fault}: not one of {', '.join(metadata.FAULTS)}")
        self._running[instance_id].entry.fault = fault

    def address(self, instance_id: str, public_address: str | None) -> None:
        """Gives a machine a public address, another one, or none."""
        running = self._running[instance_id]
        old, running.entry.public_address = running.entry.public_address, public_address
        if old == public_address:
            return
        if old:
            world.lose(old)
            world.ip(f"addr del {old}/32 dev eth0", inside=running.pid)
        if public_address:
            world.ip(f"addr add {public_address}/32 dev eth0", inside=running.pid)
            world.lead(public_address, running.link)

    def connect(self, instance_id: str, connected: bool) -> None:
        """Cuts a machine off, in both directions and silently, or connects it again; it runs on."""
        running = self._running[instance_id]
        if connected:
            world.ip(f"link set {running.link} up")
            for address in running.addresses:
                world.lead(address, running.link)
        else:
            self._cut(running, keep=True)

    def hang(self, instance_id: str) -> None:
        """Stops every process of a machine but the first, as a kernel that hangs would: it stays, and does nothing."""
        os.kill(self._running[instance_id].pid, _HANG)

    def running(self) -> list[str]:
        """The ids of the machines that are on."""
        with self._lock:
            return list(self._running)

    def pid(self, instance_id: str) -> int:
        """The host's number of a machine's process 1. KeyError: no such machine."""
        return self._running[instance_id].pid

    def clear(self) -> None:
        """Ends all machines."""
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(self.end, self.running()))

    def close(self) -> None:
        """Ends all machines and the metadata service."""
        self.clear()
        self._metadata.close()

    def _start(self, machine: Machine, link: str) -> _Running:
        entry = self._metadata.add(machine)
        try:
            process = self._spawn(machine)
            try:
                return self._connect(machine, process, link, entry)
            except BaseException:
                process.kill()  # and process 1 with it
                process.wait(timeout=END_S)
                raise
        except BaseException:
            self._metadata.remove(machine)
            raise

    def _spawn(self, machine: Machine) -> subprocess.Popen[bytes]:
        folder = self._folder / machine.id
        (folder / "disk").mkdir(parents=True, exist_ok=True)
        with (folder / "console.log").open("ab") as console:
            return subprocess.Popen(
                [*world.NAMESPACES, sys.executable, "-E", "-s", "-S", "-B", str(INSIDE / "init.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=console,
                cwd="/",
                env={"PATH": os.environ.get("PATH", os.defpath)},
                start_new_session=True,
            )

    def _connect(
        self, machine: Machine, process: subprocess.Popen[bytes], link: str, entry: metadata.Entry
    ) -> _Running:
        """Waits for process 1, lays its wire, and tells it what it is: that lets it boot."""
        assert process.stdin
        assert process.stdout
        with process.stdout:
            ready = select.select([process.stdout], [], [], START_S)[0]
            number = process.stdout.readline() if ready else b""
        if not number:
            raise RuntimeError(f"{machine.id} did not start: {self._console(machine)}")
        running = _Running(machine, process, int(number), link, entry)
        world.attach(link, running.pid, machine.private_address)
        if machine.public_address:
            world.lead(machine.public_address, link)
        process.stdin.write(blueprint(machine, self._folder, self._environment, self._engine).encode())
        process.stdin.flush()
        return running

    def _console(self, machine: Machine) -> str:
        return (self._folder / machine.id / "console.log").read_text(errors="replace")[-2000:]

    def _watch(self, running: _Running) -> None:
        """Waits for a machine's end; one that nobody asked for is told, unless the fake itself is at fault."""
        status = running.process.wait()
        with self._lock:
            if running.ended:
                return
            self._running.pop(running.machine.id, None)
        self._cut(running)
        self._forget(running)
        if status == _CRASHED:
            print(f"{running.machine.id}: {self._console(running.machine)}", file=sys.stderr, flush=True)  # noqa: T201
        else:
            self._on_poweroff(running.machine.id)

    def _cut(self, running: _Running, keep: bool = False) -> None:
        world.lose(*running.addresses)
        try:
            world.ip(f"link set {running.link} down" if keep else f"link del {running.link}")
        except RuntimeError as error:
            if "Cannot find device" not in str(error):  # it went with the machine's own network
                raise

    def _forget(self, running: _Running) -> None:
        assert running.process.stdin
        running.process.stdin.close()
        self._metadata.remove(running.machine)
        shutil.rmtree(self._folder / running.machine.id / "disk", ignore_errors=True)
        if self._engine is not None:
            _drop_groups(cgroup(running.machine.id))


def _drop_groups(name: str) -> None:
    """Removes the control groups of a machine that is gone: they are empty."""
    command = ["find", "/sys/fs/cgroup", "-depth", "-type", "d", "-path", f"*/{name}*", "-exec", "rmdir", "{}", "+"]
    subprocess.run(command, stderr=subprocess.DEVNULL, timeout=END_S)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it was quicker
