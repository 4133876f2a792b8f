"""Versions of what is kept: raising one makes everything of the version before be made again."""

FACTS_FORMAT = 3
"""How facts files are laid out: their head and their table."""

TABLE_FORMAT = 4
"""How tables of costs and the merged index are laid out."""

RULES = 9
"""How verdicts are reached: raised with whatever makes the same shard, under the same recipe, yield other facts, other
costs or other errors. It is in everything kept, and in the identity of a dataset that states carry."""
