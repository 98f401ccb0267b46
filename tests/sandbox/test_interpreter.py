"""Interpreters in a real box: what they remember, show and survive."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from skerry.errors import AgentError, Conflict, InterpreterDied, InterpreterKilled, InterpreterNotFound, NotFound
from skerry.model.executions import EventType, Execution
from skerry.sandbox.interpreter import AsyncInterpreter
from skerry.sandbox.sandbox import AsyncSandbox

pytestmark = pytest.mark.timeout(60)


async def test_variables_imports_and_the_folder_stay_from_run_to_run(python: AsyncInterpreter) -> None:
    assert (await python.run("import math, os; x = 4; os.chdir('/tmp')")).ok
    assert (await python.run("math.sqrt(x), os.getcwd()")).text == "(2.0, '/tmp')"
    assert (await python.run("_[0]")).execution_count == 3


async def test_only_the_last_expression_is_the_result(python: AsyncInterpreter) -> None:
    assert (await python.run("1; 2\n3")).text == "3"
    assert (await python.run("x = 3")).results == []
    assert (await python.run("None")).results == []
    assert (await python.run("3;")).results == []
    assert (await python.run("")).ok


async def test_interpreters_of_different_names_know_nothing_of_each_other(sandbox: AsyncSandbox) -> None:
    one, two = await sandbox.interpreter(name="one"), await sandbox.interpreter(name="two", cwd="/tmp")
    both = await asyncio.gather(one.run("x = 1; x"), two.run("import os; x = 2; os.getcwd()"))
    assert [each.text for each in both] == ["1", "'/tmp'"]
    assert ((await one.run("x")).text, (await two.run("x")).text) == ("1", "2")
    assert {each.name for each in await sandbox.interpreters.list()} == {"one", "two"}


async def test_another_handle_finds_what_an_interpreter_knows(sandbox: AsyncSandbox, python: AsyncInterpreter) -> None:
    await python.run("x = 'kept'")
    sandbox.connection.close()
    assert (await (await sandbox.interpreter()).run("x")).text == "'kept'"
    assert (await (await sandbox.interpreters.get("python")).run("x")).text == "'kept'"


async def test_one_that_is_there_is_not_made_otherwise(sandbox: AsyncSandbox, python: AsyncInterpreter) -> None:
    with pytest.raises(Conflict):
        await sandbox.interpreter(name="python", cwd="/tmp")
    with pytest.raises(Conflict):
        await sandbox.interpreter("bash", name="python")
    with pytest.raises(NotFound):
        await sandbox.interpreters.get("other")
    with pytest.raises(InterpreterNotFound):
        await sandbox.interpreter("cobol", engine="builtin")


async def test_an_error_is_a_result_with_its_traceback(python: AsyncInterpreter) -> None:
    done = await python.run("def f():\n    return 1 / 0\nf()")
    assert done.error is not None
    assert (done.error.name, done.error.value) == ("ZeroDivisionError", "division by zero")
    assert "return 1 / 0" in done.error.traceback
    assert "skerry" not in done.error.traceback
    assert not done.ok
    wrong = await python.run("x = = 1")
    assert wrong.error is not None
    assert wrong.error.name == "SyntaxError"


async def test_leaving_is_an_error_of_the_code_and_state_is_kept(python: AsyncInterpreter) -> None:
    done = await python.run("import sys; x = 5; sys.exit(3)")
    assert done.error is not None
    assert (done.error.name, done.error.value) == ("SystemExit", "3")
    assert (await python.run("x")).text == "5"


async def test_all_that_is_written_is_caught_whoever_writes_it(python: AsyncInterpreter) -> None:
    done = await python.run(
        "import os, subprocess, sys\n"
        "print('one')\nos.write(1, b'two\\n')\nsubprocess.run(['echo', 'three'])\n"
        "sys.stderr.write('four\\n')\nos.write(2, b'five\\n')\nsys.stdout.buffer.write('sechs é\\n'.encode())\n"
        "os.system('echo seven')\n"
        "pid = os.fork()\nif pid == 0:\n    print('child')\nelse:\n    os.waitpid(pid, 0)\n    print('parent')\n"
    )
    assert sorted(done.stdout.split()) == sorted(["one", "two", "three", "sechs", "é", "seven", "child", "parent"])
    assert sorted(done.stderr.split()) == ["five", "four"]
    assert done.ok


async def test_what_a_program_writes_comes_after_what_was_printed_before(python: AsyncInterpreter) -> None:
    code = (
        "import subprocess\nfor number in range(5):\n    print(number)\n    subprocess.run(['echo', f'after {number}'])"
    )
    assert (await python.run(code)).stdout == "".join(f"{number}\nafter {number}\n" for number in range(5))


async def test_events_come_as_they_happen_and_in_order(python: AsyncInterpreter) -> None:
    async with aclosing(python.stream("import time\nprint('a')\ntime.sleep(0.2)\ndisplay(1)\nprint('b')\n2")) as events:  # type: ignore[type-var]
        seen = [event async for event in events]
    assert [event.type.value for event in seen] == ["started", "stdout", "display", "stdout", "result", "end"]
    assert [event.text for event in seen if event.text] == ["a\n", "b\n"]


async def test_a_thread_that_prints_late_is_heard_in_the_next_run(python: AsyncInterpreter) -> None:
    code = "import threading, time\ndone = threading.Event()\n"
    code += "def late():\n    time.sleep(0.1); print('late'); done.set()\n"
    assert (await python.run(code + "threading.Thread(target=late).start()")).stdout == ""
    waited = await python.run("done.wait(5); time.sleep(0.1)")
    assert waited.stdout == "late\n"


async def test_values_are_shown_in_all_their_forms(python: AsyncInterpreter) -> None:
    code = """
class Shown:
    def _repr_html_(self): return '<b>x</b>'
    def _repr_png_(self): return b'\\x89PNG'
    def _repr_svg_(self): return '<svg/>'
    def _repr_jpeg_(self): return b'\\xff\\xd8'
    def _repr_latex_(self): return '$x$'
    def _repr_markdown_(self): return '*x*'
    def _repr_json_(self): return {'x': [1]}
    def _repr_javascript_(self): return 'x()'
    def __repr__(self): return 'Shown'
display(Shown())
class Own:
    def _repr_mimebundle_(self, include=None, exclude=None): return {'text/html': '<i>own</i>', 'text/plain': 'own'}
Own()
"""
    done = await python.run(code)
    shown, own = done.results
    assert (shown.text, shown.html, shown.svg, shown.latex) == ("Shown", "<b>x</b>", "<svg/>", "$x$")
    assert (shown.markdown, shown.javascript, shown.json) == ("*x*", "x()", {"x": [1]})
    assert (shown.png, shown.jpeg) == (b"\x89PNG", b"\xff\xd8")
    assert not shown.is_result
    assert (own.html, own.text, own.is_result) == ("<i>own</i>", "own", True)


async def test_what_is_no_number_is_none_where_json_has_no_word_for_it(python: AsyncInterpreter) -> None:
    code = "display({'application/json': {'a': [float('nan'), float('inf'), 1.5]}, 'text/plain': 'x'}, raw=True)"
    (shown,) = (await python.run(code)).results
    assert (shown.json, shown.text) == ({"a": [None, None, 1.5]}, "x")


async def test_a_plot_is_a_picture_at_show_and_at_the_end_of_the_code(sandbox: AsyncSandbox) -> None:
    """With a stand-in for matplotlib that has what the real one asks of a backend."""
    for path, text in _MATPLOTLIB.items():
        await sandbox.files.write(f"/tmp/fake/matplotlib/{path}", text)
    python = await sandbox.interpreter(engine="builtin", env={"PYTHONPATH": "/tmp/fake"})
    shown = await python.run("import matplotlib.pyplot as plt\nplt.plot()\nplt.show()\nplt.plot()\nprint('after')")
    assert shown.error is None, shown.error.traceback
    assert [each.png for each in shown.results] == [b"\x89PNG 1", b"\x89PNG 2"]
    assert (await python.run("plt.get_fignums()")).text == "[]"


async def test_input_is_refused_clearly(python: AsyncInterpreter) -> None:
    for code in ("input('name? ')", "import getpass; getpass.getpass()"):
        done = await python.run(code)
        assert done.error is not None
        assert done.error.name == "StdinNotImplementedError"
    assert (await python.run("import sys; sys.stdin.read()")).text == "''"


async def test_code_may_be_indented_as_a_whole(python: AsyncInterpreter) -> None:
    assert (await python.run("\n    x = 1\n    if x:\n        x = 2\n    x\n")).text == "2"


async def test_await_works_at_the_top(python: AsyncInterpreter) -> None:
    await python.run("import asyncio\nasync def f():\n    await asyncio.sleep(0.01)\n    return 7")
    assert (await python.run("await f()")).text == "7"
    assert (await python.run("x = await f()\nx + 1")).text == "8"


async def test_lines_for_the_shell_run_in_it(python: AsyncInterpreter) -> None:
    assert (await python.run("!echo hello\nx = 1")).stdout == "hello\n"
    assert (await python.run("%cd /tmp\nimport os; os.getcwd()")).text == "'/tmp'"


async def test_a_timeout_interrupts_and_the_state_is_kept(python: AsyncInterpreter) -> None:
    done = await python.run("x = 1\nprint('begun')\nwhile True: pass", timeout_s=0.3)
    assert (done.timed_out, done.stdout) == (True, "begun\n")
    assert done.error is not None
    assert done.error.name == "KeyboardInterrupt"
    assert (await python.run("x")).text == "1"


async def test_a_timeout_insists(python: AsyncInterpreter) -> None:
    code = "import time\nx = 1\ntry:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    time.sleep(60)"
    done = await python.run(code, timeout_s=0.2)
    assert done.timed_out
    assert (await python.run("x")).text == "1"


async def test_an_interrupt_ends_the_code_and_its_children(python: AsyncInterpreter) -> None:
    running = asyncio.create_task(python.run("import subprocess\nx = 2\nprint('go')\nsubprocess.run(['sleep', '60'])"))
    await asyncio.sleep(0.3)
    await python.interrupt()
    done = await running
    assert (done.interrupted, done.timed_out, done.stdout) == (True, False, "go\n")
    assert (await python.run("x")).text == "2"
    await python.interrupt()  # nothing runs
    assert (await python.run("x")).text == "2"


async def test_code_that_nobody_waits_for_is_interrupted(python: AsyncInterpreter) -> None:
    running = asyncio.create_task(python.run("import time\nx = 3\ntime.sleep(60)"))
    await asyncio.sleep(0.3)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (await python.run("x")).text == "3"
    async for event in python.stream("print('first')\ntime.sleep(60)"):
        if event.type is EventType.STDOUT:
            break
    assert (await python.run("x", timeout_s=10)).text == "3"


async def test_a_stream_that_breaks_interrupts_too(sandbox: AsyncSandbox, python: AsyncInterpreter) -> None:
    running = asyncio.create_task(python.run("import time\nx = 4\ntime.sleep(60)"))
    await asyncio.sleep(0.3)
    sandbox.connection.close()
    with pytest.raises(AgentError):
        await running
    assert (await python.run("x", timeout_s=10)).text == "4"


async def test_runs_of_several_clients_wait_for_each_other(sandbox: AsyncSandbox, python: AsyncInterpreter) -> None:
    await python.run("n = 0")
    code = "import time\ntime.sleep(0.01)\nprint(n)\nn += 1\nn"
    done = await asyncio.gather(*(python.run(code) for _ in range(8)))
    assert [each.text for each in done] == [str(number) for number in range(1, 9)]
    assert [each.stdout for each in done] == [f"{number}\n" for number in range(8)]


async def test_a_restart_forgets_everything(python: AsyncInterpreter) -> None:
    await python.run("x = 1")
    await python.restart()
    done = await python.run("x")
    assert done.error is not None
    assert (done.error.name, done.execution_count) == ("NameError", 1)


async def test_a_restart_ends_what_runs(python: AsyncInterpreter) -> None:
    running = asyncio.create_task(python.run("import time; time.sleep(60)"))
    await asyncio.sleep(0.3)
    await python.restart()
    with pytest.raises(InterpreterDied):
        await running
    assert (await python.run("1")).text == "1"


async def test_code_that_ends_its_interpreter_is_told_and_it_can_be_started_again(python: AsyncInterpreter) -> None:
    with pytest.raises(InterpreterDied, match=r"ended with code 7.*restart"):
        await python.run("import os; os._exit(7)")
    with pytest.raises(InterpreterDied):
        await python.run("1")
    await python.restart()
    assert (await python.run("1")).text == "1"


async def test_code_that_has_itself_killed_does_not_pass_for_a_broken_machine(
    python: AsyncInterpreter,
) -> None:
    with pytest.raises(InterpreterKilled) as caught:
        await python.run("import os; os.kill(os.getpid(), 9)")
    assert not caught.value.infrastructure
    assert caught.value.code == "interpreter_killed"


async def test_even_the_context_can_be_killed_and_started_again(python: AsyncInterpreter) -> None:
    with pytest.raises(InterpreterDied):
        await python.run("import os; os.kill(os.getppid(), 9)")
    with pytest.raises(InterpreterDied):
        await python.run("1")
    await python.restart()
    assert (await python.run("1")).text == "1"


async def test_code_that_closes_its_descriptors_does_no_harm(python: AsyncInterpreter) -> None:
    assert (await python.run("import os, sys; sys.stdout.close(); os.closerange(0, 256)")).ok
    done = await python.run("print('here'); os.write(1, b'there\\n'); 5")
    assert (sorted(done.stdout.split()), done.text) == (["here", "there"], "5")


async def test_a_flood_is_cut_and_told(python: AsyncInterpreter) -> None:
    done = await python.run("for _ in range(100): print('x' * 100_000)\nprint('end')", limit=1000)
    assert done.truncated
    assert len(done.stdout) <= 1000
    pipe = await python.run("import os\nfor _ in range(100): os.write(2, b'y' * 100_000)", limit=1000)
    assert pipe.truncated
    assert len(pipe.stderr) <= 1000
    value = await python.run("'z' * 50_000_000")
    assert value.text is not None
    assert len(value.text) < 2_000_000
    assert (await python.run("1")).text == "1"


async def test_what_is_no_text_does_no_harm(python: AsyncInterpreter) -> None:
    done = await python.run("import os\nos.write(1, b'\\xff\\xfe\\n')\nprint('\\ud800')\n'\\udcff'")
    assert done.stdout == "\ufffd\ufffd\n\\ud800\n"
    strange = await python.run("raise ValueError('\\ud800')")
    assert strange.error is not None
    class_of = "class E(Exception):\n    def __str__(self): raise RuntimeError\nraise E"
    assert (await python.run(class_of)).error is not None
    deep = "x = []\nfor _ in range(100000): x = [x]\ndisplay({'application/json': x}, raw=True)"
    assert isinstance(await python.run(deep), Execution)
    assert (await python.run("1")).text == "1"


async def test_variables_of_the_box_reach_one_that_runs(sandbox: AsyncSandbox, python: AsyncInterpreter) -> None:
    await sandbox.set_env({"LATER": "yes"})
    assert (await python.run("import os; os.environ['LATER']")).text == "'yes'"
    assert (await python.run("os.environ['MINE']", env={"MINE": "2"})).text == "'2'"
    assert (await python.run("os.environ.get('MINE', 'gone'), os.environ['LATER']")).text == "('gone', 'yes')"


async def test_code_may_be_long(python: AsyncInterpreter) -> None:
    text = "x" * 3_000_000
    assert (await python.run(f"len('{text}')")).text == "3000000"


async def test_closing_ends_all_that_it_started(sandbox: AsyncSandbox, python: AsyncInterpreter) -> None:
    await python.run("import subprocess; subprocess.Popen(['sleep', '987'], start_new_session=True)")
    await python.close()
    await python.close()
    assert await sandbox.interpreters.list() == []
    assert (await sandbox.exec("pgrep -f 'sleep 98[7]'")).exit_code == 1
    with pytest.raises(InterpreterDied):
        await python.run("1")


async def test_a_box_with_an_interpreter_at_rest_is_idle(sandbox: AsyncSandbox, python: AsyncInterpreter) -> None:
    await python.run("1")
    await sandbox.set_lifetime("1h", idle=0.5)
    for _ in range(100):
        await asyncio.sleep(0.1)
        if not await sandbox.is_healthy():
            break
    else:
        pytest.fail("the box did not end")


async def test_bash_remembers(sandbox: AsyncSandbox) -> None:
    bash = await sandbox.interpreter("bash")
    assert (await bash.run("x=5; cd /tmp; f() { echo in $1; }")).ok
    done = await bash.run("echo $x; pwd; f a; echo bad >&2; cat; false")
    assert (done.stdout, done.stderr) == ("5\n/tmp\nin a\n", "bad\n")
    assert done.error is not None
    assert done.error.value == "1"
    assert (await bash.run("y=1; while :; do :; done", timeout_s=0.3)).timed_out
    assert (await bash.run("sleep 60; echo no", timeout_s=0.3)).stdout == ""
    assert (await bash.run("echo $x$y")).stdout == "51\n"
    await sandbox.set_env({"LATER": "it's"})
    assert (await bash.run("echo $LATER $MINE", env={"MINE": "2"})).stdout == "it's 2\n"
    assert (await bash.run("echo $LATER ${MINE:-gone}")).stdout == "it's gone\n"


async def test_javascript_remembers(sandbox: AsyncSandbox) -> None:
    if (await sandbox.exec("command -v node")).exit_code:
        pytest.skip("there is no node")
    node = await sandbox.interpreter("javascript")
    assert (await node.run("const x = 4; console.log('hi')")).stdout == "hi\n"
    assert (await node.run("await new Promise(done => setTimeout(() => done(x + 1), 10))")).text == "5"
    failed = await node.run("throw new TypeError('no')")
    assert failed.error is not None
    assert (failed.error.name, failed.error.value) == ("TypeError", "no")
    assert (await node.run("while (true) {}", timeout_s=0.5)).timed_out
    assert (await node.run("await new Promise(() => 0)", timeout_s=0.5)).timed_out
    assert (await node.run("import fs from 'fs'")).ok
    assert (await node.run("fs.existsSync('/') && x")).text == "4"


_MATPLOTLIB = {
    "__init__.py": "",
    "figure.py": "class Figure:\n    def __init__(self, n): self.n = n\n"
    "    def savefig(self, file, **more): file.write(b'\\x89PNG %d' % self.n)\n",
    "backends/__init__.py": "",
    "backends/backend_agg.py": "class M: pass\nclass FigureCanvasAgg:\n    manager_class = M\n",
    "pyplot.py": "import importlib, os\nfrom .figure import Figure\n_open, _count = {}, 0\n"
    "backend = importlib.import_module(os.environ['MPLBACKEND'].partition('module://')[2])\n"
    "def plot():\n    global _count\n    _count += 1\n    _open[_count] = Figure(_count)\n"
    "def show(): backend.FigureCanvas.manager_class.pyplot_show()\n"
    "def get_fignums(): return list(_open)\ndef figure(number): return _open[number]\n"
    "def close(which):\n    if which == 'all': _open.clear()\n",
}
