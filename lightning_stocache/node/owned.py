"""Opening files in a folder that everybody may write to: only what is certainly this user's own.

Any user may put anything into /dev/shm under a name that a cache is about to use: a link that leads elsewhere, a pipe
that blocks who opens it, a file whose locks he holds for ever. So whatever has a name is opened here, its lock file
like its data: without following a link, without waiting, and only if it is a regular file that belongs to this user,
that nobody else may open, and that has no second name. What is refused is told in one sentence with the way out.
"""

from __future__ import annotations

import os
import stat

from lightning_stocache.node.manifest import printable

__all__ = ["open_own", "owner_name"]

_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFREG: "a file",
}


def open_own(path: str, *, create: bool = False, exclusive: bool = False) -> int:
    """Open a file of this user alone, for reading and writing; its descriptor.

    Args:
        path: the file.
        create: whether to make it, empty and for this user only, where there is none.
        exclusive: whether to refuse one that is there already; with `create` only.

    Raises:
        FileNotFoundError: there is none.
        PermissionError: it is not trusted; the message says why and what to do.
        OSError: the system has no room for it, or no descriptor left.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    flags |= (os.O_CREAT if create else 0) | (os.O_EXCL if exclusive else 0)
    try:
        descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        if (reason := _distrust(path, taken=exclusive)) is None:
            raise
        raise PermissionError(reason) from error
    facts = os.fstat(descriptor)
    if _is_own(facts):
        return descriptor
    os.close(descriptor)
    raise PermissionError(_distrust(path) or f"{printable(path)} was exchanged while it was opened: try again")


def owner_name(uid: int) -> str:
    """A user for people: the name if there is one, and the number."""
    import pwd

    try:
        return f"{printable(pwd.getpwuid(uid).pw_name)} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


def _is_own(facts: os.stat_result) -> bool:
    private = facts.st_uid == os.getuid() and not facts.st_mode & 0o077
    return private and stat.S_ISREG(facts.st_mode) and facts.st_nlink <= 1


def _distrust(path: str, *, taken: bool = False) -> str | None:
    """Why what lies there is not trusted, in one sentence with the way out; None if it may be."""
    try:
        facts = os.lstat(path)
    except OSError:
        return None
    what, mode = _KINDS.get(stat.S_IFMT(facts.st_mode), "a device"), stat.S_IMODE(facts.st_mode)
    if facts.st_uid != os.getuid():
        owner = owner_name(facts.st_uid)
        return f"{printable(path)} is {what} of {owner} and not trusted: give another name, or have its owner remove it"
    if not stat.S_ISREG(facts.st_mode):
        why = f"is {what}"
    elif mode & 0o077:
        why = f"may be opened by others (mode {mode:04o})"
    elif facts.st_nlink > 1:
        why = "has a second name (a hard link)"
    elif mode & 0o600 != 0o600:
        why = f"may not be opened (mode {mode:04o})"
    elif taken:
        why = "is there already"
    else:
        return None
    remove = "rmdir" if stat.S_ISDIR(facts.st_mode) else "rm"
    return f"{printable(path)} {why} and is not trusted: give another name, or remove it ({remove} {printable(path)})"
