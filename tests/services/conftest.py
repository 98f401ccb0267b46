from __future__ import annotations

from providers.local.conftest import cache as cache
from providers.qemu.conftest import config as config
from providers.qemu.conftest import qemu as qemu
from providers.qemu.conftest import qemu_cache as qemu_cache
from providers.qemu.conftest import state_dir as state_dir
