"""Every family of the installed transformers that has a processor, built offline: default settings, tokens made up."""
