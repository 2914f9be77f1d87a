"""What runs on every rank; staged to the hosts, needs only what the training environment has."""
