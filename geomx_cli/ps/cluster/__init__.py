"""Who belongs to the job: members, their health, and who holds which slice."""
