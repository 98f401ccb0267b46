"""First process of virtual machines: its calls, drives and groups, the agents that it forks, and its channel.

The warden on the host imports `multiplexer` and `socket_pair` as well.
"""
