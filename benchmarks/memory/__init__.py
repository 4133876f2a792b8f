"""Memory of the training process and of a worker process, while a mixture of many small sources is read.

run.py --two tars a source--> a fresh process for each loader and number of sources: reading.py --> figures --> a table
"""
