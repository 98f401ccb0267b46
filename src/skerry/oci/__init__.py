"""Sources of images: archives, OCI layouts and root file systems, read with suspicion and packed for an engine.

`upload` is for those who send one, `roots` for those who want its files, `packing` for tars in general.
"""
