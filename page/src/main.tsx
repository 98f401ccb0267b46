// The page of skerry's server.
import { render } from "preact";
import { useEffect, useState } from "preact/hooks";
import { get, onSignedOut, setToken, takeTokenFromLink, token } from "./api";
import { CreateView } from "./create";
import { EventsView } from "./events";
import { FleetsView } from "./fleets";
import { HealthView } from "./health";
import { HelpDialog } from "./help";
import { go, message, path, useKeys, useRoute } from "./hooks";
import { LedgerView } from "./ledger";
import { ListView } from "./list";
import { live } from "./live";
import { Notice } from "./parts";
import { PoolsView } from "./pools";
import { SandboxView } from "./sandbox";
import { applyTheme, nextTheme, themeName } from "./theme";
import type { WhoAmI } from "./types";

const SECTIONS: [string, string, string][] = [
  ["sandboxes", "Sandboxes", "s"],
  ["fleets", "Fleets", "f"],
  ["pools", "Pools", "p"],
  ["health", "Health", "h"],
  ["ledger", "Ledger", "l"],
  ["events", "Events", "e"],
];

function View({ route }: { route: string[] }) {
  const [section = "sandboxes", first, second, ...rest] = route;
  if (section === "sandboxes" && first) return <SandboxView key={first} id={first} tab={second ?? "terminal"} rest={rest} />;
  if (section === "new") return <CreateView />;
  if (section === "fleets") return <FleetsView name={first} />;
  if (section === "pools") return <PoolsView />;
  if (section === "health") return <HealthView />;
  if (section === "ledger") return <LedgerView />;
  if (section === "events") return <EventsView />;
  return <ListView />;
}

function App() {
  const [who, setWho] = useState<WhoAmI | null>(null);
  const [isIn, setIn] = useState(token() !== null);
  const [help, setHelp] = useState(false);
  const [theme, setTheme] = useState(themeName());
  const route = useRoute();
  const section = route[0] === "new" ? "sandboxes" : (route[0] ?? "sandboxes");

  const signOut = () => {
    setToken(null);
    live.close();
    setWho(null);
    setIn(false);
  };
  useEffect(() => onSignedOut(signOut), []);
  useEffect(() => {
    if (!isIn) return;
    live.start();
    get<WhoAmI>("/whoami").then(setWho, () => undefined);
    return () => live.close();
  }, [isIn]);
  useEffect(() => {
    const changed = () => {
      takeTokenFromLink();
      setIn(token() !== null);
    };
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  const turn = () => setTheme(nextTheme());
  useKeys([
    ...SECTIONS.map(([id, title, key]) => ({ keys: `g ${key}`, what: `Go to ${title}`, run: () => go(id) })),
    { keys: "n", what: "New sandbox", run: () => go("new") },
    { keys: "t", what: "Light, dark, or as the system has it", run: turn },
    { keys: "?", what: "These shortcuts", run: () => setHelp(true) },
  ]);

  if (!isIn) return <SignIn then={() => setIn(true)} />;
  return (
    <div class="frame">
      <a class="skip" href="#main" onClick={(event) => (event.preventDefault(), document.getElementById("main")?.focus())}>
        Skip to content
      </a>
      <header class="side">
        <a class="brand" href={path("sandboxes")}>
          <Mark /> skerry
        </a>
        <nav aria-label="Sections">
          {SECTIONS.map(([id, title]) => (
            <a key={id} href={path(id)} aria-current={id === section ? "page" : undefined}>
              {title}
            </a>
          ))}
        </nav>
        <div class="foot">
          <p class="who" title={who?.scopes?.join(", ")}>
            {who && (
              <>
                <b>{who.tenant ?? "admin"}</b>
                <span>{who.actor}</span>
              </>
            )}
          </p>
          <button type="button" class="plain" onClick={turn} aria-label={`Theme: ${theme}. Change`}>
            {theme === "auto" ? "◐ auto" : theme === "dark" ? "● dark" : "○ light"}
          </button>
          <button type="button" class="plain" onClick={() => setHelp(true)} aria-label="Keyboard shortcuts">
            ? keys
          </button>
          <button type="button" class="plain" onClick={signOut}>
            Sign out
          </button>
        </div>
      </header>
      <main id="main" tabIndex={-1}>
        <View route={route} />
      </main>
      {help && <HelpDialog close={() => setHelp(false)} />}
    </div>
  );
}

function Mark() {
  return (
    <svg viewBox="0 0 32 32" aria-hidden="true">
      <rect width="32" height="32" rx="7" />
      <path class="rock" d="M5 20 11.500 10l4 5.500L19 11l8 9z" />
      <path class="sea" d="M5 24.500q2.750-2.200 5.500 0t5.500 0 5.500 0 5.500 0" />
    </svg>
  );
}

function SignIn({ then }: { then: () => void }) {
  const [text, setText] = useState("");
  const [error, setError] = useState("");
  const [busy, setBusy] = useState(false);
  const submit = async (event: Event) => {
    event.preventDefault();
    setBusy(true);
    setToken(text.trim());
    try {
      await get("/sandboxes?limit=1");
      then();
    } catch (failure) {
      setToken(null);
      setError(message(failure));
    }
    setBusy(false);
  };
  return (
    <main class="signin">
      <form onSubmit={submit}>
        <h1>
          <Mark /> skerry
        </h1>
        <label for="token">Token</label>
        <input
          id="token"
          type="password"
          autocomplete="off"
          spellcheck={false}
          autofocus
          value={text}
          onInput={(event) => setText(event.currentTarget.value)}
        />
        {error && <Notice kind="error">{error}</Notice>}
        <button type="submit" class="primary" disabled={busy || !text.trim()}>
          Sign in
        </button>
        <p class="quiet">
          <code>skerry token create</code> makes one. It is kept in this tab alone, until you close it.
        </p>
      </form>
    </main>
  );
}

takeTokenFromLink();
applyTheme();
render(<App />, document.getElementById("root")!);
