"""Does a model keep packed samples apart? Tried on a tiny model of its configuration, not read from a list.

config --tiny model--> samples in one row, against each alone: logits and gradients --> Verdict, kept on disk
"""
