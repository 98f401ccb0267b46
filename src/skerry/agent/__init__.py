"""The agent in the box (`guest`) and the host's end of its stream (`client`, `stream`, `dial`)."""
