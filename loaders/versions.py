"""Versions of stored files: after an increase, everything of an older version is built again."""

FACTS_FORMAT = 3
"""Layout of facts files: their head and their table."""

TABLE_FORMAT = 4
"""Layout of cost tables and of the merged index."""

FIELDS_FORMAT = 1
"""Layout of files with the user's own columns of a shard, and of a data set."""

RULES = 9
"""How samples are judged: increased by each change after which the same shard, under the same recipe, has other facts,
costs or errors. It is stored in every file, and in the identity of a dataset in states."""
