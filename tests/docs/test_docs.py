"""What the pages say is true: their code runs and prints what they show, and their links lead somewhere."""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from adapters import frameworks
from engines.api import ask
from engines.daemons import Daemon
from engines.incusd import Incusd
from store.server import running

from skerry import providers
from skerry.errors import ProviderUnavailable, SkerryError, Unsupported
from skerry.host import background
from skerry.manager.decide import Action
from skerry.manager.providers import refuse_unknown
from skerry.model.caches import TOOLS
from skerry.model.records import Cause
from skerry.model.spec import SandboxId, Spec
from skerry.pool.pool import PoolStats
from skerry.providers.base import Isolation
from skerry.surfaces.mcp.server import ALL as MCP_TOOLS

from .pages import PAGES, ROOT, Block, blocks, matches, needs

_TIMEOUT_S = 30
_MACHINE_S = 240
"""Where the first block boots a machine, in software perhaps."""
_FRAMEWORK_S = 120
"""Some take long to import."""
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")

pytestmark = pytest.mark.timeout(240)  # a page has many blocks, and each of them its own deadline


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a reader has: `skerry` and the interpreter on PATH, and no settings. Needs the real default provider."""
    cache = tmp_path_factory.mktemp("cache")
    try:
        asyncio.run(providers.load("local", {"cache_dir": str(cache)}).check())
    except ProviderUnavailable as error:
        if "local" in os.environ.get("SKERRY_REQUIRE", "").split(","):
            raise
        pytest.skip(str(error))
    empty = cache / "config.toml"
    empty.touch()
    foreign = ("SKERRY_", "PYTEST_", "DOCKER_HOST", "CONTAINER_HOST")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    path = [str(ROOT), os.path.dirname(sys.executable), kept["PATH"]]
    settings = {"SKERRY_CONFIG": str(empty), "SKERRY_PROVIDERS__LOCAL__CACHE_DIR": str(cache)}
    return {**kept, **settings, "PATH": ":".join(path), "PYTHONDONTWRITEBYTECODE": "1"}


@pytest.fixture
def folder(environment: dict[str, str]) -> Iterator[Path]:
    """Where a page's blocks run, with a state folder of its own, in which they have to leave nothing."""
    folder = Path(tempfile.mkdtemp(prefix="skerry-docs-"))
    folder.chmod(0o755)  # what a page mounts must be reachable for a box's own uid
    (folder / "skerry").symlink_to(ROOT / "skerry")
    yield folder
    background.end(folder / "state/gate/note", "the gate")  # it would stay for a minute
    left = [path.name for path in (folder / "state/local").glob("*-*-*-*-*")]
    local = providers.load("local", {"state_dir": str(folder / "state/local")})
    for id in left:
        asyncio.run(local.destroy(SandboxId(id)))
    shutil.rmtree(folder)
    assert left == []


@pytest.fixture
def database() -> Iterator[dict[str, str]]:
    """What a reader with a PostgreSQL has: its programs on PATH, which find the server by themselves."""
    with running() as server:
        yield {"PGHOST": server.folder, "PGUSER": "postgres", "PATH": str(server.binaries)}


@contextmanager
def with_images(daemon: Daemon, images: dict[str, str], folder: Path, variable: str) -> Iterator[dict[str, str]]:
    """What a reader with an engine has: an image of that name, and an engine in which a page leaves nothing."""
    ask(daemon.address, "POST", f"/images/{images['busybox']}/tag", {"repo": "busybox", "tag": "latest"})
    settings = {"host": daemon.address, "state_dir": str(folder / "state" / daemon.name)}
    asyncio.run(clear(providers.load(daemon.name, settings)))
    yield {variable: daemon.address}
    left = asyncio.run(clear(providers.load(daemon.name, settings)))
    assert left == []


async def clear(engine: Any) -> list[str]:
    """Remove what is left in an engine; the names of it."""
    boxes = list(await engine.discover())
    for id in boxes:
        await engine.destroy(id)
    volumes = [volume.name for volume in await engine.volumes()]
    for name in volumes:
        await engine.remove_volume(name)
    return [*boxes, *volumes]


@pytest.fixture
def docker(docker_daemon: Daemon, docker_images: dict[str, str], folder: Path) -> Iterator[dict[str, str]]:
    with with_images(docker_daemon, docker_images, folder, "DOCKER_HOST") as variables:
        yield variables


@pytest.fixture
def podman(podman_daemon: Daemon, podman_images: dict[str, str], folder: Path) -> Iterator[dict[str, str]]:
    with with_images(podman_daemon, podman_images, folder, "CONTAINER_HOST") as variables:
        yield variables


def pages_with(what: str | None) -> pytest.MarkDecorator:
    """Those that have code, and need this."""
    return pytest.mark.parametrize("page", [page for page in PAGES if blocks(page) and needs(page) == what], ids=named)


@pages_with(None)
def test_the_code_of_a_page_runs_and_prints_what_it_shows(
    page: Path, environment: dict[str, str], folder: Path
) -> None:
    run_page(page, environment, folder)


@pages_with("postgresql")
def test_the_code_of_a_page_about_postgresql_runs_and_prints_what_it_shows(
    page: Path, environment: dict[str, str], folder: Path, database: dict[str, str]
) -> None:
    path = f"{environment['PATH']}:{database['PATH']}"
    run_page(page, {**environment, **database, "PATH": path}, folder)


@pages_with("docker")
def test_the_code_of_a_page_about_docker_runs_and_prints_what_it_shows(
    page: Path, environment: dict[str, str], folder: Path, docker: dict[str, str]
) -> None:
    run_page(page, {**environment, **docker}, folder)


@pages_with("docker and gvisor")
def test_the_code_of_a_page_about_gvisor_runs_and_prints_what_it_shows(
    page: Path, environment: dict[str, str], folder: Path, docker: dict[str, str], gvisor: str
) -> None:
    run_page(page, {**environment, **docker}, folder)


@pages_with("podman")
def test_the_code_of_a_page_about_podman_runs_and_prints_what_it_shows(
    page: Path, environment: dict[str, str], folder: Path, podman: dict[str, str]
) -> None:
    run_page(page, {**environment, **podman}, folder)


@pages_with("incus")
def test_the_code_of_a_page_about_incus_runs_and_prints_what_it_shows(
    page: Path, environment: dict[str, str], folder: Path, incus_daemon: Incusd, incus_image: str
) -> None:
    run_page(page, {**environment, "SKERRY_PROVIDERS__INCUS__HOST": incus_daemon.address}, folder)


@pytest.fixture
def qemu(vm_cache: Path, vm_image: str, folder: Path) -> Iterator[dict[str, str]]:
    """What a reader with QEMU has: the smallest image. A page leaves no machine."""
    settings = {"cache_dir": str(vm_cache.parent), "start_timeout_s": float(_MACHINE_S)}
    yield {f"SKERRY_PROVIDERS__QEMU__{name.upper()}": str(value) for name, value in settings.items()}
    left = asyncio.run(clear(providers.load("qemu", {**settings, "state_dir": str(folder / "state/qemu")})))
    assert left == []


@pages_with("qemu")
@pytest.mark.timeout(2 * _MACHINE_S)
def test_the_code_of_a_page_about_qemu_runs_and_prints_what_it_shows(
    page: Path, environment: dict[str, str], folder: Path, qemu: dict[str, str]
) -> None:
    run_page(page, {**environment, **qemu}, folder, timeout_s=_MACHINE_S)


@pytest.mark.parametrize("page", [page for page in PAGES if needs(page) in frameworks.FRAMEWORKS], ids=named)
def test_the_code_of_a_page_about_a_framework_runs_and_prints_what_it_shows(
    page: Path, environment: dict[str, str], folder: Path
) -> None:
    name = needs(page)
    assert name is not None
    programs = frameworks.required(name) / "bin"
    env = {**environment, "PATH": f"{programs}:{environment['PATH']}"}
    run_page(page, env, folder, timeout_s=_FRAMEWORK_S, python=str(programs / "python"))


def test_every_need_of_a_page_is_known() -> None:
    known = {*frameworks.FRAMEWORKS, None, "postgresql", "docker", "docker and gvisor", "podman", "incus", "qemu"}
    assert {needs(page) for page in PAGES} <= known


def run_page(
    page: Path,
    environment: dict[str, str],
    folder: Path,
    timeout_s: float = _TIMEOUT_S,
    python: str = sys.executable,
) -> None:
    env = {**environment, "SKERRY_STATE_DIR": str(folder / "state")}
    for block in blocks(page):
        if block.file is not None:
            (folder / block.file).write_text(block.code)
        else:
            run(block, f"{named(page)}:{block.line}", env, folder, timeout_s, python)


def run(block: Block, where: str, env: dict[str, str], folder: Path, timeout_s: float, python: str) -> None:
    command = [python, "-c"] if block.language == "python" else ["sh", "-euc"]
    with subprocess.Popen(
        [*command, block.code],
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            printed, errors = process.communicate(timeout=timeout_s)
        finally:
            if process.poll() != 0:  # it hangs or has failed, and nobody ends what it has started
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, f"{where} failed:\n{printed}\n{errors}"
    if block.output is not None:
        assert matches(block.output, printed), f"{where} printed:\n{printed}\nand shows:\n{block.output}"


def test_the_generated_parts_are_as_the_code_is() -> None:
    done = subprocess.run([sys.executable, ROOT / "scripts/generate_docs", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in _LINK.findall(page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{named(page)} links to {target}"
        if anchor:
            assert anchor in anchors(file), f"{named(page)} links to {target}"


def anchors(page: Path) -> set[str]:
    """The names of a page's headings, as a forge makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_is_reached_from_the_index() -> None:
    index = ROOT / "docs/index.md"
    linked = {(index.parent / target.partition("#")[0]).resolve() for target in _LINK.findall(index.read_text())}
    assert {page for page in PAGES if page.is_relative_to(ROOT / "docs")} - {index} <= linked


def rows(page: str) -> dict[str, list[str]]:
    """The cells of each row of a page's tables, by the code in its first cell."""
    text = (ROOT / page).read_text()
    lines = re.findall(r"^\| `([^`]+)` \|(.*)\|$", text, re.MULTILINE)
    return {name: [cell.strip() for cell in cells.split("|")] for name, cells in lines}


def test_the_states_page_has_every_cause_of_end() -> None:
    assert set(Cause) <= set(rows("docs/reference/states.md"))


def test_the_verdicts_page_has_every_action_of_reconcile() -> None:
    lines = re.findall(
        r"^\|[^|]*\|[^|]*\| (\w+)[^|]*\|[^|]*\|$", (ROOT / "docs/explanation/registry.md").read_text(), re.M
    )
    assert set(lines) - {"verdict"} == set(Action)


def test_the_manager_page_has_every_statistic_of_a_pool() -> None:
    told = re.findall(r"^\| (`.+`) \|", (ROOT / "docs/reference/manager.md").read_text(), re.MULTILINE)
    names = {name for cell in told for name in re.findall(r"`(\w+)`", cell)}
    assert {field.name for field in msgspec.structs.fields(PoolStats)} <= names


def test_the_mcp_page_has_every_tool_with_its_arguments() -> None:
    functions = {tool.function.__name__: tool.function for tool in MCP_TOOLS}
    told_of = rows("docs/howto/mcp.md")
    assert set(told_of) == set(functions)
    for name, cells in told_of.items():
        parameters = list(inspect.signature(functions[name]).parameters.values())[1:]
        told = [each.name if each.default is each.empty else f"{each.name}?" for each in parameters]
        assert cells[0].strip("`").split() == told, name


def test_the_spec_page_has_every_field_and_its_default() -> None:
    told = rows("docs/reference/spec.md")
    assert list(told) == list(Spec.__struct_fields__)
    for name, cells in told.items():
        default = getattr(Spec(), name)
        assert cells[1] == (f'`"{default}"`' if default else ""), name


ASKED = {
    "image": "debian", "snapshot": "one", "runtime": "runsc", "root": "/", "writable_root": True, "memory": "64M",
    "cpus": 1, "pids": 64, "disk": "64M", "env": {"A": "1"}, "cwd": "/tmp", "user": "root", "mounts": ["/usr:/mnt:ro"],
    "data": True, "cache": "read", "cache_paths": {"a": "/a"}, "network": "host", "lifetime": 60, "idle": 60,
    "labels": {"a": "b"}, "project": "other", "name": "one", "language": "python", "command": ["true"],
    "restart": "always", "ports": [3002], "egress": "1M", "sleep_after": 60,
}  # fmt: skip


@pytest.mark.parametrize("option", ASKED)
async def test_the_spec_page_tells_which_provider_refuses_a_field(option: str) -> None:
    told = rows("docs/reference/spec.md")
    field = option + "_s" if option in ("lifetime", "idle", "sleep_after") else option
    for name, cell in zip(("local", "docker", "mock"), told[field][3:], strict=True):
        needed = {"cache_paths": "cache", "restart": "command"}.get(option, option)
        asked = {option: ASKED[option], needed: ASKED[needed]}
        assert (cell == "refused") == await refuses(name, Spec.of(provider=name, **asked)), name  # type: ignore[arg-type]


async def refuses(name: str, spec: Spec) -> bool:
    provider = providers.load(name)
    try:
        refuse_unknown(provider, spec)
        if provider.isolation is not Isolation.CONTAINER:  # an engine is not asked, as it may not be there
            await provider.enforcement(spec)
    except Unsupported:
        return True
    except SkerryError as error:
        pytest.skip(str(error))
    finally:
        await provider.aclose()
    return False


def test_the_page_about_volumes_has_every_cache_with_its_variables() -> None:
    told = rows("docs/howto/volumes.md")
    assert list(told) == list(TOOLS)
    for name, tool in TOOLS.items():
        for cell, variables in zip(told[name], (tool.write, tool.read), strict=True):
            assert set(re.findall(r"`([A-Z_]+)`", cell)) == set(variables), name


def test_the_tests_that_hold_the_requirements_of_the_documents_are_there() -> None:
    page = (ROOT / "docs/explanation/origins.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", page, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, len(rows) + 1))
    for number, row in rows:
        for file, name in re.findall(r"`([\w/.]+\.py)::(test_\w+)`", row):
            folder = "src/skerry/testing" if file.startswith("conformance/") else "tests"
            assert f"def {name}(" in (ROOT / folder / file).read_text(), f"{number}: {file}::{name}"
