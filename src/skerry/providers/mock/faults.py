"""What can go wrong with a mock box, on demand."""

from __future__ import annotations

from collections.abc import Callable

from skerry.errors import CreateFailed, SkerryError
from skerry.providers.mock.host import Box, Host
from skerry.spec import SandboxId


class Faults:
    """Breaks boxes for tests of whatever manages them.

    With an `id` a living box breaks now. Without, the fault waits for a create: each call is for one create, and
    `times` makes it several; the first fault given is the first to strike.

        mock.faults.fail_create(CreateFailed("no room"))
        mock.faults.slow_boot(90)                  # longer than the provider waits: the create fails
        mock.faults.lost_box(sandbox.id)           # the host forgets it
    """

    def __init__(self, host: Host) -> None:
        self._host = host

    def slow_boot(self, seconds: float, *, times: int = 1) -> None:
        """The next create takes so long, on the virtual clock."""
        self._on_create(lambda box: setattr(box, "boot_s", seconds), times)

    def fail_create(self, error: SkerryError | None = None, *, times: int = 1) -> None:
        """The next create raises, and leaves half a box behind for the caller to destroy."""
        failure = error or CreateFailed("the mock was told to fail", log="mock: fail_create")

        def fail(box: Box) -> None:
            raise failure

        self._on_create(fail, times)

    def dead_agent(self, id: SandboxId | None = None, *, times: int = 1) -> None:
        """The box runs but its agent is gone: streams end, nothing can be dialled. A create waits, then fails."""
        self._strike(lambda box: setattr(box, "boot_s", float("inf")), _kill_agent, id, times)

    def hang(self, id: SandboxId | None = None, *, times: int = 1) -> None:
        """The agent takes streams and answers nothing more."""
        self._strike(_hang, _hang, id, times)

    def garbage_frames(self, id: SandboxId | None = None, *, times: int = 1) -> None:
        """The agent greets and then answers with what is no frame."""
        self._strike(_speak_garbage, _speak_garbage, id, times)

    def full_disk(self, id: SandboxId | None = None, *, times: int = 1) -> None:
        """No byte more fits on the box's disk."""
        self._strike(_fill_disk, _fill_disk, id, times)

    def lost_box(self, id: SandboxId) -> None:
        """The box is gone, as if another had removed it."""
        self._host.box(id).do(Box.halt)
        del self._host.boxes[id]
        self._host.tell(id)

    def dead_box(self, id: SandboxId) -> None:
        """Everything in the box died; what is left of it can be found."""
        self._host.box(id).do(Box.halt)

    def drop_stream(self, id: SandboxId) -> None:
        """Every stream to the box breaks once; it can be dialled again."""
        self._host.box(id).do(_drop_streams)

    def end_watch(self) -> None:
        """Whoever watches the host hears no more of it, and has to begin again."""
        for watcher in self._host.watchers:
            watcher.put_nowait(None)

    def _on_create(self, fault: Callable[[Box], None], times: int) -> None:
        self._host.next_creates += [fault] * times

    def _strike(
        self, creating: Callable[[Box], None], living: Callable[[Box], None], id: SandboxId | None, times: int
    ) -> None:
        if id is None:
            self._on_create(creating, times)
        else:
            self._host.box(id).do(living)


def _drop_streams(box: Box) -> None:
    for channel in list(box.agent.channels) if box.agent is not None else []:
        channel.close(ConnectionResetError("the mock broke the stream"))


def _kill_agent(box: Box) -> None:
    _drop_streams(box)
    box.agent = None


def _hang(box: Box) -> None:
    box.hangs = True
    for channel in box.agent.channels if box.agent is not None else []:
        channel.hangs = True


def _speak_garbage(box: Box) -> None:
    box.garbage = True
    for channel in box.agent.channels if box.agent is not None else []:
        channel.garbage = True


def _fill_disk(box: Box) -> None:
    box.files.used = box.files.capacity
