"""The values that all parts share: specs, results, records and states. They do nothing and know nobody.

All of it may be used from everywhere; what is public is exported by `skerry`.
"""
