// Each part of E2B's SDK for Node once, in one sandbox: commands, files, a watch, a terminal.
import assert from 'node:assert/strict'
import { Sandbox } from 'e2b'

const sandbox = await Sandbox.create({ timeoutMs: 60_000, metadata: { of: 'smoke' } })
try {
  const done = await sandbox.commands.run('echo hello; echo bad >&2')
  assert.deepEqual([done.exitCode, done.stdout, done.stderr], [0, 'hello\n', 'bad\n'])

  await sandbox.files.write('a.txt', 'from node')
  assert.equal(await sandbox.files.read('a.txt'), 'from node')

  const seen = new Promise((resolve) => sandbox.files.watchDir('.', resolve))
  await new Promise((resolve) => setTimeout(resolve, 500))
  await sandbox.files.write('b.txt', 'x')
  assert.equal((await seen).name, 'b.txt')

  let shown = ''
  const onData = (data) => { shown += Buffer.from(data).toString() }
  const terminal = await sandbox.pty.create({ cols: 80, rows: 24, onData })
  await sandbox.pty.sendInput(terminal.pid, new TextEncoder().encode('echo p$((1+1))y; exit\n'))
  await terminal.wait()
  assert.match(shown, /p2y/)

  const listed = await Sandbox.list({ query: { metadata: { of: 'smoke' } } }).nextItems()
  assert.deepEqual(listed.map((each) => each.sandboxId), [sandbox.sandboxId])
} finally {
  assert.equal(await sandbox.kill(), true)
}
assert.equal(await sandbox.kill(), false)
console.log('E2B for Node: all that was tried works')
process.exit(0)
