"""The pictures of the README and of docs, from `benchmarks/results`, and the plots of benchmarks/balancing.md.

real lengths --loads.py--> results/loads.json --draw.py--> docs/pictures/loads.svg
training --loss_curves.py--> results/loss_curves.json --draw.py--> docs/pictures/loss_curves.svg
real lengths --drawn_plans.py--> results/drawn_plans.json --diagrams/--> the other docs/pictures
measurements --balancing.py--> docs/plots
"""
