"""The ledger: an append-only, hash-chained file of all that was done with sandboxes, on the host."""
