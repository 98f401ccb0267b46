"""Loop thread: one event loop in one thread, in which all that is synchronous runs."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, Self, TypeVar

from skerry import aio
from skerry.errors import WrongState

T = TypeVar("T")
Context = TypeVar("Context", bound="AbstractAsyncContextManager[Any]")


class LoopThread:
    """Runs coroutines from other threads; started on first use, ended with the program."""

    def __init__(self) -> None:
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """A child of a fork has neither our thread nor, perhaps, an open lock: begin anew."""
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def running_loop(self) -> asyncio.AbstractEventLoop:
        """The loop, which is started if need be."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="skerry", daemon=True)
                self._thread.start()
                atexit.register(self._loop.call_soon_threadsafe, self._loop.stop)
            return self._loop

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. Ctrl-C cancels it and waits for its end: a sandbox may be destroyed in it."""
        done, cancel = self._begin(work)
        try:
            return done.result()
        except BaseException:
            if not done.done():
                cancel()
                done.exception()
            raise

    async def lend(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, for a coroutine in a loop of its own. Cancelling that cancels it and waits for its
        end."""
        done, cancel = self._begin(work)
        ended = asyncio.wrap_future(done)
        try:
            return await asyncio.shield(ended)
        except asyncio.CancelledError:
            cancel()
            await aio.run_to_end(_settle(ended))
            raise

    def _begin(self, work: Coroutine[Any, Any, T]) -> tuple[Future[T], Callable[[], object]]:
        """Start `work` in the loop: its result to be, and what cancels it."""
        loop = self.running_loop()
        if threading.current_thread() is self._thread:
            raise WrongState("a callback runs in skerry's own loop: call nothing synchronous from it")
        done: Future[T] = Future()
        tasks: list[asyncio.Task[T]] = []

        def start() -> None:
            tasks.append(loop.create_task(work))
            tasks[0].add_done_callback(lambda task: _pass_on(task, done))

        loop.call_soon_threadsafe(start)
        return done, lambda: loop.call_soon_threadsafe(lambda: tasks[0].cancel())

    def iterate(self, items: AsyncIterator[T]) -> Iterator[T]:
        """An async iterator as an ordinary one; it is closed when the loop over it is left."""

        async def take() -> tuple[bool, Any]:
            try:
                return True, await anext(items)
            except StopAsyncIteration:
                return False, None

        try:
            while True:
                more, item = self.run(take())
                if not more:
                    return
                yield item
        finally:
            close = getattr(items, "aclose", None)
            if close is not None:
                self.run(close())


async def _settle(ended: asyncio.Future[Any]) -> None:
    await asyncio.wait([ended])
    if not ended.cancelled():
        ended.exception()


def _pass_on(task: asyncio.Task[T], done: Future[T]) -> None:
    if task.cancelled():
        done.set_exception(asyncio.CancelledError())
    elif (error := task.exception()) is not None:
        done.set_exception(error)
    else:
        done.set_result(task.result())


loop_thread = LoopThread()


class Twin(Generic[T]):
    """A synchronous object; the work is done by an asynchronous one in the loop thread."""

    _async: T

    @classmethod
    def _of(cls, twin: T) -> Self:
        self = cls.__new__(cls)
        self._async = twin
        return self


class ContextTwin(Twin[Context]):
    """The same, of one that is entered and left."""

    def __enter__(self) -> Self:
        loop_thread.run(self._async.__aenter__())
        return self

    def __exit__(self, *_: Any) -> None:
        loop_thread.run(self._async.__aexit__(*_))
