"""Root file systems of Debian's packages, as tars."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from skerry.progress import OnProgress, Progress
from skerry.sources.roots import Entry
from skerry.vm.images import entries, programs
from skerry.vm.images.modules import Modules
from skerry.vm.images.recipes import Recipe

_MAKE_S = 1800.0
_EPOCH = "1700000000"
"""The latest time of any file, so that the same packages make the same image."""
_STEP = "I: "
_MAKE_ROOM = 'mkdir -p "$1/usr/lib/modules"'
_LIST_MODULES = 'for each in "$1"/usr/lib/modules/*; do chroot "$1" depmod "${each##*/}"; done'
_UNWANTED = ("usr/share/doc", "usr/share/info", "usr/share/lintian", "usr/share/locale", "usr/share/man")
_EMPTY_FOLDERS = ("boot", "var/cache", "var/lib/apt/lists", "var/log")
_EMPTY_FILES = ("etc/hostname", "etc/machine-id", "etc/resolv.conf")


async def make(recipe: Recipe, tar: Path, modules: Path | None, on_progress: OnProgress) -> None:
    """Install the packages into a tar, and with them modules from a folder that holds those of one kernel."""
    hooks = []
    if modules is not None:
        copy = f"sync-in {shlex.quote(str(modules))} /usr/lib/modules"
        hooks = [f"--customize-hook={hook}" for hook in (_MAKE_ROOM, copy, _LIST_MODULES)]

    # So that what a crash leaves is swept; others than root need a folder that their other users reach.
    scratch = {"TMPDIR": str(tar.parent)} if os.geteuid() == 0 else {}

    def told(line: str) -> None:
        if line.startswith(_STEP):
            on_progress(Progress(line.removeprefix(_STEP)))

    await programs.run(
        "mmdebstrap",
        "--variant=minbase",
        f"--include={','.join(recipe.packages)}",
        *(f"--dpkgopt=path-exclude=/{folder}/*" for folder in _UNWANTED),
        *hooks,
        recipe.suite,
        tar,
        timeout_s=_MAKE_S,
        env={"SOURCE_DATE_EPOCH": _EPOCH, **scratch},
        on_line=told,
    )


def trimmed(recipe: Recipe, found: Sequence[Entry]) -> list[Entry]:
    """Without what only this build needed, and with empty files that a machine mounts its own over."""
    gone = frozenset((*_EMPTY_FOLDERS, *_EMPTY_FILES, *recipe.removed))
    kept = [each for each in found if not _is_below(each.info.name, gone)]
    return [*kept, *map(entries.folder, _EMPTY_FOLDERS), *(entries.file(name, b"") for name in _EMPTY_FILES)]


def _is_below(name: str, folders: frozenset[str]) -> bool:
    parts = name.removeprefix("./").split("/")
    return any("/".join(parts[:count]) in folders for count in range(1, len(parts) + 1))


def copy_modules(folder: Path, into: Path, names: Iterable[str]) -> None:
    """Those of a kernel and all that they need, laid out as the kernel's own are."""
    modules = Modules(folder)
    for name in modules.in_load_order(names):
        path = modules.path(name)
        target = into / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    for name in ("modules.builtin", "modules.builtin.modinfo", "modules.order"):
        if (folder / name).exists():
            shutil.copyfile(folder / name, into / name)
