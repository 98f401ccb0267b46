"""`python3 -I -S -B start.py ID [CONFIG_FD | CONFIG]`: start of the agent. ID only marks the process, so that it can be
found again. The configuration is JSON on an inherited descriptor, or in argv where an engine starts us and there is
none: then nothing in it may be a secret. With `zygote` in its place this process forks agents, and goes on in them."""

import posix
import sys


def main() -> None:
    package = type(sys)("skerry_agent")  # the folder may be mounted anywhere, under any name
    package.__path__ = [__file__.rpartition("/")[0] or "."]
    sys.modules["skerry_agent"] = package
    from skerry_agent import agent, users, wire  # type: ignore[import-not-found]

    config = {}
    if sys.argv[2:] == ["zygote"]:
        from skerry_agent import zygote

        config = zygote.serve()
    elif len(sys.argv) > 2 and sys.argv[2].startswith("{"):
        config = wire.loads(sys.argv[2])
    elif len(sys.argv) > 2:
        with open(int(sys.argv[2]), encoding="utf-8") as file:
            config = wire.loads(file.read())
    if config.get("rlimits"):
        users.set_rlimits(config["rlimits"])
        users.lower_priority()
        posix.umask(0o022)  # whoever started us may have another
    users.set_oom_score(users.FIRST_TO_DIE)
    users.deny_tracing()  # before any code of the box can run, and last: what is closed may not change its own settings
    server = agent.Agent(config)
    server.listen(config.get("listen") or {"stdio": True})
    server.run()
    sys.exit(server.exit_code)


main()
