"""Hosts behind SSH, over paramiko."""
