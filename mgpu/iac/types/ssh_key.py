"""`mgpu:index:SshKey`: an ed25519 pair. The private half is a Pulumi secret, and a 0600 file on this machine."""

from __future__ import annotations

import os
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from mgpu.errors import InputError
from mgpu.iac import environment
from mgpu.iac.naming import file_name, fleet_name
from mgpu.iac.protocol.handler import Call, Checked, Difference, Properties, ReadResult, changed
from mgpu.iac.protocol.wire import UNKNOWN


class SshKeyHandler:
    """Handles SshKey. The id is the path of the private key's file, the default one relative to the state folder, which
    another machine has elsewhere; beside it lies `<path>.pub`.

    The `.pub` file is written first and names the stack in its comment: a create that was cut off finds its own half
    of a pair by it, and a file of the user's is never taken, overwritten or deleted.
    """

    secret = frozenset({"privateKey"})
    refresh_before_update = True

    def check(self, call: Call, old: Properties, new: Properties) -> Checked:
        """Fills in the path: where it was, or the state folder's `keys/<fleet>@<owner's mark>/id_ed25519`."""
        fleet = file_name(call.settings.owner, fleet_name(call.project, call.stack))
        default = old.get("path") or f"keys/{fleet}/id_ed25519"
        path = new.get("path") or default
        return Checked({"path": path}, _problems(path, default))

    def diff(self, old_inputs: Properties, old: Properties, new: Properties) -> Difference:
        """Another path is another key; a file that is missing is written again from the key in state."""
        replaces = changed(("path",), old_inputs, new)
        missing = old.get("privateKeyFile") == "" and not replaces
        # the new file never overwrites the old one: the old pair may go last
        return Difference(updates=("privateKeyFile",) if missing else (), replaces=replaces, delete_first=False)

    def create(self, call: Call, inputs: Properties) -> tuple[str, Properties]:
        """Makes the pair, or takes over the one that an interrupted create of this stack left."""
        path = inputs["path"]
        if call.preview:
            return path, {**inputs, "publicKey": UNKNOWN, "privateKey": UNKNOWN, "privateKeyFile": UNKNOWN}
        file = _file(call, path)
        comment = f"mgpu:{call.project}/{call.stack}"
        text = _left_behind(file, comment) or _generate()
        _write(file, text, comment)
        return path, _outputs(inputs, file, text, comment)

    def read(self, call: Call, resource_id: str, old: Properties, inputs: Properties) -> ReadResult | None:
        """An existing pair; a missing file shows as an empty `privateKeyFile` as long as state knows the key."""
        file = _file(call, resource_id)
        if not old.get("privateKey"):  # an import
            text = _read(file)
            outputs = _outputs({"path": resource_id}, file, text, "imported") if text else None
            return ReadResult(resource_id, {"path": resource_id}, outputs) if outputs else None
        present = _read(file) == old["privateKey"]
        outputs = {**old, "privateKeyFile": str(file) if present else ""}
        return ReadResult(resource_id, inputs or {"path": resource_id}, outputs)

    def update(self, call: Call, resource_id: str, old: Properties, new: Properties) -> Properties:
        """Writes the file again, from the key in state."""
        file = _file(call, new["path"])
        comment = old["publicKey"].split(maxsplit=2)[2]
        if not call.preview and _read(file) != old["privateKey"]:
            if _read(file) and not _is_ours(file, comment):
                raise _foreign(file)
            _write(file, old["privateKey"], comment)
        return {**old, **new, "privateKeyFile": str(file)}

    def delete(self, call: Call, resource_id: str, old: Properties) -> None:
        """Removes both files if they still hold this pair; absent is success."""
        file = _file(call, resource_id)
        if _read(file) == old.get("privateKey"):
            file.unlink()
        if (_read(_pub(file)) or "").strip() == old.get("publicKey"):
            _pub(file).unlink()
        _remove_empty(file.parent)


def _file(call: Call, path: str) -> Path:
    return call.settings.state_dir / Path(path).expanduser()


def _problems(path: str, default: str) -> dict[str, str]:
    if path not in (UNKNOWN, default) and not Path(path).expanduser().is_absolute():
        return {"path": f"{path} is not an absolute path"}
    if os.environ.get(environment.AMBIENT_PASSPHRASE) == "":
        how = f"unset {environment.AMBIENT_PASSPHRASE}, or read `. .mgpu/env`"
        return {"path": f"the passphrase is empty: the private key would lie open in the stack's state; {how}"}
    return {}


def _pub(file: Path) -> Path:
    return file.with_name(f"{file.name}.pub")


def _generate() -> str:
    key = Ed25519PrivateKey.generate()
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH
    return key.private_bytes(encoding, form, serialization.NoEncryption()).decode()


def _public_line(text: str, comment: str, file: Path) -> str:
    """The OpenSSH line of the public half; InputError when `text` is not an unencrypted ed25519 key."""
    try:
        key = serialization.load_ssh_private_key(text.encode(), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise InputError(
            f"{file} is not a private key in OpenSSH format", str(error), "Name another path in SshKey(path=...)."
        ) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise InputError(f"{file} is not an ed25519 key", "", "Name another path in SshKey(path=...).")
    form = serialization.PublicFormat.OpenSSH
    return f"{key.public_key().public_bytes(serialization.Encoding.OpenSSH, form).decode()} {comment}"


def _outputs(inputs: Properties, file: Path, text: str, comment: str) -> Properties:
    public = _public_line(text, comment, file)
    return {**inputs, "publicKey": public, "privateKey": text, "privateKeyFile": str(file)}


def _left_behind(file: Path, comment: str) -> str | None:
    """The private key that an interrupted create of the same stack wrote; InputError when the file is not ours."""
    text = _read(file)
    if text is not None and not _is_ours(file, comment):
        raise _foreign(file)
    return text


def _is_ours(file: Path, comment: str) -> bool:
    line = _read(_pub(file))
    return line is not None and line.rstrip().endswith(f" {comment}")


def _foreign(file: Path) -> InputError:
    return InputError(
        f"{file} exists already, and this stack did not make it",
        "A key of yours is never overwritten.",
        "Move the file away, or name another path in SshKey(path=...).",
    )


def _read(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8", errors="replace")  # it may be a user's own, with a name in any encoding
    except (FileNotFoundError, NotADirectoryError):
        return None


def _write(file: Path, text: str, comment: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    _replace(_pub(file), _public_line(text, comment, file) + "\n", 0o644)
    _replace(file, text, 0o600)


def _replace(file: Path, text: str, mode: int) -> None:
    aside = file.with_name(f".{file.name}.{os.getpid()}")
    aside.unlink(missing_ok=True)
    handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(handle, "w", encoding="utf-8") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    aside.rename(file)


def _remove_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:
        pass  # it holds something else, or is gone
