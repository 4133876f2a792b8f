"""Tables of benchmarks/*.md, written from the stored reports of benchmarks.

    benchmark --json--> benchmarks/results/NAME.json --tables.py--> a table in Markdown --pages.py--> between markers

A stored report is what a benchmark prints with `--json`: command, configuration, machine with versions,
results, tables.
"""
