"""What a user does with a job: launch it, attach to it, read its logs, collect them, stop it."""
