// The shortcuts that work where one is.
import { shortcuts } from "./hooks";
import { Dialog } from "./parts";

const ALWAYS: [string, string][] = [
  ["Tab", "Next control"],
  ["↑ ↓ Home End", "Move in a list"],
  ["Enter", "Open"],
  ["Shift Esc", "Leave a terminal"],
  ["Esc", "Close"],
];

export function HelpDialog({ close }: { close: () => void }) {
  const rows: [string, string][] = [...shortcuts().map(({ keys, what }): [string, string] => [keys, what]), ...ALWAYS];
  return (
    <Dialog title="Keyboard" close={close}>
      <dl class="keys">
        {rows.map(([keys, what]) => (
          <div key={keys + what}>
            <dt>
              {keys.split(" ").map((key) => (
                <kbd key={key}>{key}</kbd>
              ))}
            </dt>
            <dd>{what}</dd>
          </div>
        ))}
      </dl>
      <div class="row end">
        <button type="button" autofocus onClick={close}>
          Close
        </button>
      </div>
    </Dialog>
  );
}
