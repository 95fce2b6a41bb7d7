"""Training: the state, one jitted step, the loop around it, its checkpoints and what it reports."""
