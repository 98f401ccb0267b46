"""Run by an interpreter as a script: copies the standard modules that some names import, compiled, into a folder.

`python -I -S collect.py FOLDER NAME...` writes FOLDER/lib/pythonX.Y and prints each extension module's path in it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys

_ALWAYS = ("os", "encodings.ascii", "encodings.latin_1", "encodings.utf_8", "traceback")
"""What the interpreter itself looks for: when it starts, by the locale it finds, and when it reports an error."""


def import_all(names: list[str]) -> dict[str, str]:
    """The file of every module that importing `names` loads."""
    for name in names:
        with contextlib.suppress(ImportError):  # of another version or system: the agent has a way without it
            importlib.import_module(name)
    files = {name: getattr(module, "__file__", None) for name, module in sys.modules.items()}
    return {name: file for name, file in files.items() if file and name != "__main__"}


def copy(files: dict[str, str], folder: str) -> list[str]:
    """Put each file where the interpreter looks for it below `folder`; gives back the extension modules."""
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


if __name__ == "__main__":
    for extension in copy(import_all([*_ALWAYS, *sys.argv[2:]]), sys.argv[1]):
        print(extension)
