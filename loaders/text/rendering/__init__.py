"""Chats under a model's own template: what it takes, what it writes, and that it leaves nothing out."""
