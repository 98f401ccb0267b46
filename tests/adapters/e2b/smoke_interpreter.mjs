// The newest SDK of E2B's code interpreter for Node: what it runs, remembers, shows and forgets.
import assert from 'node:assert/strict'
import { Sandbox } from '@e2b/code-interpreter'

const sandbox = await Sandbox.create({ timeoutMs: 60_000 })
try {
  const lines = []
  await sandbox.runCode('x = 6\nfor n in range(2): print(n)', { onStdout: (each) => lines.push(each.line) })
  assert.equal(lines.join(''), '0\n1\n')
  assert.equal((await sandbox.runCode('x * 7')).text, '42')
  const failed = await sandbox.runCode('1 / 0')
  assert.equal(failed.error.name, 'ZeroDivisionError')

  const context = await sandbox.createCodeContext({ language: 'bash', cwd: '/tmp' })
  assert.deepEqual((await sandbox.runCode('pwd', { context })).logs.stdout, ['/tmp\n'])
  assert.ok((await sandbox.listCodeContexts()).some((each) => each.id === context.id))
  await sandbox.removeCodeContext(context)

  await assert.rejects(sandbox.runCode('import time; time.sleep(600)', { timeoutMs: 1000 }))
  assert.equal((await sandbox.runCode('x')).text, '6')
} finally {
  assert.equal(await sandbox.kill(), true)
}
console.log('E2B\'s code interpreter for Node: all that was tried works')
process.exit(0)
