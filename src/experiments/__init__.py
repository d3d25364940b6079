"""Running, measuring and comparing engines: configuration, child processes, metrics, tracking, tables and plots."""
