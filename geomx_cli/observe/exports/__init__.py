"""Exports of metrics: TensorBoard event files, Prometheus metrics, runs of W&B and MLflow. Each needs its extra."""
