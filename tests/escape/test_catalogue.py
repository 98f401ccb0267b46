from __future__ import annotations

import re

from escape.attempts import INSIDE, meaning
from escape.catalogue import COLUMNS, NOTES, cases, classes, differing, judged, published


def test_the_probe_tries_each_case_of_the_catalogue_and_no_other() -> None:
    text = "\n".join(path.read_text() for path in INSIDE.glob("*.py"))
    assert sorted(re.findall(r'^    "([A-Z][0-9]{2})": ', text, re.MULTILINE)) == [case.id for case in cases()]
    assert len({case.id for case in cases()}) == len(cases()) >= 150
    assert {case.id[0] for case in cases()} == set(classes())


def test_what_succeeds_on_the_hosts_own_kernel_has_a_note() -> None:
    for case in cases():
        excused = [each for each in COLUMNS if case.verdicts[each] in ("own", "known", "not tried")]
        if set(excused) - {"gVisor", "qemu"}:
            assert any(covers(words, case.id) for words in NOTES), case


def covers(words: str, id: str) -> bool:
    """Whether a note, such as `D11 to D23 on docker`, is about a case."""
    spans = [(start, end or start) for start, end in re.findall(r"([A-Z][0-9]{2})(?: to ([A-Z][0-9]{2}))?", words)]
    return any(start <= id <= end for start, end in spans)


def test_a_door_that_is_open_is_never_what_is_published() -> None:
    for column in COLUMNS:
        closed = {id for id, verdict in published(column).items() if verdict in ("refused", "absent", "limited")}
        found = judged(column, dict.fromkeys(published(column), "open"))
        assert closed <= set(differing(column, found))
        assert differing(column, published(column)) == {}


def test_an_answer_from_behind_a_gate_is_no_refusal() -> None:
    assert meaning("A01", "got in (EINVAL)") == "open"
    assert meaning("A01", "EPERM") == meaning("A01", "killed by 31") == "refused"
    assert meaning("D01", "ENOENT") == "absent"
    assert meaning("H01", "limited") == meaning("J01", "killed by 9") == "limited"
    assert meaning("D01", "the box ended") == "open"
    assert meaning("D01", "hung") == "unclear"
