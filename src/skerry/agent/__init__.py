"""Agents of boxes: the host's client (`client`, `call`), connections (`tunnel`) and wishes for them (`network`), whole
trees of files (`transfers`), and the bundle that brings an agent into a box (`bundle`, `collect`). PROTOCOL.md is what
both ends speak; `guest` is the program in the box.
"""
