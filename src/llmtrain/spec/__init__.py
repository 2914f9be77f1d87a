"""What the user wants: hostfile, run file, data format, DeepSpeed configuration. Pure, but for ``read_`` functions."""
