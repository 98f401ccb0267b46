"""Where things are in a container, for all that speak of it."""

from __future__ import annotations

from skerry.spec import SandboxId

HOME = "/home/user"
DATA = "/.data"
RUNTIME = "/.skerry"
"""A read-only volume with the agent and its interpreter."""
AGENT = f"{RUNTIME}/agent"
PYTHON = f"{RUNTIME}/python"
RUN = f"{RUNTIME}/run"
"""A small tmpfs for the agent's socket."""
SOCKET = f"{RUN}/agent"

START = f"{AGENT}/start.py"
RELAY = f"{AGENT}/relay.py"

DEFAULT_UID = 65532
"""Who a box runs as where neither its spec nor its image names another than root, and the engine has few uids."""
PROJECT_UIDS = range(0x60000000, 0x61000000)
"""Where it has all of the host's, each project has one of these: the kernel counts much by uid, and what one project
uses up is then not missing in another. Within a project it is one, so that its volumes stay its own."""

MASKED_FILES = (
    "/proc/cmdline",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/key-users",
    "/proc/latency_stats",
    "/proc/sched_debug",
    "/proc/timer_list",
    "/proc/timer_stats",
)
MASKED_FOLDERS = (
    "/proc/acpi",
    "/proc/asound",
    "/proc/scsi",
    "/sys/devices/virtual/powercap",
    "/sys/firmware",
)
"""What tells of the host. It takes the place of an engine's own list, and is longer."""

PREFIX = "skerry-"


def container_name(id: SandboxId) -> str:
    return f"{PREFIX}{id}"
