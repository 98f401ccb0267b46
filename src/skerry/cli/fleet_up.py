"""Bringing a fleet to what its file says, in sight of the user, who may stop it at any time."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager, suppress

import msgspec

from skerry.cli.errors import OURS
from skerry.cli.fleet_view import View, format_seconds, is_terminal, print_event, shown
from skerry.cli.output import print_json, say
from skerry.config import Config
from skerry.fleet.events import FleetEvent, OnEvent
from skerry.fleet.fleet import AsyncFleet
from skerry.fleet.model import FleetSpec
from skerry.fleet.report import Report
from skerry.fleet.status import is_ready
from skerry.manager import AsyncSandboxManager

Act = Callable[[AsyncFleet, OnEvent], Awaitable[Report]]

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SHOW_CURSOR = b"\x1b[?25h\n"
_TAKING_BACK = "taking back what is not ready yet; once more to leave at once"
_NAMED = 8


def bring_up(config: Config, spec: FleetSpec, phases: Collection[str], act: Act, as_json: bool) -> int:
    """Do it, show how far these phases are, and tell how it went; the exit code."""
    view = View(phase for phase in spec.phases if phase.name in phases)
    return asyncio.run(_bring_up(config, spec, view, act, as_json))


async def _bring_up(config: Config, spec: FleetSpec, view: View, act: Act, as_json: bool) -> int:
    quiet = as_json or is_terminal()

    def on_event(event: FleetEvent) -> None:
        view(event)
        if not quiet:
            print_event(event)

    async with AsyncSandboxManager(config) as manager:
        fleet = AsyncFleet(manager, spec)
        task = asyncio.ensure_future(act(fleet, on_event))
        with _until_signal(task, view, quiet) as signals:
            try:
                with shown(view, as_json):
                    report = await _watched(task, view)
            except asyncio.CancelledError:
                if not signals:
                    raise
                up = [name for name, record in (await fleet._roster.records()).items() if is_ready(record)]
                _tell_interrupted(spec, view, up, as_json)
                return 128 + signals[0]
    return _tell(report, as_json)


async def _watched(task: asyncio.Future[Report], view: View) -> Report:
    try:
        return await task
    finally:
        view.stop()


@contextmanager
def _until_signal(task: asyncio.Future[Report], view: View, quiet: bool) -> Iterator[list[int]]:
    """The first signal cancels, which takes back what is not ready yet; the next one ends us where we are."""
    got: list[int] = []
    loop = asyncio.get_running_loop()

    def end(number: int) -> None:
        got.append(number)
        if len(got) > 1:
            _leave(128 + got[0])
        view.note = _TAKING_BACK
        if not quiet:
            say(_TAKING_BACK)
        task.cancel()

    for number in _ENDING:
        loop.add_signal_handler(number, end, number)
    try:
        yield got
    finally:
        for number in _ENDING:
            loop.remove_signal_handler(number)


def _leave(code: int) -> None:
    """What is left in the making goes with the next command that opens the registry."""
    if is_terminal():
        with suppress(OSError):
            os.write(2, _SHOW_CURSOR)
    os._exit(code)


def _tell_interrupted(spec: FleetSpec, view: View, up: Collection[str], as_json: bool) -> None:
    removed = [name for name in view.touched if name not in up]
    if as_json:
        print_json({"fleet": spec.name, "ok": False, "interrupted": True, "up": list(up), "removed": removed})
        return
    say(f"interrupted; up: {_names(up)}; removed: {_names(removed)}")


def _names(names: Collection[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(list(names)[:_NAMED]) + more or "none"


def _tell(report: Report, as_json: bool) -> int:
    code = 0 if report.ok else OURS
    if as_json:
        print_json({"ok": report.ok, **msgspec.to_builtins(report)})
        return code
    for name, phase in report.phases.items():
        if not phase.ok:
            why = f": {phase.errors[name]}" if name in phase.errors else ""
            say(f"{name}: {phase.state.replace('_', ' ')}, {phase.ready} of {phase.total} ready{why}")
        for member, error in phase.errors.items():
            if member != name:
                say(f"{member}: {error}")
    for member, error in report.errors.items():
        say(f"{member} could not be removed: {error}")
    ready = sum(phase.ready for phase in report.phases.values())
    total = sum(phase.total for phase in report.phases.values())
    say(f"fleet {report.fleet}: {ready} of {total} ready, {format_seconds(report.duration_s)}")
    return code
