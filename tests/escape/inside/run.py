"""`run CLASSES AFTER FILE PID NAME PORT`: try every case of these classes that comes after that one, if any; tell its
id as it begins, and its end as it has ended."""

from __future__ import annotations

import sys

from . import bounds, calls, files, network, processes, settings
from .means import HOARD_S, LONG_S, SHORT_S, in_child

WALKS = ("D01",)
"""They look at every file there is, which takes its time on a busy host."""


def deadline_of(id: str) -> int:
    if id in WALKS or "H" <= id < "J":
        return LONG_S
    return SHORT_S if id < "H" else HOARD_S


for each in (calls, files, settings, processes, network, bounds):
    for id, attempt in each.ATTEMPTS.items():
        if id[0] in sys.argv[1] and id > sys.argv[2]:
            print(id, end=" ", flush=True)
            print(in_child(attempt, deadline_of(id)).replace("\n", " "), flush=True)
