"""Trainers of others over a DataLoader: transformers' Trainer, and Accelerate."""
