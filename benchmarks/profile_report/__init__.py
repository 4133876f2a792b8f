"""CPU time, memory and size of a report, compared with the profile at an older commit.

    made-up index --one process each, in turn--> profile at --before; profile and page now
    made-up mixture --one process--> profile and page

`one.py` is a program that runs with the package of either commit.
"""
