"""The stand-in for AWS's session-manager-plugin, with its arguments, its words and its ways: see sessions.py.

    session-manager-plugin RESPONSE REGION StartSession PROFILE REQUEST ENDPOINT

RESPONSE is what StartSession has answered, as JSON, or the variable that holds it. The end of standard input ends it at
once, and tells nobody. Nothing but Python's own library is known here.
"""

from __future__ import annotations

import configparser
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from urllib.parse import urlsplit

VERSION = "1.2.896.0"
VARIABLE = "AWS_SSM_START_SESSION_RESPONSE"


def say(text: str) -> None:
    """On standard output, as the real one does, errors too."""
    os.write(1, f"{text}\n".encode())


def main() -> None:
    """As the real one's."""
    given = sys.argv[1:]
    if given == ["--version"]:
        say(os.environ.get("FAKE_PLUGIN_VERSION", VERSION))
        return
    if len(given) != 6 or given[1:3] != [given[1], "StartSession"]:
        say(f"Unknown operation {given}.")
        return
    response, region, _, profile, request, endpoint = given
    told = json.loads(os.environ.pop(response) if response.startswith(VARIABLE) else response)
    say(f"\nStarting session with SessionId: {told['SessionId']}")
    where = urlsplit(told["StreamUrl"])
    facts = {"region": region, "profile": profile, "endpoint": endpoint, "target": json.loads(request)["Target"]}
    joining = {"id": told["SessionId"], "token": told["TokenValue"], "key": _key(profile), **facts}
    service = socket.create_connection((where.hostname, where.port), 10)
    service.settimeout(None)
    service.sendall(json.dumps(joining).encode() + b"\n")
    if (first := service.recv(1)) != b"\n":
        refusal = first + service.recv(4096)
        say(f"Cannot perform start session: {refusal.decode()}")
        return
    threading.Thread(target=_pump, args=(service.recv, lambda data: os.write(1, data)), daemon=True).start()
    _pump(lambda most: os.read(0, most), service.sendall)


def _key(profile: str) -> str:
    """The access key that it signs with."""
    if not profile:
        return os.environ.get("AWS_ACCESS_KEY_ID", "")
    file = configparser.ConfigParser()
    file.read(os.environ.get("AWS_SHARED_CREDENTIALS_FILE", ""))
    return file.get(profile, "aws_access_key_id", fallback="")


def _pump(read: Callable[[int], bytes], write: Callable[[bytes], object]) -> None:
    try:
        while data := read(1024):
            write(data)
            time.sleep(0)
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
