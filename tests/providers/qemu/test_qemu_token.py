"""A machine whose channel every user of the host could connect to: it demands a token. The channel here is a port of
the machine, as few hosts have the kernel's vsock; all else is as with vsock."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from skerry.errors import AgentUnreachable
from skerry.model.spec import Spec
from skerry.providers.qemu import Qemu, QemuConfig
from skerry.sandbox.sandbox import AsyncSandbox
from skerry.vm import guest
from skerry.vm.base import AGENT_PORT, CONTROL_PORT, Hypervisor
from skerry.vm.qemu.hypervisor import QemuHypervisor

pytestmark = pytest.mark.timeout(240)


class _Demanding(Qemu):
    def hypervisor(self, cache: Path) -> Hypervisor:
        made = super().hypervisor(cache)
        assert isinstance(made, QemuHypervisor)
        made._demands_token = True
        return made

    @property
    def flavour(self) -> str:
        return "token"


@pytest.fixture
async def demanding(config: QemuConfig) -> AsyncIterator[_Demanding]:
    provider = _Demanding(config)
    yield provider
    for id in await provider.discover():
        await provider.destroy(id, volumes=True)
    await provider.aclose()


def first_words(path: Path, port: int, line: bytes) -> bytes:
    """What a guest says to a stranger at its channel who begins with that line."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(20)
        connection.connect(str(path))
        connection.sendall(b"CONNECT %d\n" % port)
        while connection.recv(1) != b"\n":
            pass
        connection.sendall(line)
        return connection.recv(4096)


async def test_a_machine_with_a_token_hears_only_who_has_it(demanding: _Demanding) -> None:
    boxes = [await AsyncSandbox.create(Spec(provider="qemu", data=False), demanding) for _ in range(2)]
    try:
        folders = [demanding._box(box.id).vm for box in boxes]
        tokens = [folder.read_token() for folder in folders]
        assert len({*tokens}) == 2
        assert None not in tokens
        for folder, token in zip(folders, tokens, strict=True):
            assert (folder.path / "token").stat().st_mode & 0o777 == 0o600
            vm = folder.read()
            assert vm is not None
            assert vm.vmm is not None
            assert token is not None
            assert token.encode() not in Path(f"/proc/{vm.vmm.pid}/cmdline").read_bytes()
        for box in boxes:
            assert (await box.exec("echo in")).text == "in\n"
            assert (await box.exec("id -u", user="root")).text == "0\n"
        channel = folders[0]._socket()
        for port in (CONTROL_PORT, AGENT_PORT):
            for line in (
                b'{"id":1,"method":"hello","params":{"protocol":1}}\n',
                b'{"id":1,"method":"hello","params":{"protocol":1,"token":"%s"}}\n' % str(tokens[1]).encode(),
                b'{"id":1,"method":"exec","params":{"cmd":"id"}}\n',
                b'{"id":1,"method":"auth","params":{"token":"guess"}}\n',
            ):
                assert first_words(channel, port, line) == b""
        (folders[0].path / "token").unlink()
        with pytest.raises(AgentUnreachable):
            await guest.greet(folders[0], 20)
        folders[0].write_token(str(tokens[0]))
        await demanding.stop(boxes[0].id)
        await demanding.start(boxes[0].id, boxes[0].spec)
        assert (await boxes[0].exec("echo again")).text == "again\n"
        assert folders[0].read_token() not in tokens
    finally:
        for box in boxes:
            await box.destroy(volumes=True)


async def test_a_client_of_the_documents_works_with_a_machine(qemu: Qemu) -> None:
    """It connects to the machine's vsock socket, says CONNECT 52, and then JSON-RPC lines."""
    box = await AsyncSandbox.create(Spec(provider="qemu", data=False), qemu)
    try:
        channel = qemu._box(box.id).vm._socket()
        line = b'{"jsonrpc":"2.0","id":1,"method":"exec","params":{"cmd":"echo $((6 * 7)); id -u"}}\n'
        answer = first_words(channel, AGENT_PORT, line)
        assert answer == b'{"jsonrpc":"2.0","id":1,"result":{"exit_code":0,"stdout":"42\\n1000\\n","stderr":""}}\n'
    finally:
        await box.destroy(volumes=True)
