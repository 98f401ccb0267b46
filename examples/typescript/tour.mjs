// What a client does with a sandbox: SKERRY_URL=... SKERRY_TOKEN=... node --experimental-websocket tour.mjs
// (the flag is for Node 20; later ones have WebSocket without it)
import { bytesOf, Skerry, SkerryError } from "./skerry.mjs";

const { SKERRY_URL: url, SKERRY_TOKEN: token } = process.env;
if (!url || !token) throw new Error("set SKERRY_URL and SKERRY_TOKEN");
const skerry = new Skerry(url, token);
const sandbox = await skerry.sandboxes.create({ lifetime: "10m", labels: { made: "by the tour" } });
try {
  // a command, and what it said
  const { exit_code, stdout } = await skerry.exec.run(sandbox.id, { command: ["echo", "hello"] });
  console.log("exec:", exit_code, stdout.trim());

  // one whose output is seen as it comes
  const text = new TextDecoder();
  for await (const { event, data } of skerry.exec.stream(sandbox.id, { command: "for n in 1 2 3; do echo $n; done; exit 4" })) {
    if (event === "stdout") for (const line of text.decode(bytesOf(data)).split("\n").filter(Boolean)) console.log("stream:", line);
    if (event === "exit") console.log("stream ended:", data.exit_code);
  }

  // files, as bytes
  const content = new Uint8Array([0, 255, 10, 200]);
  await skerry.files.write(sandbox.id, content, { path: "a file.bin" });
  const read = await skerry.files.read(sandbox.id, { path: "a file.bin" });
  console.log("file:", new Uint8Array(await read.arrayBuffer()).join(" "));
  const { items } = await skerry.files.list(sandbox.id, { path: "." });
  console.log("listed:", items.some(({ name }) => name === "a file.bin"));

  // a terminal
  const terminal = skerry.terminal(sandbox.id, { command: ["sh"], rows: 30, cols: 100 });
  await terminal.resize(40, 120);
  await terminal.write("stty size; exit 3\n");
  let screen = "";
  for await (const shown of terminal) screen += new TextDecoder().decode(shown);
  console.log("terminal:", /\b40 120\b/.test(screen), (await terminal.exit).exit_code);

  // a refusal
  await skerry.sandboxes.show("nothing-of-this-name").catch((error) => {
    console.log("refused:", error instanceof SkerryError, error.status, error.code);
  });
} finally {
  await skerry.sandboxes.destroy(sandbox.id);
}
const left = await skerry.sandboxes.list({ label: ["made=by the tour"] });
console.log("left:", left.items.length);
