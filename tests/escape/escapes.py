"""Ways out of a box, which every provider has to have closed."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import ClassVar

import pytest

from skerry.errors import SkerryError
from skerry.model.spec import Spec
from skerry.providers.base import Provider
from skerry.sandbox.sandbox import AsyncSandbox

from . import catalogue, host
from .attempts import NETWORK, PYTHON, SECRET, meaning, of_the_host, tried
from .boxes import Boxes, Make, with_rules
from .catalogue import judged

LOW_PORT = "G47"
ON_X86 = pytest.mark.skipif(os.uname().machine != "x86_64", reason="the probe knows only the call numbers of x86_64")


class CatalogueCases(Boxes):
    """The whole catalogue, as it is published."""

    column: ClassVar[str]
    python: ClassVar[Sequence[str]] = PYTHON
    """The command of the box that runs the probe."""

    @ON_X86
    @pytest.mark.timeout(600)
    async def test_every_case_of_the_catalogue_ends_as_published(
        self,
        make: Make,
        provider: Provider,
        tmp_path_factory: pytest.TempPathFactory,
        monkeypatch: pytest.MonkeyPatch,
        record_property: Callable[[str, object], None],
    ) -> None:
        monkeypatch.setenv(SECRET, "qwertz-12345")
        before = host.state()
        with of_the_host(tmp_path_factory.mktemp("host")) as facts:
            ends = await self.ends(make, provider, facts)
        assert host.state() == before
        verdicts = judged(self.column, {id: meaning(id, end) for id, end in ends.items()})
        record_property(self.column, verdicts)
        differing = catalogue.differing(self.column, verdicts)
        assert {id: (*pair, ends.get(id)) for id, pair in differing.items()} == {}

    async def ends(self, make: Make, provider: Provider, facts: Sequence[str]) -> dict[str, str]:
        limits_memory = bool((await provider.enforcement(Spec.of(**self.options)))["memory"].by)
        return await tried(make, facts, self.python, limits_memory)

    @ON_X86
    @pytest.mark.timeout(300)
    async def test_a_network_with_rules_has_the_walls_of_none(
        self, make: Make, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        with of_the_host(tmp_path_factory.mktemp("host")) as facts:
            ends = await self.network_ends(make, facts)
        verdicts = {id: meaning(id, end) for id, end in ends.items()}
        published = {case.id: case.verdicts[self.column] for case in catalogue.cases() if case.id[0] == NETWORK}
        own = {id for id, verdict in published.items() if verdict in ("own", "known")} | {LOW_PORT}
        assert verdicts.keys() == published.keys()
        assert {id: ends[id] for id, verdict in verdicts.items() if verdict == "open" and id not in own} == {}
        assert "unclear" not in verdicts.values(), ends
        assert verdicts[LOW_PORT] == "open", "what listens there is the box's own: its agent"

    async def network_ends(self, make: Make, facts: Sequence[str]) -> dict[str, str]:
        """The cases of the network, in boxes whose network has rules."""
        return await tried(with_rules(make), facts, self.python, limits_memory=False, classes=NETWORK)


class EscapeCases(CatalogueCases):
    """Ways out that one probe does not see: of several boxes, and of a box that ends."""

    async def test_killing_everything_in_the_box_leaves_its_agent_and_the_host_alive(self, box: AsyncSandbox) -> None:
        try:
            await box.exec(["python3", "-c", "import os; os.kill(-1, 9)"], timeout_s=10)
            await box.exec(["python3", "-c", "import os; os.kill(1, 9)"], timeout_s=10)
            assert (await box.exec(["echo", "alive"])).stdout == b"alive\n"
        except SkerryError:
            assert self.is_virtual  # a kernel of its own may let its first process be killed

    async def test_one_box_sees_nothing_of_another_and_cannot_change_what_they_share(self, make: Make) -> None:
        first, second = await make({}), await make({})
        for path in ("/tmp/secret", "/dev/shm/secret", "secret"):
            await first.files.write(path, b"x")
        await first.exec("echo x >> /etc/passwd; echo x >> /.skerry/agent/start.py")
        seen = await second.exec("ls -A /tmp /dev/shm ~; grep -c ^x$ /etc/passwd /.skerry/agent/start.py")
        assert b"secret" not in seen.stdout
        assert [line[-2:] for line in seen.stdout.splitlines()[-2:]] == [b":0", b":0"]

    async def test_nothing_of_the_managers_environment_is_in_the_box(
        self, make: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(SECRET, "qwertz-12345")
        done = await (await make({})).exec("cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline; env")
        assert b"PATH" in done.stdout
        assert b"qwertz" not in done.stdout

    async def test_a_terminal_in_the_box_cannot_be_typed_into_by_ioctl(self, box: AsyncSandbox) -> None:
        code = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSTI, b'x')"
        terminal = await box.pty(["python3", "-c", code])
        said = b"".join([chunk async for _, chunk in terminal])
        assert b"Error" in said
