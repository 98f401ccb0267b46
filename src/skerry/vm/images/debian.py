"""Debian's packages: fetched, unpacked without an installation, put together to root file systems; and its modules."""

from __future__ import annotations

import gzip
import lzma
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

from skerry.agent import bundle
from skerry.errors import ProviderError
from skerry.model.results import OnProgress, Progress
from skerry.oci.roots import Entry
from skerry.vm.images import programs, tree
from skerry.vm.images.recipes import Recipe

_ASK_S = 60.0
_FILE = re.compile(r"(.+)\.ko(?:\.(xz|gz|zst))?")
_NEEDS = re.compile(rb"(?:\A|\0)depends=([^\0]*)\0")
_EPOCH = "1700000000"
"""The latest time of any file, so that the same packages make the same image."""
_STEP = "I: "
_LIST_MODULES = 'for each in "$1"/usr/lib/modules/*; do chroot "$1" depmod "${each##*/}"; done'
_UNWANTED = ("usr/share/doc", "usr/share/info", "usr/share/lintian", "usr/share/locale", "usr/share/man")
_EMPTY_FOLDERS = ("boot", "var/cache", "var/lib/apt/lists", "var/log")
_EMPTY_FILES = ("etc/hostname", "etc/machine-id", "etc/resolv.conf")


async def depended_on(package: str, prefix: str) -> str:
    """Find the package that another stands for, such as the newest kernel's. Raises ProviderError."""
    text = await programs.run("apt-cache", "depends", package, timeout_s=_ASK_S)
    found = re.search(rf"^\s*Depends: ({prefix}\S*)$", text, re.MULTILINE)
    if found is None:
        raise ProviderError(f"apt knows no {package}: run `apt-get update`, on Debian or what is made of it")
    return found[1]


async def unpack(package: str, into: Path, on_progress: OnProgress) -> str:
    """Fetch a package, checked by apt, and put its files into a folder; returns its version. Raises ProviderError."""
    on_progress(Progress(f"fetching {package}"))
    fetched = into / ".fetched"
    fetched.mkdir(parents=True)
    # As root apt would fetch as another user, who cannot write here.
    options = ("-o", "APT::Sandbox::User=root") if os.geteuid() == 0 else ()
    await programs.run("apt-get", *options, "download", package, cwd=fetched, timeout_s=900.0)
    files = list(fetched.glob("*.deb"))
    if len(files) != 1:
        raise ProviderError(f"apt fetched {len(files)} files for {package}, not one")
    on_progress(Progress(f"unpacking {package}"))
    await programs.run("dpkg-deb", "-x", files[0], into, timeout_s=300.0)
    version = await programs.run("dpkg-deb", "-f", files[0], "Version", timeout_s=_ASK_S)
    files[0].unlink()
    fetched.rmdir()
    return version.strip()


async def make(recipe: Recipe, tar: Path, modules: Path | None, on_progress: OnProgress) -> None:
    """Install the packages into a tar, and with them modules from a folder that holds those of one kernel."""
    hooks = []
    if modules is not None:
        copy = f"sync-in {shlex.quote(str(modules))} /usr/lib/modules"
        hooks = ['mkdir -p "$1/usr/lib/modules"', copy, _LIST_MODULES]
    if recipe.brings_python:
        hooks += _python_hooks()

    # So that what a crash leaves is swept; others than root need a folder that their other users reach.
    scratch = {"TMPDIR": str(tar.parent)} if os.geteuid() == 0 else {}

    def told(line: str) -> None:
        if line.startswith(_STEP):
            on_progress(Progress(line.removeprefix(_STEP)))

    options = ["--variant=minbase", f"--include={','.join(recipe.packages)}"]
    options += [f"--dpkgopt=path-exclude=/{folder}/*" for folder in _UNWANTED]
    env = {"SOURCE_DATE_EPOCH": _EPOCH, **scratch}
    options += [*(f"--customize-hook={hook}" for hook in hooks), recipe.suite, str(tar)]
    await programs.run("mmdebstrap", *options, timeout_s=1800.0, env=env, on_line=told)


def _python_hooks() -> list[str]:
    """Steps that make the agent's interpreter of the image's own, in the image's root."""
    script = bundle.COLLECT.name
    argv = ["python3", "-I", "-S", f"/tmp/{script}", tree.PYTHON, *bundle.imports_of_the_agent()]
    return [
        f"copy-in {shlex.quote(str(bundle.COLLECT))} /tmp",
        f'mkdir -p "$1{os.path.dirname(tree.PYTHON)}" && chroot "$1" {shlex.join(argv)} && rm "$1/tmp/{script}"',
    ]


def trimmed(recipe: Recipe, found: Sequence[Entry]) -> list[Entry]:
    """Remove what only this build needed, and add empty files that a machine mounts its own over."""
    gone = frozenset((*_EMPTY_FOLDERS, *_EMPTY_FILES, *recipe.removed))
    paths = ((each, PurePosixPath(each.info.name)) for each in found)
    kept = [each for each, path in paths if gone.isdisjoint(map(str, (path, *path.parents)))]
    return [*kept, *map(tree.folder_entry, _EMPTY_FOLDERS), *(tree.file_entry(name, b"") for name in _EMPTY_FILES)]


def copy_modules(folder: Path, into: Path, names: Iterable[str]) -> None:
    """Copy modules of a kernel and all that they need, laid out as the kernel's own are."""
    modules = Modules(folder)
    for name in modules.in_load_order(names):
        path = modules.files[name]
        target = into / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    for name in ("modules.builtin", "modules.builtin.modinfo", "modules.order"):
        if (folder / name).exists():
            shutil.copyfile(folder / name, into / name)


class Modules:
    """Modules of one kernel, in its folder below /lib/modules; a name's hyphens count as underscores."""

    def __init__(self, folder: Path) -> None:
        self.files = {_name(path.name): path for path in sorted(folder.rglob("*.ko*")) if _FILE.fullmatch(path.name)}
        built_in = folder / "modules.builtin"
        lines = built_in.read_text().split() if built_in.exists() else []
        self._built_in = frozenset(_name(line.rpartition("/")[2]) for line in lines)

    def in_load_order(self, names: Iterable[str]) -> dict[str, bytes]:
        """Read these and all that they need, each after its own needs, without those built in. Raises ProviderError."""
        ordered: dict[str, bytes] = {}
        for name in names:
            self._add(_plain(name), ordered, ())
        return ordered

    def _add(self, name: str, ordered: dict[str, bytes], above: tuple[str, ...]) -> None:
        if name in ordered or name in self._built_in:
            return
        if name in above or name not in self.files:
            raise ProviderError(f"this kernel has no module {name}, which {above[-1] if above else 'a machine'} needs")
        content = _content(self.files[name])
        needs = _NEEDS.search(content)
        for needed in filter(None, needs[1].decode().split(",") if needs else ()):
            self._add(_plain(needed), ordered, (*above, name))
        ordered[name] = content


def _content(path: Path) -> bytes:
    match path.suffix:
        case ".xz":
            return lzma.decompress(path.read_bytes())
        case ".gz":
            return gzip.decompress(path.read_bytes())
        case ".zst":
            command = [programs.find("zstd"), "-dcq", str(path)]
            return subprocess.run(command, capture_output=True, check=True, timeout=60).stdout
    return path.read_bytes()


def _name(file: str) -> str:
    match = _FILE.fullmatch(file)
    return _plain(match[1] if match else file)


def _plain(name: str) -> str:
    return name.replace("-", "_")
