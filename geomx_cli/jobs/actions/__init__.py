"""Actions on a job: launch, attach, read logs, collect logs, stop."""
