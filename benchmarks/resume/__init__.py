"""Training that is stopped and resumed, by this library and by other loaders, with the same samples and the same model.

run.py --tars of each kind--> prepare.py --formats of the loaders--> job.py under torchrun, once for each run:
    10 steps on 2 ranks | 5 steps on 2 ranks, saved | 5 more on 2, on 1 and on 4 ranks --> losses, keys --> a table
"""
