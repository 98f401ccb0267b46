"""Operations: long work that goes on without whoever began it, told to its tenant alone; and images, which are some."""

from __future__ import annotations

import asyncio
import io
import json
import tarfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from surfaces.server.world import Served, serving

from skerry.errors import Conflict, ImageNotFound
from skerry.manager import identity
from skerry.model.records import Owner
from skerry.model.tenants import Principal, Scope
from skerry.providers.base import Capability, Image, ImageBuild, OnProgress, Progress
from skerry.providers.mock import Mock
from skerry.surfaces.rest import images
from skerry.surfaces.server.operations import KIND, Operation, Operations, OperationState, Tell


class Painter(Mock):
    """A mock whose boxes are made of images, which take as long as a test likes."""

    capabilities = Mock.capabilities | {Capability.IMAGES}

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Image] = []
        self.builds: list[tuple[ImageBuild, dict[str, str]]] = []
        self.archives: list[bytes] = []
        self.go = asyncio.Event()
        self.go.set()

    async def images(self) -> Sequence[Image]:
        return self.made

    async def build_image(self, build: ImageBuild, on_progress: OnProgress) -> Image:
        context = build.context
        files = {} if context is None else {path.name: path.read_text() for path in context.iterdir()}
        self.builds.append((build, files))
        for number in range(3):
            on_progress(Progress(f"step {number}", number, 3))
        await self.go.wait()
        return self._add(build.name)

    async def pull_image(self, name: str, on_progress: OnProgress) -> Image:
        if name == "never":
            raise ImageNotFound("no registry has it")
        return self._add(name)

    async def import_image(self, source: Path, name: str, on_progress: OnProgress) -> Image:
        self.archives.append(source.read_bytes())
        return self._add(name)

    async def remove_image(self, name: str, *, force: bool = False) -> None:
        if name == "used/by:one":
            raise Conflict("it is used by sandbox 1234")
        self.made = [each for each in self.made if name not in each.names]

    def _add(self, name: str) -> Image:
        self.made.append(Image(id=f"sha256:{len(self.made)}", names=(name,), used_by=3))
        return self.made[-1]


@pytest.fixture
def painter() -> Painter:
    return Painter()


@pytest.fixture
async def gallery(tmp_path: Path, own_registry: None, painter: Painter) -> AsyncIterator[Served]:
    async with serving(tmp_path, painter) as served:
        yield served


PRINCIPAL = Principal(actor="token:1", tenant="acme", scopes=frozenset(Scope))


async def ended(client: httpx.AsyncClient, location: str) -> dict[str, Any]:
    found: dict[str, Any] = (await client.get(f"{location}?wait_s=20")).json()
    return found


async def events(client: httpx.AsyncClient, path: str, **headers: str) -> list[tuple[str, str, Any]]:
    """Events until the stream ends: name, id and data."""
    found: list[tuple[str, str, Any]] = []
    now: dict[str, str] = {}
    async with client.stream("GET", path, headers=headers) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        async for line in answer.aiter_lines():
            if line and not line.startswith(":"):
                name, _, value = line.partition(": ")
                now[name] = value
            elif now:
                found.append((now.get("event", ""), now.get("id", ""), json.loads(now["data"])))
                now = {}
    return found


async def test_a_build_is_an_operation_that_tells_how_it_goes(gallery: Served, painter: Painter) -> None:
    client = await gallery.client("acme", Scope.READ, Scope.IMAGES)
    painter.go.clear()
    answer = await client.post("/v1/images/build", json={"dockerfile": "FROM scratch", "name": "mine:1"})
    location = answer.headers["location"]
    assert (answer.status_code, answer.json()["state"]) == (202, "running")
    following = asyncio.create_task(events(client, f"{location}/events"))
    painter.go.set()
    found = await ended(client, location)
    assert (found["state"], found["result"]["names"], found["problem"]) == ("done", ["mine:1"], None)
    told = await following
    assert [(name, id) for name, id, _ in told] == [
        ("progress", "1"),
        ("progress", "2"),
        ("progress", "3"),
        ("end", ""),
    ]
    assert told[-1][2]["state"] == "done"
    assert [(step["message"], step["done"], step["total"]) for _, _, step in told[:2]] == [
        ("step 0", 0, 3),
        ("step 1", 1, 3),
    ]
    again = await events(client, f"{location}/events", **{"last-event-id": "2"})
    assert [(name, id) for name, id, _ in again] == [("progress", "3"), ("end", "")]


async def test_an_operation_is_cancelled_by_whoever_may_begin_it(gallery: Served, painter: Painter) -> None:
    client = await gallery.client("acme", Scope.READ, Scope.IMAGES)
    reader = await gallery.client("acme", Scope.READ)
    painter.go.clear()
    location = (await client.post("/v1/images/build", json={"dockerfile": "FROM scratch"})).headers["location"]
    assert (await reader.post(f"{location}/cancel", json={})).status_code == 403
    await client.post(f"{location}/cancel", json={})
    assert (await ended(client, location))["state"] == "cancelled"
    assert (await client.post(f"{location}/cancel", json={})).json()["state"] == "cancelled"


async def test_a_failure_is_told_as_its_problem(gallery: Served) -> None:
    client = await gallery.client("acme", Scope.READ, Scope.IMAGES)
    found = (await client.post("/v1/images/pull?wait_s=20", json={"name": "never"})).json()
    assert (found["state"], found["problem"]["code"]) == ("failed", "image_not_found")


async def test_the_same_key_again_gives_the_same_operation(gallery: Served, painter: Painter) -> None:
    client = await gallery.client("acme", Scope.READ, Scope.IMAGES)
    headers = {"idempotency-key": "once"}
    first, second = [
        (await client.post("/v1/images/pull", json={"name": "a"}, headers=headers)).json() for _ in range(2)
    ]
    assert first["id"] == second["id"]
    await ended(client, f"/v1/operations/{first['id']}")
    assert len(painter.made) == 1
    assert (await client.post("/v1/images/pull", json={"name": "b"}, headers=headers)).status_code == 409


async def test_operations_of_another_tenant_are_unknown(gallery: Served) -> None:
    ours = await gallery.client("acme", Scope.READ, Scope.IMAGES)
    theirs = await gallery.client("other", Scope.READ, Scope.IMAGES)
    id = (await ours.post("/v1/images/pull?wait_s=20", json={"name": "a"})).json()["id"]
    assert [each["id"] for each in (await ours.get("/v1/operations?kind=image")).json()["items"]] == [id]
    assert (await theirs.get("/v1/operations")).json()["items"] == []
    for method, path in (("GET", ""), ("GET", "/events"), ("POST", "/cancel")):
        body = {} if method == "POST" else None
        answer = await theirs.request(method, f"/v1/operations/{id}{path}", json=body)
        never = await theirs.request(method, f"/v1/operations/none{path}", json=body)
        assert answer.status_code == never.status_code == 404
        assert answer.json()["detail"].replace(id, "") == never.json()["detail"].replace("none", "")
    owner = await gallery.client()
    assert (await owner.get(f"/v1/operations/{id}")).json()["project"] == "acme"


async def test_an_operation_ends_with_its_server_and_is_told_as_interrupted(gallery: Served) -> None:
    store = gallery.server.manager.store
    first, second = Operations(store), Operations(store)

    async def work(tell: Tell) -> None:
        tell("begun")
        await asyncio.Event().wait()

    made = await first.begin("image.build", "x", work, principal=PRINCIPAL, scope=Scope.IMAGES)
    assert (await second.get(store, made.id)).state is OperationState.RUNNING
    await first.aclose()
    found = await second.get(store, made.id)
    assert (found.state, [step.message for step in found.steps]) == (OperationState.INTERRUPTED, ["begun"])
    await second.aclose()


async def test_one_whose_caller_goes_while_it_is_begun_runs_all_the_same(
    gallery: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = gallery.server.manager.store
    operations = Operations(store)
    is_written, go = asyncio.Event(), asyncio.Event()
    add = operations._all.add

    async def slow(*args: Any, **options: Any) -> Any:
        added = await add(*args, **options)
        is_written.set()
        await go.wait()
        return added

    monkeypatch.setattr(operations._all, "add", slow)
    call = operations.begin("image.pull", "x", _nothing, principal=PRINCIPAL, scope=Scope.IMAGES)
    beginning = asyncio.create_task(call)
    await is_written.wait()
    beginning.cancel()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await beginning
    (found,) = await operations.list(store)
    assert (await operations.wait(store, found.id, 20)).state is OperationState.DONE
    await operations.aclose()


async def test_what_a_killed_server_left_is_interrupted_and_forgotten_after_a_day(gallery: Served) -> None:
    store = gallery.server.manager.store
    operations = Operations(store)
    me = identity.this_process()
    dead = msgspec.structs.replace(me, pid=me.pid, started=me.started + 1)
    seen_at = time.time() - 120
    now = Operation(
        id="1", kind="fleet.up", target="crew", scope=Scope.CREATE, actor="token:1", project="acme", maker=dead,
        server="gone", created_at=seen_at, seen_at=seen_at,
    )  # fmt: skip
    documents = store.documents(KIND, Operation)
    await documents.add("1", now, project="acme")
    elsewhere = msgspec.structs.replace(now, id="2", maker=Owner(host="a/b/c", pid=1, started=1))
    await documents.add("2", elsewhere, project="acme")
    for id in ("1", "2"):
        found = await operations.get(store, id)
        assert (found.state, found.problem and found.problem.code) == (OperationState.INTERRUPTED, "interrupted")
    await documents.replace("1", msgspec.structs.replace(now, seen_at=seen_at - 86400))
    made = await operations.begin("image.pull", "x", _nothing, principal=PRINCIPAL, scope=Scope.IMAGES)
    await operations.wait(store, made.id, 20)
    assert [each.id for each in await operations.list(store)] == [made.id, "2"]
    await operations.aclose()


async def test_one_of_another_server_is_followed_and_cancelled_through_the_registry(
    gallery: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skerry.surfaces.server.operations._BEAT_S", 0.01)
    monkeypatch.setattr("skerry.surfaces.server.operations._POLL_S", 0.01)
    store = gallery.server.manager.store
    first, second = Operations(store), Operations(store)

    async def work(tell: Tell) -> None:
        tell("begun")
        await asyncio.Event().wait()

    made = await first.begin("image.build", "x", work, principal=PRINCIPAL, scope=Scope.IMAGES)
    assert (await second.cancel(store, made.id)).state is OperationState.RUNNING
    told = [each async for each in second.follow(store, made.id)]
    assert isinstance(told[-1], Operation)
    assert told[-1].state is OperationState.CANCELLED
    for each in (first, second):
        await each.aclose()


async def test_steps_are_bounded_and_told_from_any_thread(gallery: Served) -> None:
    store = gallery.server.manager.store
    operations = Operations(store)

    async def work(tell: Tell) -> None:
        def busy() -> None:
            for number in range(2000):
                tell(f"{number} " + "x" * 1000)

        await asyncio.to_thread(busy)

    made = await operations.begin("image.build", "x", work, principal=PRINCIPAL, scope=Scope.IMAGES)
    found = await operations.wait(store, made.id, 20)
    assert (found.told, len(found.steps), len(found.steps[-1].message)) == (2000, 100, 500)
    await operations.aclose()


async def test_a_tenant_runs_only_so_many_at_a_time(gallery: Served, painter: Painter) -> None:
    client, other = [await gallery.client(name, Scope.READ, Scope.IMAGES) for name in ("acme", "other")]
    painter.go.clear()
    body = {"dockerfile": "FROM scratch"}
    answers = [await client.post("/v1/images/build", json=body) for _ in range(17)]
    assert [answer.status_code for answer in answers] == [202] * 16 + [429]
    assert (await other.post("/v1/images/build", json=body)).status_code == 202
    painter.go.set()


async def _nothing(tell: Tell) -> None:
    """Work that is done at once."""


async def test_images_are_listed_by_all_and_changed_with_a_scope(gallery: Served, painter: Painter) -> None:
    reader = await gallery.client("acme")
    writer = await gallery.client("other", Scope.READ, Scope.IMAGES)
    await writer.post("/v1/images/pull?wait_s=20", json={"name": "docker.io/library/a:1"})
    (found,) = (await reader.get("/v1/images")).json()["items"]
    assert (found["names"], found["used_by"]) == (["docker.io/library/a:1"], None)
    owner = await gallery.client()
    assert (await owner.get("/v1/images")).json()["items"][0]["used_by"] == 3
    for method, path in (("POST", "build"), ("POST", "pull"), ("POST", "import?name=a"), ("DELETE", "a")):
        body = {"name": "x"} if method == "POST" else None
        assert (await reader.request(method, f"/v1/images/{path}", json=body)).status_code == 403
    assert (await writer.delete("/v1/images/docker.io/library/a:1")).status_code == 204
    assert painter.made == []
    conflict = await writer.delete("/v1/images/used/by:one")
    assert (conflict.status_code, "1234" in conflict.text) == (409, False)


async def test_an_archive_is_sent_and_becomes_an_image(gallery: Served, painter: Painter, tmp_path: Path) -> None:
    client = await gallery.client("acme", Scope.READ, Scope.IMAGES)

    async def body() -> AsyncIterator[bytes]:
        for _ in range(64):
            yield b"x" * 65536

    found = (await client.post("/v1/images/import?name=mine&wait_s=20", content=body())).json()
    assert (found["state"], found["result"]["names"]) == ("done", ["mine"])
    assert painter.archives == [b"x" * (64 * 65536)]
    assert [*Path(gallery.server.config.state_dir, "uploads").iterdir()] == []
    assert (await client.post("/v1/images/import?name=mine", content=b"")).status_code == 400


async def test_an_archive_leaves_room_for_the_registry(gallery: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    client = await gallery.client("acme", Scope.READ, Scope.IMAGES)
    monkeypatch.setattr(images, "_LEFT_FREE", 1 << 60)
    answer = await client.post("/v1/images/import?name=mine", content=b"x")
    assert (answer.status_code, answer.json()["code"]) == (507, "disk_full")
    assert [*Path(gallery.server.config.state_dir, "uploads").iterdir()] == []


def context_of(**files: str) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
        archive.addfile(link)
    return packed.getvalue()


async def test_a_context_is_sent_and_built(gallery: Served, painter: Painter) -> None:
    client = await gallery.client("acme", Scope.READ, Scope.IMAGES)
    body = context_of(Dockerfile="FROM scratch\nCOPY a /", a="data")
    found = await client.post("/v1/images/build/context?name=mine&arg=A=1&wait_s=20", content=body)
    assert found.json()["state"] == "done", found.text
    ((build, files),) = painter.builds
    assert (build.dockerfile.splitlines()[0], build.args, files["a"]) == ("FROM scratch", {"A": "1"}, "data")
    assert [*Path(gallery.server.config.state_dir, "uploads").iterdir()] == []


@pytest.mark.parametrize("dockerfile", ["link", "../../../../../etc/hostname", "/etc/hostname", "missing"])
async def test_a_dockerfile_of_the_host_is_not_read(gallery: Served, dockerfile: str) -> None:
    client = await gallery.client("acme", Scope.READ, Scope.IMAGES)
    query = {"name": "mine", "dockerfile": dockerfile, "wait_s": 20}
    found = (await client.post("/v1/images/build/context", params=query, content=context_of(a="b"))).json()
    assert (found["state"], found["problem"]["code"]) == ("failed", "invalid_spec")


async def test_a_folder_of_the_host_is_no_context_of_a_tenant(gallery: Served) -> None:
    client = await gallery.client("acme", Scope.READ, Scope.IMAGES)
    body = {"dockerfile": "FROM scratch", "context": "/etc"}
    assert (await client.post("/v1/images/build", json=body)).status_code == 403
