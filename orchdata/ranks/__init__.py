"""Ranks among themselves: who they are, what they must agree on, and what travels between them."""
