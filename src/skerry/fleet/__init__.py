"""Fleets: many sandboxes of one file, started in phases, seen and commanded as one, with the registry as only memory.

From outside: `fleet.AsyncFleet` and `load_fleet`, the structs of `model`, `plan`, `status` and `events`.
"""
