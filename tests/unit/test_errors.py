from __future__ import annotations

import inspect
import pickle
import re

import pytest

import skerry
from skerry import errors
from skerry.errors import (
    CreateFailed,
    InvalidSpec,
    PathDenied,
    PathExists,
    PathNotFound,
    ProviderUnavailable,
    SkerryError,
    Unsupported,
    all_errors,
)


def test_every_error_has_a_code_of_its_own() -> None:
    codes = [error.code for error in all_errors()]
    assert len(codes) == len(set(codes))
    assert all(re.fullmatch(r"[a-z_]+", code) for code in codes)
    assert all("code" in vars(error) for error in all_errors())


def test_the_tree_in_the_docstring_is_the_tree_of_the_classes() -> None:
    assert errors.__doc__
    parents: dict[str, str] = {}
    above: list[str] = []
    for line in errors.__doc__.splitlines():
        match = re.match(r"([│├└─ ]*)(\w+)(\s|$)", line)
        if match and match[2] in vars(errors):
            depth = len(match[1]) // 3
            above = [*above[:depth], match[2]]
            if depth:
                parents[match[2]] = above[depth - 1]
    real = {error.__name__: error.__bases__[0].__name__ for error in all_errors() if error is not SkerryError}
    assert parents == real


def test_every_error_of_the_module_is_in_the_tree() -> None:
    classes = {each for each in vars(errors).values() if inspect.isclass(each) and issubclass(each, Exception)}
    assert classes == set(all_errors())


def test_file_errors_are_also_pythons_own() -> None:
    assert issubclass(PathNotFound, FileNotFoundError)
    assert issubclass(PathExists, FileExistsError)
    assert issubclass(PathDenied, PermissionError)
    assert issubclass(errors.PathIsFolder, IsADirectoryError)
    assert issubclass(errors.PathNotFolder, NotADirectoryError)
    assert all(issubclass(each, OSError) for each in all_errors(errors.FileError))


def test_a_box_that_is_gone_is_all_that_it_ever_was() -> None:
    for older in (errors.AgentUnreachable, errors.NotFound, errors.WrongState):
        assert issubclass(errors.SandboxGone, older)


def test_what_will_be_the_same_next_time_is_not_retryable() -> None:
    for each in (errors.TooLarge, errors.SandboxGone, errors.UserNotFound, errors.ArgumentsTooLong):
        assert not each.retryable
    assert errors.LimitReached.retryable
    assert errors.AgentUnreachable.retryable


def test_what_the_machinery_did_is_told_apart_from_what_the_request_or_the_code_did() -> None:
    machinery = {errors.ProviderError, errors.AgentError, errors.GateUnavailable, errors.StoreError, errors.LedgerError}
    machinery |= {errors.LimitReached, errors.SandboxGone, errors.CreateFailed, errors.HostFull, errors.CallInterrupted}
    assert all(each.infrastructure for each in machinery)
    others = {errors.InvalidSpec, errors.NotFound, errors.WrongState, errors.FileError, errors.DiskFull}
    others |= {errors.BoxFull, errors.TooLarge, errors.InterpreterNotFound, errors.AccessDenied}
    assert not any(each.infrastructure for each in others)


def test_an_error_of_a_newer_server_keeps_whether_the_machinery_failed() -> None:
    assert errors.of_code("of_next_year", "x", infrastructure=True).infrastructure
    assert not errors.of_code("path_not_found", "x", infrastructure=True).infrastructure


def test_all_errors_are_in_skerry_itself() -> None:
    assert all(getattr(skerry, each.__name__) is each for each in all_errors())


@pytest.mark.parametrize(
    "error", [PathNotFound("/x: gone"), PathExists("x"), InvalidSpec("cpus: no", field="cpus"), SkerryError("x")]
)
def test_a_message_is_what_was_said(error: SkerryError) -> None:
    assert error.message == str(error) == error.args[0]


def test_errors_carry_what_a_caller_needs() -> None:
    unsupported = Unsupported("disk", "docker", "no quota")
    assert (unsupported.field, unsupported.provider, unsupported.reason) == ("disk", "docker", "no quota")
    assert all(word in str(unsupported) for word in ("disk", "docker", "no quota"))
    unavailable = ProviderUnavailable("docker", "not running", fix="start it")
    assert unavailable.fix == "start it"
    assert "Fix: start it" in str(unavailable)
    assert CreateFailed("no", log="tail").log == "tail"


@pytest.mark.parametrize(
    "error",
    [
        InvalidSpec("m", field="f"),
        Unsupported("f", "p", "r"),
        ProviderUnavailable("p", "r", fix="x"),
        CreateFailed("m", log="l"),
        PathNotFound("p"),
        errors.UserNotFound("u"),
        errors.SandboxGone("s"),
        errors.PathIsFolder("f"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_cross_process_borders(error: SkerryError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))
