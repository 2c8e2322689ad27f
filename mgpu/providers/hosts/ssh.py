"""A host, asked over the user's own `ssh`: its configuration, agent, jump hosts and known_hosts are the user's."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mgpu.errors import AuthError, InvalidRequest, MgpuError, Transient
from mgpu.providers.hosts.options import Host

_OPTIONS = {  # no question is asked, and no unknown host is trusted, whatever the user's configuration says
    "BatchMode": "yes",
    "StrictHostKeyChecking": "yes",
    "ConnectTimeout": "10",
    "ServerAliveInterval": "5",
    "ServerAliveCountMax": "3",
    "ForwardAgent": "no",
    "ClearAllForwardings": "yes",
    "RemoteCommand": "none",
    "RequestTTY": "no",
    "PermitLocalCommand": "no",
    "ControlMaster": "no",  # one that stays in the background keeps what this reads open
}
_SHOWN = re.compile(r"Server host (?:key|certificate): \S+ (SHA256:[A-Za-z0-9+/]+)")
_DEBUG = re.compile(r"^debug\d: .*\n?", re.MULTILINE)
_UNKNOWN, _CHANGED = "Host key verification failed", "REMOTE HOST IDENTIFICATION HAS CHANGED"
_BEGUN = "mgpu-hosts begins"  # what the host's program says first
_ASK_S, _LOCAL_S = 90.0, 10.0
_NO_SSH = ("there is no program ssh", "provider hosts reaches its hosts with it", "Install OpenSSH's client.")


class Mute(InvalidRequest):
    """A host that can be logged in to and runs nothing of mgpu's: it has no such Python, or its user no shell."""


@dataclass(frozen=True)
class Client:
    """The user's ssh; `config`: with this configuration in place of the user's own."""

    config: str | None = None

    def ask(self, host: Host, asked: Mapping[str, Any], *, meet: bool = False) -> dict[str, Any]:
        """The host's answer to a request of `on_host.main`. `meet`: with `node`, how the operator reaches it, and its
        host key as this connection has proved it.

        Raises:
            Transient: no answer.
            AuthError: the user cannot log in, or the host's key is not the known one.
            Mute: it runs nothing of mgpu's.
            InvalidRequest: what it is asked for cannot be done there.
        """
        answer = f"print(json.dumps(main(json.loads({json.dumps(dict(asked))!r}))))"
        program = script() + f"\nprint('\\n{_BEGUN}', flush=True)\n{answer}\n"
        options = {**_OPTIONS, **({"ControlPath": "none"} if meet else {"LogLevel": "ERROR"})}
        words = [word for key, value in options.items() for word in ("-o", f"{key}={value}")]
        command = ["ssh", *(["-v"] if meet else []), *words, *self._to(host), f"'{host.python}' -I -S -"]
        done = self._run(command, program, _ASK_S)
        said, begun = _DEBUG.sub("", done.stderr).strip(), _BEGUN in done.stdout.splitlines()
        if done.returncode:
            raise _trouble(host, done.returncode, said, begun=begun)
        try:
            answer = json.loads(done.stdout.splitlines()[-1])
        except (ValueError, IndexError) as error:
            what = f"host {host.address}: its answer cannot be read"
            kind = InvalidRequest if begun else Mute
            raise kind(what, said or done.stdout[-200:], "Try `ssh` by hand.", scope="offer") from error
        return {**answer, "node": self._node(host, answer, done.stderr)} if meet else answer

    def _node(self, host: Host, answer: Mapping[str, Any], said: str) -> dict[str, Any]:
        settings = self._settings(host)
        name, port = settings["hostname"], int(settings["port"])
        key = self._host_key(settings, answer.get("host_keys", ()), set(_SHOWN.findall(said)))
        if key is None:
            what = f"host {host.address}: the key that it has shown is in no known_hosts file, and it does not tell it"
            cure = f"Add it: `ssh-keyscan -p {port} {name}`, compared with the host's own."
            raise AuthError(what, "", cure, scope="offer")
        private = host.private_address or next(iter(answer.get("address") or ()), name)
        return {
            "address": name,
            "port": port,
            "user": settings["user"],
            "host_key": key,
            "python": host.python,
            "via": self._via(host, settings),
            "private_address": private,
            "price_usd_per_hour": host.price_usd_per_hour,
        }

    def _settings(self, host: Host) -> dict[str, str]:
        """What ssh's configuration says of a host."""
        done = self._run(["ssh", "-G", *self._to(host)], "", _LOCAL_S)
        if done.returncode:
            raise InvalidRequest(f"host {host.address}: ssh cannot be asked for it", done.stderr.strip(), scope="offer")
        return {key: value for key, _, value in (line.partition(" ") for line in done.stdout.splitlines())}

    def _via(self, host: Host, settings: Mapping[str, str]) -> dict[str, Any] | None:
        """What carries SSH to the node, where the user's configuration goes through something else. Raises
        InvalidRequest: what it means is known to ssh alone."""
        name, config = settings["hostname"], ["-F", self.config] if self.config else []
        there = f"[{name}]:{settings['port']}" if ":" in name else f"{name}:{settings['port']}"
        if (jump := settings.get("proxyjump", "none")) != "none":
            *before, last = jump.split(",")
            first = ["-J", ",".join(before)] if before else []
            user, at, place = last.rpartition("@")
            place = f"[{place}]" if place.count(":") > 1 and "[" not in place else place
            to = ["-W", there, "--", f"ssh://{user}{at}{place}"]
            return {"command": ["ssh", *config, "-o", "BatchMode=yes", *first, *to]}
        if (command := settings.get("proxycommand", "none")) != "none":
            words = {"%h": settings["hostname"], "%p": settings["port"], "%r": settings["user"], "%%": "%"}
            words["%n"] = host.parts[1]  # as the list has it
            if unknown := sorted({*re.findall(r"%.?", command)} - {*words}):
                what = f"host {host.address}: its ProxyCommand has {', '.join(unknown)}"
                raise InvalidRequest(
                    what, "", f"Of ssh's tokens it may have {', '.join(sorted(words))}.", scope="offer"
                )
            return {"command": ["sh", "-c", "exec " + re.sub(r"%.", lambda found: words[found[0]], command)]}
        return None

    def _host_key(self, settings: Mapping[str, str], told: Any, shown: set[str]) -> str | None:
        """The public key behind the fingerprint that ssh has accepted: from known_hosts, or as the host tells it."""
        name = settings.get("hostkeyalias") or settings["hostname"]
        name = name if settings["port"] == "22" or settings.get("hostkeyalias") else f"[{name}]:{settings['port']}"
        files = f"{settings.get('userknownhostsfile', '')} {settings.get('globalknownhostsfile', '')}".split()
        lines = [line for file in files for line in self._known(name, file)]
        keys = [" ".join(line.split()[-3:][1:]) for line in lines] + [" ".join(each.split()[:2]) for each in told]
        keys += [" ".join(line.split()[1:3]) for line in lines]  # those with a comment behind them
        return next((key for key in keys if _fingerprint(key) in shown), None)

    def _known(self, name: str, file: str) -> list[str]:
        done = self._run(["ssh-keygen", "-F", name, "-f", file], "", _LOCAL_S)
        return [line for line in done.stdout.splitlines() if line and line[0] not in "#@"]

    def _to(self, host: Host) -> list[str]:
        user, name, port = host.parts
        config = ["-F", self.config] if self.config else []
        return [*config, *(["-l", user] if user else []), *(["-p", port] if port else []), "--", name]

    def _run(self, command: list[str], text: str, seconds: float) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                command,
                input=text,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(command, 255, "", f"no answer within {seconds:.0f} s")
        except FileNotFoundError:
            raise InvalidRequest(*_NO_SSH) from None


def script() -> str:
    """What a host runs, as text."""
    return Path(__file__).with_name("on_host.py").read_text(encoding="utf-8")


def _fingerprint(key: str) -> str:
    try:
        blob = base64.b64decode(key.split(" ")[1])
    except (ValueError, IndexError):
        return ""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def _trouble(host: Host, status: int, said: str, *, begun: bool) -> MgpuError:
    """What ssh has said, as an error; each blocks this host alone."""
    last, by_hand = said.splitlines()[-1:] or ["no word"], f"`ssh {host.address}`"
    what = f"host {host.address}"
    if _CHANGED in said:
        cure = "If it was set up anew, `ssh-keygen -R` its name, and add its new key; else somebody stands in between."
        return AuthError(f"{what} shows another host key than the known one", "", cure, scope="offer")
    if _UNKNOWN in said:
        cure = f"Log in once by hand, {by_hand}, and compare its fingerprint with what its administrator says."
        return AuthError(f"{what}: its host key is not known", last[0], cure, scope="offer")
    if status == 255 and ("Permission denied" in said or "Too many authentication failures" in said):
        cure = f"{by_hand} has to work without a question: add your key there, and to the agent here (`ssh-add`)."
        return AuthError(f"{what}: this user cannot log in", last[0], cure, scope="offer")
    if status == 255:
        return Transient(f"{what} does not answer", last[0], f"Look whether it is up: {by_hand}.", scope="offer")
    if status in (126, 127):
        cure = "Install Python 3, or name another one: `hosts: {python: /path/to/python}`."
        return Mute(f"{what} has no {host.python}", last[0], cure, scope="offer")
    kind = InvalidRequest if begun else Mute
    return kind(f"{what} cannot do what it was asked for", last[0], f"Look there: {by_hand}.", scope="offer")
