"""The handle of a sandbox, with its files, processes and ports: all calls to the agent begin here.

Programs hold `sandbox.AsyncSandbox`; `connection` is for parts of skerry that speak to agents themselves.
"""
