// `node node_kernel.js`: a JavaScript that remembers, for a context. JSON lines on the descriptor 3: code in, events out.
// It remembers as Node's own REPL does, with `await` at the top.
"use strict";
const fs = require("fs");
const net = require("net");
const repl = require("repl");
const stream = require("stream");
const util = require("util");
const vm = require("vm");

const WIRE = 3;
const send = (event, fields = {}) => {
  let left = Buffer.from(JSON.stringify({ ...fields, event }) + "\n");
  while (left.length) {
    try {
      left = left.subarray(fs.writeSync(WIRE, left));
    } catch (error) {
      if (error.code !== "EAGAIN") throw error;
      Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 1);
    }
  }
};

const silent = new stream.Writable({ write: (_chunk, _encoding, done) => done() });
const inner = repl.start({
  input: new stream.PassThrough(),
  output: silent,
  terminal: false,
  prompt: "",
  useGlobal: true,
});
inner.removeAllListeners("SIGINT");

const show = (event, value) => {
  const data = { "text/plain": typeof value === "string" ? value : util.inspect(value) };
  if (typeof value === "object" && value !== null) {
    for (const [media, text] of Object.entries(value)) {
      if (/^[a-z]+\/[a-z0-9.+-]+$/.test(media) && typeof text === "string") data[media] = text;
    }
  }
  send(event, { data, metadata: {} });
};
global.display = (...values) => values.forEach((value) => show("display", value));

let settle = null;
const interrupted = () => {
  const error = new Error("the code was interrupted");
  error.name = "KeyboardInterrupt";
  return error;
};
const onInterrupt = () => settle && settle(interrupted());
process.on("SIGINT", onInterrupt);
inner._domain.removeAllListeners("error"); // where the REPL takes what code throws, and prints it
inner._domain.on("error", (error) => (settle ? settle(error) : console.error(error)));
process.on("uncaughtException", (error) => {
  if (settle) settle(error);
  else console.error(error);
});
process.on("unhandledRejection", (error) => console.error(error));

const NAMES = /^(?:([\w$]+)\s*,?\s*)?(?:\*\s+as\s+([\w$]+)|\{([^}]*)\})?$/;
const imports = (code) =>
  code.replace(/^[ \t]*import\s+(?:([^'";]+?)\s+from\s+)?(['"][^'"]+['"])[ \t]*;?/gm, (whole, names, from) => {
    if (!names) return `await import(${from});`;
    const found = NAMES.exec(names.trim());
    if (!found) return whole;
    const [, one, all, some] = found;
    const parts = one ? [`default: ${one}`] : [];
    if (some) parts.push(some.replace(/\s+as\s+/g, ": "));
    return (
      (all ? `var ${all} = await import(${from});` : "") +
      (parts.length ? `var { ${parts.join(", ")} } = await import(${from});` : "")
    );
  });

const loader = vm.constants && vm.constants.USE_MAIN_CONTEXT_DEFAULT_LOADER;
const compile = (code, filename) => new vm.Script(code, { filename, importModuleDynamically: loader });
const scriptOf = (code, filename) => {
  if (/^\s*\{[^]*\}\s*$/.test(code)) {
    try {
      return compile(`(${code})`, filename); // an object, and not a block
    } catch {}
  }
  try {
    return compile(code, filename);
  } catch (error) {
    if (!/\bawait\b/.test(code)) throw error;
    return null;
  }
};

const evaluate = (source, name) =>
  new Promise((resolve, reject) => {
    settle = reject;
    const code = imports(source);
    const script = scriptOf(code, name);
    if (script) resolve(script.runInThisContext({ breakOnSigint: true, displayErrors: false }));
    else inner.eval(code + "\n", inner.context, name, (error, value) => (error ? reject(error) : resolve(value)));
  });

const run = async ({ code, number, env, added }) => {
  Object.assign(process.env, added);
  const before = Object.keys(env).map((name) => [name, process.env[name]]);
  Object.assign(process.env, env);
  if (!process.listeners("SIGINT").includes(onInterrupt)) process.on("SIGINT", onInterrupt);
  send("started");
  let status = "ok";
  try {
    const value = await evaluate(code, `cell ${number}`);
    if (value !== undefined) show("result", value);
  } catch (thrown) {
    let error = thrown instanceof Error || (thrown && thrown.stack) ? thrown : new Error(util.inspect(thrown));
    if (error.code === "ERR_SCRIPT_EXECUTION_INTERRUPTED") error = interrupted();
    status = "error";
    const traceback = String(error.stack || error).split(/\n    at (?:REPL|sigintHandlersWrap|Script\.|ContextifyScript)/)[0].slice(0, 65536);
    send("error", { name: String(error.name), value: String(error.message).slice(0, 65536), traceback });
  } finally {
    settle = null;
    for (const [name, value] of before) {
      if (value === undefined) delete process.env[name];
      else process.env[name] = value;
    }
  }
  send("done", { status });
};

let received = "";
let work = Promise.resolve();
const wire = new net.Socket({ fd: WIRE, readable: true, writable: false });
wire.setEncoding("utf8");
wire.on("data", (text) => {
  received += text;
  const lines = received.split("\n");
  received = lines.pop();
  for (const line of lines) work = work.then(() => run(JSON.parse(line)));
});
wire.on("end", () => process.exit(0));
send("ready");
