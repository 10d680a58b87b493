"""A job's figures in other people's forms: TensorBoard's event files, Prometheus's metrics. Each needs its extra."""
