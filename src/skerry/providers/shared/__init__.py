"""Shared by the providers whose boxes are containers: their layout, limits, filter, volumes and dialling.

Other providers take from here what fits them; nobody but providers imports it.
"""
