from __future__ import annotations

import io
import tarfile

from skerry.providers.dockerapi.containers import folder_tar

_END = bytes(2 * tarfile.BLOCKSIZE)


def test_a_tar_ends_with_the_mark_of_its_end() -> None:
    """Podman reads no further, and fails if there is more that it has not read by then."""
    content = folder_tar("home/user", mode=0o700, uid=7, gid=8)
    assert content.endswith(_END)
    assert len(content) == tarfile.BLOCKSIZE + len(_END)
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        (entry,) = archive.getmembers()
    assert (entry.name, entry.mode, entry.uid, entry.gid) == ("home/user", 0o700, 7, 8)
