// Terminals: each is a process of the sandbox that lives on when the page or the connection goes, and is found again.
import { FitAddon } from "@xterm/addon-fit";
import { Terminal } from "@xterm/xterm";
import { useEffect, useRef, useState } from "preact/hooks";
import { call, openSocket, query, sandboxPath } from "./api";
import { useKeys } from "./hooks";
import { strictly } from "./styled";
import { isDark } from "./theme";

interface Tab {
  key: number;
  process: number | null;
}

const kept = (id: string) => `skerry.terminals.${id}`;

function remembered(id: string): Tab[] {
  try {
    const processes = JSON.parse(sessionStorage.getItem(kept(id)) ?? "[]") as number[];
    return processes.map((process, key) => ({ key, process }));
  } catch {
    return [];
  }
}

export function TerminalsView({ id }: { id: string }) {
  const [tabs, setTabs] = useState<Tab[]>(() => {
    const found = remembered(id);
    return found.length ? found : [{ key: 0, process: null }];
  });
  const [current, setCurrent] = useState(tabs[0]!.key);
  useEffect(() => {
    const processes = tabs.flatMap((each) => (each.process === null ? [] : [each.process]));
    sessionStorage.setItem(kept(id), JSON.stringify(processes));
  }, [tabs]);
  const open = () => {
    const key = Math.max(-1, ...tabs.map((each) => each.key)) + 1;
    setTabs([...tabs, { key, process: null }]);
    setCurrent(key);
  };
  const close = (key: number) => {
    const process = tabs.find((each) => each.key === key)?.process ?? null;
    if (process !== null) {
      // it may have ended by itself a moment ago
      call("POST", `${sandboxPath(id)}/processes/${process}/signal`, { signal: "HUP", tree: true }).catch(() => undefined);
    }
    const left = tabs.filter((each) => each.key !== key);
    setTabs(left);
    if (key === current && left.length) setCurrent(left[left.length - 1]!.key);
  };
  useKeys([{ keys: "+", what: "New terminal", run: open }]);
  return (
    <div class="terminals">
      <div class="tablist" role="tablist" aria-label="Terminals">
        {tabs.map((each, at) => (
          <span key={each.key} role="presentation">
            <button
              type="button"
              role="tab"
              aria-selected={each.key === current}
              aria-controls={`terminal-${each.key}`}
              onClick={() => setCurrent(each.key)}
            >
              Terminal {at + 1}
            </button>
            <button type="button" class="plain" aria-label={`Close terminal ${at + 1}`} onClick={() => close(each.key)}>
              ×
            </button>
          </span>
        ))}
        <button type="button" class="plain" aria-label="New terminal" onClick={open}>
          +
        </button>
        <small class="quiet">Shift Esc leaves it</small>
      </div>
      {tabs.map((each) => (
        <Screen
          key={each.key}
          id={id}
          tab={each}
          shown={each.key === current}
          began={(process) =>
            setTabs((all) => all.map((one) => (one.key === each.key ? { ...one, process } : one)))
          }
        />
      ))}
      {!tabs.length && (
        <p class="quiet">
          No terminal is open. <button type="button" onClick={open}>Open one</button>
        </p>
      )}
    </div>
  );
}

const LIGHT = {
  background: "#fbfcfc", foreground: "#1c2528", cursor: "#0d7480", cursorAccent: "#fbfcfc",
  selectionBackground: "#bfe0e3", black: "#1c2528", red: "#b3261e", green: "#2b7a3d", yellow: "#8a5a00",
  blue: "#1f5fa8", magenta: "#8a3d8f", cyan: "#0d7480", white: "#6b787c", brightBlack: "#56646a",
  brightRed: "#c9362c", brightGreen: "#2f8a45", brightYellow: "#9a6700", brightBlue: "#2a6fc0",
  brightMagenta: "#9c49a1", brightCyan: "#12838f", brightWhite: "#3d4a4e",
};
const DARK = {
  background: "#0e1417", foreground: "#dbe4e6", cursor: "#5cc8d0", cursorAccent: "#0e1417",
  selectionBackground: "#23525a", black: "#26323a", red: "#f28b82", green: "#8fd19e", yellow: "#e3c27a",
  blue: "#8ab4f0", magenta: "#d3a1d8", cyan: "#7fd3d9", white: "#cfd8da", brightBlack: "#71828a",
  brightRed: "#ffaba4", brightGreen: "#aee3b9", brightYellow: "#f2d89a", brightBlue: "#aecbf7",
  brightMagenta: "#e3bfe6", brightCyan: "#a4e4e8", brightWhite: "#f4f7f7",
};

interface ScreenProps {
  id: string;
  tab: Tab;
  shown: boolean;
  began: (process: number | null) => void;
}

function Screen({ id, tab, shown, began }: ScreenProps) {
  const place = useRef<HTMLDivElement>(null);
  const terminal = useRef<Terminal | null>(null);
  const [note, setNote] = useState("connecting …");
  useEffect(() => {
    const wire = new Wire(id, tab.process, place.current!, setNote, began);
    terminal.current = wire.terminal;
    return () => wire.close();
  }, []);
  useEffect(() => {
    if (shown) terminal.current?.focus();
  }, [shown]);
  return (
    <div class="screen" role="tabpanel" id={`terminal-${tab.key}`} hidden={!shown} aria-label="Terminal">
      <div class="place" ref={place} />
      <p class="note" role="status">
        {note}
      </p>
    </div>
  );
}

/** A terminal and its connection, which is made again until the process has ended. */
class Wire {
  readonly terminal: Terminal;
  private readonly fit = new FitAddon();
  private readonly seen: ResizeObserver;
  private socket: WebSocket | null = null;
  private timer: ReturnType<typeof setTimeout> | undefined;
  private wait = 250;
  private over = false;

  constructor(
    private readonly id: string,
    private process: number | null,
    place: HTMLElement,
    private readonly say: (text: string) => void,
    private readonly began: (process: number | null) => void,
  ) {
    this.terminal = new Terminal({
      cursorBlink: false,
      fontFamily: 'ui-monospace, "Cascadia Mono", "SF Mono", Menlo, "DejaVu Sans Mono", monospace',
      fontSize: 13.5,
      lineHeight: 1.25,
      scrollback: 5000,
      theme: isDark() ? DARK : LIGHT,
    });
    this.terminal.loadAddon(this.fit);
    strictly(() => this.terminal.open(place));
    this.terminal.attachCustomKeyEventHandler((event) => {
      if (event.key !== "Escape" || !event.shiftKey) return true;
      if (event.type === "keydown") document.querySelector<HTMLElement>('.tabs [aria-current="page"]')?.focus();
      return false;
    });
    const encoder = new TextEncoder();
    this.terminal.onData((text) => {
      if (this.over && text === "\r") this.anew();
      else this.send(encoder.encode(text));
    });
    this.terminal.onBinary((text) => this.send(Uint8Array.from(text, (each) => each.charCodeAt(0))));
    this.terminal.onResize(({ rows, cols }) => this.sendText({ type: "resize", rows, cols }));
    this.seen = new ResizeObserver(() => place.clientHeight && this.fit.fit());
    this.seen.observe(place);
    addEventListener("skerry-theme", this.recolour);
    this.fit.fit();
    this.terminal.focus();
    this.connect();
  }

  close(): void {
    this.over = true;
    clearTimeout(this.timer);
    this.seen.disconnect();
    removeEventListener("skerry-theme", this.recolour);
    this.socket?.close();
    this.terminal.dispose();
  }

  private readonly recolour = () => {
    this.terminal.options.theme = isDark() ? DARK : LIGHT;
  };

  private connect(): void {
    const { rows, cols } = this.terminal;
    this.say("connecting …");
    const process = this.process;
    const socket = openSocket(`${sandboxPath(this.id)}/terminal${query({ process, rows, cols })}`);
    this.socket = socket;
    socket.onmessage = ({ data }) => {
      if (typeof data === "string") this.hear(JSON.parse(data) as Message);
      else this.terminal.write(new Uint8Array(data as ArrayBuffer));
    };
    socket.onclose = (event) => this.lost(event);
  }

  private hear(told: Message): void {
    if (told.type === "process") {
      this.wait = 250;
      // what is kept of its output comes again
      if (this.process !== null) this.terminal.reset();
      this.process = told.process;
      this.began(told.process);
      this.say("");
      this.sendText({ type: "resize", rows: this.terminal.rows, cols: this.terminal.cols });
    } else if (told.type === "exit") {
      this.over = true;
      this.process = null;
      this.began(null);
      this.say(`It has ended with ${told.exit_code}. Enter begins a new one.`);
    } else if (told.type === "error") {
      this.over = true;
      this.say(`${told.detail} Enter tries again.`);
    }
  }

  private anew(): void {
    this.over = false;
    this.process = null;
    this.terminal.reset();
    this.connect();
  }

  private lost(event: CloseEvent): void {
    if (this.over) return;
    if (event.code === 4404 && this.process !== null) {
      this.process = null; // the process of an earlier visit is gone: begin anew
      this.connect();
    } else if (event.code >= 4400 && event.code < 4429) {
      this.over = true;
      this.say(`${event.reason || "The server refused."} Enter tries again.`);
    } else {
      this.say("connection lost, trying again …");
      this.timer = setTimeout(() => this.connect(), this.wait);
      this.wait = Math.min(this.wait * 2, 8000);
    }
  }

  private send(bytes: Uint8Array<ArrayBuffer>): void {
    if (this.socket?.readyState === WebSocket.OPEN) this.socket.send(bytes);
  }

  private sendText(message: object): void {
    if (this.socket?.readyState === WebSocket.OPEN) this.socket.send(JSON.stringify(message));
  }
}

type Message =
  | { type: "process"; process: number | null }
  | { type: "exit"; exit_code: number }
  | { type: "error"; detail: string };
