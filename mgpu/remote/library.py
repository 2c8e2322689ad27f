"""paramiko, imported without invoke: a task runner that it uses for one keyword of ssh_config files, which are not read
here. That is nearly half of paramiko's import, which every command that connects waits for.
"""

from __future__ import annotations

import sys
from typing import Any

_modules: dict[str, Any] = sys.modules
_barred = "invoke" not in _modules
if _barred:
    _modules["invoke"] = None  # its import fails, for which paramiko is prepared
try:
    import paramiko as paramiko
    from paramiko import pkey, sftp, ssh_exception
finally:
    if _barred:
        del _modules["invoke"]

CMD_DATA, CMD_READ, CMD_WRITE, int64 = sftp.CMD_DATA, sftp.CMD_READ, sftp.CMD_WRITE, sftp.int64
IncompatiblePeer, UnknownKeyType = ssh_exception.IncompatiblePeer, pkey.UnknownKeyType
