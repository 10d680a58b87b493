"""One job: its directory, what is done with it, and how it is shown."""
