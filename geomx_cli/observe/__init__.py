"""What a job's events and records show: live in a page, in reports, and in other tools' forms."""
