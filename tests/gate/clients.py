"""Programs of a box that reach the little internet: the command of each, and what it prints if it got there."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import NamedTuple

from skerry.config import variable
from skerry.sandbox.sandbox import AsyncSandbox

from .world import BUNDLE, PLACE, World

PATIENCE_S = 100.0
_DIRECT = "env -u http_proxy -u https_proxy -u HTTP_PROXY -u HTTPS_PROXY"
"""What has no proxy asks the resolver of the box, as most programs do."""
_APT = (
    "-qq -o Dir::Etc::sourcelist={place}/list -o Dir::Etc::sourceparts=- -o Dir::State={place}/state"
    " -o Dir::State::status={place}/status -o Dir::Cache={place}/cache -o Debug::NoLocking=1"
    " -o APT::Sandbox::User= -o Acquire::https::CAInfo={bundle}"
)
_FETCH = "fetch(process.argv[1]).then(answer => answer.text()).then(text => process.stdout.write(text))"
_LIBRARY = "import sys, {name}; print({name}.get(sys.argv[1]).text, end='')"


class Client(NamedTuple):
    command: str
    """For a shell; `$HTTPS` and the like are ports of the world."""
    prints: str
    program: str
    """Where a box has none of this name, its client is left out."""


def clients() -> Mapping[str, Client]:
    """All of them, by name."""
    page, plain = "https://web.test:$HTTPS/hello", "http://web.test:$HTTP/hello"
    hello = "hello from web.test"
    pip = "python3 -m pip install --quiet --no-cache-dir --disable-pip-version-check --no-compile --index-url"
    index = "https://pypi.test:$HTTPS/simple"
    apt = _APT.format(place=f"{PLACE}/apt", bundle=BUNDLE)
    ssh = "ssh -p $SSH -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o BatchMode=yes -o LogLevel=ERROR"
    libraries = f"PYTHONPATH={PLACE}/libraries python3 -c"
    return {
        "curl, by the proxy": Client(f"curl -fsS {page} && curl -fsS {plain}", f"{hello}\n{hello}", "curl"),
        "curl, by name": Client(
            f"{_DIRECT} curl -fsS {page} && {_DIRECT} curl -fsS {plain}", f"{hello}\n{hello}", "curl"
        ),
        "pip, and requests and httpx that it installed": Client(
            f"{pip} {index} --target {PLACE}/libraries skerry-hello requests httpx"
            f" && {libraries} 'import skerry_hello'"
            f' && {libraries} "{_LIBRARY.format(name="requests")}" {page}'
            f' && {_DIRECT} {libraries} "{_LIBRARY.format(name="httpx")}" {page}',
            f"hello from a wheel\n{hello}\n{hello}",
            "pip3",
        ),
        "npm": Client(
            f"npm install --silent --no-audit --no-fund --prefix {PLACE}/node --cache {PLACE}/npm"
            " --registry https://registry.npm.test:$HTTPS skerry-hello >&2"
            f" && node {PLACE}/node/node_modules/skerry-hello/index.js",
            "hello from a package of npm",
            "npm",
        ),
        "fetch of Node": Client(f"node -e '{_FETCH}' {page}", hello, "node"),
        "git over https": Client(
            f"git clone --quiet https://git.test:$HTTPS/hello.git {PLACE}/https && cat {PLACE}/https/note",
            "hello from git",
            "git",
        ),
        "git over ssh": Client(
            f"GIT_SSH_COMMAND='{ssh}' git clone --quiet ssh://git@git.test:$SSH/hello.git {PLACE}/ssh"
            f" && cat {PLACE}/ssh/note",
            "hello from git",
            "ssh",
        ),
        "apt": Client(
            f"mkdir -p {PLACE}/apt/state/lists/partial {PLACE}/apt/cache/archives/partial"
            f" && : > {PLACE}/apt/status"
            f" && echo deb [trusted=yes] https://deb.test:$HTTPS/debian ./ > {PLACE}/apt/list"
            f" && apt-get {apt} update >&2 && apt-get {apt} install --yes --download-only skerry-hello >&2"
            f" && cd {PLACE}/apt/cache/archives && echo *.deb",
            "skerry-hello_1.0_all.deb",
            "apt-get",
        ),
        "a program of Go, with Go's own resolver": Client(
            f"{_DIRECT} GODEBUG=netdns=go hey -n 1 -c 1 {plain} | grep -o '\\[200\\].*'", "[200]\t1 responses", "hey"
        ),
        "a static program": Client(f"{_DIRECT} busybox wget -q -O - {plain}", hello, "busybox"),
        "psql": Client("psql -h db.test -p $POSTGRES -U postgres -Atc 'select 6 * 7' postgres", "42", "psql"),
        "a server that speaks first": Client(
            "python3 -c \"import os, socket; print(socket.create_connection(('raw.test', int(os.environ['GREET'])))"
            '.recv(64).decode().strip())"',
            "welcome",
            "python3",
        ),
    }


async def run_all(sandbox: AsyncSandbox, world: World) -> dict[str, str]:
    """What each client that the box has printed instead of what it should; empty if all got through. Where processors
    are emulated those are left out that take minutes there: Node, and pip."""
    await sandbox.exec(["mkdir", "-p", PLACE])
    await sandbox.files.write(BUNDLE, world.bundle.read_bytes())
    env = {name.upper(): str(port) for name, port in world.ports.items()} | {"HOME": PLACE}
    found = (await sandbox.exec(f"for name in {' '.join(programs())}; do command -v $name; done")).text
    there = {line.rpartition("/")[2] for line in found.split()}
    if "clients" in (variable("SKERRY_REQUIRE") or "").split(",") and "python3" in there:
        assert there == programs(), "scripts/install brings all of them"
    if not world.has_database:
        there -= {"psql"}
    if "emulated" in str(sandbox.enforced):
        there -= {"npm", "node", "pip3"}
    meant = {name: client for name, client in clients().items() if client.program in there}
    assert "a static program" in meant, f"the box has only {sorted(there)}"
    answers = await asyncio.gather(
        *(sandbox.exec(["sh", "-c", client.command], env=env, timeout_s=PATIENCE_S) for client in meant.values())
    )
    return {
        name: f"{answer.exit_code}: {answer.text.strip()} {answer.stderr.decode(errors='replace').strip()[-2000:]}"
        for (name, client), answer in zip(meant.items(), answers, strict=True)
        if answer.text.strip() != client.prints
    }


def programs() -> set[str]:
    return {client.program for client in clients().values()}
