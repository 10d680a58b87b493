"""Presentation of a job's events and records: live page, reports, exports to other tools."""
