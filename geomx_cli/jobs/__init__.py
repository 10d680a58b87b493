"""A job: its directory, the actions on it, and its views."""
