"""What the cache folder keeps: all kinds of files, who uses them, a list of them, and their removal."""
