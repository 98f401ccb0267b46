"""Executor of smolagents: `CodeAgent(..., executor=SkerryExecutor(sandbox))` runs its code in an interpreter there."""

from __future__ import annotations

import io
import re
import secrets
from collections.abc import Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import PIL.Image
from smolagents.local_python_executor import CodeOutput
from smolagents.monitoring import AgentLogger, LogLevel
from smolagents.remote_executors import RemotePythonExecutor
from smolagents.serialization import SerializationError
from smolagents.utils import AgentError

from skerry.errors import InterpreterDied, SkerryError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from skerry.model.executions import CodeError, Execution, ExecutionEvent
    from skerry.sync.api import Interpreter, Sandbox

_IMPORT = re.compile(r"^import (\w+)$", re.MULTILINE)
_INSTALL_S = 600.0
_PIP = {"PIP_BREAK_SYSTEM_PACKAGES": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_RETRIES": "0", "PIP_TIMEOUT": "10"}
"""A sandbox is nobody's system, and one without a network is to say so soon."""


class SandboxFailed(BaseException):
    """The machinery failed, as the cause tells. smolagents takes each Exception of an executor for one of the code and
    gives it to the model; this is none, so that it ends the run."""

    def __init__(self, error: SkerryError) -> None:
        super().__init__(str(error))
        self.error = error


class SkerryExecutor(RemotePythonExecutor):
    """Runs the code of an agent in an interpreter of its own, which remembers from step to step. The sandbox is as it
    was when the agent is through: whoever made it ends it."""

    def __init__(
        self,
        sandbox: Sandbox,
        *,
        additional_imports: Sequence[str] = (),
        logger: AgentLogger | None = None,
        allow_pickle: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        """`additional_imports` are installed with pip. Without a `logger` nothing is logged, as the agent does that.
        `timeout_s` is that of a step; None is the sandbox's own, 0 any time. Raises SkerryError, and RuntimeError with
        what pip says of a package that cannot be had."""
        super().__init__([*additional_imports], logger or AgentLogger(LogLevel.OFF), allow_pickle)
        self.sandbox = sandbox
        self._timeout_s = timeout_s
        self._known: dict[str, str] = {}
        self._learns = ""
        self._interpreter: Interpreter = sandbox.interpreter("python", name=f"smolagents-{secrets.token_hex(4)}")
        if self.additional_imports:
            if (said := self._install(self.additional_imports)) is not None:
                raise RuntimeError(f"cannot install {', '.join(self.additional_imports)}: {said}")
            self.installed_packages = self.additional_imports

    def run_code_raise_errors(self, code: str) -> CodeOutput:
        """Run code to its end. Raises AgentError for what it did wrong, and SandboxFailed if the machinery failed."""
        if self._learns == "tools":  # all that their code names; one that is missing fails where it is used
            code = _IMPORT.sub(r"try:\n    import \1\nexcept ImportError:\n    pass", code)
        if self._learns:
            self._known[self._learns] = code
        with _failing(self.logger):
            try:
                done, logs = self._run(code)
            except InterpreterDied as error:
                if error.infrastructure:
                    raise
                self._begin_anew()
                ended = "The code ended its interpreter: what it knew is lost. A fresh one with the same tools goes on."
                raise AgentError(ended, self.logger) from error
        return self._output(done, logs)

    def _run(self, code: str) -> tuple[Execution, str]:
        said: list[str] = []
        done = self._interpreter.run(
            code, timeout_s=self._timeout_s, on_event=lambda event: said.append(_written(event))
        )
        return done, "".join(said)

    def send_tools(self, tools: dict[str, Any]) -> None:
        """Make tools known to the code, with what they need installed."""
        with self._learning("tools"):
            super().send_tools(tools)

    def send_variables(self, variables: dict[str, Any]) -> None:
        """Make variables known to the code."""
        with self._learning("variables"):
            super().send_variables(variables)

    @contextmanager
    def _learning(self, what: str) -> Iterator[None]:
        self._learns = what
        try:
            yield
        finally:
            self._learns = ""

    def _begin_anew(self) -> None:
        """Give the agent an interpreter again, with its tools: without them it could not even end."""
        self._interpreter.restart()
        for code in self._known.values():
            self._run(code)

    def install_packages(self, additional_imports: list[str]) -> list[str]:
        """Have pip install packages in the sandbox: those that are there now. What cannot be had is told to the log
        alone, as tools name more than they need."""
        if not additional_imports:
            return []
        said = self._install(additional_imports)
        if said is None:
            return additional_imports
        self.logger.log(f"cannot install {', '.join(additional_imports)}: {said}", level=LogLevel.INFO)
        return []

    def _install(self, packages: Sequence[str]) -> str | None:
        """What pip says of a failure."""
        with _failing(self.logger):
            done = self.sandbox.exec(
                ["python3", "-m", "pip", "install", "--quiet", "--", *packages],
                env=_PIP,
                combined=True,
                timeout_s=_INSTALL_S,
            )
        return None if done.ok else done.text.strip()

    def cleanup(self) -> None:
        """End the interpreter, not the sandbox."""
        self._interpreter.close()

    def _output(self, done: Execution, logs: str) -> CodeOutput:
        if done.error is not None and done.error.name == self.FINAL_ANSWER_EXCEPTION:
            return CodeOutput(output=self._answer(done.error), logs=logs, is_final_answer=True)
        if done.timed_out:
            late = "It took too long and was interrupted. All that the interpreter knows is still there."
            raise AgentError(f"{logs}\n{late}", self.logger)
        if done.error is not None:
            why = done.error.traceback or f"{done.error.name}: {done.error.value}"
            raise AgentError(f"{logs}\nExecuting code yielded an error:\n{why}", self.logger)
        return CodeOutput(output=_value(done), logs=logs, is_final_answer=False)

    def _answer(self, error: CodeError) -> Any:
        try:
            return self._deserialize_final_answer(error.value, self.allow_pickle)
        except (ValueError, SerializationError) as reason:
            raise AgentError(f"the final answer cannot be read, it may be too large: {reason}", self.logger) from None


@contextmanager
def _failing(logger: AgentLogger) -> Iterator[None]:
    """Tell errors of the machinery from those of the code, in words that smolagents understands."""
    try:
        yield
    except SkerryError as error:
        if error.infrastructure:
            raise SandboxFailed(error) from error
        raise AgentError(str(error), logger) from error


def _written(event: ExecutionEvent) -> str:
    return event.text if event.type in ("stdout", "stderr") else ""


def _value(done: Execution) -> Any:
    """The value of the last expression: a picture, or text."""
    shown = next((each for each in done.results if each.is_result), None)
    picture = None if shown is None else shown.png or shown.jpeg
    return done.text if picture is None else PIL.Image.open(io.BytesIO(picture))
