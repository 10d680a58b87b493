"""What is known of a job while it runs and afterwards: its processes, rounds and failures, and how that is shown."""
