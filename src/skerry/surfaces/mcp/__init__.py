"""The Model Context Protocol: `server.serve` is the entry, `server.CallLimits` its bounds. Needs the package mcp."""
