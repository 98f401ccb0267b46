"""A sandbox of the OpenAI Agents SDK: those of its own tests that run a sandbox, and what they do not ask for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from engines.daemons import Daemon

from . import frameworks

pytestmark = pytest.mark.timeout(400)

NAME = "openai-agents"
_PTY, _RENAME = "test_unix_local.py::TestUnixLocalPty", "test_unix_local.py::TestUnixLocalApplyPatchRename"
THEIRS = [
    f"tests/sandbox/{test}"
    for test in (
        f"{_PTY}::test_pty_exec_write_poll_and_unknown_session_errors",
        f"{_PTY}::test_pty_ctrl_c_interrupts_long_running_process",
        f"{_PTY}::test_non_tty_pty_session_rejects_stdin_and_can_still_be_polled",
        f"{_PTY}::test_stop_terminates_active_pty_sessions",
        f"{_RENAME}::test_same_file_answers_for_real_paths",
        "test_runtime.py::test_unix_local_runner_cleanup_preserves_resumed_caller_owned_workspace_root",
        "test_runtime.py::test_unix_local_read_and_write_reject_paths_outside_workspace_root",
        "test_runtime.py::test_unix_local_rm_recursive_ignores_missing_paths",
        "test_runtime.py::test_unix_local_rm_non_recursive_still_errors_for_missing_paths",
        "test_runtime.py::test_runner_persists_workspace_and_tool_choice_state_across_sandbox_resume",
        "test_runtime.py::test_runner_restores_all_sandbox_agents_from_run_state_across_handoffs",
        "test_runtime.py::test_runner_serializes_unique_sandbox_resume_keys_for_duplicate_agent_names",
        "test_runtime.py::test_runner_restores_duplicate_name_sandbox_sessions_after_json_roundtrip",
        "test_runtime.py::test_runner_restores_legacy_current_sandbox_payload_after_json_roundtrip",
        "test_runtime.py::test_unix_local_exec_runs_without_wrapper_on_linux",
        "test_run_cwd.py::test_concurrent_runs_scope_relative_paths_with_shared_live_session",
        "test_run_cwd.py::test_resumed_run_rebinds_cwd_to_pending_sandbox_tool",
        "test_run_cwd.py::test_resumed_apply_patch_uses_current_run_cwd",
        "test_exposed_ports.py::test_unix_local_resolve_exposed_port_rejects_undeclared_ports",
    )
]
"""The SDK has no suite for sandboxes of others. These are its tests of runs in real sandboxes; all others that make one
look at files, mounts or variables of the host, as its own kind shares them, and the rest is about other things."""
OURS = 9
_ONE_LOOP = ("-o", "asyncio_default_fixture_loop_scope=session")


def run(*arguments: str | Path, cwd: Path, **env: str) -> dict[str, str]:
    frameworks.required(NAME)
    options = ("-o", "asyncio_mode=auto")
    env = {"OPENAI_AGENTS_DISABLE_TRACING": "1", "PYTHONPATH": str(frameworks.SUITES), **env}
    return frameworks.suite(NAME, *arguments, env=env, cwd=cwd, timeout_s=300, options=options)


def check(theirs: dict[str, str], ours: dict[str, str]) -> None:
    for outcome in (theirs, ours):
        assert {test: why for test, why in outcome.items() if why != "passed"} == {}
    assert len(theirs) == len(THEIRS) + 1
    assert len(ours) == OURS


def test_their_runs_in_real_sandboxes_pass_on_ours(folder: Path) -> None:
    frameworks.required(NAME)
    theirs = run(*_ONE_LOOP, "-p", "openai_agents_swap", *THEIRS, cwd=frameworks.sources_of(NAME))
    check(theirs, run("openai_agents_more.py", cwd=frameworks.SUITES))


@pytest.mark.whole
def test_their_runs_in_real_sandboxes_pass_on_docker(
    folder: Path, docker_daemon: Daemon, docker_images: dict[str, str]
) -> None:
    frameworks.required(NAME)
    docker = {
        "SKERRY_PROVIDER": "docker",
        "SKERRY_PROVIDERS__DOCKER__HOST": docker_daemon.address,
        "SUITE_SANDBOX": json.dumps({"image": docker_images["debian"]}),
    }
    theirs = run(*_ONE_LOOP, "-p", "openai_agents_swap", *THEIRS, cwd=frameworks.sources_of(NAME), **docker)
    check(theirs, run("openai_agents_more.py", cwd=frameworks.SUITES, **docker))


@pytest.mark.whole
def test_the_adapter_fits_the_types_of_the_framework() -> None:
    frameworks.required(NAME)
    assert frameworks.type_errors(NAME, "openai_agents.py") == ""
