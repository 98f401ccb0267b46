"""REST under /v1: each file is a noun with its routes, which translate to calls of the manager and back.

`ALL` in `routes.py` lists the nouns; `route.py` says how a function becomes a route and a part of the OpenAPI document.
"""
