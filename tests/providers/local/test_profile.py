from __future__ import annotations

import os
from pathlib import Path

import pytest

from skerry.errors import InvalidSpec, UserNotFound
from skerry.model.spec import Network, Spec
from skerry.providers.local import profile


def options(network: Network = Network.NONE) -> list[str]:
    return profile.options(
        user=profile.User(1000, 1000),
        has_own_uid=True,
        network=network,
        root=["--ro-bind-fd", "9", "/"],
        home=profile.home_in_memory(1 << 20),
        sizes=profile.Sizes(1 << 20, 2 << 20, 3 << 20),
        mounts=["--ro-bind-fd", "10", "/data"],
        info_fd=5,
        seccomp_fd=6,
    )


@pytest.mark.parametrize(
    ("user", "expected"),
    [(None, (1000, 1000)), ("user", (1000, 1000)), ("root", (0, 0)), ("0", (0, 0)), ("5", (5, 5)), ("5:6", (5, 6))],
)
def test_a_user_is_told_by_two_names_or_by_number(user: str | None, expected: tuple[int, int]) -> None:
    assert profile.user_of(Spec(user=user)) == expected


def test_any_other_user_is_refused() -> None:
    with pytest.raises(UserNotFound, match="postgres"):
        profile.user_of(Spec(user="postgres"))
    with pytest.raises(InvalidSpec, match="largest id"):
        profile.user_of(Spec(user="4294967295"))


def test_the_environment_of_a_spec_lies_above_the_defaults() -> None:
    env = profile.environment(Spec(env={"LANG": "de_DE.UTF-8", "A": "1"}))
    assert env["LANG"] == "de_DE.UTF-8"
    assert env["A"] == "1"
    assert env["HOME"] == "/home/user"
    assert "/usr/bin" in env["PATH"].split(":")


def test_every_namespace_is_new_and_no_capability_or_user_namespace_is_left() -> None:
    given = options()
    for option in ("--unshare-all", "--unshare-user", "--disable-userns", "--new-session", "--as-pid-1"):
        assert option in given
    assert given[given.index("--cap-drop") + 1] == "ALL"
    assert "--share-net" not in given
    assert "--share-net" in options(Network.HOST)


def test_no_secret_of_a_spec_is_among_the_options() -> None:
    assert not {"--setenv", "--die-with-parent", "--dev-bind", "--bind"} & set(options())


def test_every_writable_place_has_a_size_and_the_rest_is_read_only_in_the_end() -> None:
    given = options()
    places = [index for index, option in enumerate(given) if option == "--tmpfs"]
    assert all("--size" in given[index - 4 : index] for index in places)
    assert given.index("/data") < max(index for index, option in enumerate(given) if option == "--remount-ro")
    last = max(index for index, option in enumerate(given) if option == "--remount-ro")
    assert given[last + 1] == "/"


def test_a_root_folder_is_opened_entry_by_entry_with_its_links_kept(tmp_path: Path) -> None:
    for name in ("bin", "etc", "proc", "dev", "tmp", "home/user", "home/node", ".skerry"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "lib").symlink_to("usr/lib")
    (tmp_path / "file").write_text("x")
    os.mkfifo(tmp_path / "fifo")
    root = os.open(tmp_path, os.O_RDONLY)
    entries = list(profile.entries_of(root))
    os.close(root)
    found = {entry.path: entry.link for entry in entries}
    given = profile.root_of_folder(entries)
    for entry in entries:
        if entry.link is None:
            os.close(entry.fd)
    assert found == {"/bin": None, "/etc": None, "/home/node": None, "/lib": "usr/lib", "/file": None}
    assert given.count("--ro-bind-fd") == 4
    assert given[given.index("--symlink") : given.index("--symlink") + 3] == ["--symlink", "usr/lib", "/lib"]
