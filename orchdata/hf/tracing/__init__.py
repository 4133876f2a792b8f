"""What a model multiplies, found by running it without its numbers.

config --model--> modules without memory --media, text of several lengths--> products --shapes--> operations a position
"""
