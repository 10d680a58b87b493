"""Exports of a job's metrics: TensorBoard event files, Prometheus metrics. Each needs its extra."""
