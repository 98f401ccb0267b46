"""`python3 -I -S -B start.py ID [CONFIG_FD | CONFIG]`: start of the agent. ID only marks the process, so that it can be
found again. The configuration is JSON on an inherited descriptor, or in argv where an engine starts us and there is
none: then nothing in it may be a secret. With `zygote` in its place this process forks agents, and goes on in them."""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def main() -> None:
    package = type(sys)("skerry_agent")  # the folder may be mounted anywhere, under any name
    package.__path__ = [__file__.rpartition("/")[0] or "."]
    sys.modules["skerry_agent"] = package
    from skerry_agent import agent, users, wire  # type: ignore[import-not-found]

    def run(config: dict[str, Any]) -> int:
        """Be the agent until the box ends; the code to exit with."""
        if config.get("rlimits"):
            users.be_ordinary(config["rlimits"])
        users.set_oom_score(users.FIRST_TO_DIE)
        # before any code of the box can run, and last: what is closed may not change its own settings
        users.deny_tracing()
        server = agent.Agent(config)
        server.listen(config.get("listen") or {"stdio": True})
        server.run()
        code: int = server.exit_code
        return code

    config = {}
    if sys.argv[2:] == ["zygote"]:
        from skerry_agent import zygote

        zygote.serve(run)
    elif len(sys.argv) > 2 and sys.argv[2].startswith("{"):
        config = wire.loads(sys.argv[2])
    elif len(sys.argv) > 2:
        with open(int(sys.argv[2]), encoding="utf-8") as file:
            config = wire.loads(file.read())
    sys.exit(run(config))


main()
