"""The loop: steps are streamed, delivered in order, and each carries the position after it."""
