"""The bench: tasks, runs, reports and the command line."""
