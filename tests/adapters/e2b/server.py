"""`skerry serve` for E2B's suites: a process with a state folder of its own, and the template `base` that they want."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

_PACKAGES = "bash,python3,python-is-python3,git,curl,sudo,ca-certificates,ncurses-bin,procps"
_USER = (
    "chroot $1 groupmod --new-name user app",
    "chroot $1 usermod --login user --home /home/user --shell /bin/bash app",
    "cp -r $1/etc/skel $1/home/user && chroot $1 chown -R user:user /home/user",
)
"""The user that E2B's clients take for granted."""
_KERNELS = ("ipykernel", "jupyter_client", "pandas", "matplotlib==3.10.9", "pillow", "e2b_charts")
"""What the template of E2B's code interpreter has, of what its tests use."""
_INTO = "usr/local/lib/python3.11/dist-packages"
_START_S = 60.0
_DOMAIN = "e2b.test"
_TEMPLATE = """
[e2b.templates.{name}]
provider = "docker"
image = "{image}"
writable_root = true
"""


def closed_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Server:
    """A server, while the `with` lasts; its sandboxes end with it."""

    def __init__(self, provider: str, *, domain: bool = False, settings: str = "", interpreter: bool = False) -> None:
        """`settings` are more of them, as TOML; `docker` has a daemon and a template of its own, and with `interpreter`
        that of the code interpreter too."""
        self._provider = provider
        self._settings = settings
        self._is_domain = domain
        self._has_interpreter = interpreter
        self._stack = ExitStack()
        self.variables: dict[str, str] = {}
        """What the SDK is to be told."""
        self.namespace: tuple[str, ...] = ()
        """Beginning of commands that are to find the names of the domain."""

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._start(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _start(self, stack: ExitStack) -> None:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="skerry-e2b-")))
        config = folder / "config.toml"
        port = closed_port()
        lines = [f'state_dir = "{folder}/state"', "[server]", f'listen = ["127.0.0.1:{closed_port()}"]']
        lines.append(f'e2b_listen = ["127.0.0.1:{port}"]')
        if self._is_domain:
            lines.append(f'e2b_domain = "{_DOMAIN}"')
        if self._provider == "docker":
            from tests.engines.daemons import running

            daemon = stack.enter_context(running("docker"))
            lines.append(f'[providers.docker]\nhost = "{daemon.address}"')
            lines.append(_TEMPLATE.format(name="base", image=_base(daemon.address)))
            if self._has_interpreter:
                lines.append(_TEMPLATE.format(name="code-interpreter-v1", image=_interpreter(daemon.address)))
        lines.append(self._settings)
        config.write_text("\n".join(lines) + "\n")
        env = {**os.environ, "SKERRY_CONFIG": str(config)}
        skerry = str(Path(sys.executable).with_name("skerry"))
        if self._is_domain:
            from tests.adapters.e2b.names import Names

            self.namespace = stack.enter_context(Names(_DOMAIN)).beginning
        log = stack.enter_context((folder / "log").open("wb"))
        process = subprocess.Popen([skerry, "serve", "--no-link"], env=env, stdout=log, stderr=log)
        stack.callback(_end, process, [skerry, "rm", "--all"], env)
        _await(port, process, folder / "log")
        asked = [skerry, "e2b", "env", "--json", *(["--domain"] if self._is_domain else [])]
        told = subprocess.run(asked, env=env, check=True, capture_output=True, timeout=60).stdout
        self.variables = json.loads(told)


def _await(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + _START_S
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"the server did not start: {log.read_text()}")
        time.sleep(0.05)


def _end(process: subprocess.Popen[bytes], clear: list[str], env: dict[str, str]) -> None:
    process.send_signal(signal.SIGTERM)
    process.wait(60)
    subprocess.run(clear, env=env, check=False, timeout=300, capture_output=True)


def _base(address: str) -> str:
    """The image of the template, and the names by which builds of the suite ask for one."""
    from tests.engines.api import ask

    name = _image(address, "skerry-e2b/base", _PACKAGES, *_USER)
    for tag in ("22.04", "latest"):
        ask(address, "POST", f"/images/{name}/tag", {"repo": "ubuntu", "tag": tag})
    return name


def _interpreter(address: str) -> str:
    """The image of the code interpreter's template: the same with Node, and with Jupyter's kernels for Python and R."""
    pip = f"{sys.executable} -m pip install --quiet --python-version 3.11 --only-binary=:all: --target $1/{_INTO}"
    kernels = "$1/usr/share/jupyter/kernels"
    spec = f"mkdir -p {kernels} && cp -r $1/usr/lib/R/site-library/IRkernel/kernelspec {kernels}/ir"
    packages = f"{_PACKAGES},nodejs,r-cran-irkernel"
    return _image(address, "skerry-e2b/interpreter", packages, *_USER, f"{pip} {' '.join(_KERNELS)}", spec)


def _image(address: str, name: str, packages: str, *hooks: str) -> str:
    from tests.engines.api import ask
    from tests.engines.images import make_debian

    with make_debian(packages, *hooks).open("rb") as file:
        ask(address, "POST", "/images/create", {"fromSrc": "-", "repo": name}, body=file, timeout_s=300)
    return name
