"""Spans: how long the parts of a call take, for whoever wants to know. Without a listener and without OpenTelemetry
they cost next to nothing.

    with trace.span("skerry.create", provider="local"):
        ...

A program that has imported OpenTelemetry gets the spans in its traces; `listen` is for our own metrics. Attributes are
for traces and may hold ids, so a listener takes only those of them into labels that it knows.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

_MODULE = "opentelemetry.trace"
_NOTHING = nullcontext()


class Finished(NamedTuple):
    """A span that is over."""

    name: str
    attributes: Mapping[str, str | int]
    duration_s: float
    outcome: str
    """`ok`, `cancelled`, or the code or the name of the error."""


Listener = Callable[[Finished], None]
_listeners: list[Listener] = []


@contextmanager
def listen(listener: Listener) -> Iterator[None]:
    """Tell a function of each span that ends, meanwhile. It must not raise."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def span(name: str, **attributes: str | int) -> AbstractContextManager[None]:
    """A span around the work in its `with`, within the one that is open here."""
    if not _listeners and _MODULE not in sys.modules:
        return _NOTHING
    return _measured(name, attributes)


@contextmanager
def _measured(name: str, attributes: dict[str, str | int]) -> Iterator[None]:
    began, outcome = time.monotonic(), "ok"
    with _opened(name, attributes) as opened:
        try:
            yield
        except BaseException as error:
            outcome = outcome_of(error)
            _fail(opened, outcome)
            raise
        finally:
            finished = Finished(name, attributes, time.monotonic() - began, outcome)
            for listener in _listeners:
                listener(finished)


def outcome_of(error: BaseException) -> str:
    """A word for an error, without any of its message: that may name what nobody else is to see."""
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return "cancelled"
    return getattr(error, "code", None) or type(error).__name__


def _opened(name: str, attributes: Mapping[str, str | int]) -> AbstractContextManager[Any]:
    api = sys.modules.get(_MODULE)
    if api is None or not hasattr(api, "get_tracer"):  # another thread is just importing it
        return nullcontext()
    options = {"record_exception": False, "set_status_on_exception": False}
    tracer = api.get_tracer("skerry")
    opened: AbstractContextManager[Any] = tracer.start_as_current_span(name, attributes=attributes, **options)
    return opened


def _fail(opened: Any, outcome: str) -> None:
    if opened is not None:
        api = sys.modules[_MODULE]
        opened.set_attribute("error.type", outcome)
        opened.set_status(api.StatusCode.ERROR)


def note(**attributes: str | int) -> None:
    """Add attributes to the span that is open here, where OpenTelemetry is there."""
    if (api := sys.modules.get(_MODULE)) is not None and hasattr(api, "get_current_span"):
        api.get_current_span().set_attributes(attributes)


@contextmanager
def following(traceparent: str | None) -> Iterator[None]:
    """Have spans belong to the trace that a caller names in a header `traceparent`, if it does and OpenTelemetry is
    there."""
    if traceparent is None or _MODULE not in sys.modules:
        yield
        return
    from opentelemetry import context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    token = context.attach(TraceContextTextMapPropagator().extract({"traceparent": traceparent}))
    try:
        yield
    finally:
        context.detach(token)
