"""What a gate tells of its log: all that nobody has read, within bounds, and nothing that may be a secret."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from skerry.errors import SkerryError
from skerry.gate.journal import Journal, LogLine, Pulse, log_again

LOG = logging.getLogger("skerry.gate")


@pytest.fixture
def journal() -> Iterator[Journal]:
    journal = Journal()
    journal.begin()
    yield journal
    journal.end()


def test_a_reader_gets_what_nobody_has_read_and_what_comes_after(journal: Journal) -> None:
    LOG.info("before")
    with journal.read() as lines:
        LOG.warning("after")
        LOG.debug("never")
        assert [line.text for line in lines] == ["before", "after"]
    with journal.read() as lines:
        assert not lines


def test_each_of_two_readers_gets_every_line(journal: Journal) -> None:
    with journal.read() as one, journal.read() as other:
        LOG.info("for both")
        assert [*one] == [*other] == [LogLine(level=logging.INFO, text="for both")]


def test_the_text_of_an_error_that_is_not_ours_is_not_told(journal: Journal) -> None:
    for error in (ValueError("the-secret"), SkerryError("a reason")):
        try:
            raise error
        except Exception:
            LOG.exception("it failed")
    with journal.read() as lines:
        assert [line.text for line in lines] == ["it failed: ValueError", "it failed: SkerryError: a reason"]


def test_lines_are_bounded_in_number_and_length(journal: Journal) -> None:
    for number in range(1000):
        LOG.warning("%d %s", number, "x" * 10_000)
    with journal.read() as lines:
        assert len(lines) == 200
        assert lines[-1].text.startswith("999 ")
        assert {len(line.text) for line in lines} == {500}


def test_a_line_is_logged_again_at_its_level(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "skerry.gate"):
        log_again(Pulse(pid=1, log=[LogLine(level=logging.INFO, text="quiet"), LogLine(level=40, text="100 %s")]))
    assert [(each.name, each.levelname, each.getMessage()) for each in caplog.records] == [
        ("skerry.gate", "ERROR", "100 %s")
    ]
