"""A server as a process: how it ends, reads its settings again, and comes back after kill -9."""

from __future__ import annotations

import asyncio
import datetime
import signal
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from manager.world import until
from surfaces.server.process import ServeProcess

from skerry.config import load
from skerry.ledger.verify import verify
from skerry.manager.manager import AsyncSandboxManager

LIVE = 12


@pytest.fixture
async def process(folder: Path, own_registry: None) -> AsyncIterator[ServeProcess]:
    """A server on `local`, in a folder that has to hold no box at the end."""
    async with ServeProcess(folder, env={"SKERRY_STATE_DIR": str(folder)}) as process:
        yield process


async def make(client: httpx.AsyncClient, **spec: object) -> str:
    answer = await client.post("/v1/sandboxes", json=spec)
    assert answer.status_code == 201, answer.text
    id: str = answer.json()["id"]
    return id


async def execute(client: httpx.AsyncClient, id: str, *command: str) -> str:
    answer = await client.post(f"/v1/sandboxes/{id}/exec", json={"command": [*command]})
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["stdout"]
    return text


async def remove(client: httpx.AsyncClient, *ids: str) -> None:
    for id in ids:
        assert (await client.delete(f"/v1/sandboxes/{id}?grace_s=0")).status_code == 204


async def exists(client: httpx.AsyncClient, id: str, path: str) -> bool:
    return (await client.get(f"/v1/sandboxes/{id}/files/stat?path={path}")).status_code == 200


async def is_draining(process: ServeProcess) -> bool:
    """Whether it takes no more connections."""
    try:
        async with process.client() as client:
            await client.get("/healthz")
    except httpx.TransportError:
        return True
    return False


async def test_told_to_end_it_lets_calls_come_to_their_end_and_sandboxes_live_on(process: ServeProcess) -> None:
    async with process.client() as client:
        id = await make(client)
        script = "touch begun; while [ ! -e go ]; do sleep 0.02; done; echo done"
        call = asyncio.create_task(execute(client, id, "sh", "-c", script))
        async with process.client() as other:
            await until(lambda: exists(other, id, "begun"))
        process.signal(signal.SIGTERM)
        await until(lambda: is_draining(process))
        async with AsyncSandboxManager(load({"state_dir": str(process.folder), "provider": "local"})) as manager:
            await manager.write_file(id, "go", b"")
        assert await call == "done\n"
    assert await process.ended() == 0
    await process.start()
    async with process.client() as client:
        assert await execute(client, id, "echo", "hello") == "hello\n"
        await remove(client, id)


async def test_a_second_signal_ends_it_at_once(process: ServeProcess) -> None:
    async with process.client() as client:
        id = await make(client)
        call = asyncio.create_task(execute(client, id, "sh", "-c", "touch begun; sleep 600"))
        async with process.client() as other:
            await until(lambda: exists(other, id, "begun"))
        process.signal(signal.SIGTERM)
        await until(lambda: is_draining(process))
        process.signal(signal.SIGINT)
        assert await process.ended() == 128 + signal.SIGINT
        with pytest.raises((httpx.TransportError, AssertionError)):  # it breaks off, or says that it was interrupted
            await call
    await process.start()
    async with process.client() as client:
        await remove(client, id)


async def test_calls_that_come_to_no_end_are_cut_off(folder: Path, own_registry: None) -> None:
    async with ServeProcess(folder, env={"SKERRY_STATE_DIR": str(folder)}, drain_s=0.2) as process:
        async with process.client() as client:
            id = await make(client)
            call = asyncio.create_task(execute(client, id, "sh", "-c", "touch begun; sleep 600"))
            async with process.client() as other:
                await until(lambda: exists(other, id, "begun"))
            process.signal(signal.SIGTERM)
            assert await process.ended() == 0
            with pytest.raises((httpx.TransportError, AssertionError)):
                await call
        await process.start()
        async with process.client() as client:
            await remove(client, id)


def certificate(folder: Path, name: str) -> tuple[str, str]:
    """A certificate of our own for localhost, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    cert_file, key_file = folder / f"{name}.pem", folder / f"{name}.key"
    cert_file.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    private = serialization.PrivateFormat.PKCS8
    key_file.write_bytes(key.private_bytes(serialization.Encoding.PEM, private, serialization.NoEncryption()))
    return str(cert_file), str(key_file)


async def shown(port: int) -> str:
    """The name in the certificate that a server shows."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    finally:
        writer.close()
        await writer.wait_closed()
    name = x509.load_der_x509_certificate(der).subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value
    return str(name)


async def test_settings_are_read_again_and_connections_go_on(tmp_path: Path, own_registry: None) -> None:
    old, new = certificate(tmp_path, "old"), certificate(tmp_path, "new")
    settings = {"tls_cert": old[0], "tls_key": old[1]}
    process = ServeProcess(tmp_path / "s", env={"SKERRY_PROVIDER": "mock", "SKERRY_LOG": "info"}, **settings)
    context = ssl.create_default_context(cafile=old[0])
    async with process, httpx.AsyncClient(verify=context, trust_env=False) as client:
        url = f"https://localhost:{process.port}"
        assert (await client.get(f"{url}/healthz")).status_code == 200
        assert await shown(process.port) == "old"
        listen = [f"127.0.0.1:{process.port}"]
        process.write({"listen": listen, "tls_cert": new[0], "tls_key": new[1], "hosts": ["boxes.example"], "rate": 1})
        assert (await client.get(f"{url}/openapi.json", headers={"host": "boxes.example"})).status_code == 421
        process.signal(signal.SIGHUP)

        async def has_new() -> bool:
            return await shown(process.port) == "new"

        await until(has_new)
        # on the connection from before: its certificate is the old one, its settings are the new ones
        assert (await client.get(f"{url}/v1/sandboxes", headers={"host": "boxes.example"})).status_code == 401
        async with process.client() as admin:
            assert 429 in [(await admin.get("/v1/sandboxes")).status_code for _ in range(4)]
        process.write({"listen": listen, "tls_cert": str(tmp_path / "none"), "tls_key": "", "rate": 500})
        process.signal(signal.SIGHUP)

        async def was_refused() -> bool:
            return "the settings stay as they were" in process.log()

        await until(was_refused)
        assert await shown(process.port) == "new"


async def test_after_kill_9_under_load_every_sandbox_is_there_and_the_ledger_is_whole(process: ServeProcess) -> None:
    async with process.client() as client:
        ids = await asyncio.gather(*(make(client, name=f"box-{n}") for n in range(LIVE)))
        for id in ids:
            await execute(client, id, "sh", "-c", "echo kept > file")

        async def keep_busy(id: str) -> None:
            while True:
                await execute(client, id, "sh", "-c", "cat file; head -c 100000 /dev/urandom | base64")

        async def read_stream(id: str) -> None:
            body = {"command": ["sh", "-c", "touch streams; while :; do echo line; sleep 0.01; done"]}
            async with client.stream("POST", f"/v1/sandboxes/{id}/exec/stream", json=body) as stream:
                async for _ in stream.aiter_lines():
                    pass
            raise AssertionError("it ended as if all were well")

        load = [asyncio.create_task(keep_busy(id)) for id in ids[: LIVE // 2]]
        load += [asyncio.create_task(read_stream(id)) for id in ids[LIVE // 2 :]]
        async with process.client() as other:
            await until(lambda: exists(other, ids[-1], "streams"))
        await process.kill()
        ended = await asyncio.gather(*load, return_exceptions=True)
        assert all(isinstance(each, httpx.TransportError) for each in ended), ended
    await process.start()
    async with process.client() as client:
        listed = (await client.get("/v1/sandboxes")).json()["items"]
        assert {each["id"]: each["state"] for each in listed} == dict.fromkeys(ids, "ready")
        assert [await execute(client, id, "cat", "file") for id in ids] == ["kept\n"] * LIVE
        await remove(client, *ids)
    process.signal(signal.SIGTERM)
    assert await process.ended() == 0
    found = verify(process.folder / "ledger")
    assert not found.problems
