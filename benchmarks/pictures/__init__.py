"""The pictures of the README, from figures of `benchmarks/results`, and of docs/balancing.md (`balancing.py`).

real lengths --loads.py--> results/loads.json --draw.py--> docs/pictures/loads.svg
training --loss_curves.py--> results/loss_curves.json --draw.py--> docs/pictures/loss_curves.svg
"""
