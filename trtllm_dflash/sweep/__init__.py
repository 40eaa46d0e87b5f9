"""Throughput at a fixed latency: the load generator, its targets, results and reports."""
