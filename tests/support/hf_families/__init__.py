"""Families of Hugging Face models: the real processor and a small random model of each, and what they make of
samples.
"""
