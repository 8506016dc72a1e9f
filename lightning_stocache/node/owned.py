"""Opening files in a folder that everybody may write to: only this user's own.

Any user may put anything into /dev/shm under a name that a cache is about to use: a link that leads elsewhere, a pipe
that blocks, a file whose locks he holds for ever. So whatever has a name is opened here, its lock file like its data:
without following a link, without waiting, and only if it is a regular file of this user, that nobody else may open, and
that has no second name. What lies in such a file is trusted.
"""

from __future__ import annotations

import errno
import os
import stat

from lightning_stocache.node.manifest import printable

__all__ = ["open_own", "owner_name"]

_REFUSED = {errno.EACCES, errno.EEXIST, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.EPERM}


def open_own(path: str, *, create: bool = False, exclusive: bool = False) -> int:
    """Open a file of this user alone, for reading and writing; its descriptor.

    Args:
        path: the file.
        create: whether to make it, empty and for this user only, where there is none.
        exclusive: whether to refuse one that is there already; with `create` only.

    Raises:
        FileNotFoundError: there is none.
        PermissionError: it is not trusted; the message says what to do.
        OSError: the system has no room for it, or no descriptor left.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    flags |= (os.O_CREAT if create else 0) | (os.O_EXCL if exclusive else 0)
    refusal = PermissionError(
        f"{printable(path)} is not trusted, because it is no file that this user alone may open: give another name, or "
        "remove it"
    )
    try:
        descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        if error.errno in _REFUSED:
            raise refusal from error
        raise
    facts = os.fstat(descriptor)
    private = facts.st_uid == os.getuid() and not facts.st_mode & 0o077
    if private and stat.S_ISREG(facts.st_mode) and facts.st_nlink <= 1:
        return descriptor
    os.close(descriptor)
    raise refusal


def owner_name(uid: int) -> str:
    """A user for people: the name if there is one, and the number."""
    import pwd

    try:
        return f"{printable(pwd.getpwuid(uid).pw_name)} (uid {uid})"
    except KeyError:
        return f"uid {uid}"
