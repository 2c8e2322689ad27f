"""SFTP of a node: paths as OpenSSH has them (relative to HOME, absolute ones real), confined to HOME."""

from __future__ import annotations

import os
import posixpath
from pathlib import Path

import asyncssh


class HomeSFTP(asyncssh.SFTPServer):
    """Files of one node's HOME; a path that leads out of it is refused."""

    def __init__(self, channel: asyncssh.SSHServerChannel[bytes], home: Path) -> None:
        super().__init__(channel)
        self._home = os.fsencode(home.resolve())

    def map_path(self, path: bytes) -> bytes:
        """The real path of what a client named.

        Raises:
            asyncssh.SFTPPermissionDenied: it lies outside HOME.
        """
        real = posixpath.normpath(posixpath.join(self._home, path))
        # the name itself may be a link to anywhere (it can be listed and removed); the folder it is in may not
        folder = self._home if real == self._home else posixpath.realpath(posixpath.dirname(real))
        if folder != self._home and not folder.startswith(self._home + b"/"):
            raise asyncssh.SFTPPermissionDenied("outside of this node's home")
        return real

    def lstat(self, path: bytes) -> os.stat_result:
        """Of one file; `..` of HOME too, which every listing of HOME names."""
        above = posixpath.normpath(posixpath.join(self._home, path)) == posixpath.dirname(self._home)
        return os.lstat(posixpath.dirname(self._home) if above else self.map_path(path))

    def symlink(self, oldpath: bytes, newpath: bytes) -> None:
        """Makes a link exactly as it was asked for; where it points to is the node's own affair."""
        Path(os.fsdecode(self.map_path(newpath))).symlink_to(os.fsdecode(oldpath))
