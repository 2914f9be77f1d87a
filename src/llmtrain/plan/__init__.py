"""What a run will need and how fast it will be, by arithmetic alone: no torch, no accelerator, no host."""
