"""From a study to its report: plan the runs, make them, and say what their numbers support."""
