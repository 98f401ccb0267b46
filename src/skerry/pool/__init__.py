"""Pools: sandboxes that are ready before they are asked for, and claims of them across programs.

From outside: `pool.AsyncSandboxPool`, `claim.claim` and `claim.claim_or_create`, `claim.is_warm`.
"""
