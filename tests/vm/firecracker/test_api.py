"""The client of Firecracker's API: it asks what the API's description allows, and what goes wrong has a name."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import inspect as shapes

from skerry.errors import LimitReached, ProviderError
from skerry.net.http import Answer
from skerry.vm.firecracker import api as model
from skerry.vm.firecracker.api import Api, ApiRefused, Gone
from vm.firecracker.installing import StandIns, api_description
from vm.firecracker.swagger import Description

_PATIENCE_S = 20.0
_DESCRIPTION = Description(api_description())


def _values(shape: shapes.Type) -> st.SearchStrategy[Any]:
    """Anything that the model allows."""
    match shape:
        case shapes.StrType(pattern=str() as pattern):
            return st.from_regex(pattern.replace("$", r"\Z"))
        case shapes.StrType(min_length=least):
            return st.text(min_size=least or 0, max_size=20)
        case shapes.BoolType():
            return st.booleans()
        case shapes.IntType(ge=least, le=most):
            return st.integers(least, most)
        case shapes.NoneType():
            return st.none()
        case shapes.LiteralType(values=values):
            return st.sampled_from(values)
        case shapes.UnionType(types=types):
            return st.one_of([_values(each) for each in types])
        case shapes.ListType(item_type=item):
            return st.lists(_values(item), max_size=3)
        case shapes.StructType(cls=cls, fields=fields):
            return st.builds(cls, **{field.name: _values(field.type) for field in fields})
    raise AssertionError(f"a type that this test cannot make: {shape}")


_BODIES = {body.__name__: body for body in model.Body.__subclasses__()}


class _Recorder:
    def __init__(self) -> None:
        self.asked: list[tuple[str, str, Any]] = []

    async def request(self, method: str, path: str, *, json: Any = None, timeout_s: float | None = None) -> Answer:
        self.asked.append((method, path, None if json is None else msgspec.to_builtins(json)))
        return Answer(204, {}, b"")


@pytest.mark.parametrize("name", ["instance", *sorted(_BODIES)])
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(data=st.data())
def test_every_request_is_one_that_the_description_allows(name: str, data: st.DataObject) -> None:
    body = data.draw(_values(shapes.type_info(_BODIES[name]))) if name in _BODIES else None
    recorder = _Recorder()

    async def ask() -> None:
        api = Api(Path("/none"))
        api._http = recorder  # type: ignore[assignment]
        with contextlib.suppress(ProviderError):  # an empty answer is none to a question
            await (api.instance() if body is None else api.send(body))

    asyncio.run(ask())
    ((method, path, sent),) = recorder.asked
    assert _DESCRIPTION.problems(method, path, sent) == []


def test_the_client_knows_every_body_of_the_model() -> None:
    assert len({(body.method, body.path) for body in _BODIES.values()}) == len(_BODIES) == 9


@pytest.mark.parametrize(
    "body",
    [
        {"vcpu_count": 33, "mem_size_mib": 128},
        {"vcpu_count": True, "mem_size_mib": 128},
        {"vcpu_count": 1},
        {"vcpu_count": 1, "mem_size_mib": 128, "bogus": 1},
        {"vcpu_count": 1, "mem_size_mib": 128, "huge_pages": "1G"},
        [],
        None,
    ],
)
def test_the_validator_finds_what_is_wrong(body: Any) -> None:
    wrong = _DESCRIPTION.problems("PUT", "/machine-config", body)
    assert wrong or body is None
    assert _DESCRIPTION.problems("PUT", "/vsock", body)
    assert _DESCRIPTION.problems("POST", "/vsock", body)
    assert _DESCRIPTION.problems("GET", "/nope", None)


async def test_a_body_that_the_model_does_not_allow_is_not_sent() -> None:
    api = Api(Path("/none"))
    recorder = _Recorder()
    api._http = recorder  # type: ignore[assignment]
    with pytest.raises(ProviderError, match="Vsock"):
        await api.send(model.Vsock(guest_cid=2, uds_path="v.sock"))
    with pytest.raises(ProviderError, match="Drive"):
        await api.send(model.DriveBody(drive_id="a/b", is_root_device=False, path_on_host="x", is_read_only=True))
    assert recorder.asked == []


@contextlib.asynccontextmanager
async def _server(folder: Path, answer: bytes) -> AsyncIterator[Api]:
    """Takes a request, says this, and hangs up."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    server = await asyncio.start_unix_server(serve, folder / "api.sock")
    async with server:
        yield Api(folder / "api.sock", timeout_s=_PATIENCE_S)


def _answer(status: str, body: str) -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ('{"fault_message":"The kernel file cannot be opened"}', "The kernel file cannot be opened"),
        ('{ "error": "Too long.\nAll previous requests will be dropped." }', "Too long. All previous requests"),
        ("no JSON at all", "no JSON at all"),
        ("[1]", r"\[1\]"),
        ('{"fault_message":"clear \\u001b[2J it"}', r"clear \\x1b\[2J it"),
        (json.dumps({"fault_message": "x" * 100_000}), "x{500}$"),
        ("x" * 100_000, "x{500}$"),
        ("[" * 30_000, r"\[{500}$"),
    ],
)
async def test_a_refusal_is_told_in_firecrackers_own_words(short_folder: Path, body: str, reason: str) -> None:
    async with _server(short_folder, _answer("400 ", body)) as api:
        with pytest.raises(ApiRefused, match=f"refused PATCH /vm with 400: {reason}") as caught:
            await api.send(model.VmState(state="Paused"))
    assert caught.value.status == 400


async def test_too_many_connections_can_be_tried_again(short_folder: Path) -> None:
    async with _server(short_folder, _answer("503", '{ "error": "Too many open connections" }')) as api:
        with pytest.raises(LimitReached):
            await api.instance()


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 2", b'HTTP/1.1 200 \r\nContent-Length: 90\r\n\r\n{"id"', b"SSH-2\r\n\r\n"]
)
async def test_an_answer_that_is_cut_short_is_a_process_that_ended(short_folder: Path, answer: bytes) -> None:
    async with _server(short_folder, answer) as api:
        with pytest.raises(Gone, match="ended while it answered GET /: "):
            await api.instance()


async def test_a_socket_that_nobody_listens_on_is_a_process_that_is_gone(short_folder: Path) -> None:
    with pytest.raises(Gone, match="does not answer GET /: "):
        await Api(short_folder / "none.sock").instance()


@pytest.mark.parametrize("body", ['{"id": 1}', '{"id": ' + "[" * 30_000])
async def test_an_answer_that_makes_no_sense_is_no_answer(short_folder: Path, body: str) -> None:
    async with _server(short_folder, _answer("200 ", body)) as api:
        with pytest.raises(ProviderError, match="cannot be used"):
            await api.instance()


@pytest.fixture
def api(stand_ins: StandIns, short_folder: Path) -> Iterator[Api]:
    """Of a fresh process."""
    argv = [stand_ins.firecracker, "--api-sock", "api.sock", "--id", "t"]
    with subprocess.Popen(argv, cwd=short_folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        assert b"started" in process.stdout.readline()
        yield Api(short_folder / "api.sock")
        process.kill()


async def test_a_hundred_calls_at_once_never_need_more_connections_than_there_are(api: Api) -> None:
    found = await asyncio.gather(*(api.instance() for _ in range(100)))
    assert {info.state for info in found} == {"Not started"}


async def test_what_can_be_asked_of_a_fresh_process(api: Api, short_folder: Path) -> None:
    assert (await api.instance()).vmm_version == "1.17.0-dev"
    await api.send(model.MachineConfigBody(vcpu_count=2, mem_size_mib=256))
    await api.send(model.Vsock(guest_cid=3, uds_path="v.sock"))
    assert (await api.instance()).state == "Not started"


_NOT_YET: list[Callable[[Api], Any]] = [
    lambda api: api.send(model.VmState(state="Paused")),
    lambda api: api.send(model.DriveUpdate(drive_id="r", path_on_host="r")),
    lambda api: api.send(model.SnapshotCreate(snapshot_path="s", mem_file_path="m")),
]


@pytest.mark.parametrize("ask", _NOT_YET)
async def test_what_needs_a_running_machine_is_refused_before_it_runs(api: Api, ask: Callable[[Api], Any]) -> None:
    with pytest.raises(ApiRefused, match="not supported before starting"):
        await ask(api)


_TOO_LATE: list[Callable[[Api], Any]] = [
    lambda api: api.send(model.MachineConfigBody(vcpu_count=1, mem_size_mib=128)),
    lambda api: api.send(model.BootSource(kernel_image_path="kernel")),
    lambda api: api.send(model.Vsock(guest_cid=3, uds_path="w.sock")),
    lambda api: api.send(model.InstanceAction(action_type="InstanceStart")),
    lambda api: api.send(_load("s", "m")),
]


def _load(state: str, memory: str) -> model.SnapshotLoad:
    backend = model.MemoryBackend(backend_type="File", backend_path=memory)
    return model.SnapshotLoad(snapshot_path=state, mem_backend=backend, resume_vm=True)


@pytest.mark.parametrize("ask", _TOO_LATE)
async def test_what_makes_a_machine_is_refused_once_it_runs(
    api: Api, short_folder: Path, ask: Callable[[Api], Any]
) -> None:
    await _boot(api, short_folder)
    with pytest.raises(ApiRefused, match="not supported after starting"):
        await ask(api)


async def _boot(api: Api, folder: Path) -> None:
    (folder / "kernel").write_bytes(b"\x7fELF")
    await api.send(model.BootSource(kernel_image_path="kernel"))
    await api.send(model.Vsock(guest_cid=3, uds_path="v.sock"))
    await api.send(model.InstanceAction(action_type="InstanceStart"))
    assert (await api.instance()).state == "Running"


async def test_a_machine_is_saved_only_while_it_is_paused(api: Api, short_folder: Path) -> None:
    await _boot(api, short_folder)
    files = model.SnapshotCreate(snapshot_type="Full", snapshot_path="s", mem_file_path="m")
    with pytest.raises(ApiRefused, match="while running"):
        await api.send(files)
    await api.send(model.VmState(state="Paused"))
    await api.send(files)
    assert json.loads((short_folder / "s").read_text())["machine"]["vcpu_count"] == 1


async def test_a_process_that_was_configured_loads_no_snapshot(api: Api) -> None:
    await api.send(model.MachineConfigBody(vcpu_count=1, mem_size_mib=128))
    with pytest.raises(ApiRefused, match="not allowed after configuring"):
        await api.send(_load("s", "m"))
    assert (await api.instance()).state == "Not started"


async def test_a_process_ends_after_a_restore_that_failed(api: Api) -> None:
    with pytest.raises(ApiRefused, match="Load snapshot error"):
        await api.send(_load("s", "m"))
    with pytest.raises(Gone):
        await api.instance()
