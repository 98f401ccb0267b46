from __future__ import annotations

import pytest

from skerry.sandbox.processes import Excerpt


@pytest.mark.parametrize("chunk", [1, 7, 100_000])
@pytest.mark.parametrize(("size", "cut"), [(0, 0), (9, 0), (10, 0), (11, 1), (50_000, 49_990)])
@pytest.mark.parametrize(("tail", "head"), [(None, 5), (5, 5), (0, 10), (3, 7), (9, 1)])
def test_output_is_kept_whole_up_to_the_limit_and_cut_in_the_middle_beyond(
    size: int, cut: int, chunk: int, tail: int | None, head: int
) -> None:
    data = bytes(65 + n % 26 for n in range(size))
    kept = Excerpt(10, tail)
    for at in range(0, size, chunk):
        kept.add(data[at : at + chunk])
    assert kept.cut == cut
    assert kept.content() == (
        data[:head] + b"\n[... %d bytes left out ...]\n" % cut + data[size - 10 + head :] if cut else data
    )


def test_what_an_agent_left_out_is_told_in_its_place() -> None:
    kept = Excerpt(10, 5)
    kept.add(b"0123456789")
    kept.note_total(1_000_010)
    assert kept.cut == 1_000_000
    assert kept.content() == b"01234\n[... 1000000 bytes left out ...]\n56789"


def test_a_limit_of_nothing_keeps_nothing() -> None:
    kept = Excerpt(0)
    kept.add(b"0123456789")
    assert (kept.content(), kept.cut) == (b"", 10)
