from __future__ import annotations

from pathlib import Path

import pytest

from skerry.vm.base import Kernel
from skerry.vm.images.store import ImageStore


@pytest.fixture
def cache(tmp_path: Path, vm_cache: Path, vm_kernel: Kernel) -> Path:
    """A cache folder for this test alone, but for the kernels."""
    folder = tmp_path / "cache/vm"
    folder.mkdir(parents=True)
    (folder / "kernels").symlink_to(vm_cache / "kernels")
    return folder


@pytest.fixture
def store(cache: Path) -> ImageStore:
    return ImageStore(cache)
