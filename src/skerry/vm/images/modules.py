"""A kernel's modules: which there are, what each needs before it, and their plain bytes."""

from __future__ import annotations

import gzip
import lzma
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

from skerry.errors import ProviderError
from skerry.vm.images import programs

_FILE = re.compile(r"(.+)\.ko(?:\.(xz|gz|zst))?")
_NEEDS = re.compile(rb"(?:\A|\0)depends=([^\0]*)\0")
_UNPACK_S = 60


class Modules:
    """Those of one kernel, in its folder below /lib/modules; a name's hyphens count as underscores."""

    def __init__(self, folder: Path) -> None:
        self._files = {_name(path.name): path for path in sorted(folder.rglob("*.ko*")) if _FILE.fullmatch(path.name)}
        built_in = folder / "modules.builtin"
        lines = built_in.read_text().split() if built_in.exists() else []
        self.built_in = frozenset(_name(line.rpartition("/")[2]) for line in lines)

    def in_load_order(self, names: Iterable[str]) -> dict[str, bytes]:
        """These and all that they need, each after what it needs itself. One that is built in is not among them."""
        ordered: dict[str, bytes] = {}
        for name in names:
            self._add(_plain(name), ordered, ())
        return ordered

    def path(self, name: str) -> Path:
        return self._files[_plain(name)]

    def __contains__(self, name: str) -> bool:
        return _plain(name) in self._files or _plain(name) in self.built_in

    def _add(self, name: str, ordered: dict[str, bytes], above: tuple[str, ...]) -> None:
        if name in ordered or name in self.built_in:
            return
        if name in above or name not in self._files:
            raise ProviderError(f"this kernel has no module {name}, which {above[-1] if above else 'a machine'} needs")
        content = _content(self._files[name])
        for needed in _needs(content):
            self._add(needed, ordered, (*above, name))
        ordered[name] = content


def _needs(content: bytes) -> list[str]:
    found = _NEEDS.search(content)
    return [_plain(name) for name in found[1].decode().split(",") if name] if found else []


def _content(path: Path) -> bytes:
    match path.suffix:
        case ".xz":
            return lzma.decompress(path.read_bytes())
        case ".gz":
            return gzip.decompress(path.read_bytes())
        case ".zst":
            command = [programs.find("zstd"), "-dcq", str(path)]
            return subprocess.run(command, capture_output=True, check=True, timeout=_UNPACK_S).stdout
    return path.read_bytes()


def _name(file: str) -> str:
    match = _FILE.fullmatch(file)
    return _plain(match[1] if match else file)


def _plain(name: str) -> str:
    return name.replace("-", "_")
