"""The Model Context Protocol, for one client on standard streams (`server.serve`) and for tokens over HTTP
(`http.McpEndpoint`), with the same tools. Needs the package mcp."""
