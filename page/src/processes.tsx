// Processes of a sandbox, what one of them writes, and the log of its box.
import { useEffect, useRef, useState } from "preact/hooks";
import { Problem, call, events, query, raw, sandboxPath } from "./api";
import { duration, moment } from "./format";
import { message, useAnswer, useWork } from "./hooks";
import { Notice, Waiting } from "./parts";
import type { Page, ProcessInfo, Sandbox } from "./types";

const MOST = 200_000;

type Source = number | "log" | "service";

const TITLES = { log: "Log of the box", service: "Output of its command" };

function source(base: string, shown: Source): string {
  if (shown === "log") return `${base}/logs${query({ follow: true, tail: 500 })}`;
  if (shown === "service") return `${base}/service/log${query({ follow: true })}`;
  return `${base}/processes/${shown}/output`;
}

export function ProcessesView({ sandbox }: { sandbox: Sandbox }) {
  const base = sandboxPath(sandbox.id);
  const answer = useAnswer<Page<ProcessInfo>>(`${base}/processes`, 3000);
  const [shown, setShown] = useState<Source>("command" in sandbox.spec ? "service" : "log");
  const [command, setCommand] = useState("");
  const work = useWork();
  const items = answer.data?.items ?? [];
  const processes = [...items].sort((a, b) => Number(b.running) - Number(a.running) || b.process - a.process);
  const end = (process: number, signal: string) =>
    work.run(async () => {
      await call("POST", `${base}/processes/${process}/signal`, { signal, tree: true });
      answer.again();
    });
  const run = (event: Event) => {
    event.preventDefault();
    work.run(async () => {
      const made = await call<{ process: number }>("POST", `${base}/processes`, { command });
      setCommand("");
      setShown(made.process);
      answer.again();
    });
  };
  return (
    <div class="processes">
      <form class="row tools" onSubmit={run}>
        <input
          aria-label="Command to run in the background"
          placeholder="Run a command in the background …"
          spellcheck={false}
          value={command}
          onInput={(event) => setCommand(event.currentTarget.value)}
        />
        <button type="submit" disabled={work.busy || !command.trim()}>
          Run
        </button>
      </form>
      {work.error && <Notice kind="error">{work.error}</Notice>}
      {answer.data ? null : <Waiting answer={answer} what="a list of processes" />}
      <ul class="processlist" aria-label="Processes">
        {processes.map((each) => (
          <li key={each.process} class={each.running ? "running" : "ended"}>
            <button
              type="button"
              class="plain entry"
              aria-pressed={shown === each.process}
              onClick={() => setShown(each.process)}
            >
              {each.pty && <span class="label">terminal</span>}
              <code>{each.argv.join(" ")}</code>
            </button>
            <small class="num quiet">{each.pid}</small>
            <small class="quiet">{status(each)}</small>
            {each.running && (
              <span class="row">
                <button type="button" class="plain" onClick={() => end(each.process, "TERM")}>
                  End
                </button>
                <button type="button" class="plain" onClick={() => end(each.process, "KILL")}>
                  Kill
                </button>
              </span>
            )}
          </li>
        ))}
        {answer.data && !processes.length && <li class="quiet">Nothing was started in it yet.</li>}
      </ul>
      <div class="row tools">
        <h2>{typeof shown === "number" ? `Output of process ${shown}` : TITLES[shown]}</h2>
        {(["service", "log"] as const).map(
          (each) =>
            each !== shown &&
            (each === "log" || "command" in sandbox.spec) && (
              <button key={each} type="button" onClick={() => setShown(each)}>
                {TITLES[each]}
              </button>
            ),
        )}
      </div>
      <Output key={shown} path={source(base, shown)} isLog={shown === "log"} />
    </div>
  );
}

function status(process: ProcessInfo): string {
  if (process.running) return process.started ? duration(Date.now() / 1000 - process.started) : "running";
  if (process.signal) return `signal ${process.signal}`;
  const code = process.exit_code ?? 0;
  return process.started ? `ended with ${code}, began ${moment(process.started)}` : `ended with ${code}`;
}

/** Bytes as they come, as text. */
function Output({ path, isLog }: { path: string; isLog: boolean }) {
  const [text, setText] = useState("");
  const [note, setNote] = useState("");
  const place = useRef<HTMLPreElement>(null);
  const stuck = useRef(true);
  useEffect(() => {
    const stop = new AbortController();
    const add = (more: string) => setText((before) => (before + more).slice(-MOST));
    const read = isLog ? readLog : readOutput;
    read(path, add, stop.signal).then(
      (end) => setNote(end),
      (error: unknown) => {
        if (stop.signal.aborted) return;
        const { isMissing = false, code = "" } = error instanceof Problem ? error : {};
        const unkept = isLog && code === "unsupported";
        setNote(isMissing ? "This server does not offer it." : unkept ? "Its provider keeps no log of its boxes." : message(error));
      },
    );
    return () => stop.abort();
  }, [path]);
  useEffect(() => {
    const element = place.current;
    if (element && stuck.current) element.scrollTop = element.scrollHeight;
  }, [text]);
  const onScroll = (event: { currentTarget: HTMLElement }) => {
    const { scrollTop, scrollHeight, clientHeight } = event.currentTarget;
    stuck.current = scrollTop + clientHeight > scrollHeight - 40;
  };
  return (
    <>
      <pre ref={place} class="output" hidden={!text && note !== ""} tabIndex={0} aria-label="Output" onScroll={onScroll}>
        {text}
      </pre>
      {note && <p class="quiet">{note}</p>}
    </>
  );
}

type Read = (path: string, add: (text: string) => void, signal: AbortSignal) => Promise<string>;

const readLog: Read = async (path, add, signal) => {
  const response = await raw("GET", path, { signal });
  const reader = response.body!.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return "";
    add(value);
  }
};

const readOutput: Read = async (path, add, signal) => {
  const decoder = new TextDecoder();
  for await (const told of events(await raw("GET", path, { signal }))) {
    const data = JSON.parse(told.data) as { text?: string; base64?: string; exit_code?: number; detail?: string };
    if (told.event === "exit") return `It has ended with ${data.exit_code}.`;
    if (told.event === "error") return data.detail ?? "it failed";
    if (data.text !== undefined) add(data.text);
    else if (data.base64 !== undefined) {
      add(decoder.decode(Uint8Array.from(atob(data.base64), (each) => each.charCodeAt(0)), { stream: true }));
    }
  }
  return "";
};
