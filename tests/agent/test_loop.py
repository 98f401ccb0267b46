"""The agent's event loop: who is told of what."""

from __future__ import annotations

import os

from skerry.agent.guest.loop import READ, Loop


def test_an_event_of_a_closed_descriptor_is_not_told_to_the_next_one_of_its_number() -> None:
    loop = Loop()
    (first, first_end), (second, second_end) = os.pipe(), os.pipe()
    told: list[str] = []
    new: list[int] = []

    def close_the_other(name: str, own: int, other: int) -> None:
        told.append(name)
        loop.forget(own)
        loop.forget(other)
        os.close(other)
        new.extend(os.pipe())
        assert other == new[0]  # the lowest free number is taken
        loop.watch(new[0], READ, lambda _events: told.append("new"))

    loop.watch(first, READ, lambda _events: close_the_other("first", first, second))
    loop.watch(second, READ, lambda _events: close_the_other("second", second, first))
    os.write(first_end, b"x")
    os.write(second_end, b"x")
    loop.turn(0)
    assert len(told) == 1
    loop.turn(0)
    assert len(told) == 1
    os.write(new[1], b"x")
    loop.turn(0)
    assert told[1:] == ["new"]
    for fd in {*new, first_end, second_end, first if told[0] == "first" else second}:
        os.close(fd)
