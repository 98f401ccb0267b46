"""Files and folders by E2B's wire, and watches of what happens to them."""

from __future__ import annotations

import asyncio
from typing import Any

from surfaces.e2b.envd.envd_world import Client, packed

FILES = "filesystem.Filesystem/"
OCTETS = {"content-type": "application/octet-stream"}


async def put(envd: Client, path: str, data: bytes = b"x") -> None:
    response = await envd.http.post("/files", params={"path": path}, content=data, headers=OCTETS)
    assert response.status_code == 200, response.text


async def sh(envd: Client, script: str) -> None:
    assert (await envd.run("/bin/sh", "-c", script))[1][0]["end"]["exited"]


async def test_stat_tells_all_of_a_file(envd: Client) -> None:
    await put(envd, "file", b"12345")
    entry = (await envd.result(FILES + "Stat", {"path": "file"}))["entry"]
    modified = entry.pop("modifiedTime")
    assert modified.endswith("Z")
    assert entry == {
        "name": "file", "path": "/home/user/file", "type": "FILE_TYPE_FILE", "size": "5", "mode": 0o644,
        "permissions": "-rw-r--r--", "owner": "user", "group": "user",
    }  # fmt: skip


async def test_a_link_is_what_it_leads_to(envd: Client) -> None:
    await put(envd, "d/file")
    await sh(envd, "ln -s file d/link; ln -s d dlink; ln -s nowhere broken; ln -s loop loop")

    async def told(path: str) -> tuple[Any, ...]:
        entry = (await envd.result(FILES + "Stat", {"path": path}))["entry"]
        return entry["type"], entry["mode"], entry["permissions"], entry["symlinkTarget"]

    assert await told("d/link") == ("FILE_TYPE_FILE", 0o644, "Lrwxrwxrwx", "/home/user/d/file")
    assert await told("dlink") == ("FILE_TYPE_DIRECTORY", 0o755, "Lrwxrwxrwx", "/home/user/d")
    for name in ("broken", "loop"):
        assert await told(name) == ("FILE_TYPE_UNSPECIFIED", 0, "Lrwxrwxrwx", f"/home/user/{name}")
    entries = (await envd.result(FILES + "ListDir", {"path": "dlink"}))["entries"]
    assert [each["path"] for each in entries] == ["/home/user/dlink/file", "/home/user/dlink/link"]


async def test_bits_are_written_as_go_writes_them(envd: Client) -> None:
    await sh(envd, "mkfifo p; mkdir d; chmod 1777 d; touch s; chmod 6755 s")
    for name, permissions in (
        ("p", "prw-r--r--"),
        ("d", "dtrwxrwxrwx"),
        ("s", "ugrwxr-xr-x"),
        ("/dev/null", "Dcrw-rw-rw-"),
    ):
        assert (await envd.result(FILES + "Stat", {"path": name}))["entry"]["permissions"] == permissions


async def test_a_name_that_is_no_text_is_listed_all_the_same(envd: Client) -> None:
    await sh(envd, r"mkdir d; touch \"d/$(printf 'a\377')\"".replace('\\"', '"'))
    (entry,) = (await envd.result(FILES + "ListDir", {"path": "d"}))["entries"]
    assert entry["name"] == "a\ufffd"


async def test_a_list_goes_as_deep_as_asked_with_parents_first(envd: Client) -> None:
    for path in ("t/a/x/deep", "t/a/y", "t/b", "t/a-b/z"):
        await put(envd, path)

    async def names(depth: int) -> list[str]:
        entries = (await envd.result(FILES + "ListDir", {"path": "t", "depth": depth}))["entries"]
        return [each["path"].removeprefix("/home/user/t/") for each in entries]

    assert await names(0) == await names(1) == ["a", "a-b", "b"]
    assert await names(2) == ["a", "a/x", "a/y", "a-b", "a-b/z", "b"]
    assert await names(9) == ["a", "a/x", "a/x/deep", "a/y", "a-b", "a-b/z", "b"]


async def test_a_folder_is_made_once(envd: Client) -> None:
    entry = (await envd.result(FILES + "MakeDir", {"path": "a/b/c"}))["entry"]
    assert (entry["type"], entry["mode"], entry["owner"]) == ("FILE_TYPE_DIRECTORY", 0o755, "user")
    assert await envd.code(FILES + "MakeDir", {"path": "a/b/c"}) == "already_exists"
    assert await envd.code(FILES + "MakeDir", {"path": "a"}) == "already_exists"
    await put(envd, "file")
    assert await envd.code(FILES + "MakeDir", {"path": "file"}) == "invalid_argument"
    assert await envd.code(FILES + "MakeDir", {"path": "/proc/new"}) in ("not_found", "permission_denied")


async def test_a_move_makes_the_folders_that_it_needs(envd: Client) -> None:
    await put(envd, "from", b"1")
    entry = (await envd.result(FILES + "Move", {"source": "from", "destination": "new/folder/to"}))["entry"]
    assert entry["path"] == "/home/user/new/folder/to"
    assert await envd.code(FILES + "Move", {"source": "from", "destination": "new2/x"}) == "not_found"
    assert await envd.code(FILES + "Stat", {"path": "new2"}) == "not_found"


async def test_what_is_not_there_is_removed_already(envd: Client) -> None:
    await put(envd, "d/e/f")
    await envd.result(FILES + "Remove", {"path": "d"})
    await envd.result(FILES + "Remove", {"path": "d"})
    assert await envd.code(FILES + "Stat", {"path": "d"}) == "not_found"


async def test_a_list_of_what_is_no_folder_fails(envd: Client) -> None:
    await put(envd, "file")
    assert await envd.code(FILES + "ListDir", {"path": "file"}) == "invalid_argument"
    assert await envd.code(FILES + "ListDir", {"path": "gone"}) == "not_found"
    assert await envd.code(FILES + "ListDir", {"path": "a\0b"}) == "invalid_argument"
    assert await envd.code(FILES + "ListDir", {"path": "/", "depth": -1}) == "invalid_argument"


async def watcher(envd: Client, path: str, **options: bool) -> str:
    return str((await envd.result(FILES + "CreateWatcher", {"path": path, **options}))["watcherId"])


async def events(envd: Client, id: str) -> list[tuple[str, str]]:
    found = (await envd.result(FILES + "GetWatcherEvents", {"watcherId": id}))["events"]
    return [(each["type"].removeprefix("EVENT_TYPE_"), each["name"]) for each in found]


async def test_a_new_file_is_three_events_that_are_there_at_once(envd: Client) -> None:
    await envd.result(FILES + "MakeDir", {"path": "d"})
    id = await watcher(envd, "d")
    for number in range(20):
        await put(envd, f"d/{number}", b"x" * 10_000)
        kinds = ["CREATE", "CHMOD", "WRITE"]
        assert await events(envd, id) == [(kind, str(number)) for kind in kinds]
    await envd.result(FILES + "RemoveWatcher", {"watcherId": id})
    assert await envd.code(FILES + "GetWatcherEvents", {"watcherId": id}) == "not_found"
    assert await envd.code(FILES + "RemoveWatcher", {"watcherId": id}) == "not_found"


async def test_a_new_folder_is_watched_before_it_is_told(envd: Client) -> None:
    await envd.result(FILES + "MakeDir", {"path": "d"})
    id = await watcher(envd, "d", recursive=True)
    for number in range(20):
        await envd.result(FILES + "MakeDir", {"path": f"d/{number}/e"})
        await put(envd, f"d/{number}/e/f")
        found = await events(envd, id)
        assert [each for each in found if each[1].endswith("f")] == [
            (kind, f"{number}/e/f") for kind in ("CREATE", "CHMOD", "WRITE")
        ]
        assert ("CREATE", str(number)) in found


async def test_moves_removals_and_modes_are_told_as_what_they_are(envd: Client) -> None:
    await sh(envd, "mkdir -p d/sub; touch d/a")
    id = await watcher(envd, "d", recursive=True)
    await sh(envd, "mv d/a d/b; rm d/b; chmod 700 d/sub; rmdir d/sub")
    found = await events(envd, id)
    assert found == [("RENAME", "a"), ("CREATE", "b"), ("REMOVE", "b"), ("CHMOD", "sub"), ("REMOVE", "sub")]


async def test_a_watch_alone_does_not_see_what_is_deeper(envd: Client) -> None:
    await sh(envd, "mkdir -p d/sub")
    id = await watcher(envd, "d")
    await sh(envd, "touch d/sub/x; touch d/y")
    assert {name for _, name in await events(envd, id)} == {"y"}


async def test_entries_come_with_what_is_there_if_they_are_wished(envd: Client) -> None:
    await envd.result(FILES + "MakeDir", {"path": "d"})
    id = await watcher(envd, "d", includeEntry=True)
    await put(envd, "d/x", b"123")
    await sh(envd, "touch d/gone; rm d/gone")
    found = (await envd.result(FILES + "GetWatcherEvents", {"watcherId": id}))["events"]
    assert {each["entry"]["size"] for each in found if each["name"] == "x"} == {"3"}
    assert not [each for each in found if each["name"] == "gone" and "entry" in each]


async def test_a_watch_whose_events_were_too_many_says_so(envd: Client) -> None:
    await envd.result(FILES + "MakeDir", {"path": "d"})
    id = await watcher(envd, "d")
    await sh(envd, "for n in $(seq 3000); do : > d/$n; rm d/$n; done")
    assert await envd.code(FILES + "GetWatcherEvents", {"watcherId": id}) == "internal"
    await put(envd, "d/x")
    assert ("CREATE", "x") in await events(envd, id)


async def test_of_many_watches_the_least_asked_for_ends(envd: Client) -> None:
    await envd.result(FILES + "MakeDir", {"path": "d"})
    first, second = await watcher(envd, "d"), await watcher(envd, "d")
    for _ in range(63):
        await events(envd, first)
        await watcher(envd, "d")
    assert await envd.code(FILES + "GetWatcherEvents", {"watcherId": second}) == "not_found"
    await events(envd, first)


async def test_an_id_that_is_none_is_not_found(envd: Client) -> None:
    for id in ("", "w1", "w1..", "w99999..2f", "w1.ff.2f", "w1..zz", "x" * 10_000):
        assert await envd.code(FILES + "GetWatcherEvents", {"watcherId": id}) == "not_found"


async def test_a_watch_of_what_is_no_folder_fails(envd: Client) -> None:
    await put(envd, "file")
    assert await envd.code(FILES + "CreateWatcher", {"path": "file"}) == "invalid_argument"
    assert await envd.code(FILES + "CreateWatcher", {"path": "gone"}) == "not_found"
    assert (await envd.failure(FILES + "WatchDir", packed({"path": "file"})))[1]["code"] == "invalid_argument"
    assert (await envd.failure(FILES + "WatchDir", packed({"path": "gone"})))[1]["code"] == "not_found"


async def test_a_stream_tells_changes_as_they_happen(envd: Client) -> None:
    await envd.result(FILES + "MakeDir", {"path": "d"})
    message = {"path": "d", "recursive": True, "includeEntry": True}
    async with envd.stream(FILES + "WatchDir", message, keepalive_ping_interval="1") as answers:
        assert await answers.event() == {"start": {}}
        await put(envd, "d/new/x")
        seen = []
        while ("WRITE", "new/x") not in seen:
            event = (await answers.event()).get("filesystem", {})
            seen.append((event.get("type", "").removeprefix("EVENT_TYPE_"), event.get("name")))
        assert seen[0] == ("CREATE", "new")
        async with asyncio.timeout(10):
            while await answers.event() != {"keepalive": {}}:
                pass


async def test_a_stream_ends_in_its_clients_time(envd: Client) -> None:
    async with envd.stream(FILES + "WatchDir", {"path": "/tmp"}, connect_timeout_ms="200") as answers:
        assert (await answers.rest())[-1]["error"]["code"] == "deadline_exceeded"
