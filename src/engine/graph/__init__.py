"""Decode graphs: which batch sizes are captured (buckets) and how they are captured and replayed (graphs)."""
