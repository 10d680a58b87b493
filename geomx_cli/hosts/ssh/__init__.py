"""Connector for hosts behind SSH, based on paramiko."""
