"""A small agent's work with E2B's SDK, which knows nothing of skerry: `eval "$(skerry e2b env)"`, then run this.

It runs unchanged on every provider. What an agent would ask a model for stands here as constants.
"""

from __future__ import annotations

from e2b import CommandExitException, Sandbox

PROGRAM = """
import json, pathlib
words = pathlib.Path("essay.txt").read_text().split()
print(json.dumps({"words": len(words), "longest": max(words, key=len)}))
"""


def main() -> None:
    with Sandbox.create(timeout=120, metadata={"task": "count"}) as sandbox:
        sandbox.files.write("essay.txt", "a skerry is a small rocky island")
        sandbox.files.write("count.py", PROGRAM)
        print(sandbox.commands.run("python3 count.py").stdout, end="")
        try:
            sandbox.commands.run("python3 count.py < /nowhere")
        except CommandExitException as error:
            print("failed with", error.exit_code)
        server = sandbox.commands.run("python3 -m http.server 8000 --bind 127.0.0.1", background=True)
        answer = "python3 -c 'import urllib.request as u; print(u.urlopen(\"http://127.0.0.1:8000/essay.txt\").status)'"
        until = f"for _ in 1 2 3 4 5 6 7 8 9; do {answer} 2>/dev/null && exit; sleep 0.3; done; exit 1"
        print("served with", sandbox.commands.run(until).stdout, end="")
        server.kill()
        print(sorted(entry.name for entry in sandbox.files.list(".") if not entry.name.startswith(".")))
        print("running", sandbox.is_running())
    print("running", sandbox.is_running())


main()
