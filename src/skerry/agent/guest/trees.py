"""Trees of files: walked, removed, packed into a tar and unpacked from one, whatever hostile hands put in them. The
agent uses this inside the box and the host uses it for its own folders; it trusts no name, depth or link."""

from __future__ import annotations

import os
import stat
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

_DIR_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CHUNK = 1 << 20
_BLOCK = 512
_MAX_HEADER = 1 << 20
_LEAST = 4096
_ROOM = 16 << 20


class UnsafeTar(Exception):
    """Archive that wants something outside its folder, or something that is no file."""


class TooMuch(UnsafeTar):
    """Archive that holds more than there is room for."""


def remove_tree(path: str | bytes) -> Iterator[None]:
    """Remove a folder and all below it, a step at a time; quiet if there is none. A folder inside is moved up beside
    its parent before it is emptied, so neither depth nor path length matters."""
    top = os.fsencode(path)
    try:
        fd = _open_folder(None, top)
    except FileNotFoundError:
        return
    except NotADirectoryError:
        os.unlink(top)
        return
    try:
        yield from _empty(fd)
    finally:
        os.close(fd)
    os.rmdir(top)


def _empty(fd: int) -> Iterator[None]:
    moved = 0
    while names := os.listdir(fd):
        for name in names:
            yield
            if _unlink(fd, name):
                continue
            inner = _open_folder(fd, name)
            try:
                for child in os.listdir(inner):
                    yield
                    if not _unlink(inner, child):
                        moved += 1
                        _move_up(inner, child, fd, f".skerry-removing-{moved}")
            finally:
                os.close(inner)
            os.rmdir(name, dir_fd=fd)


def _unlink(fd: int, name: str) -> bool:
    """Remove an entry; False if it is a folder with something in it."""
    try:
        os.unlink(name, dir_fd=fd)
        return True
    except FileNotFoundError:
        return True
    except OSError:
        pass
    try:
        os.rmdir(name, dir_fd=fd)
        return True
    except OSError:
        if not stat.S_ISDIR(os.lstat(name, dir_fd=fd).st_mode):
            raise
        return False


def _open_folder(fd: int | None, name: str | bytes) -> int:
    try:
        inner = os.open(name, _DIR_FLAGS, dir_fd=fd)
    except PermissionError:
        os.chmod(name, 0o700, dir_fd=fd)
        inner = os.open(name, _DIR_FLAGS, dir_fd=fd)
    if os.fstat(inner).st_mode & 0o700 != 0o700:
        try:
            os.fchmod(inner, 0o700)
        except PermissionError:
            pass  # not ours: removing from it will say so
    return inner


def _move_up(source: int, name: str, target: int, new_name: str) -> None:
    while True:
        try:
            os.lstat(new_name, dir_fd=target)
            new_name += "_"
        except FileNotFoundError:
            break
    try:
        os.rename(name, new_name, src_dir_fd=source, dst_dir_fd=target)
    except PermissionError:  # a folder that its owner may not write to cannot be moved either
        os.chmod(name, 0o700, dir_fd=source)
        os.rename(name, new_name, src_dir_fd=source, dst_dir_fd=target)


def walk(path: bytes, depth: int) -> Iterator[tuple[bytes, os.stat_result]]:
    """Yield every entry below a folder as (path relative to it, lstat), parents first, names in order. Folders are
    opened one from the other, so a path may be longer than the system's limit for one."""
    stack: list[tuple[bytes, int]] = [(b"", 1)]
    top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        while stack:
            folder, level = stack.pop()
            try:
                fd = descend(top, folder)
            except OSError:
                if not folder:
                    raise
                continue  # it went away, or it is not ours to read: it was listed, its inside is not
            try:
                names = sorted(os.fsencode(name) for name in os.listdir(fd))
                below = []
                for name in names:
                    try:
                        info = os.lstat(name, dir_fd=fd)
                    except OSError:
                        continue
                    inner = folder + b"/" + name if folder else name
                    yield inner, info
                    if level < depth and stat.S_ISDIR(info.st_mode):
                        below.append((inner, level + 1))
                stack.extend(reversed(below))
            finally:
                os.close(fd)
    finally:
        os.close(top)


def descend(top: int, path: bytes) -> int:
    """Open a folder below `top` without following links, in pieces that fit a path."""
    fd = os.dup(top) if path else os.open(b".", _DIR_FLAGS, dir_fd=top)
    parts = path.split(b"/") if path else []
    for i in range(0, len(parts), 8):
        try:
            deeper = os.open(b"/".join(parts[i : i + 8]), _DIR_FLAGS, dir_fd=fd)
        finally:
            os.close(fd)
        fd = deeper
    return fd


def pack(path: bytes, write: Callable[[bytes], object]) -> None:
    """Write a file or a folder's content as a tar stream (pax), in bounded memory, without sockets and devices."""
    import tarfile

    def add(name: bytes, full: bytes, dir_fd: int | None, info: os.stat_result) -> None:
        member = tarfile.TarInfo(os.fsdecode(name))
        member.mode = stat.S_IMODE(info.st_mode)
        member.uid, member.gid, member.mtime = info.st_uid, info.st_gid, int(info.st_mtime)
        if stat.S_ISREG(info.st_mode):
            _add_file(member, full, dir_fd, write)
        elif stat.S_ISDIR(info.st_mode):
            member.type = tarfile.DIRTYPE
            write(_header(member))
        elif stat.S_ISLNK(info.st_mode):
            member.type = tarfile.SYMTYPE
            member.linkname = os.fsdecode(os.readlink(full, dir_fd=dir_fd))
            write(_header(member))

    info = os.stat(path)
    if not stat.S_ISDIR(info.st_mode):
        add(os.path.basename(path), path, None, info)
    else:
        top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for inner, info in walk(path, sys.maxsize):
                folder, _, name = inner.rpartition(b"/")
                fd = descend(top, folder)
                try:
                    add(inner, name, fd, info)
                except FileNotFoundError:
                    pass  # it went away meanwhile
                finally:
                    os.close(fd)
        finally:
            os.close(top)
    write(b"\0" * (2 * _BLOCK))


def _header(member: Any) -> bytes:
    import tarfile

    header: bytes = member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
    return header


def _add_file(member: Any, path: bytes, dir_fd: int | None, write: Callable[[bytes], object]) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        member.size = os.fstat(fd).st_size
        write(_header(member))
        left = member.size
        while left:
            data = os.read(fd, min(_CHUNK, left)) or b"\0" * min(_CHUNK, left)  # it shrank: keep the promised length
            write(data)
            left -= len(data)
        write(b"\0" * (-member.size % _BLOCK))
    finally:
        os.close(fd)


def unpack(
    read: Callable[[int], bytes], target: bytes, *, max_bytes: int | None = None, max_entries: int | None = None
) -> int:
    """Unpack a tar stream below `target`, which is made if missing; returns the count of entries. Raises UnsafeTar.
    Nothing is written outside it: no absolute or `..` names, no link is ever followed, no devices, no setuid."""
    import tarfile

    source = _Source(read, max_bytes, max_entries)
    os.makedirs(target, exist_ok=True)
    top = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    entries = 0
    try:
        with tarfile.open(fileobj=source, mode="r|", errorlevel=2) as archive:  # type: ignore[call-overload]
            for member in archive:
                entries += 1
                source.count(member.size)
                _unpack_member(archive, member, top, source)
                archive.members = []  # tarfile would remember them all
                source.left = _MAX_HEADER
    except (tarfile.TarError, ValueError, RecursionError) as error:
        raise UnsafeTar(f"not a tar stream: {error}") from None
    finally:
        os.close(top)
    return entries


class _Source:
    """Source of tarfile with limits: on headers, which tarfile takes into memory whole, on bytes, and on entries,
    folders that only a longer name implies included."""

    def __init__(self, read: Callable[[int], bytes], max_bytes: int | None, max_entries: int | None) -> None:
        self._read, self._max_bytes, self._max_entries = read, max_bytes, max_entries
        self._bytes, self._blocks, self._entries, self.left = 0, 0, 0, _MAX_HEADER

    def read(self, size: int) -> bytes:
        data = self._read(size)
        self.left -= len(data)
        if self.left < 0:
            raise UnsafeTar("an entry has a header that is too long")
        return data

    def count(self, size: int = 0) -> None:
        self._entries += 1
        self._bytes += size
        self.left += size
        if size < 0:
            raise UnsafeTar("a file of less than nothing")
        if self._max_entries is not None and self._entries > self._max_entries:
            raise TooMuch(f"more than {self._max_entries} entries")
        if self._max_bytes is not None:
            if self._bytes > self._max_bytes:
                raise TooMuch(f"more than {self._max_bytes} bytes")
            # Names, links and files of one byte take room as well: not more of that than of content, or so.
            self._blocks += max(_LEAST, -(-size // _LEAST) * _LEAST)
            if self._blocks > 2 * self._max_bytes + _ROOM:
                raise TooMuch(f"{self._entries} entries take more room than {self._max_bytes} bytes may")


def _unpack_member(archive: Any, member: Any, top: int, source: _Source) -> None:
    parts = [part for part in os.fsencode(member.name).split(b"/") if part not in (b"", b".")]
    if not parts:
        return
    if os.fsencode(member.name).startswith(b"/") or b".." in parts:
        raise UnsafeTar(f"{member.name!r} is outside the folder")
    folder = _make_folders(top, parts[:-1], source)
    name = parts[-1]
    try:
        if member.isdir():
            inner = _make_folders(folder, [name])
            os.fchmod(inner, (member.mode & 0o777) | 0o700)
            os.close(inner)
        elif member.issparse():
            raise UnsafeTar(f"{member.name!r} has holes: a few bytes that would become any number")
        elif member.isreg():
            _unpack_file(archive.extractfile(member), member.mode & 0o777, folder, name)
        elif member.issym():
            _make_room(folder, name)
            os.symlink(os.fsencode(member.linkname), name, dir_fd=folder)
        elif member.islnk():
            _link(top, member.linkname, folder, name, source)
        else:
            raise UnsafeTar(f"{member.name!r} is a device or a pipe")
    finally:
        os.close(folder)


def _make_folders(top: int, parts: list[bytes], source: _Source | None = None) -> int:
    fd = os.dup(top)
    for part in parts:
        try:
            if _make_one(fd, part) and source is not None:
                source.count()
            deeper = os.open(part, _DIR_FLAGS, dir_fd=fd)
        except OSError as error:
            if error.errno in (20, 40):  # ENOTDIR, ELOOP
                raise UnsafeTar(f"{part!r} is a link or a file where a folder was meant") from None
            raise
        finally:
            os.close(fd)
        fd = deeper
    return fd


def _make_one(fd: int, name: bytes) -> bool:
    try:
        os.mkdir(name, 0o755, dir_fd=fd)
        return True
    except FileExistsError:
        return False


def _make_room(fd: int, name: bytes) -> None:
    try:
        os.unlink(name, dir_fd=fd)
    except FileNotFoundError:
        pass


def _unpack_file(source: Any, mode: int, folder: int, name: bytes) -> None:
    _make_room(folder, name)
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        while data := source.read(_CHUNK):
            _write_all(fd, data)
        os.fchmod(fd, mode)
    finally:
        os.close(fd)


def _link(top: int, linkname: str, folder: int, name: bytes, source: _Source) -> None:
    parts = [part for part in os.fsencode(linkname).split(b"/") if part not in (b"", b".")]
    if not parts or b".." in parts or linkname.startswith("/"):
        raise UnsafeTar(f"a hard link to {linkname!r} is outside the folder")
    inside = _make_folders(top, parts[:-1], source)
    try:
        if not stat.S_ISREG(os.lstat(parts[-1], dir_fd=inside).st_mode):
            raise UnsafeTar(f"a hard link to {linkname!r}, which is no file")
        _make_room(folder, name)
        os.link(parts[-1], name, src_dir_fd=inside, dst_dir_fd=folder, follow_symlinks=False)
    finally:
        os.close(inside)


def main(verb: str, path: str, read: Callable[[int], bytes], write: Callable[[bytes], object]) -> str:
    """`trees.py pack|unpack PATH` on stdin and stdout: the agent runs this beside itself, as the right user. Returns
    the number and text of an error."""
    try:
        if verb == "pack":
            pack(os.fsencode(path), write)
        else:
            unpack(read, os.fsencode(path))
    except OSError as error:
        return f"{error.errno} {error.filename if error.filename is not None else ''}: {error.strerror}"
    except UnsafeTar as error:
        return f"22 {error}"
    return ""


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


if __name__ == "__main__":
    failure = main(sys.argv[1], sys.argv[2], sys.stdin.buffer.read, lambda data: _write_all(1, data))
    sys.stderr.write(failure)
    sys.exit(2 if failure else 0)
