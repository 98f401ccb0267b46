"""A sandbox under the interface of Inspect AI, and what that project's own checks want of one: paths, errors, timeouts
and big outputs. The adapter asks for classes and fields only, never for the text of a message."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

import skerry

OUTPUT_LIMIT = 10 << 20
READ_LIMIT = 1 << 20  # theirs is 100 MiB; what counts is what comes beyond it


class OutputLimitExceeded(Exception):
    """Their error for what is larger than they take, with what was kept of it."""


class Result(NamedTuple):
    success: bool
    returncode: int
    stdout: str
    stderr: str


class Adapter:
    """Their sandbox environment: files by text or bytes, commands by argv; errors are Python's own."""

    def __init__(self, sandbox: skerry.AsyncSandbox) -> None:
        self._sandbox = sandbox

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout: float | None = None,
    ) -> Result:
        try:
            done = await self._sandbox.exec(
                cmd, stdin=input, cwd=cwd, env=env, user=user, timeout_s=timeout, limit=OUTPUT_LIMIT
            )
        except skerry.UserNotFound as error:
            return Result(False, 126, "", str(error))
        if done.not_started == "cannot_run":
            raise PermissionError(done.error_text)
        if done.timed_out:
            raise TimeoutError
        if done.truncated:
            raise OutputLimitExceeded(done.text)
        return Result(done.ok, done.exit_code, done.stdout.decode(), done.stderr.decode())

    async def write_file(self, file: str, contents: str | bytes) -> None:
        await self._sandbox.files.write(file, contents)

    async def read_file(self, file: str) -> bytes:
        try:
            return await self._sandbox.files.read(file, max_bytes=READ_LIMIT)
        except skerry.TooLarge as error:
            raise OutputLimitExceeded from error


@pytest.fixture
async def box(folder: Path) -> AsyncIterator[Adapter]:
    async with skerry.AsyncSandbox(provider="local") as sandbox:
        yield Adapter(sandbox)


async def test_files_read_back_whatever_is_in_them(box: Adapter) -> None:
    for contents in ("text", "a\nb\r\n\n", "", "ünï\u2028", bytes(range(256))):
        await box.write_file("some folder/a file", contents)
        assert await box.read_file("some folder/a file") == (
            contents.encode() if isinstance(contents, str) else contents
        )
    with pytest.raises(UnicodeDecodeError):
        (await box.read_file("some folder/a file")).decode()


async def test_files_and_commands_start_in_the_same_folder(box: Adapter) -> None:
    await box.write_file("here", "x")
    assert (await box.exec(["ls", "-1"])).stdout == "here\n"
    assert (await box.exec(["mkdir", "below"])).success
    assert (await box.exec(["touch", "there"], cwd="below")).success
    assert await box.read_file("below/there") == b""
    start = (await box.exec(["pwd"])).stdout.strip()
    assert (await box.exec(["ls"], cwd=f"{start}/below")).stdout == "there\n"


async def test_what_a_file_is_not_is_pythons_own_error(box: Adapter) -> None:
    await box.exec(["mkdir", "folder"])
    await box.write_file("closed", "old")
    await box.exec(["chmod", "000", "closed"])
    for attempt, error in (
        (box.read_file("nowhere"), FileNotFoundError),
        (box.read_file("https:/en.wikipedia.org/wiki/Bart%C5%82omiej_Kasprzykowski"), FileNotFoundError),
        (box.read_file("folder"), IsADirectoryError),
        (box.write_file("folder", "x"), IsADirectoryError),
        (box.read_file("closed"), PermissionError),
        (box.write_file("closed", "new"), PermissionError),
        (box.write_file("/usr/file", "x"), PermissionError),
        (box.read_file("closed/below"), NotADirectoryError),
    ):
        with pytest.raises(error):
            await attempt
    await box.exec(["chmod", "600", "closed"])
    assert await box.read_file("closed") == b"old"


async def test_a_file_that_is_too_large_is_told_from_one_that_fails(box: Adapter) -> None:
    await box.write_file("largest", bytes(READ_LIMIT))
    assert len(await box.read_file("largest")) == READ_LIMIT
    await box.write_file("larger", bytes(READ_LIMIT + 1))
    with pytest.raises(OutputLimitExceeded):
        await box.read_file("larger")


async def test_a_command_tells_its_code_and_one_that_cannot_run_is_an_error(box: Adapter) -> None:
    assert (await box.exec(["sh", "-c", "exit 70"])).returncode == 70
    assert (await box.exec(["sh", "-c", "exit 126"])).returncode == 126
    assert (await box.exec(["no-such-program"])).returncode == 127
    await box.write_file("script.sh", "echo hello")
    with pytest.raises(PermissionError):
        await box.exec(["./script.sh"])
    await box.exec(["chmod", "+x", "script.sh"])
    await box.write_file("script.sh", "#!/bin/sh\necho hello")
    assert (await box.exec(["./script.sh"])).stdout == "hello\n"


async def test_a_user_that_is_not_there_is_a_failure_that_names_it(box: Adapter) -> None:
    result = await box.exec(["whoami"], user="nonexistent")
    assert not result.success
    assert "nonexistent" in result.stderr


async def test_a_timeout_ends_the_command_and_the_box_lives_on(box: Adapter) -> None:
    with pytest.raises(TimeoutError):
        await box.exec(["sleep", "1000"], timeout=0.2)
    assert (await box.exec(["true"], timeout=0)).success


async def test_input_and_environment_arrive(box: Adapter) -> None:
    assert (await box.exec(["cat"], input="ünï")).stdout == "ünï"
    data = os.urandom(1 << 20).hex()
    assert (await box.exec(["wc", "-c"], input=data)).stdout.strip() == str(len(data))
    assert (await box.exec(["sh", "-c", "echo $A"], env={"A": "1; 2"})).stdout == "1; 2\n"


async def test_output_beyond_the_limit_keeps_its_beginning_and_its_end(box: Adapter) -> None:
    script = "echo begin; head -c {size} /dev/zero | tr '\\0' x; echo end"
    within = await box.exec(["sh", "-c", script.format(size=OUTPUT_LIMIT - 10)])
    assert len(within.stdout) == OUTPUT_LIMIT
    with pytest.raises(OutputLimitExceeded) as raised:
        await box.exec(["sh", "-c", script.format(size=OUTPUT_LIMIT * 2)])
    kept = str(raised.value)
    assert kept.startswith("begin\n")
    assert kept.endswith("xend\n")
    assert f"{OUTPUT_LIMIT + 10} bytes left out" in kept


async def test_long_scripts_run(box: Adapter) -> None:
    counted = await box.exec(["sh", "-c", 'printf %s "$@" | wc -c', "sh", *["x" * 100_000] * 12])
    assert counted.stdout.strip() == "1200000"
    await box.write_file("big.sh", "echo " + "x" * 3_000_000)
    assert len((await box.exec(["sh", "big.sh"])).stdout) == 3_000_001


async def test_python_is_there_under_both_names(box: Adapter) -> None:
    for name in ("python", "python3"):
        assert (await box.exec([name, "-c", "print(6 * 7)"])).stdout == "42\n"


async def test_a_box_that_is_gone_is_one_error_for_all(folder: Path) -> None:
    async with skerry.AsyncSandbox(provider="local") as sandbox:
        box = Adapter(sandbox)
        await sandbox.connection.provider.destroy(sandbox.id)
        for attempt in (box.exec(["true"]), box.read_file("x"), box.write_file("x", "x")):
            with pytest.raises(skerry.SandboxGone):
                await attempt
