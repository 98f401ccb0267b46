"""Script that makes a portable interpreter of the one that runs it: `python -I -S collect.py FOLDER NAME...` writes
FOLDER/bin/python3, and FOLDER/lib with the standard modules that the names import, the libraries and their loader.

Standard library only: it also runs where nothing of ours is, in the root of an image that is being made.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import struct
import sys

_ALWAYS = ("os", "encodings.ascii", "encodings.latin_1", "encodings.utf_8", "traceback")
"""Modules that the interpreter itself looks for: at its start, by the locale, and when it reports an error."""
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_PT_INTERP = 3
_LIST_S = 60


class Elf:
    """A 64-bit little-endian ELF file; raises ValueError for anything else."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        with open(path, "rb") as file:
            self._data = file.read()
        if self._data[:6] != b"\x7fELF\x02\x01" or len(self._data) < _HEADER.size:
            raise ValueError(f"{os.fspath(path)} is not a 64-bit little-endian ELF file")
        self._header = list(_HEADER.unpack_from(self._data))
        start, size, count = self._header[5], self._header[9], self._header[10]
        self._segments = [_SEGMENT.unpack_from(self._data, start + i * size) for i in range(count)]

    @property
    def loader(self) -> str | None:
        """The program that loads this one's libraries; none in a static program or a library."""
        for kind, _, offset, _, _, size, _, _ in self._segments:
            if kind == _PT_INTERP:
                return self._data[offset : offset + size].rstrip(b"\0").decode()
        return None

    def stripped(self) -> bytes:
        """The file without what no loader reads: debug information, symbols for linkers, section headers."""
        header = list(self._header)
        header[6] = header[12] = header[13] = 0  # where the section headers are, how many, and which names them
        end = max(offset + size for _, _, offset, _, _, size, _, _ in self._segments)
        return _HEADER.pack(*header) + self._data[_HEADER.size : end]


def loader_of(python: str | os.PathLike[str]) -> str:
    """Raises ValueError if it is no program that can be carried."""
    loader = Elf(python).loader
    if loader is None:
        raise ValueError(f"{os.fspath(python)} is statically linked, so it has no loader to bring along")
    return loader


def import_all(names: list[str]) -> dict[str, str]:
    """Import `names`; returns the file of every module that this loads."""
    for name in names:
        with contextlib.suppress(ImportError):  # of another version or system: the agent has a way without it
            importlib.import_module(name)
    files = {name: getattr(module, "__file__", None) for name, module in sys.modules.items()}
    return {name: file for name, file in files.items() if file and name != "__main__"}


def copy_modules(files: dict[str, str], folder: str) -> list[str]:
    """Put each file where the interpreter looks for it below `folder`; returns the extension modules."""
    import py_compile
    import shutil

    stdlib = os.path.dirname(os.__file__)
    library = os.path.join(folder, os.path.relpath(stdlib, sys.base_prefix))
    os.makedirs(os.path.join(library, "lib-dynload"))
    extensions = []
    for file in files.values():
        inside = os.path.relpath(file, stdlib)
        target = os.path.join(library, inside)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if file.endswith(".py"):
            mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
            py_compile.compile(file, f"{target}c", dfile=inside, doraise=True, invalidation_mode=mode)
        else:
            shutil.copyfile(file, target)
            extensions.append(target)
    return extensions


def needed_libraries(loader: str, programs: list[str]) -> dict[str, str]:
    """Every shared library that the programs load, by the name they ask for."""
    import re
    import subprocess

    found: dict[str, str] = {}
    for program in programs:
        listed = subprocess.run([loader, "--list", program], stdout=subprocess.PIPE, check=True, timeout=_LIST_S).stdout
        for name, path in re.findall(r"^\s*(\S+) => (.+?)(?: \(0x[0-9a-f]+\))?$", listed.decode(), re.MULTILINE):
            if not path.startswith("/"):
                raise ValueError(f"{program} needs {name}: {path}")
            found.setdefault(name, path)  # of the interpreter, before those of its extensions
    return found


def make(folder: str, names: list[str]) -> None:
    """Make the portable interpreter. Raises ValueError."""
    python = os.path.realpath(sys.executable)
    loader = loader_of(python)
    extensions = copy_modules(import_all([*_ALWAYS, *names]), folder)
    library = os.path.join(folder, "lib")
    programs = {os.path.join(folder, "bin/python3"): python, os.path.join(library, "ld.so"): loader}
    libraries = needed_libraries(loader, [python, *extensions])
    os.makedirs(library, exist_ok=True)
    os.mkdir(os.path.join(folder, "bin"))
    copies = {os.path.join(library, name): path for name, path in libraries.items()}
    for target, source in {**copies, **{each: each for each in extensions}, **programs}.items():
        content = Elf(source).stripped()
        with open(target, "wb") as file:
            file.write(content)
        os.chmod(target, 0o755 if target in programs else 0o644)


if __name__ == "__main__":
    make(sys.argv[1], sys.argv[2:])
