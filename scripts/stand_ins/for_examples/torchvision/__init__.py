"""Stands in for torchvision where public_scripts.py runs public scripts: made-up data, small models."""
