"""Commands of the command line that have a file of their own; :mod:`llmtrain.cli` registers them."""
