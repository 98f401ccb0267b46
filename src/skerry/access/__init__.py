"""Access to a server: tenants and tokens, kept in the registry.

`Access` in `access.py` is for use from outside; what tenants and tokens are stands in `model/tenants.py`.
"""
