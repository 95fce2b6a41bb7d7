"""What the benchmark programs share: the calls that they measure, and a module per backend."""
